"""The one way into Ray: an extra of this project, imported by no one who does not ask for it, connected quietly, its token private.

Whoever reaches a Ray cluster can run code in it. So its token authentication stays on, and the file with the token is its owner's alone: Ray itself
writes it with the usual umask, and its control store listens on all of the machine's addresses.
"""

import logging
import math
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from diffusion.common.processes import command


class ClusterRefusal(ValueError):
    """Ray is not installed, or what is asked of it is wrong."""


class ClusterError(RuntimeError):
    """There is no cluster, or it does not do what was asked of it now; the same command may succeed later."""


EXTRA = "uv pip install -e '.[ray]'"
AUTO, LOCAL = 'auto', 'local'
PORTS = range(1024, 65536)  # Ray takes no others
ANSWER_SEC = 5  # for a head to answer: less than a person waits, and a head that has just started is there
# What opens a connection of gRPC, and what the other side begins with (RFC 9113, sections 3.4 and 6.5): a frame of type 4, SETTINGS, on stream 0.
HTTP2_PREFACE = b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n' + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
FRAME_HEADER_BYTES, SETTINGS = 9, 4
LOOK_SEC = 5.0  # between two looks whether the head still answers
RECONNECT_SEC = 'RAY_gcs_rpc_server_reconnect_timeout_s'  # Ray's name

_state = SimpleNamespace(head=None)


def refuse_without_ray(what: str) -> None:
    """Raises ClusterRefusal with the remedy, which begins with `what`, where Ray is not installed."""
    if find_spec('ray') is None:
        raise ClusterRefusal(f'{what} needs Ray, which is not installed: {EXTRA}')


def wrong_address(address: str) -> str:
    """Return what is wrong with the address of a cluster, or nothing: Ray itself would start first, or look for it for minutes."""
    if '://' in address:
        return f'{address} is an address of Ray Client; run this on a machine of the cluster, with host:port or {AUTO}'
    if address in (AUTO, LOCAL):
        return ''
    found = re.fullmatch(r'([^\s:/\[\]]+|\[[0-9A-Fa-f:.]+\]):([0-9]+)', address)
    if found is None:
        return f'{address!r} is no address of a cluster; write host:port of its head, such as 10.0.0.5:6379, {AUTO}, or {LOCAL}'
    if int(found[2]) not in PORTS:
        return f'{address}: the port {found[2]} is not one of {PORTS.start} to {PORTS.stop - 1}; that of `ray start --head` is 6379 by default'
    return ''


def connect(address: str | None, what: str, namespace: str | None = None, show_output: bool = False) -> Any:
    """The module `ray`, connected; a process that is connected already stays so.

    Args:
        address: host:port of a running cluster's head, of which this machine must be a part; `auto`: the one that RAY_ADDRESS names, or else the
            one that runs here; `local`: a cluster of this machine alone, which ends with this process; None: what RAY_ADDRESS says, or else `local`.
        what: who asks, for messages.
        namespace: in which names of actors are unique.
        show_output: print here what processes of this one print on other machines, and of Ray's own words there errors alone.

    Raises:
        ClusterRefusal: Ray is not installed, its authentication is switched off, or the address is none.
        ClusterError: there is no cluster at the address, which is known after ANSWER_SEC, or it does not let this machine in.
    """
    refuse_without_ray(what)
    from_environment = os.environ.get('RAY_ADDRESS')
    if wrong := wrong_address(address or AUTO):
        raise ClusterRefusal(f'{what}: {wrong}')
    if address in (None, '', AUTO) and (wrong := wrong_address(from_environment or AUTO)):
        raise ClusterRefusal(f'{what}: RAY_ADDRESS: {wrong}')
    os.environ.setdefault('RAY_USAGE_STATS_ENABLED', '0')
    _keep_authentication(what)
    import ray

    if ray.is_initialized():
        return ray
    address = shown = address or from_environment or LOCAL
    own: dict[str, Any] = {'include_dashboard': False} if address == LOCAL else {}
    try:
        if address == AUTO:
            from ray._private.services import canonicalize_bootstrap_address_or_die  # of Ray 2.60; nothing public tells the address without a wait

            address = canonicalize_bootstrap_address_or_die(AUTO)
            shown = f'{address} ({AUTO})'
        if address != LOCAL:
            _expect_answer(address)
        with _undisturbed_start(local=address == LOCAL):
            if show_output:
                own['logging_config'] = ray.LoggingConfig(log_level='ERROR')
            ray.init(address, namespace=namespace, log_to_driver=show_output, logging_level=logging.WARNING, **own)  # type: ignore[arg-type]
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        cause = (isinstance(error, OSError) and error.strerror) or error
        raise ClusterError(
            f'{what}: no Ray cluster at {shown}: {cause}; start it with `ray start`, or correct the address; copy ~/.ray/auth_token of its head to '
            'this machine, and run the same command again'
        ) from error
    if address != LOCAL:
        _state.head = SimpleNamespace(what=what, address=address, left=threading.Event(), silent_sec=0.0)
        threading.Thread(target=_watch_head, args=(_state.head,), name='ray-head', daemon=True).start()
    return ray


def refuse_lost_head() -> None:
    """Call often while work is under way: Ray lets a process go on for a minute without a head, and then ends it in C++, with words of its own.

    Raises:
        ClusterError: the head of the cluster has not answered for half of that minute.
    """
    limit_sec = float(os.environ.get(RECONNECT_SEC, '60')) / 2  # Ray's default (2.60)
    if _state.head is not None and _state.head.silent_sec > limit_sec:
        raise ClusterError(
            f'{_state.head.what}: the head of the Ray cluster, {_state.head.address}, has not answered for {_state.head.silent_sec:.0f} s (limit '
            f'{limit_sec:g}), and its machines end without it; start a cluster again and resume with: {command()}'
        )


def _watch_head(head: SimpleNamespace) -> None:
    silent_since = None
    while not head.left.wait(LOOK_SEC):
        asked = time.monotonic()
        try:
            _expect_answer(head.address)
            silent_since, head.silent_sec = None, 0.0
        except OSError:
            silent_since = silent_since or asked
            head.silent_sec = time.monotonic() - silent_since


def _expect_answer(address: str) -> None:
    """Return if something at host:port answers as gRPC does. Ray asks for many minutes (2.60: 834 s), and with many lines, where nothing does.

    Raises:
        OSError: nothing listens there, or something else does.
    """
    host, _, port = address.rpartition(':')
    end = time.monotonic() + ANSWER_SEC
    while True:
        try:
            with socket.create_connection((host.strip('[]'), int(port)), timeout=max(0.1, end - time.monotonic())) as connection:
                if os.environ.get('RAY_USE_TLS', '0') in ('', '0'):
                    connection.sendall(HTTP2_PREFACE)
                    header = b''
                    while len(header) < FRAME_HEADER_BYTES and (more := connection.recv(FRAME_HEADER_BYTES - len(header))):
                        header += more
                    if len(header) < FRAME_HEADER_BYTES or header[3] != SETTINGS or any(header[5:]):
                        raise ConnectionError('something else than Ray listens there')
                return
        except ConnectionRefusedError:  # a head that is just starting
            if time.monotonic() + 0.5 > end:
                raise
            time.sleep(0.5)
        except TimeoutError:
            raise TimeoutError(f'no answer within {ANSWER_SEC} s') from None


def room_for(machines: Iterable[Mapping[str, float]], each: Mapping[str, float]) -> int:
    """Return how many processes fit that take `each` amount by name, each process on one machine.

    A share of a GPU is of one GPU: where 0.4 of each are left there is no room for 0.6, however many GPUs there are.
    """

    def times(has: float, takes: float) -> int:
        return int(has // takes) if takes >= 1 else int(has) * math.floor(1 / takes + 1e-9)

    return sum(min(times(machine.get(name, 0.0), amount) for name, amount in each.items() if amount) for machine in machines)


def disconnect() -> None:
    """End this process's part in the cluster, and a cluster that it started; nothing where there is none."""
    if _state.head is not None:
        _state.head.left.set()
        _state.head = None
    if (ray := sys.modules.get('ray')) is not None:
        ray.shutdown()


def _keep_authentication(what: str) -> None:
    """A token that only its owner can read, before Ray writes one that all can."""
    if os.environ.get('RAY_AUTH_MODE', 'token') != 'token':
        raise ClusterRefusal(f'{what}: RAY_AUTH_MODE={os.environ["RAY_AUTH_MODE"]} lets anyone on the network run code here; unset it')
    os.environ['RAY_AUTH_MODE'] = 'token'  # or a process that joins a cluster sends none
    if os.environ.get('RAY_AUTH_TOKEN') or os.environ.get('RAY_AUTH_TOKEN_PATH'):
        return
    path = Path.home() / '.ray' / 'auth_token'
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError), open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), 'w') as file:
        file.write(secrets.token_hex(32))
    if path.stat().st_mode & 0o077 and path.stat().st_uid == os.getuid():
        path.chmod(0o600)


@contextmanager
def _undisturbed_start(local: bool) -> Iterator[None]:
    """Keep what Ray would change or say while it starts in this process."""
    with ExitStack() as restored:
        if threading.current_thread() is threading.main_thread():  # Ray takes SIGTERM for itself; a run that is asked to stop has to save
            restored.callback(signal.signal, signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        logger = logging.getLogger('ray._private.authentication.authentication_token_setup')
        restored.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)  # on a warning's level, it advises to switch authentication off
        # A head that answers, but refuses the token, is asked 20 times, with a second and a line each (2.60); the number is in seconds, too.
        if not local and (name := 'RAY_gcs_server_port_wait_time_s') not in os.environ:
            os.environ[name] = str(ANSWER_SEC)
            restored.callback(os.environ.pop, name)
        yield
