"""The parts of an attempt: archives of strangers, checkpoints, children, progress."""

import hashlib
import io
import os
import resource
import signal
import stat
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from pathlib import Path

import pytest

from diffusion.checkpoints.manifest import Content, file_of, manifest_of
from fleet.attempts import transfers
from fleet.attempts.backend import HeldCheckpoint, JobInputError, MachineError, safe_name
from fleet.attempts.child import (
    MESSAGE_CHARS,
    Child,
    StepFollower,
    cut,
    environment_of_child,
    listeners,
    message_of,
    newest_step,
    refuse_strange_names,
    take,
)
from fleet.attempts.transfers import BackendUnavailable, WrongContent, download, unpack
from fleet.attempts.workplace import StopRequest, attempt_folder
from tests.conftest import REPOSITORY
from tests.fleet.test_run import wait_until
from tests.fleet.trainer import content_at, save


def unpacked(archive, tmp_path):
    (tmp_path / 'scratch').mkdir(exist_ok=True)
    unpack(archive, tmp_path / 'target', tmp_path / 'scratch', 'subject')
    return {path.relative_to(tmp_path / 'target').as_posix() for path in (tmp_path / 'target').rglob('*') if path.is_file()}


def make_tar(path, *members, mode='w'):
    """Members are names of files, or TarInfo."""
    with tarfile.open(path, mode) as tar:
        for member in members:
            info = tarfile.TarInfo(member) if isinstance(member, str) else member
            content = b'content' if info.isreg() else b''
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def special(name, kind, target=''):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize('mode', ['w', 'w:gz', 'w:xz'])
def test_a_tar_is_unpacked(tmp_path, mode):
    assert unpacked(make_tar(tmp_path / 'a.tar', 'a.png', 'b/c.png', mode=mode), tmp_path) == {'a.png', 'b/c.png'}


def test_a_single_folder_in_it_is_the_folder(tmp_path):
    assert unpacked(make_tar(tmp_path / 'a.tar', 'timber/a.png', './timber/b/c.png'), tmp_path) == {'a.png', 'b/c.png'}


def test_a_zip_is_unpacked(tmp_path):
    with zipfile.ZipFile(tmp_path / 'a.zip', 'w', zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr('all/a.png', 'content')
        zipped.writestr('all/all/.kept', 'content')
    assert unpacked(tmp_path / 'a.zip', tmp_path) == {'a.png', 'all/.kept'}


def test_a_file_stays_a_file(tmp_path):
    (tmp_path / 'a.png').write_bytes(b'\x89PNG no archive')
    unpack(tmp_path / 'a.png', tmp_path / 'target', tmp_path, 'subject')
    assert (tmp_path / 'target').read_bytes() == b'\x89PNG no archive'


@pytest.mark.parametrize(
    'member',
    [
        '../evil', 'a/../../evil', '/tmp/evil-of-the-test', special('link', tarfile.SYMTYPE, '/etc/passwd'), special('link', tarfile.SYMTYPE, 'a.png'),
        special('link', tarfile.LNKTYPE, 'a.png'), special('device', tarfile.CHRTYPE), special('pipe', tarfile.FIFOTYPE), 'a\\b', 'x' * 300, '/'.join('d' * 40),
        'a.png',
    ],
)  # fmt: skip
def test_hostile_tars_are_refused(tmp_path, member):
    with pytest.raises(JobInputError, match=r'inputs\.subject'):
        unpacked(make_tar(tmp_path / 'a.tar', 'a.png', member), tmp_path)
    assert not (tmp_path / 'target').exists()
    assert not list(tmp_path.parent.rglob('evil'))
    assert not Path('/tmp/evil-of-the-test').exists()


@pytest.mark.parametrize('name', ['../evil', '/tmp/evil-of-the-test', 'a\\b'])
def test_hostile_zips_are_refused(tmp_path, name):
    with zipfile.ZipFile(tmp_path / 'a.zip', 'w') as zipped:
        zipped.writestr('a.png', 'x')
        info = zipfile.ZipInfo('x')
        info.filename = name
        zipped.writestr(info, 'x')
    with pytest.raises(JobInputError, match='would not land'):
        unpacked(tmp_path / 'a.zip', tmp_path)


def test_a_link_in_a_zip_is_refused(tmp_path):
    info = zipfile.ZipInfo('link')
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / 'a.zip', 'w') as zipped:
        zipped.writestr(info, '/etc/passwd')
    with pytest.raises(JobInputError, match='a link'):
        unpacked(tmp_path / 'a.zip', tmp_path)


def test_bombs_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(transfers, 'MAX_BYTES', 10_000)
    with zipfile.ZipFile(tmp_path / 'a.zip', 'w', zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr('zeros', b'\0' * 10_001)
    with pytest.raises(JobInputError, match='10,000 bytes'):
        unpacked(tmp_path / 'a.zip', tmp_path)
    monkeypatch.setattr(transfers, 'MAX_FILES', 3)
    with pytest.raises(JobInputError, match='more than 3 files'):
        unpacked(make_tar(tmp_path / 'a.tar', *map(str, range(4))), tmp_path)


@pytest.mark.parametrize('kind', ['tar', 'zip', 'gz'])
def test_a_damaged_archive_is_the_jobs_fault(tmp_path, kind):
    path = tmp_path / 'a'
    if kind == 'zip':
        with zipfile.ZipFile(path, 'w') as zipped:
            zipped.writestr('a', os.urandom(5000))
    else:
        (tmp_path / 'noise').write_bytes(os.urandom(50_000))
        with tarfile.open(path, 'w:gz' if kind == 'gz' else 'w') as tar:
            tar.add(tmp_path / 'noise', arcname='noise')
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(JobInputError, match='cannot be unpacked'):
        unpacked(path, tmp_path)


@pytest.mark.parametrize('name', ['../x', '/x', 'a//b', '.x', 'a/../b', '', 'a/b/c/d/e/f', 'x' * 200, 'a\nb', 'a\\b'])
def test_names_from_others_are_plain(name):
    with pytest.raises(MachineError):
        safe_name(name)
    assert safe_name('lora/weights.safetensors') == 'lora/weights.safetensors'


def test_a_checkpoint_is_kept_until_it_is_handed_over(tmp_path):
    folder = tmp_path / 'checkpoints'
    assert newest_step(folder) is None
    save(folder, 2)
    (folder / 'left-out.json').write_text('[]')
    found = take(folder, newest_step(folder), tmp_path / 'outgoing')
    assert sorted(found.files) == [manifest_of(2), file_of(2), 'left-out.json']
    for path in folder.iterdir():
        path.unlink()
    assert found.files[file_of(2)].path.read_bytes() == content_at(2)
    found.discard()
    assert list((tmp_path / 'outgoing').iterdir()) == []
    (folder / manifest_of(4)).write_text('{}')
    (folder / file_of(4)).write_text('x')
    assert take(folder, 4, tmp_path / 'outgoing') is None


def test_a_checkpoint_of_other_names_is_no_checkpoint():
    content = Content('0' * 64, 1)
    refuse_strange_names(HeldCheckpoint(2, {file_of(2): content, manifest_of(2): content}))
    for names in ([file_of(2)], [file_of(4), manifest_of(4)], [file_of(2), manifest_of(2), '../x']):
        with pytest.raises(MachineError):
            refuse_strange_names(HeldCheckpoint(2, dict.fromkeys(names, content)))


def test_steps_are_followed(tmp_path):
    log = tmp_path / 'log.jsonl'
    follower = StepFollower(log, 5)
    follower.look()
    assert (follower.step, follower.steps_per_sec) == (5, None)
    log.write_text('{"batch": 6}\n{"batch": 7, "loss')
    follower.look()
    assert follower.step == 6
    with log.open('a') as file:
        file.write('": 1}\nnonsense\n[]\n{"batch": "x"}\n')
    time.sleep(0.05)
    follower.look()
    assert follower.step == 7
    assert 0 < follower.steps_per_sec <= 20


def test_no_secret_is_handed_on(tmp_path):
    given = {
        'PATH': '/bin', 'OMP_NUM_THREADS': '2', 'AWS_ACCESS_KEY_ID': 'x', 'FLEET_ANYTHING': 'x', 'HF_HUB_TOKEN': 'x', 'PYTHONPATH': '/lib',
        'https_proxy': 'http://me:password@proxy', 'http_proxy': 'http://proxy', 'HOME': '/root', 'CUDA_VISIBLE_DEVICES': '1',
    }  # fmt: skip
    found = environment_of_child(tmp_path, given)
    assert {'PATH', 'OMP_NUM_THREADS', 'CUDA_VISIBLE_DEVICES', 'http_proxy', 'PYTHONPATH'} <= set(found)
    assert not {'AWS_ACCESS_KEY_ID', 'FLEET_ANYTHING', 'HF_HUB_TOKEN', 'https_proxy'} & set(found)
    assert found['HOME'] == str(tmp_path)
    assert found['PYTHONPATH'] == f'{REPOSITORY}:/lib'


CODE = """
import signal, subprocess, sys, time
helper = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
print('ready', helper.pid, flush=True)
time.sleep(600)
"""


def test_a_request_goes_to_those_who_listen(tmp_path, capfd):
    child = Child([sys.executable, '-c', CODE], tmp_path, environment_of_child(tmp_path))
    try:
        wait_until(lambda: any('ready' in line for line in child.lines))
        helper = int(child.lines[-1].split()[1])
        assert len(listeners(os.getpgid(helper), signal.SIGUSR1)) == 1
        child.ask_to_stop()
        wait_until(lambda: child.wait(0.1) is not None, 10)
        assert child.code == 75
        wait_until(lambda: not Path(f'/proc/{helper}/cmdline').exists() or not Path(f'/proc/{helper}/cmdline').read_bytes(), 5)  # goes with it
    finally:
        child.end()


def test_what_a_child_prints_is_redacted_and_its_end_kept(tmp_path, capfd):
    code = "print('x' * 100, 'https://s3/key?X-Amz-Signature=abcdef', sep='\\n'); [print('line', i) for i in range(1000)]"
    child = Child([sys.executable, '-c', code], tmp_path, environment_of_child(tmp_path))
    wait_until(lambda: child.wait(0.2) is not None)
    assert child.code == 0
    assert child.message.startswith('line 999')
    assert len(child.message) <= 4000
    printed = capfd.readouterr().err
    assert 'X-Amz-Signature=***' in printed
    assert 'abcdef' not in printed


NOISE = [
    'Loading pipeline components...:  50%|█████     | 3/6 [00:01<00:01,  2.10it/s]',
    '/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 4 leaked objects',
    '  warnings.warn(',
    'ERROR:composer.cli.launcher:Rank 0 crashed with exit code 65.',
    'Waiting up to 30 seconds for all training processes to terminate. Press Ctrl-C to exit immediately.',
    'Global rank 0 (PID 4711) exited with code 65',
    'ERROR:composer.cli.launcher:Global rank 0 (PID 4711) exited with code 65',
]


def test_the_error_of_training_comes_first_and_whole():
    error = ['1 file of inputs/subject cannot be used:', '  - inputs/subject/0.png: no image', 'fix it or take it out of the folder']
    said = message_of(['reading', NOISE[0], *error, '(exit code 65, docs/reliability.md)', *NOISE[1:]], 65)
    assert said == '\n'.join([*error, 'before that:', 'reading'])
    assert message_of(['starting', 'one sentence', '(exit code 64, docs/reliability.md)', *NOISE], 64) == 'one sentence\nbefore that:\nstarting'
    assert message_of(['tiny.yaml: seed: too large', 'tiny.yaml: nam: no such key'], 64).startswith('tiny.yaml: seed: too large\ntiny.yaml: nam')


def test_a_traceback_is_its_last_line_and_a_few_more():
    frames = [f'  File "{i}.py", line 1, in f' for i in range(60)]
    lines = message_of(['start', 'Traceback (most recent call last):', *frames, 'torch.OutOfMemoryError: no memory', *NOISE], 70).splitlines()
    assert lines == ['torch.OutOfMemoryError: no memory', 'before that:', *frames[-10:]]


@pytest.mark.parametrize('code', [137, 247])
def test_a_signal_is_named(code):
    assert message_of(['epoch 1', *NOISE], code).startswith('killed by signal 9 (out of memory, or somebody)\nepoch 1')
    assert message_of([], 139) == 'killed by signal 11'
    assert message_of([], 70) == ''


def test_a_message_is_cut_at_a_line():
    lines = [f'line {i}' for i in range(1000)]
    said = cut('\n'.join(lines))
    assert MESSAGE_CHARS - 10 < len(said) <= MESSAGE_CHARS
    assert said.splitlines() == lines[: len(said.splitlines())]
    assert len(cut('x' * 5000)) == MESSAGE_CHARS


def test_folders_of_killed_attempts_go_and_of_living_ones_stay(tmp_path):
    (tmp_path / 'attempts/dead.d').mkdir(parents=True)
    (tmp_path / 'attempts/dead.d/file').touch()
    (tmp_path / 'attempts/dead.d.lock').touch()
    with attempt_folder(tmp_path, 'one') as one:
        assert not (tmp_path / 'attempts/dead.d').exists()
        (one / 'file').touch()
        with attempt_folder(tmp_path, 'two'):
            assert (one / 'file').exists()
    assert list((tmp_path / 'attempts').iterdir()) == []


def test_a_request_to_stop_may_come_at_any_instant():
    """A handler that waits for a lock of the thread that it interrupts would hang."""
    stop, main = StopRequest(), threading.main_thread().ident
    with stop.on_signals():
        threading.Timer(0.2, lambda: signal.pthread_kill(main, signal.SIGTERM)).start()
        began = time.monotonic()
        while not stop.wait(0.0001):
            assert time.monotonic() - began < 10
    assert stop.wait(100)


def test_a_process_with_many_files_can_be_asked_to_stop():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2048)), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        stop = StopRequest()
        assert not stop.wait(0.01)
        stop.ask()
        assert stop.wait(100)
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_download_continues_and_is_compared(tmp_path, s3):
    client = s3.client()
    content = os.urandom(3_000_000)
    client.put_object(Bucket='bucket', Key='big', Body=content)
    url = client.generate_presigned_url('get_object', Params={'Bucket': 'bucket', 'Key': 'big'}).replace(
        str(s3.proxy.target_port), str(s3.proxy.server_address[1])
    )
    wanted = Content(hashlib.sha256(content).hexdigest(), len(content))
    s3.proxy.fails = lambda method, path: 'cut' if method == 'GET' and s3.proxy.num_failures == 0 else False
    with pytest.raises(BackendUnavailable) as caught:
        download(url, tmp_path / 'big', wanted, lambda: False)
    assert 'http' not in str(caught.value)
    assert 0 < (tmp_path / 'big.part').stat().st_size < len(content)
    download(url, tmp_path / 'big', wanted, lambda: False)
    assert (tmp_path / 'big').read_bytes() == content
    with pytest.raises(WrongContent):
        download(url, tmp_path / 'other', Content('0' * 64, len(content)), lambda: False)
    with pytest.raises(BackendUnavailable, match='given up'):
        download(url, tmp_path / 'another', wanted, lambda: True)


def test_no_torch():
    """A worker, and the middle part of it, start in a fraction of a second."""
    modules = [f'fleet.{name}' for name in ('attempts.direct', 'attempts.attempt', 'worker.worker', 'commands.machine', '__main__')]
    code = f'import importlib, sys\nfor name in {modules}: importlib.import_module(name)\nassert not {{"torch", "composer", "diffusers"}} & set(sys.modules)'
    subprocess.run([sys.executable, '-c', code], check=True, cwd=REPOSITORY)
