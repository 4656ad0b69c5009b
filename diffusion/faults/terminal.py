"""The terminal that a run was started from: it may close while the run continues, and its Ctrl-C is for the run, not for the launcher.

Composer's launcher answers Ctrl-C with a traceback, and kills after 30 seconds, whatever is being saved. So under it the first process of a
machine takes the place of the terminal's foreground job, as a shell's job does, and the launcher hears nothing: it returns the exit code that
this process ends with. Ctrl-Z still stops all of them.
"""

import atexit
import io
import os
import signal
import sys
import termios
from contextlib import suppress
from types import FrameType, SimpleNamespace

_state = SimpleNamespace(tty=None, launchers=0)


def take() -> None:
    """Under a launcher: make the first process of the machine the foreground job of the terminal if the launcher is that; until `give_back`."""
    if os.environ.get('LOCAL_RANK') != '0':
        return
    try:
        if _state.tty is None:
            tty = os.open('/dev/tty', os.O_RDWR)
            _state.tty, _state.launchers = tty, os.getpgrp()
            atexit.register(give_back)
        stops_writers = termios.tcgetattr(_state.tty)[3] & termios.TOSTOP  # the launcher writes too
        if stops_writers or _state.launchers == os.getpid() or os.tcgetpgrp(_state.tty) != _state.launchers:
            return
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # or the next but one line would stop this process
        os.setpgid(0, os.getpid())
        os.tcsetpgrp(_state.tty, os.getpid())
        signal.signal(signal.SIGTSTP, _stop_all)
    except (OSError, termios.error):  # none, or one that is being closed
        return


def give_back() -> None:
    """Return the terminal to the launcher; shells take it back by themselves, scripts do not."""
    with suppress(OSError):
        if _state.tty is not None and os.tcgetpgrp(_state.tty) == os.getpid():
            os.tcsetpgrp(_state.tty, _state.launchers)


def _stop_all(number: int, _: FrameType | None) -> None:
    """Ctrl-Z: stop the launcher and all that it has started, with this process; a shell continues the launcher's group."""
    give_back()
    signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.setpgid(0, _state.launchers)
    os.killpg(_state.launchers, signal.SIGTSTP)
    with suppress(ProcessLookupError, PermissionError):  # the loader's processes, which are in this process's own group
        os.killpg(os.getpid(), signal.SIGCONT)
    take()


class _Survives(io.RawIOBase):
    """A stream to which writing never fails: a run does not end with its terminal, its `tee` or the disk of its log."""

    def __init__(self, fd: int):
        self.fd = fd

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.fd

    def isatty(self) -> bool:
        return os.isatty(self.fd)

    def write(self, content) -> int:  # type: ignore[no-untyped-def, override]
        try:
            return os.write(self.fd, content)
        except OSError:
            return len(content)


def survive_its_end() -> None:
    """Make printing unable to raise from now on."""
    for name in ('stdout', 'stderr'):
        stream = getattr(sys, name)
        with suppress(OSError, ValueError, AttributeError):  # there is none, or it is no file
            stream.flush()
            survives = io.BufferedWriter(_Survives(stream.fileno()))
            line_buffering = name == 'stderr' or stream.isatty() or bool(os.environ.get('PYTHONUNBUFFERED'))
            setattr(sys, name, io.TextIOWrapper(survives, stream.encoding, errors='backslashreplace', line_buffering=line_buffering))
