"""A simulated fleet, whose defaults are the post's: 1,000 fine-tunings of 1,400 steps on 40 interruptible RTX 4090; and figures of its runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from diffusion.fleet.policies.rows import AttemptRow, Ending, JobRow, JobState


@dataclass(frozen=True)
class FleetSettings:
    """A fleet, its jobs, and which policies it has.

    A machine's minutes for a whole job are `fastest_min` + lognormal(`tail_log_min`, `tail_sigma`): drawn once a machine, so slow machines finish
    fewer jobs, and the mean over jobs is below the mean over machines. With the defaults the post's median, mean and dollars come out.
    """

    num_jobs: int = 1000
    num_nodes: int = 40  # at most, at the same time
    interruptions_per_hour: float = 0.101  # of each machine, without warning
    bad_nodes: float = 1.0  # of num_nodes: each new machine is bad with this chance, and fails every job after fail_min
    num_poison: int = 0  # of the jobs: fail after fail_min wherever they are tried
    num_flood: int = 0  # poison jobs of another owner, submitted before all others
    price_per_hour: float = 0.324

    num_steps: int = 1400
    checkpoint_steps: int = 100
    fastest_min: float = 41.95
    tail_log_min: float = 2.474
    tail_sigma: float = 1.3
    cold_start_min: float = 10.0  # mean of an exponential distribution
    load_min: float = 1.5  # from the claim to the first step
    fail_min: float = 1.0

    lease_min: float = 2.0
    renew_sec: float = 30.0
    poll_sec: float = 10.0
    sweep_sec: float = 60.0

    max_attempts: int = 3  # limits of each job, as in a job's file
    max_losses: int = 20
    max_hours: float = 10_000.0  # the post's slowest job took 12 h
    max_dollars: float = 10_000.0

    has_bans: bool = True  # a machine does not get a job again that failed on it
    has_quarantine: bool = True
    has_slow: bool = True  # slow machines' jobs are moved
    has_blame: bool = True  # else every failure counts against the job


# What a simulated run came to, and the mean over runs.


@dataclass(frozen=True)
class SimulatedRun:
    """One run to its end."""

    jobs: dict[str, JobRow]  # all ended
    attempts: dict[str, list[AttemptRow]]  # by job
    ended: dict[str, float]  # seconds from the start, by job
    causes: dict[str, str]  # of failed jobs
    poison: frozenset[str]  # jobs that fail on every machine
    quarantined: tuple[str, ...]  # machines
    lost_sec: float  # billed for steps that were made again, and for loading again
    node_sec: float  # from request to end, of all machines: what a provider that bills cold starts and idling would bill


@dataclass(frozen=True)
class FleetOutcome:
    """Figures of one run or, as means, of several. Minutes are billed ones, of all attempts of a job that got done."""

    done: float
    failed: float
    hours: float  # until the last job has ended
    on_nodes: tuple[float, float, float]  # share of all jobs that were tried on 1, 2, and 3 or more machines
    mean_min: float
    median_min: float
    min_min: float
    max_min: float
    dollars: float  # of all attempts
    lost_share: float  # of what was billed
    quarantined: float
    moved: float  # attempts that slow machines gave back
    worst_done: float  # of the run with the fewest jobs done

    @property
    def dollars_per_done(self) -> float:
        return self.dollars / self.done if self.done else float('inf')


def outcome_of(run: SimulatedRun) -> FleetOutcome:
    """Figures of one run."""
    done = [id for id, job in run.jobs.items() if job.state is JobState.DONE]
    minutes = [sum(attempt.billed_sec for attempt in run.attempts[id]) / 60 for id in done] or [0.0]
    num_nodes = [len({attempt.node for attempt in attempts}) for attempts in run.attempts.values()]
    attempts = [attempt for of_job in run.attempts.values() for attempt in of_job]
    billed_sec = sum(attempt.billed_sec for attempt in attempts)
    shares = [sum(low <= num <= high for num in num_nodes) / len(num_nodes) for low, high in [(0, 1), (2, 2), (3, 10**9)]]
    return FleetOutcome(
        done=len(done),
        failed=sum(job.state is JobState.FAILED for job in run.jobs.values()),
        hours=max(run.ended.values()) / 3600,
        on_nodes=(shares[0], shares[1], shares[2]),
        mean_min=fmean(minutes),
        median_min=median(minutes),
        min_min=min(minutes),
        max_min=max(minutes),
        dollars=sum(attempt.dollars for attempt in attempts),
        lost_share=run.lost_sec / billed_sec if billed_sec else 0.0,
        quarantined=len(run.quarantined),
        moved=sum(attempt.ending is Ending.RELEASED for attempt in attempts),
        worst_done=len(done),
    )


def mean_outcome(outcomes: Sequence[FleetOutcome]) -> FleetOutcome:
    """Means of the figures over runs; `worst_done` is the least."""
    means = {name: fmean(getattr(one, name) for one in outcomes) for name in FleetOutcome.__dataclass_fields__ if name != 'on_nodes'}
    shares = [fmean(one.on_nodes[i] for one in outcomes) for i in range(3)]
    return FleetOutcome(on_nodes=(shares[0], shares[1], shares[2]), **{**means, 'worst_done': min(one.worst_done for one in outcomes)})
