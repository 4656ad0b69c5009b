"""Clean up what a killed process left outside its own folders: any later process of the same user finds and removes it.

An entry is a folder in /dev/shm/diffusion-UID, which no TMPDIR moves and which a reboot empties, with a link to each thing that goes with it.
Its owners hold a lock on it, which forked processes inherit and Linux drops with the last of them, in whatever container they ran; a process
id would say nothing there. Elsewhere than on Linux there are no entries.
"""

import getpass
import multiprocessing.util
import os
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from diffusion.common.files import lock, try_lock

SHARED_MEMORY = Path('/dev/shm')  # noqa: S108

LAST = -200  # of what multiprocessing does when Python ends; it removes its own folder at -100

_locks: dict[Path, int] = {}  # file descriptors of the entries that this process holds
_outer: list[str] = []  # the temporary folder before `use_own_temporary_folder`
_made: dict[Path, int] = {}  # entries that it made, with its process id: a forked process must not remove them at its end


def entries() -> Path:
    """Return the folder of the user's entries, and create it; raise PermissionError if someone else could write what is removed."""
    folder = SHARED_MEMORY / f'diffusion-{os.getuid()}'
    folder.mkdir(mode=0o700, exist_ok=True)
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o022:
        raise PermissionError(f'{folder} is not a folder that you alone can write to; remove it')
    return folder


def make(name: str, owns: Iterable[Path] = ()) -> Path:
    """Create an entry that this process holds, for things that need not exist yet; raise FileExistsError if the name is taken."""
    entry = entries() / name
    entry.mkdir(mode=0o700)
    while not join(entry):  # someone took it for a dead one, as it was not locked yet
        entry.mkdir(mode=0o700)
    if not _made:
        multiprocessing.util.Finalize(None, remove_own, exitpriority=LAST)
    _made[entry] = os.getpid()
    for path in owns:
        (entry / path.name).symlink_to(path)
    return entry


def join(entry: Path) -> bool:
    """Hold an entry that a process of the same job made; False if it has been removed."""
    try:
        fd = os.open(entry, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return False
    lock(fd, shared=True)
    if not os.fstat(fd).st_nlink:
        os.close(fd)
        return False
    _locks[entry] = fd
    return True


def remove_dead() -> int:
    """Remove the entries that no process holds, and what they link to; return their number."""
    if not SHARED_MEMORY.exists():
        return 0
    return sum(_removed_if_dead(entry) for entry in entries().iterdir())


def _removed_if_dead(entry: Path) -> bool:
    try:
        fd = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        is_dead = try_lock(fd)
        if is_dead:
            _remove(entry)
    finally:
        os.close(fd)
    return is_dead


def _remove(entry: Path) -> None:
    """Remove what an entry links to, and the entry last: its name stays taken, and a process killed in here has not forgotten the rest."""
    for link in entry.glob('*'):
        if link.is_symlink():
            thing = link.readlink()
            if thing.is_dir():
                shutil.rmtree(thing, ignore_errors=True)
            else:
                with suppress(OSError):
                    thing.unlink(missing_ok=True)
    shutil.rmtree(entry, ignore_errors=True)


def forget(entry: Path) -> None:
    """Remove an entry that this process made, but not what it links to."""
    del _made[entry]
    shutil.rmtree(entry)
    os.close(_locks.pop(entry))


def remove_own() -> None:
    """Remove what this process made: at its end, or before it becomes another one."""
    if _outer:
        tempfile.tempdir = os.environ['TMPDIR'] = _outer.pop()
    for entry in [entry for entry, process in _made.items() if process == os.getpid()]:
        _remove(entry)
        del _made[entry]
        os.close(_locks.pop(entry))


def use_own_temporary_folder() -> None:
    """Give this process and its children a temporary folder of their own, for all libraries.

    torch.distributed and multiprocessing make folders that they remove when Python ends, which a killed process does not come to. For a
    process that has just begun: importing Composer makes one (torch._dynamo).
    """
    if not SHARED_MEMORY.exists():
        return
    remove_dead()
    outer = tempfile.gettempdir()
    folder = Path(outer, f'run-{uuid.uuid4().hex[:8]}')
    entry = make(folder.name, [folder])
    folder.mkdir(mode=0o700)
    _outer.append(outer)
    tempfile.tempdir = str(entry)  # the sockets of loader processes, as the name of a socket is short; those processes inherit the choice
    multiprocessing.util.get_temp_dir()
    tempfile.tempdir = os.environ['TMPDIR'] = str(folder)
    # What later processes want to find again: torch's compiled kernels, in its default place.
    with suppress(KeyError, OSError):  # a user without a name, for whom torch has no default
        user = re.sub(r'[\\/:*?"<>|]', '_', getpass.getuser())
        os.environ.setdefault('TORCHINDUCTOR_CACHE_DIR', f'{outer}/torchinductor_{user}')
