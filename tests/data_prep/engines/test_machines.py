"""convert and encode by several machines of a Ray cluster, each a raylet here: the same files through all that can end in between."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from diffusion.common import ray_cluster
from diffusion.contracts.errors import INCOMPLETE
from tests.conftest import REPOSITORY, run_python
from tests.data_prep.engines.test_cluster import tree, undo_half
from tests.data_prep.test_convert import jpeg, write_webdataset

pytestmark = [pytest.mark.skipif(find_spec('ray') is None, reason='Ray is an extra'), pytest.mark.long, pytest.mark.timeout(1800)]

NUM_ROWS = 400
PER_SHARD = 10
NUM_PARTS = NUM_ROWS // PER_SHARD
NUM_MACHINES = 3
MACHINE = {'num_cpus': 2, 'resources': {'A10G': 1}}
DEADLINE_SEC = 900
LAST_WORDS_SEC = 120  # after a kill Ray's agents try for a minute to tell the head that is gone


@pytest.fixture(scope='module')
def source(tmp_path_factory):
    """40 shards; each has a few rows that cannot be used."""
    rows = []
    for i in range(NUM_ROWS):
        image, caption, status = jpeg(64 if i % 3 else 30, 48, seed=i), f'caption {i}', 'success'
        if i % 10 == 3:
            image, status = None, 'failed_to_download'
        if i % 10 == 5:
            caption = ''
        rows.append((f'{i:09d}', caption, image, status))
    return write_webdataset(tmp_path_factory.mktemp('machines') / 'source', rows, PER_SHARD)


@pytest.fixture(scope='module')
def commands(source, encoders_folder):
    """Commands without DEST, and what the local engine makes by them."""
    folder = source.parent
    run_python('-m', 'data_prep.convert', source, folder / 'images')
    encoding = ['--resolution', 32, 16, '--encoders', encoders_folder, '--batch-size', 4, '--text-embeddings', '--network', 'tiny']
    run_python('-m', 'data_prep.encode', folder / 'images', folder / 'latents', *encoding, OMP_NUM_THREADS='1')
    return {
        'convert': (['data_prep.convert', source], [], folder / 'images'),
        'encode': (['data_prep.encode', folder / 'images'], encoding, folder / 'latents'),
    }


@pytest.fixture(scope='module')
def machines():
    """A head that only manages, and machines with an accelerator each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('PYTHONPATH', str(REPOSITORY))
        patch.setenv('RAY_USAGE_STATS_ENABLED', '0')
        ray_cluster._keep_authentication('a test')  # before Ray is imported, which then reads what its processes do
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={'num_cpus': 0, 'include_dashboard': False})
        for _ in range(NUM_MACHINES):
            cluster.add_node(**MACHINE)
        yield cluster
        cluster.shutdown()  # and the drivers of tests that failed


def start(command, *options):
    module, *arguments = map(str, [*command, *options])
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(REPOSITORY)}
    return subprocess.Popen(
        [sys.executable, '-m', 'tests.data_prep.engines.slowly', module, *arguments],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def num_parts(dest: Path) -> int:
    return len(list(dest.glob('parts/*.json')))


def wait_for(condition):
    end = time.monotonic() + DEADLINE_SEC
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def actors_of(cluster):
    """Processes that make parts now."""
    raylets = [node.all_processes['raylet'][0].process.pid for node in cluster.worker_nodes]
    found = [child for pid in raylets if psutil.pid_exists(pid) for child in psutil.Process(pid).children()]
    return [process for process in found if is_actor(process)]


def is_actor(process):
    try:
        return 'PartActor' in process.name() + ''.join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def nothing(cluster, dest, process, again):
    return process


def machine_removed(cluster, dest, process, again):
    wait_for(lambda: num_parts(dest) >= NUM_PARTS // 4)
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    assert num_parts(dest) < NUM_PARTS
    cluster.add_node(**MACHINE)  # for the next test
    return process


def ten_actors_killed(cluster, dest, process, again):
    rng, hits = random.Random(time.time_ns()), 0
    while hits < 10:
        time.sleep(rng.uniform(0.2, 2))
        assert process.poll() is None, f'{hits} kills'
        if actors := actors_of(cluster):
            with suppress(psutil.NoSuchProcess):  # it may have ended by itself since it was listed
                rng.choice(actors).kill()
                hits += 1
    assert num_parts(dest) < NUM_PARTS
    return process


def driver_killed_twice(cluster, dest, process, again):
    for share in 1, 2:
        wait_for(lambda share=share: num_parts(dest) >= NUM_PARTS * share // 3)
        process.send_signal(signal.SIGKILL)
        process.wait()
        end = time.monotonic() + 30
        wait_for(lambda: not actors_of(cluster))
        assert time.monotonic() < end
        assert num_parts(dest) < NUM_PARTS
        process = again()
    return process


def half_is_there(cluster, dest, process, again):
    """`run_with` has prepared it."""
    return process


@pytest.mark.parametrize(
    ('kind', 'meets', 'decoders'),
    [
        *(
            (kind, meets, 0)
            for kind in ('convert', 'encode')
            for meets in (nothing, machine_removed, ten_actors_killed, driver_killed_twice, half_is_there)
        ),
        *(('encode', meets, 2) for meets in (nothing, machine_removed)),
    ],
)
def test_the_files_are_those_of_the_local_engine(kind, meets, decoders, commands, machines, tmp_path):
    command, options, expected = commands[kind]
    dest = tmp_path / 'out'
    if meets is half_is_there:
        shutil.copytree(expected, dest)
        undo_half(dest)
    by_ray = ['--engine', 'ray', '--ray-address', machines.address, '--ray-resource', 'A10G', *(['--ray-decoders', decoders] if decoders else [])]
    process = meets(machines, dest, start(command, dest, *options, *by_ray), lambda: start(command, dest, *options, *by_ray))
    out, _ = process.communicate(timeout=DEADLINE_SEC)
    print(out)
    assert process.returncode == 0, out
    assert tree(dest) == tree(expected)


def test_ctrl_c_and_a_killed_driver_leave_no_process(source, tmp_path):
    """Of the cluster that the command has started for itself."""
    for number, code in (signal.SIGINT, 130), (signal.SIGKILL, -9):
        before = set(psutil.pids())
        dest = tmp_path / str(code)
        process = start(['data_prep.convert', source, dest], '--engine', 'ray', '--ray-actors', 1)
        wait_for(lambda dest=dest: num_parts(dest) >= 3)
        its = [other for other in psutil.process_iter() if other.pid not in before and is_rays(other, process.pid)]
        assert its
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode == code
        _, alive = psutil.wait_procs(its, timeout=LAST_WORDS_SEC)
        assert not alive
        assert num_parts(dest) < NUM_PARTS


def test_a_head_that_is_killed_ends_the_command_which_says_how_to_resume(source, tmp_path, monkeypatch):
    monkeypatch.setenv(ray_cluster.RECONNECT_SEC, '40')  # Ray's own limit, instead of 60
    monkeypatch.setenv('SLOW_PART_SEC', '5')
    monkeypatch.setenv('PYTHONPATH', str(REPOSITORY))
    ray_cluster._keep_authentication('a test')
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={'num_cpus': 1, 'include_dashboard': False})
    address = cluster.address
    try:
        process = start(['data_prep.convert', source, tmp_path / 'out'], '--engine', 'ray', '--ray-address', address)
        wait_for(lambda: num_parts(tmp_path / 'out') >= 1)
        cluster.head_node.all_processes['gcs_server'][0].process.kill()
        out, _ = process.communicate(timeout=DEADLINE_SEC)
    finally:
        cluster.shutdown()
    assert process.returncode == INCOMPLETE, out
    assert f'--engine ray: the head of the Ray cluster, {address}, has not answered for ' in out
    assert 'resume with: ' in out
    assert 'Traceback' not in out


def is_rays(process: psutil.Process, driver: int) -> bool:
    """Whether the driver started it, or what it started."""
    try:
        return any(parent.pid == driver for parent in process.parents())
    except psutil.Error:
        return False
