"""Starts train.py as a user does, disturbs it, and looks at what it left.

A promise is a test on our code; its twin shows that stock Composer or Streaming breaks it. A twin ends with `upstream_mended_it()` if
stock behaves, so that it is skipped, not failed, once our fix can go.
"""

from __future__ import annotations

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

import pytest
import torch

from tests.conftest import REPOSITORY

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
            sha.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b'')
        else:
            sha.update(repr(value).encode())

    add(value)
    return sha.hexdigest()
