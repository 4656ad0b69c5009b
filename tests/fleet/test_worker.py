"""`fleet worker` against a service that answers as the protocol says, or does not answer."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from diffusion import __version__
from diffusion.contracts.errors import InputError
from fleet.attempts.workplace import StopRequest
from fleet.jobs.checking import recipe_digests
from fleet.worker.presigned import ServiceClient
from fleet.worker.worker import FleetWorker, MachineFacts, gpu_of_driver, kind_of
from tests.conftest import REPOSITORY
from tests.fleet.conftest import stand_ins
from tests.fleet.fake_service import NODE_TOKEN, SIGNATURE, TOKEN, FakeService
from tests.fleet.test_run import processes_of, wait_until
from tests.fleet.trainer import content_at


class Running:
    """A worker in a thread, and what it says."""

    def __init__(self, service, tmp_path, recipes, *export, token=TOKEN, idle_sec=1.0, **options):
        self.lines, self.codes, self.stop, self.work = [], [], StopRequest(), tmp_path / 'work'
        facts = MachineFacts('m1', 'cpu', 0.0)
        programs = stand_ins(*export, **options)
        self.worker = FleetWorker(service.url, token, facts, self.work, programs, self.stop, self.lines.append, idle_sec, recipes=recipes)
        self.thread = threading.Thread(target=lambda: self.codes.append(self.worker.run()))
        self.thread.start()

    def wait(self, timeout_sec=60):
        self.thread.join(timeout_sec)
        assert self.codes, self.lines
        return self.codes[0]

    @property
    def said(self):
        return '\n'.join(self.lines)

    def trains(self):
        return len(list(self.work.glob('attempts/*/run/log.jsonl'))) > 0


@pytest.fixture
def service(archive):
    made = FakeService([])
    made.photos = made.put('owners/o/inputs/photos.tar', archive.read_bytes())
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture
def start(service, tmp_path, recipes):
    running = []

    def begin(*export, **options):
        running.append(Running(service, tmp_path, recipes, *export, **options))
        return running[-1]

    yield begin
    for worker in running:
        service.leases.clear()
        worker.stop.ask()
        worker.thread.join(60)


def lease(service, job='j1', epoch=1, **more):
    return {
        'job': job, 'epoch': epoch, 'name': 'timber', 'owner_hash': 'x', 'kind': 'train', 'recipe': 'small.yaml', 'overrides': {'seed': 7},
        'validation': {}, 'inputs': {'subject': service.photos}, 'hours_left': 5.0, **more,
    }  # fmt: skip


def test_jobs_are_done_one_after_another(service, start, capfd):
    service.jobs += [lease(service), lease(service, 'j2', 3)]
    worker = start()
    assert worker.wait() == 0
    for job, epoch in (('j1', 1), ('j2', 3)):
        ended = service.ended[job]
        assert (ended['exit_code'], ended['ending'], ended['step'], ended['epoch']) == (0, None, 6, epoch)
        assert service.objects[f'owners/o/jobs/{job}/e{epoch}/result/lora/weights.safetensors'] == content_at(6)
        assert service.checkpoints[job]['step'] == 6
    assert service.asked('/leave') == [{}]
    (facts,) = service.asked('/enroll')
    said = {'machine': 'm1', 'gpu': 'cpu', 'gpu_gb': 0.0, 'image': '', 'gpus': 1, 'version': __version__}
    assert facts == {**said, 'recipes': recipe_digests(worker.worker.recipes)}
    assert list(facts['recipes']) == ['small.yaml']
    assert list((worker.work / 'attempts').iterdir()) == []
    assert 'claimed j1 (timber), attempt 1, 5.0 h left' in worker.said
    everything = worker.said + ''.join(capfd.readouterr())
    for secret in (SIGNATURE, TOKEN, NODE_TOKEN):
        assert secret not in everything


def test_renewals_carry_step_and_speed(service, start):
    service.jobs.append(lease(service))
    start(steps=40, step_sec=0.05).wait()
    renewals = service.asked('/renew')
    assert len(renewals) >= 4
    steps = [renewal['step'] for renewal in renewals]
    assert steps == sorted(steps)
    assert steps[-1] > 5
    speeds = [renewal['steps_per_sec'] for renewal in renewals if renewal['steps_per_sec']]
    assert 3 < speeds[-1] <= 20


def test_it_resumes_from_the_services_checkpoint(service, start, capfd):
    service.jobs.append(lease(service))
    assert start(code=70, at=5).wait() == 0
    assert service.ended['j1']['exit_code'] == 70
    assert 'ending with 70: a long story' in service.ended['j1']['message']
    assert service.checkpoints['j1']['step'] == 4
    service.jobs.append(lease(service, epoch=2))
    worker = start()
    worker.wait()
    assert 'starting at 4' in capfd.readouterr().err
    assert 'from step 4' in worker.said
    assert service.ended['j1']['step'] == 6


@pytest.mark.parametrize('code', [64, 65, 76, 77, 137])
def test_exit_codes_are_reported(service, start, code):
    service.jobs.append(lease(service))
    start(code=-9 if code == 137 else code, at=3).wait()
    assert service.ended['j1']['exit_code'] == code


def test_a_fenced_worker_kills_training_at_once(service, start):
    service.jobs.append(lease(service))
    worker = start(steps=100000, every=100000, deaf=True, grandchild=True)
    wait_until(worker.trains)
    assert len(processes_of(worker.work)) == 3
    service.leases['j1'] = 2
    wait_until(lambda: processes_of(worker.work) == [], 5)
    assert worker.wait() == 0
    assert service.ended == {}
    assert 'attempt 1 is over' in worker.said


def test_a_fenced_publication_ends_it_too(service, start):
    service.jobs.append(lease(service))
    service.fails = lambda method, path: 409 if path.endswith('/publish') else None
    worker = start(steps=100000, every=2, deaf=True)
    assert worker.wait() == 0
    assert 'dropped' in worker.said
    assert service.ended == {}


def test_release_saves_publishes_gives_back_and_leaves(service, start):
    service.jobs += [lease(service), lease(service, 'j2')]
    worker = start(steps=100000, every=100000)
    wait_until(worker.trains)
    service.action = 'release'
    assert worker.wait() == 0
    ended = service.ended['j1']
    assert (ended['exit_code'], ended['ending']) == (75, 'released')
    assert service.checkpoints['j1']['step'] == ended['step'] > 0
    assert len(service.jobs) == 1
    assert service.asked('/leave')


def test_stop_ends_the_job_and_the_next_one_begins(service, start):
    service.jobs.append(lease(service))
    worker = start(steps=100000, every=100000)
    wait_until(worker.trains)
    service.action = 'stop'
    wait_until(lambda: 'j1' in service.ended)
    assert (service.ended['j1']['exit_code'], service.ended['j1']['ending']) == (75, None)
    service.action = 'continue'
    service.jobs.append(lease(service, 'j2', recipe='none.yaml'))
    assert worker.wait() == 0
    assert service.ended['j2']['exit_code'] == 64


def test_a_service_that_is_away_is_trained_through(service, start):
    service.times |= {'lease_sec': 3.0, 'grace_sec': 20.0}
    service.jobs.append(lease(service))
    worker = start(steps=120, every=10, idle_sec=30.0)
    wait_until(lambda: service.checkpoints)
    away = threading.Event()
    away.set()
    service.fails = lambda method, path: 503 if away.is_set() else None
    puts = len(service.objects)
    time.sleep(4)  # beyond the lease
    assert len(service.objects) <= puts + 2
    assert worker.trains()
    away.clear()
    wait_until(lambda: service.ended)
    worker.stop.ask()
    assert worker.wait() == 0
    assert service.ended['j1']['exit_code'] == 0
    assert 'renewed again after' in worker.said


def test_when_it_stays_away_training_is_killed_after_the_grace(service, start):
    service.times |= {'lease_sec': 2.0, 'grace_sec': 1.0}
    service.jobs.append(lease(service))
    worker = start(steps=100000, every=100000, deaf=True)
    wait_until(worker.trains)
    service.fails = lambda method, path: 'cut'
    began = time.monotonic()
    wait_until(lambda: processes_of(worker.work) == [], 20)
    assert time.monotonic() - began > 2.0
    wait_until(lambda: 'could not be renewed' in worker.said, 20)  # it says so when they are gone


def test_no_time_of_day_is_used(service, start, monkeypatch):
    monkeypatch.setattr(time, 'time', lambda: 0.0)
    service.jobs.append(lease(service))
    assert start().wait() == 0
    assert service.ended['j1']['exit_code'] == 0


@pytest.mark.parametrize('status', [410, 401])
def test_told_to_leave_it_leaves(service, start, status):
    service.fails = lambda method, path: status if path == '/claim' else None
    worker = start(idle_sec=60.0)
    assert worker.wait(10) == 0
    assert bool(service.asked('/leave')) == (status == 410)
    assert ('another worker has enrolled as m1, or the token was revoked' in worker.said) == (status == 401)


def test_a_replaced_token_ends_the_attempt_and_the_worker(service, start):
    service.jobs += [lease(service), lease(service, 'j2')]
    worker = start(steps=100000, every=100000, deaf=True, idle_sec=60.0)
    wait_until(worker.trains)
    service.fails = lambda method, path: 401
    assert worker.wait(20) == 0
    assert len(service.jobs) == 1
    assert processes_of(worker.work) == []


def test_a_wrong_pool_token_is_said(service, start):
    worker = start(token='wrong')
    assert worker.wait() == 2
    assert 'not enrolled: no such token' in worker.said


def test_of_two_workers_in_one_folder_the_second_is_refused(service, start, tmp_path, recipes):
    worker = start(idle_sec=60.0)
    wait_until(lambda: service.asked('/claim'))
    second = FleetWorker(service.url, TOKEN, MachineFacts('m2'), worker.work, stand_ins(), StopRequest(), print, recipes=recipes)
    with pytest.raises(InputError, match='--work: another worker runs in .*; name a folder of its own'):
        second.run()
    assert len(service.asked('/enroll')) == 1


def test_retry_after_is_respected(service, start):
    service.retry_after = 2
    assert start(idle_sec=3.0).wait() == 0
    assert len(service.asked('/claim')) == 2


def test_three_failures_in_a_row_and_it_goes(service, start):
    service.jobs += [lease(service, f'j{i}') for i in range(6)]
    worker = start(code=70, at=1)
    assert worker.wait() == 76
    assert len(service.ended) == 3
    assert service.asked('/leave')


@pytest.mark.parametrize(('code', 'left', 'num_ended'), [(65, 0, 4), (77, 0, 4), (64, 76, 3)])
def test_failures_of_jobs_are_not_its_own(service, start, code, left, num_ended):
    """But the service has judged the recipes: three jobs in a row whose recipe is wrong here, and here is wrong."""
    service.jobs += [lease(service, f'j{i}') for i in range(4)]
    assert start(code=code, at=1).wait() == left
    assert len(service.ended) == num_ended


def test_expired_addresses_are_asked_for_again(service, start):
    service.expired.add('owners/o/inputs/photos.tar')
    service.jobs.append(lease(service))
    start().wait()
    assert len(service.asked('/inputs')) == 1
    assert service.ended['j1']['exit_code'] == 0


def test_an_input_that_never_arrives_is_the_machines_fault(service, start, monkeypatch):
    monkeypatch.setattr('fleet.attempts.workplace.FIRST_PAUSE_SEC', 0.01)
    service.photos['sha256'] = '0' * 64
    service.jobs.append(lease(service))
    worker = start()
    worker.wait()
    assert (service.ended['j1']['exit_code'], service.ended['j1']['ending']) == (None, 'node_fault')
    assert 'inputs/subject did not arrive in 5 attempts' in service.ended['j1']['message']
    assert re.search(r'ended \(node_fault\) at step 0 after .* min: inputs/subject did not arrive', worker.said)


def test_what_is_there_already_is_published(service, start):
    """An upload whose answer was lost: 412 the second time."""
    lost = []

    def fails(method, path):
        if method == 'PUT' and not lost:
            lost.append(path.removeprefix('/o/'))
            service.objects[lost[0]] = content_at(2) if path.endswith('.pt') else b'other'
            return 503
        return None

    service.fails = fails
    service.jobs.append(lease(service))
    start(steps=2).wait()
    assert lost
    assert service.ended['j1']['exit_code'] == 0
    assert service.checkpoints['j1']['step'] == 2


def test_a_refused_checkpoint_costs_only_itself(service, start):
    service.fails = lambda method, path: 422 if path.endswith('/publish') and len(service.asked('/publish')) == 1 else None
    service.jobs.append(lease(service))
    worker = start(steps=6, step_sec=0.4)
    worker.wait()
    assert 'was refused' in worker.said
    assert service.checkpoints['j1']['step'] == 6
    assert service.ended['j1']['exit_code'] == 0


def test_a_pickle_is_no_result(service, start):
    service.jobs.append(lease(service))
    start('weights.pt').wait()
    assert service.ended['j1']['ending'] == 'node_fault'
    assert not [key for key in service.objects if '/result/' in key]


def test_prompts_are_drawn_with_the_parents_result(service, start):
    files = {name: service.put(f'owners/o/jobs/j0/e1/result/{name}', content) for name, content in
             {'lora/weights.safetensors': content_at(6), 'export.json': b'{}'}.items()}  # fmt: skip
    prompts = ['--a dash', 'two\nlines', '$HOME']
    validation = {'prompts': prompts, 'seed': 3, 'guidance': None, 'steps': 2}
    service.jobs.append(lease(service, kind='sample', model=files, validation=validation, inputs={}))
    start().wait()
    assert service.ended['j1']['exit_code'] == 0
    assert sorted(service.ended['j1']['files']) == ['0000.png', '0001.png', '0002.png', 'grid.png']
    drawn = [service.objects[f'owners/o/jobs/j1/e1/result/{i:04d}.png'].decode() for i in range(3)]
    assert drawn == [f'{prompt} weights after 6' for prompt in prompts]
    assert '"--seed", "3", "--steps", "2"' in service.objects['owners/o/jobs/j1/e1/result/grid.png'].decode()


def test_a_hostile_name_of_a_result_stays_out(service, start, tmp_path):
    files = {'../../../evil.json': service.put('x', b'{}')}
    service.jobs.append(lease(service, kind='sample', model=files, inputs={}))
    start().wait()
    assert service.ended['j1']['ending'] == 'node_fault'
    assert not list(tmp_path.rglob('evil.json'))


def test_a_base_stays_warm_until_there_is_no_room(service, start, tmp_path, archive):
    other = tmp_path / 'other.tar'
    subprocess.run(['tar', 'cf', other, '-C', tmp_path / 'subject', '0.png'], check=True)
    base, second = service.put('base', archive.read_bytes()), service.put('second', other.read_bytes())
    got = []
    service.fails = lambda method, path: got.append(path) if path in ('/o/base', '/o/second') else None
    service.jobs += [lease(service, f'j{i}', inputs={'subject': service.photos, 'base': base}) for i in range(2)]
    start().wait()
    assert got == ['/o/base']
    assert len(service.ended) == 2
    service.jobs.append(lease(service, 'j3', inputs={'subject': service.photos, 'base': second}))
    worker = start()
    worker.wait()
    bases = worker.work / 'warm/bases'
    assert {path.name for path in bases.iterdir() if path.is_dir()} == {base['sha256'], second['sha256']}
    small = start(idle_sec=0.2)
    small.wait()
    small.worker.warm.keep_gb = 1e-9  # less than any base
    with small.worker.warm.holding(second['sha256']):
        small.worker.warm._make_room(1, '0' * 64)
        assert {path.name for path in bases.iterdir() if path.is_dir()} == {second['sha256']}


def test_sigterm_saves_hands_over_and_leaves(service, tmp_path, recipes):
    code = (
        'import sys\n'
        'from pathlib import Path\n'
        'from fleet.attempts.attempt import Programs, write_log\n'
        'from fleet.attempts.workplace import StopRequest\n'
        'from fleet.worker.worker import FleetWorker, MachineFacts\n'
        'url, token, work, recipes, trainer = sys.argv[1:]\n'
        'stop = StopRequest()\n'
        'programs = Programs((sys.executable, trainer, \'{"steps": 100000, "every": 100000}\'))\n'
        'with stop.on_signals():\n'
        '    sys.exit(FleetWorker(url, token, MachineFacts("m"), Path(work), programs, stop, write_log, 60.0, recipes=Path(recipes)).run())\n'
    )
    service.jobs.append(lease(service))
    words = [sys.executable, '-c', code, service.url, TOKEN, tmp_path / 'work', recipes, REPOSITORY / 'tests/fleet/trainer.py']
    worker = subprocess.Popen([str(word) for word in words], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_until(lambda: len(list(Path(tmp_path).glob('work/attempts/*/run/log.jsonl'))) > 0)
    time.sleep(0.5)
    os.killpg(worker.pid, signal.SIGTERM)
    _, said = worker.communicate(timeout=30)
    assert worker.returncode == 0, said
    assert service.ended['j1']['exit_code'] == 75
    assert service.checkpoints['j1']['step'] == service.ended['j1']['step']
    assert service.asked('/leave')


def test_a_server_with_a_password_is_refused():
    for wrong in ('ftp://host', 'https://me:secret@host', 'host'):
        with pytest.raises(InputError, match='HOST'):
            ServiceClient(wrong)


def test_kinds_of_gpus_have_the_names_of_price_lists(monkeypatch, tmp_path):
    assert kind_of('NVIDIA GeForce RTX 4090') == 'rtx-4090'
    assert kind_of('NVIDIA H100 80GB HBM3') == 'h100-80gb-hbm3'
    smi = tmp_path / 'nvidia-smi'
    smi.write_text('#!/bin/sh\necho "NVIDIA GeForce RTX 4090, 24564"\necho "NVIDIA GeForce RTX 3090, 24576"\n')
    smi.chmod(0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
    assert gpu_of_driver() == ('rtx-4090', 25.8)
    smi.write_text('#!/bin/sh\necho "Failed to initialize NVML"\nexit 9\n')
    assert gpu_of_driver() == ('cpu', 0.0)


def test_the_command_says_what_is_wrong_with_the_token(tmp_path):
    words = [
        sys.executable,
        '-m',
        'fleet',
        'worker',
        '--server',
        'https://host',
        '--work',
        tmp_path / 'w',
        '--token-file',
        tmp_path / 'none',
    ]
    ended = subprocess.run([str(word) for word in words], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert '--token-file' in ended.stderr
    assert 'Traceback' not in ended.stderr
