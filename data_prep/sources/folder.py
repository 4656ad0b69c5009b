"""The folder that a source is in: filled by somebody else, so nothing but regular files inside it is ever opened."""

import os
import stat
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from diffusion.common.storage import Folder, LocalFolder, Stat, open_folder
from diffusion.contracts.errors import DataError

LEADS_OUT = 'a link that leads out of the source'
LEADS_NOWHERE = 'a link that leads nowhere'
FOLDER_OUTSIDE = 'a link to a folder outside the source'
IS_FOLDER = 'a folder'
NOT_REGULAR = 'not a regular file'  # a device, a FIFO, a socket: reading it may never end
REMEDY = 'copy what it should be in its place, or remove it'


def open_source(where: str | Path) -> Folder:
    """The folder at a local path or URL, to read only; as `open_folder`."""
    return open_folder(where) if '://' in str(where) else SourceFolder(str(where))


@dataclass(frozen=True)
class SourceFolder(LocalFolder):
    """A local folder of which only regular files are opened, and links only to such files inside it.

    Links to folders inside are not followed: what is there is listed under its own name. Whatever else is there is listed with the reason
    why it is not opened (`Stat.refused`).
    """

    def files(self, under: str = '') -> dict[str, Stat]:
        root, found = Path(self.url), {}
        for folder, folders, names in os.walk(root / under, onerror=self._unless_absent):
            folders[:] = [name for name in folders if not name.startswith('.')]
            for name in [*names, *folders]:
                path = os.path.join(folder, name)
                if not name.startswith('.') and (known := self._stat(path)):
                    found[(Path(folder).relative_to(root) / name).as_posix()] = known
        return dict(sorted(found.items()))

    def read(self, name: str) -> bytes:
        self._check(name)
        return super().read(name)

    def fetch(self, name: str, scratch: Path) -> Path:
        self._check(name)
        return super().fetch(name, scratch)

    def _check(self, name: str) -> None:
        """Raises DataError for what must not be opened; a file that is not there is left to the caller."""
        path = os.path.join(self.url, name)
        if os.path.lexists(path) and (why := self._refusal(path)):
            raise DataError(f'{path}: is {why}; {REMEDY}')

    def _stat(self, path: str) -> Stat | None:
        """Size and time of a file; None for a folder, and for a link to one inside."""
        found = os.lstat(path)
        if stat.S_ISDIR(found.st_mode):
            return None
        if stat.S_ISLNK(found.st_mode):
            why = self._refusal(path)
            if why:
                return None if why == IS_FOLDER else Stat(0, '', why)
            found = os.stat(path)
        return Stat(found.st_size, str(found.st_mtime_ns)) if stat.S_ISREG(found.st_mode) else Stat(0, '', NOT_REGULAR)

    def _refusal(self, path: str) -> str:
        """Why a path is not opened; '' for a regular file inside."""
        try:
            mode = os.stat(path).st_mode
        except OSError:  # of a link to itself, too
            return LEADS_NOWHERE
        real = os.path.realpath(path)
        if not any(f'{real}/'.startswith(f'{root}/') for root in self._roots):
            return FOLDER_OUTSIDE if stat.S_ISDIR(mode) else LEADS_OUT
        return IS_FOLDER if stat.S_ISDIR(mode) else '' if stat.S_ISREG(mode) else NOT_REGULAR

    @cached_property
    def _roots(self) -> tuple[str, ...]:
        """The folder; of a snapshot in Hugging Face's cache, which is links to `blobs`, also those."""
        root = Path(self.url).resolve()
        return (str(root), str(root.parents[1] / 'blobs')) if root.parent.name == 'snapshots' else (str(root),)
