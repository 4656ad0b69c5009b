"""`fleet run`: one machine after another does a job, and of two at the same time one."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from diffusion.common import object_storage
from diffusion.common.storage import open_folder
from diffusion.contracts.errors import InputError
from fleet.attempts import direct
from fleet.attempts.direct import LatestRecord, take_job
from fleet.attempts.workplace import StopRequest
from fleet.jobs.spec import JobError, load_spec
from tests.conftest import REPOSITORY, read_json
from tests.fleet.conftest import described, stand_ins
from tests.fleet.trainer import content_at


@pytest.fixture
def options(tmp_path, recipes, job):
    def make(path=None, **more):
        return {'job': path or job(), 'work': tmp_path / 'work', 'outputs': str(tmp_path / 'out'), 'recipes': recipes, **more}

    return make


def run_job(options, programs, stop):
    return direct.run_job(**options, programs=programs, stop=stop)


def latest(tmp_path, name='timber'):
    return read_json(tmp_path / 'out' / name / 'latest.json')


def in_thread(*arguments):
    """Run a job in a thread; the code is appended to the list when it has ended."""
    codes = []
    thread = threading.Thread(target=lambda: codes.append(run_job(*arguments)))
    thread.start()
    return thread, codes


def wait_until(condition, timeout_sec=60):
    deadline = time.monotonic() + timeout_sec
    while not condition():
        assert time.monotonic() < deadline, 'it never came'
        time.sleep(0.02)


def published(tmp_path, name='timber'):
    path = tmp_path / 'out' / name / 'latest.json'
    return (read_json(path)['checkpoint'] or {'step': 0})['step'] if path.exists() else 0


def result_of(tmp_path, name='timber'):
    return latest(tmp_path, name)['result']


def test_a_job_is_done_once(options, tmp_path, capfd):
    assert run_job(options(), stand_ins(), StopRequest()) == 0
    result = result_of(tmp_path)
    assert sorted(result['files']) == ['export.json', 'log.jsonl', 'lora/weights.safetensors']
    assert (tmp_path / 'out/timber' / result['folder'] / 'lora/weights.safetensors').read_bytes() == content_at(6)
    assert (result['folder'], result['step']) == ('e1/result', 6)
    assert list((tmp_path / 'work/attempts').iterdir()) == []
    before = (tmp_path / 'out/timber/latest.json').read_bytes()
    assert run_job(options(), stand_ins(code=70, at=0), StopRequest()) == 0
    assert 'is done already' in capfd.readouterr().err
    assert (tmp_path / 'out/timber/latest.json').read_bytes() == before


@pytest.mark.parametrize('code', [64, 65, 70, 73, 75, 76, 77])
def test_the_code_of_training_is_that_of_the_run(options, tmp_path, capfd, code):
    assert run_job(options(), stand_ins(code=code, at=3), StopRequest()) == code
    assert published(tmp_path) == 2
    assert f'ending with {code}: a long story' in capfd.readouterr().err


def test_a_killed_training_is_128_and_the_next_attempt_resumes(options, tmp_path, capfd):
    assert run_job(options(), stand_ins(code=-9, at=5), StopRequest()) == 137
    assert published(tmp_path) == 4
    assert run_job(options(work=tmp_path / 'other'), stand_ins(), StopRequest()) == 0
    assert 'starting at 4' in capfd.readouterr().err
    assert (latest(tmp_path)['epoch'], published(tmp_path)) == (2, 6)
    result = tmp_path / 'out/timber' / result_of(tmp_path)['folder']
    steps = [json.loads(line)['batch'] for line in (result / 'log.jsonl').read_text().splitlines()]
    assert sorted(set(steps)) == [1, 2, 3, 4, 5, 6]  # those of the first machine too


def test_inputs_arrive_and_secrets_do_not(options, tmp_path, monkeypatch):
    for name in ('AWS_SECRET_ACCESS_KEY', 'HF_TOKEN', 'FLEET_TOKEN', 'SOMETHING', 'WANDB_API_KEY', 'HF_HUB_TOKEN'):
        monkeypatch.setenv(name, 'secret-of-the-machine')
    seen = {}

    class Stop(StopRequest):
        """Looks before the folder is deleted."""

        def __init__(self):
            super().__init__()
            self._asked = False

        @property
        def asked(self):
            for path in (tmp_path / 'work/attempts').glob('*/seen.json'):
                seen.update(read_json(path) if path.read_text().endswith('}') else {})
            return self._asked

        @asked.setter
        def asked(self, value):
            self._asked = value

    assert run_job(options(), stand_ins(), Stop()) == 0
    assert 'secret-of-the-machine' not in json.dumps(seen)
    assert seen['environment']['HOME'].startswith(str(tmp_path / 'work/warm'))
    assert seen['inputs'] == ['inputs/subject', 'inputs/subject/0.png', 'inputs/subject/1.png']
    assert str(tmp_path / 'work') not in json.dumps(seen['arguments'])  # paths of a machine get into checkpoints and results otherwise


def test_asked_to_stop_it_saves_publishes_and_resumes(options, tmp_path):
    stop = StopRequest()
    thread, codes = in_thread(options(), stand_ins(steps=10000, every=5000), stop)
    wait_until(lambda: len(list((tmp_path / 'work/attempts').glob('*/run/log.jsonl'))) > 0)
    time.sleep(0.5)
    stop.ask()
    thread.join(30)
    assert codes == [75]
    step = published(tmp_path)
    assert step > 0
    assert run_job(options(), stand_ins(steps=step + 1), StopRequest()) == 0


def test_of_two_at_the_same_time_the_older_ends_with_73(options, tmp_path):
    older, codes = in_thread(options(), stand_ins(steps=10000, every=5, step_sec=0.02), StopRequest())
    wait_until(lambda: published(tmp_path))
    newer, others = in_thread(options(work=tmp_path / 'other'), stand_ins(steps=200, step_sec=0.02), StopRequest())
    older.join(60)
    newer.join(60)
    assert (codes, others) == ([73], [0])
    assert result_of(tmp_path)['folder'] == 'e2/result'


def test_an_engine_may_count_the_attempts(options, tmp_path, capfd):
    assert run_job(options(epoch=5), stand_ins(code=70, at=3), StopRequest()) == 70
    for late in (5, 4):
        assert run_job(options(epoch=late), stand_ins(), StopRequest()) == 73
    assert f'attempt {late} is late, attempt 5 has begun' in capfd.readouterr().err
    assert run_job(options(epoch=7), stand_ins(), StopRequest()) == 0


def test_of_many_that_begin_at_once_each_has_its_own_epoch(job, tmp_path):
    spec, folder, epochs = load_spec(job()), open_folder(tmp_path / 'out/timber'), []
    threads = [threading.Thread(target=lambda: epochs.append(take_job(folder, spec, None).epoch)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(epochs) == list(range(1, 9))


def test_one_of_the_same_number_loses(job, tmp_path):
    """Content alone would not tell the two apart."""
    records = [LatestRecord(job_sha256='0' * 64, epoch=1, token=token) for token in ('a', 'b')]
    folder = open_folder(tmp_path / 'out/timber')
    assert [folder.swap('latest.json', None, record.to_json()) for record in records] == [True, False]


def test_old_checkpoints_and_what_was_never_published_go(options, tmp_path):
    left = tmp_path / 'out/timber/e1/s99/ba00000099.pt'
    assert run_job(options(), stand_ins(steps=20, step_sec=0.3, every=1, code=70, at=6), StopRequest()) == 70
    assert [path.name for path in (tmp_path / 'out/timber/e1').iterdir()] == ['s6']
    left.parent.mkdir()
    left.write_text('half')
    assert run_job(options(), stand_ins(steps=7), StopRequest()) == 0
    assert not left.exists()


def test_another_job_of_the_same_name_is_refused(options, job, tmp_path):
    run_job(options(), stand_ins(code=70, at=3), StopRequest())
    with pytest.raises(InputError, match='holds another job'):
        run_job(options(job(overrides={'seed': 8})), stand_ins(), StopRequest())
    assert run_job(options(), stand_ins(), StopRequest()) == 0
    with pytest.raises(InputError, match='holds another job'):
        run_job(options(job(overrides={'seed': 8})), stand_ins(), StopRequest())


def test_an_input_with_another_digest_is_refused(options, job, archive):
    wrong = {**described(archive), 'sha256': '0' * 64}
    assert run_job(options(job(inputs={'subject': wrong})), stand_ins(), StopRequest()) == 65
    short = {**described(archive), 'bytes': 3}
    assert run_job(options(job('short', inputs={'subject': short})), stand_ins(), StopRequest()) == 65


@pytest.mark.parametrize('given', ['subject', {'path': 'subject'}, {'url': 'subject'}, 'subject.tar', {'url': 'subject.tar'}])
def test_an_input_may_be_a_path_from_the_folder_of_the_job(options, job, monkeypatch, tmp_path, given):
    """Of the job's file, not of the process."""
    (tmp_path / 'elsewhere').mkdir()
    monkeypatch.chdir(tmp_path / 'elsewhere')
    assert run_job(options(Path('../') / job(inputs={'subject': given}).name), stand_ins(), StopRequest()) == 0


def test_a_bare_name_of_an_archive_is_not_looked_for_in_the_root(options, job, archive):
    assert run_job(options(job(inputs={'subject': {**described(archive), 'url': 'subject.tar'}})), stand_ins(), StopRequest()) == 0


def test_a_digest_of_a_folder_is_refused(options, job):
    wrong = {'url': 'subject', 'sha256': '0' * 64, 'bytes': 3}
    with pytest.raises(JobError, match=r'subject is a folder, and sha256 and bytes belong to one file; leave them out'):
        run_job(options(job(inputs={'subject': wrong})), stand_ins(), StopRequest())


def test_a_path_that_is_not_there_is_said(options, job, tmp_path):
    with pytest.raises(JobError, match=f'inputs.subject: {tmp_path}/none is not there; paths count from'):
        run_job(options(job(inputs={'subject': 'none'})), stand_ins(), StopRequest())


def test_another_file_in_a_folder_is_another_job(options, job, tmp_path):
    path = job(inputs={'subject': 'subject'})
    assert run_job(options(path), stand_ins(), StopRequest()) == 0
    (tmp_path / 'subject/2.png').write_bytes(b'2')
    with pytest.raises(InputError, match='holds another job'):
        run_job(options(path), stand_ins(), StopRequest())


def test_a_relative_work_folder_keeps_caches(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "import os, sys; from pathlib import Path; Path(os.environ['HF_HOME']).mkdir(parents=True); sys.exit(64)"
    programs = replace(stand_ins(), train=(sys.executable, '-c', code))
    assert run_job(options(work=Path('w1')), programs, StopRequest()) == 64
    assert (tmp_path / 'w1/warm/home/huggingface').is_dir()


def test_prompts_are_drawn_into_the_result(options, job, tmp_path):
    assert run_job(options(job(validation={'prompts': ['--a dash', 'two'], 'steps': 2})), stand_ins(), StopRequest()) == 0
    result = result_of(tmp_path)
    images = tmp_path / 'out/timber' / result['folder'] / 'images'
    assert sorted(path.name for path in images.iterdir()) == ['0000.png', '0001.png', 'grid.png']
    assert (images / '0000.png').read_text() == '--a dash weights after 6'


def test_prompts_that_cannot_be_drawn_may_be_left_out(options, job, tmp_path, capfd):
    programs = replace(stand_ins(), generate=(sys.executable, '-c', 'raise SystemExit("no memory")'))
    assert run_job(options(job(validation={'prompts': ['one']})), programs, StopRequest()) == 70
    assert 'drawing validation.prompts ended with exit code 1; without them' in capfd.readouterr().err
    assert run_job(options(), programs, StopRequest()) == 0  # the same job


def test_the_run_has_the_name_of_the_job(options, job, tmp_path):
    code = 'import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(" ".join(sys.argv[2:])); sys.exit(64)'
    programs = replace(stand_ins(), train=(sys.executable, '-c', code, str(tmp_path / 'words')))
    assert run_job(options(job(name='sundial')), programs, StopRequest()) == 64
    assert ' name="sundial" ' in (tmp_path / 'words').read_text()


def test_the_step_of_the_end_is_the_furthest_that_is_known(options, capfd):
    """A child's log may say less than its checkpoints."""
    code = 'import sys; from pathlib import Path; from tests.fleet.trainer import save; save(Path("run/checkpoints"), 4); sys.exit(70)'
    assert run_job(options(), replace(stand_ins(), train=(sys.executable, '-c', code)), StopRequest()) == 70
    assert 'ended with exit code 70 at step 4' in capfd.readouterr().err


def test_a_full_disk_is_the_machines_fault(options, tmp_path, capfd, monkeypatch):
    code = 'import sys; print("OSError: [Errno 28] No space left on device"); sys.exit(70)'
    programs = replace(stand_ins(), train=(sys.executable, '-c', code))
    assert run_job(options(), programs, StopRequest()) == 76
    assert 'ended with exit code 76 at step 0: the disk of this machine is full' in capfd.readouterr().err
    monkeypatch.setattr('fleet.attempts.attempt.LEAST_FREE_BYTES', 1 << 60)
    assert run_job(options(), stand_ins(code=70, at=3), StopRequest()) == 76
    assert 'at step 3: the disk of this machine is full' in capfd.readouterr().err
    assert run_job(options(), stand_ins(code=64, at=3), StopRequest()) == 64


def test_a_damaged_checkpoint_is_no_new_beginning(options, tmp_path):
    run_job(options(), stand_ins(code=70, at=3), StopRequest())
    path = tmp_path / 'out/timber' / latest(tmp_path)['checkpoint']['folder']
    (path / 'ba00000002.pt').write_bytes(b'x' * len(content_at(2)))
    assert run_job(options(), stand_ins(), StopRequest()) == 65
    (path / 'ba00000002.pt').unlink()
    assert run_job(options(), stand_ins(), StopRequest()) == 65
    path = tmp_path / 'out/timber/latest.json'
    record = read_json(path)
    for wrong in ({**record, 'epoch': 'one'}, {**record, 'step': 2}):  # another version may mean something by what this one does not know
        path.write_text(json.dumps(wrong))
        with pytest.raises(InputError, match='is damaged, or of another version; restore it'):
            run_job(options(), stand_ins(), StopRequest())


def test_nothing_but_results_is_a_result(options, tmp_path, capfd):
    assert run_job(options(), stand_ins('weights.pt'), StopRequest()) == 76
    assert 'weights.pt is no result' in capfd.readouterr().err
    assert result_of(tmp_path) is None


def test_a_bad_job_costs_nothing(options, job, tmp_path):
    with pytest.raises(JobError, match="did you mean 'small.yaml'"):
        run_job(options(job(recipe='smal.yaml')), stand_ins(), StopRequest())
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize(('keys', 'code'), [({'recipe': 'none.yaml'}, 64), ({'priority': 'high'}, 64)])
def test_the_command_ends_with_64(job, recipes, tmp_path, keys, code):
    command = [sys.executable, '-m', 'fleet', 'run', str(job(**keys)), '--work', str(tmp_path / 'work'), '--outputs', str(tmp_path / 'out')]
    ended = subprocess.run([*command, '--recipes', str(recipes)], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ended.returncode == code, ended.stderr
    assert 'Traceback' not in ended.stderr


def test_in_object_storage_too(options, s3, tmp_path):
    out = 's3://bucket/jobs'
    assert run_job(options(outputs=out), stand_ins(code=70, at=3), StopRequest()) == 70
    assert run_job(options(outputs=out), stand_ins(), StopRequest()) == 0
    assert 'jobs/timber/e2/result/export.json' in s3.object_names()
    assert not [name for name in s3.object_names() if '/e1/s' in name and '/s2/' not in name]


def test_an_outage_of_storage_is_waited_out(options, s3, monkeypatch):
    monkeypatch.setattr(object_storage, 'ATTEMPTS', 2)  # of the client itself
    s3.proxy.fails = lambda method, path: '/s2/' in path and s3.proxy.num_failures < 5
    assert run_job(options(outputs='s3://bucket/jobs'), stand_ins(steps=2), StopRequest()) == 0
    assert s3.proxy.num_failures == 5
    assert any('/e1/s2/' in name for name in s3.object_names())
    object_storage.client_of.cache_clear()


def processes_of(folder: Path) -> list[int]:
    """Processes that run in a folder, or one below."""
    found = []
    for process in Path('/proc').glob('[0-9]*'):
        try:
            where = os.readlink(process / 'cwd')
        except OSError:
            continue
        if where.startswith(str(folder)):
            found.append(int(process.name))
    return found


def test_nothing_outlives_a_killed_worker(job, recipes, tmp_path):
    code = (
        'import sys\n'
        'from pathlib import Path\n'
        'from fleet.attempts.direct import run_job\n'
        'from fleet.attempts.workplace import StopRequest\n'
        'from tests.fleet.conftest import stand_ins\n'
        'job, work, out, recipes = map(Path, sys.argv[1:])\n'
        'programs = stand_ins(steps=10000, every=10000, grandchild=True, deaf=True)\n'
        'run_job(job, work, str(out), programs, StopRequest(), recipes=recipes)\n'
    )
    words = [sys.executable, '-c', code, job(), tmp_path / 'work', tmp_path / 'out', recipes]
    worker = subprocess.Popen([str(word) for word in words], cwd=REPOSITORY, stderr=subprocess.DEVNULL)
    wait_until(lambda: len(list((tmp_path / 'work/attempts').glob('*/run/log.jsonl'))) > 0)
    assert len(processes_of(tmp_path / 'work')) == 3  # guard, training and its child
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    wait_until(lambda: processes_of(tmp_path / 'work') == [], 10)
