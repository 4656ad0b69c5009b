"""The whole bill of a project: what each part takes, at which price, and by which formula.

A line is a quantity times a price, and `formulas.dollars` is the only place where they meet. Quantities are numbers or arrays of draws; nothing is
rounded here. docs/cost.md explains every line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from diffusion.common.text import counted
from diffusion.contracts.errors import InputError
from diffusion.cost.assumptions import Assumptions, Encoding, draw_all
from diffusion.cost.formulas import SEC_PER_HOUR, Number, Phase, days, dollars, gpu_hours, hours
from diffusion.cost.plans import Faults, Job, Plan, Spot, plan_for, with_interruptions
from diffusion.cost.prices import Price, Prices
from diffusion.cost.uncertain import NUM_DRAWS, quantiles, spread_text

BYTES_PER_TB, BYTES_PER_GB = 1e12, 1e9


class BillError(InputError):
    """The assumptions do not say what this project's bill needs."""


@dataclass(frozen=True)
class TrainingPhase:
    """One recipe of the project, as it would run on the job's GPUs."""

    name: str  # the recipe's
    phase: Phase
    images_per_sec: Number  # of all GPUs together
    origin: str  # where that number is from: measured, published, predicted, assumed
    sample_bytes: float  # of one sample in its shards
    checkpoint_bytes: float
    num_checkpoints: int  # that are kept in the end (`checkpoints_kept`)
    save_interval_sec: float  # the recipe's checkpoint.every, as time
    gpu_hours_between_failures: float  # the recipe's faults.gpu_hours_between_failures
    kind: str = 'latents'  # the recipe's data.kind: what is read from shards

    @property
    def useful_hours(self) -> Number:
        """Wall hours of the steps alone."""
        return hours(self.phase.num_samples, self.images_per_sec)

    def useful_gpu_hours(self, num_gpus: int) -> Number:
        return gpu_hours(self.useful_hours, num_gpus)


@dataclass(frozen=True)
class TrainingJob:
    """All phases, one after another on the same GPUs."""

    phases: tuple[TrainingPhase, ...]
    num_gpus: int

    @property
    def useful_gpu_hours(self) -> Number:
        return sum(phase.useful_gpu_hours(self.num_gpus) for phase in self.phases)


@dataclass(frozen=True)
class Line:
    """So much of something, at a price."""

    group: str  # data, encoding, steps, training, experiments, storage, network or people
    name: str
    quantity: Number
    price: Price
    formula: str  # in words and numbers
    is_surcharge: bool = False  # the difference to another price, on what other lines have already

    @property
    def unit(self) -> str:
        return self.price.unit

    @property
    def dollars(self) -> Number:
        return dollars(self.quantity, self.price.dollars)


@dataclass(frozen=True)
class Bill:
    """What a project costs, line by line, and how long its training takes."""

    lines: tuple[Line, ...]
    wall_hours: Number  # of training, with evaluation and all that interrupts it
    plan: Plan
    job: TrainingJob

    @property
    def dollars(self) -> Number:
        return sum(line.dollars for line in self.lines)

    @property
    def gpu_hours(self) -> Number:
        """All that are paid for, of whatever kind."""
        return sum(line.quantity for line in self.lines if line.unit == 'GPU-hour' and not line.is_surcharge)

    @property
    def groups(self) -> tuple[str, ...]:
        """In the order of the lines."""
        return tuple(dict.fromkeys(line.group for line in self.lines))

    def of(self, group: str) -> Number:
        """Dollars of the lines of one group."""
        return sum(line.dollars for line in self.lines if line.group == group)

    def shares(self) -> list[float]:
        """Of each line, of the mean of the whole: they add up to 1 (all 0 if nothing costs anything)."""
        total = float(np.mean(self.dollars))
        return [float(np.mean(line.dollars)) / total if total else 0.0 for line in self.lines]

    def to_dict(self) -> dict[str, Any]:
        """For machines: every number as [p10, p50, p90]."""
        return {
            'dollars': quantiles(self.dollars),
            'gpu_hours': quantiles(self.gpu_hours),
            'wall_hours': quantiles(self.wall_hours),
            'groups': {group: quantiles(self.of(group)) for group in self.groups},
            'lines': [
                {
                    'group': line.group,
                    'name': line.name,
                    'quantity': quantiles(line.quantity),
                    'unit': line.unit,
                    'price': {'name': line.price.name, 'dollars': line.price.dollars, 'date': line.price.date, 'source': line.price.source},
                    'dollars': quantiles(line.dollars),
                    'share': share,
                    'formula': line.formula,
                }
                for line, share in zip(self.lines, self.shares(), strict=True)
            ],
        }


def checkpoints_kept(num_batches: int, keep: int, keep_every: int | None, num_saves: int) -> int:
    """How many there are in the end: the newest `keep` (-1: all) and the first of every `keep_every` batches, at most the `num_saves` written."""
    for_good = num_batches // keep_every if keep_every else 0
    return num_saves if keep == -1 else min(num_saves, keep + for_good)


def make_bill(job: TrainingJob, assumptions: Assumptions, prices: Prices, price: Price, num_draws: int = NUM_DRAWS, seed: int = 0) -> Bill:
    """Every line of the project.

    Args:
        price: of a training GPU's hour; its name says how it is paid (`plans.plan_for`).

    Raises:
        BillError: the assumptions say nothing of the resolution of a phase.
        PriceError, PlanError: a price is missing, or the run would never end.
    """
    assumed = draw_all(assumptions, num_draws, seed)
    plan = plan_at(price, assumed, prices)
    run = run_of(job, assumed, plan)
    lines = [*_data(job, assumed, prices), *_encoding(job, assumed, prices, price), *_training(job, assumed, run, price)]
    wall_hours = run.wall_hours + run.useful_hours * assumed.work.evaluation_share
    lines += _settlement(lines, plan, wall_hours, job.num_gpus)
    lines += [*_storage(job, assumed, prices), *_network(job, assumed, prices)]
    months = assumed.work.person_months
    lines.append(Line('people', 'people', months, prices[assumed.work.person], f'{spread_text(months)} person-months'))
    return Bill(tuple(lines), wall_hours, plan, job)


def plan_at(price: Price, assumed: Assumptions, prices: Prices) -> Plan:
    """The plan that the price's name means; what goes beyond a reservation is at the on-demand price of the same GPU, if the list has one."""
    gpu = price.name.rpartition('.')[0]
    return plan_for(price, prices.plans(gpu.removeprefix('gpu_hour.')).get('on-demand'), assumed.work.taken_over_share)


def run_of(job: TrainingJob, assumed: Assumptions, plan: Plan) -> Job:
    """The job with what interrupts it; on spot with what takes its machines away, too."""
    faults, parts = assumed.faults, []
    for phase in job.phases:
        between = phase.gpu_hours_between_failures if faults.gpu_hours_between_failures is None else faults.gpu_hours_between_failures
        interrupted = Faults(between, phase.save_interval_sec, faults.save_sec, faults.notice_sec + faults.restart_sec)
        if isinstance(plan, Spot):
            interrupted = with_interruptions(interrupted, faults.gpu_hours_between_interruptions, faults.wait_sec)
        parts.append((phase.useful_hours, interrupted))
    return Job(tuple(parts), job.num_gpus)


def encoder_price(size: Encoding, prices: Prices, price: Price) -> Price:
    """Of a GPU that encodes; `price` is that of one that trains."""
    return price if size.gpu is None else prices[size.gpu]


def size_of(phase: TrainingPhase, assumed: Assumptions) -> Encoding:
    """What is assumed of latents at the resolution of a phase.

    Raises:
        BillError: nothing is assumed of it, or more latents than pictures.
    """
    resolution = str(phase.phase.resolution)
    if resolution not in assumed.encoding:
        known = ', '.join(assumed.encoding)
        raise BillError(
            f'{phase.name}: the assumptions say nothing of latents of {resolution} px, only of {known}; say how many there are and how fast a GPU '
            f"encodes them: --assume 'encoding.{resolution}={{num_images: N, images_per_gpu_sec: N, gpu: null}}'"
        )
    size, pictures = assumed.encoding[resolution], assumed.preparation.num_images
    if np.max(size.num_images) > np.max(pictures):
        raise BillError(
            f'{phase.name}: encoding.{resolution}.num_images is {spread_text(size.num_images)}, more than the {spread_text(pictures)} pictures of '
            f'preparation.num_images; give --assume encoding.{resolution}.num_images=N as well (null: all pictures)'
        )
    return size


def _from_shards(job: TrainingJob) -> list[TrainingPhase]:
    return [phase for phase in job.phases if phase.kind != 'synthetic']


def _latents(job: TrainingJob) -> list[TrainingPhase]:
    """The phases that train on latents, one a resolution: the second reads those of the first."""
    return list({phase.phase.resolution: phase for phase in reversed(job.phases) if phase.kind == 'latents'}.values())[::-1]


def _data(job: TrainingJob, assumed: Assumptions, prices: Prices) -> Iterator[Line]:
    made = assumed.preparation
    if not _from_shards(job):
        return
    downloaded = _num_downloaded(assumed)
    if made.downloaded_share is not None:
        machine_hours = downloaded / made.downloaded_share / made.urls_per_machine_hour
        formula = (
            f'{spread_text(made.num_images)} images / {spread_text(made.kept_share)} kept / {spread_text(made.downloaded_share)} answering '
            f'/ {spread_text(made.urls_per_machine_hour)} URLs a machine-hour'
        )
        yield Line('data', 'download', machine_hours, prices[made.machine], formula)
    formula = f'{spread_text(downloaded)} pictures / {spread_text(made.images_per_machine_hour)} a machine-hour'
    yield Line('data', 'convert to shards', downloaded / made.images_per_machine_hour, prices[made.machine], formula)


def _num_downloaded(assumed: Assumptions) -> Number:
    return assumed.preparation.num_images / assumed.preparation.kept_share


def _encoding(job: TrainingJob, assumed: Assumptions, prices: Prices, price: Price) -> Iterator[Line]:
    for phase in _latents(job):
        size = size_of(phase, assumed)
        formula = f'{spread_text(size.num_images)} images / {spread_text(size.images_per_gpu_sec)} images/s a GPU / 3600'
        yield Line(
            'encoding',
            f'encode {phase.phase.resolution} px',
            hours(size.num_images, size.images_per_gpu_sec),
            encoder_price(size, prices, price),
            formula,
        )


def _training(job: TrainingJob, assumed: Assumptions, run: Job, price: Price) -> Iterator[Line]:
    for phase in job.phases:
        gpus = counted(job.num_gpus, 'GPU')
        formula = (
            f'{phase.phase.num_samples:,} samples / {spread_text(phase.images_per_sec)} images/s ({phase.origin}) / 3600 x {gpus}; '
            f'{spread_text(days(phase.useful_hours), 2)} days'
        )
        yield Line('steps', f'training, {phase.name}', phase.useful_gpu_hours(job.num_gpus), price, formula)
    useful = job.useful_gpu_hours
    lost = gpu_hours(run.paid_hours, job.num_gpus) - useful
    yield Line('training', 'saves, failures and restarts', lost, price, '; '.join(dict.fromkeys(_faults_text(job, part) for _, part in run.parts)))
    share = assumed.work.evaluation_share
    yield Line('training', 'evaluation and samples', useful * share, price, f'{spread_text(share)} x the GPU-hours of training')
    share = assumed.work.experiments_share
    yield Line('experiments', 'experiments and failed runs', useful * share, price, f'{spread_text(share)} x the GPU-hours of training')


def _faults_text(job: TrainingJob, faults: Faults) -> str:
    between_hours = faults.between_sec(job.num_gpus) / SEC_PER_HOUR
    wait = f', {spread_text(faults.wait_sec)} s without machines' if np.any(np.asarray(faults.wait_sec) > 0) else ''
    return (
        f'a failure every {spread_text(between_hours)} h, {spread_text(faults.restart_sec)} s until the next step{wait}; '
        f'{spread_text(faults.save_sec)} s a save every {spread_text(faults.interval_sec)} s: x {spread_text(faults.paid_stretch(job.num_gpus), 4)}'
    )


def _settlement(lines: list[Line], plan: Plan, wall_hours: Number, num_gpus: int) -> Iterator[Line]:
    """What a plan charges beside what the lines count as used at its price."""
    used = sum(line.quantity for line in lines if line.price is plan.price)
    for payment in plan.pay(used, wall_hours, num_gpus)[1:]:
        price = plan.price
        dearer = payment.price is not price
        if dearer:  # the lines have it at the plan's price: the rest is due
            name, source = f'{payment.price.name} less {price.name}', f'{payment.price.source}, less {price.source}'
            price = Price(name, payment.price.dollars - price.dollars, price.unit, payment.price.date, source)
        yield Line('training', payment.what, payment.gpu_hours, price, f'{spread_text(used)} GPU-hours used', is_surcharge=dearer)


def _storage(job: TrainingJob, assumed: Assumptions, prices: Prices) -> Iterator[Line]:
    price, kept, made = prices[assumed.storage.price], assumed.storage, assumed.preparation

    def line(what: str, count: Number, num_bytes: Number, months: Number) -> Line:
        size = f'{spread_text(count)} x {spread_text(num_bytes)} bytes = {spread_text(count * num_bytes / BYTES_PER_TB)} TB'
        return Line('storage', f'storage of {what}', count * num_bytes / BYTES_PER_TB * months, price, f'{size} for {spread_text(months)} months')

    if _from_shards(job):
        if made.downloaded_share is not None:
            yield line('the crawl', _num_downloaded(assumed), made.bytes_per_image, kept.crawl_months)
        yield line('image shards', made.num_images, made.bytes_per_image, kept.image_shard_months)
    for phase in _latents(job):
        yield line(f'latents of {phase.phase.resolution} px', size_of(phase, assumed).num_images, phase.sample_bytes, kept.latent_months)
    for phase in job.phases:
        yield line(f'checkpoints, {phase.name}', phase.num_checkpoints, phase.checkpoint_bytes, kept.checkpoint_months)


def _network(job: TrainingJob, assumed: Assumptions, prices: Prices) -> Iterator[Line]:
    """Shards written and read; what is read crosses from the storage to the GPUs."""
    if not _from_shards(job):
        return
    network, made = assumed.network, assumed.preparation
    image_bytes = made.num_images * made.bytes_per_image
    written = image_bytes + sum(size_of(phase, assumed).num_images * phase.sample_bytes for phase in _latents(job))
    read = image_bytes if _latents(job) else 0.0  # encode reads every image shard once
    for phase in _from_shards(job):  # epochs x unique images are samples
        sample_bytes = phase.sample_bytes if phase.kind == 'latents' else made.bytes_per_image
        read = read + phase.phase.num_samples * sample_bytes * network.downloads_per_epoch
    for name, num_bytes, price in (('PUT', written, prices[network.put]), ('GET', read, prices[network.get])):
        size = f'{spread_text(num_bytes / BYTES_PER_TB)} TB {"written" if name == "PUT" else "read"}'
        formula = f'{size} / {spread_text(network.shard_bytes)} bytes a shard'
        yield Line('network', f'{name} requests', num_bytes / network.shard_bytes / 1000, price, formula)
    times = spread_text(network.downloads_per_epoch)
    formula = f'{spread_text(read / BYTES_PER_TB)} TB read: by encoding once, by training {times} x in each epoch'
    yield Line('network', 'egress', read / BYTES_PER_GB, prices[network.egress], formula)
