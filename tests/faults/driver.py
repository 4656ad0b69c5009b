"""Starts train.py as a user does, disturbs it, and looks at what it left.

A promise is a test on our code; its twin shows that stock Composer or Streaming breaks it. A twin ends with `upstream_mended_it()` if
stock behaves, so that it is skipped, not failed, once our fix can go.
"""

import atexit
import hashlib
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Self

import composer
import pytest
import torch

from diffusion.checkpoints.reading import load_safely
from tests.conftest import REPOSITORY
from tests.faults.children import DEADLINE_SEC, start

YAML = str(REPOSITORY / 'yamls/sd2-base-256.yaml')


def upstream_mended_it() -> NoReturn:
    pytest.skip('the library behaves by itself now: our fix can go')


class Disturbed:
    """A process in a group of its own; always killed at the end of the `with` block."""

    pid: int

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGKILL)
        self.wait(None)

    def signal(self, number: int, group: bool = True) -> None:
        with suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self.pid, number)

    def code(self, timeout_sec: float = 0.0) -> int | None:
        """Its exit code, negative if it died of a signal; None while it runs."""
        raise NotImplementedError

    def read(self) -> str:
        """What it has printed."""
        raise NotImplementedError

    def wait(self, code: int | None = 0, timeout_sec: float = DEADLINE_SEC) -> str:
        """What it printed until it ended with `code`; None expects any."""
        ended = self.code(timeout_sec)
        if ended is None:
            self.signal(signal.SIGKILL)
            raise AssertionError(f'still running after {timeout_sec} s\n{self.read()[-4000:]}')
        self.signal(signal.SIGKILL)  # a loader process whose parent was killed ends by itself, seconds later
        assert code is None or ended == code, f'exit code {ended}, expected {code}\n{self.read()[-6000:]}'
        return self.read()

    def wait_until(self, condition: Callable[[], Any], timeout_sec: float = DEADLINE_SEC) -> None:
        deadline = time.monotonic() + timeout_sec
        while not condition():
            assert self.code() is None, f'ended with {self.code()}\n{self.read()[-4000:]}'
            assert time.monotonic() < deadline, 'it never came'
            time.sleep(0.02)


class Process(Disturbed):
    """A command."""

    def __init__(self, command: Sequence[object], **environment: str):
        self.output = tempfile.TemporaryFile('w+')  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            cwd=REPOSITORY,
            env={**os.environ, 'OMP_NUM_THREADS': '1', **environment},
            stdout=self.output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.pid = self.process.pid

    def code(self, timeout_sec: float = 0.0) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_sec)
        return self.process.returncode

    def read(self) -> str:
        self.output.seek(0)
        return self.output.read()


class Forked(Disturbed):
    """train.py, or the command of autoencoders, forked from a server that has imported PyTorch already: a start takes a second or two."""

    def __init__(self, overrides: Sequence[str], output: Path, yaml: str = YAML, **environment: str):
        self.output_path = output
        self.process = start(_train_here, [yaml, *overrides], str(output), **environment)
        self.pid = self.process.pid or 0

    def code(self, timeout_sec: float = 0.0) -> int | None:
        self.process.join(timeout_sec)
        return self.process.exitcode

    def read(self) -> str:
        return self.output_path.read_text() if self.output_path.exists() else ''


def hear_the_keyboard() -> None:
    """As a shell's job does, whatever the tests were started to ignore, by nohup for example."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _train_here(arguments: list[str], output: str) -> None:
    os.setsid()
    file = os.open(output, os.O_RDWR | os.O_CREAT | os.O_APPEND)  # which makes a terminal that of the new session
    os.dup2(file, 1)
    os.dup2(file, 2)
    hear_the_keyboard()
    import train
    from diffusion import autoencoder
    from diffusion.recipe import AutoencoderRecipe, load_or_exit

    try:
        if 'vae' in Path(arguments[0]).name:
            code = autoencoder.train(load_or_exit(arguments, usage='', code=64, kind=AutoencoderRecipe))
        else:
            code = train.main(load_or_exit(arguments, usage='', code=64))
    finally:
        atexit._run_exitfuncs()  # multiprocessing does not
    sys.exit(code)


def train(overrides: Sequence[str], **environment: str) -> Process:
    return Process(['train.py', YAML, *overrides], **environment)


AS_MODULE = ('-m', 'composer.cli')
ON_PATH = (sysconfig.get_path('scripts') + '/composer',)


def launch_command(num_processes: int, overrides: Sequence[str], launcher: Sequence[str] = AS_MODULE) -> list[object]:
    """The same on several processes, over gloo."""
    return [*launcher, '-n', num_processes, 'train.py', YAML, *overrides]


def launch(num_processes: int, overrides: Sequence[str], **environment: str) -> Process:
    return Process(launch_command(num_processes, overrides), **environment)


def digest(value: Any) -> str:
    """SHA-256 of tensors and plain values in dictionaries and lists: equal if and only if all of it is, to the bit."""
    sha = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                sha.update(str(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        elif isinstance(value, torch.Tensor):
            sha.update(f'{value.dtype} {tuple(value.shape)}'.encode())
            sha.update(value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
        else:
            sha.update(repr(value).encode())

    add(value)
    return sha.hexdigest()


def composers_trainer(save_folder: Path, **more: Any) -> Callable[..., composer.Trainer]:
    """To put in the place of ours: Composer's own Trainer with its own checkpoints, without what this repository adds against faults."""
    ours = ('GradientGuard', 'CheckpointSaver', 'StallWatchdog', 'RunLock')

    def build(**arguments: Any) -> composer.Trainer:
        arguments = {name: value for name, value in arguments.items() if name not in ('log_every', 'left_out', 'load_path', 'autoresume')}
        for kind in ('algorithms', 'callbacks'):
            arguments[kind] = [part for part in arguments[kind] if type(part).__name__ not in ours]
        saving = {'save_folder': str(save_folder), 'save_filename': 'ba{batch}-rank{rank}.pt', 'save_interval': '1ba', 'save_overwrite': True}
        return composer.Trainer(**{**arguments, **saving, **more})

    return build


def everything_in(checkpoint: Path) -> dict[str, Any]:
    """What must be the same to the bit: all of a checkpoint but times of day and how it was made."""
    content = load_safely(checkpoint)
    state = content['state']
    timestamp = {name: value for name, value in state['timestamp']['Timestamp'].items() if 'wct' not in name}
    kept = {name: state[name] for name in ('model', 'optimizers', 'schedulers', 'algorithms', 'dataset_state')}
    return {**kept, 'timestamp': timestamp, 'rng': content['rng']}
