"""Ray Train starts a run again on the machines that are there: raylets of this machine are killed and added while it trains."""

import random
import re
import subprocess
import sys
import time
from importlib.util import find_spec

import psutil
import pytest

from diffusion.checkpoints.reading import find_checkpoint, read_checkpoint, training_weights
from diffusion.common import ray_cluster
from diffusion.contracts.errors import BAD_DATA, BAD_INPUT, BAD_RECIPE, PREEMPTED, STALLED
from tests.conftest import REPOSITORY, TINY
from tests.faults.driver import YAML, train

pytestmark = [pytest.mark.skipif(find_spec('ray') is None, reason='Ray is an extra'), pytest.mark.timeout(1800)]

SCRIPT = [sys.executable, '-m', 'launch.ray.train', YAML]
LOOK_SEC = 3
DEADLINE_SEC = 900  # Ray waits for a minute for a machine that it takes for alive
BATCH = [
    'batch.global_size=12',
    'batch.micro_size=1',
    'data.kind=synthetic',
    'data.synthetic_samples=48',
    'data.streams.train=null',
    'load_path=null',
]


@pytest.fixture
def cluster(monkeypatch):
    """A head that only manages, and two machines with room for one rank each."""
    monkeypatch.setenv('PYTHONPATH', str(REPOSITORY))
    monkeypatch.setenv('RAY_USAGE_STATS_ENABLED', '0')
    ray_cluster._keep_authentication('a test')
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={'num_cpus': 0, 'include_dashboard': False})
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    yield cluster
    cluster.shutdown()


class Driver:
    """The command on a cluster, and what it prints."""

    def __init__(self, cluster, folder, *words):
        self.output = folder / 'driver.log'
        command = [*SCRIPT, '--gpus', 0, '--address', cluster.address, '--look-sec', LOOK_SEC, *words]
        with self.output.open('w') as file:
            self.process = subprocess.Popen([*map(str, command)], stdout=file, stderr=subprocess.STDOUT, cwd=REPOSITORY)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def read(self):
        return self.output.read_text()

    def batch(self):
        """The last batch that it has printed since its last start."""
        return int((re.findall(r'^batch (\d+) ', self.read().rpartition('workers train')[2], re.MULTILINE) or ['0'])[-1])

    def wait_for(self, condition):
        deadline = time.monotonic() + DEADLINE_SEC
        while not condition():
            assert self.process.poll() is None, self.read()[-3000:]
            assert time.monotonic() < deadline, self.read()[-3000:]
            time.sleep(0.2)

    def wait(self, code):
        assert self.process.wait(DEADLINE_SEC) == code, self.read()[-3000:]
        return self.read()


@pytest.fixture
def settings(encoders_folder):
    return [*TINY, *BATCH, f'model.encoders.source={encoders_folder}', 'optimizer.lr=1e-3', 'checkpoint.every=50ba']


def ranks(tmp_path):
    """Processes of train.py that train into the folder."""
    found = psutil.process_iter(['cmdline'])
    return [
        one for one in found if (one.info['cmdline'] or [])[1:2] == [str(REPOSITORY / 'train.py')] and str(tmp_path) in ' '.join(one.info['cmdline'])
    ]


def assert_none_left(tmp_path):
    deadline = time.monotonic() + 60  # Composer's launcher kills after 30 s
    while left := ranks(tmp_path):
        assert time.monotonic() < deadline, left
        time.sleep(0.5)


def lose_machine(cluster):
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)


def assert_same_weights(tmp_path, settings, duration):
    with train([*settings, f'run_folder={tmp_path}/whole', duration]) as process:
        process.wait(timeout_sec=DEADLINE_SEC)
    whole, elastic = (training_weights(read_checkpoint(find_checkpoint(tmp_path / name))) for name in ('whole', 'elastic'))
    for name, weight in whole.items():
        assert (elastic[name] - weight).abs().max() < 2e-4, name  # to the order of summation


def test_a_machine_more_and_one_that_is_lost(cluster, settings, tmp_path):
    duration = 'train.duration=260ba'
    with Driver(cluster, tmp_path, '--workers', '1..3', *settings, duration, f'run_folder={tmp_path}/elastic') as driver:
        driver.wait_for(lambda: driver.batch() > 20)
        cluster.add_node(num_cpus=1)
        driver.wait_for(lambda: '3 of 3 workers train' in driver.read() and driver.batch() > 20)
        grown = driver.read()
        lose_machine(cluster)
        printed = driver.wait(0)
    saved = re.search(r'stopped on request and saved after batch (\d+); resume with: python -m launch.ray.train \S+ --gpus 0', grown)
    assert f'resuming from {tmp_path}/elastic/checkpoints/ba{int(saved[1]):08d}.pt' in grown  # a larger cluster costs no step
    assert re.findall(r'(\d) of \d workers train', printed)[0] == '2'
    assert re.findall(r'(\d) of \d workers train', printed)[-1] == '2'
    assert_same_weights(tmp_path, settings, duration)


def test_asked_to_stop_it_saves_and_the_same_command_resumes(cluster, settings, tmp_path):
    words = ['--workers', '2', *settings, 'train.duration=400ba', f'run_folder={tmp_path}/elastic']
    with Driver(cluster, tmp_path, *words) as driver:
        driver.wait_for(lambda: driver.batch() > 20)
        driver.process.terminate()
        driver.wait(PREEMPTED)
    assert_none_left(tmp_path)
    with Driver(cluster, tmp_path, *words[:-2], 'train.duration=60ba', words[-1]) as driver:
        assert 'resuming from' in driver.wait(0)


def test_a_rank_that_is_killed_while_it_starts_leaves_no_other_behind(cluster, settings, tmp_path):
    with Driver(cluster, tmp_path, '--workers', '2', *settings, 'train.duration=30ba', f'run_folder={tmp_path}/elastic') as driver:
        driver.wait_for(lambda: len(ranks(tmp_path)) == 2)
        first = ranks(tmp_path)
        first[-1].kill()
        driver.wait(0)
    assert_none_left(tmp_path)
    assert not any(one.is_running() for one in first)


def test_wrong_encoders_are_not_tried_again(cluster, settings, tmp_path):
    (tmp_path / 'none').mkdir()
    with Driver(cluster, tmp_path, '--workers', '1..2', *settings, f'model.encoders.source={tmp_path}/none') as driver:
        printed = driver.wait(BAD_DATA)
    assert printed.count(' workers train, ') == 1
    assert f'{tmp_path}/none' in printed


@pytest.mark.parametrize(
    ('words', 'code', 'message'),
    [
        (['--workers', '3..2'], BAD_INPUT, "'3..2' is neither a number of workers nor a range such as 2..8"),
        ([], BAD_INPUT, '--workers'),
        (['--workers', '2', 'batch.global_sise=8'], BAD_RECIPE, 'batch.global_size'),
        (['--workers', '13..14', '--gpus', '0', *BATCH], BAD_RECIPE, 'batch.global_size: 12 is not divisible by 13 GPUs'),
        (['--workers', '2', '--address', '127.0.0.1:1024', '--gpus', '0', *BATCH], STALLED, 'no Ray cluster at 127.0.0.1:1024'),
    ],
)
def test_mistakes_are_told_before_a_cluster_is_asked(words, code, message):
    result = subprocess.run([*SCRIPT, *words], capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert (result.returncode, message in result.stderr) == (code, True), result.stderr


@pytest.mark.long
def test_ten_random_losses_and_returns_change_no_weight(cluster, settings, tmp_path):
    rng, duration = random.Random(time.time_ns()), 'train.duration=1500ba'
    with Driver(cluster, tmp_path, '--workers', '1..4', '--failures', '100', *settings, duration, f'run_folder={tmp_path}/elastic') as driver:
        for _ in range(10):
            at = driver.batch() + rng.randrange(60)
            driver.wait_for(lambda at=at: driver.batch() > at)
            machines = len(cluster.worker_nodes)
            if machines == 1 or (machines < 4 and rng.random() < 0.5):
                cluster.add_node(num_cpus=1)
            else:
                lose_machine(cluster)
        driver.wait(0)
    assert_same_weights(tmp_path, settings, duration)
