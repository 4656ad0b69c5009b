"""A whole fleet on this machine: S3 and PostgreSQL, the service, machines, and the operator's commands as a user types them."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import psutil

from diffusion.common import belongings
from diffusion.common.files import write_text
from diffusion.common.processes import end_with_parent
from diffusion.contracts.errors import FINISHED, InputError
from diffusion.fleet.client.http import SERVER_VARIABLE, FleetClient
from diffusion.fleet.queue.local_postgres import LocalPostgres

LOOPBACK, BUCKET = '127.0.0.1', 'fleet'
LEASE_SEC, RENEW_SEC, POLL_SEC, GRACE_SEC = 15, 3, 1, 5  # for jobs of a minute; real machines take the defaults
ENDING_SEC = 20.0
_SECRET = re.compile(r'(shown once: )(\S+)')
COMMAND = 'python -m diffusion.fleet'


class LocalFleet:
    """A context within which a fleet runs; all its processes end with it, and with this process, whatever ends that.

    Args:
        folder: for tokens, logs and the machines' folders.
        recipes: folder of the operator's recipes.
        environment: of the machines, besides this process's.
    """

    def __init__(self, folder: Path, recipes: Path, environment: Mapping[str, str]):
        self.folder, self.recipes = folder, recipes
        self.environment = {**os.environ, **environment}
        self.tokens = folder / 'tokens'
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.num_started = 0
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self.tokens.mkdir(mode=0o700, parents=True)
        (self.folder / 'logs').mkdir()
        self._stack.enter_context(_ended_by_signals())
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with _handled((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), signal.SIG_IGN):  # a second Ctrl-C would leave processes behind
            self._stack.close()

    def _start(self) -> None:
        print('\n== Storage and database on this machine (for real ones: an S3 bucket and a PostgreSQL)', flush=True)
        storage = self._stack.enter_context(_Storage())
        postgres = LocalPostgres()
        self._stack.callback(postgres.stop)
        write_text(self.tokens / 'database-url', postgres.url)
        print(f'   S3 at {storage.environment["S3_ENDPOINT_URL"]}, PostgreSQL at {postgres.socket}')
        self.ask('A fleet and its operator', 'init', '--database-file', self.tokens / 'database-url', token='operator')  # noqa: S106
        words = ['server', '--bucket', f's3://{BUCKET}', '--port', '0', '--recipes', self.recipes, '--database-file', self.tokens / 'database-url']
        words += ['--lease-sec', LEASE_SEC, '--renew-sec', RENEW_SEC, '--poll-sec', POLL_SEC, '--grace-sec', GRACE_SEC]
        say('The service', words)
        with (self.folder / 'logs/service.log').open('wb') as log:
            service = self._popen(_command(words), {**os.environ, **storage.environment}, stdout=subprocess.PIPE, stderr=log)
        self._stack.callback(_end, service)
        assert service.stdout is not None
        line = service.stdout.readline().decode()
        if 'listens at' not in line:
            raise InputError(f'the service does not start: {(self.folder / "logs/service.log").read_text()[-800:]}')
        print(f'   {line.strip()}')
        self._stack.callback(self._kill_machines)
        self.server = line.split()[-1]
        self.client = FleetClient(self.server, (self.tokens / 'operator').read_text())
        os.environ[SERVER_VARIABLE] = self.server
        self._stack.callback(lambda: os.environ.pop(SERVER_VARIABLE))
        print(f'   $ export {SERVER_VARIABLE}={self.server}', flush=True)

    def ask(self, title: str, *words: object, token: str = '') -> str:
        """Do a command as a user types it; returns what it prints, which this prints too, without secrets.

        Args:
            token: name of a file that gets the token which the command shows once.

        Raises:
            InputError: it failed.
        """
        say(title, words)
        name, *arguments = map(str, words)
        out = StringIO()
        with redirect_stdout(out):
            code = import_module(f'diffusion.fleet.commands.{name}').main(arguments)
        if code != FINISHED:
            raise InputError(f'{COMMAND} {name} ended with code {code}')
        text = out.getvalue()
        if token and (shown := _SECRET.search(text)):
            path = self.tokens / token
            path.touch(mode=0o600)
            path.write_text(shown[2])
        shown_text = _SECRET.sub(lambda found: f'{found[1]}...', text)
        print(''.join(f'   {line}\n' for line in shown_text.splitlines()), end='', flush=True)
        if token:
            print(f'   (kept in {self.tokens / token})', flush=True)
        return text

    def as_user(self, name: str) -> list[object]:
        """The arguments with which `name` asks the service."""
        return ['--token-file', self.tokens / name]

    def watch(self) -> subprocess.Popen[bytes]:
        """`watch` as a process: it prints how far the jobs are."""
        words = ['watch', '--every-sec', '3', *self.as_user('operator')]
        say('Progress', words)
        return self._popen(_command(words), dict(os.environ))

    # --- machines

    def start_machine(self, shell: str = '') -> str:
        """Start a worker; returns its name.

        Args:
            shell: done before it in its shell.
        """
        self.num_started += 1
        name = f'machine-{self.num_started}'
        words = ['worker', '--token-file', self.tokens / 'pool', '--machine', name, '--work', self.folder / 'machines' / name]
        words += ['--recipes', self.recipes, '--gpu', 'cpu', '--gpu-gb', '0', '--server', self.server]
        command = ['sh', '-c', f'{shell} && exec "$@"', 'sh'] if shell else []
        with (self.folder / 'logs' / f'{name}.log').open('wb') as log:
            self.processes[name] = self._popen([*command, *_command(words)], self.environment, stdout=log, stderr=log)
        return name

    def kill(self, name: str) -> None:
        """As a power cut of that machine."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def freeze(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGCONT)

    def stop_machines(self) -> None:
        """Ask all of them to leave, and wait for that."""
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in self.processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_SEC)

    def _kill_machines(self) -> None:
        """At once, with all that they have started, and what that leaves outside of its folders."""
        started = list[psutil.Process]()
        for process in self.processes.values():
            with suppress(psutil.NoSuchProcess):
                started += psutil.Process(process.pid).children(recursive=True)
            process.kill()
        for child in started:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        for process in self.processes.values():
            process.wait()
        psutil.wait_procs(started, ENDING_SEC)
        belongings.remove_dead()

    def _popen(self, words: list[str], environment: Mapping[str, str], **streams: Any) -> subprocess.Popen[bytes]:
        ends_with_us = partial(end_with_parent, signal.SIGKILL)
        return subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, preexec_fn=ends_with_us, **streams)  # noqa: PLW1509 - of the main thread


def say(title: str, words: tuple[object, ...] | list[object]) -> None:
    """Print a stage and its command."""
    print(f'\n== {title}\n   $ {COMMAND} {shlex.join(map(str, words))}', flush=True)


def _command(words: list[object]) -> list[str]:
    return [sys.executable, '-m', 'diffusion.fleet', *map(str, words)]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(ENDING_SEC)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


class _Storage:
    """An S3 server in threads of this process, with one bucket."""

    def __enter__(self) -> _Storage:
        import logging

        import boto3

        try:
            from moto.server import ThreadedMotoServer
        except ImportError as error:
            raise InputError("an S3 server is wanted for this: uv pip install -e '.[dev]' brings moto") from error
        logging.getLogger('werkzeug').setLevel(logging.ERROR)  # it prints a line a request otherwise
        self.moto = ThreadedMotoServer(ip_address=LOOPBACK, port=0, verbose=False)
        self.moto.start()
        address = f'http://{LOOPBACK}:{self.moto.get_host_and_port()[1]}'
        key = secrets.token_hex(20)
        self.environment = {'S3_ENDPOINT_URL': address, 'AWS_ACCESS_KEY_ID': 'demo', 'AWS_SECRET_ACCESS_KEY': key, 'AWS_DEFAULT_REGION': 'us-east-1'}
        s3 = boto3.client('s3', endpoint_url=address, aws_access_key_id='demo', aws_secret_access_key=key, region_name='us-east-1')
        s3.create_bucket(Bucket=BUCKET)
        return self

    def __exit__(self, *_: object) -> None:
        self.moto.stop()


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end this process as an exception, so that what it has started is ended."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with _handled((signal.SIGTERM, signal.SIGHUP), end):
        yield


@contextmanager
def _handled(numbers: tuple[signal.Signals, ...], handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
