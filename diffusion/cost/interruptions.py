"""Failures, saves and ways to pay: the best interval between saves, and time and price of an interrupted run, on demand, reserved or on spot.

Failures are a Poisson process, each of which loses the work since the last save; the expected time is J. T. Daly's complete model.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from diffusion.common.text import counted
from diffusion.contracts.errors import InputError
from diffusion.cost.formulas import HOURS_PER_DAY, HOURS_PER_YEAR, Number
from diffusion.cost.prices import Price

LARGEST_STRETCH = 100  # wall time over that of steps and saves: more is no plan


class PlanError(InputError):
    """A run that cannot come to an end, or a way to pay that lacks a price."""


def best_interval_sec(save_sec: float, between_failures_sec: float, restart_sec: float) -> float:
    """Interval from save to save of the highest availability, C + sqrt(2 (M + R) C + C^2). arXiv 2410.18124.

    C: save_sec, for which training stands still; M: of the whole job; R: from the start of a process to its first step.
    """
    return save_sec + math.sqrt(2 * (between_failures_sec + restart_sec) * save_sec + save_sec**2)


def overhead(interval_sec: float, save_sec: float, between_failures_sec: float, restart_sec: float, notice_sec: float = 0.0) -> float:
    """Share of the time that saving and failing cost, to first order: C / tau + (tau / 2 + D + R) / M, with D until someone has started again."""
    return save_sec / interval_sec + (interval_sec / 2 + notice_sec + restart_sec) / between_failures_sec


def expected_stretch(interval_sec: Number, save_sec: Number, between_failures_sec: Number, restart_sec: Number, notice_sec: Number = 0.0) -> Number:
    """Expected wall time over useful time when failures are exponential, exactly: M e^((D + R) / M) (e^((tau + C) / M) - 1) / tau.

    The complete model of J. T. Daly, Future Generation Computer Systems 22(3), 2006; `overhead` is its first order, 1 + C / tau its limit without
    failures. Restarts and saves can fail too. Arguments may be arrays. Infinite where no interval is ever survived.

    Args:
        interval_sec: tau, work from the end of a save to the begin of the next.
        between_failures_sec: M, of the whole job; infinite is never.
    """
    segment_sec, per_sec = np.add(interval_sec, save_sec), np.divide(1.0, between_failures_sec)
    with np.errstate(over='ignore'):
        failures = np.asarray(segment_sec * per_sec, dtype=float)
        growth = np.where(failures == 0, 1.0, np.expm1(failures) / np.where(failures == 0, 1.0, failures))  # (e^x - 1) / x, 1 at 0
        passed_sec = segment_sec * growth * np.exp(np.add(restart_sec, notice_sec) * per_sec)
    return passed_sec / interval_sec


@dataclass(frozen=True)
class Interruptions:
    """Rate and cost of the failures of a job. All may be arrays of draws."""

    between_sec: Number  # of all its GPUs together
    interval_sec: Number  # work between two saves
    save_sec: Number  # training stands still
    restart_sec: Number  # from the failure to the first step, machines paid for: notice, start, load, compile
    wait_sec: Number = 0.0  # before that, without machines and not paid for: until a spot market has capacity again

    @property
    def paid_stretch(self) -> Number:
        """Expected hours paid for over hours of useful work."""
        return expected_stretch(self.interval_sec, self.save_sec, self.between_sec, self.restart_sec)

    @property
    def wall_stretch(self) -> Number:
        """Expected wall hours over hours of useful work: one failure comes every between_sec of the time with machines (Wald's identity)."""
        return self.paid_stretch * (1 + self.wait_sec / self.between_sec)


@dataclass(frozen=True)
class InterruptedRun:
    """Useful work one after another on the same GPUs: (wall hours without any interruption, the interruptions meanwhile)."""

    parts: tuple[tuple[Number, Interruptions], ...]
    num_gpus: int

    @property
    def useful_hours(self) -> Number:
        return sum(hours for hours, _ in self.parts)

    @property
    def paid_hours(self) -> Number:
        """Expected wall hours with machines; PlanError if the run would hardly ever come through an interval between saves."""
        return self._expected([part.paid_stretch for _, part in self.parts])

    @property
    def wall_hours(self) -> Number:
        """Expected wall hours; PlanError as for `paid_hours`."""
        return self._expected([part.wall_stretch for _, part in self.parts])

    def _expected(self, stretches: Sequence[Number]) -> Number:
        total = sum(hours * stretch for (hours, _), stretch in zip(self.parts, stretches, strict=True))
        without_failures = sum(hours * (1 + np.divide(part.save_sec, part.interval_sec)) for hours, part in self.parts)
        times = np.median(np.divide(total, without_failures))
        if not (np.all(np.isfinite(total)) and times <= LARGEST_STRETCH):
            worst = self.parts[int(np.argmax([np.median(stretch) for stretch in stretches]))][1]
            between, every, save = (np.median(sec) for sec in (worst.between_sec, worst.interval_sec, worst.save_sec))
            remedy = 'save more often (checkpoint.every) or use fewer GPUs'
            if save > every:
                remedy = f'a save takes {save:,.3g} s: save less often (checkpoint.every), or assume a shorter one (--assume faults.save_sec=SECONDS)'
            raise PlanError(
                f'{counted(self.num_gpus, "GPU")}, a failure every {between:,.0f} s, a save every {every:,.3g} s: {times:,.3g} times the hours '
                f'of steps and saves: such a run never ends; {remedy}'
            )
        return total


@dataclass(frozen=True)
class PaymentPlan:
    """A way to pay for GPUs: what is used, or what was reserved, used or not.

    Attributes:
        beyond: price of what goes beyond a reservation; None: nothing is reserved, and what is used is paid.
        reserved_hours: for all GPUs of the run; None: as many whole days as are used.
        taken_over_share: share of the unused hours that others use and pay for (0..1).
        is_spot: the machines may be taken away.
    """

    price: Price
    beyond: Price | None = None
    reserved_hours: Number | None = None
    taken_over_share: Number = 0.0
    is_spot: bool = False

    def pay(self, used_gpu_hours: Number, wall_hours: Number, num_gpus: int) -> list[tuple[str, Number, Price]]:
        """Return (what, GPU-hours, price) of every payment for GPU-hours that are used within some wall hours."""
        if self.beyond is None:
            return [('used', used_gpu_hours, self.price)]
        needed = np.maximum(wall_hours, np.divide(used_gpu_hours, num_gpus))
        reserved = (np.ceil(needed / HOURS_PER_DAY) * HOURS_PER_DAY if self.reserved_hours is None else self.reserved_hours) * num_gpus
        unused, beyond = np.maximum(0.0, reserved - used_gpu_hours), np.maximum(0.0, used_gpu_hours - reserved)
        return [
            ('used', used_gpu_hours - beyond, self.price),
            ('reserved, not used', unused * (1 - self.taken_over_share), self.price),
            ('beyond the reservation', beyond, self.beyond),
        ]

    def dollars(self, run: InterruptedRun) -> Number:
        """Expected dollars for a run alone."""
        payments = self.pay(run.paid_hours * run.num_gpus, run.wall_hours, run.num_gpus)
        return sum(gpu_hours * price.dollars for _, gpu_hours, price in payments)


def plan_for(price: Price, on_demand: Price | None = None, taken_over_share: Number = 0.0) -> PaymentPlan:
    """Return the plan that a price's name means: `reserved-1y` a year, `capacity-block` whole days, `spot...` spot, anything else on demand.

    A reservation needs an on-demand price for what goes beyond it, and a time that its name tells; PlanError else.
    """
    offer = price.offer
    if offer.startswith('capacity-block'):  # nothing goes beyond it
        return PaymentPlan(price, price, None, taken_over_share)
    if not offer.startswith('reserved'):
        return PaymentPlan(price, is_spot=offer.startswith('spot'))
    years = offer.removeprefix('reserved-').removesuffix('y')
    if not (years.isdigit() and int(years) > 0):
        raise PlanError(f'{price.name}: for how long? name it reserved-1y, reserved-3y ..., or capacity-block for whole days')
    if on_demand is None:
        name = f'{price.name.rpartition(".")[0]}.on-demand'
        raise PlanError(f'{price.name}: at which price goes what is beyond the reservation? add {name} to the list (--price {name}=DOLLARS)')
    return PaymentPlan(price, on_demand, int(years) * HOURS_PER_YEAR, taken_over_share)
