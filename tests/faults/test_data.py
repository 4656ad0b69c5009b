"""Object storage that fails, disks that are full, loader processes that hang: the samples are right, or the run ends with the cause."""

import json
import re
import shutil
import subprocess
import time

import pytest

from diffusion.checkpoints.reading import find_checkpoint, read_checkpoint, training_weights
from diffusion.contracts.errors import BAD_DATA, STALLED, DataError, DataUnavailable
from diffusion.datasets.loader import EpochSampler
from diffusion.recipe import load_recipe
from diffusion.training.builder import build_trainer
from tests.conftest import REPOSITORY, TINY
from tests.datasets.streams import NUM_SAMPLES, contents, flip, ours, shard, write_data
from tests.faults.children import DEADLINE_SEC
from tests.faults.driver import Process, train, upstream_mended_it
from tests.faults.flaky_downloads import FlakyDownloads


@pytest.fixture
def data(tmp_path):
    return write_data(tmp_path / 'data')


@pytest.fixture
def serve(data, monkeypatch):
    """Starts a server that fails as it is told to."""
    servers = []

    def start(answer):
        servers.append(FlakyDownloads(data, answer))
        for name, value in servers[-1].environment.items():
            monkeypatch.setenv(name, value)
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()


def from_s3(data, cache, **more):
    return ours('s3://bucket', cache, index=(data / 'index.json').read_bytes(), **more)


@pytest.mark.parametrize(
    ('failure', 'workers'),
    [(503, 0), ('cut', 2), *(pytest.param(failure, workers, marks=pytest.mark.long) for failure in (503, 500, 429, 'cut') for workers in (0, 1, 2))],
)
def test_a_storm_is_outlived(data, serve, tmp_path, workers, failure):
    server = serve(lambda name, before: failure if before < 2 and name == shard(data).name else None)
    assert contents(from_s3(data, tmp_path / 'cache', workers=workers, timeout_sec=60)) == contents(ours(None, data))
    assert set(server.gets) == {path.name for path in data.glob('*.mds')}


@pytest.mark.parametrize('workers', [0, 2])
@pytest.mark.parametrize('failure', [503, pytest.param('hang', marks=pytest.mark.long)])
def test_storage_that_never_answers_is_an_error_in_time(data, serve, tmp_path, workers, failure):
    serve(lambda name, before: failure)
    begun = time.monotonic()
    with pytest.raises(DataUnavailable):
        contents(from_s3(data, tmp_path / 'cache', workers=workers, timeout_sec=6))
    assert time.monotonic() - begun < DEADLINE_SEC


def test_a_missing_object_is_named_at_once(data, serve, tmp_path):
    server = serve(lambda name, before: None)
    shard(data).unlink()
    with pytest.raises(DataError, match=rf's3://bucket/{shard(data).name} does not exist'):
        contents(from_s3(data, tmp_path / 'cache'))
    assert server.gets[shard(data).name] == 0  # its HEAD said so


def streaming_ends_the_epoch(remote, cache):
    """Stock Streaming hangs, or has fewer samples than there are and says nothing."""
    with Process(['-m', 'tests.datasets.streams', 'stock', remote, cache, 0]) as process:
        process.wait_until(lambda: (cache / 'index.json').exists())
        try:
            output = process.wait(None, 20)
        except AssertionError:  # it hangs
            return
    found = re.search('samples: (.*)', output)
    if found is None or int(found[1]) == NUM_SAMPLES:
        upstream_mended_it()


@pytest.mark.long
def test_twin_streaming_ends_the_epoch_in_a_storm(data, serve, tmp_path):
    serve(lambda name, before: 503 if name != 'index.json' else None)
    streaming_ends_the_epoch('s3://bucket', tmp_path / 'cache')


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 16 KiB, of which the data need 28."""
    (tmp_path / 'small').mkdir()
    if subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=16k', 'tmpfs', tmp_path / 'small'], capture_output=True, check=False).returncode:
        pytest.skip('a file system can be mounted by root only')
    yield tmp_path / 'small'
    subprocess.run(['umount', '--lazy', tmp_path / 'small'], check=True)


@pytest.mark.parametrize('workers', [0, 1, 2])
def test_a_full_disk_is_an_error_and_the_cache_stays_good(data, small_disk, tmp_path, workers):
    with pytest.raises(DataUnavailable, match='No space left on device.*data.cache_limit'):
        contents(ours(data, small_disk / 'cache', workers=workers))
    assert all(path.read_bytes() == (data / path.name).read_bytes() for path in (small_disk / 'cache').glob('shard.*'))


@pytest.mark.long
def test_twin_streaming_ends_the_epoch_on_a_full_disk(data, small_disk):
    streaming_ends_the_epoch(data, small_disk / 'cache')


@pytest.fixture
def recipe(latents, encoders_folder, tmp_path):
    """Overrides for 12 batches, two epochs, of latents streamed from a folder."""
    shutil.copytree(latents, tmp_path / 'remote')
    return [
        *TINY, f'model.encoders.source={encoders_folder}', 'data.kind=latents', f'data.streams.train.remote={tmp_path}/remote',
        f'run_folder={tmp_path}/run', 'train.duration=12ba', 'data.timeout_sec=8', 'data.predownload=1',
    ]  # fmt: skip


def ended_with(code, recipe, *more, **environment):
    with train([*recipe, *more], **environment) as process:
        return process.wait(code)


def test_training_on_a_bad_shard_ends_with_its_name(recipe, tmp_path):
    bad = sorted((tmp_path / 'remote').rglob('*.mds'))[1]
    flip(bad)
    output = ended_with(BAD_DATA, recipe)
    assert f'stream train: {bad}: has sha256 ' in output
    assert 'python -m data_prep.audit' in output


@pytest.mark.long
def test_a_bad_shard_in_the_cache_changes_nothing(recipe, tmp_path):
    def weights(folder):
        return training_weights(read_checkpoint(find_checkpoint(folder)))

    with train([*recipe, f'run_folder={tmp_path}/whole', 'checkpoint.every=6ba']) as process:
        process.wait()
    with train([*recipe, 'train.duration=6ba', 'checkpoint.every=6ba']) as process:
        process.wait()
    for path in (tmp_path / 'run/cache').rglob('*.mds'):
        flip(path)
    with train([*recipe, 'checkpoint.every=6ba']) as process:
        assert process.wait().count('it is fetched again') == 2
    expected = weights(tmp_path / 'whole')
    assert all((value == expected[name]).all() for name, value in weights(tmp_path / 'run').items())


@pytest.mark.long
@pytest.mark.parametrize('workers', [1, 2])
@pytest.mark.parametrize(('action', 'message'), [('stop', 'timed out after 8 seconds'), ('sleep', 'timed out'), ('kill', 'lower data.workers')])
def test_a_loader_process_that_hangs_or_dies_ends_the_run(recipe, workers, action, message):
    assert message in ended_with(STALLED, recipe, f'data.workers={workers}', DIFFUSION_FAILPOINT=f'data.sample@9:{action}')


@pytest.mark.long
def test_bad_samples_end_the_run_when_there_are_too_many(recipe, tmp_path):
    """Moments of another size, of a dataset that says 64 px."""
    path = tmp_path / 'remote/manifest.json'
    path.write_text(json.dumps({**json.loads(path.read_text()), 'resolution': 64}))
    output = ended_with(BAD_DATA, recipe, 'data.resolution=64', 'data.max_bad_samples=5')
    assert 'data.max_bad_samples is 5' in output
    assert len((tmp_path / 'run/bad_samples.jsonl').read_text().splitlines()) == 6


def test_a_short_epoch_is_an_error(overrides, encoders, monkeypatch):
    """Whatever may shorten it."""
    recipe = load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', [*overrides, 'train.duration=12ba'])
    trainer = build_trainer(recipe)
    shorter = EpochSampler.__iter__
    monkeypatch.setattr(EpochSampler, '__iter__', lambda self: iter(list(shorter(self))[:40]))
    with pytest.raises(DataError, match='epoch 0: the training data ended after 5 of 8 batches'):
        trainer.fit()
    trainer.close()
