"""A plan as a person reads it, and as JSON. Nothing is rounded before it is written here."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from diffusion.common.tables import markdown_table
from diffusion.common.text import counted
from diffusion.cost.assumptions import Assumptions
from diffusion.cost.facts import Cluster, Facts
from diffusion.cost.formulas import days
from diffusion.cost.memory import MEMORY_SHARE
from diffusion.cost.prices import Price
from diffusion.cost.printed import bill_formulas, bill_prices, bill_table, choice_text, dollars_text, groups_table, people_text, plans_table
from diffusion.cost.project import Column, MemoryCheck, PhasePlan, ProjectPlan
from diffusion.cost.sources import Origin
from diffusion.cost.uncertain import median, quantiles, spread_text
from diffusion.recipe.rules import PIXELS_PER_LATENT, TEXT_LENGTH

WIDTH = 150  # columns of a line that is no table's


def plan_text(plan: ProjectPlan) -> str:
    """The whole page: each recipe, the table over GPUs, the bill, the price plans."""
    cluster, bill = plan.chosen.cluster, plan.bill
    lines = [f'# Plan: {", then ".join(phase.facts.name for phase in plan.chosen.phases)}', '']
    lines += [f'Nothing here was measured by this command. GPU {cluster.gpu}, {cluster.gpus_per_node} a node.', '']
    for phase, origin, remedies in zip(plan.chosen.phases, plan.origins, plan.remedies, strict=True):
        lines += [*recipe_text(phase, origin, cluster, plan.assumptions, remedies), '']
    lines += [f'## Time and money of the steps alone, at {plan.price}', '', counts_text(plan.columns, plan.price), '', *notes_text(plan.columns)]
    lines += [*map(check_text, plan.checks), *(f'warning: {warning}' for warning in plan.warnings), '']
    wall_days = spread_text(days(bill.wall_hours), 2)
    lines += [
        f'## The bill on {counted(cluster.num_gpus, "GPU")}: {wall_days} days with evaluation, saves, failures and restarts',
        '',
        bill_table(bill),
        '',
    ]
    lines += [groups_table(bill), '']
    lines += [people_text(bill), ''] if people_text(bill) else []
    lines += [*(f'not in these ranges: {text}' for text in plan.taken_for_certain), ''] if plan.taken_for_certain else []
    lines += [choice_text(plan.choice), ''] if plan.choice is not None else []
    lines += ['By the formulas:', *(f'  {text}' for text in bill_formulas(bill)), '']
    lines += ['At these prices:', *(f'  {text}' for text in bill_prices(bill)), '']
    return '\n'.join(
        [*lines, f'## Training alone on {counted(cluster.num_gpus, "GPU")}, by price plan', '', plans_table(plan.outcomes, plan.deadline_days)]
    )


def recipe_text(phase: PhasePlan, origin: Origin, cluster: Cluster, assumptions: Assumptions, remedies: Sequence[str]) -> list[str]:
    """What one recipe takes, on the cluster of the bill."""
    facts, recipe = phase.facts, phase.facts.recipe
    known = 'in the manifests' if facts.images_known else 'assumed'
    epochs = '' if facts.epochs is None else f', {spread_text(facts.epochs, 2)} epochs of {spread_text(facts.num_images)} images ({known})'
    lines = [
        f'trains on   {counted(facts.phase.num_samples, "sample")} = {facts.num_batches:,} steps x {recipe.batch.global_size:,}{epochs}',
        f'U-Net       {recipe.model.network}, {facts.counts.num_parameters:,} parameters',
        f'FLOP        {facts.counts.flop / 1e9:,.2f} GFLOP a sample, forward and backward (1 MAC = 2 FLOP); {facts.total_flop:.2e} in all',
        *_encoders(facts),
        *_memory(phase, cluster, remedies),
        *_loader(phase, cluster, assumptions),
        f'checkpoints {facts.checkpoint_bytes / 1e9:,.1f} GB each, {phase.training.num_checkpoints} kept',
        f'throughput  {origin.text}',
    ]
    wrapped = (part for line in lines for part in textwrap.wrap(line, WIDTH, subsequent_indent=' ' * 12, break_on_hyphens=False))
    return [f'## {facts.name}: {facts.resolution} px, {recipe.data.kind}', '', *wrapped]


def _encoders(facts: Facts) -> list[str]:
    encoders = facts.counts.encoders
    if encoders is None:
        return [
            'encoders    not counted: their architecture is not known without their weights (name a folder in the diffusers layout); '
            f'assumed are {PIXELS_PER_LATENT} pixels per latent along a side and captions of {TEXT_LENGTH} tokens'
        ]
    parts = [f'text {encoders.text_flop / 1e9:,.1f} GFLOP ({encoders.text_parameters / 1e6:,.0f} million parameters)']
    if facts.encodes_images:
        parts.append(f'VAE {encoders.vae_flop / 1e9:,.1f} GFLOP')
    share = (facts.encoder_flop or 0) / facts.counts.flop
    return [f'encoders    in each step beside it, forward: {" and ".join(parts)} a sample; {share:.1%} of the U-Net, not in its MFU']


def _memory(phase: PhasePlan, cluster: Cluster, remedies: Sequence[str]) -> list[str]:
    memory, train = phase.memory, phase.facts.recipe.train
    how = f'{train.sharding}, {train.precision}' + (', activations computed twice' if train.checkpoint_activations else '')
    auto = ' (auto: the largest that should fit)' if phase.facts.recipe.batch.micro_size == 'auto' else ''
    limit = f'{MEMORY_SHARE:.0%} of {cluster.gpu_gb:g} GB'
    verdict = f'fits into {limit} of {cluster.gpu}' if memory.fits else f'does not fit into {limit} of {cluster.gpu}'
    if not memory.fits:
        verdict += f': set {" or ".join(remedies)}' if remedies else ': take a larger GPU'
    width = max(len(name) for name in memory.parts)
    gpus = counted(cluster.num_gpus, 'GPU')
    each = f'{memory.micro_size} x {phase.facts.per_sample_bytes / 1e6:,.0f} MB'
    return [
        f'memory      {memory.total / 1e9:,.1f} GB a GPU ({how}, micro-batch {memory.micro_size}{auto}, {gpus}); {verdict}',
        *(
            f'              {name:<{width}} {num_bytes / 1e9:6,.2f} GB{f"  = {each}" if name == "activations" else ""}'
            for name, num_bytes in memory.parts.items()
        ),
    ]


def _loader(phase: PhasePlan, cluster: Cluster, assumptions: Assumptions) -> list[str]:
    facts, rate = phase.facts, phase.rate.images_per_sec
    if facts.recipe.data.kind == 'synthetic':
        return ['loader      synthetic data: nothing is read or stored']
    sample_bytes = facts.sample_bytes(assumptions)
    per_node = sample_bytes * rate / cluster.num_nodes / 1e6
    product = f'{spread_text(sample_bytes)} bytes a sample x {rate:,.6g} images/s / {counted(cluster.num_nodes, "node")}'
    lines = [f'loader      {product} = {spread_text(per_node)} MB/s a node']
    if facts.num_images is not None:
        lines.append(f'data set    {spread_text(sample_bytes * facts.num_images / 1e12)} TB')
    return lines


def counts_text(columns: Sequence[Column], price: Price) -> str:
    """One row a number of GPUs: the steps alone, without encoding, saves and restarts, which the bill adds."""
    sound = [column for column in columns if column.phases]
    if not sound:
        return ''
    phases = sound[0].phases
    header = ['GPUs']
    for phase in phases:
        header += [f'images/s, {phase.facts.name}', 'from:', 'MFU', 'micro', 'hours']
    header += ['days', 'GPU-hours', 'dollars']
    rows = []
    for column in sound:
        row: list[Any] = [str(column.cluster.num_gpus)]
        for phase in column.phases:
            fits = '' if phase.memory.fits else ' does not fit'
            row += [
                f'{phase.rate.images_per_sec:,.0f}' if phase.rate.images_per_sec >= 100 else f'{phase.rate.images_per_sec:,.2f}',
                phase.rate.how,
                'unknown' if phase.mfu is None else f'{phase.mfu:.1%}',
                f'{phase.memory.micro_size}{fits}',
                f'{phase.hours:,.1f}',
            ]
        rows.append([*row, f'{column.days:,.2f}', f'{column.gpu_hours:,.0f}', dollars_text(column.dollars(price))])
    return markdown_table(header, rows)


def notes_text(columns: Sequence[Column]) -> list[str]:
    """How far predictions reach, where the recipes need another micro-batch, and what is wrong with them on the other numbers of GPUs."""
    where: dict[str, list[int]] = {}  # numbers of GPUs, by what is said of them
    for column in columns:
        for phase in column.phases:
            said = [f'{phase.rate.how}: {phase.rate.note}'] if phase.rate.note else []
            if phase.needs:
                said.append(f"needs {phase.needs}, a GPU's share of the batch")
            for text in said:
                where.setdefault(f'{phase.facts.name}: {text}', []).append(column.cluster.num_gpus)
        for error in column.errors:
            where.setdefault(f'no plan: {error}', []).append(column.cluster.num_gpus)
    return [f'{", ".join(map(str, counts))} GPUs: {text}' for text, counts in where.items()]


def check_text(check: MemoryCheck) -> str:
    return (
        f'memory checked: {check.name} on {counted(check.num_gpus, "GPU")}: estimated {check.estimated / 1e9:,.2f} GB, measured '
        f'{check.measured / 1e9:,.2f} GB, {check.difference:+.1%}'
    )


def plan_json(plan: ProjectPlan) -> dict[str, Any]:
    """For machines; uncertain numbers as [p10, p50, p90]."""
    cluster = plan.chosen.cluster
    return {
        'gpu': cluster.gpu,
        'gpus_per_node': cluster.gpus_per_node,
        'price': _price_json(plan.price),
        'recipes': [_facts_json(phase, origin) for phase, origin in zip(plan.chosen.phases, plan.origins, strict=True)],
        'gpu_counts': [_column_json(column, plan.price, plan.assumptions) for column in plan.columns],
        'bill_gpus': cluster.num_gpus,
        'bill': plan.bill.to_dict(),
        'taken_for_certain': plan.taken_for_certain,
        'deadline_days': plan.deadline_days,
        'plans': [
            {
                'price': _price_json(outcome.price),
                'wall_hours': quantiles(outcome.wall_hours),
                'dollars': quantiles(outcome.dollars),
                'probability_by_deadline': outcome.probability,
                'problem': outcome.problem,
                'reserved_hours': outcome.reserved_hours,
            }
            for outcome in plan.outcomes
        ],
        'memory_checks': [
            {
                'name': check.name,
                'num_gpus': check.num_gpus,
                'estimated_bytes': check.estimated,
                'measured_bytes': check.measured,
                'difference': check.difference,
            }
            for check in plan.checks
        ],
        'warnings': [*plan.warnings, *plan.unfit],
    }


def _price_json(price: Price) -> dict[str, Any]:
    return {'name': price.name, 'dollars': price.dollars, 'date': price.date, 'source': price.source}


def _facts_json(phase: PhasePlan, origin: Origin) -> dict[str, Any]:
    facts, encoders = phase.facts, phase.facts.counts.encoders
    return {
        'name': facts.name,
        'unet': facts.recipe.model.network,
        'resolution': facts.resolution,
        'kind': facts.recipe.data.kind,
        'num_samples': facts.phase.num_samples,
        'num_steps': facts.num_batches,
        'num_images': None if facts.num_images is None else quantiles(facts.num_images),
        'epochs': None if facts.epochs is None else quantiles(facts.epochs),
        'num_parameters': facts.counts.num_parameters,
        'flop_per_sample': facts.counts.flop,
        'total_flop': facts.total_flop,
        'text_flop_per_sample': encoders.text_flop if encoders else None,
        'vae_flop_per_sample': encoders.vae_flop if encoders and facts.encodes_images else None,
        'checkpoint_bytes': facts.checkpoint_bytes,
        'num_checkpoints': phase.training.num_checkpoints,
        'throughput': origin.text,
    }


def _column_json(column: Column, price: Price, assumptions: Assumptions) -> dict[str, Any]:
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
            'loader_bytes_per_sec_per_node': median(phase.facts.sample_bytes(assumptions)) * phase.rate.images_per_sec / column.cluster.num_nodes,
        }
        for phase in column.phases
    ]
    totals = {'days': column.days, 'gpu_hours': column.gpu_hours, 'dollars': column.dollars(price)}
    return {**counts, 'phases': phases, **totals}
