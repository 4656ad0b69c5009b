"""A DEST holds what one set of options gives, whatever else was started there before, at the same time or since."""

import errno
import multiprocessing
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from data_prep.converting.conversion import Options, convert
from data_prep.converting.filters import condition
from data_prep.encoding.dataset import encode
from data_prep.mds import command
from data_prep.mds.job import Share
from diffusion.common.processes import shared_memory_is_full
from diffusion.common.storage import open_folder
from diffusion.contracts.errors import DataError, IncompleteError
from diffusion.recipe.schema import EncoderSource
from tests.conftest import NUM_IMAGES, REPOSITORY, read_json
from tests.data_prep.test_convert import jpeg, read, write_webdataset

ALL, LARGE = Options(), Options(min_side_px=64)


@pytest.fixture
def source(tmp_path):
    """Eight images, every other one large; two parts."""
    rows = [(f'{i:09d}', f'caption {i}', jpeg(*((48, 48), (80, 80))[i % 2], seed=i), 'success') for i in range(8)]
    return write_webdataset(tmp_path / 's', rows, per_shard=4)


def test_a_second_command_with_other_filters_is_refused_while_the_first_works_on_its_first_part(tmp_path):
    rows = [(f'{i:09d}', f'caption {i}', jpeg(48, 48, seed=i), 'success') for i in range(400)]
    source, out = write_webdataset(tmp_path / 's', rows, per_shard=400), tmp_path / 'out'
    first = subprocess.Popen([sys.executable, '-m', 'data_prep.convert', source, out, '--processes', '1'], cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    while not (out / 'job.json').exists() and first.poll() is None:
        time.sleep(0.005)
    with pytest.raises(DataError, match=r'was begun with min_side_px=1, now it is 64; .* remove .*out/job.json and start again'):
        convert(source, out, LARGE)
    assert first.wait() == 0
    assert len(read(out)) == 400


def one_of(source, out, side_px, barrier, answers):
    barrier.wait()
    try:
        answers.put((side_px, convert(source, out, Options(min_side_px=side_px)).kept))
    except DataError as error:
        answers.put((side_px, str(error)))


def test_of_commands_started_at_the_same_instant_one_wins(source, tmp_path):
    context, sides = multiprocessing.get_context('fork'), range(1, 80, 13)
    for round in range(3):
        out = tmp_path / f'out{round}'
        barrier, answers = context.Barrier(len(sides)), context.Queue()
        processes = [context.Process(target=one_of, args=(source, out, side_px, barrier, answers)) for side_px in sides]
        for process in processes:
            process.start()
        found = dict(answers.get(timeout=60) for _ in sides)
        for process in processes:
            process.join()
        (winner,) = (side_px for side_px, answer in found.items() if isinstance(answer, int))
        assert all(f'was begun with min_side_px={winner}' in answer for side_px, answer in found.items() if side_px != winner)
        assert read_json(out / 'job.json')['min_side_px'] == winner
        assert min(sample['width'] for sample in read(out).values()) >= winner


def test_of_commands_started_at_the_same_instant_in_object_storage_one_wins(s3, source):
    barrier = threading.Barrier(4)

    def begin(side_px):
        barrier.wait()
        try:
            return convert(source, 's3://bucket/images', Options(min_side_px=side_px)).kept
        except DataError as error:
            return str(error)

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(begin, (1, 10, 20, 64)))
    assert len([answer for answer in answers if isinstance(answer, int)]) == 1, answers


def begun_by(options, source, out, other):
    """A DEST with the parts of a job with other options, which a process that was still at work has put there."""
    convert(source, out, other)
    for name in ('manifest.json', 'index.json', 'failures.parquet'):
        (out / name).unlink()
    convert(source, out.with_name('alone'), options)
    shutil.copy(out.with_name('alone') / 'job.json', out / 'job.json')


def test_parts_written_with_other_settings_are_written_again(source, tmp_path, capsys):
    begun_by(LARGE, source, tmp_path / 'out', ALL)
    tally = convert(source, tmp_path / 'out', LARGE)
    assert (tally.attempted_now, tally.kept) == (8, 4)
    assert 'part 00000 was written with other settings and is written again' in capsys.readouterr().err
    assert read(tmp_path / 'out') == read(tmp_path / 'alone')


def test_parts_written_with_other_settings_are_not_merged(source, tmp_path):
    begun_by(LARGE, source, tmp_path / 'out', ALL)
    with pytest.raises(IncompleteError, match='part 00001 was written with other settings'):
        convert(source, tmp_path / 'out', LARGE, share=Share(0, 2))  # finds its own part, writes it again, and would merge
    assert not (tmp_path / 'out/manifest.json').exists()
    assert convert(source, tmp_path / 'out', LARGE, share=Share(1, 2)).kept == 4


def test_opt_outs_hold_although_another_job_is_there(source, tmp_path):
    """Copies of what is on the list go with it, which digests decide that another job has not written."""
    copies = [(f'{i:09d}', 'the same', jpeg(seed=i // 4), 'success') for i in range(8)]
    source = write_webdataset(tmp_path / 'copies', copies, per_shard=4)
    (tmp_path / 'optouts.txt').write_text('000000000\n')
    listed = Options(skip_list=str(tmp_path / 'optouts.txt'), duplicates='exact')
    begun_by(listed, source, tmp_path / 'out', Options(duplicates='exact'))
    assert list(read(tmp_path / 'alone')) == ['000000004']
    convert(source, tmp_path / 'out', listed)
    assert list(read(tmp_path / 'out')) == ['000000004']


def test_a_process_whose_dest_is_another_jobs_by_now_puts_nothing_there(source, tmp_path, monkeypatch):
    from data_prep.converting.conversion import Conversion

    convert(source, tmp_path / 'new', LARGE)
    keep, out = Conversion._keep, tmp_path / 'out'

    def slow(*args, **kwargs):  # meanwhile the folder is removed, and begun with other options
        shutil.copy(tmp_path / 'new/job.json', out / 'job.json')
        return keep(*args, **kwargs)

    monkeypatch.setattr(Conversion, '_keep', slow)
    with pytest.raises(DataError, match='was begun with min_side_px=64, now it is 1'):
        convert(source, out, ALL)
    assert [name for name in open_folder(out).files() if name != 'job.json'] == []


@pytest.mark.parametrize('where', ['local', 's3'])
def test_a_dest_in_which_nothing_was_kept_is_begun_with_other_options(where, request, source, tmp_path):
    out = tmp_path / 'out'
    if where == 's3':
        request.getfixturevalue('s3')
        out = 's3://bucket/out'
    nothing = Options(min_side_px=1000, duplicates='exact')
    assert convert(source, out, nothing).kept == 0
    assert convert(source, out, nothing).attempted_now == 0  # the same again is the same
    assert convert(source, out, Options(min_side_px=64, duplicates='exact')).kept == 4
    with pytest.raises(DataError, match='was begun with min_side_px=64, now it is 1; name another DEST$'):
        convert(source, out, Options(duplicates='exact'))


def test_a_source_of_other_parts_takes_the_place_of_nothing(source, tmp_path):
    (tmp_path / 'one').mkdir()
    convert(source, tmp_path / 'out', Options(min_side_px=1000))
    for name in ('00000.tar', '00000.parquet'):
        shutil.copy2(source / name, tmp_path / 'one')
    assert convert(tmp_path / 'one', tmp_path / 'out').kept == 4


def test_an_option_put_right_begins_the_same_dest(source, tmp_path):
    with pytest.raises(DataError, match='no column punsave'):
        convert(source, tmp_path / 'out', Options(conditions=(condition('punsave < 1'),)))
    assert convert(source, tmp_path / 'out', LARGE).kept == 4


def test_encode_begins_again_where_nothing_was_kept(images, encoders_folder, tmp_path):
    location = EncoderSource(str(encoders_folder))
    assert encode(images, tmp_path / 'out', [64], location).kept == 0
    assert encode(images, tmp_path / 'out', [16], location).kept == NUM_IMAGES
    with pytest.raises(DataError, match=r'was begun with resolution=\[16\]'):
        encode(images, tmp_path / 'out', [32], location)


def test_a_part_whose_name_no_disk_holds_is_refused_before_the_work(source, tmp_path):
    inside = tmp_path / 'deep' / ('f' * 150)
    inside.mkdir(parents=True)
    shutil.copytree(source, inside / ('g' * 150))
    with pytest.raises(DataError, match='with 307 bytes; names of files end at 255, of parts at 200: shorten'):
        convert(tmp_path / 'deep', tmp_path / 'out')
    assert not (tmp_path / 'out').exists()


def test_a_full_shared_memory_is_named_and_not_dest(tmp_path, monkeypatch, capsys):
    def full():
        raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(command, 'shared_memory_is_full', lambda: True)
    assert command.exit_code(str(tmp_path), full) == 3
    assert '/dev/shm' in capsys.readouterr().err
    monkeypatch.undo()
    assert not shared_memory_is_full(str(tmp_path))
    assert shared_memory_is_full(str(tmp_path), least_bytes=1 << 60)
    monkeypatch.setattr(command, 'shared_memory_is_full', lambda: False)
    assert command.exit_code(str(tmp_path), full) == 3
    assert str(tmp_path) in capsys.readouterr().err
