"""Starts train.py as a user does, disturbs it, and looks at what it left.

A promise is a test on our code; its twin shows that stock Composer or Streaming breaks it. A twin ends with `upstream_mended_it()` if
stock behaves, so that it is skipped, not failed, once our fix can go.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import composer
import pytest
import torch

from diffusion.checkpoints.reading import ALLOWED
from tests.conftest import REPOSITORY
from tests.faults.children import start

YAML = 'yamls/sd2-base-256.yaml'
DEADLINE_SEC = 120


def upstream_mended_it() -> NoReturn:
    pytest.skip('the library behaves by itself now: our fix can go')


class Process:
    """A command in a process group of its own; always killed at the end of the `with` block."""

    def __init__(self, command: Sequence[object], **environment: str):
        self.process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            cwd=REPOSITORY,
            env={**os.environ, 'OMP_NUM_THREADS': '1', **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.output = ''

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        self.process.communicate()

    def signal(self, number: int, group: bool = True) -> None:
        with suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self.process.pid, number)

    def wait(self, code: int | None = 0, timeout_sec: float = DEADLINE_SEC) -> str:
        """What it printed; None expects any code."""
        try:
            self.output += self.process.communicate(timeout=timeout_sec)[0]
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            raise AssertionError(f'still running after {timeout_sec} s\n{self.process.communicate()[0][-4000:]}') from None
        assert code is None or self.process.returncode == code, f'exit code {self.process.returncode}, expected {code}\n{self.output[-6000:]}'
        return self.output

    def wait_until(self, condition: Callable[[], Any], timeout_sec: float = DEADLINE_SEC) -> None:
        deadline = time.monotonic() + timeout_sec
        while not condition():
            assert self.process.poll() is None, f'ended with {self.process.returncode}\n{self.process.communicate()[0][-4000:]}'
            assert time.monotonic() < deadline, 'it never came'
            time.sleep(0.02)


class Forked:
    """train.py in a process group of its own, forked from a server that has imported PyTorch already: a start takes a second or two."""

    def __init__(self, overrides: Sequence[str], output: Path, **environment: str):
        self.output_path = output
        self.process = start(_train_here, [YAML, *overrides], str(output), **environment)

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()

    def wait(self, timeout_sec: float = DEADLINE_SEC) -> int:
        """The exit code, negative if it died of a signal."""
        self.process.join(timeout_sec)
        assert self.process.exitcode is not None, f'still running after {timeout_sec} s\n{self.output[-4000:]}'
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # a loader process whose parent was killed ends by itself, seconds later
        return self.process.exitcode

    @property
    def output(self) -> str:
        return self.output_path.read_text() if self.output_path.exists() else ''


def _train_here(arguments: list[str], output: str) -> None:
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)
    import train
    from diffusion.recipe import load_or_exit

    try:
        code = train.main(load_or_exit(arguments, usage='', code=64))
    finally:
        atexit._run_exitfuncs()  # multiprocessing does not
    sys.exit(code)


def train(overrides: Sequence[str], **environment: str) -> Process:
    return Process(['train.py', YAML, *overrides], **environment)


def launch(num_processes: int, overrides: Sequence[str], *, launcher: Sequence[str] = (), **environment: str) -> Process:
    """The same under the composer launcher, over gloo; each rank's output goes to a file beside the run."""
    composer = Path(sys.executable).with_name('composer')
    return Process([composer, '-n', num_processes, *launcher, 'train.py', YAML, *overrides], **environment)


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
    with torch.serialization.safe_globals(ALLOWED):
        content = torch.load(checkpoint, map_location='cpu', weights_only=True)
    state = content['state']
    timestamp = {name: value for name, value in state['timestamp']['Timestamp'].items() if 'wct' not in name}
    kept = {name: state[name] for name in ('model', 'optimizers', 'schedulers', 'algorithms', 'dataset_state')}
    return {**kept, 'timestamp': timestamp, 'rng': content['rng']}
