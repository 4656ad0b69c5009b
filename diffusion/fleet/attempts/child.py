"""A command that a worker runs for a job: in a process group of its own, which never outlives the worker, without its secrets."""

import os
import re
import signal
import site
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from diffusion.common.text import carries_credentials, print_message, redacted
from diffusion.fleet.attempts.last_words import MESSAGE_CHARS, cut, message_of, says_disk_full

ROOT = Path(__file__).parents[3]
GUARD = 'import sys; from diffusion.fleet.attempts.guard import main; sys.exit(main())'
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
