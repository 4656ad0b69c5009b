"""One attempt at a job: fetch, train, hand over each whole checkpoint, export, hand over the result.

Everything that moves files runs in one thread. The main thread starts the child, looks at it twice a second, and calls the backend's `heartbeat`:
whatever transfers do, a lease is renewed, and a lost one kills the child.

    FOLDER/inputs/NAME   archives unpacked, files; the base model is a link to the warm one
    FOLDER/run           the run folder; children run in FOLDER, so that no path of a machine gets into checkpoints or results
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from diffusion.checkpoints.manifest import Content
from diffusion.common.text import one_line, print_message, redacted
from diffusion.contracts.errors import BAD_DATA, BAD_RECIPE, CRASH, FINISHED, INCOMPLETE, PREEMPTED, STALLED, InputError
from diffusion.recipe import load_recipe
from fleet.attempts.backend import (
    CHECKPOINT,
    INPUTS,
    MODEL,
    SAMPLE,
    Assignment,
    AttemptEnd,
    BackendUnavailable,
    HandedFile,
    JobBackend,
    JobInputError,
    LeaseLost,
    MachineError,
    Order,
    UploadRejected,
    safe_name,
)
from fleet.attempts.child import (
    LOG,
    ROOT,
    Child,
    OutgoingCheckpoint,
    StepFollower,
    content_of,
    copy_log,
    cut,
    environment_of_child,
    newest_step,
    refuse_strange_names,
    take,
)
from fleet.attempts.transfers import unpack
from fleet.attempts.workplace import StopRequest, WarmFolder, growing_pauses
from fleet.jobs.checking import BASE, RECIPES, override_of, recipe_overrides, recipe_path
from fleet.jobs.spec import NAME, RESULT_SUFFIXES, JobSpec

Result = TypeVar('Result')

RUN, EXPORT, IMAGES = 'run', 'export', 'images'  # folders below that of the attempt
TICK_SEC = 0.5
SAVING_SEC = 600.0  # that a child which was asked to stop may take
STANDSTILL_SEC = 4 * 3600.0  # without a step; train.py's own watchdog ends a run long before, unless it is dead itself
FETCH_TRIES = 5  # of a file that does not arrive
LEAST_FREE_BYTES = 16 << 20  # on a disk that is not full
FINAL_SEC = 900.0  # for the last uploads of a backend that has no lease that would end


@dataclass(frozen=True)
class Programs:
    """The commands of an attempt; what belongs to a job comes after these words.

    Attributes:
        train: before RECIPE key=value ...
        export: before RUN OUT.
        generate: before MODEL OUT options.
    """

    train: tuple[str, ...]
    export: tuple[str, ...] = (sys.executable, '-m', 'diffusion.export')
    generate: tuple[str, ...] = (sys.executable, '-m', 'diffusion.generate')

    @classmethod
    def here(cls, num_gpus: int) -> Programs:
        """This installation's, with a process a GPU. A single one needs no launcher, whose own imports take as long as those of training."""
        launcher = ('-m', 'composer.cli', '-n', str(num_gpus)) if num_gpus > 1 else ()
        return cls((sys.executable, *launcher, str(ROOT / 'train.py')))


@dataclass(frozen=True)
class Workplace:
    """Folders and programs that a machine lends an attempt.

    Attributes:
        folder: of this attempt, on the disk of `warm`.
        recipes: folder of recipes.
    """

    folder: Path
    warm: WarmFolder
    programs: Programs
    recipes: Path = RECIPES


@dataclass
class Attempt:
    """Args:
    assignment: what to do.
    backend: where from and where to.
    place: where.
    stop: a request to save, hand over and end.
    log: gets a line for each event.
    """

    assignment: Assignment
    backend: JobBackend
    place: Workplace
    stop: StopRequest
    log: Callable[[str], None]
    order: Order = Order.CONTINUE
    published: int = 0  # step of the newest checkpoint that the backend holds
    _child: Child | None = None
    _given_up: bool = False
    _latest: int = 0  # newest step that there is
    _nothing: threading.Event = field(default_factory=threading.Event)  # never set: sleeping is waiting for it
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix='transfer'))

    def __post_init__(self) -> None:
        self.published = self.assignment.checkpoint.step if self.assignment.checkpoint else 0
        self.follower = StepFollower(self.place.folder / RUN / LOG, self.published)

    def run(self) -> AttemptEnd:
        """Do all of it; the end is reported, too.

        Raises:
            LeaseLost: nothing runs any more, and nothing was reported.
        """
        with ExitStack() as stack:
            stack.callback(self._abandon)
            outcome = self._outcome(stack)
            self._report(outcome)
        return outcome

    def _outcome(self, stack: ExitStack) -> AttemptEnd:
        try:
            if BASE in self.assignment.inputs:
                stack.enter_context(self.place.warm.holding(self.assignment.inputs[BASE].sha256))
            self._meanwhile(self._prepare)
            return self._sample() if self.assignment.kind == SAMPLE else self._train_and_export()
        except _Stopped:
            return self._ended(PREEMPTED, 'stopped on request')
        except JobInputError as error:
            return self._ended(BAD_DATA, str(error))
        except InputError as error:
            return self._ended(BAD_RECIPE, str(error))
        except (MachineError, BackendUnavailable) as error:
            return self._ended(None, one_line(error), ending='node_fault')
        except UploadRejected as error:
            return self._ended(None, f'what was handed over was refused: {one_line(error)}', ending='node_fault')
        except OSError as error:
            full = 'the disk is full; ' if error.errno in (errno.ENOSPC, errno.EDQUOT) else ''
            return self._ended(None, f'{full}{one_line(error)}', ending='node_fault')

    def _ended(self, code: int | None, message: str = '', ending: str | None = None, results: dict[str, Content] | None = None) -> AttemptEnd:
        if self.order == Order.RELEASE and code == PREEMPTED:
            ending = 'released'
        step = max(self.follower.step, self.published)
        return AttemptEnd(code, step, ending, cut(redacted(message)), results or {}, list(self.follower.points))

    def _failed(self, child: Child, code: int, title: str = '') -> AttemptEnd:
        """The end after a child that has ended with `code`; a full disk is this machine's, whatever the child makes of it.

        Args:
            title: line before its message.
        """
        if code not in (FINISHED, BAD_RECIPE, BAD_DATA, PREEMPTED):
            disk = os.statvfs(self.place.folder)
            if child.says_disk_full or disk.f_bavail * disk.f_frsize < LEAST_FREE_BYTES:
                return self._ended(None, f'the disk of this machine is full\n{title}{child.message}', ending='node_fault')
        return self._ended(code, f'{title}{child.message}')

    # --- what the main thread does all the time

    def _tick(self) -> None:
        """Raises LeaseLost: everything of the attempt is dead."""
        try:
            order = self.backend.heartbeat(self.follower.step, self.follower.steps_per_sec, self.follower.points)
        except LeaseLost:
            self._given_up = True
            if self._child is not None:
                self._child.kill()
            raise
        if order != Order.CONTINUE and self.order == Order.CONTINUE:
            self.log(f'{self.assignment.title}: asked to {"give it back" if order == Order.RELEASE else "stop"}')
            self.order = order

    @property
    def _stopping(self) -> bool:
        return self.stop.asked or self.order != Order.CONTINUE

    def _meanwhile(self, work: Callable[[], Result], stoppable: bool = True) -> Result:
        """Let the transfer thread work, and keep the lease.

        Raises:
            _Stopped: a request to stop has come, and the work was given up.
        """
        future = self._pool.submit(work)
        while not future.done():
            wait([future], timeout=TICK_SEC)
            if not future.done():  # which may have been the end itself, after which there is no lease
                self._tick()
            if stoppable and self._stopping and not future.done():
                self._given_up = True
                with suppress(Exception):
                    future.result()
                self._given_up = False
                raise _Stopped
        return future.result()

    def _abandon(self) -> None:
        self._given_up = True
        if self._child is not None:
            self._child.end()
        self._pool.shutdown(wait=True, cancel_futures=True)

    # --- before

    def _prepare(self) -> None:
        """Fetch inputs and checkpoint (in the transfer thread)."""
        job, folder = self.assignment, self.place.folder
        (folder / 'inputs').mkdir()
        (folder / 'scratch').mkdir()
        (folder / RUN / 'checkpoints').mkdir(parents=True)
        for name, content in job.inputs.items():
            target, lent = folder / 'inputs' / safe_name(name), self.backend.lent_folder(name)
            if lent is not None:
                target.symlink_to(lent.resolve())
            elif name == BASE:
                target.symlink_to(self.place.warm.base(content.sha256, content.bytes, folder / 'scratch', self._fetcher(INPUTS, name)).resolve())
            else:
                archive = folder / 'scratch' / f'{name}.archive'
                self._fetch(INPUTS, name, archive)
                unpack(archive, target, folder / 'scratch', name)
                archive.unlink(missing_ok=True)
        (folder / 'drawn').symlink_to(self.place.warm.drawn.resolve())
        if job.checkpoint is not None:
            refuse_strange_names(job.checkpoint)
            for name in sorted(job.checkpoint.files, reverse=True):  # the manifest after the file
                self._fetch(CHECKPOINT, name, folder / RUN / ('' if name == LOG else 'checkpoints') / name)
            self.follower.skip()
            self.log(f'{job.title}: resuming at step {job.checkpoint.step:,}')
        for name in job.model:
            target = folder / 'model' / safe_name(name)
            target.parent.mkdir(parents=True, exist_ok=True)
            self._fetch(MODEL, name, target)
        shutil.rmtree(folder / 'scratch', ignore_errors=True)

    def _fetcher(self, place: str, name: str) -> Callable[[Path], None]:
        return lambda path: self._fetch(place, name, path)

    def _fetch(self, place: str, name: str, path: Path) -> None:
        """Raises MachineError: it does not arrive."""
        for tries, pause_sec in enumerate(growing_pauses(), start=1):
            try:
                self.backend.fetch(place, name, path, lambda: self._given_up)
                return
            except BackendUnavailable as error:
                if self._given_up:
                    raise
                if tries == FETCH_TRIES:
                    raise MachineError(f'{place}/{name} did not arrive in {FETCH_TRIES} attempts: {one_line(error)}') from error
                self.log(f'{self.assignment.title}: {place}/{name}: {one_line(error)}; trying again')
            self._pause(pause_sec)

    def _pause(self, seconds: float) -> None:
        """Wait, in the transfer thread; not for long if the transfer is given up."""
        deadline = time.monotonic() + seconds
        while not self._given_up and time.monotonic() < deadline:
            self._nothing.wait(min(TICK_SEC, seconds))

    # --- training

    def train_words(self) -> list[str]:
        """The arguments of train.py.

        Raises:
            InputError: the recipe is not here, or refuses them.
        """
        job = self.assignment
        path = recipe_path(job.recipe, self.place.recipes).resolve()
        given = recipe_overrides(JobSpec(recipe=job.recipe, overrides=job.overrides), {name: f'inputs/{name}' for name in job.inputs})
        if NAME.fullmatch(job.name):
            given.append(override_of('name', job.name))  # the title of the model card
        given += [override_of('run_folder', RUN), override_of('checkpoint.folder', f'{RUN}/checkpoints')]
        streams = load_recipe(path, given, rules=()).data.streams
        drawn = [name for name, stream in streams.items() if stream is not None and stream.drawn is not None]
        return [str(path), *given, *(override_of(f'data.streams.{name}.drawn.cache', 'drawn') for name in drawn)]

    def _train_and_export(self) -> AttemptEnd:
        with self._running([*self.place.programs.train, *self.train_words()]) as child:
            code = self._watch_training(child)
        self.follower.look()
        self._publish_last()
        if code != FINISHED:
            return self._failed(child, code)
        with self._running([*self.place.programs.export, RUN, EXPORT]) as child:
            code = self._watch(child)
        if code != FINISHED:
            return self._failed(child, STALLED if code == INCOMPLETE else CRASH, f'the export ended with exit code {code}\n')
        if self.assignment.draws and self.assignment.validation.prompts and (failed := self._draw(EXPORT, f'{EXPORT}/{IMAGES}')):
            return failed
        copy_log(self.place.folder / RUN, self.place.folder / EXPORT)
        return self._ended(FINISHED, results=self._hand_over_results(self.place.folder / EXPORT))

    @contextmanager
    def _running(self, words: Sequence[str]) -> Iterator[Child]:
        if self._stopping:
            raise _Stopped
        environment = environment_of_child(self.place.warm.home)
        self._child = Child(words, self.place.folder, environment)
        try:
            yield self._child
        finally:
            self._child.end()
            self._child = None

    def _watch(self, child: Child) -> int:
        """Wait for a child that has nothing to save.

        Raises:
            _Stopped: a request to stop has come, and it was killed.
        """
        while (code := child.wait(TICK_SEC)) is None:
            self._tick()
            if self._stopping:
                raise _Stopped
        return code

    def _watch_training(self, child: Child) -> int:
        publishing: Future[None] | None = None
        stopping_since: float | None = None
        while (code := child.wait(TICK_SEC)) is None:
            self.follower.look()
            self._tick()
            if publishing is None or publishing.done():
                publishing = self._publish_newest()
            now = time.monotonic()
            if self._stopping:
                stopping_since = stopping_since or now
                child.ask_to_stop()
                if now - stopping_since > SAVING_SEC:
                    self.log(f'{self.assignment.title}: has not saved within {SAVING_SEC:g} s and is killed')
                    child.kill()
            if now - self.follower.moved_at > STANDSTILL_SEC:
                self.log(f'{self.assignment.title}: no step for {STANDSTILL_SEC / 3600:g} hours, is killed')
                child.kill()
                return STALLED
        return code

    def _publish_newest(self) -> Future[None] | None:
        """Begin to hand over the newest checkpoint if the backend does not hold it."""
        checkpoints = self.place.folder / RUN / 'checkpoints'
        step = newest_step(checkpoints)
        if step is None or step == self.published or step == self._latest:
            return None
        found = take(checkpoints, step, self.place.folder / 'outgoing')
        if found is None:
            return None
        self._latest = step
        return self._pool.submit(self._publish, found)

    def _publish(self, found: OutgoingCheckpoint, for_sec: float = float('inf')) -> None:
        """Hand over a checkpoint (in the transfer thread); given up when there is a newer one. What is refused is not tried again."""
        checkpoints = self.place.folder / RUN / 'checkpoints'
        deadline = time.monotonic() + for_sec
        try:
            for pause_sec in growing_pauses():
                try:
                    self.backend.publish(found.step, found.files, lambda: self._given_up)
                    self.published = found.step
                    self.log(f'{self.assignment.title}: published step {found.step:,}')
                    return
                except LeaseLost:
                    return  # `heartbeat` says so to the thread that can act on it
                except UploadRejected as error:
                    self.log(f'{self.assignment.title}: the checkpoint of step {found.step:,} was refused: {one_line(error)}')
                    return
                except BackendUnavailable as error:
                    if self._given_up or time.monotonic() > deadline or (newest_step(checkpoints) or 0) > found.step:
                        self.log(f'{self.assignment.title}: step {found.step:,} was not published: {one_line(error)}')
                        return
                self._pause(pause_sec)
        finally:
            found.discard()

    def _publish_last(self) -> None:
        """Wait for the transfer that runs, then hand over the newest checkpoint."""
        self._meanwhile(lambda: None, stoppable=False)
        checkpoints = self.place.folder / RUN / 'checkpoints'
        step = newest_step(checkpoints)
        if step is not None and step != self.published and (found := take(checkpoints, step, self.place.folder / 'outgoing')):
            self._meanwhile(lambda: self._publish(found, FINAL_SEC), stoppable=False)

    # --- afterwards

    def _sample(self) -> AttemptEnd:
        """Draw with the parent's result."""
        return self._draw('model', IMAGES) or self._ended(FINISHED, results=self._hand_over_results(self.place.folder / IMAGES))

    def _draw(self, model: str, images: str) -> AttemptEnd | None:
        """Draw the prompts of `validation`; None if that succeeded.

        Args:
            model: folder of an export, below that of the attempt.
            images: for the images, likewise.
        """
        asked = self.assignment.validation
        base = ['--base', f'inputs/{BASE}'] if BASE in self.assignment.inputs else []
        guidance = [] if asked.guidance is None else ['--guidance', str(asked.guidance)]
        steps = [] if asked.steps is None else ['--steps', str(asked.steps)]
        prompts = [f'--prompt={prompt}' for prompt in asked.prompts]  # with `=`: one may begin with a dash
        words = [*self.place.programs.generate, model, images, '--seed', str(asked.seed), *base, *guidance, *steps, *prompts]
        with self._running(words) as child:
            code = self._watch(child)
        if code == FINISHED:
            return None
        title = f'drawing validation.prompts ended with exit code {code}; without them the job ends without images\n'
        return self._failed(child, STALLED if code == INCOMPLETE else CRASH, title)

    def _hand_over_results(self, folder: Path) -> dict[str, Content]:
        """Hand over all files of a folder.

        Raises:
            MachineError: one of them is of a kind that is no result.
            UploadRejected, BackendUnavailable: they were not taken.
        """
        paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob('*')) if path.is_file() or path.is_symlink()}
        for name, path in paths.items():
            if path.is_symlink() or path.suffix not in RESULT_SUFFIXES:
                raise MachineError(f'{safe_name(name)} is no result: only {", ".join(RESULT_SUFFIXES)} are')
        files = {safe_name(name): HandedFile(path, content_of(path)) for name, path in paths.items()}
        self._meanwhile(lambda: self._trying(lambda: self.backend.put_results(files, lambda: self._given_up)))
        return {name: file.content for name, file in files.items()}

    def _report(self, outcome: AttemptEnd) -> None:
        """Report the end; a backend that does not answer for long learns it otherwise."""
        try:
            try:
                self._say_end(outcome)
            except UploadRejected as error:  # a result is missing there, or differs
                message = f'the end was refused: {one_line(error)}'
                self.log(f'{self.assignment.title}: {message}')
                self._say_end(AttemptEnd(None, outcome.step, 'node_fault', cut(message)))
        except (BackendUnavailable, UploadRejected) as error:
            self.log(f'{self.assignment.title}: the end was not reported: {one_line(error)}')

    def _say_end(self, outcome: AttemptEnd) -> None:
        self._meanwhile(lambda: self._trying(lambda: self.backend.end(outcome, lambda: self._given_up)), stoppable=False)

    def _trying(self, work: Callable[[], None]) -> None:
        """Do it again and again (in the transfer thread) until it succeeds, is refused, or FINAL_SEC have passed."""
        deadline = time.monotonic() + FINAL_SEC
        for pause_sec in growing_pauses():
            try:
                work()
                return
            except BackendUnavailable as error:
                if self._given_up or time.monotonic() > deadline:
                    raise
                self.log(f'{self.assignment.title}: {one_line(error)}; trying again')
            self._pause(pause_sec)


class _Stopped(Exception):
    """A request to stop has come while there was nothing to save."""


def write_log(line: str) -> None:
    """Print an event for people, without credentials."""
    print_message(f'fleet: {redacted(line)}')
