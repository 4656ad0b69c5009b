"""Text for people: short phrases, what a terminal may be shown, credentials that no message shows, Markdown tables, differences of settings."""

import difflib
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

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
    """Return the first eight digits of a SHA-256, other texts unchanged."""
    return text[:8] if re.fullmatch('[0-9a-f]{32,}', text) else text


def one_line(error: BaseException, limit: int | None = None) -> str:
    """Return the whole message of an error on one line, cut to `limit` characters; the error's type if it has no message."""
    return (' '.join(str(error).split()) or type(error).__name__)[:limit]


def first_line(error: BaseException, with_type: bool = False, limit: int = 300) -> str:
    """Return the first line of an error's message, without the advice or C++ frames that libraries add below it; its type if it has no message.

    Args:
        with_type: put the type in front: `OSError: no such file`.
    """
    kind, lines = type(error).__name__, str(error).strip().splitlines()
    if not lines:
        return kind
    return f'{kind}: {lines[0][:limit]}' if with_type else lines[0][:limit]


# oci://bucket@namespace carries none, only what follows a colon there would be one.
_USER = re.compile(r'(?<=://)([^/\s@:]*:[^/\s@]*|(?<=http://)[^/\s@]+|(?<=https://)[^/\s@]+)@')
_QUERY = re.compile(
    r'([?&;](?:x-(?:amz|goog)-(?:signature|credential|security-token)|signature|sig|awsaccesskeyid|googleaccessid|(?:access_?|auth_?)?token|'
    r'(?:api_?|access_?|secret_?)?key|password|secret)=)[^&;\s\'"]*',
    re.IGNORECASE,
)
# As their issuers prefix them, so that scanners find them; lengths are the least that were seen, less a margin.
_TOKEN = re.compile(
    r'-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*|'
    r'(?<![A-Za-z0-9])(?:'
    r'hf_[A-Za-z0-9]{16,}|'  # Hugging Face
    r'(?:AKIA|ASIA)[A-Z0-9]{16}|'  # AWS, permanent and temporary
    r'gh[oprsu]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|'  # GitHub, GitLab
    r'sk-[\w-]{16,}|'  # OpenAI, Anthropic
    r'xox[a-z]-[\w-]{10,}|'  # Slack
    r'wandb_v\d_\w{16,}|'  # Weights & Biases, since 2025
    r'AIza[\w-]{30,}|'  # Google
    r'fleet-(?:owner|pool|node)-[\w-]{16,}|'  # this project's own
    r'eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*'  # a JSON web token
    r')'
)
_HEX_KEY = re.compile(r'[0-9a-f]{40}')  # Weights & Biases before; and a commit


def carries_credentials(text: str, may_be_commit: bool = True) -> bool:
    """Whether a text holds a password, a signed request, a token or a private key.

    Args:
        may_be_commit: 40 hex digits by themselves are the commit of a repository, not an API key of Weights & Biases.
    """
    text = without_escapes(text)
    return any(pattern.search(text) for pattern in (_USER, _QUERY, _TOKEN)) or (not may_be_commit and bool(_HEX_KEY.fullmatch(text.strip())))


def redacted(text: str) -> str:
    """Return the text with `***` in place of credentials, and then without escape sequences, behind which they are found too."""
    plain = without_escapes(text)
    safe = _TOKEN.sub('***', _QUERY.sub(r'\1***', _USER.sub('***@', plain)))
    return text if safe == plain else safe


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Format a table: the first column and titles that end in `:` are aligned left, None is empty, floats get two digits."""
    left = [not i or title.endswith(':') for i, title in enumerate(header)]
    titles = [title.removesuffix(':') for title in header]
    cells = [['' if cell is None else f'{cell:,.2f}' if isinstance(cell, float) else str(cell) for cell in row] for row in [titles, *rows]]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(header))]
    cells.insert(1, ['-' * width if is_left else '-' * (width - 1) + ':' for width, is_left in zip(widths, left, strict=True)])
    lines = []
    for row in cells:
        padded = [cell.ljust(width) if is_left else cell.rjust(width) for cell, width, is_left in zip(row, widths, left, strict=True)]
        lines.append(f'| {" | ".join(padded)} |')
    return '\n'.join(lines)


def print_page(text: str) -> None:
    """Print text, which may hold names and captions of any origin, and continue if the reader closes the pipe.

    `| head` is not an error of the command, which may have files to write.
    """
    try:
        print(printable(text), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains once more when it ends


def print_message(message: object) -> None:
    """Print an error, a warning or a line about progress to stderr; it may quote files, peers and models."""
    print(printable(str(message)), file=sys.stderr, flush=True)


def differences(trees: Mapping[str, Mapping[str, Any]], ignored: Collection[str] = ()) -> list[tuple[str, ...]]:
    """Return (dotted field, value in each tree) of the fields that are not the same in all, except the `ignored` ones."""
    flat = [dict(leaves(tree)) for tree in trees.values()]
    fields = list(dict.fromkeys(field for tree in flat for field in tree))
    rows = [(field, *(tree.get(field, 'absent') for tree in flat)) for field in fields if field not in ignored]
    return [row for row in rows if len(set(row[1:])) > 1]


def leaves(tree: Mapping[str, Any], prefix: str = '') -> list[tuple[str, str]]:
    """Return (dotted field, value as YAML would write it) of every value that is no mapping, or an empty one."""
    found = list[tuple[str, str]]()
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            found += leaves(value, f'{prefix}{key}.')
        else:
            found.append((f'{prefix}{key}', 'null' if value is None else str(value).lower() if isinstance(value, bool) else str(value)))
    return found
