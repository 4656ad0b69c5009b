"""File locks, which Linux drops when the last process that holds them ends, however it ends. Also valid between machines on NFS."""

import errno
import fcntl
from typing import IO, Any


def lock(file: int | IO[Any], shared: bool = False) -> None:
    """Wait for the lock of an open file; closing the file releases it. Forked processes inherit it.

    Args:
        shared: allow other holders that ask for a shared lock too.

    Raises:
        OSError: the file system has no locks.
    """
    fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)


def try_lock(file: int | IO[Any], inherited: bool = True) -> bool:
    """Take the exclusive lock of an open file if it is free; False if another process holds it.

    Args:
        inherited: forked processes hold the lock too. Otherwise it ends with this process alone, but also as soon as this process closes
            any descriptor of the same file (POSIX record locks).

    Raises:
        OSError: the file system has no locks.
    """
    take = fcntl.flock if inherited else fcntl.lockf
    try:
        take(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True
