"""What an owner wants to read of a child that failed: its last error, without what launchers and progress bars print around it."""

import re
from collections.abc import Sequence

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
    """Where a text of several lines begins: a heading, indented lines and what follows them, or lines about one subject."""
    begin = max(0, end - 1)
    while begin > max(0, end - ERROR_LINES) and (
        said[begin].startswith((' ', '\t')) or said[begin - 1].startswith((' ', '\t')) or said[begin].split(': ')[0] == said[begin - 1].split(': ')[0]
    ):
        begin -= 1
    return begin
