"""The plan of a project: its recipes on several numbers of GPUs, with rates, time and money. Text and JSON are written elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from diffusion.common.text import counted
from diffusion.cost.assumptions import Assumptions
from diffusion.cost.bill import Bill, TrainingJob, TrainingPhase, checkpoints_kept
from diffusion.cost.comparisons import EncodingChoice, PlanOutcome
from diffusion.cost.facts import Cluster, Facts, GpuMemory, errors_on
from diffusion.cost.formulas import HOURS_PER_DAY
from diffusion.cost.hardware import NOT_SUPPORTED, mfu, peak_flops
from diffusion.cost.prices import Price
from diffusion.cost.rates import Rate, RateError, RateSeries, RateSource
from diffusion.cost.uncertain import median
from diffusion.recipe import Duration

# Above this share of the peak no step of SD2's U-Net can be expected in bf16, by a roofline of its operations: A100 70 %, H100, H200 and B200 60 %.
ROOFLINE_MFU, ROOFLINE_MFU_A100 = 0.60, 0.70
MEMORY_TOLERANCE = 0.15  # estimate against measured peak


@dataclass(frozen=True)
class PhasePlan:
    """One recipe on one cluster."""

    facts: Facts
    rate: Rate
    memory: GpuMemory
    mfu: float | None  # by the rate; None: the GPU's peak is not known
    training: TrainingPhase
    needs: str = ''  # a change without which the recipe is not sound here


@dataclass(frozen=True)
class Column:
    """All recipes on one number of GPUs; `errors` say why there are no phases."""

    cluster: Cluster
    phases: tuple[PhasePlan, ...] = ()
    errors: tuple[str, ...] = ()

    @property
    def uncertain_job(self) -> TrainingJob:
        """The training with draws in place of predicted rates."""
        drawn = [phase.training if phase.rate.draws is None else replace(phase.training, images_per_sec=phase.rate.draws) for phase in self.phases]
        return TrainingJob(tuple(drawn), self.cluster.num_gpus)

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of the steps alone."""
        return sum(phase.training.hours for phase in self.phases) * self.cluster.num_gpus

    @property
    def days(self) -> float:
        return self.gpu_hours / self.cluster.num_gpus / HOURS_PER_DAY

    @property
    def warnings(self) -> list[str]:
        cluster = self.cluster
        limit = ROOFLINE_MFU_A100 if cluster.gpu.startswith('a100') else ROOFLINE_MFU
        return [
            f"{phase.facts.name} on {counted(cluster.num_gpus, 'GPU')}: an MFU of {phase.mfu:.0%} is above the roofline of SD2's U-Net on "
            f'{cluster.gpu}, about {limit:.0%}: measure again before you believe it'
            for phase in self.phases
            if phase.mfu is not None and phase.mfu > limit
        ]


@dataclass(frozen=True)
class MemoryCheck:
    """An estimate next to a measured peak."""

    name: str
    num_gpus: int
    estimated_bytes: int
    measured_bytes: int

    @property
    def difference(self) -> float:
        return self.estimated_bytes / self.measured_bytes - 1

    @property
    def is_close(self) -> bool:
        return abs(self.difference) <= MEMORY_TOLERANCE

    @property
    def warning(self) -> str:
        return (
            f'{self.name} on {counted(self.num_gpus, "GPU")}: memory was estimated at {self.estimated_bytes / 1e9:,.1f} GB and measured at '
            f'{self.measured_bytes / 1e9:,.1f} GB: {self.difference:+.0%} is more than {MEMORY_TOLERANCE:.0%}; believe the measurement'
        )


def column(facts: Sequence[Facts], sources: Sequence[RateSource], cluster: Cluster, assumed: Assumptions) -> Column:
    """Plan the recipes on a cluster, with smaller micro-batches if need be, or say what is wrong with them there.

    Raises:
        RateError: a rate that no GPU can reach.
    """
    here = [one.on(cluster.num_gpus) for one in facts]
    errors = tuple(f'{one.name}: {error}' for one in here for error in errors_on(one.recipe, cluster.num_gpus))
    if errors:
        return Column(cluster, errors=errors)
    phases = []
    for asked, one, source in zip(facts, here, sources, strict=True):
        micro_size = one.recipe.batch.micro_size
        needs = '' if micro_size == asked.recipe.batch.micro_size else f'batch.micro_size={micro_size}'
        phases.append(replace(_phase(one, source, cluster, assumed), needs=needs))
    return Column(cluster, tuple(phases))


def _phase(facts: Facts, source: RateSource, cluster: Cluster, assumed: Assumptions) -> PhasePlan:
    recipe, rate = facts.recipe, source.rate(cluster.num_gpus)
    share = mfu(rate.images_per_sec / cluster.num_gpus, facts.counts.flop, peak_flops(cluster.gpu))
    if share is not None and share > 1:
        raise RateError(
            f'{facts.name}: {rate.images_per_sec:,.6g} images/s on {counted(cluster.num_gpus, "GPU")} ({rate.how}) would be an MFU of {share:.0%} of '
            f'{cluster.gpu}: no GPU does more than its peak; give the images/s of all GPUs together at this resolution, and their number (RATE@GPUS)'
        )
    keep_every = recipe.checkpoint.keep_every.batches if recipe.checkpoint.keep_every else None
    training = TrainingPhase(
        name=facts.name,
        phase=facts.phase,
        images_per_sec=rate.images_per_sec,
        origin=rate.how,
        sample_bytes=median(facts.sample_bytes(assumed)),
        checkpoint_bytes=facts.checkpoint_bytes,
        num_checkpoints=checkpoints_kept(facts.num_batches, recipe.checkpoint.keep, keep_every, facts.num_saves(rate.images_per_sec)),
        save_interval_sec=facts.save_interval_sec(rate.images_per_sec),
        gpu_hours_between_failures=recipe.faults.gpu_hours_between_failures,
        kind=recipe.data.kind,
    )
    return PhasePlan(facts, rate, facts.memory(cluster), share, training)


def memory_checks(facts: Facts, source: RateSource, gpu_gb: float) -> list[MemoryCheck]:
    """Estimate memory for the settings of a throughput file's rows, next to what was measured on GPUs (a CPU's peak is that of the process).

    Rows of another precision, or with activations computed twice where the recipe has them once, are left out: other activations were counted.
    """
    recipe, checks = facts.recipe, []
    for (num_gpus, global_size), row in (source.rows if isinstance(source, RateSeries) else {}).items():
        peak, micro_size, per_node = (row.count(key) for key in ('peak_allocated_bytes', 'micro_size', 'gpus_per_node'))
        alike = (row.text('precision'), bool(row.row.get('checkpoint_activations'))) == (recipe.train.precision, recipe.train.checkpoint_activations)
        if peak is None or micro_size is None or not row.on_gpus or not alike:
            continue
        sharding: Any = row.text('sharding') or recipe.train.sharding
        measured = replace(
            recipe,
            batch=replace(recipe.batch, global_size=global_size, micro_size=micro_size),
            train=replace(recipe.train, sharding=sharding),
            ema=replace(recipe.ema, half_life=(recipe.ema.half_life or Duration('1ba')) if row.row.get('ema') else None),
        )
        cluster = Cluster(row.text('device'), gpu_gb, num_gpus, per_node or num_gpus)
        checks.append(MemoryCheck(facts.name, num_gpus, replace(facts, recipe=measured).memory(cluster).total, peak))
    return checks


@dataclass(frozen=True)
class ProjectPlan:
    """Everything that is printed.

    Attributes:
        assumed: with draws in place of ranges.
        sources: of the images per second, one per recipe.
        columns: one per number of GPUs.
        chosen: the column that the bill is for.
        remedies: for each recipe that does not fit there, overrides with which it does.
        choice: latents or not; None where nothing trains on latents.
        outcomes: of the training there under each price plan.
        deadline_days: that their probabilities are of.
    """

    price: Price
    assumed: Assumptions
    sources: tuple[RateSource, ...]
    columns: tuple[Column, ...]
    chosen: Column
    remedies: tuple[tuple[str, ...], ...]
    checks: tuple[MemoryCheck, ...]
    bill: Bill
    choice: EncodingChoice | None
    outcomes: tuple[PlanOutcome, ...]
    deadline_days: float | None = None

    @property
    def taken_for_certain(self) -> list[str]:
        """Images per second of the bill that nobody has measured or given, and that have no range."""
        return [
            f'how wrong the images/s of {phase.facts.name} may be ({phase.rate.how}{": " if phase.rate.note else ""}{phase.rate.note})'
            for phase in self.chosen.phases
            if phase.rate.draws is None and phase.rate.how in ('assumed', 'scaled', 'predicted')
        ]

    @property
    def unfit(self) -> list[str]:
        cluster = self.chosen.cluster
        return [f'{phase.facts.name} does not fit on {cluster.num_gpus} {cluster.gpu}' for phase in self.chosen.phases if not phase.memory.fits]

    @property
    def warnings(self) -> list[str]:
        gpu = self.chosen.cluster.gpu
        found = [f'{gpu}: {NOT_SUPPORTED[gpu]}; this plan is arithmetic for a comparison'] if gpu in NOT_SUPPORTED else []
        found += [warning for source in (*self.sources, *self.columns) for warning in source.warnings]
        found += [check.warning for check in self.checks if not check.is_close]
        return list(dict.fromkeys(found))
