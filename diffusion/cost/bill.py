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
from diffusion.cost.formulas import (
    BYTES_PER_GB,
    BYTES_PER_TB,
    HOURS_PER_DAY,
    HOURS_PER_YEAR,
    SEC_PER_HOUR,
    Number,
    Phase,
    hours,
    in_words,
    median,
    spread_text,
)
from diffusion.cost.prices import CostRow, Price, Prices, priced

LARGEST_STRETCH = 100  # wall time over that of steps and saves: more is no plan


class PlanError(InputError):
    """A run that cannot come to an end, a way to pay that lacks a price, or assumptions that contradict each other."""


@dataclass(frozen=True)
class InterruptedWork:
    """Hours of useful work of some GPUs, and rate and cost of the failures meanwhile. All may be arrays of draws."""

    hours: Number
    between_sec: Number  # between two failures of any of the GPUs
    interval_sec: Number  # work between two saves
    save_sec: Number  # training stands still
    restart_sec: Number  # from the failure to the first step, machines paid for: notice, start, load, compile
    wait_sec: Number = 0.0  # before that, without machines and not paid for: until a spot market has capacity again

    @property
    def paid_stretch(self) -> Number:
        """Expected hours paid for over useful hours, exactly: M e^(R / M) (e^((tau + C) / M) - 1) / tau, if failures are exponential.

        The complete model of J. T. Daly, Future Generation Computer Systems 22(3), 2006; `overhead` is its first order, 1 + C / tau its limit
        without failures. Restarts and saves can fail too. Infinite where no interval is ever survived. tau: interval_sec; C: save_sec;
        M: between_sec, infinite is never; R: restart_sec.
        """
        segment_sec, per_sec = np.add(self.interval_sec, self.save_sec), np.divide(1.0, self.between_sec)
        with np.errstate(over='ignore'):
            failures = np.asarray(segment_sec * per_sec, dtype=float)
            growth = np.where(failures == 0, 1.0, np.expm1(failures) / np.where(failures == 0, 1.0, failures))  # (e^x - 1) / x, 1 at 0
            return segment_sec * growth * np.exp(self.restart_sec * per_sec) / self.interval_sec

    @property
    def wall_stretch(self) -> Number:
        """Expected wall hours over useful hours: one failure comes every between_sec of the time with machines (Wald's identity)."""
        return self.paid_stretch * (1 + self.wait_sec / self.between_sec)


def expected_hours(parts: Sequence[InterruptedWork], num_gpus: int) -> tuple[Number, Number]:
    """Return expected hours with machines, which are paid for, and wall hours of parts one after another; PlanError if they would never end."""
    paid, wall = (sum(part.hours * getattr(part, stretch) for part in parts) for stretch in ('paid_stretch', 'wall_stretch'))
    times = np.median(np.divide(wall, sum(part.hours * (1 + np.divide(part.save_sec, part.interval_sec)) for part in parts)))
    if not (np.all(np.isfinite(wall)) and times <= LARGEST_STRETCH):
        worst = max(parts, key=lambda part: np.median(part.wall_stretch))
        between, every, save = (np.median(sec) for sec in (worst.between_sec, worst.interval_sec, worst.save_sec))
        remedy = 'save more often (checkpoint.every) or use fewer GPUs'
        if save > every:
            remedy = f'a save takes {save:,.3g} s: save less often (checkpoint.every), or assume a shorter one (--assume faults.save_sec=SECONDS)'
        raise PlanError(
            f'{counted(num_gpus, "GPU")}, a failure every {between:,.0f} s, a save every {every:,.3g} s: {times:,.3g} times the hours '
            f'of steps and saves: such a run never ends; {remedy}'
        )
    return paid, wall


def reserved(price: Price, prices: Prices) -> tuple[float | None, Price] | None:
    """Return the hours for which a price's name reserves GPUs, and the price of what goes beyond; None if only what is used is paid.

    `reserved-1y` is a year and on demand beyond it, `capacity-block` as many whole days as are used (None). PlanError: the name tells no time, or
    the on-demand price is missing.
    """
    offer = price.offer
    if offer.startswith('capacity-block'):  # nothing goes beyond it
        return None, price
    if not offer.startswith('reserved'):
        return None
    years = offer.removeprefix('reserved-').removesuffix('y')
    if not (years.isdigit() and int(years) > 0):
        raise PlanError(f'{price.name}: for how long? name it reserved-1y, reserved-3y ..., or capacity-block for whole days')
    name = f'{price.name.removesuffix(offer)}on-demand'
    if name not in prices:
        raise PlanError(f'{price.name}: at which price goes what is beyond the reservation? add {name} to the list (--price {name}=DOLLARS)')
    return int(years) * HOURS_PER_YEAR, prices[name]


def payments(
    reservation: tuple[float | None, Price] | None, price: Price, used: Number, wall_hours: Number, num_gpus: int, taken_over_share: Number = 0.0
) -> list[tuple[str, Number, Price]]:
    """Return (what, GPU-hours, price) of every payment for GPU-hours that are `used` within some wall hours.

    Args:
        reservation: `reserved`; what it leaves unused is paid too, but for the share that others take over and pay.
    """
    if reservation is None:
        return [('used', used, price)]
    reserved_hours, beyond_price = reservation
    needed = np.maximum(wall_hours, np.divide(used, num_gpus))
    paid = (np.ceil(needed / HOURS_PER_DAY) * HOURS_PER_DAY if reserved_hours is None else reserved_hours) * num_gpus
    beyond = np.maximum(0.0, used - paid)
    return [
        ('used', used - beyond, price),
        ('reserved, not used', np.maximum(0.0, paid - used) * (1 - taken_over_share), price),
        ('beyond the reservation', beyond, beyond_price),
    ]


@dataclass(frozen=True)
class TrainingPhase:
    """One recipe of the project, as it would run on the job's GPUs."""

    name: str  # the recipe's
    phase: Phase
    images_per_sec: Number  # of all GPUs together
    origin: str  # of that number: measured, published, predicted, assumed
    sample_bytes: Number  # of one sample in its shards
    checkpoint_bytes: float
    num_checkpoints: int  # that are kept in the end (`checkpoints_kept`)
    save_interval_sec: float  # the recipe's checkpoint.every, as time
    gpu_hours_between_failures: float  # the recipe's faults.gpu_hours_between_failures
    kind: str = 'latents'  # the recipe's data.kind: what is read from shards
    encoder: PricedEncoder | None = None  # next to training
    num_encoders: int = 0  # of the recipe's data.encoders
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

    def interrupted(self, assumed: Assumptions, price: Price) -> list[InterruptedWork]:
        """Return the steps of each phase with their failures; at a spot price with the machines taken away, too."""
        faults, is_spot, parts = assumed.faults, price.offer.startswith('spot'), []
        for phase in self.phases:
            gpu_hours_between = phase.gpu_hours_between_failures if faults.gpu_hours_between_failures is None else faults.gpu_hours_between_failures
            if is_spot:  # rates of Poisson processes add up
                gpu_hours_between = 1 / (np.divide(1.0, gpu_hours_between) + np.divide(1.0, faults.gpu_hours_between_interruptions))
            between_sec, restart_sec = np.divide(gpu_hours_between, self.num_gpus) * SEC_PER_HOUR, faults.notice_sec + faults.restart_sec
            share = 1.0 if faults.save_bytes is None else np.minimum(1.0, np.divide(phase.checkpoint_bytes, faults.save_bytes))
            wait_sec = faults.wait_sec if is_spot else 0.0
            parts.append(InterruptedWork(phase.hours, between_sec, phase.save_interval_sec, faults.save_sec * share, restart_sec, wait_sec))
        return parts


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
    """Return every row of the project at the price of a training GPU's hour, whose name says how it is paid (`reserved`).

    Raises:
        PriceError, PlanError: a price is missing, more latents are assumed than images, or the run would never end.
    """
    latents, parts, reservation = _latents(job, assumed), job.interrupted(assumed, price), reserved(price, prices)
    is_counted = any(phase.kind == 'images' for phase in job.phases) or any(size is not None for _, size in latents)  # how many images there are
    paid_hours, wall_hours = expected_hours(parts, job.num_gpus)
    wall_hours = wall_hours + sum(part.hours for part in parts) * assumed.work.evaluation_share + sum(phase.score_hours for phase in job.phases)
    rows = [*(_prepared(latents, assumed, prices, price) if is_counted else []), *_training(job, parts, paid_hours, assumed, price)]
    used = sum(row.quantity for row in rows if row.price is price)
    due = payments(reservation, price, used, wall_hours, job.num_gpus, assumed.work.taken_over_share)
    for what, gpu_hours, at in due[1:]:  # beyond what the rows count as used at its price
        is_dearer = at is not price
        if is_dearer:  # the rows have it at the price itself: the rest is due
            at = Price(f'{at.name} less {price.name}', at.dollars - price.dollars, at.unit, at.date, f'{at.source}, less {price.source}')
        rows.append(priced('training', what, gpu_hours, at, f'{spread_text(used)} GPU-hours used', is_surcharge=is_dearer))
    months = assumed.work.person_months
    rows += _stored(job, latents, is_counted, assumed, prices)
    rows.append(priced('people', 'people', months, prices[assumed.work.person], f'{spread_text(months)} person-months'))
    what = 'encoding and storage of its latents' if is_counted else 'its images, their encoding and their storage'
    not_counted = [
        f'{phase.name}: {what}, for nothing is assumed of how many there are of {phase.phase.resolution} px (only of '
        f'{", ".join(assumed.encoding)}); say it with --assume preparation.num_images=N'
        for phase, size in latents
        if size is None
    ]
    warnings = [
        f'{phase.name}: a save takes {median(part.save_sec):,.2g} s, longer than the {median(part.interval_sec):,.2g} s of steps between two '
        f'({phase.origin} images/s): save less often (checkpoint.every), or assume a shorter one (--assume faults.save_sec=SECONDS)'
        for phase, part in zip(job.phases, parts, strict=True)
        if median(part.save_sec) > median(part.interval_sec)
    ]
    return Bill(tuple(rows), wall_hours, price, tuple(not_counted), tuple(warnings))


def _latents(job: TrainingJob, assumed: Assumptions) -> list[tuple[TrainingPhase, EncodingAssumptions | None]]:
    """Return the phases that train on latents, one per resolution as the second reads those of the first, and what is assumed of these, if anything.

    Raises PlanError: they are more than there are images.
    """
    found = {}
    for phase in job.phases:
        resolution, num_images = str(phase.phase.resolution), assumed.preparation.num_images
        if phase.kind != 'latents' or resolution in found:
            continue
        size = assumed.encoding.get(resolution)
        if size is not None and np.max(size.num_images) > np.max(num_images):
            raise PlanError(
                f'{phase.name}: encoding.{resolution}.num_images is {spread_text(size.num_images)}, more than the {spread_text(num_images)} images '
                f'of preparation.num_images; give --assume encoding.{resolution}.num_images=N as well (null: all images)'
            )
        found[resolution] = phase, size
    return list(found.values())


def _prepared(
    latents: Sequence[tuple[TrainingPhase, EncodingAssumptions | None]], assumed: Assumptions, prices: Prices, price: Price
) -> Iterator[CostRow]:
    """Yield rows of images that become shards, and latents."""
    made = assumed.preparation
    machine, downloaded = prices[made.machine], made.num_images / made.kept_share
    if made.downloaded_share is not None:
        factors = made.num_images, made.kept_share, made.downloaded_share, made.urls_per_machine_hour
        formula = in_words('{} images / {} kept / {} answering / {} URLs a machine-hour', *factors)
        yield priced('data', 'download', downloaded / made.downloaded_share / made.urls_per_machine_hour, machine, formula)
    formula = in_words('{} images / {} a machine-hour', downloaded, made.images_per_machine_hour)
    yield priced('data', 'convert to shards', downloaded / made.images_per_machine_hour, machine, formula)
    for phase, size in latents:
        if size is None:
            continue
        rate, how = size.images_per_gpu_sec, f'derived: {size.source}' if isinstance(size, DerivedEncoding) else 'assumed'
        formula = f'{spread_text(size.num_images)} images / {spread_text(rate)} images/s a GPU ({how}) / 3600'
        encoder = price if size.gpu is None else prices[size.gpu]
        yield priced('encoding', f'encode {phase.phase.resolution} px', hours(size.num_images, rate), encoder, formula)


def _training(job: TrainingJob, parts: Sequence[InterruptedWork], paid_hours: Number, assumed: Assumptions, price: Price) -> Iterator[CostRow]:
    """Yield rows of the steps, the encoders next to them, what interrupts them, evaluation and experiments."""
    num_gpus, gpus, work, gpu_hours = job.num_gpus, counted(job.num_gpus, 'GPU'), assumed.work, sum(part.hours for part in parts) * job.num_gpus
    for phase in job.phases:
        formula = (
            f'{phase.phase.num_samples:,} samples / {spread_text(phase.images_per_sec)} images/s ({phase.origin}) / 3600 x '
            f'{gpus}; {spread_text(phase.hours / HOURS_PER_DAY, 2)} days'
        )
        yield priced('steps', f'training, {phase.name}', phase.hours * num_gpus, price, formula, phase.origin)
    for phase, part in zip(job.phases, parts, strict=True):
        encoder = phase.encoder
        if phase.num_encoders and encoder is not None and encoder.price is not None:  # next to training they wait with it, and are paid for
            wall_hours = part.hours * (part.paid_stretch + work.evaluation_share) + phase.score_hours
            each = f' x {encoder.units:g}' if encoder.units != 1 else ''
            formula = f'{spread_text(wall_hours)} hours of training, saves, restarts and evaluation x {counted(phase.num_encoders, "encoder")}{each}'
            yield priced('encoding', f'encoders, {phase.name}', wall_hours * phase.num_encoders * encoder.units, encoder.price, formula)
    formulas = []
    for part in parts:
        wait = in_words(', {} s without machines', part.wait_sec) if np.any(np.asarray(part.wait_sec) > 0) else ''
        failures = in_words('a failure every {} h, {} s until the next step', part.between_sec / SEC_PER_HOUR, part.restart_sec)
        saves = in_words('{} s a save every {} s: {} % on top', part.save_sec, part.interval_sec, 100 * (part.paid_stretch - 1))
        formulas.append(f'{failures}{wait}; {saves}')
    yield priced('training', 'saves, failures and restarts', paid_hours * num_gpus - gpu_hours, price, '; '.join(dict.fromkeys(formulas)))
    for phase in job.phases:
        if np.any(phase.score_hours):
            formula = f'{spread_text(phase.score_hours)} hours of drawing (eval.samples) x {gpus}'
            yield priced('training', f'scores of drawn images, {phase.name}', phase.score_hours * num_gpus, price, formula)
    for group, what, share in (
        ('training', 'evaluation and samples', work.evaluation_share),
        ('experiments', 'experiments and failed runs', work.experiments_share),
    ):
        yield priced(group, what, gpu_hours * share, price, f'{spread_text(share)} x the GPU-hours of training')


def _stored(
    job: TrainingJob,
    latents: Sequence[tuple[TrainingPhase, EncodingAssumptions | None]],
    is_counted: bool,
    assumed: Assumptions,
    prices: Prices,
) -> Iterator[CostRow]:
    """Yield rows of what is kept, and of shards written and read; what is read crosses from the storage to the GPUs."""
    kept, made, network = assumed.storage, assumed.preparation, assumed.network

    def stored(what: str, count: Number, num_bytes: Number, months: Number) -> CostRow:
        terabytes = count * num_bytes / BYTES_PER_TB
        formula = in_words('{} x {} bytes = {} TB for {} months', count, num_bytes, terabytes, months)
        return priced('storage', f'store {what}', terabytes * months, prices[kept.price], formula)

    written = read = 0.0
    if is_counted:
        written = made.num_images * made.bytes_per_image
        read = written if latents else 0.0  # encode reads every image shard once
        if made.downloaded_share is not None:
            yield stored('the crawl', made.num_images / made.kept_share, made.bytes_per_image, kept.crawl_months)
        yield stored('image shards', made.num_images, made.bytes_per_image, kept.image_shard_months)
    for phase, size in latents:
        if size is not None:
            written = written + size.num_images * phase.sample_bytes
            yield stored(f'latents of {phase.phase.resolution} px', size.num_images, phase.sample_bytes, kept.latent_months)
    for phase in job.phases:
        yield stored(f'checkpoints, {phase.name}', phase.num_checkpoints, phase.checkpoint_bytes, kept.checkpoint_months)
    from_shards = [phase for phase in job.phases if phase.kind != 'synthetic']
    for phase in from_shards:  # epochs x unique images are samples
        read = read + phase.phase.num_samples * phase.sample_bytes * network.downloads_per_epoch
    if not from_shards:
        return
    for name, verb, num_bytes, price in (('PUT', 'written', written, prices[network.put]), ('GET', 'read', read, prices[network.get])):
        formula = in_words(f'{{}} TB {verb} / {{}} bytes a shard', num_bytes / BYTES_PER_TB, network.shard_bytes)
        yield priced('network', f'{name} requests', num_bytes / network.shard_bytes / 1000, price, formula)
    formula = in_words('{} TB read: by encoding once, by training {} x in each epoch', read / BYTES_PER_TB, network.downloads_per_epoch)
    yield priced('network', 'egress', read / BYTES_PER_GB, prices[network.egress], formula)


def ways_to_pay(job: TrainingJob, assumed: Assumptions, prices: Prices, offers: Iterable[Price]) -> list[CostRow]:
    """Return wall hours and dollars of the training alone, steps and what interrupts them, a row per offer such as those of `prices.plans(gpu)`.

    An offer at which the run would never end has no hours, and a reason; a reservation that is longer than the run says so: most of its price is
    not for this run.
    """
    rows = []
    for price in offers:
        try:
            reservation, note = reserved(price, prices), ''
            paid_hours, wall_hours = expected_hours(job.interrupted(assumed, price), job.num_gpus)
        except PlanError as error:
            rows.append(CostRow('ways to pay', price.name, None, 'hours', price, str(error)))
            continue
        if reservation is not None and reservation[0] is not None and median(wall_hours) < reservation[0]:
            days = spread_text(wall_hours / HOURS_PER_DAY, 2)
            note = (
                f'reserved for {reservation[0] / HOURS_PER_DAY:,.0f} days, and the run takes {days}: the dollars are those of the whole reservation'
            )
        due = payments(reservation, price, paid_hours * job.num_gpus, wall_hours, job.num_gpus, assumed.work.taken_over_share)
        dollars = sum(gpu_hours * at.dollars for _, gpu_hours, at in due)
        rows.append(CostRow('ways to pay', price.name, wall_hours, 'hours', price, note, kind='assumed', fixed_dollars=dollars))
    return rows
