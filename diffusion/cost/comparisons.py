"""The choices that a bill leaves open, side by side: price plans, and latents against encoding in every step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from diffusion.cost.assumptions import Assumptions, draw_all
from diffusion.cost.bill import Bill, TrainingJob, plan_at, run_of
from diffusion.cost.formulas import Number, online_gpu_hours
from diffusion.cost.plans import PlanError, finish_hours, finish_probability, plan_dollars
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
            outcomes.append(PlanOutcome(price, run.wall_hours, plan_dollars(plan, run), probability))
        except PlanError as error:
            outcomes.append(PlanOutcome(price, problem=str(error)))
    return outcomes


@dataclass(frozen=True)
class EncodingChoice:
    """Encode once and keep the latents, or encode in every step (F6). Dollars."""

    training: Number  # the U-Net's steps, from latents
    encoding: Number  # once
    latents: Number  # their storage
    online: Number  # the steps with VAE and text encoder in them

    @property
    def precomputed(self) -> Number:
        return self.training + self.encoding + self.latents


def encoding_choice(bill: Bill) -> EncodingChoice | None:
    """None if no phase trains on latents. The online steps are the published 1.4 times those from latents, whatever the GPU."""
    if not any(line.group == 'encoding' for line in bill.lines):
        return None
    latents = sum(line.dollars for line in bill.lines if line.name.startswith('storage of latents'))
    return EncodingChoice(bill.of('steps'), bill.of('encoding'), latents, online_gpu_hours(bill.of('steps')))
