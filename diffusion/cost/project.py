"""The plan of a project: its recipes on several numbers of GPUs, with rates, time and money, also as JSON; text.py writes the page."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from diffusion.common.text import counted
from diffusion.cost.assumptions import Assumptions
from diffusion.cost.bill import Bill, PlanOutcome, TrainingJob, TrainingPhase, bill_json
from diffusion.cost.encoders import OnlineFleet, PricedEncoder, fleet_json, fleet_warnings, online_fleet, text_warnings
from diffusion.cost.encoding import EncodingWays, ways_json
from diffusion.cost.facts import Cluster, Facts, GpuMemory
from diffusion.cost.formulas import HOURS_PER_DAY, Number, hours
from diffusion.cost.hardware import NOT_SUPPORTED, mfu, peak_flops
from diffusion.cost.prices import RULES, Price
from diffusion.cost.rates import Rate, RateError, RateSource
from diffusion.cost.uncertain import is_uncertain, median, quantiles
from diffusion.recipe import Duration
from diffusion.recipe.averaging import profiles
from diffusion.recipe.load import applies
from diffusion.recipe.schema import Ema

# Above this share of the peak no step of SD2's U-Net can be expected in bf16, by a roofline of its operations: A100 70 %, H100, H200 and B200 60 %.
ROOFLINE_MFU, ROOFLINE_MFU_A100 = 0.60, 0.70
# A step costs something whatever its size, launching kernels above all: 28 ms in the law through MLPerf's table of SD2 on H100.
SHORT_STEP_SEC = 0.01
MEMORY_TOLERANCE = 0.15  # estimate against measured peak


@dataclass(frozen=True)
class PhasePlan:
    """One recipe on one cluster."""

    facts: Facts
    source: RateSource
    rate: Rate
    memory: GpuMemory
    mfu: float | None  # by the rate; None: the GPU's peak is not known
    training: TrainingPhase  # of the bill: with draws in place of a predicted rate
    needs: str = ''  # a change without which the recipe is not sound here
    fleet: OnlineFleet | None = None  # the recipe's encoders on other machines

    @property
    def unlimited(self) -> Number:
        """Images/s of training if no encoders made it wait."""
        return self.training.images_per_sec if self.fleet is None else self.fleet.unlimited

    @property
    def hours(self) -> float:
        """Wall hours of the steps alone, at the rate that is most likely."""
        return hours(self.facts.phase.num_samples, self.rate.images_per_sec)


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
    def gpu_hours(self) -> float:
        """GPU-hours of the steps alone."""
        return sum(phase.hours for phase in self.phases) * self.cluster.num_gpus

    @property
    def days(self) -> float:
        return self.gpu_hours / self.cluster.num_gpus / HOURS_PER_DAY


def column(
    recipes: Sequence[Facts], sources: Sequence[RateSource], cluster: Cluster, assumed: Assumptions, encoders: Sequence[PricedEncoder]
) -> Column:
    """Plan the recipes on a cluster, with smaller micro-batches if need be, or say what is wrong with them there.

    Args:
        encoders: of each recipe (`encoder_of`).

    Raises:
        RateError: a rate that no GPU can reach.
    """
    here = [facts.on(cluster.num_gpus) for facts in recipes]
    errors = tuple(
        f'{facts.name}: {error}'
        for facts in here
        for rule in RULES
        if applies(rule, type(facts.recipe))
        for error in rule(facts.recipe, cluster.num_gpus)
    )
    if errors:
        return Column(cluster, errors=errors)
    phases = []
    for asked, facts, source, encoder in zip(recipes, here, sources, encoders, strict=True):
        recipe, rate, micro_size = facts.recipe, source.rate(cluster.num_gpus), facts.recipe.batch.micro_size
        share = mfu(rate.images_per_sec / cluster.num_gpus, facts.counts.flop, peak_flops(cluster.gpu))
        if share is not None and share > 1:
            raise RateError(
                f'{facts.name}: {rate.images_per_sec:,.6g} images/s on {counted(cluster.num_gpus, "GPU")} ({rate.how}) would be an MFU of '
                f'{share:.0%} of {cluster.gpu}: no GPU does more than its peak; give the images/s of all GPUs together at this resolution, '
                'and their number (RATE@GPUS)'
            )
        fleet = online_fleet(facts, rate.images_per_sec if rate.draws is None else rate.draws, encoder, assumed)
        rate = rate if fleet is None else fed_by(fleet, rate)
        share = mfu(rate.images_per_sec / cluster.num_gpus, facts.counts.flop, peak_flops(cluster.gpu))
        images_per_sec = rate.images_per_sec if rate.draws is None else rate.draws
        training = TrainingPhase(
            name=facts.name,
            phase=facts.phase,
            images_per_sec=images_per_sec,
            origin=rate.how,
            sample_bytes=facts.sample_bytes(assumed),
            checkpoint_bytes=facts.checkpoint_bytes,
            num_checkpoints=facts.checkpoints_kept(rate.images_per_sec),
            save_interval_sec=facts.save_interval_sec(rate.images_per_sec),
            gpu_hours_between_failures=recipe.faults.gpu_hours_between_failures,
            kind=recipe.data.kind,
            encoder=encoder,
            num_encoders=0 if fleet is None else fleet.encoders.actors,
            score_hours=facts.score_hours(images_per_sec if fleet is None else fleet.unlimited, cluster.num_gpus),
        )
        needs = '' if micro_size == asked.recipe.batch.micro_size else f'batch.micro_size={micro_size}'
        phases.append(PhasePlan(facts, source, rate, facts.memory(cluster), share, training, needs, fleet))
    return Column(cluster, tuple(phases))


def fed_by(fleet: OnlineFleet, rate: Rate) -> Rate:
    """Return the rate of training that waits for its encoders, if they are too few."""
    if fleet.speed >= 1:
        return rate
    one = fleet.encoder.rate
    assert one is not None  # or nothing would limit it
    each = f'{counted(fleet.encoders.actors, "encoder")} of {one.amount} images/s ({one.how})'
    note = f'by {each}; without a limit {rate.images_per_sec:,.6g}'
    limited = fleet.images_per_sec
    return Rate(median(limited), 'limited', '; '.join(filter(None, [note, rate.note])), limited if is_uncertain(limited) else None)


@dataclass(frozen=True)
class MemoryCheck:
    """An estimate next to a measured peak."""

    name: str
    num_gpus: int
    estimated_bytes: int
    measured_bytes: int
    difference: float  # as a share of what was measured


def memory_checks(facts: Facts, source: RateSource, gpu_gb: float) -> list[MemoryCheck]:
    """Estimate memory for the settings of a throughput file's rows, next to what was measured on GPUs (a CPU's peak is that of the process).

    Rows of another precision, or with activations computed twice where the recipe has them once, are left out: other activations were counted.
    """
    recipe, checks = facts.recipe, []
    for (num_gpus, global_size), row in source.rows.items():
        peak, micro_size, per_node = (row.count(key) for key in ('peak_allocated_bytes', 'micro_size', 'gpus_per_node'))
        alike = (row.text('precision'), bool(row.row.get('checkpoint_activations'))) == (recipe.train.precision, recipe.train.checkpoint_activations)
        if peak is None or micro_size is None or not row.on_gpus or not alike:
            continue
        sharding: Any = row.text('sharding') or recipe.train.sharding
        measured = replace(
            recipe,
            batch=replace(recipe.batch, global_size=global_size, micro_size=micro_size),
            train=replace(recipe.train, sharding=sharding),
            ema=_with_average(recipe.ema) if row.row.get('ema') else replace(recipe.ema, half_life=None, sigma_rel=[]),
        )
        cluster = Cluster(row.text('device'), gpu_gb, num_gpus, per_node or num_gpus)
        estimated = replace(facts, recipe=measured).memory(cluster).total
        checks.append(MemoryCheck(facts.name, num_gpus, estimated, peak, estimated / peak - 1))
    return checks


def _with_average(ema: Ema) -> Ema:
    return ema if profiles(ema) else replace(ema, half_life=Duration('1ba'))


@dataclass(frozen=True)
class ProjectPlan:
    """Everything that is printed."""

    columns: tuple[Column, ...]  # one per number of GPUs
    chosen: Column  # that the bill is for
    remedies: tuple[tuple[str, ...], ...]  # for each recipe that does not fit there, overrides with which it does
    checks: tuple[MemoryCheck, ...]
    bill: Bill
    encoding: tuple[EncodingWays, ...]  # of the phases that encode, or could
    show_encoding: bool  # their table on the page
    headroom: float  # of encoders next to training
    outcomes: tuple[PlanOutcome, ...]  # of the training there under each price plan
    deadline_days: float | None = None  # that their probabilities are of

    @property
    def taken_for_certain(self) -> list[str]:
        """Images per second of the bill that nobody has measured or given, and that have no range."""
        return [
            f'how wrong the images/s of {phase.facts.name} may be ({phase.rate.how}{": " if phase.rate.note else ""}{phase.rate.note})'
            for phase in self.chosen.phases
            if phase.rate.draws is None and phase.rate.how in ('assumed', 'scaled', 'predicted')
        ]

    @property
    def not_counted(self) -> list[str]:
        """What is missing in the bill and in the times of the steps, and how to have it counted."""
        found = list(self.bill.not_counted)
        for phase in self.chosen.phases:
            step_sec = phase.facts.recipe.batch.global_size / phase.rate.images_per_sec
            if phase.rate.how == 'assumed' and step_sec < SHORT_STEP_SEC:
                found.append(
                    f'{phase.facts.name}: what a step costs whatever its size (launching kernels, the loader): its {1000 * step_sec:,.2g} ms are '
                    'FLOP at an assumed share of the peak, which no small network reaches; measure it (benchmarks.throughput, --throughput FILE)'
                )
        return found

    @property
    def unfit(self) -> list[str]:
        cluster = self.chosen.cluster
        return [f'{phase.facts.name} does not fit on {cluster.num_gpus} {cluster.gpu}' for phase in self.chosen.phases if not phase.memory.fits]

    @property
    def warnings(self) -> list[str]:
        gpu = self.chosen.cluster.gpu
        found = [f'{gpu}: {NOT_SUPPORTED[gpu]}; this plan is arithmetic for a comparison'] if gpu in NOT_SUPPORTED else []
        found += [warning for phase in self.chosen.phases for warning in phase.source.warnings]
        limit = ROOFLINE_MFU_A100 if gpu.startswith('a100') else ROOFLINE_MFU
        found += [
            f"{phase.facts.name} on {counted(column.cluster.num_gpus, 'GPU')}: an MFU of {phase.mfu:.0%} is above the roofline of SD2's U-Net on "
            f'{gpu}, about {limit:.0%}: measure again before you believe it'
            for column in self.columns
            for phase in column.phases
            if phase.mfu is not None and phase.mfu > limit
        ]
        found += [
            f'{check.name} on {counted(check.num_gpus, "GPU")}: memory was estimated at {check.estimated_bytes / 1e9:,.1f} GB and measured at '
            f'{check.measured_bytes / 1e9:,.1f} GB: {check.difference:+.0%} is more than {MEMORY_TOLERANCE:.0%}; believe the measurement'
            for check in self.checks
            if abs(check.difference) > MEMORY_TOLERANCE
        ]
        found += [text for phase in self.chosen.phases if phase.fleet is not None for text in fleet_warnings(phase.facts.name, phase.fleet)]
        found += [text for phase in self.chosen.phases for text in text_warnings(phase.facts)]
        found += self.bill.warnings
        return list(dict.fromkeys(found))


def plan_json(plan: ProjectPlan) -> dict[str, Any]:
    """The plan for machines: unrounded; uncertain numbers as [p10, p50, p90]."""
    cluster, price = plan.chosen.cluster, plan.bill.plan.price
    return {
        'gpu': cluster.gpu,
        'gpus_per_node': cluster.gpus_per_node,
        'price': asdict(price),
        'recipes': [_recipe(phase) for phase in plan.chosen.phases],
        'gpu_counts': [_column(column, price) for column in plan.columns],
        'bill_gpus': cluster.num_gpus,
        'bill': bill_json(plan.bill),
        'encoding': ways_json(plan.encoding),
        'not_counted': plan.not_counted,
        'taken_for_certain': plan.taken_for_certain,
        'deadline_days': plan.deadline_days,
        'plans': [
            asdict(outcome) | {'wall_hours': quantiles(outcome.wall_hours), 'dollars': quantiles(outcome.dollars)} for outcome in plan.outcomes
        ],
        'memory_checks': [asdict(check) | {'difference': check.difference} for check in plan.checks],
        'warnings': [*plan.warnings, *plan.unfit],
    }


def _recipe(phase: PhasePlan) -> dict[str, Any]:
    facts, encoders = phase.facts, phase.facts.counts.encoders
    return {
        'name': facts.name,
        'network': facts.recipe.trained_network,
        'resolution': facts.resolution,
        'kind': facts.recipe.data.kind,
        'num_samples': facts.phase.num_samples,
        'num_steps': facts.num_batches,
        'num_images': None if facts.num_images is None else quantiles(facts.num_images),
        'epochs': None if facts.epochs is None else quantiles(facts.epochs),
        'num_parameters': facts.counts.num_parameters,
        'trained_parameters': facts.counts.trained_parameters,
        'flop_per_sample': facts.counts.flop,
        'total_flop': facts.total_flop,
        'text_flop_per_sample': encoders.text_flop if encoders else None,
        'vae_flop_per_sample': encoders.vae_flop if encoders and facts.encodes_images else None,
        'checkpoint_bytes': facts.checkpoint_bytes,
        'num_checkpoints': phase.training.num_checkpoints,
        'throughput': phase.source.text,
    }


def _column(column: Column, price: Price) -> dict[str, Any]:
    counts = {'num_gpus': column.cluster.num_gpus, 'num_nodes': column.cluster.num_nodes}
    if column.errors:
        return {**counts, 'errors': list(column.errors)}
    phases = [
        {
            'name': phase.facts.name,
            'images_per_sec': phase.rate.images_per_sec,
            'origin': phase.rate.how,
            'note': phase.rate.note,
            'mfu': phase.mfu,
            'hours': phase.hours,
            'micro_size': phase.memory.micro_size,
            'needs': phase.needs or None,
            'memory_bytes': {**phase.memory.parts, 'total': phase.memory.total},
            'fits': phase.memory.fits,
            'encoders': None if phase.fleet is None else fleet_json(phase.fleet),
            'loader_bytes_per_sec_per_node': median(phase.training.sample_bytes) * phase.rate.images_per_sec / column.cluster.num_nodes,
        }
        for phase in column.phases
    ]
    return {**counts, 'phases': phases, 'days': column.days, 'gpu_hours': column.gpu_hours, 'dollars': column.gpu_hours * price.dollars}
