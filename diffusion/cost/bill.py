"""The whole bill of a project: what each part takes, at which price, and by which formula; and the ways to pay for its training, side by side.

A row is a quantity times a price. Quantities are numbers or arrays of draws; nothing is rounded here. docs/cost.md explains every row.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from diffusion.common.text import counted
from diffusion.contracts.errors import InputError
from diffusion.cost.assumptions import Assumptions, DerivedEncoding, EncodingAssumptions
from diffusion.cost.encoders import PricedEncoder
from diffusion.cost.formulas import BYTES_PER_GB, BYTES_PER_TB, HOURS_PER_DAY, HOURS_PER_YEAR, SEC_PER_HOUR, Number, Phase, hours, median, spread_text
from diffusion.cost.prices import CostRow, Price, Prices

LARGEST_STRETCH = 100  # wall time over that of steps and saves: more is no plan


class BillError(InputError):
    """The assumptions do not say what this project's bill needs."""


class PlanError(InputError):
    """A run that cannot come to an end, or a way to pay that lacks a price."""


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


def payment_plan(price: Price, prices: Prices, taken_over_share: Number = 0.0) -> PaymentPlan:
    """Return the plan that a price's name means: `reserved-1y` a year, `capacity-block` whole days, `spot...` spot, anything else on demand.

    Raises:
        PlanError: the name of a reservation tells no time, or the list has no on-demand price of the same thing for what goes beyond it.
    """
    offer = price.offer
    if offer.startswith('capacity-block'):  # nothing goes beyond it
        return PaymentPlan(price, price, None, taken_over_share)
    if not offer.startswith('reserved'):
        return PaymentPlan(price, is_spot=offer.startswith('spot'))
    years = offer.removeprefix('reserved-').removesuffix('y')
    if not (years.isdigit() and int(years) > 0):
        raise PlanError(f'{price.name}: for how long? name it reserved-1y, reserved-3y ..., or capacity-block for whole days')
    name = f'{price.name.removesuffix(offer)}on-demand'
    if name not in prices:
        raise PlanError(f'{price.name}: at which price goes what is beyond the reservation? add {name} to the list (--price {name}=DOLLARS)')
    return PaymentPlan(price, prices[name], int(years) * HOURS_PER_YEAR, taken_over_share)


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

    def counts_images(self, assumed: Assumptions) -> bool:
        """Whether the number of images is known: not where it trains on latents alone of which nobody knows how many there are."""
        return any(phase.kind == 'images' or latents_at(phase, assumed) is not None for phase in self.from_shards)


@dataclass(frozen=True)
class Bill:
    """The cost of a project, row by row, and the time of its training."""

    rows: tuple[CostRow, ...]
    wall_hours: Number  # of training, with evaluation and all that interrupts it
    price: Price  # of a training GPU's hour
    not_counted: tuple[str, ...] = ()  # what is missing, and how to have it counted
    warnings: tuple[str, ...] = ()

    @cached_property
    def dollars(self) -> Number:
        return sum(row.dollars for row in self.rows)

    @property
    def gpu_hours(self) -> Number:
        """All that are paid for, of whatever kind."""
        return sum(row.quantity for row in self.rows if row.unit == 'GPU-hour' and not row.is_surcharge)

    @property
    def groups(self) -> tuple[str, ...]:
        """Groups in the order of the rows."""
        return tuple(dict.fromkeys(row.group for row in self.rows))

    def of(self, group: str) -> Number:
        """Dollars of the rows of one group."""
        return sum(row.dollars for row in self.rows if row.group == group)

    def share(self, dollars: Number) -> float:
        """Share of the mean of the total: those of all rows add up to 1 (all 0 if nothing costs anything)."""
        total = float(np.mean(self.dollars))
        return float(np.mean(dollars)) / total if total else 0.0


def make_bill(job: TrainingJob, assumed: Assumptions, prices: Prices, price: Price) -> Bill:
    """Return every row of the project at the price of a training GPU's hour, whose name says how it is paid (`interruptions.payment_plan`).

    Raises:
        BillError, PriceError, PlanError: more latents are assumed than images, a price is missing, or the run would never end.
    """
    plan = payment_plan(price, prices, assumed.work.taken_over_share)
    run = interrupted_run(job, assumed, plan)
    rows = [*_prepared(job, assumed, prices, price), *_training(job, assumed, run, price)]
    wall_hours = run.wall_hours + run.useful_hours * assumed.work.evaluation_share + sum(phase.score_hours for phase in job.phases)
    used = sum(row.quantity for row in rows if row.price is price)
    for what, gpu_hours, at in plan.pay(used, wall_hours, job.num_gpus)[1:]:  # what the plan charges beyond what the rows count as used at its price
        is_dearer = at is not price
        if is_dearer:  # the rows have it at the plan's price: the rest is due
            name, source = f'{at.name} less {price.name}', f'{at.source}, less {price.source}'
            at = Price(name, at.dollars - price.dollars, at.unit, at.date, source)
        rows.append(_row('training', what, gpu_hours, at, f'{spread_text(used)} GPU-hours used', is_surcharge=is_dearer))
    rows += _stored(job, assumed, prices)
    months = assumed.work.person_months
    rows.append(_row('people', 'people', months, prices[assumed.work.person], f'{spread_text(months)} person-months'))
    not_counted, warnings = list[str](), list[str]()
    for phase in job.latents:
        if latents_at(phase, assumed) is None:
            what = 'encoding and storage of its latents' if job.counts_images(assumed) else 'its images, their encoding and their storage'
            not_counted.append(
                f'{phase.name}: {what}, for nothing is assumed of how many there are of {phase.phase.resolution} px (only of '
                f'{", ".join(assumed.encoding)}); say it with --assume preparation.num_images=N'
            )
    for phase, (_, part) in zip(job.phases, run.parts, strict=True):
        save_sec, interval_sec = median(part.save_sec), median(part.interval_sec)
        if save_sec > interval_sec:
            warnings.append(
                f'{phase.name}: a save takes {save_sec:,.2g} s, longer than the {interval_sec:,.2g} s of steps between two ({phase.origin} '
                'images/s): save less often (checkpoint.every), or assume a shorter one (--assume faults.save_sec=SECONDS)'
            )
    return Bill(tuple(rows), wall_hours, price, tuple(not_counted), tuple(warnings))


def _row(group: str, what: str, quantity: Number, price: Price, formula: str, kind: str = 'assumed', is_surcharge: bool = False) -> CostRow:
    return CostRow(group, what, quantity, price.unit, price, formula, kind=kind, is_surcharge=is_surcharge)


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
    """Return what is assumed of latents at the resolution of a phase, None if nothing is; BillError if they are more than there are images."""
    resolution, num_images = str(phase.phase.resolution), assumed.preparation.num_images
    size = assumed.encoding.get(resolution)
    if size is not None and np.max(size.num_images) > np.max(num_images):
        raise BillError(
            f'{phase.name}: encoding.{resolution}.num_images is {spread_text(size.num_images)}, more than the {spread_text(num_images)} images of '
            f'preparation.num_images; give --assume encoding.{resolution}.num_images=N as well (null: all images)'
        )
    return size


def _prepared(job: TrainingJob, assumed: Assumptions, prices: Prices, price: Price) -> Iterator[CostRow]:
    """Yield rows of images that become shards, and latents."""
    if not job.counts_images(assumed):
        return
    made = assumed.preparation
    machine, downloaded = prices[made.machine], made.num_images / made.kept_share
    if made.downloaded_share is not None:
        formula = (
            f'{spread_text(made.num_images)} images / {spread_text(made.kept_share)} kept / {spread_text(made.downloaded_share)} answering '
            f'/ {spread_text(made.urls_per_machine_hour)} URLs a machine-hour'
        )
        yield _row('data', 'download', downloaded / made.downloaded_share / made.urls_per_machine_hour, machine, formula)
    formula = f'{spread_text(downloaded)} images / {spread_text(made.images_per_machine_hour)} a machine-hour'
    yield _row('data', 'convert to shards', downloaded / made.images_per_machine_hour, machine, formula)
    for phase in job.latents:
        size = latents_at(phase, assumed)
        if size is None:
            continue
        rate, how, kind = size.images_per_gpu_sec, '', 'assumed'
        if phase.encoder is not None and phase.encoder.rate is not None:
            rate, kind = phase.encoder.rate.images_per_sec, phase.encoder.rate.how
            how = f' (derived: {phase.encoder.rate.note})' if isinstance(size, DerivedEncoding) and kind == 'assumed' else f' ({kind})'
        formula = f'{spread_text(size.num_images)} images / {spread_text(rate)} images/s a GPU{how} / 3600'
        encoder = price if size.gpu is None else prices[size.gpu]
        yield _row('encoding', f'encode {phase.phase.resolution} px', hours(size.num_images, rate), encoder, formula, kind)


def _training(job: TrainingJob, assumed: Assumptions, run: InterruptedRun, price: Price) -> Iterator[CostRow]:
    num_gpus, gpus, work = job.num_gpus, counted(job.num_gpus, 'GPU'), assumed.work
    for phase in job.phases:
        formula = (
            f'{phase.phase.num_samples:,} samples / {spread_text(phase.images_per_sec)} images/s ({phase.origin}) / 3600 x '
            f'{gpus}; {spread_text(phase.hours / HOURS_PER_DAY, 2)} days'
        )
        yield _row('steps', f'training, {phase.name}', phase.hours * num_gpus, price, formula, phase.origin)
    for phase, (useful_hours, interruptions) in zip(job.phases, run.parts, strict=True):
        encoder = phase.encoder
        if phase.num_encoders and encoder is not None and encoder.price is not None:  # next to training they wait with it, and are paid for
            wall_hours = useful_hours * (interruptions.paid_stretch + work.evaluation_share) + phase.score_hours
            each = f' x {encoder.units:g}' if encoder.units != 1 else ''
            formula = f'{spread_text(wall_hours)} hours of training, saves, restarts and evaluation x {counted(phase.num_encoders, "encoder")}{each}'
            yield _row('encoding', f'encoders, {phase.name}', wall_hours * phase.num_encoders * encoder.units, encoder.price, formula)
    formulas = list[str]()
    for _, part in run.parts:
        wait = f', {spread_text(part.wait_sec)} s without machines' if np.any(np.asarray(part.wait_sec) > 0) else ''
        formulas.append(
            f'a failure every {spread_text(part.between_sec / SEC_PER_HOUR)} h, {spread_text(part.restart_sec)} s until the next step{wait}; '
            f'{spread_text(part.save_sec)} s a save every {spread_text(part.interval_sec)} s: '
            f'{spread_text(100 * (part.paid_stretch - 1))} % on top'
        )
    lost = run.paid_hours * num_gpus - job.gpu_hours
    yield _row('training', 'saves, failures and restarts', lost, price, '; '.join(dict.fromkeys(formulas)))
    for phase in job.phases:
        if np.any(phase.score_hours):
            formula = f'{spread_text(phase.score_hours)} hours of drawing (eval.samples) x {gpus}'
            yield _row('training', f'scores of drawn images, {phase.name}', phase.score_hours * num_gpus, price, formula)
    for group, what, share in (
        ('training', 'evaluation and samples', work.evaluation_share),
        ('experiments', 'experiments and failed runs', work.experiments_share),
    ):
        yield _row(group, what, job.gpu_hours * share, price, f'{spread_text(share)} x the GPU-hours of training')


def _stored(job: TrainingJob, assumed: Assumptions, prices: Prices) -> Iterator[CostRow]:
    """Yield rows of what is kept, and of shards written and read; what is read crosses from the storage to the GPUs."""
    kept, made, network, counts_images = assumed.storage, assumed.preparation, assumed.network, job.counts_images(assumed)
    image_bytes = made.num_images * made.bytes_per_image if counts_images else 0.0
    written, read = image_bytes, image_bytes if job.latents else 0.0  # encode reads every image shard once

    def stored(what: str, count: Number, num_bytes: Number, months: Number) -> CostRow:
        size = f'{spread_text(count)} x {spread_text(num_bytes)} bytes = {spread_text(count * num_bytes / BYTES_PER_TB)} TB'
        quantity = count * num_bytes / BYTES_PER_TB * months
        return _row('storage', f'store {what}', quantity, prices[kept.price], f'{size} for {spread_text(months)} months')

    if counts_images:
        if made.downloaded_share is not None:
            yield stored('the crawl', made.num_images / made.kept_share, made.bytes_per_image, kept.crawl_months)
        yield stored('image shards', made.num_images, made.bytes_per_image, kept.image_shard_months)
    for phase in job.latents:
        if (size := latents_at(phase, assumed)) is not None:
            written = written + size.num_images * phase.sample_bytes
            yield stored(f'latents of {phase.phase.resolution} px', size.num_images, phase.sample_bytes, kept.latent_months)
    for phase in job.phases:
        yield stored(f'checkpoints, {phase.name}', phase.num_checkpoints, phase.checkpoint_bytes, kept.checkpoint_months)
    for phase in job.from_shards:  # epochs x unique images are samples
        read = read + phase.phase.num_samples * phase.sample_bytes * network.downloads_per_epoch
    if not job.from_shards:
        return
    for name, verb, num_bytes, price in (('PUT', 'written', written, prices[network.put]), ('GET', 'read', read, prices[network.get])):
        formula = f'{spread_text(num_bytes / BYTES_PER_TB)} TB {verb} / {spread_text(network.shard_bytes)} bytes a shard'
        yield _row('network', f'{name} requests', num_bytes / network.shard_bytes / 1000, price, formula)
    times = spread_text(network.downloads_per_epoch)
    formula = f'{spread_text(read / BYTES_PER_TB)} TB read: by encoding once, by training {times} x in each epoch'
    yield _row('network', 'egress', read / BYTES_PER_GB, prices[network.egress], formula)


def ways_to_pay(job: TrainingJob, assumed: Assumptions, prices: Prices, offers: Iterable[Price]) -> list[CostRow]:
    """Return wall hours and dollars of the training alone, steps and what interrupts them, a row per offer such as those of `prices.plans(gpu)`.

    An offer at which the run would never end has no hours, and a reason; a reservation that is longer than the run says so: most of its price is
    not for this run.
    """
    rows = []
    for price in offers:
        try:
            plan = payment_plan(price, prices, assumed.work.taken_over_share)
            run = interrupted_run(job, assumed, plan)
            wall_hours, reserved_hours, note = run.wall_hours, plan.reserved_hours, ''
            if reserved_hours is not None and median(wall_hours) < reserved_hours:
                days = spread_text(wall_hours / HOURS_PER_DAY, 2)
                reserved = f'reserved for {reserved_hours / HOURS_PER_DAY:,.0f} days, and the run takes {days}'
                note = f'{reserved}: the dollars are those of the whole reservation'
            rows.append(CostRow('ways to pay', price.name, wall_hours, 'hours', price, note, kind='assumed', fixed_dollars=plan.dollars(run)))
        except PlanError as error:
            rows.append(CostRow('ways to pay', price.name, None, 'hours', price, str(error)))
    return rows
