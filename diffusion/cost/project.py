"""The plan of a project: its recipes on several numbers of GPUs, as rows of requirements, rates, time and money; text.py writes the page."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from diffusion.common.text import counted
from diffusion.cost.assumptions import Assumptions
from diffusion.cost.bill import Bill, TrainingJob, TrainingPhase, make_bill, ways_to_pay
from diffusion.cost.encoders import OnlineFleet, PricedEncoder, online_fleet, text_warnings, ways_to_encode
from diffusion.cost.facts import MEMORY_SHARE, Cluster, Counts, Facts, GpuMemory
from diffusion.cost.formulas import HOURS_PER_DAY, Number, hours, is_uncertain, median, quantiles, spread_text
from diffusion.cost.hardware import NOT_SUPPORTED, mfu, peak_flops
from diffusion.cost.prices import RULES, CostRow, Price, Prices
from diffusion.cost.throughput import Rate, RateError, RateSource
from diffusion.recipe import AnyRecipe, AutoencoderRecipe, Duration
from diffusion.recipe.averaging import profiles
from diffusion.recipe.load import applies
from diffusion.recipe.rules import PIXELS_PER_LATENT, TEXT_LENGTH

# Above this share of the peak no step of SD2's U-Net can be expected in bf16, by a roofline of its operations: A100 70 %, H100, H200 and B200 60 %.
ROOFLINE_MFU, ROOFLINE_MFU_A100 = 0.60, 0.70
# A step costs something whatever its size, launching kernels above all: 28 ms in the law through MLPerf's table of SD2 on H100.
SHORT_STEP_SEC = 0.01
MEMORY_TOLERANCE = 0.15  # estimate against measured peak


@dataclass(frozen=True, kw_only=True)
class PhasePlan(TrainingPhase):
    """One recipe on one cluster; its images/s are draws where they are predicted."""

    facts: Facts
    source: RateSource
    rate: Rate
    memory: GpuMemory
    mfu: float | None  # by the rate; None: the GPU's peak is not known
    needs: str  # a change without which the recipe is not sound here
    fleet: OnlineFleet | None  # the recipe's encoders on other machines

    @property
    def likely_hours(self) -> float:
        """Wall hours of the steps alone, at the rate that is most likely."""
        return hours(self.phase.num_samples, self.rate.images_per_sec)

    @property
    def unlimited(self) -> Number:
        """Images/s if encoders on other machines never made the training wait."""
        return self.images_per_sec if self.fleet is None else self.fleet.unlimited


@dataclass(frozen=True)
class Column:
    """All recipes on one number of GPUs; `errors` say why there are no phases."""

    cluster: Cluster
    phases: tuple[PhasePlan, ...] = ()
    errors: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProjectPlan:
    """Everything that is printed: rows, of which the bill has its own, and notes."""

    cluster: Cluster  # that the bill is for
    rows: tuple[CostRow, ...]
    bill: Bill
    warnings: tuple[str, ...]
    not_counted: tuple[str, ...]  # what is missing in the bill and in the times of the steps, and how to have it counted
    taken_for_certain: tuple[str, ...]  # images per second of the bill that nobody has measured or given, and that have no range
    unfit: tuple[str, ...]

    @property
    def values(self) -> dict[str, Any]:
        """The plan for machines: unrounded; uncertain numbers as [p10, p50, p90]."""
        bill, cluster = self.bill, self.cluster
        totals = {'dollars': bill.dollars, 'GPU-hours': bill.gpu_hours, 'wall hours': bill.wall_hours} | {one: bill.of(one) for one in bill.groups}
        return {
            'gpu': cluster.gpu,
            'gpus_per_node': cluster.gpus_per_node,
            'bill_gpus': cluster.num_gpus,
            'price': asdict(bill.price),
            'bill': [row.values | {'share': bill.share(row.dollars)} for row in bill.rows],
            'totals': {name: quantiles(number) for name, number in totals.items()},
            'rows': [row.values for row in self.rows],
            'not_counted': self.not_counted,
            'taken_for_certain': self.taken_for_certain,
            'warnings': [*self.warnings, *self.unfit],
        }


def column(
    recipes: Sequence[Facts], sources: Sequence[RateSource], cluster: Cluster, assumed: Assumptions, encoders: Sequence[PricedEncoder]
) -> Column:
    """Plan the recipes on a cluster, with smaller micro-batches if need be, or say what is wrong; RateError for a rate that no GPU can reach."""
    here, num_gpus = [facts.on(cluster.num_gpus) for facts in recipes], cluster.num_gpus
    errors = tuple(
        f'{facts.name}: {error}' for facts in here for rule in RULES if applies(rule, type(facts.recipe)) for error in rule(facts.recipe, num_gpus)
    )
    if errors:
        return Column(cluster, errors=errors)
    phases = []
    for asked, facts, source, encoder in zip(recipes, here, sources, encoders, strict=True):
        recipe, rate, micro_size = facts.recipe, source.rate(num_gpus), facts.recipe.batch.micro_size
        utilisation = partial(mfu, flop_per_image=facts.counts.flop, peak=peak_flops(cluster.gpu))
        share = utilisation(rate.images_per_sec / num_gpus)
        if share is not None and share > 1:
            raise RateError(
                f'{facts.name}: {rate.images_per_sec:,.6g} images/s on {counted(num_gpus, "GPU")} ({rate.how}) would be an MFU of '
                f'{share:.0%} of {cluster.gpu}: no GPU does more than its peak; give the images/s of all GPUs together at this resolution, '
                'and their number (RATE@GPUS)'
            )
        score_hours, fleet = facts.score_hours(rate.drawn, num_gpus), online_fleet(facts, rate.drawn, encoder, assumed)
        if fleet is not None and fleet.speed < 1 and fleet.encoder.rate is not None:  # training waits for its encoders
            one, limited = fleet.encoder.rate, fleet.images_per_sec
            note = f'by {counted(fleet.encoders.actors, "encoder")} of {one.amount} images/s ({one.how}); without a limit {rate.images_per_sec:,.6g}'
            draws = limited if is_uncertain(limited) else None
            rate = Rate(median(limited), 'limited', '; '.join(filter(None, [note, rate.note])), draws)
        phases.append(
            PhasePlan(
                name=facts.name,
                phase=facts.phase,
                images_per_sec=rate.drawn,
                origin=rate.how,
                sample_bytes=facts.sample_bytes(assumed),
                checkpoint_bytes=facts.checkpoint_bytes,
                num_checkpoints=facts.checkpoints_kept(rate.images_per_sec),
                save_interval_sec=facts.save_interval_sec(rate.images_per_sec),
                gpu_hours_between_failures=recipe.faults.gpu_hours_between_failures,
                kind=recipe.data.kind,
                encoder=encoder,
                num_encoders=0 if fleet is None else fleet.encoders.actors,
                score_hours=score_hours,
                facts=facts,
                source=source,
                rate=rate,
                memory=facts.memory(cluster),
                mfu=utilisation(rate.images_per_sec / num_gpus),
                needs='' if micro_size == asked.recipe.batch.micro_size else f'batch.micro_size={micro_size}',
                fleet=fleet,
            )
        )
    return Column(cluster, tuple(phases))


def project_plan(
    columns: Sequence[Column], chosen: Column, assumed: Assumptions, prices: Prices, price: Price, counts_of: Callable[[AnyRecipe], Counts]
) -> ProjectPlan:
    """Make all rows and notes of a plan, with the bill of the chosen column at the price of a GPU's hour."""
    cluster, phases, gpu, num_gpus = chosen.cluster, chosen.phases, chosen.cluster.gpu, chosen.cluster.num_gpus
    job = TrainingJob(phases, num_gpus)
    bill = make_bill(job, assumed, prices, price)
    rows = [row for phase in phases for row in _recipe_rows(phase)]
    for one in columns:
        for phase in one.phases:
            unfit = one is chosen and not phase.memory.fits
            rows += _cluster_rows(phase, one.cluster, phase.facts.remedies(cluster, counts_of) if unfit else ())
        rows += _steps_alone(one, price)
    checks = [row for phase in phases for row in memory_checks(phase.facts, phase.source, cluster.gpu_gb)]
    rows += checks
    for phase in phases:
        assert phase.encoder is not None
        rows += ways_to_encode(phase.facts, phase.unlimited, num_gpus, phase.encoder, price, assumed, prices, phase.rate.how)
    rows += ways_to_pay(job, assumed, prices, [price, *(offer for offer in prices.plans(gpu).values() if offer != price)])

    limit = ROOFLINE_MFU_A100 if gpu.startswith('a100') else ROOFLINE_MFU
    warnings = [f'{gpu}: {NOT_SUPPORTED[gpu]}; this plan is arithmetic for a comparison'] if gpu in NOT_SUPPORTED else []
    warnings += [warning for phase in phases for warning in phase.source.warnings]
    warnings += [
        f"{phase.name} on {counted(one.cluster.num_gpus, 'GPU')}: an MFU of {phase.mfu:.0%} is above the roofline of SD2's U-Net on "
        f'{gpu}, about {limit:.0%}: measure again before you believe it'
        for one in columns
        for phase in one.phases
        if phase.mfu is not None and phase.mfu > limit
    ]
    warnings += [check.source for check in checks if check.source]
    warnings += [text for phase in phases if phase.fleet is not None for text in phase.fleet.warnings(phase.name)]
    warnings += [*(text for phase in phases for text in text_warnings(phase.facts)), *bill.warnings]
    not_counted, certain = list(bill.not_counted), list[str]()
    for phase in phases:
        rate, step_sec = phase.rate, phase.facts.recipe.batch.global_size / phase.rate.images_per_sec
        if rate.how == 'assumed' and step_sec < SHORT_STEP_SEC:
            not_counted.append(
                f'{phase.name}: what a step costs whatever its size (launching kernels, the loader): its {1000 * step_sec:,.2g} ms are '
                'FLOP at an assumed share of the peak, which no small network reaches; measure it (benchmarks.throughput, --throughput FILE)'
            )
        if rate.draws is None and rate.how in ('assumed', 'scaled', 'predicted'):
            certain.append(f'how wrong the images/s of {phase.name} may be ({rate.how}{": " if rate.note else ""}{rate.note})')
    unfit_here = [f'{phase.name} does not fit on {num_gpus} {gpu}' for phase in phases if not phase.memory.fits]
    return ProjectPlan(cluster, tuple(rows), bill, tuple(dict.fromkeys(warnings)), tuple(not_counted), tuple(certain), tuple(unfit_here))


def _steps_alone(one: Column, price: Price) -> list[CostRow]:
    """Return time and money of the steps of all recipes on a cluster, or what is wrong with them there."""
    row = partial(CostRow, 'steps alone', num_gpus=one.cluster.num_gpus)
    if one.errors:
        return [row('no plan', None, '', formula=error) for error in one.errors]
    wall_hours = sum(phase.likely_hours for phase in one.phases)
    return [
        row('nodes', one.cluster.num_nodes, 'nodes'),
        row('days', wall_hours / HOURS_PER_DAY, 'days'),
        row('training', wall_hours * one.cluster.num_gpus, 'GPU-hour', price),
    ]


def memory_checks(facts: Facts, source: RateSource, gpu_gb: float) -> list[CostRow]:
    """Estimate memory for the settings of a throughput file's rows, next to what was measured on GPUs (a CPU's peak is that of the process).

    Rows of another precision, or with activations computed twice where the recipe has them once, are left out: other activations were counted.
    The quantity is the difference as a share of what was measured; the source of a row is a warning where that is too large.
    """
    recipe, checks = facts.recipe, []
    for (num_gpus, global_size), row in source.rows.items():
        peak, micro_size, per_node = (row.count(key) for key in ('peak_allocated_bytes', 'micro_size', 'gpus_per_node'))
        alike = (row.text('precision'), bool(row.row.get('checkpoint_activations'))) == (recipe.train.precision, recipe.train.checkpoint_activations)
        if peak is None or micro_size is None or not row.on_gpus or not alike:
            continue
        sharding: Any = row.text('sharding') or recipe.train.sharding
        average = recipe.ema if profiles(recipe.ema) else replace(recipe.ema, half_life=Duration('1ba'))
        measured = replace(
            recipe,
            batch=replace(recipe.batch, global_size=global_size, micro_size=micro_size),
            train=replace(recipe.train, sharding=sharding),
            ema=average if row.row.get('ema') else replace(recipe.ema, half_life=None, sigma_rel=[]),
        )
        estimated = replace(facts, recipe=measured).memory(Cluster(row.text('device'), gpu_gb, num_gpus, per_node or num_gpus)).total
        difference, on_gpus, warning = estimated / peak - 1, f'{facts.name} on {counted(num_gpus, "GPU")}', ''
        if abs(difference) > MEMORY_TOLERANCE:
            warning = (
                f'{on_gpus}: memory was estimated at {estimated / 1e9:,.1f} GB and measured at '
                f'{peak / 1e9:,.1f} GB: {difference:+.0%} is more than {MEMORY_TOLERANCE:.0%}; believe the measurement'
            )
        text = f'memory checked: {on_gpus}: estimated {estimated / 1e9:,.2f} GB, measured {peak / 1e9:,.2f} GB, {difference:+.1%}'
        check = partial(CostRow, 'memory checked', recipe=facts.name, num_gpus=num_gpus)
        checks.append(check('difference', difference, 'share', formula=text, source=warning))
        checks += [check('estimated', estimated, 'bytes'), check('measured', peak, 'bytes', kind='measured')]
    return checks


def _recipe_rows(phase: PhasePlan) -> Iterator[CostRow]:
    """Yield what a recipe requires on any number of GPUs; rows with a formula are lines of the page."""
    facts, recipe, counts, adapter = phase.facts, phase.facts.recipe, phase.facts.counts, phase.facts.recipe.adapter
    row = partial(CostRow, 'recipe', kind='counted', recipe=facts.name)
    known, epochs = 'in the manifests' if facts.images_known else 'assumed', ''
    if facts.epochs is not None:
        epochs = f', {spread_text(facts.epochs, 2)} epochs of {spread_text(facts.num_images)} images ({known})'
    yield row('resolution', facts.resolution, 'px', kind='given', source=recipe.data.kind)
    line = f'{counted(facts.phase.num_samples, "sample")} = {facts.num_batches:,} steps x {recipe.batch.global_size:,}{epochs}'
    yield row('trains on', facts.phase.num_samples, 'samples', formula=line, kind='given')
    yield row('steps', facts.num_batches, 'steps', kind='given')
    yield row('images', facts.num_images, 'images', kind=known)
    yield row('epochs', facts.epochs, 'epochs', kind=known)

    others, trained = counts.trained_parameters - counts.num_parameters, ''
    if others > 0:
        trained = f', and {others:,} of its discriminator'
    elif adapter is not None:
        text = ' and of the text encoders' if adapter.text_encoders else ''
        trained = f', frozen; trained are {counts.trained_parameters:,} of its adapter{text} (LoRA of rank {adapter.rank} on {adapter.targets})'
    yield row('network', counts.num_parameters, 'parameters', formula=f'{recipe.trained_network}, {counts.num_parameters:,} parameters{trained}')
    yield row('trained', counts.trained_parameters, 'parameters')
    flop = f'{counts.flop / 1e9:,.2f} GFLOP a sample, forward and backward (1 MAC = 2 FLOP); {facts.total_flop:.2e} in all'
    yield row('FLOP', counts.flop, 'FLOP a sample', formula=flop)
    yield row('FLOP in all', facts.total_flop, 'FLOP')

    encoders = counts.encoders
    if isinstance(recipe, AutoencoderRecipe):
        named = (('perceptual network', recipe.autoencoder.perceptual), ('discriminator', recipe.autoencoder.adversarial))
        counted_too = ' and '.join(f'the {name}' for name, section in named if section is not None)
        text = f'none; the FLOP are with {counted_too}' if counted_too else 'none'
    elif encoders is None:
        text = (
            'not counted: their architecture is not known without their weights (name a folder in the diffusers layout); '
            f'assumed are {PIXELS_PER_LATENT} pixels per latent along a side and captions of {TEXT_LENGTH} tokens'
        )
    else:
        vae = f' and VAE {encoders.vae_flop / 1e9:,.1f} GFLOP' if facts.encodes_images else ''
        passes = 'forward, and through the text encoders back' if adapter is not None and adapter.text_encoders else 'forward'
        text = (
            f'in each step, {passes}: text {encoders.text_flop / 1e9:,.1f} GFLOP ({encoders.text_parameters / 1e6:,.0f} million parameters){vae} '
            f'a sample; {(facts.encoder_flop or 0) / counts.flop:.1%} of the network, not in its MFU'
        )
        if not facts.encodes_text:
            text = f'none in a step: captions are encoded before the first one, by {encoders.text_parameters / 1e6:,.0f} million parameters'
    yield row('encoders', facts.encoder_flop, 'FLOP a sample', formula=text)
    yield row('text encoder', encoders and encoders.text_flop, 'FLOP a sample')
    yield row('VAE', encoders.vae_flop if encoders and facts.encodes_images else None, 'FLOP a sample')


def _cluster_rows(phase: PhasePlan, cluster: Cluster, remedies: Sequence[str]) -> Iterator[CostRow]:
    """Yield what a recipe requires and does on a cluster; rows with a formula are lines of the page."""
    facts, rate, memory, fleet, sample_bytes = phase.facts, phase.rate, phase.memory, phase.fleet, phase.sample_bytes
    recipe, gpus = facts.recipe, counted(cluster.num_gpus, 'GPU')
    row, in_memory, alone = (
        partial(CostRow, group, kind='predicted', recipe=facts.name, num_gpus=cluster.num_gpus) for group in ('recipe', 'memory', 'steps alone')
    )

    if fleet is not None:
        yield row('elsewhere', fleet.encoders.actors, 'encoders', formula=str(fleet), kind='given')
        yield row('encoders that keep up', fleet.num_needed, 'encoders')
        yield row('without a limit', fleet.unlimited, 'images/s')
        yield row('speed of training', fleet.speed, 'share')
        yield from (row(f'traffic {way}', amount, 'MB/s') for way, amount in zip(('out', 'back'), fleet.mb_per_sec, strict=True))

    how = f'{recipe.train.sharding}, {recipe.train.precision}' + (', activations computed twice' if recipe.train.checkpoint_activations else '')
    auto = ' (auto: the largest that should fit)' if recipe.batch.micro_size == 'auto' else ''
    verdict = f'{"fits" if memory.fits else "does not fit"} into {MEMORY_SHARE:.0%} of {cluster.gpu_gb:g} GB of {cluster.gpu}'
    if not memory.fits:
        verdict += f': set {" or ".join(remedies)}' if remedies else ': take a larger GPU'
    total = f'{memory.total / 1e9:,.1f} GB a GPU ({how}, micro-batch {memory.micro_size}{auto}, {gpus}); {verdict}'
    yield row('memory', memory.total, 'bytes a GPU', formula=total)
    width = max(len(name) for name in memory.parts)
    for name, num_bytes in memory.parts.items():
        each = f'  = {memory.micro_size} x {facts.per_sample_bytes / 1e6:,.0f} MB' if name == 'activations' else ''
        yield in_memory(name, num_bytes, 'bytes a GPU', formula=f'  {name:<{width}} {num_bytes / 1e9:6,.2f} GB{each}')

    if recipe.data.kind == 'synthetic':
        yield row('loader', 0.0, 'bytes/s a node', formula='synthetic data: nothing is read or stored')
    else:
        per_node = spread_text(sample_bytes * rate.images_per_sec / cluster.num_nodes / 1e6)
        nodes = counted(cluster.num_nodes, 'node')
        line = f'{spread_text(sample_bytes)} bytes a sample x {rate.images_per_sec:,.6g} images/s / {nodes} = {per_node} MB/s a node'
        yield row('loader', median(sample_bytes) * rate.images_per_sec / cluster.num_nodes, 'bytes/s a node', formula=line)
        if facts.num_images is not None:
            terabytes = sample_bytes * facts.num_images / 1e12
            yield row('dataset', terabytes, 'TB', formula=f'{spread_text(terabytes)} TB')
    size = facts.checkpoint_bytes
    written = f'{size / 1e9:,.1f} GB' if size >= 1e9 else f'{size / 1e6:,.0f} MB'
    yield row('checkpoints', phase.num_checkpoints, 'checkpoints', formula=f'{written} each, {phase.num_checkpoints} kept')
    yield row('checkpoint', size, 'bytes')
    if (samples := facts.samples) is not None and facts.num_scores:
        share = f'{spread_text(100 * median(phase.score_hours / phase.hours), 2)} % of the time of the steps'
        how = f'{samples.count:,} images at guidance {samples.guidance:g} in {samples.steps} steps'
        yield row('scores', facts.num_scores, 'times', formula=f'{facts.num_scores:,} x {how}: {share}, if drawing reaches their FLOP/s')
    yield row('throughput', rate.images_per_sec, 'images/s', formula=phase.source.text, kind=rate.how, source=rate.note)

    yield alone('MFU', phase.mfu, 'share')
    yield alone('micro-batch', memory.micro_size, 'samples', source='' if memory.fits else 'does not fit')
    yield alone('hours', phase.likely_hours, 'hours')
    if phase.needs:
        yield alone('needs', memory.micro_size, 'samples', formula=f"{facts.name}: needs {phase.needs}, a GPU's share of the batch")
