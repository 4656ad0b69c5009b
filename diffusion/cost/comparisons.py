"""The choices that a bill leaves open, side by side: price plans, and latents against encoding in every step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from diffusion.cost.assumptions import Assumptions, draw_all
from diffusion.cost.bill import Bill, TrainingJob, encoder_price, plan_at, run_of, size_of
from diffusion.cost.formulas import Number, dollars, online_gpu_hours
from diffusion.cost.plans import Fleet, PlanError, Reserved, finish_hours, finish_probability, plan_dollars
from diffusion.cost.prices import Price, Prices
from diffusion.cost.uncertain import NUM_DRAWS


@dataclass(frozen=True)
class PlanOutcome:
    """The training alone, steps and what interrupts them, at one price."""

    price: Price
    wall_hours: Number = 0.0
    dollars: Number = 0.0
    probability: float | None = None  # of ending by the deadline, if there is one
    problem: str = ''  # why there are no numbers
    reserved_hours: float | None = None  # of a reservation for a fixed time

    @property
    def mostly_unused(self) -> bool:
        """A reservation that is longer than the run: its price is that of the whole reservation."""
        return self.reserved_hours is not None and float(np.median(self.wall_hours)) < self.reserved_hours


def compare_plans(
    job: TrainingJob,
    assumptions: Assumptions,
    prices: Prices,
    offers: Iterable[Price],
    deadline_hours: float | None = None,
    num_draws: int = NUM_DRAWS,
    seed: int = 0,
) -> list[PlanOutcome]:
    """One outcome an offer, such as those of `prices.plans(gpu)`. An offer at which the run would never end says so."""
    assumed = draw_all(assumptions, num_draws, seed)
    outcomes = []
    for price in offers:
        try:
            plan = plan_at(price, assumed, prices)
            run = run_of(job, assumed, plan)
            probability = None if deadline_hours is None else finish_probability(finish_hours(run, num_draws, seed), deadline_hours)
            reserved_hours = plan.hours if isinstance(plan, Reserved) else None
            outcomes.append(PlanOutcome(price, run.wall_hours, plan_dollars(plan, run), probability, reserved_hours=reserved_hours))
        except PlanError as error:
            outcomes.append(PlanOutcome(price, problem=str(error)))
    return outcomes


@dataclass(frozen=True)
class Beside:
    """Encoders on GPUs of their own that keep up with the trainers of a phase."""

    phase: str
    num_encoders: Number
    encoder: Price


@dataclass(frozen=True)
class EncodingChoice:
    """What the steps of phases on latents cost, in dollars: encoded once and kept, in every step (F6), or beside training on other GPUs (F5)."""

    training: Number  # the U-Net's steps, from latents
    encoding: Number  # once
    latents: Number  # their storage
    online: Number  # the steps with VAE and text encoder in them
    beside: Number  # the steps, and other GPUs that encode for them as fast
    encoders: tuple[Beside, ...]

    @property
    def precomputed(self) -> Number:
        return self.training + self.encoding + self.latents


def encoding_choice(bill: Bill, assumptions: Assumptions, prices: Prices) -> EncodingChoice | None:
    """None if no phase trains on latents. The online steps are the published 1.4 times those from latents, whatever the GPU."""
    phases = [phase for phase in bill.job.phases if phase.kind == 'latents']
    if not phases:
        return None
    price = bill.plan.price
    used = sum(phase.useful_gpu_hours(bill.job.num_gpus) for phase in phases)
    latents = sum(line.dollars for line in bill.lines if line.name.startswith('storage of latents'))
    beside, encoders = 0.0, []
    for phase in phases:
        size = size_of(phase, assumptions)
        encoder = encoder_price(size, prices, price)
        num_encoders = np.ceil(phase.images_per_sec / size.images_per_gpu_sec)
        beside = beside + Fleet([(price, bill.job.num_gpus), (encoder, num_encoders)]).dollars(phase.useful_hours)
        encoders.append(Beside(phase.name, num_encoders, encoder))
    training, online = (dollars(hours, price.dollars) for hours in (used, online_gpu_hours(used)))
    return EncodingChoice(training, bill.of('encoding'), latents, online, beside, tuple(encoders))
