"""The part of a report about money: days and dollars of a run by number of GPUs, for every way to pay that the list of prices knows."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.reporting.page import Block, Section, Table
from benchmarks.reporting.series import LOWER_LAW
from diffusion.common.text import counted
from diffusion.cost.assumptions import draw_all, load_assumptions
from diffusion.cost.bill import TrainingJob, TrainingPhase, ways_to_pay
from diffusion.cost.formulas import HOURS_PER_DAY, Phase
from diffusion.cost.prices import Prices
from diffusion.recipe.schema import Checkpoint, Faults

HEAD = ('paid', 'GPUs', 'from:', 'days', 'dollars')


def cost_section(
    what: str,
    phases: Sequence[Phase],
    rates: Mapping[int, Mapping[int, float]],
    origins: Mapping[int, str],
    gpu: str,
    prices: Prices,
    has_outliers: bool = False,
) -> Section | None:
    """Return days and dollars of a training run with what interrupts it; None if the list has no price of that GPU.

    Args:
        what: the throughput and the samples, in words.
        phases: resolution and samples of each.
        rates: by number of GPUs, images per second by resolution.
        origins: of the rates, by number of GPUs, as in series.py.
        gpu: its name in the list of prices.
        has_outliers: the rates are of series that have some.
    """
    rows, impossible = [], list[str]()
    assumed, offers = draw_all(load_assumptions()), prices.plans(gpu)
    jobs = {num_gpus: _job(phases, images_per_sec, origins[num_gpus], num_gpus) for num_gpus, images_per_sec in sorted(rates.items())}
    for offer, price in offers.items():
        for num_gpus, job in jobs.items():
            (row,) = ways_to_pay(job, assumed, prices, [price])
            if row.quantity is None:
                impossible.append(f'{offer}, {counted(num_gpus, "GPU")}: {row.formula}')
            else:
                days, paid = float(np.median(row.quantity)) / HOURS_PER_DAY, float(np.median(row.dollars))
                rows.append([offer, str(num_gpus), origins[num_gpus], f'{days:,.2f}', f'${paid:,.0f}'])
    if not rows:
        return None
    blocks: list[Block] = [
        f'{what}. Training with its saves, failures and restarts, and on spot with machines taken away and waited for, as '
        'diffusion/cost/assumptions.yaml has them (medians); a reservation is paid for its whole time, a capacity block for whole days. Encoding, '
        'storage, network, evaluation and people come on top. Prices of different dates and sources are not offers to choose from: put your '
        'own with --price.',
        *([LOWER_LAW] if has_outliers else []),
        Table(HEAD, rows),
        Table(('paid', 'price:'), [[offer, str(price)] for offer, price in offers.items()]),
        *impossible,
    ]
    return Section('Ways to pay', blocks)


def _job(phases: Sequence[Phase], images_per_sec: Mapping[int, float], origin: str, num_gpus: int) -> TrainingJob:
    """Return the job of a recipe with the default interval of saves and failures and large checkpoints, without storage."""
    every = Checkpoint().every
    between_hours = Faults().gpu_hours_between_failures
    parts = [
        TrainingPhase(f'{phase.resolution} px', phase, images_per_sec[phase.resolution], origin, 0, math.inf, 0, every.value, between_hours)
        for phase in phases
    ]
    return TrainingJob(tuple(parts), num_gpus)
