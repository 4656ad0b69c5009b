"""Running a command by a template: its own process group, a time limit, and nothing left behind."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from diffusion.common.processes import end_with_parent

# Composer's launcher as a module of this very Python: the program `composer` is not there where packages were installed with `pip --target`.
DEFAULT_LAUNCHER = '{python} -m composer.cli -n {gpus_per_node} {command}'
PLACEHOLDERS = ('num_gpus', 'num_nodes', 'gpus_per_node', 'python', 'command')
PATIENCE_SEC = 20  # for what is stopped to end by itself: Slurm takes a job back, Composer's launcher its processes

_PLACEHOLDER = re.compile(r'(?<!\$)\{(\w+)\}')  # ${NAME} is a shell's


def wrong_template(template: str) -> list[str]:
    """Return what is wrong with a launcher's template."""
    try:
        words = shlex.split(template)
    except ValueError as error:
        return [f"'{template}' cannot be split into words: {error}"]
    names = _PLACEHOLDER.findall(template)
    known = ', '.join(f'{{{name}}}' for name in PLACEHOLDERS)
    errors = [f"'{{{name}}}' cannot be filled in; known: {known}" for name in dict.fromkeys(names) if name not in PLACEHOLDERS]
    if not words or 'command' not in names:
        errors.append(f"'{template}' does not say where the command of the point goes; put {{command}} there, as in '{DEFAULT_LAUNCHER}'")
    return errors


def fill(template: str, places: Mapping[str, int], command: Sequence[str]) -> list[str]:
    """Return the words of the command line. No shell reads them; a template that needs one says `bash -c '...'`.

    `{command}` alone becomes the words of the command, `{python}` the path of this Python; inside a quoted word they become them quoted.
    """
    whole = {'{command}': command, '{python}': [sys.executable]}
    values = {**{name: str(value) for name, value in places.items()}, 'python': shlex.quote(sys.executable), 'command': shlex.join(command)}
    words: list[str] = []
    for word in shlex.split(template):
        words += whole.get(word) or [_PLACEHOLDER.sub(lambda match: values[match[1]], word)]
    return words


def missing_program(template: str) -> str | None:
    """Return the program that a template starts, if it is not on this machine."""
    program = shlex.split(template)[0].replace('{python}', sys.executable)
    return None if shutil.which(program, path=_environment()['PATH']) else program


def run(
    words: Sequence[str], log: Path, limit_sec: float, variables: Mapping[str, str] | None = None, meanwhile: Callable[[], object] | None = None
) -> int | None:
    """Run a command line in a process group of its own until it ends, has done enough, or its time is over; then nothing of the group is left.

    It also ends if this process does, by whatever cause. Output goes to `log`. For the main thread alone. Returns the exit code (negative: the
    signal that ended it), None if it was stopped: its time was over, or it had done enough.

    Args:
        variables: added to its environment.
        meanwhile: called every second while it runs, and once after it; true if it has done enough.

    Raises:
        KeyboardInterrupt: SIGTERM or SIGINT came, at any moment; nothing of the group is left.
    """
    end_sec, code = time.monotonic() + limit_sec, None
    with noted(signal.SIGTERM, signal.SIGINT) as came:
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
        try:
            while code is None and not came and (left_sec := end_sec - time.monotonic()) > 0:
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(min(left_sec, 1.0))
                if meanwhile is not None and meanwhile():
                    break
        finally:
            _stop(process)
    if came:
        raise KeyboardInterrupt
    return code


@contextmanager
def noted(*numbers: signal.Signals) -> Iterator[list[int]]:
    """Within the context signals are added to what it yields: an exception while a process starts could be lost, or leave that process behind."""
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in numbers}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
    """Return the environment, with the programs of this Python, `composer` among them, before all others."""
    return {**os.environ, 'PATH': os.pathsep.join([str(Path(sys.executable).parent), os.environ.get('PATH', os.defpath)])}
