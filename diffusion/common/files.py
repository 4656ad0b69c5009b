"""Local files: locks, atomic writes, JSON of any origin, and JSON lines."""

import errno
import fcntl
import json
import os
import platform
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar

T = TypeVar('T')
TEMPORARY = '.tmp-'  # prefix of a file that is not complete yet
MAX_JSON_BYTES = 64 * 2**20
ATTEMPTS = 100  # to take the name of a folder; each that fails let another process through
# Neither a lock nor a process id says anything about another host's processes.
SCRATCH_PREFIX = f'.scratch-{platform.node()}-{os.getuid()}-'
NEW_PREFIX = f'.new-{platform.node()}-{os.getuid()}-'  # not locked yet; the process id follows


def lock(file: int | IO[Any], shared: bool = False) -> None:
    """Wait for the lock of an open file; closing the file releases it. Forked processes inherit it.

    Linux drops a lock when the last process that holds it ends, however it ends. Also valid between machines on NFS.

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


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name next to `path` (same suffix), and move what was written there to `path` in one step.

    A reader sees the old file or the new one, also after a loss of power; a writer that is killed or fails leaves the old one.

    Raises:
        OSError: the disk is full or broken.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f'{TEMPORARY}{os.getpid()}-{path.name}')
    try:
        yield temporary
        sync(temporary)  # on the disk before its name says so
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a whole file in one step, as `replacing` does."""
    with replacing(path) as temporary:
        temporary.write_text(text)


def name_of_temporary(name: str) -> str | None:
    """Return the name that a temporary file of `replacing` was to take; None for other files."""
    process, _, wanted = name.removeprefix(TEMPORARY).partition('-')
    return wanted if name.startswith(TEMPORARY) and process.isdigit() else None


@contextmanager
def scratch_in(parent: Path) -> Iterator[Path]:
    """Yield an empty hidden folder in `parent`, which is made; removed at the end.

    A killed process of this host leaves it to the next one that calls `sweep_scratch`: a living process holds the lock of its own.
    """
    parent.mkdir(parents=True, exist_ok=True)
    unlocked = Path(tempfile.mkdtemp(prefix=f'{NEW_PREFIX}{os.getpid()}-', dir=parent))
    held = (unlocked / '.lock').open('w')
    with suppress(OSError):  # a file system without locks: `sweep_scratch` leaves all that is there
        lock(held)
    scratch = unlocked.rename(parent / unlocked.name.replace(NEW_PREFIX, SCRATCH_PREFIX, 1))  # under this name it is never without its lock
    with held:
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def sweep_scratch(parent: Path) -> None:
    """Remove the scratch folders in `parent` that killed processes of this host left."""
    for scratch in parent.glob(f'{SCRATCH_PREFIX}*/'):
        try:
            with (scratch / '.lock').open() as held:
                if not try_lock(held):
                    continue  # its process lives
        except FileNotFoundError:
            pass  # its process was killed while it removed the folder, or is just doing so
        except OSError:
            continue
        shutil.rmtree(scratch, ignore_errors=True)
    for unlocked in parent.glob(f'{NEW_PREFIX}*/'):
        if not lives(int(unlocked.name.removeprefix(NEW_PREFIX).partition('-')[0])):
            shutil.rmtree(unlocked, ignore_errors=True)


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder next to `folder`, which takes its place when the block ends without an error.

    Of several processes that write the same folder the last one to end replaces the others': it holds what one of them wrote.

    Raises:
        OSError: the disk is full or broken, `folder` is a file, or there is no permission.
    """
    sweep_scratch(folder.parent)
    with scratch_in(folder.parent) as scratch:
        temporary, former = scratch / 'new', scratch / 'former'
        temporary.mkdir()
        yield temporary
        for attempt in range(ATTEMPTS):
            if folder.is_dir() and not folder.is_symlink():
                with suppress(FileNotFoundError):  # another process has just moved it
                    os.rename(folder, former)  # a folder that is being deleted in its place could be met half empty
            try:
                os.rename(temporary, folder)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or attempt == ATTEMPTS - 1:
                    raise
            shutil.rmtree(former, ignore_errors=True)  # another process took the name in between: move its folder too


def lives(process_id: int) -> bool:
    """Return whether this host has a process of that id, of any user."""
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def sync(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def keep_private() -> None:
    """Close what this process and its children write from now on to users outside the group; the umask decides on the group's access.

    Run folders hold recipes, logs and checkpoints, which name buckets, machines and people; on a cluster a team shares them by its group.
    """
    os.umask(os.umask(0o077) | 0o007)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON as json.loads does, with one type of error for all that it cannot read.

    Raises:
        ValueError: damaged, nested too deeply (json: RecursionError), or with a number of more than 4,300 digits.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError('JSON nested too deeply') from None


def parse_json_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object; raise ValueError if it is damaged, or not an object."""
    content = parse_json(text)
    if not isinstance(content, dict):
        raise ValueError(f'expected a JSON object, got a {type(content).__name__}')
    return content


def open_regular(path: Path) -> BinaryIO:
    """Open a file that may be anybody's for reading: a device or a FIFO would hang or never end.

    Raises:
        OSError: it is missing or cannot be read.
        ValueError: the path holds a NUL, or is a folder, a device, a FIFO or a socket.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # without O_NONBLOCK opening a FIFO waits for its writer
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError('not a regular file')
    return os.fdopen(descriptor, 'rb')


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Read a whole file that may be anybody's, and would fill the memory if it were of gigabytes.

    Raises:
        OSError, ValueError: as `open_regular`; ValueError too if it is larger than `max_bytes`.
    """
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f'larger than {max_bytes:,} bytes')
    return content


def parse_typed(content: bytes, shape: type[T]) -> T:
    """Parse JSON as `read_json` does; raise ValueError with the first field that does not fit, and its value, on one line."""
    from pydantic import TypeAdapter, ValidationError  # late: 0.2 s that most commands do not need

    try:
        if b'\\ud' in content.lower():  # halves of surrogate pairs, which captions can hold, and pydantic refuses
            content = json.dumps(parse_json(content), ensure_ascii=False).encode('utf-8', 'replace')
        return TypeAdapter(shape).validate_json(content, strict=True)
    except ValidationError as invalid:
        first, others = invalid.errors()[0], invalid.error_count() - 1
        place = f'{".".join(map(str, first["loc"]))}: ' if first['loc'] else ''
        value = '' if first['type'] in ('missing', 'json_invalid') else f', not {first["input"]!r:.60}'
        more = f' (and {others} more)' if others else ''
        raise ValueError(f'{place}{first["msg"]}{value}{more}') from None


def read_json(path: Path, shape: type[T], error: type[Exception] = ValueError, remedy: str = 'restore the file') -> T:
    """Read a JSON file as a dataclass, a TypedDict (of typing_extensions) or any other type that pydantic checks.

    Keys that the type does not have are dropped.

    Args:
        error: the class to raise, with the file, the first field that does not fit, its value and `remedy`.
    """
    try:
        return parse_typed(read_regular(path, MAX_JSON_BYTES), shape)
    except OSError as problem:
        raise error(f'{path}: {problem.strerror}; {remedy}') from problem
    except ValueError as problem:
        raise error(f'{path}: {problem}; {remedy}') from problem


# JSON lines: one object a line. A killed process may leave half a line at the end.


def open_to_append(path: Path, shared: bool = False) -> BinaryIO:
    """Open a file unbuffered at the beginning of a line, so that a line that a kill cut short does not swallow the next.

    Args:
        shared: other processes append to it too. It is locked until it is closed, and before its end is looked at: its last holder
            may have been killed in the middle of a line.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open('ab+', buffering=0)
    if shared:
        lock(file)
    if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b'\n':
        file.write(b'\n')
    return file


def append_json_line(file: BinaryIO, record: dict[str, Any]) -> None:
    """Write a line.

    Raises:
        OSError: the disk is full, also if it took a part of the line.
        ValueError: as `json_line`.
    """
    line = json_line(record)
    if file.write(line) < len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)


def json_line(record: dict[str, Any]) -> bytes:
    """Return the line of a record; raise ValueError for a number that is not finite, which JSON does not have."""
    return json.dumps(record, allow_nan=False).encode() + b'\n'


def read_json_lines(
    path: Path, fits: Callable[[dict[str, Any]], bool] | None = None, error: type[Exception] = ValueError
) -> Iterator[dict[str, Any]]:
    """Yield the objects in order, without lines that a kill cut short; nothing if there is no file.

    Args:
        fits: whether an object is what is written to this file.
        error: to raise where one is not, and where the path is a folder, a device or a FIFO.
    """
    if not path.exists():
        return
    try:
        lines = open_regular(path)
    except ValueError as problem:
        raise error(f'{path}: {problem}; restore the file, or remove it') from None
    with lines as file:
        for number, line in enumerate(file, start=1):
            try:
                record = parse_json(line)
            except ValueError:
                continue
            if fits is not None and not (isinstance(record, dict) and fits(record)):
                raise error(f'{path}: line {number} is not what a run writes there; restore the file, or delete the line')
            if isinstance(record, dict):
                yield record


def is_number(value: Any) -> bool:
    """Return whether a field holds a finite number, as `json_line` demands; Python reads NaN, 1e999 and integers of any length too."""
    return isinstance(value, int | float) and abs(value) < 1e300
