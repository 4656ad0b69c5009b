"""The one way into Ray: an extra of this project, imported by no one who does not ask for it, connected quietly, its token private.

Whoever reaches a Ray cluster can run code in it. So its token authentication stays on, and the file with the token is its owner's alone: Ray itself
writes it with the usual umask, and its control store listens on all of the machine's addresses.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any


class ClusterRefusal(ValueError):
    """Ray is not installed, or what is asked of it is wrong."""


class ClusterError(RuntimeError):
    """There is no cluster, or it does not do what was asked of it now; the same command may succeed later."""


EXTRA = "pip install -e '.[ray]'"
LOCAL = 'local'


def refuse_without_ray(what: str) -> None:
    """Raises ClusterRefusal with the remedy, which begins with `what`, where Ray is not installed."""
    if find_spec('ray') is None:
        raise ClusterRefusal(f'{what} needs Ray, which is not installed: {EXTRA}')


def connect(address: str | None, what: str, namespace: str | None = None) -> Any:
    """The module `ray`, connected; a process that is connected already stays so.

    Args:
        address: host:port of a running cluster's head, of which this machine must be a part; `auto`: the one that runs here; None: what RAY_ADDRESS
            says, or else a cluster of this machine alone, which ends with this process.
        what: who asks, for messages.
        namespace: in which names of actors are unique.

    Raises:
        ClusterRefusal: Ray is not installed, its authentication is switched off, or the address is none.
        ClusterError: there is no cluster at the address, or it does not let this machine in.
    """
    refuse_without_ray(what)
    os.environ.setdefault('RAY_USAGE_STATS_ENABLED', '0')
    _keep_authentication(what)
    import ray

    if ray.is_initialized():
        return ray
    address = address or os.environ.get('RAY_ADDRESS') or LOCAL
    if '://' in address:
        raise ClusterRefusal(f'{what}: {address} is an address of Ray Client; run this on a machine of the cluster, with host:port or auto')
    own = {'include_dashboard': False} if address == LOCAL else {}
    try:
        with _own_signals(), _quiet():
            ray.init(address, namespace=namespace, log_to_driver=False, logging_level=logging.WARNING, **own)  # type: ignore[arg-type]
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise ClusterError(
            f'{what}: no Ray cluster at {address}: {error}; start it with `ray start`, copy ~/.ray/auth_token of its head to this machine, and '
            'run the same command again'
        ) from error
    return ray


def disconnect() -> None:
    """End this process's part in the cluster, and a cluster that it started; nothing where there is none."""
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
def _own_signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself; a run that is asked to stop has to save."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Ray advises, on a warning's level, to switch authentication off."""
    logger = logging.getLogger('ray._private.authentication.authentication_token_setup')
    before, logger.level = logger.level, logging.ERROR
    try:
        yield
    finally:
        logger.level = before
