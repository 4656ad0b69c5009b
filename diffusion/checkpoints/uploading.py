"""Upload checkpoints to object storage in the background.

A checkpoint is in storage when its manifest is, and that is put last, once the file's size has been confirmed by listing. (The clients
send checksums where the storage takes them; an ETag is no digest in encrypted buckets. What is loaded is hashed in any case.)
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from diffusion.checkpoints.manifest import LATEST, CheckpointManifest, batches_of
from diffusion.common.processes import failpoint
from diffusion.common.storage import RemoteFolder, StorageError, StorageRefusal, write
from diffusion.common.text import print_message
from diffusion.contracts.errors import Superseded

FIRST_PAUSE_SEC = 1.0
LONGEST_PAUSE_SEC = 60.0
END_SEC = 900.0  # how long the end of a run waits for its last upload


class Misses:
    """Counter of checkpoints in a row that were not written or uploaded. The uploader's thread counts too."""

    def __init__(self) -> None:
        self.in_a_row = 0
        self.total = 0
        self.cause = ''

    def add(self, cause: str) -> None:
        self.in_a_row, self.total, self.cause = self.in_a_row + 1, self.total + 1, cause
        log(cause)

    def reset(self) -> None:
        self.in_a_row = 0


class Uploader:
    """A daemon thread that uploads the newest checkpoint of a staging folder to object storage and retries until it succeeds.

    What the storage refuses (credentials, permissions, no such bucket) is a miss at once and not tried again.

    Args:
        staging: local folder with the file and manifest of what is submitted.
        remote: where they go.
        misses: gets one for each checkpoint that a newer one overtakes; an upload sets it back.
        uploaded: called in the thread when a checkpoint is safe.
        confirm: called in the thread before anything in `remote` is changed; raises Superseded if another process has taken the folder,
            which is kept in `superseded`, and nothing more is tried.
    """

    def __init__(
        self,
        staging: Path,
        remote: RemoteFolder,
        misses: Misses,
        uploaded: Callable[[CheckpointManifest], None],
        confirm: Callable[[], None] = lambda: None,
    ):
        self.staging, self.remote, self.misses, self.uploaded, self.confirm = staging, remote, misses, uploaded, confirm
        self.superseded: Superseded | None = None
        self._changed = threading.Condition()
        self._current: CheckpointManifest | None = None  # being uploaded, or tried again
        self._next: CheckpointManifest | None = None
        self._error = ''
        self.refused = ''  # why the storage does not take them, if it refused the newest one
        self._stopped = False
        self._thread: threading.Thread | None = None

    def submit(self, manifest: CheckpointManifest) -> None:
        with self._changed:
            if self._next is not None:
                self.misses.add(f'{self.remote.url}/{self._next.file} was not uploaded before the next one: {self._error or "uploads are too slow"}')
            self._next = manifest
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name='checkpoint upload', daemon=True)
                self._thread.start()

    def finish(self, timeout_sec: float | None = None) -> str:
        """Waits until everything is uploaded; the reason if the storage refused the newest checkpoint, or if it took longer than `timeout_sec`
        (END_SEC), after which nothing more is tried."""
        timeout_sec = END_SEC if timeout_sec is None else timeout_sec
        with self._changed:
            awaited = self._next or self._current
            if awaited is None or self._stopped:
                return '' if self._stopped else self.refused
            log(f'waiting for the upload of {self.remote.url}/{awaited.file}, {awaited.content.bytes / 1e6:,.0f} MB, at most {timeout_sec:.0f} s')
            if self._changed.wait_for(lambda: self._stopped or (self._current is None and self._next is None), timeout_sec):
                return '' if self._stopped else self.refused
            self._stopped = True
            self._changed.notify_all()
            return f'{self.remote.url}/{awaited.file} could not be uploaded within {timeout_sec:.0f} s: {self._error or "it has not finished"}'

    def stop(self) -> None:
        """Try nothing more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _run(self) -> None:
        while (manifest := self._take()) is not None:
            pause_sec = FIRST_PAUSE_SEC
            while not self._try_upload(manifest):
                with self._changed:
                    if self._stopped:
                        return
                    self._changed.wait_for(lambda: self._stopped or self._next is not None, pause_sec)
                    if self._next is not None:
                        self.misses.add(f'{self.remote.url}/{manifest.file} was not uploaded before the next one: {self._error}')
                        break
                pause_sec = min(2 * pause_sec, LONGEST_PAUSE_SEC)
            with self._changed:
                self._current = None
                self._changed.notify_all()

    def _take(self) -> CheckpointManifest | None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._next is not None)
            self._current, self._next = self._next, None
            return None if self._stopped else self._current

    def _try_upload(self, manifest: CheckpointManifest) -> bool:
        try:
            self._upload(manifest)
            self.misses.reset()
            self.refused = ''
        except StorageRefusal as error:  # trying again does not help; the next checkpoint may find other credentials
            self.refused = f'{self.remote.url}/{manifest.file}: the storage refused it: {error}'
            self.misses.add(self.refused)
            return True
        except Superseded as error:
            self.superseded = error
            self.stop()
            return False
        except Exception as error:  # the thread has to live: it is what brings the next checkpoint to safety
            self._error = str(error)
            log(f'the upload of {manifest.file} failed and is tried again: {error}')
            return False
        try:
            self.confirm()
            self.uploaded(manifest)
        except Superseded as error:
            self.superseded = error
            self.stop()
        except Exception as error:  # it is safe all the same
            log(f'old checkpoints in {self.remote.url} could not be deleted: {error}')
        return True

    def _upload(self, manifest: CheckpointManifest) -> None:
        self.confirm()
        there = self.remote.files()
        if manifest.batch in batches_of(there):
            size = there[manifest.file].num_bytes if manifest.file in there else None
            if size == manifest.content.bytes and self.remote.read(manifest.name) == manifest.to_json().encode():
                return  # by a process that was killed later
            self.remote.delete(manifest.name)  # of a damaged one, or of one from before the run went back: it must not vouch for the new file
        failpoint('upload.begin')
        start = time.monotonic()
        self.remote.copy(self.staging / manifest.file, manifest.file)
        stat = self.remote.files().get(manifest.file)
        if stat is None or stat.num_bytes != manifest.content.bytes:
            found = 'is not there' if stat is None else f'has {stat.num_bytes:,} bytes'
            raise StorageError(f'{self.remote.url}/{manifest.file}: {found} after its upload, expected {manifest.content.bytes:,} bytes')
        failpoint('upload.file')
        self.confirm()
        write(self.remote, manifest.name, manifest.to_json().encode())
        failpoint('upload.manifest')
        write(self.remote, LATEST, manifest.to_json().encode())
        log(f'{self.remote.url}/{manifest.file}: uploaded in {time.monotonic() - start:.1f} s')


def log(line: str) -> None:
    print_message(f'checkpoints: {line}')
