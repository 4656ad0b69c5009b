"""Workers on other machines, and which parts they do: what dies is replaced, what it was at is tried again, but not for ever."""

import math
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from tqdm import tqdm

from data_prep.engines.actor import ActorPlace, Done, Failed, PartActor, StreamLost
from data_prep.engines.capacity import CrewSize, describe, needs
from data_prep.engines.engine import Item, PartWork, Result
from data_prep.engines.local import expect
from data_prep.engines.nodes import NodeCheck
from data_prep.engines.options import ClusterOptions
from diffusion.common.ray_cluster import ClusterError, refuse_lost_head
from diffusion.common.text import counted, printable
from diffusion.contracts.errors import IncompleteError

MAX_DEATHS = 4  # of workers that did the same part
MAX_LOSSES = 12  # of machines, which is not the part's fault unless it happens every time
MAX_FALSE_STARTS = 12  # in a row: workers that died before they could do anything; fewer may be lost to what kills workers at random
SAY_SEC = 60  # what is waited for
START_MIN = 10  # for the first worker to begin
POLL_SEC = 1.0
CAUSE_SEC = 15  # until Ray knows why a worker does not answer


@dataclass(eq=False)
class Todo(Generic[Item]):
    """A part that is not done."""

    item: Item
    deaths: int = 0
    losses: int = 0
    reason: str = ''

    @property
    def is_given_up(self) -> bool:
        return self.deaths >= MAX_DEATHS or self.losses >= MAX_LOSSES


@dataclass(eq=False)
class Worker(Generic[Item]):
    """An actor, where it is once it can do parts, and those that it does, by their calls, since when."""

    actor: Any
    starting: Any
    place: ActorPlace | None = None
    calls: dict[Any, tuple[Todo[Item], float]] = field(default_factory=dict)


class Crew(Generic[Item, Result]):
    """Does all parts of a job.

    A worker does one part at a time, so that it is known which part it dies of. Where other machines read for it, it does several, as many as it has
    decoders; those that it dies with are then done by workers that do nothing else.
    """

    def __init__(self, work: PartWork[Item, Result], size: CrewSize, check: NodeCheck, options: ClusterOptions, progress: tqdm):
        self.work, self.size, self.each, self.options, self.progress = work, size, size.each, options, progress
        self.per_worker = math.ceil(size.parts_at_a_time / size.num_workers)
        self._make = ray.remote(PartActor).options(
            num_cpus=self.each.cpus,
            num_gpus=self.each.gpus,
            resources={self.each.custom: 1} if self.each.custom else None,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=self.per_worker,
        )
        self._arguments = ray.put(work), self.each, check, size.decoders > 0
        self.workers: list[Worker[Item]] = []
        self.waiting: deque[Todo[Item]] = deque()
        self.set_aside: list[Todo[Item]] = []
        self.false_starts = 0
        self.moved = self.said = time.monotonic()

    def close(self) -> None:
        """Kill all workers; what they have not committed has not happened."""
        for worker in self.workers:
            with suppress(RayError):
                ray.kill(worker.actor)
        self.workers.clear()

    def do(self, items: Sequence[Item]) -> Iterator[Result]:
        """Results as they come. `ClusterEngine.map` says what is raised."""
        self.waiting.extend(map(Todo, items))
        num_done = 0
        while self.waiting or self._num_calls:
            refuse_lost_head()
            self._hire()
            self._hand_out()
            refs = [ref for worker in self.workers for ref in (worker.calls if worker.place else [worker.starting])]
            for ref in ray.wait(refs, timeout=POLL_SEC)[0]:
                todo, outcome = self._answer(ref)
                if todo is not None and isinstance(outcome, Done):
                    num_done += 1
                    self.progress.update(self.work.count(todo.item, outcome.result))
                    expect(self.progress, num_done / len(items))
                    yield outcome.result
            self._end_overdue()
            self._watch()
        self.progress.total = self.progress.n
        if self.set_aside:
            raise IncompleteError(self._given_up())

    @property
    def _num_calls(self) -> int:
        return sum(len(worker.calls) for worker in self.workers)

    def _hire(self) -> None:
        wanted = min(self.size.num_workers, math.ceil((len(self.waiting) + self._num_calls) / self.per_worker))
        while len(self.workers) < wanted:
            actor: Any = self._make.remote(*self._arguments)
            self.workers.append(Worker(actor, actor.begin.remote()))

    def _hand_out(self) -> None:
        """The next parts to workers with room: first to those that do the least."""
        for worker in sorted(self.workers, key=lambda worker: len(worker.calls)):
            while worker.place and self.waiting and self._has_room(worker, self.waiting[0]) and self._num_calls < self.size.parts_at_a_time:
                todo = self.waiting.popleft()
                worker.calls[worker.actor.do.remote(todo.item)] = todo, time.monotonic()
                self.moved = time.monotonic()

    def _has_room(self, worker: Worker[Item], todo: Todo[Item]) -> bool:
        """A part that met a death is done alone."""
        suspects = todo.deaths > 0 or any(other.deaths > 0 for other, _ in worker.calls.values())
        return len(worker.calls) < (1 if suspects else self.per_worker)

    def _answer(self, ref: Any) -> tuple[Todo[Item] | None, Any]:
        """Take what a worker answers: the part that the call was for, if any, and what became of it."""
        worker = next(worker for worker in self.workers if ref == worker.starting or ref in worker.calls)
        try:
            outcome = ray.get(ref)
        except RayActorError as error:
            self._lose(worker, error)
            return None, None
        self.moved = time.monotonic()
        if isinstance(outcome, Failed):
            outcome.error.add_note(outcome.trace)
            raise outcome.error
        if isinstance(outcome, ActorPlace):
            worker.place, self.false_starts = outcome, 0
            return None, outcome
        todo, _ = worker.calls.pop(ref)
        if isinstance(outcome, StreamLost):
            self._again(todo, outcome.machine_gone, f'while it was read: {outcome.reason}')
        return todo, outcome

    def _lose(self, worker: Worker[Item], error: RayActorError) -> None:
        """Let a worker go that does not answer, and have its parts tried again."""
        machine_gone, reason = self._cause(worker, error)
        where = f' on {worker.place.address}' if worker.place else ''
        self._say(f'a worker{where} is gone: {reason}')
        self._dismiss(worker)
        for todo, _ in worker.calls.values():
            self._again(todo, machine_gone, reason)
        if not worker.place and not machine_gone:
            self.false_starts += 1
            if self.false_starts >= MAX_FALSE_STARTS:
                raise ClusterError(
                    f'{self.false_starts} workers with {describe(self.each)} died before they could begin; the last one: {reason}; see the logs of '
                    'the Ray cluster, and run the same command again'
                )

    def _dismiss(self, worker: Worker[Item]) -> None:
        self.workers.remove(worker)
        with suppress(RayError):
            ray.kill(worker.actor)

    def _cause(self, worker: Worker[Item], error: RayActorError) -> tuple[bool, str]:
        """Whether a worker's machine is gone, and not only the worker; and Ray's words for it."""
        if isinstance(error, ActorUnavailableError):  # Ray does not know yet
            try:
                ray.get(worker.actor.__ray_ready__.remote(), timeout=CAUSE_SEC)
            except ActorDiedError as known:
                error = known
            except (ActorUnavailableError, GetTimeoutError):
                pass
        alive = {node['NodeID'] for node in ray.nodes() if node['Alive']}
        machine_gone = isinstance(error, ActorUnavailableError) or error.preempted or (worker.place is not None and worker.place.node_id not in alive)
        return machine_gone, _words(error)

    def _again(self, todo: Todo[Item], machine_gone: bool, reason: str) -> None:
        """Count a death, and have the part tried again after all others, or set aside."""
        todo.deaths, todo.losses, todo.reason = todo.deaths + (not machine_gone), todo.losses + machine_gone, reason
        if not todo.is_given_up:
            self.waiting.append(todo)
            return
        self.set_aside.append(todo)
        self._say(f'part {self.work.name(todo.item)} is set aside; the others are done first')

    def _end_overdue(self) -> None:
        limit_sec = self.options.part_min * 60
        for worker in list(self.workers):
            overdue = [todo for todo, since in worker.calls.values() if time.monotonic() - since > limit_sec]
            if not overdue:
                continue
            self._dismiss(worker)
            reason = f'it took more than {self.options.part_min:g} minutes (--ray-part-min)'
            for todo, _ in worker.calls.values():
                if todo in overdue:
                    self._say(f'part {self.work.name(todo.item)}: {reason}; its worker was killed')
                    self._again(todo, False, reason)
                else:
                    self.waiting.append(todo)

    def _watch(self) -> None:
        """Say what is waited for when nothing happens; with no worker that could do anything, not for ever."""
        now = time.monotonic()
        if now - max(self.moved, self.said) < SAY_SEC:
            return
        free = ray.available_resources()
        waited_min = (now - self.moved) / 60
        amounts = ', '.join(f'{name} {free.get(name, 0):g} free of {total:g}' for name, total in self._totals().items())
        if self._num_calls:
            oldest, since = min((call for worker in self.workers for call in worker.calls.values()), key=lambda call: call[1])
            self._say(
                f'no part has ended for {waited_min:.0f} min; {counted(self._num_calls, "part")} being done, {self.work.name(oldest.item)} for '
                f'{(now - since) / 60:.0f} min (--ray-part-min {self.options.part_min:g}); {amounts}'
            )
            return
        waits = f'waiting for {counted(len(self.workers), "worker")} with {describe(self.each)} each; the cluster has {amounts}'
        if waited_min >= max(START_MIN, self.options.wait_min):
            raise ClusterError(f'{waits}; none has begun in {waited_min:.0f} min: see `ray status`, and run the same command again')
        self._say(f'{waits}; for {waited_min:.0f} min now')

    def _totals(self) -> dict[str, float]:
        totals = ray.cluster_resources()
        return {name: totals.get(name, 0) for name in needs(self.each)}

    def _say(self, text: str) -> None:
        self.said = time.monotonic()
        self.progress.write(printable(f'{self.work.label}: {text}'), file=sys.stderr)

    def _given_up(self) -> str:
        first = self.set_aside[0]
        many = f' (and {counted(len(self.set_aside) - 1, "other part")})' if len(self.set_aside) > 1 else ''
        return (
            f'{self.work.writes.url}: part {self.work.name(first.item)}, read from {self.work.reads.url}/{self.work.file(first.item)},{many} was set '
            f'aside after {counted(first.deaths + first.losses, "attempt")} that ended with its worker; the last one: {first.reason}. All other '
            'parts are done. Look at that file, give workers more memory (fewer of them on a machine: --ray-cpus), or leave the file out of SOURCE, '
            'and run the same command again'
        )


def _words(error: RayActorError) -> str:
    """Ray's words for a death, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:400]
