"""A request to stop, which a signal handler may make at any instant."""

import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType


class StopRequest:
    """Whether this process was asked to stop. Not a threading.Event: a handler that sets one while its thread waits for it may wait for ever."""

    def __init__(self) -> None:
        self.asked = False
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)

    def ask(self) -> None:
        self.asked = True
        with suppress(OSError):  # full: it will be read
            os.write(self._write, b'.')

    def wait(self, seconds: float) -> bool:
        """Sleep, but not after a request; return whether there was one."""
        if not self.asked:
            select.select([self._read], [], [], max(0.0, seconds))
        return self.asked

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Let SIGTERM and Ctrl-C make the request within the context; a second Ctrl-C interrupts."""
        first_at = [0.0]

        def heard(number: int, _: FrameType | None) -> None:
            if number == signal.SIGINT and self.asked and time.monotonic() - first_at[0] > 0.5:
                raise KeyboardInterrupt
            first_at[0] = first_at[0] or time.monotonic()
            self.ask()

        before = {number: signal.signal(number, heard) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
