"""What a simulated fleet is like. The defaults are the post's: 1,000 fine-tunings of 1,400 steps on 40 interruptible RTX 4090."""

from dataclasses import dataclass


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
