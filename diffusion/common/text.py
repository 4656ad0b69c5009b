"""Short phrases that many messages need."""

import difflib
import re
from collections.abc import Iterable

# What terminals obey: CSI (colours, cursor), OSC (title, links) and other strings with their content, and two-character sequences.
_ESCAPES = re.compile(r'(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|(?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)|\x1b[ -/]*[0-~]')
# Other control characters, marks of the direction of writing, line separators that are no newline, and halves of surrogate pairs.
_INVISIBLE = re.compile('[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]')


def without_escapes(text: str) -> str:
    """Return the text without the sequences that terminals obey instead of showing."""
    return _ESCAPES.sub('', text)


def printable(text: str) -> str:
    """Return the text with control characters and bidirectional marks as `\\x1b` and the like; newlines and tabs stay.

    For terminals: a name, a caption or a server's message could clear the screen, hide what is wrong, or show another order than it has.
    """
    return _INVISIBLE.sub(lambda match: ascii(match[0])[1:-1], text)


def counted(number: int, noun: str) -> str:
    """`1 GPU`, `2,048 GPUs`."""
    return f'{number:,} {noun}{"" if number == 1 else "s"}'


def closest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the most similar of `known`; None if none has a similarity of at least `cutoff` (0..1, as difflib defines it)."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6, by_prefix: bool = False) -> str:
    """`; did you mean 'x'?` for the end of a sentence about an unknown name; a full stop if nothing is similar.

    Args:
        cutoff: as of `closest`.
        by_prefix: suggest all names that begin with `name` before similar ones: `a100` may be two GPUs.
    """
    known = list(known)
    starting = [other for other in known if by_prefix and other.startswith(name)]
    close = starting or [other for other in [closest(name, known, cutoff)] if other]
    return f'; did you mean {" or ".join(repr(other) for other in close)}?' if close else '.'


def brief(text: str) -> str:
    """The first eight digits of a SHA-256, other texts unchanged."""
    return text[:8] if re.fullmatch('[0-9a-f]{32,}', text) else text


def one_line(error: BaseException, limit: int | None = None) -> str:
    """The whole message of an error on one line, cut to `limit` characters; the error's type if it has no message."""
    return (' '.join(str(error).split()) or type(error).__name__)[:limit]


def first_line(error: BaseException, with_type: bool = False, limit: int = 300) -> str:
    """The first line of an error's message, without the advice or C++ frames that libraries add below it; the error's type if it has no message.

    Args:
        with_type: put the type in front: `OSError: no such file`.
    """
    kind, lines = type(error).__name__, str(error).strip().splitlines()
    if not lines:
        return kind
    return f'{kind}: {lines[0][:limit]}' if with_type else lines[0][:limit]
