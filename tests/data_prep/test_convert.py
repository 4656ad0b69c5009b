import contextlib
import io
import json
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from streaming import LocalDataset

from data_prep.convert import aspect_ratio, main
from data_prep.converting.conversion import Options, convert
from diffusion.contracts.errors import DataError
from diffusion.contracts.manifest import Manifest
from tests.conftest import REPOSITORY, run_here


def jpeg(width=40, height=30, seed=0):
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, 'JPEG')
    return buffer.getvalue()


ROWS = [  # (key, caption, image, img2dataset's status)
    ('000000000', 'a whole image', jpeg(seed=1), 'success'),
    ('000000001', 'another one', jpeg(64, 64, seed=2), 'success'),
    ('000000002', 'gone', None, 'failed_to_download'),
    ('000000003', 'no image', None, 'failed_to_resize'),
    ('000000004', None, jpeg(seed=3), 'success'),
    ('000000005', '  ', jpeg(seed=4), 'success'),
    ('000000006', 'cut short', jpeg(64, 64, seed=5)[:-600], 'success'),
    ('000000007', 'a web page', b'<html></html>', 'success'),
    ('000000008', 'thin', jpeg(300, 3, seed=6), 'success'),
    ('000000009', 'the last', jpeg(seed=7), 'success'),
]
REASONS = {
    'failed to download': 1,
    'not kept by img2dataset': 1,
    'empty caption': 2,
    'not a readable JPEG, PNG or WebP': 2,
    'short side below 16 px': 1,
}
KEPT = ['000000000', '000000001', '000000009']


def metadata(key, caption, status):
    return {'key': key, 'url': f'http://x/{key}', 'caption': caption, 'status': status, 'error_message': None, 'width': 40.0}


def write_webdataset(folder, rows=ROWS, per_shard=5):
    folder.mkdir(exist_ok=True)
    for shard, start in enumerate(range(0, len(rows), per_shard)):
        part = rows[start : start + per_shard]
        with tarfile.open(folder / f'{shard:05d}.tar', 'w') as tar:
            for key, caption, image, _ in part:
                if image is None:
                    continue
                for suffix, content in (('jpg', image), ('json', json.dumps({'key': key}).encode()), ('txt', (caption or '').encode())):
                    entry = tarfile.TarInfo(f'{key}.{suffix}')
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))
        pq.write_table(pa.Table.from_pylist([metadata(key, caption, status) for key, caption, _, status in part]), folder / f'{shard:05d}.parquet')
    return folder


def write_parquet(folder, rows=ROWS, per_shard=5):
    folder.mkdir(exist_ok=True)
    for shard, start in enumerate(range(0, len(rows), per_shard)):
        part = [{**metadata(key, caption, status), 'jpg': image} for key, caption, image, status in rows[start : start + per_shard]]
        pq.write_table(pa.Table.from_pylist(part), folder / f'{shard:05d}.parquet')
    return folder


@pytest.fixture(params=[write_webdataset, write_parquet], ids=['webdataset', 'parquet'])
def source(request, tmp_path):
    return request.param(tmp_path / 'source')


def read(folder):
    return {row['key']: row for row in LocalDataset(local=str(folder))}


def test_every_row_is_kept_or_counted(source, tmp_path):
    tally = convert(source, tmp_path / 'out', Options(min_side_px=16))
    assert (tally.attempted, tally.kept, dict(tally.dropped)) == (10, 3, REASONS)
    manifest = Manifest.read(tmp_path / 'out')
    assert (manifest.attempted, manifest.num_samples, manifest.dropped, manifest.min_side_px) == (10, 3, REASONS, 30)
    failures = pq.read_table(tmp_path / 'out/failures.parquet').to_pylist()
    assert sorted(row['key'] for row in failures) == sorted(key for key, *_ in ROWS if key not in KEPT)
    assert {row['reason'] for row in failures} == set(REASONS)
    samples = read(tmp_path / 'out')
    assert sorted(samples) == KEPT
    for key, caption, image, _ in ROWS:
        if key in KEPT:
            assert samples[key]['image'] == image  # byte for byte
            assert samples[key]['caption'] == caption
            assert samples[key]['url'] == f'http://x/{key}'
    assert (samples['000000000']['width'], samples['000000000']['height']) == (40, 30)


def test_both_formats_give_the_same_samples(tmp_path):
    convert(write_webdataset(tmp_path / 'w'), tmp_path / 'from_w')
    convert(write_parquet(tmp_path / 'p'), tmp_path / 'from_p')
    a, b = read(tmp_path / 'from_w'), read(tmp_path / 'from_p')
    assert a == b
    assert Manifest.read(tmp_path / 'from_w').dropped == Manifest.read(tmp_path / 'from_p').dropped


def test_shards_carry_hashes_that_are_true(source, tmp_path):
    import hashlib

    convert(source, tmp_path / 'out')
    index = json.loads((tmp_path / 'out/index.json').read_text())
    assert len(index['shards']) == 2
    for shard in index['shards']:
        content = (tmp_path / 'out' / shard['raw_data']['basename']).read_bytes()
        assert shard['raw_data']['hashes']['sha256'] == hashlib.sha256(content).hexdigest()


def test_a_part_without_a_single_sample_is_fine(tmp_path):
    rows = [(f'{i:09d}', 'gone', None, 'failed_to_download') for i in range(5)] + ROWS[:5]
    tally = convert(write_webdataset(tmp_path / 's', rows), tmp_path / 'out')
    assert (tally.attempted, tally.kept) == (10, 2)
    assert len(read(tmp_path / 'out')) == 2


@pytest.mark.parametrize('given', ['0.5', '0.999', '0', 'x'])
def test_no_aspect_ratio_is_below_that_of_a_square(given, capsys, monkeypatch):
    monkeypatch.setattr('sys.argv', ['convert', 'source', 'dest', '--max-aspect-ratio', given])
    with pytest.raises(SystemExit, match='2'):
        main()
    assert f'--max-aspect-ratio {given}: is ' in capsys.readouterr().err
    assert aspect_ratio(1) == 1


def test_run_again_it_changes_nothing(source, tmp_path):
    first = convert(source, tmp_path / 'out')
    before = {path: path.read_bytes() for path in sorted((tmp_path / 'out').rglob('*')) if path.is_file()}
    assert convert(source, tmp_path / 'out').dropped == first.dropped
    assert {path: path.read_bytes() for path in sorted((tmp_path / 'out').rglob('*')) if path.is_file()} == before


def test_what_cannot_be_continued_is_refused(source, tmp_path):
    convert(source, tmp_path / 'out')
    with pytest.raises(DataError, match='was begun with min_side_px=1, now it is 8'):
        convert(source, tmp_path / 'out', Options(min_side_px=8))
    shard = next(source.glob('00000.parquet'))
    table = pq.read_table(shard)
    pq.write_table(table.set_column(table.column_names.index('caption'), 'caption', pa.array(['new'] * len(table))), shard)
    with pytest.raises(DataError, match='was written with input|has the part'):
        convert(source, tmp_path / 'out')
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'mine/thesis.txt').write_text('mine')
    with pytest.raises(DataError, match='holds something else already'):
        convert(source, tmp_path / 'mine')
    assert (tmp_path / 'mine/thesis.txt').read_text() == 'mine'
    with pytest.raises(DataError, match='no such folder'):
        convert(tmp_path / 'nothing', tmp_path / 'out2')
    with pytest.raises(DataError, match='none of the formats'):
        convert(tmp_path / 'mine', tmp_path / 'out2')


def test_a_torn_tar_is_an_error_that_loses_nothing(tmp_path):
    source = write_webdataset(tmp_path / 's')
    shard = source / '00001.tar'
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    result = run_here('data_prep.convert', source, tmp_path / 'out', '--processes', 1, code=2)
    assert '00001.tar' in result.stderr
    assert 'Traceback' not in result.stderr
    assert not (tmp_path / 'out/manifest.json').exists()  # not done, and it does not say so
    shard.write_bytes(whole)
    assert convert(source, tmp_path / 'out').attempted == 10


def test_the_command_ends_with_the_table(source, tmp_path):
    out = run_here('data_prep.convert', source, tmp_path / 'out', '--min-side', '16', '--processes', 1).stdout
    for cells in ('attempted 10', 'kept 3 30.0 %', 'dropped: failed to download 1 10.0 %', 'dropped: empty caption 2 20.0 %', 'images/s'):
        assert cells in ' '.join(out.split())


def in_session(session):
    """Processes of a session that are not zombies."""
    found = []
    for stat in Path('/proc').glob('[0-9]*/stat'):
        with contextlib.suppress(OSError):
            state, _, _, its_session = stat.read_text().rpartition(')')[2].split()[:4]
            if int(its_session) == session and state != 'Z':
                found.append(stat.parent.name)
    return found


@pytest.mark.long
def test_killed_at_any_moment_and_run_again(tmp_path):
    rows = [(f'{i:09d}', f'caption {i}', jpeg(seed=i), 'success') for i in range(600)]
    source = write_webdataset(tmp_path / 's', rows, per_shard=30)
    command = [sys.executable, '-m', 'data_prep.convert', str(source), str(tmp_path / 'out')]
    kills = 0
    for parts in (2, 9, 15):
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        while process.poll() is None and len(list((tmp_path / 'out/parts').glob('*.json'))) < parts:
            time.sleep(0.001)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
        ended_by = time.monotonic() + 10
        while in_session(process.pid) and time.monotonic() < ended_by:
            time.sleep(0.05)
        assert not in_session(process.pid)  # its workers, and what forked them, have ended with it
    assert kills >= 2
    tally = convert(source, tmp_path / 'out')
    assert (tally.attempted, tally.kept) == (600, 600)
    keys = [row['key'] for row in LocalDataset(local=str(tmp_path / 'out'))]
    assert sorted(keys) == [key for key, *_ in rows]  # none lost, none twice
    assert [path.name for path in (tmp_path / 'out').glob('.*/')] == []  # no leftovers


def test_a_copied_source_is_the_same_source(tmp_path):
    source = write_webdataset(tmp_path / 's')
    convert(source, tmp_path / 'out')
    shutil.copytree(source, tmp_path / 'copy')  # keeps the times, as cp -p and rsync -t do
    assert convert(tmp_path / 'copy', tmp_path / 'out').attempted_now == 0


def test_a_wrong_source_does_not_spoil_a_good_dest(tmp_path):
    convert(write_webdataset(tmp_path / 'a', per_shard=10), tmp_path / 'out')
    other = write_webdataset(tmp_path / 'b', per_shard=5)
    with pytest.raises(DataError, match='was written with input|has the part'):
        convert(other, tmp_path / 'out')
    assert not (tmp_path / 'out/00001').exists()
    assert convert(tmp_path / 'a', tmp_path / 'out').kept == 4


@pytest.mark.parametrize('late', ['data_prep.mds.dataset.Dataset._merge', 'diffusion.contracts.manifest.Manifest.to_json'])
def test_stopped_after_the_last_part_and_run_again(late, tmp_path, monkeypatch):
    source = write_webdataset(tmp_path / 's')

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(late, stop)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / 'out')
    assert not (tmp_path / 'out/manifest.json').exists()
    monkeypatch.undo()
    tally = convert(source, tmp_path / 'out')
    assert (tally.attempted, tally.attempted_now) == (10, 0)
    assert len(read(tmp_path / 'out')) == 4


def test_a_part_that_lost_a_shard_is_written_again(tmp_path, capsys):
    source = write_webdataset(tmp_path / 's')
    convert(source, tmp_path / 'out')
    before = read(tmp_path / 'out')
    shard = tmp_path / 'out/00001/shard.00000.mds'
    shard.write_bytes(shard.read_bytes()[:-1])
    assert convert(source, tmp_path / 'out').attempted_now == 5
    assert 'part 00001 has lost a file' in capsys.readouterr().err
    assert read(tmp_path / 'out') == before


# Each spoils a source of two good shards in its own way.


def spoil_tar_gone(source):
    (source / '00001.tar').unlink()


def spoil_sidecar_gone(source):
    (source / '00001.parquet').unlink()


def spoil_parquet_torn(source):
    path = source / '00001.parquet'
    path.write_bytes(path.read_bytes()[:-20])


def spoil_no_caption_column(source):
    path = source / '00001.parquet'
    pq.write_table(pq.read_table(path).drop(['caption']), path)


def spoil_duplicate_keys(source):
    path = source / '00001.parquet'
    table = pq.read_table(path)
    pq.write_table(pa.concat_tables([table, table.slice(len(table) - 2)]), path)


def spoil_unknown_key(source):
    with tarfile.open(source / '00001.tar', 'a') as tar:
        tar.addfile(tarfile.TarInfo('999999999.jpg'), io.BytesIO(b''))


SPOILERS = [value for name, value in sorted(globals().items()) if name.startswith('spoil_')]


@pytest.mark.parametrize('spoil', SPOILERS, ids=lambda spoil: spoil.__name__)
def test_a_damaged_source_is_an_error_that_names_the_file(spoil, tmp_path):
    source = write_webdataset(tmp_path / 's')
    spoil(source)
    with pytest.raises(DataError, match='00001'):
        convert(source, tmp_path / 'out')
    assert not (tmp_path / 'out/manifest.json').exists()


def test_odd_but_honest_sources_are_read(tmp_path):
    source = write_webdataset(tmp_path / 's')
    with tarfile.open(source / '00000.tar') as tar:
        members = [(member.name, tar.extractfile(member).read()) for member in tar]
    with tarfile.open(source / '00000.tar', 'w') as tar:
        folder = tarfile.TarInfo('./sub')
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        link = tarfile.TarInfo('./sub/dangling.jpg')
        link.type, link.linkname = tarfile.SYMTYPE, 'nowhere'
        tar.addfile(link)
        for name, content in members:
            content = b'\xff\xfe' if name == '000000001.txt' else content
            entry = tarfile.TarInfo(f'./sub/{name}')
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    (source / '._00000.parquet').write_bytes(b'junk of another system')
    tally = convert(source, tmp_path / 'out')
    assert tally.attempted == 10
    assert tally.dropped['caption is not UTF-8'] == 1
    bare = write_parquet(tmp_path / 'p')
    for path in bare.glob('*.parquet'):
        pq.write_table(pq.read_table(path).drop(['url']), path)
    convert(bare, tmp_path / 'out_p')
    assert {row['url'] for row in read(tmp_path / 'out_p').values()} == {''}


def test_nothing_kept_is_said_by_encode(tmp_path, encoders_folder):
    rows = [('000000000', 'gone', None, 'failed_to_download')]
    convert(write_webdataset(tmp_path / 's', rows), tmp_path / 'out')
    arguments = [tmp_path / 'out', tmp_path / 'latents', '--resolution', 32, '--encoders', encoders_folder]
    assert 'holds no samples' in run_here('data_prep.encode', *arguments, code=2).stderr


def test_numbers_that_make_no_sense_are_refused():
    for arguments in (['convert', 's', 'd', '--min-side', '0'], ['encode', 's', 'd', '--resolution', '-1', '--encoders', 'e']):
        result = run_here(f'data_prep.{arguments[0]}', *arguments[1:], code=2)
        assert 'is not above 0' in result.stderr
