"""The Ray engine on the driver's side: machines are checked before any work, then actors make the parts.

Ray starts an actor that died again, wherever there is room. The attempts at each part are counted here: Ray's own retries of a call would not say
which part of several it died of, nor give the part to another actor while this one waits for a machine.
"""

import math
import os
import secrets
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic

from tqdm import tqdm

from data_prep.engines.engine import Engine, Item, PartWork, Result, StreamedWork, expect, progress_bar
from diffusion.common.environment import code_identity
from diffusion.common.ray_cluster import ClusterError, ClusterRefusal, connect, disconnect, refuse_lost_head, room_for
from diffusion.common.storage import LocalFolder, scratch_for
from diffusion.common.text import counted, printable
from diffusion.contracts.errors import IncompleteError

WHAT = '--engine ray'
MAX_ATTEMPTS = 4  # at a part, each of which ended with its worker
MAX_FALSE_STARTS = 12  # of a worker, in a row: it died before it could do anything; fewer may be due to what kills workers at random
SAY_SEC = 60  # between two lines about what is waited for
START_MIN = 10  # for the first worker to begin
POLL_SEC = 1.0
RESTART_SEC = 120  # in which one slow start may use up all tries: Ray tries a call to an actor that is not there yet again at once
PATIENCE_SEC = 120  # for all machines to answer a check, which start a process for it


@dataclass
class ClusterEngine(Engine):
    """Actors of a Ray cluster: the one at an address, or one of this host alone, which ends with this process."""

    address: str | None = None  # of the cluster, as `ray_cluster.connect` takes it
    actors: int | None = None  # number of workers; None: as many as fit
    cpus: int = 1  # of each worker, and threads
    gpus: float | None = None  # of each worker, a fraction where several share one; None: one if the work is faster on a GPU and the cluster has any
    resource: str | None = None  # that the cluster's owner has given to some machines, such as `A10G`; each worker takes 1 of it
    decoders: int = 0  # tasks on any machine that read, decode and resize for the workers; 0: each worker does so itself
    part_min: float = 30  # minutes after which a part's worker is killed
    wait_min: float = 0  # minutes to wait for machines that are not there yet
    _connected_here: bool = field(default=False, init=False)

    def map(self, work: PartWork[Item, Result], items: Sequence[Item]) -> Iterator[Result]:
        """Yield the results as they come, as `Engine.map`.

        Raises:
            ClusterRefusal: the cluster does not have what a worker needs, or a machine of it has other code or other folders.
            ClusterError: there is no cluster, or no worker began in time.
            IncompleteError: a part met the death of its worker again and again, and was set aside; all others are made.
        """
        if not items:
            return
        loaded: Any = sys.modules.get('ray')
        self._connected_here |= loaded is None or not loaded.is_initialized()
        ray = connect(self.address, WHAT)
        nodes = [node for node in ray.nodes() if node['Alive']]
        decoders = self.decoders if isinstance(work, StreamedWork) else 0
        needs, num_workers = self._size(work.uses_gpu, [node['Resources'] for node in nodes], decoders)
        from data_prep.engines.worker import PartActor  # imports Ray

        with ExitStack() as stack:
            check = stack.enter_context(check_for(work, items[0]))
            # A machine without CPUs, such as a head that only manages, makes no part.
            fit = [node for node in nodes if room_for([node['Resources']], needs) or (decoders and node['Resources'].get('CPU', 0) >= 1)]
            check_nodes(ray, fit, check)
            gpus, per_worker = needs.get('GPU', 0), max(1, math.ceil(decoders / num_workers))
            custom = {self.resource: 1} if self.resource else None
            actor = ray.remote(PartActor).options(num_cpus=self.cpus, num_gpus=gpus, resources=custom, max_restarts=-1, max_concurrency=per_worker)
            arguments = ray.put(work), self.cpus, gpus, check, decoders > 0
            progress = stack.enter_context(progress_bar(unit=work.unit, desc=work.label))
            pool = stack.enter_context(closing(WorkerPool(ray, work, needs, decoders or num_workers, per_worker, self.part_min, progress)))
            for _ in range(min(num_workers, math.ceil(len(items) / per_worker))):
                pool.add(actor.remote(*arguments))
            yield from pool.run(items, max(START_MIN, self.wait_min))

    def close(self) -> None:
        if self._connected_here:
            disconnect()

    def _size(self, uses_gpu: bool, machines: Sequence[Mapping[str, float]], decoders: int) -> tuple[dict[str, float], int]:
        """Return what a worker needs, by Ray's names, and how many workers there will be, each on one machine, with a CPU left for each decoder.

        Raises:
            ClusterRefusal: the cluster cannot have as many as were asked for, or not a single one.
        """
        total = {name: sum(machine.get(name, 0) for machine in machines) for name in ('CPU', 'GPU', self.resource) if name}
        gpus = self.gpus if self.gpus is not None else 1 if uses_gpu and total['GPU'] else 0
        needs = {'CPU': self.cpus, **({'GPU': gpus} if gpus else {}), **({self.resource: 1} if self.resource else {})}
        wanted, room = self.actors or 1, room_for(machines, needs)
        fit = min(room, (sum(math.floor(machine.get('CPU', 0)) for machine in machines) - decoders) // self.cpus)
        if fit < wanted and not self.wait_min:
            more = f', and {counted(decoders, "decoder")} with 1 CPU each' if decoders else ''
            have = ', '.join(f'{name} {total[name]:g}' for name in needs)
            if room >= wanted:
                why = f'{counted(wanted, "worker")} would leave {total["CPU"] - wanted * self.cpus:g} CPUs for {counted(decoders, "decoder")}'
            else:
                short = [name for name, amount in needs.items() if room_for(machines, {name: amount}) < wanted]
                lacking = f'too little {" and ".join(short)}' if short else 'not enough of all of it on the same machines'
                why = f'room for {counted(room, "worker")}: {lacking}'
            raise ClusterRefusal(
                f'{WHAT}: {counted(wanted, "worker")} with {describe(needs)} each{more} would not fit: the cluster has '
                f'{counted(len(machines), "machine")} with {have} in all; {why}; ask for less (--ray-actors, --ray-cpus, --ray-gpus, '
                '--ray-resource, --ray-decoders), or let --ray-wait-min say how long to wait for machines to come'
            )
        num_workers = self.actors or fit
        return needs, min(num_workers, decoders) if decoders else num_workers  # a worker without a decoder would have nothing to do


def describe(needs: Mapping[str, float]) -> str:
    """`CPU 1, GPU 0.5`."""
    return ', '.join(f'{name} {amount:g}' for name, amount in needs.items())


@contextmanager
def check_for(work: PartWork[Any, Any], item: Any) -> Iterator[Any]:
    """The check of machines that do this work, to be called there; a token for it is in DEST until the end of the block."""
    from data_prep.engines.worker import check_machine

    source = f'{work.reads.url}/{item.path}' if isinstance(work.reads, LocalFolder) else None
    with ExitStack() as stack:
        token = None
        if isinstance(work.writes, LocalFolder):
            path, content = stack.enter_context(scratch_for(work.writes)) / 'token', secrets.token_hex(8)
            path.write_text(content)
            token = str(path), content
        yield partial(check_machine, code_identity(), os.getcwd(), source, token)


def check_nodes(ray: Any, nodes: Sequence[Mapping[str, Any]], check: Any) -> None:
    """Ask every one of these machines. Raises ClusterRefusal: on one of them something is not the same; the message has its address."""
    task, on = ray.remote(num_cpus=0, max_retries=1)(check.func), ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    asked = {task.options(scheduling_strategy=on(node['NodeID'], soft=False)).remote(*check.args): node['NodeManagerAddress'] for node in nodes}
    answered, silent = ray.wait(list(asked), num_returns=len(asked), timeout=PATIENCE_SEC)
    for ref in answered:
        where = f'machine {asked[ref]} of the Ray cluster'
        try:
            problem = ray.get(ref)
        except ray.exceptions.RayError as error:
            cause = str(error).strip().splitlines()[-1]
            raise ClusterRefusal(f'{where} cannot run this code: {cause}; install this project there, the same version as here') from error
        if problem is not None:
            raise ClusterRefusal(f'{where}: {problem}')
    if silent:
        where = ', '.join(asked[ref] for ref in silent)
        raise ClusterRefusal(f'machines {where} of the Ray cluster did not answer within {PATIENCE_SEC} s; see `ray status`')


@dataclass(eq=False)
class PendingPart(Generic[Item]):
    """A part that is not made, and the attempts at it that ended with its worker, the last one for a reason."""

    item: Item
    attempts: int = 0
    reason: str = ''


@dataclass(eq=False)
class Worker:
    """An actor, the address of its machine as soon as it can make parts ('' again when it died, until Ray has started it again), and since when it
    was asked to begin."""

    actor: Any
    address: str = ''
    asked: float = 0.0


class WorkerPool(Generic[Item, Result]):
    """Makes all parts of a job.

    A worker makes one part at a time, so that it is known which part it dies of. Where other machines read for it, it makes `per_worker`; those that
    it dies with are then made by workers that do nothing else.
    """

    def __init__(
        self, ray: Any, work: PartWork[Item, Result], needs: Mapping[str, float], at_a_time: int, per_worker: int, part_min: float, progress: tqdm
    ):
        self.ray, self.work, self.needs, self.progress = ray, work, needs, progress
        self.at_a_time, self.per_worker, self.part_min = at_a_time, per_worker, part_min
        self.workers: list[Worker] = []
        self.starting: dict[Any, Worker] = {}  # by the call that tells when it can make parts
        self.calls: dict[Any, tuple[Worker, PendingPart[Item], float]] = {}  # by the call that makes the part, since when
        self.waiting: deque[PendingPart[Item]] = deque()
        self.set_aside: list[PendingPart[Item]] = []
        self.moved = self.said = time.monotonic()

    def add(self, actor: Any) -> None:
        """Take an actor that has just been created."""
        self.workers.append(Worker(actor))
        self._start(self.workers[-1])

    def close(self) -> None:
        """Kill all workers; what they have not committed has not happened."""
        for worker in self.workers:
            with suppress(self.ray.exceptions.RayError):
                self.ray.kill(worker.actor)

    def run(self, items: Sequence[Item], start_min: float) -> Iterator[Result]:
        """Yield results as they come; `ClusterEngine.map` says what is raised.

        Args:
            start_min: longest wait for a worker while there is none.
        """
        self.waiting.extend(map(PendingPart, items))
        num_made = 0
        while self.waiting or self.calls:
            refuse_lost_head()
            self._hand_out()
            for call in self.ray.wait([*self.starting, *self.calls], timeout=POLL_SEC)[0]:
                if call in self.starting:
                    self._take_begun(call)
                elif made := self._take_made(call):
                    num_made += 1
                    self.progress.update(self.work.count(*made))
                    expect(self.progress, num_made / len(items))
                    yield made[1]
            self._kill_overdue()
            self._watch(start_min)
        self.progress.total = self.progress.n
        if self.set_aside:
            first = self.set_aside[0]
            many = f' (and {counted(len(self.set_aside) - 1, "other part")})' if len(self.set_aside) > 1 else ''
            raise IncompleteError(
                f'{self.work.writes.url}: part {first.item.name}, read from {self.work.reads.url}/{first.item.path},{many} was '
                f'set aside after {counted(first.attempts, "attempt")} that ended with its worker; the last one: {first.reason}. All other '
                'parts are done. Look at that file, give workers more memory (fewer of them on a machine: --ray-cpus), or leave the file out of '
                'SOURCE, and run the same command again'
            )

    def _start(self, worker: Worker) -> None:
        """Ask a worker to begin: at first, and whenever Ray starts it again, for which the call waits."""
        worker.address, worker.asked = '', time.monotonic()
        self._ask(worker)

    def _ask(self, worker: Worker) -> None:
        self.starting[worker.actor.begin.options(max_task_retries=MAX_FALSE_STARTS - 1).remote()] = worker

    def _hand_out(self) -> None:
        """Give the next parts to workers with room: first to those that make the least."""
        load: dict[Worker, list[PendingPart[Item]]] = {worker: [] for worker in self.workers if worker.address}
        for worker, part, _ in self.calls.values():
            load.get(worker, []).append(part)
        for worker, parts in sorted(load.items(), key=lambda each: len(each[1])):
            while self.waiting and len(self.calls) < self.at_a_time:
                suspects = any(part.attempts for part in (self.waiting[0], *parts))
                if len(parts) >= (1 if suspects else self.per_worker):
                    break
                parts.append(self.waiting.popleft())
                self.moved = time.monotonic()
                self.calls[worker.actor.do.remote(parts[-1].item)] = worker, parts[-1], self.moved

    def _take_begun(self, call: Any) -> None:
        """Take the answer of a worker that was asked to begin."""
        worker = self.starting.pop(call)
        try:
            answer = self.ray.get(call)
        except self.ray.exceptions.RayActorError as error:
            if time.monotonic() - worker.asked < RESTART_SEC:
                self._ask(worker)
                return
            raise ClusterError(
                f'{MAX_FALSE_STARTS} workers with {describe(self.needs)} died before they could begin; the last one: {_cause(error)}; see the logs '
                'of the Ray cluster, and run the same command again'
            ) from None
        if isinstance(answer, Exception):
            raise answer
        worker.address, self.moved = answer, time.monotonic()

    def _take_made(self, call: Any) -> tuple[Item, Result] | None:
        """Take what became of a part: its result, or nothing, and it is tried again."""
        from data_prep.engines.worker import ReaderLost

        worker, part, _ = self.calls.pop(call)
        try:
            answer = self.ray.get(call)
        except self.ray.exceptions.RayActorError as error:
            if worker.address:
                self._say(f'a worker on {worker.address} is gone: {_cause(error)}')
                self._start(worker)
            self._try_again(part, _cause(error))
            return None
        self.moved = time.monotonic()
        if isinstance(answer, ReaderLost):
            self._try_again(part, f'while it was read: {answer}')
            return None
        if isinstance(answer, Exception):
            raise answer
        return part.item, answer

    def _try_again(self, part: PendingPart[Item], reason: str) -> None:
        """Count an attempt, and have the part made after all others, or set it aside."""
        part.attempts, part.reason = part.attempts + 1, reason
        if part.attempts < MAX_ATTEMPTS:
            self.waiting.append(part)
        else:
            self.set_aside.append(part)
            self._say(f'part {part.item.name} is set aside; the others are done first')

    def _kill_overdue(self) -> None:
        """Kill workers of parts that take too long; Ray starts them again."""
        for call, (worker, part, since) in list(self.calls.items()):
            if time.monotonic() - since > self.part_min * 60:
                del self.calls[call]
                reason = f'it took more than {self.part_min:g} minutes (--ray-part-min)'
                self._say(f'part {part.item.name}: {reason}; its worker was killed')
                self._try_again(part, reason)
                if worker.address:
                    self.ray.kill(worker.actor, no_restart=False)
                    self._start(worker)

    def _watch(self, start_min: float) -> None:
        """Say what is waited for when nothing happens; with no worker that could do anything, end the job at last."""
        now = time.monotonic()
        if now - max(self.moved, self.said) < SAY_SEC:
            return
        free, totals = self.ray.available_resources(), self.ray.cluster_resources()
        waited_min = (now - self.moved) / 60
        amounts = ', '.join(f'{name} {free.get(name, 0):g} free of {totals.get(name, 0):g}' for name in self.needs)
        if self.calls:
            _, oldest, since = min(self.calls.values(), key=lambda each: each[2])
            self._say(
                f'no part has ended for {waited_min:.0f} min; {counted(len(self.calls), "part")} being done, {oldest.item.name} for '
                f'{(now - since) / 60:.0f} min (--ray-part-min {self.part_min:g}); {amounts}'
            )
            return
        waits = f'waiting for {counted(len(self.workers), "worker")} with {describe(self.needs)} each; the cluster has {amounts}'
        if waited_min >= start_min:
            raise ClusterError(f'{waits}; none has begun in {waited_min:.0f} min: see `ray status`, and run the same command again')
        self._say(f'{waits}; for {waited_min:.0f} min now')

    def _say(self, text: str) -> None:
        self.said = time.monotonic()
        self.progress.write(printable(f'{self.work.label}: {text}'), file=sys.stderr)


def _cause(error: Exception) -> str:
    """Ray's words for a death, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:400]
