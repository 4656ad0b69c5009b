"""A command that a worker runs for a job: in a process group of its own, which never outlives the worker, without its secrets."""

import os
import re
import shutil
import signal
import site
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from diffusion.checkpoints.manifest import CheckpointManifest, Content, batches_of, file_of, manifest_of, sha256_of
from diffusion.common.files import is_number, parse_json_object
from diffusion.common.text import carries_credentials, print_message, redacted
from fleet.attempts.backend import HandedFile, HeldCheckpoint, MachineError

ROOT = Path(__file__).parents[2]
GUARD = 'import sys; from fleet.attempts.guard import main; sys.exit(main())'
KEPT_LINES = 200
AGAIN_SEC = 5.0  # between two requests to stop: the first may come before a rank has a handler
DRAINING_SEC = 5.0  # for the last lines of a command that has ended
# A list of what is handed on, not of what is kept back: nobody knows all names of secrets.
KEPT_NAMES = ('PATH', 'LANG', 'LANGUAGE', 'TZ', 'TMPDIR', 'USER', 'LOGNAME', 'HOSTNAME', 'WANDB_MODE', 'GIT_COMMIT', 'VIRTUAL_ENV',
              'HTTP_PROXY', 'HTTPS_PROXY', 'NO_PROXY', 'http_proxy', 'https_proxy', 'no_proxy', 'SSL_CERT_FILE', 'REQUESTS_CA_BUNDLE')  # fmt: skip
KEPT_PREFIXES = ('LC_', 'LD_', 'PYTHON', 'OMP_', 'MKL_', 'KMP_', 'CUDA_', 'CUBLAS_', 'CUDNN_', 'NVIDIA_', 'NCCL_', 'GLOO_', 'TORCH',
                 'PYTORCH_', 'TRITON_', 'HF_HUB_', 'TRANSFORMERS_', 'TOKENIZERS_', 'MALLOC_', 'DIFFUSION_')  # fmt: skip
_SECRET = re.compile(r'TOKEN|SECRET|PASSWORD|CREDENTIAL|KEY', re.IGNORECASE)


def environment_of_child(home: Path, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a child: of this process's what it needs to compute, none of its tokens, and a home of its own with warm caches.

    Args:
        home: folder that stays between jobs.
    """
    kept = {
        name: value
        for name, value in given.items()
        if (name in KEPT_NAMES or name.startswith(KEPT_PREFIXES)) and not _SECRET.search(name) and not carries_credentials(value)
    }
    path = os.pathsep.join([str(ROOT), *filter(None, [kept.get('PYTHONPATH')])])
    return {
        **kept,
        'PYTHONPATH': path,
        'PYTHONUSERBASE': site.getuserbase(),  # follows from HOME otherwise
        'PYTHONUNBUFFERED': '1',
        'HOME': str(home),  # keys lie in the real one
        'HF_HOME': str(home / 'huggingface'),
        'XDG_CACHE_HOME': str(home / 'cache'),
        'AWS_EC2_METADATA_DISABLED': 'true',  # where a cloud's machine would find keys
    }


class Child:
    """A running command. What it prints goes to this process's stderr too, without credentials; the end of it is kept.

    Args:
        words: the command.
        folder: in which it runs.
        environment: all of it.
    """

    def __init__(self, words: Sequence[str], folder: Path, environment: Mapping[str, str]):
        self.lines = deque[str](maxlen=KEPT_LINES)
        self.code: int | None = None
        self._asked_at: float | None = None
        self._process = subprocess.Popen(
            [sys.executable, '-c', GUARD, *words],
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), name='output of the child', daemon=True)
        self._reader.start()

    def wait(self, timeout_sec: float) -> int | None:
        """Return the exit code, 128 + N after signal N; None if it still runs after that time."""
        if self.code is None:
            with suppress(subprocess.TimeoutExpired):
                code = self._process.wait(timeout_sec)
                self.kill()  # what it has left in its group
                self.code = code if code >= 0 else 128 - code
                self._reader.join(DRAINING_SEC)
        return self.code

    def ask_to_stop(self) -> None:
        """Ask ranks of train.py to save and end with 75, again and again: they heed the first request that comes."""
        now = time.monotonic()
        if self.code is None and (self._asked_at is None or now - self._asked_at >= AGAIN_SEC):
            self._asked_at = now
            for process_id in listeners(self._process.pid, signal.SIGUSR1):
                with suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGUSR1)

    def kill(self) -> None:
        """Kill all processes of the group, at once."""
        self._signal(signal.SIGKILL)

    def end(self) -> None:
        """Kill it if it runs, and wait for that."""
        self.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._reader.join(DRAINING_SEC)

    @property
    def message(self) -> str:
        """Its last error, and the last lines before that, at most MESSAGE_CHARS."""
        return cut(redacted(message_of(list(self.lines), self.code or 0)))

    @property
    def says_disk_full(self) -> bool:
        return says_disk_full(list(self.lines))

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            for raw in stream:
                line = redacted(raw.decode(errors='replace').rstrip('\r\n').rpartition('\r')[2])
                self.lines.append(line[:MESSAGE_CHARS])
                with suppress(OSError, ValueError):
                    print_message(line)


def listeners(group: int, number: int) -> list[int]:
    """Processes of a group that have a handler for signal `number`.

    Ranks of train.py alone have one for SIGUSR1. Sent to the whole group it would kill Python's resource trackers; SIGTERM, which those ignore, makes
    Composer's launcher kill after 30 seconds, whatever it was started to ignore.
    """
    found = []
    for process in Path('/proc').glob('[0-9]*'):
        with suppress(OSError, ValueError):  # it has ended meanwhile
            if os.getpgid(int(process.name)) == group:
                caught = next(line for line in (process / 'status').read_text().splitlines() if line.startswith('SigCgt:'))
                if int(caught.split()[1], 16) >> (number - 1) & 1:
                    found.append(int(process.name))
    return found


# What an owner wants to read of a child that failed: its last error, without what launchers and progress bars print around it.

MESSAGE_CHARS = 4000
CONTEXT_LINES = 10
ERROR_LINES = 30
DISK_FULL = ('No space left on device', 'Disk quota exceeded', 'Errno 28', 'Errno 122')
NOISE = re.compile(
    r'█|\d+%\||(it/s|s/it)[],]|resource_tracker|^\s*warnings\.warn\(|^\s*$|composer\.cli\.launcher|^Global rank \d+ \(PID|crashed with exit code'
    r'|^-+(Begin|End) global rank|^Waiting up to \d+ seconds for all training processes|^(ERROR|INFO|WARNING):composer'
)
TRAILER = re.compile(r'^\(exit code \d+, docs/reliability\.md\)')
TRACEBACK = 'Traceback (most recent call last):'


def message_of(lines: Sequence[str], code: int) -> str:
    """The message about a child that ended otherwise than with 0, at most MESSAGE_CHARS: the signal if one killed it, its last error, and the last
    lines before that.

    Args:
        lines: the end of what it printed.
        code: with which it ended.
    """
    said = [line for line in lines if not NOISE.search(line)]
    begin, end = _last_error(said)
    context = said[max(0, begin - CONTEXT_LINES) : begin]
    return cut('\n'.join([*_signal(code), *said[begin:end], *(['before that:', *context] if context and begin < end else context)]))


def cut(message: str) -> str:
    """At most MESSAGE_CHARS, whole lines if there is more than one."""
    if len(message) <= MESSAGE_CHARS:
        return message
    kept = message[:MESSAGE_CHARS]
    return kept.rpartition('\n')[0] or kept


def says_disk_full(lines: Sequence[str]) -> bool:
    """Whether the last lines are about a disk without room."""
    return any(words in line for line in lines[-CONTEXT_LINES - ERROR_LINES :] for words in DISK_FULL)


def _signal(code: int) -> list[str]:
    """A line for 128 + N after signal N, and for 256 - N, which Composer's launcher makes of it."""
    number = code - 128 if 128 < code <= 192 else 256 - code if 192 < code < 256 else 0
    if not number:
        return []
    return [f'killed by signal {number}{" (out of memory, or somebody)" if number == 9 else ""}']


def _last_error(said: Sequence[str]) -> tuple[int, int]:
    """First line of the last error, and the line after it."""
    trailer = max((index for index, line in enumerate(said) if TRAILER.search(line)), default=-1)
    traceback = max((index for index, line in enumerate(said) if line.endswith(TRACEBACK)), default=-1)
    if traceback > trailer:
        first = next((index for index in range(traceback + 1, len(said)) if not said[index].startswith((' ', '\t'))), len(said))
        return first, min(len(said), first + CONTEXT_LINES)
    end = trailer if trailer >= 0 else len(said)
    return _begin_of_text(said, end), end


def _begin_of_text(said: Sequence[str], end: int) -> int:
    """Return where a text of several lines begins: a heading, indented lines and what follows them, or lines about one subject."""
    begin = max(0, end - 1)
    while begin > max(0, end - ERROR_LINES) and (
        said[begin].startswith((' ', '\t')) or said[begin - 1].startswith((' ', '\t')) or said[begin].split(': ')[0] == said[begin - 1].split(': ')[0]
    ):
        begin -= 1
    return begin


# How far a training child is: its log is followed, not asked for.

WINDOW_SEC = 600.0  # over which steps per second are counted
MAX_POINTS = 100  # between two renewals
LOSS, RATE = 'loss/train/total', 'lr-'  # names of log.jsonl, the second at the beginning
Point = tuple[int, float | None, float | None, float | None]  # step, loss, learning rate, steps/s


class StepFollower:
    """Reads what RUN/log.jsonl gains.

    Args:
        path: of the log; it need not be there yet.
        step: before the first line.
    """

    def __init__(self, path: Path, step: int):
        self.path, self.step = path, step
        self.points = deque[Point](maxlen=MAX_POINTS)  # of the curve, the newest; whoever hands them over takes them out
        self.moved_at = time.monotonic()
        self._offset, self._rest = 0, b''
        self._seen = deque[tuple[float, int]]()

    def skip(self) -> None:
        """Leave out what is there already: an earlier attempt has told it."""
        with suppress(FileNotFoundError):
            self._offset = self.path.stat().st_size

    def look(self) -> None:
        """Read the lines that are new."""
        try:
            with self.path.open('rb') as file:
                file.seek(self._offset)
                content = file.read()
        except OSError:  # not there yet
            return
        self._offset += len(content)
        *lines, self._rest = (self._rest + content).split(b'\n')
        records = [record for line in lines if (record := _record_of(line))]
        if records and records[-1]['batch'] != self.step:  # of lines that came together only the last one is at the time of the look
            self._note(records[-1]['batch'])
        self.points += [
            (record['batch'], record.get(LOSS), next((value for name, value in record.items() if name.startswith(RATE)), None), self.steps_per_sec)
            for record in records if LOSS in record
        ]  # fmt: skip

    def _note(self, step: int) -> None:
        if step < self.step:  # a rollback
            self._seen.clear()
        self.step, self.moved_at = step, time.monotonic()
        self._seen.append((self.moved_at, step))
        while len(self._seen) > 2 and self._seen[0][0] < self.moved_at - WINDOW_SEC:
            self._seen.popleft()

    @property
    def steps_per_sec(self) -> float | None:
        """Over the last minutes, without the start; None: two observations are not there yet."""
        if len(self._seen) < 2:
            return None
        (first_at, first), (last_at, last) = self._seen[0], self._seen[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else None


def _record_of(line: bytes) -> dict[str, Any]:
    """Return {} for a line that a kill cut short, or of something else."""
    try:
        record = parse_json_object(line)
    except ValueError:
        return {}
    is_record = isinstance(record.get('batch'), int) and all(value is None or is_number(value) for value in record.values())
    return record if is_record else {}


# Checkpoints of a training child: new whole ones are found, and kept until they are handed over.

LOG = 'log.jsonl'  # goes with each checkpoint, so that the result has the log of all attempts
MAX_LOG_BYTES = 16 << 20  # a longer one stays on its machine
LEFT_OUT = 'left-out.json'  # which batches a rollback left out (faults/rollback.py): a run that resumes without it would train on them


@dataclass(frozen=True)
class OutgoingCheckpoint:
    """A whole checkpoint whose files training does not delete any more."""

    step: int
    folder: Path
    files: dict[str, HandedFile]

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def newest_step(folder: Path) -> int | None:
    """The newest batch with a manifest, which is written last; None: there is none."""
    try:
        found = batches_of(os.listdir(folder))
    except OSError:  # no folder yet
        return None
    return found[-1] if found else None


def take(folder: Path, step: int, outgoing: Path) -> OutgoingCheckpoint | None:
    """Link a checkpoint's files to a folder of their own, because training keeps the newest few alone, and copy the log beside it, which grows; None
    if it is gone or damaged.

    Args:
        folder: of the run's checkpoints, in that of the run.
        outgoing: on the same disk.
    """
    kept = outgoing / f's{step}'
    kept.mkdir(parents=True, exist_ok=True)
    try:
        names = [file_of(step), manifest_of(step), *([LEFT_OUT] if (folder / LEFT_OUT).exists() else [])]
        for name in names:
            (kept / name).unlink(missing_ok=True)
            os.link(folder / name, kept / name)
        names += copy_log(folder.parent, kept)
        manifest = CheckpointManifest.parse((kept / manifest_of(step)).read_bytes(), step)
        files = {name: HandedFile(kept / name, manifest.content if name == manifest.file else content_of(kept / name)) for name in names}
    except (OSError, ValueError):
        shutil.rmtree(kept, ignore_errors=True)
        return None
    return OutgoingCheckpoint(step, kept, files)


def copy_log(run: Path, folder: Path) -> list[str]:
    """Copy the log of a run, which may grow meanwhile, to a folder; return its name, or nothing where there is none or too much of it."""
    log = run / LOG
    if not log.exists() or log.stat().st_size > MAX_LOG_BYTES:
        return []
    shutil.copyfile(log, folder / LOG)
    return [LOG]


def content_of(path: Path) -> Content:
    return Content(sha256_of(path), path.stat().st_size)


def refuse_strange_names(held: HeldCheckpoint) -> None:
    """Raises MachineError: the files are not those of a checkpoint of that step."""
    wanted = {file_of(held.step), manifest_of(held.step)}
    if not wanted <= set(held.files) <= {*wanted, LEFT_OUT, LOG}:
        raise MachineError(
            f'the checkpoint of step {held.step:,} holds {", ".join(sorted(held.files))[:200]}; {" and ".join(sorted(wanted))} are wanted'
        )
