"""The whole bill of a project: what each part takes, at which price, and by which formula; and the choices that it leaves open, side by side.

A line is a quantity times a price. Quantities are numbers or arrays of draws; nothing is rounded here. docs/cost.md explains every line.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from diffusion.common.text import counted
from diffusion.contracts.errors import InputError
from diffusion.cost.assumptions import Assumptions, DerivedEncoding, EncodingAssumptions
from diffusion.cost.encoders import PricedEncoder
from diffusion.cost.formulas import BYTES_PER_GB, BYTES_PER_TB, HOURS_PER_DAY, SEC_PER_HOUR, Number, Phase, hours
from diffusion.cost.plans import InterruptedRun, Interruptions, PaymentPlan, PlanError, finish_hours, plan_for
from diffusion.cost.prices import Price, Prices
from diffusion.cost.uncertain import NUM_DRAWS, median, quantiles, spread_text


class BillError(InputError):
    """The assumptions do not say what this project's bill needs."""


@dataclass(frozen=True)
class TrainingPhase:
    """One recipe of the project, as it would run on the job's GPUs."""

    name: str  # the recipe's
    phase: Phase
    images_per_sec: Number  # of all GPUs together
    origin: str  # of that number: measured, published, predicted, assumed
    sample_bytes: Number  # of one sample in its shards
    checkpoint_bytes: float  # infinite: large, and not stored
    num_checkpoints: int  # that are kept in the end (`checkpoints_kept`)
    save_interval_sec: float  # the recipe's checkpoint.every, as time
    gpu_hours_between_failures: float  # the recipe's faults.gpu_hours_between_failures
    kind: str = 'latents'  # the recipe's data.kind: what is read from shards
    encoder: PricedEncoder | None = None  # that encodes its images, beforehand or next to training; None: as the assumptions say
    num_encoders: int = 0  # of the recipe's data.encoders, next to training
    score_hours: Number = 0.0  # wall hours of drawing for the recipe's eval.samples

    @property
    def hours(self) -> Number:
        """Wall hours of the steps alone."""
        return hours(self.phase.num_samples, self.images_per_sec)


@dataclass(frozen=True)
class TrainingJob:
    """All phases, one after another on the same GPUs."""

    phases: tuple[TrainingPhase, ...]
    num_gpus: int

    @property
    def gpu_hours(self) -> Number:
        """GPU-hours of the steps alone."""
        return sum(phase.hours for phase in self.phases) * self.num_gpus

    @property
    def from_shards(self) -> list[TrainingPhase]:
        return [phase for phase in self.phases if phase.kind != 'synthetic']

    @property
    def latents(self) -> list[TrainingPhase]:
        """The phases that train on latents, one per resolution: the second reads those of the first."""
        return list({phase.phase.resolution: phase for phase in reversed(self.phases) if phase.kind == 'latents'}.values())[::-1]


@dataclass(frozen=True)
class BillLine:
    """A quantity of something at a price."""

    group: str  # data, encoding, steps, training, experiments, storage, network or people
    name: str
    quantity: Number
    price: Price
    formula: str  # in words and numbers
    is_surcharge: bool = False  # the difference to another price, on what other lines have already

    @property
    def dollars(self) -> Number:
        return self.quantity * self.price.dollars


@dataclass(frozen=True)
class Bill:
    """The cost of a project, line by line, and the time of its training."""

    lines: tuple[BillLine, ...]
    wall_hours: Number  # of training, with evaluation and all that interrupts it
    plan: PaymentPlan
    job: TrainingJob
    not_counted: tuple[str, ...] = ()  # what is missing, and how to have it counted
    warnings: tuple[str, ...] = ()

    @cached_property
    def dollars(self) -> Number:
        return sum(line.dollars for line in self.lines)

    @property
    def gpu_hours(self) -> Number:
        """All that are paid for, of whatever kind."""
        return sum(line.quantity for line in self.lines if line.price.unit == 'GPU-hour' and not line.is_surcharge)

    @property
    def groups(self) -> tuple[str, ...]:
        """Groups in the order of the lines."""
        return tuple(dict.fromkeys(line.group for line in self.lines))

    def of(self, group: str) -> Number:
        """Dollars of the lines of one group."""
        return sum(line.dollars for line in self.lines if line.group == group)

    def share(self, dollars: Number) -> float:
        """Share of the mean of the total: those of all lines add up to 1 (all 0 if nothing costs anything)."""
        total = float(np.mean(self.dollars))
        return float(np.mean(dollars)) / total if total else 0.0


def make_bill(job: TrainingJob, assumed: Assumptions, prices: Prices, price: Price) -> Bill:
    """Return every line of the project.

    Args:
        assumed: with draws in place of ranges (`draw_all`).
        price: of a training GPU's hour; its name says how it is paid (`plans.plan_for`).

    Raises:
        BillError: more latents are assumed than images.
        PriceError, PlanError: a price is missing, or the run would never end.
    """
    plan = payment_plan(price, assumed, prices)
    run = interrupted_run(job, assumed, plan)
    lines = [*_prepared(job, assumed, prices, price), *_training(job, assumed, run, price)]
    wall_hours = run.wall_hours + run.useful_hours * assumed.work.evaluation_share + sum(phase.score_hours for phase in job.phases)
    lines += _settlement(lines, plan, wall_hours, job.num_gpus)
    lines += _stored(job, assumed, prices)
    months = assumed.work.person_months
    lines.append(BillLine('people', 'people', months, prices[assumed.work.person], f'{spread_text(months)} person-months'))
    return Bill(tuple(lines), wall_hours, plan, job, tuple(_not_counted(job, assumed)), tuple(_saves_too_often(job, run)))


def payment_plan(price: Price, assumed: Assumptions, prices: Prices) -> PaymentPlan:
    """Return the plan of a price; what goes beyond a reservation is at the on-demand price of the same GPU, if the list has one."""
    gpu = price.name.rpartition('.')[0].removeprefix('gpu_hour.')
    return plan_for(price, prices.plans(gpu).get('on-demand'), assumed.work.taken_over_share)


def interrupted_run(job: TrainingJob, assumed: Assumptions, plan: PaymentPlan) -> InterruptedRun:
    """Return the job with its failures; on spot with the machines taken away, too."""
    faults, parts = assumed.faults, []
    for phase in job.phases:
        gpu_hours_between = phase.gpu_hours_between_failures if faults.gpu_hours_between_failures is None else faults.gpu_hours_between_failures
        if plan.is_spot:  # rates of Poisson processes add up
            gpu_hours_between = 1 / (np.divide(1.0, gpu_hours_between) + np.divide(1.0, faults.gpu_hours_between_interruptions))
        between_sec = np.divide(gpu_hours_between, job.num_gpus) * SEC_PER_HOUR
        restart_sec, wait_sec = faults.notice_sec + faults.restart_sec, faults.wait_sec if plan.is_spot else 0.0
        save_sec = faults.save_sec * (1.0 if faults.save_bytes is None else np.minimum(1.0, np.divide(phase.checkpoint_bytes, faults.save_bytes)))
        parts.append((phase.hours, Interruptions(between_sec, phase.save_interval_sec, save_sec, restart_sec, wait_sec)))
    return InterruptedRun(tuple(parts), job.num_gpus)


def latents_at(phase: TrainingPhase, assumed: Assumptions) -> EncodingAssumptions | None:
    """Return what is assumed of latents at the resolution of a phase, None if nothing is; `gpu` is None where the GPU that trains encodes, too.

    Raises:
        BillError: more latents are assumed than images.
    """
    resolution, num_images = str(phase.phase.resolution), assumed.preparation.num_images
    size = assumed.encoding.get(resolution)
    if size is None:
        return None
    if np.max(size.num_images) > np.max(num_images):
        raise BillError(
            f'{phase.name}: encoding.{resolution}.num_images is {spread_text(size.num_images)}, more than the {spread_text(num_images)} images of '
            f'preparation.num_images; give --assume encoding.{resolution}.num_images=N as well (null: all images)'
        )
    return size


def _counts_images(job: TrainingJob, assumed: Assumptions) -> bool:
    """Whether the number of images is that of the job: not where it trains on latents alone of which nobody knows how many there are."""
    return any(phase.kind == 'images' or latents_at(phase, assumed) is not None for phase in job.from_shards)


def _not_counted(job: TrainingJob, assumed: Assumptions) -> Iterator[str]:
    for phase in job.latents:
        if latents_at(phase, assumed) is None:
            what = 'encoding and storage of its latents' if _counts_images(job, assumed) else 'its images, their encoding and their storage'
            yield (
                f'{phase.name}: {what}, for nothing is assumed of how many there are of {phase.phase.resolution} px (only of '
                f'{", ".join(assumed.encoding)}); say it with --assume preparation.num_images=N'
            )


def _saves_too_often(job: TrainingJob, run: InterruptedRun) -> Iterator[str]:
    for phase, (_, part) in zip(job.phases, run.parts, strict=True):
        save_sec, interval_sec = median(part.save_sec), median(part.interval_sec)
        if save_sec > interval_sec:
            yield (
                f'{phase.name}: a save takes {save_sec:,.2g} s, longer than the {interval_sec:,.2g} s of steps between two ({phase.origin} '
                'images/s): save less often (checkpoint.every), or assume a shorter one (--assume faults.save_sec=SECONDS)'
            )


def _prepared(job: TrainingJob, assumed: Assumptions, prices: Prices, price: Price) -> Iterator[BillLine]:
    """Lines of images that become shards, and latents."""
    if not _counts_images(job, assumed):
        return
    made = assumed.preparation
    machine, downloaded = prices[made.machine], made.num_images / made.kept_share
    if made.downloaded_share is not None:
        formula = (
            f'{spread_text(made.num_images)} images / {spread_text(made.kept_share)} kept / {spread_text(made.downloaded_share)} answering '
            f'/ {spread_text(made.urls_per_machine_hour)} URLs a machine-hour'
        )
        yield BillLine('data', 'download', downloaded / made.downloaded_share / made.urls_per_machine_hour, machine, formula)
    formula = f'{spread_text(downloaded)} images / {spread_text(made.images_per_machine_hour)} a machine-hour'
    yield BillLine('data', 'convert to shards', downloaded / made.images_per_machine_hour, machine, formula)
    for phase in job.latents:
        size = latents_at(phase, assumed)
        if size is None:
            continue
        rate, how = size.images_per_gpu_sec, ''
        if phase.encoder is not None and phase.encoder.rate is not None:
            rate, how = phase.encoder.rate.images_per_sec, f' ({phase.encoder.rate.how})'
            if isinstance(size, DerivedEncoding) and phase.encoder.rate.how == 'assumed':
                how = f' (derived: {phase.encoder.rate.source})'
        formula = f'{spread_text(size.num_images)} images / {spread_text(rate)} images/s a GPU{how} / 3600'
        encoder = price if size.gpu is None else prices[size.gpu]
        yield BillLine('encoding', f'encode {phase.phase.resolution} px', hours(size.num_images, rate), encoder, formula)


def _training(job: TrainingJob, assumed: Assumptions, run: InterruptedRun, price: Price) -> Iterator[BillLine]:
    for phase in job.phases:
        formula = (
            f'{phase.phase.num_samples:,} samples / {spread_text(phase.images_per_sec)} images/s ({phase.origin}) / 3600 x '
            f'{counted(job.num_gpus, "GPU")}; {spread_text(phase.hours / HOURS_PER_DAY, 2)} days'
        )
        yield BillLine('steps', f'training, {phase.name}', phase.hours * job.num_gpus, price, formula)
    yield from _online_encoders(job, assumed, run)
    formula = '; '.join(dict.fromkeys(_interruptions_text(part) for _, part in run.parts))
    yield BillLine('training', 'saves, failures and restarts', run.paid_hours * job.num_gpus - job.gpu_hours, price, formula)
    for phase in job.phases:
        if np.any(phase.score_hours):
            formula = f'{spread_text(phase.score_hours)} hours of drawing (eval.samples) x {counted(job.num_gpus, "GPU")}'
            yield BillLine('training', f'scores of drawn images, {phase.name}', phase.score_hours * job.num_gpus, price, formula)
    for group, name, share in (
        ('training', 'evaluation and samples', assumed.work.evaluation_share),
        ('experiments', 'experiments and failed runs', assumed.work.experiments_share),
    ):
        yield BillLine(group, name, job.gpu_hours * share, price, f'{spread_text(share)} x the GPU-hours of training')


def _online_encoders(job: TrainingJob, assumed: Assumptions, run: InterruptedRun) -> Iterator[BillLine]:
    """Lines of encoders next to training: they wait with it through failures and evaluations, and are paid for all of its time."""
    for phase, (useful_hours, interruptions) in zip(job.phases, run.parts, strict=True):
        encoder = phase.encoder
        if phase.num_encoders and encoder is not None and encoder.price is not None:
            wall_hours = useful_hours * (interruptions.paid_stretch + assumed.work.evaluation_share) + phase.score_hours
            each = f' x {encoder.units:g}' if encoder.units != 1 else ''
            formula = f'{spread_text(wall_hours)} hours of training, saves, restarts and evaluation x {counted(phase.num_encoders, "encoder")}{each}'
            yield BillLine('encoding', f'encoders, {phase.name}', wall_hours * phase.num_encoders * encoder.units, encoder.price, formula)


def _interruptions_text(part: Interruptions) -> str:
    wait = f', {spread_text(part.wait_sec)} s without machines' if np.any(np.asarray(part.wait_sec) > 0) else ''
    return (
        f'a failure every {spread_text(part.between_sec / SEC_PER_HOUR)} h, {spread_text(part.restart_sec)} s until the next step{wait}; '
        f'{spread_text(part.save_sec)} s a save every {spread_text(part.interval_sec)} s: '
        f'{spread_text(100 * (part.paid_stretch - 1))} % on top'
    )


def _settlement(lines: list[BillLine], plan: PaymentPlan, wall_hours: Number, num_gpus: int) -> Iterator[BillLine]:
    """Lines of a plan's charges beyond what the other lines count as used at its price."""
    used = sum(line.quantity for line in lines if line.price is plan.price)
    for what, gpu_hours, price in plan.pay(used, wall_hours, num_gpus)[1:]:
        is_dearer = price is not plan.price
        if is_dearer:  # the lines have it at the plan's price: the rest is due
            name, source = f'{price.name} less {plan.price.name}', f'{price.source}, less {plan.price.source}'
            price = Price(name, price.dollars - plan.price.dollars, price.unit, price.date, source)
        yield BillLine('training', what, gpu_hours, price, f'{spread_text(used)} GPU-hours used', is_surcharge=is_dearer)


def _stored(job: TrainingJob, assumed: Assumptions, prices: Prices) -> Iterator[BillLine]:
    """Lines of what is kept, and of shards written and read; what is read crosses from the storage to the GPUs."""
    kept, made, network = assumed.storage, assumed.preparation, assumed.network
    image_bytes = made.num_images * made.bytes_per_image if _counts_images(job, assumed) else 0.0
    written, read = image_bytes, image_bytes if job.latents else 0.0  # encode reads every image shard once

    def line(what: str, count: Number, num_bytes: Number, months: Number) -> BillLine:
        size = f'{spread_text(count)} x {spread_text(num_bytes)} bytes = {spread_text(count * num_bytes / BYTES_PER_TB)} TB'
        quantity = count * num_bytes / BYTES_PER_TB * months
        return BillLine('storage', f'store {what}', quantity, prices[kept.price], f'{size} for {spread_text(months)} months')

    if _counts_images(job, assumed):
        if made.downloaded_share is not None:
            yield line('the crawl', made.num_images / made.kept_share, made.bytes_per_image, kept.crawl_months)
        yield line('image shards', made.num_images, made.bytes_per_image, kept.image_shard_months)
    for phase in job.latents:
        if (size := latents_at(phase, assumed)) is not None:
            written = written + size.num_images * phase.sample_bytes
            yield line(f'latents of {phase.phase.resolution} px', size.num_images, phase.sample_bytes, kept.latent_months)
    for phase in job.phases:
        yield line(f'checkpoints, {phase.name}', phase.num_checkpoints, phase.checkpoint_bytes, kept.checkpoint_months)
    for phase in job.from_shards:  # epochs x unique images are samples
        read = read + phase.phase.num_samples * phase.sample_bytes * network.downloads_per_epoch
    if not job.from_shards:
        return
    for name, verb, num_bytes, price in (('PUT', 'written', written, prices[network.put]), ('GET', 'read', read, prices[network.get])):
        formula = f'{spread_text(num_bytes / BYTES_PER_TB)} TB {verb} / {spread_text(network.shard_bytes)} bytes a shard'
        yield BillLine('network', f'{name} requests', num_bytes / network.shard_bytes / 1000, price, formula)
    times = spread_text(network.downloads_per_epoch)
    formula = f'{spread_text(read / BYTES_PER_TB)} TB read: by encoding once, by training {times} x in each epoch'
    yield BillLine('network', 'egress', read / BYTES_PER_GB, prices[network.egress], formula)


def bill_json(bill: Bill) -> dict[str, Any]:
    lines = [
        asdict(line)
        | {'quantity': quantiles(line.quantity), 'unit': line.price.unit, 'dollars': quantiles(line.dollars), 'share': bill.share(line.dollars)}
        for line in bill.lines
    ]
    totals = {'dollars': quantiles(bill.dollars), 'gpu_hours': quantiles(bill.gpu_hours), 'wall_hours': quantiles(bill.wall_hours)}
    return {**totals, 'groups': {group: quantiles(bill.of(group)) for group in bill.groups}, 'lines': lines}


@dataclass(frozen=True)
class PlanOutcome:
    """The training alone, steps and what interrupts them, at one price."""

    price: Price
    wall_hours: Number = 0.0
    dollars: Number = 0.0
    probability_by_deadline: float | None = None  # of ending by the deadline, if there is one
    problem: str = ''  # why there are no numbers
    reserved_hours: Number | None = None  # of a reservation for a fixed time


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
