"""The choices that a bill leaves open, side by side: price plans, and latents against encoding in every step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from diffusion.cost.assumptions import Assumptions
from diffusion.cost.bill import Bill, TrainingJob, encoder_price, interrupted_run, latents_at, payment_plan
from diffusion.cost.formulas import ONLINE_FACTOR, Number
from diffusion.cost.plans import PlanError, finish_hours
from diffusion.cost.prices import Price, Prices
from diffusion.cost.uncertain import NUM_DRAWS


@dataclass(frozen=True)
class PlanOutcome:
    """The training alone, steps and what interrupts them, at one price."""

    price: Price
    wall_hours: Number = 0.0
    dollars: Number = 0.0
    probability_by_deadline: float | None = None  # of ending by the deadline, if there is one
    problem: str = ''  # why there are no numbers
    reserved_hours: Number | None = None  # of a reservation for a fixed time

    @property
    def is_mostly_unused(self) -> bool:
        """Whether a reservation is longer than the run: its price is that of the whole reservation."""
        return self.reserved_hours is not None and float(np.median(self.wall_hours)) < self.reserved_hours


def compare_plans(
    job: TrainingJob, assumed: Assumptions, prices: Prices, offers: Iterable[Price], deadline_hours: float | None = None
) -> list[PlanOutcome]:
    """Return one outcome per offer, such as those of `prices.plans(gpu)`; an offer at which the run would never end says so."""
    outcomes = []
    for price in offers:
        try:
            plan = payment_plan(price, assumed, prices)
            run = interrupted_run(job, assumed, plan)
            probability = None if deadline_hours is None else float(np.mean(finish_hours(run, NUM_DRAWS) <= deadline_hours))
            outcomes.append(PlanOutcome(price, run.wall_hours, plan.dollars(run), probability, reserved_hours=plan.reserved_hours))
        except PlanError as error:
            outcomes.append(PlanOutcome(price, problem=str(error)))
    return outcomes


@dataclass(frozen=True)
class EncodingChoice:
    """Dollars of phases on latents: encoded once and kept, in every step (F6), or next to training on other GPUs (F5)."""

    training: Number  # the network's steps, from latents
    encoding: Number  # once
    latents: Number  # their storage
    online: Number  # the steps with VAE and text encoder in them
    concurrent: Number  # the steps, and other GPUs that encode for them as fast
    encoders: tuple[tuple[str, Number, Price], ...]  # of `concurrent`: phase, how many, price of one

    @property
    def precomputed(self) -> Number:
        return self.training + self.encoding + self.latents


def encoding_choice(bill: Bill, assumed: Assumptions, prices: Prices) -> EncodingChoice | None:
    """Return None if no phase trains on latents. The online steps are the published 1.4 times those from latents, whatever the GPU."""
    phases = [phase for phase in bill.job.phases if phase.kind == 'latents']
    if not phases:
        return None
    price, num_gpus = bill.plan.price, bill.job.num_gpus
    training = sum(phase.hours for phase in phases) * num_gpus * price.dollars
    latents = sum(line.dollars for line in bill.lines if line.name.startswith('store latents'))
    concurrent, encoders = 0.0, []
    for phase in phases:
        size = latents_at(phase, assumed)
        encoder, num_encoders = encoder_price(size, prices, price), np.ceil(phase.images_per_sec / size.images_per_gpu_sec)
        concurrent = concurrent + phase.hours * (num_gpus * price.dollars + num_encoders * encoder.dollars)
        encoders.append((phase.name, num_encoders, encoder))
    return EncodingChoice(training, bill.of('encoding'), latents, training * ONLINE_FACTOR, concurrent, tuple(encoders))
