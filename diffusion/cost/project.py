"""The plan itself: the recipes of a project on several numbers of GPUs, their rates, time and money. Text and JSON are made of it elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from diffusion.common.text import counted
from diffusion.cost.assumptions import Assumptions
from diffusion.cost.bill import Bill, TrainingJob, TrainingPhase, checkpoints_kept
from diffusion.cost.comparisons import EncodingChoice, PlanOutcome
from diffusion.cost.facts import Cluster, Facts, Memory, errors_on
from diffusion.cost.formulas import days, dollars
from diffusion.cost.hardware import mfu, peak_flops
from diffusion.cost.prices import Price
from diffusion.cost.sources import Origin, OriginError, Rate, Series
from diffusion.cost.uncertain import median
from diffusion.recipe import Duration

# Above this share of the peak no step of this U-Net can be expected in bf16, by a roofline of its operations: A100 70 %, H100, H200 and B200 60 %.
ROOFLINE_MFU, ROOFLINE_MFU_A100 = 0.60, 0.70
MEMORY_TOLERANCE = 0.15  # estimate against measured peak


@dataclass(frozen=True)
class PhasePlan:
    """One recipe on one cluster."""

    facts: Facts
    rate: Rate
    memory: Memory
    mfu: float | None  # that the rate implies; None: the GPU's peak is not known
    training: TrainingPhase
    needs: str = ''  # a change without which the recipe is not sound here

    @property
    def hours(self) -> float:
        return float(self.training.useful_hours)


@dataclass(frozen=True)
class Column:
    """All recipes on one number of GPUs; `errors` say why there are no phases."""

    cluster: Cluster
    phases: tuple[PhasePlan, ...] = ()
    errors: tuple[str, ...] = ()

    @property
    def job(self) -> TrainingJob:
        return TrainingJob(tuple(phase.training for phase in self.phases), self.cluster.num_gpus)

    @property
    def uncertain_job(self) -> TrainingJob:
        """The same with draws in place of predicted rates."""
        drawn = [phase.training if phase.rate.draws is None else replace(phase.training, images_per_sec=phase.rate.draws) for phase in self.phases]
        return TrainingJob(tuple(drawn), self.cluster.num_gpus)

    @property
    def hours(self) -> float:
        """Wall time of the steps alone."""
        return sum(phase.hours for phase in self.phases)

    @property
    def days(self) -> float:
        return days(self.hours)

    @property
    def gpu_hours(self) -> float:
        return float(self.job.useful_gpu_hours)

    def dollars(self, price: Price) -> float:
        return dollars(self.gpu_hours, price.dollars)


@dataclass(frozen=True)
class MemoryCheck:
    """An estimate beside a measured peak."""

    name: str
    num_gpus: int
    estimated: int
    measured: int

    @property
    def difference(self) -> float:
        return self.estimated / self.measured - 1

    @property
    def close(self) -> bool:
        return abs(self.difference) <= MEMORY_TOLERANCE

    @property
    def doubt(self) -> str:
        return (
            f'{self.name} on {counted(self.num_gpus, "GPU")}: memory was estimated at {self.estimated / 1e9:,.1f} GB and measured at '
            f'{self.measured / 1e9:,.1f} GB: {self.difference:+.0%} is more than {MEMORY_TOLERANCE:.0%}; believe the measurement'
        )


def column(facts: Sequence[Facts], origins: Sequence[Origin], cluster: Cluster, assumptions: Assumptions) -> Column:
    """The recipes on a cluster, with smaller micro-batches if need be, or what is wrong with them there.

    Raises:
        OriginError: a rate that no GPU can reach.
    """
    here = [one.on(cluster.num_gpus) for one in facts]
    errors = tuple(f'{one.name}: {error}' for one in here for error in errors_on(one.recipe, cluster.num_gpus))
    if errors:
        return Column(cluster, errors=errors)
    phases = []
    for asked, one, origin in zip(facts, here, origins, strict=True):
        micro_size = one.recipe.batch.micro_size
        needs = '' if micro_size == asked.recipe.batch.micro_size else f'batch.micro_size={micro_size}'
        phases.append(replace(_phase(one, origin, cluster, assumptions), needs=needs))
    return Column(cluster, tuple(phases))


def _phase(facts: Facts, origin: Origin, cluster: Cluster, assumptions: Assumptions) -> PhasePlan:
    rate = origin.rate(cluster.num_gpus)
    share = mfu(rate.images_per_sec / cluster.num_gpus, facts.counts.flop, peak_flops(cluster.gpu))
    if share is not None and share > 1:
        raise OriginError(
            f'{facts.name}: {rate.images_per_sec:,.6g} images/s on {counted(cluster.num_gpus, "GPU")} ({rate.how}) would be an MFU of {share:.0%} of '
            f'{cluster.gpu}: no GPU does more than its peak; give the images/s of all GPUs together at this resolution, and their number (RATE@GPUS)'
        )
    recipe = facts.recipe
    kept = recipe.checkpoint.keep_every
    training = TrainingPhase(
        name=facts.name,
        phase=facts.phase,
        images_per_sec=rate.images_per_sec,
        origin=rate.how,
        sample_bytes=float(median(facts.sample_bytes(assumptions))),
        checkpoint_bytes=facts.checkpoint_bytes,
        num_checkpoints=checkpoints_kept(
            facts.num_batches, recipe.checkpoint.keep, kept.batches if kept else None, facts.num_saves(rate.images_per_sec)
        ),
        save_interval_sec=facts.save_interval_sec(rate.images_per_sec),
        gpu_hours_between_failures=recipe.faults.gpu_hours_between_failures,
        kind=recipe.data.kind,
    )
    return PhasePlan(facts, rate, facts.memory(cluster), share, training)


def memory_checks(facts: Facts, origin: Origin, gpu_gb: float) -> list[MemoryCheck]:
    """Estimates for the very settings of a throughput file's rows, beside what was measured on GPUs (a CPU's peak is that of the process).

    Rows of another precision, or with activations computed twice where the recipe has them once, are left out: other activations were counted.
    """
    if not isinstance(origin, Series):
        return []
    recipe, checks = facts.recipe, []
    for (num_gpus, global_size), row in origin.rows.items():
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


def doubts(column: Column) -> list[str]:
    """What a reader of the plan should be warned of on one number of GPUs."""
    limit = ROOFLINE_MFU_A100 if column.cluster.gpu.startswith('a100') else ROOFLINE_MFU
    return [
        f'{phase.facts.name} on {counted(column.cluster.num_gpus, "GPU")}: an MFU of {phase.mfu:.0%} is above the roofline of this U-Net on '
        f'{column.cluster.gpu}, about {limit:.0%}: measure again before you believe it'
        for phase in column.phases
        if phase.mfu is not None and phase.mfu > limit
    ]


@dataclass(frozen=True)
class ProjectPlan:
    """Everything that is printed.

    Attributes:
        assumptions: with draws in place of ranges.
        origins: of the images per second, one a recipe.
        columns: one a number of GPUs.
        chosen: the column that the bill is for.
        remedies: for each recipe that does not fit there, overrides with which it does.
        choice: latents or not; None where nothing trains on latents.
        outcomes: of the training there under each price plan.
        deadline_days: that their probabilities are of.
    """

    price: Price
    assumptions: Assumptions
    origins: tuple[Origin, ...]
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
        """The images per second of the bill that nobody has measured or given, and that no range says the error of."""
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
        found = [warning for origin in self.origins for warning in origin.warnings]
        found += [doubt for one in self.columns for doubt in doubts(one)]
        found += [check.doubt for check in self.checks if not check.close]
        return list(dict.fromkeys(found))
