"""A sample that cannot be decoded stops the run or is replaced, as the recipe says; it is named and counted either way."""

import fcntl
import json
import resource
import shutil

import pytest
import torch
from streaming import MDSWriter, StreamingDataset

from diffusion.common.files import read_json_lines
from diffusion.contracts.errors import DataError
from diffusion.contracts.manifest import Manifest
from diffusion.datasets import mds
from diffusion.datasets.loader import dataset_identities, train_loader
from diffusion.datasets.mds import BadSamples
from diffusion.monitoring.report.run import read_log
from diffusion.recipe import load_recipe
from tests.conftest import NUM_IMAGES, REPOSITORY, run_python

BAD = {5: b'no image', 6: b'', 40: b'\xff\xd8 cut'}


@pytest.fixture(scope='module')
def damaged(images, tmp_path_factory):
    """Images of which three are none, in shards that are just as their index says."""
    folder = tmp_path_factory.mktemp('damaged') / 'images'
    before = StreamingDataset(local=str(images), batch_size=1)
    columns = {name: column['encoding'] for name, column in Manifest.read(images).columns.items()}
    with MDSWriter(out=str(folder), columns=columns, hashes=['sha256'], size_limit=40_000) as writer:
        for number in range(NUM_IMAGES):
            row = before[number]
            writer.write({**row, 'image': BAD.get(number, row['image'])})
    shutil.copy(images / 'manifest.json', folder)
    return folder


def note(path, samples):
    for sample in samples:
        BadSamples(path, most=100).add('train', 'shard.00000.mds', sample, 'ImageError: none')


def noted(path):
    return [record['sample'] for record in read_json_lines(path)]


def test_who_looks_whether_a_sample_is_noted_keeps_the_others_out_until_it_is(tmp_path, monkeypatch):
    path = tmp_path / 'bad_samples.jsonl'

    def look(_):
        with path.open('ab') as others, pytest.raises(BlockingIOError):
            fcntl.flock(others, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return read_json_lines(path)

    monkeypatch.setattr(mds, 'read_json_lines', look)
    note(path, [1, 2, 1])
    assert noted(path) == [1, 2]
    with path.open('ab') as others:
        fcntl.flock(others, fcntl.LOCK_EX | fcntl.LOCK_NB)  # and lets them in afterwards


def test_a_line_that_was_cut_short_takes_no_other_with_it(tmp_path, monkeypatch):
    """Whoever had the lock before was killed in the middle of a line."""
    path = tmp_path / 'bad_samples.jsonl'
    note(path, [1])
    lock = fcntl.flock

    def lock_after_a_kill(file, operation):
        path.write_bytes(path.read_bytes() + b'{"stream": "tr')
        lock(file, operation)

    monkeypatch.setattr(fcntl, 'flock', lock_after_a_kill)
    note(path, [2])
    assert noted(path) == [1, 2]


def test_a_disk_that_takes_half_a_line_is_full(tmp_path):
    path = tmp_path / 'bad_samples.jsonl'
    note(path, [1])
    taken = path.stat().st_size + 10
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)  # it stands for the disk; Python ignores its signal
    resource.setrlimit(resource.RLIMIT_FSIZE, (taken, limits[1]))
    try:
        with pytest.raises(OSError, match='No space left'):
            note(path, [2])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.stat().st_size == taken
    note(path, [3])
    assert noted(path) == [1, 3]


def arguments(folder, overrides, most, *more):
    return [*overrides, 'data.kind=images', f'data.streams.train.local={folder}', f'data.max_bad_samples={most}', 'data.shuffle=false', *more]


def batches(folder, encoders, overrides, most, *more):
    recipe = load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', arguments(folder, overrides, most, *more))
    return list(train_loader(recipe, encoders))


def by_id(batches):
    return {sample_id: batch['images'][i] for batch in batches for i, (_, sample_id, _) in enumerate(batch['sample_key'].tolist())}


@pytest.mark.parametrize('workers', [0, 2])
def test_the_first_is_an_error_that_names_it(damaged, encoders, overrides, workers):
    with pytest.raises(DataError) as caught:
        batches(damaged, encoders, overrides, 0, f'data.workers={workers}')
    assert str(caught.value).startswith('stream train: sample 5 of shard shard.00000.mds cannot be used: ImageError: not a readable JPEG')
    assert 'raise data.max_bad_samples' in str(caught.value)


@pytest.mark.parametrize('workers', [0, 2])
def test_others_take_their_place_and_they_are_counted_once(damaged, images, encoders, overrides, tmp_path, workers):
    good = by_id(batches(images, encoders, overrides, 0))
    for _ in range(2):  # a restart
        found = by_id(batches(damaged, encoders, overrides, 3, f'data.workers={workers}'))
        assert found.keys() == good.keys()  # each under its own key
        assert all(torch.equal(found[number], good[number]) for number in good if number not in BAD)
        assert torch.equal(found[5], good[7])
        assert torch.equal(found[6], good[7])
        records = list(read_json_lines(tmp_path / 'run/bad_samples.jsonl'))
        assert len(records) == 3
        assert records[0].keys() == {'stream', 'shard', 'sample', 'cause'}


def test_one_too_many_in_the_whole_run_is_an_error(damaged, encoders, overrides):
    for _ in range(2):
        with pytest.raises(DataError, match='one of 3 such samples in .*bad_samples.jsonl, data.max_bad_samples is 2'):
            batches(damaged, encoders, overrides, 2)


def test_latents_of_another_shape_are_bad_samples(latents, encoders, overrides, tmp_path):
    """Latents of 32 px in a dataset that says 64."""
    shutil.copytree(latents, tmp_path / 'latents')
    manifest = json.loads((tmp_path / 'latents/manifest.json').read_text())
    (tmp_path / 'latents/manifest.json').write_text(json.dumps({**manifest, 'resolution': 64}))
    recipe = load_recipe(
        REPOSITORY / 'yamls/sd2-base-256.yaml',
        [*overrides, 'data.kind=latents', f'data.streams.train.local={tmp_path}/latents', 'data.resolution=64'],
    )
    with pytest.raises(DataError, match=r'moments have the shape \(8, 8, 8\), the manifest says \(8, 16, 16\)'):
        list(train_loader(recipe, encoders))


def test_a_data_set_has_an_identity(latents, encoders, overrides, tmp_path):
    def identities(folder, *more):
        recipe = load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', [*overrides, 'data.kind=latents', f'data.streams.train.local={folder}', *more])
        return dataset_identities(train_loader(recipe, encoders))

    shutil.copytree(latents, tmp_path / 'copy')
    original = identities(latents)
    assert original.keys() == {'train'}
    assert len(original['train']) == 64
    assert identities(tmp_path / 'copy') == original
    manifest = json.loads((tmp_path / 'copy/manifest.json').read_text())
    (tmp_path / 'copy/manifest.json').write_text(json.dumps({**manifest, 'code_version': 'later'}))
    assert identities(tmp_path / 'copy') == original
    index = json.loads((tmp_path / 'copy/index.json').read_text())
    index['shards'][0]['raw_data']['hashes']['sha256'] = 'f' * 64  # as if a shard had been written anew
    (tmp_path / 'copy/index.json').write_text(json.dumps(index))
    assert identities(tmp_path / 'copy') != original
    assert identities(latents, f'data.streams.b.local={tmp_path}/copy').keys() == {'train', 'b'}


@pytest.mark.long
def test_the_log_counts_them(damaged, overrides, tmp_path):
    run_python('train.py', 'yamls/sd2-base-256.yaml', *arguments(damaged, overrides, 3, 'train.duration=6ba'), OMP_NUM_THREADS='1')
    assert [record['data/bad_samples'] for record in read_log(tmp_path / 'run/log.jsonl') if 'data/bad_samples' in record][-1] == 3
