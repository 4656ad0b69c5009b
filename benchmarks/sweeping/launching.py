"""Start a point: a command template, its own process group, a time limit, and nothing left behind."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from diffusion.common.processes import end_with_parent

# Composer's launcher as a module of this very Python: the program `composer` is not there where packages were installed with `pip --target`.
DEFAULT_LAUNCHER = '{python} -m composer.cli -n {gpus_per_node} {command}'
PLACEHOLDERS = ('num_gpus', 'num_nodes', 'gpus_per_node', 'python', 'command')
PATIENCE_SEC = 20  # for what is stopped to end by itself: Slurm takes a job back, Composer's launcher its processes

_PLACEHOLDER = re.compile(r'(?<!\$)\{(\w+)\}')  # ${NAME} is a shell's


@dataclass(frozen=True)
class Ending:
    """Of a point's launcher: its exit code (negative: the signal that ended it), None if its time was over."""

    code: int | None
    sec: float


def wrong_template(template: str) -> list[str]:
    """What is wrong with a launcher's template."""
    try:
        words = shlex.split(template)
    except ValueError as error:
        return [f"'{template}' cannot be split into words: {error}"]
    names = _PLACEHOLDER.findall(template)
    known = ', '.join(f'{{{name}}}' for name in PLACEHOLDERS)
    errors = [f"'{{{name}}}' cannot be filled in; known: {known}" for name in dict.fromkeys(names) if name not in PLACEHOLDERS]
    if not words or 'command' not in names:
        errors.append(f"'{template}' does not say where the point's own command goes; put {{command}} there, as in '{DEFAULT_LAUNCHER}'")
    return errors


def fill(template: str, places: Mapping[str, int], command: Sequence[str]) -> list[str]:
    """The words of the command line. No shell reads them; a template that needs one says `bash -c '...'`.

    `{command}` alone becomes the words of the command, `{python}` the path of this Python; inside a quoted word they become them quoted.
    """
    whole = {'{command}': command, '{python}': [sys.executable]}
    values = {**{name: str(value) for name, value in places.items()}, 'python': shlex.quote(sys.executable), 'command': shlex.join(command)}
    words: list[str] = []
    for word in shlex.split(template):
        words += whole.get(word) or [_PLACEHOLDER.sub(lambda match: values[match[1]], word)]
    return words


def missing_program(template: str) -> str | None:
    """The program that a template starts, if it is not on this machine."""
    program = shlex.split(template)[0].replace('{python}', sys.executable)
    return None if shutil.which(program, path=_environment()['PATH']) else program


def run(
    words: Sequence[str], log: Path, limit_sec: float, variables: Mapping[str, str] | None = None, meanwhile: Callable[[], None] | None = None
) -> Ending:
    """Run a command line in a process group of its own until it ends or its time is over; then nothing of the group is left.

    It also ends if this process does, by whatever cause. Output goes to `log`.

    Args:
        variables: added to its environment.
        meanwhile: called every second while it runs, and once after it.
    """
    start = time.monotonic()
    with log.open('ab') as output:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**_environment(), **(variables or {})},
            start_new_session=True,
            preexec_fn=end_with_parent,  # noqa: PLW1509 - this process has no threads that hold locks
        )
    code = None
    try:
        while code is None and (left_sec := start + limit_sec - time.monotonic()) > 0:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(left_sec if meanwhile is None else min(left_sec, 1.0))
            if meanwhile is not None:
                meanwhile()
    finally:
        _stop(process)
    return Ending(code, time.monotonic() - start)


def _stop(process: subprocess.Popen) -> None:
    try:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE_SEC)
    finally:
        with suppress(ProcessLookupError):  # usually nobody is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _environment() -> dict[str, str]:
    """With the programs of this Python's environment, `composer` among them, before all others."""
    return {**os.environ, 'PATH': os.pathsep.join([str(Path(sys.executable).parent), os.environ.get('PATH', os.defpath)])}
