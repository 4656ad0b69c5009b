"""A fleet on a virtual clock. Every decision is a call of policies/; what is here is the world: machines that come, work, fail and vanish.

What differs from the service: renewals, polls and uploads take no time and are not events of their own; a machine's death is seen by the provider at
once, which starts another, and by the queue when the lease lapses; a checkpoint is published in the moment that its step is made.
"""

import random
from bisect import insort
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from itertools import islice

from diffusion.fleet.jobs.spec import JobLimits, MachineNeeds
from diffusion.fleet.policies.blame import JobDecision, failures_since_success, judge, proven_nodes, reopened, why_quarantined
from diffusion.fleet.policies.hand_out import ScalingLimits, choose_sorted, nodes_to_drain, num_takeable, order_of_owner, stranded, wanted_nodes
from diffusion.fleet.policies.limits import MIN_SEC, MIN_SHARE_OF_JOB, must_stop, reference_speed, why_slow
from diffusion.fleet.policies.rows import FAILURES, AttemptRow, Ban, Ending, JobRow, JobState, NodeRow, NodeState, OwnerRow, ending_of
from diffusion.fleet.simulation.runs import FleetOutcome, FleetSettings, SimulatedRun, mean_outcome, outcome_of

CRASH = 70
LONGEST_HOURS = 50_000.0  # of virtual time: beyond it the policies let some job run for ever
NUM_PEERS, NUM_ELSEWHERE = 100, 300  # newest attempts, of which policies are told
LOOK_AGAIN_SEC = 300.0  # at a machine that could not be compared yet
NEW_NODE = NodeRow('new', NodeState.LIVE, 'rtx4090', 24.0)


@dataclass(eq=False)
class _Machine:
    row: NodeRow
    requested: float
    steps_per_sec: float
    is_bad: bool
    is_up: bool = False
    running: '_Running | None' = None
    idle_since: float | None = None
    attempts: list[AttemptRow] = field(default_factory=list)  # that have ended
    bans: list[Ban] = field(default_factory=list)


@dataclass(eq=False)
class _Running:
    row: AttemptRow  # as claimed
    machine: _Machine
    first_step_at: float
    died: float | None = None  # its machine; the queue does not know until the lease lapses
    peer: AttemptRow | None = None  # a row with its speed, which does not change

    def step(self, now: float, num_steps: int) -> int:
        """Steps that are made, of the whole job."""
        since = (now if self.died is None else min(now, self.died)) - self.first_step_at
        return min(num_steps, self.row.first_step + int(max(0.0, since) * self.machine.steps_per_sec + 1e-6))


def simulate(settings: FleetSettings, seed: int) -> SimulatedRun:
    """Run a fleet until all jobs have ended.

    Raises:
        RuntimeError: jobs are left after LONGEST_HOURS of virtual time.
    """
    return _Simulation(settings, seed).run()


class _Simulation:
    def __init__(self, settings: FleetSettings, seed: int):
        self.settings, self.draw = settings, random.Random(seed)
        self.now, self.num_events = 0.0, 0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        limits = JobLimits(settings.max_attempts, settings.max_losses, settings.max_hours, settings.max_dollars)
        names = [(f'flood-{i}', 'flood') for i in range(settings.num_flood)] + [(f'job-{i}', 'owner') for i in range(settings.num_jobs)]
        self.jobs = {
            id: JobRow(id, owner, number, JobState.QUEUED, limits, MachineNeeds(), num_steps=settings.num_steps, recipe='recipe')
            for number, (id, owner) in enumerate(names)
        }
        poison = self.draw.sample(range(settings.num_jobs), settings.num_poison)
        self.poison = {f'job-{i}' for i in poison} | {id for id, owner in names if owner == 'flood'}
        self.queues: dict[str, list[JobRow]] = defaultdict(list)
        for job in self.jobs.values():
            self.queues[job.owner].append(job)
        self.owners = {name: OwnerRow(name, 10**9, 0, float('inf')) for name in self.queues}
        self.attempts: dict[str, list[AttemptRow]] = {id: [] for id in self.jobs}  # that have ended
        self.ended_attempts: list[AttemptRow] = []  # in this order
        self.running: dict[str, _Running] = {}  # as the queue knows it, by job
        self.machines: dict[str, _Machine] = {}  # all there ever were
        self.present: dict[str, _Machine] = {}  # starting or up, for the provider
        self.num_left, self.replicas = len(self.jobs), 0
        self.scaling = ScalingLimits(settings.num_nodes)
        self.quarantined: list[str] = []
        self.ended: dict[str, float] = {}
        self.causes: dict[str, str] = {}
        self.lost_sec = self.node_sec = 0.0

    def run(self) -> SimulatedRun:
        self.sweep()
        while self.num_left:
            self.now, _, happens = heappop(self.events)
            if self.now > LONGEST_HOURS * 3600:
                raise RuntimeError(f'{self.num_left} of {len(self.jobs)} jobs have not ended after {LONGEST_HOURS:,.0f} hours')
            happens()
        for machine in list(self.present.values()):
            self.leave(machine)
        return SimulatedRun(
            self.jobs, self.attempts, self.ended, self.causes, frozenset(self.poison), tuple(self.quarantined), self.lost_sec, self.node_sec
        )  # fmt: skip

    def at(self, time: float, happens: Callable[[], None]) -> None:
        self.num_events += 1
        heappush(self.events, (time, self.num_events, happens))

    # Machines.

    def request(self) -> None:
        """The provider starts machines until there are as many as wanted."""
        while len(self.present) < self.replicas:
            of = self.settings
            minutes = of.fastest_min + self.draw.lognormvariate(of.tail_log_min, of.tail_sigma)
            name = f'm{len(self.machines)}'
            is_bad = self.draw.random() < of.bad_nodes / of.num_nodes
            machine = _Machine(replace(NEW_NODE, name=name), self.now, of.num_steps / (60 * minutes), is_bad)
            self.machines[name] = self.present[name] = machine
            self.at(self.now + self.exponential(60 * of.cold_start_min), partial(self.come, machine))

    def exponential(self, mean: float) -> float:
        return self.draw.expovariate(1 / mean) if mean > 0 else 0.0

    def come(self, machine: _Machine) -> None:
        if machine.row.name in self.present:
            machine.is_up = True
            if self.settings.interruptions_per_hour > 0:
                self.at(self.now + self.exponential(3600 / self.settings.interruptions_per_hour), partial(self.die, machine))
            self.claim(machine)

    def leave(self, machine: _Machine, state: NodeState = NodeState.GONE) -> None:
        """It ends without a job, or its job was taken from it before."""
        del self.present[machine.row.name]
        self.node_sec += self.now - machine.requested
        machine.row = replace(machine.row, state=state)
        machine.idle_since = None
        self.request()

    def die(self, machine: _Machine) -> None:
        if machine.row.name not in self.present:
            return
        running = machine.running
        if running:
            machine.running = None
            running.died = self.now
            last_sign = self.last_sign(running)
            self.at(last_sign + 60 * self.settings.lease_min, partial(self.lapse, running))
        self.leave(machine)

    def last_sign(self, running: _Running) -> float:
        """When the queue last heard of an attempt: its newest renewal."""
        end = self.now if running.died is None else running.died
        return running.row.started + (end - running.row.started) // self.settings.renew_sec * self.settings.renew_sec

    # Attempts.

    def claim(self, machine: _Machine) -> None:
        if machine.row.name not in self.present or machine.running:
            return
        job = choose_sorted(machine.row, self.queues, machine.bans, self.owners, self.now)
        if job is None:
            machine.idle_since = self.now if machine.idle_since is None else machine.idle_since
            return
        of, machine.idle_since = self.settings, None
        self.queues[job.owner].remove(job)
        job = self.jobs[job.id] = replace(job, state=JobState.LEASED, epoch=job.epoch + 1, node=machine.row.name)
        owner = self.owners[job.owner]
        self.owners[job.owner] = replace(owner, num_leased=owner.num_leased + 1, last_leased=self.now)
        node, price = machine.row, of.price_per_hour
        row = AttemptRow(job.id, job.epoch, node.name, node.gpu, job.recipe, self.now, self.now, job.step, job.step, price, owner=job.owner)
        running = machine.running = self.running[job.id] = _Running(row, machine, self.now + 60 * of.load_min)
        if machine.is_bad or job.id in self.poison:
            running.first_step_at = float('inf')
            self.at(self.now + 60 * of.fail_min, partial(self.finish, running, CRASH))
            return
        training_sec = (of.num_steps - job.step) / machine.steps_per_sec
        self.at(running.first_step_at + training_sec, partial(self.finish, running, 0))
        if of.has_slow:
            tenth = running.first_step_at + max(of.renew_sec, MIN_SHARE_OF_JOB * of.num_steps / machine.steps_per_sec)
            self.at(min(self.now + MIN_SEC, tenth), partial(self.look, running))
        if of.max_hours < FleetSettings.max_hours or of.max_dollars < FleetSettings.max_dollars:
            self.at(self.now + of.renew_sec, partial(self.spend, running))

    def row(self, running: _Running) -> AttemptRow:
        """A running attempt as the queue knows it."""
        known = (self.now if running.died is None else running.died) >= running.first_step_at + self.settings.renew_sec
        step = running.step(self.now, self.settings.num_steps)
        speed = running.machine.steps_per_sec if known and step > running.row.first_step else None
        row = replace(running.row, last_sign=self.last_sign(running), last_step=step, steps_per_sec=speed)
        running.peer = row if speed else None
        return row

    def is_over(self, running: _Running) -> bool:
        return running.died is not None or self.running.get(running.row.job) is not running

    def finish(self, running: _Running, exit_code: int) -> None:
        if not self.is_over(running):
            self.end(running, ending_of(exit_code), self.now, exit_code)

    def lapse(self, running: _Running) -> None:
        self.end(running, Ending.LOST, self.last_sign(running))

    def look(self, running: _Running) -> None:
        """Is the machine slow?"""
        if self.is_over(running):
            return
        row = self.row(running)
        peers = [other.peer or self.row(other) for other in self.running.values()] + self.ended_attempts[-NUM_PEERS:]
        reference = reference_speed(row, peers)
        if reference is None or row.steps_per_sec is None:
            self.at(self.now + LOOK_AGAIN_SEC, partial(self.look, running))
        elif why_slow(row, self.jobs[row.job], reference, self.now):
            self.end(running, Ending.RELEASED, self.now)
            if running.machine.row.name in self.present:
                self.leave(running.machine)

    def spend(self, running: _Running) -> None:
        """A renewal; looked at only if jobs have limits that they may reach."""
        if self.is_over(running):
            return
        job = self.jobs[running.row.job]
        if stop := must_stop(job, [*self.attempts[job.id], self.row(running)], self.owners[job.owner]):
            self.end(running, stop.ending, self.now)
        else:
            self.at(self.now + self.settings.renew_sec, partial(self.spend, running))

    def end(self, running: _Running, ending: Ending, last_sign: float, exit_code: int | None = None) -> None:
        """An attempt has ended: what becomes of its job and its machine."""
        of, machine = self.settings, running.machine
        job = self.jobs[running.row.job]
        del self.running[job.id]
        step = running.step(self.now, of.num_steps)
        kept = max(running.row.first_step, step // of.checkpoint_steps * of.checkpoint_steps) if ending is Ending.LOST else step
        speed = machine.steps_per_sec if step > running.row.first_step else None
        row = replace(running.row, last_sign=last_sign, last_step=step, steps_per_sec=speed, ended=self.now, ending=ending, exit_code=exit_code)
        self.attempts[job.id].append(row)
        self.ended_attempts.append(row)
        machine.attempts.append(row)
        self.count_lost(row, kept, machine)
        owner = self.owners[job.owner]
        self.owners[job.owner] = replace(owner, num_leased=owner.num_leased - 1)
        job = self.jobs[job.id] = replace(job, step=kept)
        self.apply(job, judge(job, self.attempts[job.id], *self.reputations(job), self.now))
        if running.died is None:
            machine.running = None
            if ending in FAILURES and of.has_quarantine:
                self.suspect(machine)
            if ending is not Ending.RELEASED:  # what was released is drained by the caller
                self.claim(machine)
        self.wake()

    def count_lost(self, row: AttemptRow, kept: int, machine: _Machine) -> None:
        """Add what was billed and is not in the checkpoint, and loading if this is not the job's first try."""
        useful = (kept - row.first_step) / machine.steps_per_sec
        loading = min(row.billed_sec, 60 * self.settings.load_min) if row.epoch == 1 and kept else 0.0
        self.lost_sec += max(0.0, row.billed_sec - useful - loading)

    def reputations(self, job: JobRow) -> tuple[set[str], set[str]]:
        """Those of the job's machines that are proven, and those that are quarantined."""
        names = {attempt.node for attempt in self.attempts[job.id]}
        if not self.settings.has_blame:
            return names, set()
        proven = proven_nodes(job.id, (attempt for name in names for attempt in self.machines[name].attempts))
        return proven, {name for name in names if self.machines[name].row.state is NodeState.QUARANTINED}

    def apply(self, job: JobRow, decision: JobDecision) -> None:
        """Write what a policy has decided on a job."""
        was_over = job.id in self.ended
        job = self.jobs[job.id] = replace(job, state=decision.state, node=None, not_before=decision.not_before)
        if self.settings.has_bans:
            for ban in decision.bans:
                self.machines[ban.node].bans.append(ban)
        if decision.state is JobState.QUEUED:
            if was_over:
                del self.ended[job.id], self.causes[job.id]
                self.num_left += 1
            insort(self.queues[job.owner], job, key=order_of_owner)
            if decision.not_before > self.now:
                self.at(decision.not_before, self.wake)
            return
        self.ended[job.id] = self.now
        self.num_left -= 1
        if decision.state is JobState.FAILED:
            self.causes[job.id] = decision.cause

    def suspect(self, machine: _Machine) -> None:
        """A job has failed on it: is it the machine?"""
        if machine.row.name not in self.present or not (failures := failures_since_success(machine.attempts)):
            return
        owners = {failure.owner for failure in failures}
        elsewhere = [self.row(other) for other in self.running.values() if other.row.owner in owners]
        elsewhere += islice((attempt for attempt in reversed(self.ended_attempts) if attempt.owner in owners), NUM_ELSEWHERE)
        if not why_quarantined(machine.row.name, machine.attempts, elsewhere):
            return
        self.quarantined.append(machine.row.name)
        self.leave(machine, NodeState.QUARANTINED)
        if not self.settings.has_blame:
            return
        tried = [self.jobs[id] for id in {attempt.job for attempt in machine.attempts}]
        failed = sorted((job for job in tried if job.state is JobState.FAILED), key=lambda job: job.number)
        reputations = {job.id: self.reputations(job) for job in failed}
        proven = {id: names for id, (names, _) in reputations.items()}
        bad = {name for _, names in reputations.values() for name in names}
        for job, decision in reopened(machine.row.name, failed, self.attempts, proven, bad, self.now):
            self.apply(job, decision)

    # What the sweeper does.

    def wake(self) -> None:
        """Machines without a job ask again, each at its next poll."""
        if any(self.queues.values()):
            for machine in self.present.values():
                if machine.idle_since is not None:
                    self.at(self.now + self.draw.uniform(0, self.settings.poll_sec), partial(self.claim, machine))

    def sweep(self) -> None:
        up = [machine for machine in self.present.values() if machine.is_up]
        bans = [ban for machine in up for ban in machine.bans]
        banned = {ban.job for ban in bans}
        queued = [job for queue in self.queues.values() for job in queue if job.id in banned] if banned else []
        alone = stranded(queued, [machine.row for machine in up], bans, self.now)
        for one in alone:
            if one.lift:
                self.machines[one.lift.node].bans.remove(one.lift)
                self.wake()
        enough = max(0, self.settings.num_nodes - len(self.running))
        waiting = (job for queue in self.queues.values() for job in queue)
        takeable = num_takeable(waiting, NEW_NODE, self.owners, self.now, enough)
        self.replicas = wanted_nodes(len(self.running), takeable, len(alone), len(up), None, self.scaling)
        idle = {machine.row.name: machine.idle_since for machine in up if machine.idle_since is not None}
        for name in nodes_to_drain([machine.row for machine in up], idle, self.replicas, self.now, self.scaling):
            self.leave(self.present[name])
        self.request()
        self.at(self.now + self.settings.sweep_sec, self.sweep)


# Rows of the table of policies: which ones a fleet needs, one more a row, then the same under worse conditions.


def scenarios(settings: FleetSettings, times: float = 10.0, checkpoint_steps: int = 20) -> dict[str, FleetSettings]:
    """Return settings by their names in the table.

    Args:
        times: interruptions of the last rows, of those of `settings`.
        checkpoint_steps: of the row with more frequent checkpoints.
    """
    none = replace(settings, has_bans=False, has_quarantine=False, has_slow=False, has_blame=False)
    moved = replace(settings, has_blame=False)
    often = replace(moved, interruptions_per_hour=settings.interruptions_per_hour * times)
    return {
        f'no bans, {settings.max_attempts} attempts': none,
        'ban (job, machine) only': replace(none, has_bans=True),
        '+ machine out after 3 failures': replace(moved, has_slow=False),
        '+ slow machines (2x median) moved': moved,
        'same, lease 15 min': replace(moved, lease_min=15.0),
        f'same, interruptions x{times:g} ({often.interruptions_per_hour:.3g}/h)': often,
        f'same, checkpoint each {checkpoint_steps} steps': replace(often, checkpoint_steps=checkpoint_steps),
        f'x{times:g} with blame: the policies of the service': replace(often, has_blame=True),
    }


def simulate_seeds(settings: FleetSettings, seeds: range) -> FleetOutcome:
    """Mean over runs, one a seed."""
    return mean_outcome([outcome_of(simulate(settings, seed)) for seed in seeds])
