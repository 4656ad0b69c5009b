"""How far a training child is: its log is followed, not asked for."""

import time
from collections import deque
from pathlib import Path

from diffusion.common.files import parse_json

WINDOW_SEC = 600.0  # over which steps per second are counted


class StepFollower:
    """Reads what RUN/log.jsonl gains.

    Args:
        path: of the log; it need not be there yet.
        step: before the first line.
    """

    def __init__(self, path: Path, step: int):
        self.path, self.step = path, step
        self.moved_at = time.monotonic()
        self._offset, self._rest = 0, b''
        self._seen = deque[tuple[float, int]]()

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
        steps = [step for line in lines if (step := _step_of(line)) is not None]
        if steps and steps[-1] != self.step:  # of lines that came together only the last one is at the time of the look
            self._note(steps[-1])

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


def _step_of(line: bytes) -> int | None:
    """None: a line that a kill cut short, or of something else."""
    try:
        step = parse_json(line)['batch']
    except (ValueError, TypeError, KeyError):
        return None
    return step if isinstance(step, int) else None
