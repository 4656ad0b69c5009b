"""What a job of so many GPU-hours takes and costs on demand, reserved or on spot: machines fail or are taken away, and are paid for differently.

A plan is a small dataclass that says what is paid; how often the machines go is a matter of the job. The mean is J. T. Daly's complete model
(interruptions.py); the probability of finishing by a date comes from a simulation of the same events: failures of a Poisson process, each of which
loses the work since the last save.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

from diffusion.common.text import counted
from diffusion.contracts.errors import InputError
from diffusion.cost.formulas import HOURS_PER_DAY, SEC_PER_HOUR, Number, days, dollars, fleet_dollars, gpu_hours
from diffusion.cost.interruptions import expected_stretch
from diffusion.cost.prices import Price

HOURS_PER_YEAR = 365 * HOURS_PER_DAY
LARGEST_STRETCH = 100  # wall time over useful time: more is no plan
MOST_INTERRUPTIONS = 100_000  # nor is a simulated job that meets more


class PlanError(InputError):
    """A plan that cannot come to an end, or lacks a price."""


@dataclass(frozen=True)
class Faults:
    """How often the GPUs of a job go, and what that costs. All may be arrays of draws."""

    gpu_hours_between: Number  # of one GPU; a job of N GPUs meets one every gpu_hours_between / N hours
    interval_sec: Number  # work between two saves
    save_sec: Number  # training stands still
    restart_sec: Number  # from the failure to the first step, machines paid for: notice, start, load, compile
    wait_sec: Number = 0.0  # before that, without machines and not paid for: until a spot market has capacity again

    def between_sec(self, num_gpus: int) -> Number:
        return np.divide(self.gpu_hours_between, num_gpus) * SEC_PER_HOUR

    def paid_stretch(self, num_gpus: int) -> Number:
        """Expected hours paid for over hours of useful work."""
        return expected_stretch(self.interval_sec, self.save_sec, self.between_sec(num_gpus), self.restart_sec)

    def wall_stretch(self, num_gpus: int) -> Number:
        """The same with waiting: one failure comes every between_sec of the time that machines are there (Wald's identity)."""
        return self.paid_stretch(num_gpus) * (1 + self.wait_sec / self.between_sec(num_gpus))


@dataclass(frozen=True)
class Job:
    """Useful work one after another: (wall hours without any fault, the faults while it goes on), on the same GPUs throughout."""

    parts: tuple[tuple[Number, Faults], ...]
    num_gpus: int

    @property
    def useful_hours(self) -> Number:
        return sum(hours for hours, _ in self.parts)

    @property
    def paid_hours(self) -> Number:
        """Expected wall hours with machines.

        Raises:
            PlanError: the job would hardly ever come through an interval between saves.
        """
        return self._expected(Faults.paid_stretch)

    @property
    def wall_hours(self) -> Number:
        """Expected wall hours."""
        return self._expected(Faults.wall_stretch)

    def _expected(self, stretch: Callable[[Faults, int], Number]) -> Number:
        total = sum(hours * stretch(faults, self.num_gpus) for hours, faults in self.parts)
        times = np.median(np.divide(total, self.useful_hours))
        if not (np.all(np.isfinite(total)) and times <= LARGEST_STRETCH):
            faults = max((faults for _, faults in self.parts), key=lambda one: float(np.median(stretch(one, self.num_gpus))))
            between, every, save = (np.median(sec) for sec in (faults.between_sec(self.num_gpus), faults.interval_sec, faults.save_sec))
            remedy = 'save more often (checkpoint.every) or use fewer GPUs'
            if save > every:
                remedy = f'a save takes {save:,.3g} s: save less often (checkpoint.every), or assume a shorter one (faults.save_sec)'
            raise PlanError(
                f'{counted(self.num_gpus, "GPU")}, a failure every {between:,.0f} s, a save every {every:,.3g} s: {times:,.3g} times the hours: '
                f'such a run never ends; {remedy}'
            )
        return total


class Payment(NamedTuple):
    """So many GPU-hours at a price."""

    what: str
    gpu_hours: Number
    price: Price


class Plan(Protocol):
    """A way to pay for GPUs."""

    @property
    def price(self) -> Price: ...

    def pay(self, used_gpu_hours: Number, wall_hours: Number, num_gpus: int) -> list[Payment]:
        """Everything that is paid if so many GPU-hours are used, over so many hours of the calendar."""


@dataclass(frozen=True)
class OnDemand:
    """What is used is paid."""

    price: Price

    def pay(self, used_gpu_hours: Number, wall_hours: Number, num_gpus: int) -> list[Payment]:
        return [Payment('used', used_gpu_hours, self.price)]


@dataclass(frozen=True)
class Spot(OnDemand):
    """As on demand, at another price; how often the machines are taken away is a matter of the job's faults."""


@dataclass(frozen=True)
class Reserved:
    """What was reserved is paid, used or not; what goes beyond is at the on-demand price.

    Attributes:
        hours: reserved, for all GPUs of the job; None: as many whole days as are used.
        taken_over_share: share of the unused hours that others use and pay for (0..1).
    """

    price: Price
    on_demand: Price
    hours: Number | None = None
    taken_over_share: Number = 0.0

    def pay(self, used_gpu_hours: Number, wall_hours: Number, num_gpus: int) -> list[Payment]:
        needed_days = days(np.maximum(wall_hours, np.divide(used_gpu_hours, num_gpus)))
        reserved = gpu_hours(np.ceil(needed_days) * HOURS_PER_DAY if self.hours is None else self.hours, num_gpus)
        unused = np.maximum(0.0, reserved - used_gpu_hours)
        beyond = np.maximum(0.0, used_gpu_hours - reserved)
        return [
            Payment('used', used_gpu_hours - beyond, self.price),
            Payment('reserved, not used', unused * (1 - self.taken_over_share), self.price),
            Payment('beyond the reservation', beyond, self.on_demand),
        ]


def plan_dollars(plan: Plan, job: Job) -> Number:
    """Expected dollars for the job alone."""
    payments = plan.pay(gpu_hours(job.paid_hours, job.num_gpus), job.wall_hours, job.num_gpus)
    return sum(dollars(payment.gpu_hours, payment.price.dollars) for payment in payments)


def plan_for(price: Price, on_demand: Price | None = None, taken_over_share: Number = 0.0) -> Plan:
    """The plan that a price's name means: `reserved-1y` a year, `capacity-block` whole days, `spot...` spot, anything else on demand.

    Raises:
        PlanError: a reservation without an on-demand price for what goes beyond it, or for a time that its name does not tell.
    """
    offer = price.name.rpartition('.')[2]
    if offer.startswith('spot'):
        return Spot(price)
    if not offer.startswith(('reserved', 'capacity-block')):
        return OnDemand(price)
    years = offer.removeprefix('reserved-').removesuffix('y')
    if offer.startswith('reserved') and not (years.isdigit() and int(years) > 0):
        raise PlanError(f'{price.name}: for how long? name it reserved-1y, reserved-3y ..., or capacity-block for whole days')
    if offer.startswith('capacity-block'):  # nothing goes beyond it
        return Reserved(price, price, None, taken_over_share)
    if on_demand is None:
        name = f'{price.name.rpartition(".")[0]}.on-demand'
        raise PlanError(f'{price.name}: at which price goes what is beyond the reservation? add {name} to the list (--price {name}=DOLLARS)')
    return Reserved(price, on_demand, int(years) * HOURS_PER_YEAR, taken_over_share)


def finish_hours(job: Job, num_draws: int = 10_000, seed: int = 0) -> np.ndarray:
    """Simulated wall hours of the job, `num_draws` times: an interruption undoes the work since the last save.

    Where the job itself is uncertain each simulation takes one of its draws.

    Raises:
        PlanError: more interruptions than a job can meet and end.
    """
    expected = sum(np.max(hours * SEC_PER_HOUR * faults.paid_stretch(job.num_gpus) / faults.between_sec(job.num_gpus)) for hours, faults in job.parts)
    if not expected < MOST_INTERRUPTIONS / 2:
        raise PlanError(f'the run would meet {expected:,.3g} interruptions: too many to come to its end; save more often or use fewer GPUs')
    rng = np.random.default_rng(seed)
    total_sec = np.zeros(num_draws)
    for hours, faults in job.parts:
        sizes = (hours, faults.interval_sec, faults.save_sec, faults.between_sec(job.num_gpus), faults.restart_sec, faults.wait_sec)
        useful, interval, save, between, restart, wait = (np.resize(np.asarray(size, dtype=float), num_draws) for size in sizes)
        total_sec += _simulate(useful * SEC_PER_HOUR, interval, save, between, restart, wait, rng)
    return total_sec / SEC_PER_HOUR


def _simulate(
    work_sec: np.ndarray,
    interval_sec: np.ndarray,
    save_sec: np.ndarray,
    between_sec: np.ndarray,
    restart_sec: np.ndarray,
    wait_sec: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """Wall seconds of each; one round of the loop is the time from one interruption to the next, for all that are not done."""
    wall_sec, left_sec, start_sec = np.zeros_like(work_sec), work_sec.copy(), np.zeros_like(work_sec)
    for _ in range(MOST_INTERRUPTIONS):
        lasts_sec = np.where(np.isinf(between_sec), np.inf, rng.exponential(np.where(np.isinf(between_sec), 1.0, between_sec)))
        needed_sec = start_sec + left_sec + np.ceil(left_sec / interval_sec - 1e-9) * save_sec
        running = left_sec > 0
        done = running & (lasts_sec >= needed_sec)
        wall_sec += np.where(done, needed_sec, np.where(running, lasts_sec + wait_sec, 0.0))
        with np.errstate(invalid='ignore'):
            saved_sec = np.floor(np.maximum(0.0, lasts_sec - start_sec) / (interval_sec + save_sec)) * interval_sec
        left_sec = np.where(done | ~running, 0.0, left_sec - saved_sec)
        start_sec = restart_sec
        if not np.any(left_sec > 0):
            return wall_sec
    raise AssertionError(f'a run that was expected to end met {MOST_INTERRUPTIONS:,} interruptions')


def finish_probability(wall_hours: np.ndarray, deadline_hours: float) -> float:
    """Share (0..1) of simulated runs that end by the deadline."""
    return float(np.mean(wall_hours <= deadline_hours))


def with_interruptions(faults: Faults, gpu_hours_between_interruptions: Number, wait_sec: Number) -> Faults:
    """On spot machines: failures as before, and interruptions; rates of Poisson processes add up. After each there is a wait for capacity."""
    between = 1 / (np.divide(1.0, faults.gpu_hours_between) + np.divide(1.0, gpu_hours_between_interruptions))
    return replace(faults, gpu_hours_between=between, wait_sec=wait_sec)


@dataclass(frozen=True)
class Fleet:
    """Machines of several kinds that run together, such as GPU trainers and cheaper encoders, and what is paid once (F5)."""

    machines: Sequence[tuple[Price, Number]]  # (price of one hour, how many)
    one_off_dollars: Number = 0.0

    @property
    def dollars_per_hour(self) -> Number:
        return sum(dollars(count, price.dollars) for price, count in self.machines)

    def dollars(self, wall_hours: Number) -> Number:
        return fleet_dollars(wall_hours, [dollars(count, price.dollars) for price, count in self.machines], self.one_off_dollars)
