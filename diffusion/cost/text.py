"""A plan as a person reads it. Nothing is rounded before it is written here; tables fit 120 columns, other lines are wrapped there."""

import textwrap
from collections.abc import Sequence
from typing import Any

from diffusion.common.text import counted, markdown_table
from diffusion.cost.bill import Bill, PlanOutcome
from diffusion.cost.encoders import NO_PRICE, fleet_text
from diffusion.cost.encoding import IN_STEP, OFFLINE, ONLINE, EncodingWays
from diffusion.cost.facts import Cluster, Facts
from diffusion.cost.formulas import HOURS_PER_DAY, Number
from diffusion.cost.memory import MEMORY_SHARE
from diffusion.cost.prices import Price
from diffusion.cost.project import Column, PhasePlan, ProjectPlan
from diffusion.cost.uncertain import is_uncertain, median, quantiles, spread_text, two_digits
from diffusion.recipe import AutoencoderRecipe
from diffusion.recipe.rules import PIXELS_PER_LATENT, TEXT_LENGTH

WIDTH = 120
CENT = 0.01  # dollars
PEOPLE_SHARE = 0.5  # of a bill, above which it is printed


def plan_text(plan: ProjectPlan) -> str:
    """Write the whole page: each recipe, the table over GPUs, the bill, the price plans."""
    cluster, bill = plan.chosen.cluster, plan.bill
    on_gpus = f'on {counted(cluster.num_gpus, "GPU")}'
    parts = [
        f'# Plan: {", then ".join(phase.facts.name for phase in plan.chosen.phases)}',
        f'Nothing here was measured by this command. GPU {cluster.gpu}, {cluster.gpus_per_node} a node.',
    ]
    for phase, remedies in zip(plan.chosen.phases, plan.remedies, strict=True):
        parts += recipe_text(phase, cluster, remedies)
    checks = [
        f'memory checked: {check.name} on {counted(check.num_gpus, "GPU")}: estimated {check.estimated_bytes / 1e9:,.2f} GB, measured '
        f'{check.measured_bytes / 1e9:,.2f} GB, {check.difference:+.1%}'
        for check in plan.checks
    ]
    notes = [*notes_text(plan.columns), *checks, *(f'warning: {warning}' for warning in plan.warnings)]
    wall_days = spread_text(bill.wall_hours / HOURS_PER_DAY, 2)
    parts += [
        f'## Time and money of the steps alone, at {bill.plan.price}',
        counts_text(plan.columns, bill.plan.price),
        _lines(notes),
        f'## The bill {on_gpus}: {wall_days} days with evaluation, saves, failures and restarts',
        bill_table(bill),
        groups_table(bill),
        _lines([people_text(bill)]),
        _lines([f'not counted: {text}' for text in plan.not_counted]),
        _lines([f'not in these ranges: {text}' for text in plan.taken_for_certain]),
        '' if plan.show_encoding else _lines(_pointer(plan.encoding)),
        _lines(['By the formulas:', *(f'  {line.name}: {line.formula}' for line in bill.lines)]),
        _lines(['At these prices:', *dict.fromkeys(f'  {line.price}' for line in bill.lines)]),
        *_encoding(plan),
        f'## Training alone {on_gpus}, by price plan',
        plans_table(plan.outcomes, plan.deadline_days),
    ]
    return '\n\n'.join(part for part in parts if part)


def _encoding(plan: ProjectPlan) -> list[str]:
    if not (plan.show_encoding and plan.encoding):
        return []
    on_gpus = counted(plan.chosen.cluster.num_gpus, 'GPU')
    texts = encoding_text(plan.encoding, plan.headroom)
    return [f'## Encoding: in step, online, offline ({on_gpus}, the steps alone)', encoding_table(plan.encoding), _lines(texts)]


def _pointer(phases: Sequence[EncodingWays]) -> list[str]:
    totals = {
        name: sum(way.dollars for one in phases for way in one.ways if way.name == name)
        for name in (OFFLINE, ONLINE, IN_STEP)
        if phases and all(one.way(name) is not None for one in phases)
    }
    if OFFLINE not in totals:
        return []
    texts = [f'{name} {dollars_text(dollars)}' for name, dollars in totals.items()]
    return [f'steps with encoding, {", ".join(texts)}: --encoding shows how']


def _lines(texts: Sequence[str], indent: str = '    ') -> str:
    return '\n'.join(textwrap.fill(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False) for text in texts)


def recipe_text(phase: PhasePlan, cluster: Cluster, remedies: Sequence[str]) -> list[str]:
    """Write the requirements of one recipe on the cluster of the bill: a heading, and a line per subject."""
    facts, recipe = phase.facts, phase.facts.recipe
    known = 'in the manifests' if facts.images_known else 'assumed'
    epochs = '' if facts.epochs is None else f', {spread_text(facts.epochs, 2)} epochs of {spread_text(facts.num_images)} images ({known})'
    lines = [
        f'trains on   {counted(facts.phase.num_samples, "sample")} = {facts.num_batches:,} steps x {recipe.batch.global_size:,}{epochs}',
        f'network     {recipe.trained_network}, {facts.counts.num_parameters:,} parameters{_adapter(facts)}',
        f'FLOP        {facts.counts.flop / 1e9:,.2f} GFLOP a sample, forward and backward (1 MAC = 2 FLOP); {facts.total_flop:.2e} in all',
        f'encoders    {_encoders(facts)}',
        *([f'elsewhere   {fleet_text(phase.fleet)}'] if phase.fleet is not None else []),
        *_memory(phase, cluster, remedies),
        *_loader(phase, cluster),
        f'checkpoints {_size(facts.checkpoint_bytes)} each, {phase.training.num_checkpoints} kept',
        *_scores(phase),
        f'throughput  {phase.source.text}',
    ]
    return [f'## {facts.name}: {facts.resolution} px, {recipe.data.kind}', _lines(lines, ' ' * 12)]


def _scores(phase: PhasePlan) -> list[str]:
    facts, samples = phase.facts, phase.facts.samples
    if samples is None or not facts.num_scores:
        return []
    share = f'{spread_text(100 * median(phase.training.score_hours / phase.training.hours), 2)} % of the time of the steps'
    how = f'{samples.count:,} images at guidance {samples.guidance:g} in {samples.steps} steps'
    return [f'scores      {facts.num_scores:,} x {how}: {share}, if drawing reaches their FLOP/s']


def _adapter(facts: Facts) -> str:
    adapter, others = facts.recipe.adapter, facts.counts.trained_parameters - facts.counts.num_parameters
    if others > 0:
        return f', and {others:,} of its discriminator'
    if adapter is None:
        return ''
    text = ' and of the text encoders' if adapter.text_encoders else ''
    return f', frozen; trained are {facts.counts.trained_parameters:,} of its adapter{text} (LoRA of rank {adapter.rank} on {adapter.targets})'


def _size(num_bytes: int) -> str:
    return f'{num_bytes / 1e9:,.1f} GB' if num_bytes >= 1e9 else f'{num_bytes / 1e6:,.0f} MB'


def _encoders(facts: Facts) -> str:
    encoders = facts.counts.encoders
    if isinstance(facts.recipe, AutoencoderRecipe):
        losses = facts.recipe.autoencoder
        named = (('perceptual network', losses.perceptual), ('discriminator', losses.adversarial))
        counted_too = ' and '.join(f'the {name}' for name, section in named if section is not None)
        return f'none; the FLOP are with {counted_too}' if counted_too else 'none'
    if encoders is None:
        return (
            'not counted: their architecture is not known without their weights (name a folder in the diffusers layout); '
            f'assumed are {PIXELS_PER_LATENT} pixels per latent along a side and captions of {TEXT_LENGTH} tokens'
        )
    text = f'text {encoders.text_flop / 1e9:,.1f} GFLOP ({encoders.text_parameters / 1e6:,.0f} million parameters)'
    vae = f' and VAE {encoders.vae_flop / 1e9:,.1f} GFLOP' if facts.encodes_images else ''
    share, adapter = (facts.encoder_flop or 0) / facts.counts.flop, facts.recipe.adapter
    passes = 'forward, and through the text encoders back' if adapter is not None and adapter.text_encoders else 'forward'
    return f'in each step, {passes}: {text}{vae} a sample; {share:.1%} of the network, not in its MFU'


def _memory(phase: PhasePlan, cluster: Cluster, remedies: Sequence[str]) -> list[str]:
    memory, train = phase.memory, phase.facts.recipe.train
    how = f'{train.sharding}, {train.precision}' + (', activations computed twice' if train.checkpoint_activations else '')
    auto = ' (auto: the largest that should fit)' if phase.facts.recipe.batch.micro_size == 'auto' else ''
    verdict = f'{"fits" if memory.fits else "does not fit"} into {MEMORY_SHARE:.0%} of {cluster.gpu_gb:g} GB of {cluster.gpu}'
    if not memory.fits:
        verdict += f': set {" or ".join(remedies)}' if remedies else ': take a larger GPU'
    width = max(len(name) for name in memory.parts)
    each = f'  = {memory.micro_size} x {phase.facts.per_sample_bytes / 1e6:,.0f} MB'
    gpus = counted(cluster.num_gpus, 'GPU')
    return [
        f'memory      {memory.total / 1e9:,.1f} GB a GPU ({how}, micro-batch {memory.micro_size}{auto}, {gpus}); {verdict}',
        *(
            f'              {name:<{width}} {num_bytes / 1e9:6,.2f} GB{each if name == "activations" else ""}'
            for name, num_bytes in memory.parts.items()
        ),
    ]


def _loader(phase: PhasePlan, cluster: Cluster) -> list[str]:
    facts, rate, sample_bytes = phase.facts, phase.rate.images_per_sec, phase.training.sample_bytes
    if facts.recipe.data.kind == 'synthetic':
        return ['loader      synthetic data: nothing is read or stored']
    nodes = counted(cluster.num_nodes, 'node')
    per_node = spread_text(sample_bytes * rate / cluster.num_nodes / 1e6)
    lines = [f'loader      {spread_text(sample_bytes)} bytes a sample x {rate:,.6g} images/s / {nodes} = {per_node} MB/s a node']
    return lines if facts.num_images is None else [*lines, f'dataset     {spread_text(sample_bytes * facts.num_images / 1e12)} TB']


def counts_text(columns: Sequence[Column], price: Price) -> str:
    """Write a table per recipe, and one of their sum: the steps alone, without encoding, saves and restarts, which the bill adds."""
    sound = [column for column in columns if column.phases]
    tables = []
    for i in range(len(sound[0].phases) if sound else 0):
        rows: list[list[Any]] = []
        for column in sound:
            phase = column.phases[i]
            rows.append([
                str(column.cluster.num_gpus),
                f'{phase.rate.images_per_sec:,.0f}' if phase.rate.images_per_sec >= 100 else f'{phase.rate.images_per_sec:,.2f}',
                phase.rate.how,
                'unknown' if phase.mfu is None else f'{phase.mfu:.1%}',
                f'{phase.memory.micro_size}{"" if phase.memory.fits else " does not fit"}',
                f'{phase.hours:,.1f}',
            ])  # fmt: skip
        tables.append(markdown_table(['GPUs', f'images/s, {sound[0].phases[i].facts.name}', 'from:', 'MFU', 'micro', 'hours'], rows))
    totals = [[str(one.cluster.num_gpus), f'{one.days:,.2f}', f'{one.gpu_hours:,.0f}', dollars_text(one.gpu_hours * price.dollars)] for one in sound]
    return '\n\n'.join([*tables, markdown_table(['GPUs', 'days', 'GPU-hours', 'dollars'], totals)]) if sound else ''


def notes_text(columns: Sequence[Column]) -> list[str]:
    """Write the reach of predictions, other micro-batches that recipes need, and errors on other numbers of GPUs."""
    where: dict[str, list[int]] = {}  # numbers of GPUs, by note
    for column in columns:
        notes = [f'no plan: {error}' for error in column.errors]
        for phase in column.phases:
            notes += [f'{phase.facts.name}: {phase.rate.how}: {phase.rate.note}'] if phase.rate.note else []
            notes += [f"{phase.facts.name}: needs {phase.needs}, a GPU's share of the batch"] if phase.needs else []
        for note in notes:
            where.setdefault(note, []).append(column.cluster.num_gpus)
    return [f'{", ".join(map(str, counts))} GPU{"" if counts == [1] else "s"}: {note}' for note, counts in where.items()]


def dollars_text(amount: Number) -> str:
    """Write `$1,234`, below ten dollars with cents; of a range the median with two digits; nothing finer than a cent."""
    value = median(amount)
    if 0 < value < CENT:
        return f'<${CENT:g}'
    if is_uncertain(amount):
        return f'${two_digits(value)}'
    return f'${value:,.2f}' if 0 < value < 10 else f'${value:,.0f}'


def bill_table(bill: Bill) -> str:
    """Write every line, the total last. Medians do not add up: the total's p50 is that of the sums. Lines of less than a cent are one row."""
    rows, small = [], []
    for line in bill.lines:
        if 0 < quantiles(line.dollars)[2] < CENT:
            small.append(line)
            continue
        quantity = two_digits(median(line.quantity)) if is_uncertain(line.quantity) else spread_text(line.quantity)
        rows.append((line.name, quantity, line.price.unit, line.price.amount, *_amounts(bill, line.dollars)))
    if small:
        rows.append((f'{counted(len(small), "line")} below a cent', '', '', '', *_amounts(bill, sum(line.dollars for line in small))))
    rows.append(('total', '', '', '', *_amounts(bill, bill.dollars)))
    return markdown_table(('what', 'quantity', 'unit:', 'unit price', *_titles(bill)), rows)


def groups_table(bill: Bill) -> str:
    """Write the sums of lines that belong together, whose percentiles are not the sums of theirs."""
    return markdown_table(('part', *_titles(bill)), [(group, *_amounts(bill, bill.of(group))) for group in bill.groups])


def _titles(bill: Bill) -> tuple[str, ...]:
    return ('p10', 'p50', 'p90', 'share') if is_uncertain(bill.dollars) else ('dollars', 'share')


def _amounts(bill: Bill, dollars: Number) -> list[str]:
    """Return the cells below `_titles`."""
    texts = (
        [dollars_text(value) if 0 < value < CENT else f'${two_digits(value)}' for value in quantiles(dollars)]
        if is_uncertain(dollars)
        else [dollars_text(dollars)] * (len(_titles(bill)) - 1)
    )
    return [*texts, f'{bill.share(dollars):.1%}']


def people_text(bill: Bill) -> str:
    """Warn where people's work, which is assumed for a whole project, is most of the bill; empty elsewhere."""
    share = bill.share(bill.of('people'))
    if share <= PEOPLE_SHARE:
        return ''
    return (
        f'people are {share:.1%} of this bill, by an assumption that is made for a whole project (work.person_months); the rest is '
        f'{dollars_text(bill.dollars - bill.of("people"))}. Leave them out with --assume work.person_months=0, or give your own number'
    )


def plans_table(outcomes: Sequence[PlanOutcome], deadline_days: float | None = None) -> str:
    """Write training alone by plan, with the probability of a deadline if there is one; what has no numbers says why below.

    A reservation that is longer than the run is marked: most of its price is not for this run.
    """
    rows, below = [], list[str]()
    for outcome in outcomes:
        price, days, reserved_hours = outcome.price, spread_text(outcome.wall_hours / HOURS_PER_DAY, 2), outcome.reserved_hours
        is_mostly_unused = reserved_hours is not None and median(outcome.wall_hours) < reserved_hours
        numbers: list[str | None] = [None, None] if outcome.problem else [days, dollars_text(outcome.dollars)]
        if deadline_days is not None:
            numbers.append(None if outcome.probability_by_deadline is None else f'{outcome.probability_by_deadline:.0%}')
        rows.append((f'{price.name}{" (*)" if is_mostly_unused else ""}', price.amount, *numbers, price.date))
        if outcome.problem:
            below.append(f'{price.name}: {outcome.problem}')
        elif is_mostly_unused and reserved_hours is not None:
            reserved = f'reserved for {reserved_hours / HOURS_PER_DAY:,.0f} days, and the run takes {days}'
            below.append(f'(*) {price.name}: {reserved}: the dollars are those of the whole reservation')
    deadline = () if deadline_days is None else (f'in {deadline_days:g} days',)
    return '\n'.join([markdown_table(('plan', 'per GPU-hour', 'days', 'dollars', *deadline, 'price of'), rows), *below])


def encoding_table(phases: Sequence[EncodingWays]) -> str:
    """Write a line per phase and way to encode, and of several phases their sums."""
    rows: list[tuple[str, ...]] = []
    for one in phases:
        for way in one.ways:
            num = '' if way.num_encoders is None else f'{median(way.num_encoders):,.0f} {one.encoder.gpu}'
            machines = {IN_STEP: 'none', ONLINE: num, OFFLINE: one.encoder.gpu}[way.name]
            times = [_digits(number, way.steps_assumed) for number in (way.images_per_sec, way.training_hours)]
            hours = '' if way.name == IN_STEP else _digits(way.encoder_hours, way.encoders_assumed)
            encoding, storage = (_digits(number, way.encoders_assumed, '$') for number in (way.encoder_dollars, way.storage_dollars))
            total = _digits(way.dollars, way.steps_assumed or way.encoders_assumed, '$')
            rows.append(
                (one.name, way.name, machines, *times, hours, encoding, storage, _digits(way.training_dollars, way.steps_assumed, '$'), total)
            )
    for name in (IN_STEP, ONLINE, OFFLINE) if len(phases) > 1 else ():
        found = [chosen for one in phases if (chosen := one.way(name)) is not None]
        if len(found) == len(phases):
            sums = [sum(getattr(chosen, what) for chosen in found) for what in ('encoder_dollars', 'storage_dollars', 'training_dollars', 'dollars')]
            rows.append(('together', name, '', '', '', '', *(_digits(amount, True, '$') for amount in sums)))
    head = ('phase', 'encoding:', 'encoders:', 'images/s', 'hours', 'of encoders', 'encoding', 'storage', 'steps', 'total')
    return markdown_table(head, rows)


def _digits(number: Number, is_assumed: bool, sign: str = '') -> str:
    """Write the median, with two digits if it is assumed or uncertain."""
    value = median(number)
    if sign and 0 < value < CENT:
        return dollars_text(value)
    if is_assumed or is_uncertain(number):
        return sign + two_digits(value)
    return dollars_text(value) if sign else spread_text(value)


def encoding_text(phases: Sequence[EncodingWays], headroom: float) -> list[str]:
    """Write below the table where its numbers are from, which way is cheapest, and from which epoch encoding once is cheaper."""
    lines = []
    for one in phases:
        rate = one.encoder.rate
        if rate is None or one.encoder.price is None:
            lacking = (
                'images/s are not known (measure them: benchmarks.encode, --encoding-rates FILE)'
                if rate is None
                else f'price is not known: {NO_PRICE}'
            )
            lines.append(f'{one.name}: only in step is priced: the {lacking}')
            continue
        each = f'{rate.amount} images/s ({rate.how}: {rate.source}) at {one.encoder.price_text}'
        lines.append(f'{one.name}: an encoder does {each}; a step with the VAE in it takes {one.stretch:.2f} times as long ({one.stretch_source})')
        epochs = {name: epoch for name in (ONLINE, IN_STEP) if (epoch := one.offline_from(name)) is not None}
        wins = ' and '.join(f'than {name} from {counted(epoch, "epoch")} on' for name, epoch in epochs.items())
        cheapest = f'{one.name}: cheapest at {spread_text(one.epochs, 2)} epochs is {one.cheapest.name}'
        lines.append(f'{cheapest}; offline costs less {wins}' if wins else cheapest)
    return [
        *dict.fromkeys(lines),
        f'online: as many encoders as keep up with {headroom:.0%} headroom, or the recipe\'s; docs/cost.md, "Where to encode"',
    ]
