"""The whole promise in real processes: 40 batches, whatever is killed, on one rank and on two, give the weights of encoding in the step."""

import json
import signal
import sys
from pathlib import Path

import psutil
import pytest

from diffusion.checkpoints.reading import find_checkpoint, read_checkpoint, training_weights
from diffusion.common.ray_cluster import RECONNECT_SEC, _keep_authentication
from tests.faults.driver import Disturbed, digest, launch, train
from tests.online.online import ray_keys

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]  # each starts several processes

LIMIT_SEC = 600
LENGTH = ['train.duration=40ba', 'checkpoint.every=10ba', 'data.workers=1']


@pytest.fixture(scope='module')
def long_run(images: Path, encoders_folder: Path, tmp_path_factory: pytest.TempPathFactory):
    from tests.online.online import base_overrides, of_images

    def overrides(name: str, *more: str) -> tuple[list[str], Path]:
        folder = tmp_path_factory.mktemp(name)
        return [*of_images(base_overrides(encoders_folder, folder), images), *LENGTH, *more], folder / 'run'

    return overrides


def weights(folder: Path) -> str:
    found = find_checkpoint(folder / 'checkpoints')
    assert found.name == 'ba00000040.pt'
    return digest(training_weights(read_checkpoint(found)))


def batches(folder: Path) -> int:
    log = folder / 'log.jsonl'
    return json.loads(log.read_text().splitlines()[-1]).get('batch', 0) if log.exists() and log.read_text().endswith('\n') else 0


def encoder_of(process: Disturbed) -> psutil.Process:
    """One of those that this run's own cluster has started."""
    return next(
        child for child in psutil.Process(process.pid).children(recursive=True) if child.cmdline()[:1] and 'ray::ImageEncoder' in child.cmdline()[0]
    )


@pytest.fixture(scope='module')
def expected(long_run) -> str:
    overrides, folder = long_run('in-step')
    train(overrides).wait(timeout_sec=LIMIT_SEC)
    return weights(folder)


@pytest.mark.parametrize('actors', [1, 2, 3])
def test_any_number_of_encoders(long_run, cluster, expected, actors):
    overrides, folder = long_run(f'actors-{actors}', *ray_keys(cluster, actors, send='bytes' if actors == 3 else 'pixels'))
    train(overrides).wait(timeout_sec=LIMIT_SEC)
    assert weights(folder) == expected


def test_an_encoder_and_the_trainer_are_killed_and_the_run_resumes(long_run, expected):
    overrides, folder = long_run('killed', *ray_keys(None, 2))
    with train(overrides) as process:
        process.wait_until(lambda: batches(folder) >= 5, LIMIT_SEC)
        encoder_of(process).kill()
        process.wait_until(lambda: batches(folder) >= 23, LIMIT_SEC)
        started = psutil.Process(process.pid).children(recursive=True)
        process.signal(signal.SIGKILL, group=False)
    assert not psutil.wait_procs(started, timeout=60)[1]  # nothing of Ray is left
    train(overrides).wait(timeout_sec=LIMIT_SEC)
    assert weights(folder) == expected


def test_a_head_that_is_killed_ends_the_run_with_the_command_that_resumes(long_run, monkeypatch):
    """By itself Ray would end the process with 1."""
    monkeypatch.setenv(RECONNECT_SEC, '40')  # instead of 60
    _keep_authentication('tests')
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={'num_cpus': 2, 'include_dashboard': False})
    address = cluster.address
    try:
        overrides, folder = long_run('headless', *ray_keys(address, 1), 'train.duration=100000ba', 'eval.every=null')
        with train(overrides) as process:
            process.wait_until(lambda: batches(folder) >= 5, LIMIT_SEC)
            cluster.head_node.all_processes['gcs_server'][0].process.kill()
            said = process.wait(76, LIMIT_SEC)
    finally:
        cluster.shutdown()
    assert f'data.encoders.ray: the head of the Ray cluster, {address}, has not answered for ' in said
    assert f'resume with: {Path(sys.executable).name} train.py ' in said
    assert 'Traceback' not in said


def test_from_the_step_to_encoders_in_the_middle_of_a_run(long_run, cluster, expected):
    overrides, folder = long_run('switched')
    with train(overrides) as process:
        process.wait_until(lambda: batches(folder) >= 12, LIMIT_SEC)
        process.signal(signal.SIGTERM, group=False)
        process.wait(75, LIMIT_SEC)
    train([*overrides, *ray_keys(cluster, 2)]).wait(timeout_sec=LIMIT_SEC)
    assert weights(folder) == expected


def test_two_ranks(long_run):
    found = []
    for name, keys in (('two-in-step', []), ('two-online', ray_keys(None, 2))):
        overrides, folder = long_run(name, 'batch.micro_size=2', *keys)
        launch(2, overrides).wait(timeout_sec=LIMIT_SEC)
        found.append(weights(folder))
    assert found[0] == found[1]


def test_buckets_and_geometry(aspect_images, encoders_xl_folder, tmp_path):
    """SDXL reads size and crop, which come from the first bytes of an image where the encoders decode it."""
    found = []
    for number, keys in enumerate([[], ray_keys(None, 2), ray_keys(None, 2, send='bytes')]):
        folder = tmp_path / str(number)
        overrides = [
            'model.network=tiny-xl', f'model.encoders.source={encoders_xl_folder}', 'model.encoders.revision=null', 'data.resolution=128',
            'data.aspect_buckets=true', 'data.workers=0', 'data.canonical_nodes=1', 'batch.global_size=2', 'batch.micro_size=1',
            'optimizer.warmup=1ba', 'ema.start=0ba', 'train.precision=fp32', 'train.compile=null', 'train.cpu_threads=1', 'log.every=1',
            'log.samples.every=null', f'run_folder={folder}', 'train.duration=40ba', 'data.kind=images', f'data.streams.own.local={aspect_images}',
            'data.streams.train=null', 'data.flip=true', *keys,
        ]  # fmt: skip
        train(overrides).wait(timeout_sec=LIMIT_SEC)
        found.append(weights(folder))
    assert found[0] == found[1] == found[2]
