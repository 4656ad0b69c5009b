"""Save checkpoints, in place of Composer's CheckpointSaver, which writes in place, hashes nothing and dies with a full disk.

A file is hashed while it is written, and flushed to the disk before it takes its name.
"""

import datetime
import errno
import hashlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist, reproducibility

from diffusion.checkpoints.manifest import LATEST, CheckpointManifest, Content, batches_of, file_of, manifest_of, prune, read_manifest
from diffusion.checkpoints.owner import Owner
from diffusion.checkpoints.uploading import Misses, Uploader, log
from diffusion.common.collective import on_first_rank
from diffusion.common.environment import PACKAGES, commit
from diffusion.common.files import replacing, write_text
from diffusion.common.processes import failpoint
from diffusion.common.stopwatch import phase, saved
from diffusion.common.storage import LocalFolder, RemoteFolder, StorageError, StorageRefusal
from diffusion.common.text import counted
from diffusion.contracts.errors import StorageOutage, Superseded
from diffusion.faults import preemption
from diffusion.recipe import Duration

HALF_BYTES = 1 << 16  # position of the failpoint in the middle of a file

SPARE = 1.2  # free space before a save, in sizes of the checkpoint before
STAGED = 2  # uploaded checkpoints that stay on the local disk: a restart there downloads nothing


class CheckpointSaver(Callback):
    """Save the whole state at intervals and at the end, so that a kill at any moment costs only what came since the last checkpoint.

    A checkpoint that cannot be written or uploaded does not stop training until `allowed_misses` in a row are exceeded.

    Args:
        folder: local path or URL.
        staging: where checkpoints wait for their upload, if `folder` is a URL.
        recipe: the resolved recipe as YAML.
        every: interval in batches or in seconds of training, such as `400ba` or `1800sec`.
        keep: newest checkpoints kept; -1 keeps all.
        keep_every: also keep the first checkpoint of every interval, such as `50000ba`.
        allowed_misses: in a row.
        data: identity of the dataset of each stream.
        encoders: digests of the frozen models' weights.
        before_save: called on all ranks before each save, to look at the state and raise on all of them if it must not be saved.
        owner: of `folder`; without one nobody looks whether another process has taken it.
    """

    def __init__(
        self,
        folder: str,
        staging: Path,
        recipe: str,
        every: Duration,
        keep: int = -1,
        keep_every: Duration | None = None,
        allowed_misses: int = 0,
        data: Mapping[str, str] | None = None,
        encoders: Mapping[str, str] | None = None,
        before_save: Sequence[Callable[[State], None]] = (),
        owner: Owner | None = None,
    ):
        self.recipe, self.interval, self.keep = recipe, every, keep
        self.keep_every = None if keep_every is None else keep_every.batches
        self.allowed_misses, self.before_save = allowed_misses, before_save
        self.data, self.encoders = dict(data or {}), dict(encoders or {})
        self.commit = commit()
        self.remote = RemoteFolder(folder.rstrip('/')) if '://' in folder else None
        self.local = LocalFolder(str(staging) if self.remote is not None else folder)
        self.confirm = owner.confirm if owner is not None else lambda: None
        self.confirm_local = self.confirm if self.remote is None else lambda: None  # the staging folder is in the run folder, which is locked
        self.misses = Misses()
        self.uploader: Uploader | None = None
        self._confirmed = -1  # newest batch in storage
        self._saved = -1

    def after_load(self, state: State, logger: Logger) -> None:
        """Take care of what earlier processes left: superfluous files, and a checkpoint that was not uploaded."""
        self._saved = state.timestamp.batch.value
        saved(self._saved)
        if dist.get_global_rank() != 0:
            return
        folder = Path(self.local.url)
        resumed = read_manifest(folder / file_of(self._saved))
        folder.mkdir(parents=True, exist_ok=True)
        if self.remote is not None:
            self.uploader = Uploader(folder, self.remote, self.misses, self._uploaded, self.confirm)
            if resumed is not None:
                self.uploader.submit(resumed)
        self._prune_local(self._saved)

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        self._refuse_if_superseded()
        at_end = state.max_duration is not None and state.timestamp >= state.max_duration
        last = at_end or preemption.agreed()
        if (last or self._due(state)) and state.timestamp.batch.value != self._saved:
            with phase('save'):
                self.save(state, logger, last)

    def fit_end(self, state: State, logger: Logger) -> None:
        self.finish()

    def finish(self) -> None:
        """Wait for the last upload, also that of an earlier process. All ranks must call it.

        Raises:
            StorageOutage: it could not be done in time, on all ranks.
            StorageRefusal: the storage does not let us, on all ranks.
            Superseded: another process has taken the folder, on all ranks.
        """
        on_first_rank(self._finish_upload_or_raise)
        if dist.get_global_rank() == 0:
            self._prune_local(self._saved)

    def close(self, state: State, logger: Logger) -> None:
        """On error: still wait for the last upload."""
        unfinished = self._finish_upload()
        if unfinished:
            log(unfinished)

    def _refuse_if_superseded(self) -> None:
        if self.uploader is not None and self.uploader.superseded is not None:
            raise self.uploader.superseded

    def _finish_upload_or_raise(self) -> None:
        unfinished = self._finish_upload()
        self._refuse_if_superseded()
        self.confirm_local()
        if unfinished:
            raise self._final(self._outage(unfinished))

    def _finish_upload(self) -> str:
        """Wait for the upload; return what could not be uploaded, and why."""
        if self.uploader is None:
            return ''
        with phase('upload'):
            return self.uploader.finish()

    def save(self, state: State, logger: Logger, last: bool = False) -> None:
        """Write a checkpoint now. All ranks must call it.

        Args:
            last: of the run or of this process, so that a failure is no miss but an error.

        Raises:
            StorageOutage: too many misses in a row, on all ranks.
            StorageRefusal: as many because the storage does not let us, on all ranks.
            Superseded: another process has taken the folder, on all ranks.
        """
        start = time.monotonic()
        for check in self.before_save:
            check(state)
        torch.cuda.empty_cache()  # as Composer's: gathering what is sharded needs room
        content = {'state': state.state_dict(), 'rng': reproducibility.get_rng_state()}
        self._saved = state.timestamp.batch.value
        num_bytes = on_first_rank(partial(self._write_or_miss, content, state, start, last))
        if num_bytes:
            saved(self._saved)
        logger.log_metrics({'checkpoint/save_sec': time.monotonic() - start, 'checkpoint/bytes': num_bytes, 'checkpoint/missed': self.misses.total})

    def _due(self, state: State) -> bool:
        before, now = (
            stamp.total_wct.total_seconds() if self.interval.unit == 'sec' else stamp.batch.value
            for stamp in (state.previous_timestamp or state.timestamp, state.timestamp)
        )  # the time is the same on all ranks, see diffusion.training.trainer
        return before // self.interval.value != now // self.interval.value

    def _write_or_miss(self, content: dict[str, Any], state: State, start: float, last: bool) -> int:
        """Write a checkpoint and return its bytes, 0 if it was missed; raise StorageOutage if that is one miss too many."""
        num_bytes, outage = 0, ''
        try:
            num_bytes = self._write(content, state, start).content.bytes
        except Superseded as error:
            raise self._final(error) from None
        except (OSError, StorageError) as error:
            self.misses.add(f'{self.local.url}/{file_of(self._saved)} was not written: {error}')
            outage = self.misses.cause if last else ''
        except Exception as error:  # ours, or torch's
            raise self._final(RuntimeError(f'{file_of(self._saved)} was not written: {type(error).__name__}: {error}')) from error
        if self.misses.in_a_row > self.allowed_misses:
            outage = (
                f'{counted(self.misses.in_a_row, "checkpoint")} in a row missed, allowed are {self.allowed_misses}; the last: {self.misses.cause}'
            )
        if outage:
            raise self._final(self._outage(outage))
        return num_bytes

    def _write(self, content: dict[str, Any], state: State, start: float) -> CheckpointManifest:
        batch, folder = state.timestamp.batch.value, Path(self.local.url)
        failpoint('save.begin')
        self.confirm_local()
        self._make_room()
        (folder / manifest_of(batch)).unlink(missing_ok=True)  # of one from before the run went back: it must not vouch for the new file
        written = write_tensors(folder / file_of(batch), content, self.confirm_local)
        failpoint('save.renamed')
        manifest = CheckpointManifest(
            files={file_of(batch): written},
            batch=batch,
            epoch=state.timestamp.epoch.value,
            samples=state.timestamp.sample.value,
            world_size=dist.get_world_size(),
            recipe_sha256=hashlib.sha256(self.recipe.encode()).hexdigest(),
            data=self.data,
            encoders=self.encoders,
            packages={package: version(package) for package in PACKAGES},
            commit=self.commit,
            save_sec=round(time.monotonic() - start, 3),
            time=datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
        )
        write_text(folder / manifest.name, manifest.to_json())
        failpoint('save.manifest')
        write_text(folder / LATEST, manifest.to_json())
        failpoint('save.latest')
        if self.uploader is None:
            self.misses.reset()
        else:
            self.uploader.submit(manifest)
        self._prune_local(batch)
        return manifest

    def _make_room(self) -> None:
        """Free space for another checkpoint; raise OSError if the disk cannot take it, because half of one would take space from others."""
        files = self.local.files()
        before = batches_of(files)
        sizes = [files[file_of(batch)].num_bytes for batch in before if file_of(batch) in files]
        needed = int(SPARE * sizes[-1]) if sizes else 0
        if _free_bytes(self.local) < needed:
            self._prune_local(before[-1], spare=1)
        free = _free_bytes(self.local)
        if free < needed:
            raise OSError(errno.ENOSPC, f'{free / 1e9:.1f} GB free, {needed / 1e9:.1f} GB needed', self.local.url)

    def _prune_local(self, newest: int, spare: int = 0) -> None:
        """Prune by the recipe's rule, or in a staging folder what is safe in storage; `spare` makes room for that many more."""
        try:
            if self.remote is None:
                prune(self.local, self.keep if self.keep == -1 else max(1, self.keep - spare), self.keep_every, newest)
            else:
                prune(self.local, STAGED - spare, None, self._confirmed)
        except (OSError, StorageError) as error:
            log(f'old checkpoints in {self.local.url} could not be deleted: {error}')

    def _uploaded(self, manifest: CheckpointManifest) -> None:
        """Prune the storage after an upload; called in the uploader's thread."""
        assert self.remote is not None
        self._confirmed = manifest.batch
        prune(self.remote, self.keep, self.keep_every, manifest.batch)

    def _outage(self, cause: str) -> Exception:
        if self.uploader is not None and self.uploader.refused:
            return StorageRefusal(f'{cause}. What was refused waits in {self.local.url}: the same command uploads it once it may')
        return StorageOutage(f'{cause}; repair the disk or the storage and run the same command again')

    def _final(self, error: Exception) -> Exception:
        """Stop the uploader and return `error`."""
        if self.uploader is not None:
            self.uploader.stop()
        return error


def _free_bytes(folder: LocalFolder) -> int:
    return shutil.disk_usage(folder.url).free


class HashedFile:
    """A file that hashes and counts what is written.

    Writing never raises: torch.save's own writer would report another error than the disk's, or end the process. `content` raises instead.
    """

    def __init__(self, file: BinaryIO):
        self.file = file
        self.sha = hashlib.sha256()
        self.num_bytes = 0
        self.error: Exception | None = None

    def write(self, data: bytes | memoryview) -> int:
        size = memoryview(data).nbytes
        if self.error is None:
            try:
                if self.num_bytes < HALF_BYTES <= self.num_bytes + size:
                    failpoint('save.half')
                self.file.write(data)
                self.sha.update(data)
            except Exception as error:  # raised by `content`
                self.error = error
        self.num_bytes += size
        return size

    def flush(self) -> None:
        """Nothing: the file is flushed when it is closed."""

    def content(self) -> Content:
        """Return the digest and size of what was written, or raise the first error of writing."""
        if self.error is not None:
            raise self.error
        return Content(self.sha.hexdigest(), self.num_bytes)


def write_tensors(path: Path, value: dict[str, Any], confirm: Callable[[], None] = lambda: None) -> Content:
    """torch.save, durably and hashed.

    Args:
        confirm: called when everything is written, just before the file takes the place of `path`; it may raise.

    Raises:
        OSError: the disk is full or broken; `path` is unchanged.
    """
    with replacing(path) as temporary:
        with temporary.open('wb') as file:
            hashed = HashedFile(file)
            torch.save(value, hashed)  # type: ignore[arg-type]  # it asks for no more than write and flush
            written = hashed.content()
        failpoint('save.written')
        confirm()
    return written
