"""A plan as a person reads it. Nothing is rounded before it is written here; tables fit 120 columns, other lines are wrapped there."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from diffusion.common.tables import markdown_table
from diffusion.common.text import counted
from diffusion.cost.assumptions import Assumptions
from diffusion.cost.bill_text import (
    bill_formulas,
    bill_prices,
    bill_table,
    choice_text,
    dollars_text,
    groups_table,
    people_text,
    plans_table,
)  # fmt: skip
from diffusion.cost.facts import Cluster, Facts
from diffusion.cost.formulas import HOURS_PER_DAY
from diffusion.cost.memory import MEMORY_SHARE
from diffusion.cost.prices import Price
from diffusion.cost.project import Column, MemoryCheck, PhasePlan, ProjectPlan
from diffusion.cost.rates import RateSource
from diffusion.cost.uncertain import spread_text
from diffusion.recipe.rules import PIXELS_PER_LATENT, TEXT_LENGTH

WIDTH = 120


def plan_text(plan: ProjectPlan) -> str:
    """Write the whole page: each recipe, the table over GPUs, the bill, the price plans."""
    cluster, bill = plan.chosen.cluster, plan.bill
    on_gpus = f'on {counted(cluster.num_gpus, "GPU")}'
    parts = [
        f'# Plan: {", then ".join(phase.facts.name for phase in plan.chosen.phases)}',
        f'Nothing here was measured by this command. GPU {cluster.gpu}, {cluster.gpus_per_node} a node.',
    ]
    for phase, source, remedies in zip(plan.chosen.phases, plan.sources, plan.remedies, strict=True):
        parts += recipe_text(phase, source, cluster, plan.assumed, remedies)
    notes = [*notes_text(plan.columns), *map(check_text, plan.checks), *(f'warning: {warning}' for warning in plan.warnings)]
    wall_days = spread_text(bill.wall_hours / HOURS_PER_DAY, 2)
    parts += [
        f'## Time and money of the steps alone, at {plan.price}',
        counts_text(plan.columns, plan.price),
        _lines(notes),
        f'## The bill {on_gpus}: {wall_days} days with evaluation, saves, failures and restarts',
        bill_table(bill),
        groups_table(bill),
        _lines([people_text(bill)]),
        _lines([f'not in these ranges: {text}' for text in plan.taken_for_certain]),
        _lines([choice_text(plan.choice)] if plan.choice is not None else []),
        _lines(['By the formulas:', *(f'  {text}' for text in bill_formulas(bill))]),
        _lines(['At these prices:', *(f'  {text}' for text in bill_prices(bill))]),
        f'## Training alone {on_gpus}, by price plan',
        plans_table(plan.outcomes, plan.deadline_days),
    ]
    return '\n\n'.join(part for part in parts if part)


def _lines(texts: Sequence[str], indent: str = '    ') -> str:
    return '\n'.join(textwrap.fill(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False) for text in texts)


def recipe_text(phase: PhasePlan, source: RateSource, cluster: Cluster, assumed: Assumptions, remedies: Sequence[str]) -> list[str]:
    """Write the requirements of one recipe on the cluster of the bill: a heading, and a line per subject."""
    facts, recipe = phase.facts, phase.facts.recipe
    known = 'in the manifests' if facts.images_known else 'assumed'
    epochs = '' if facts.epochs is None else f', {spread_text(facts.epochs, 2)} epochs of {spread_text(facts.num_images)} images ({known})'
    lines = [
        f'trains on   {counted(facts.phase.num_samples, "sample")} = {facts.num_batches:,} steps x {recipe.batch.global_size:,}{epochs}',
        f'network     {recipe.model.network}, {facts.counts.num_parameters:,} parameters',
        f'FLOP        {facts.counts.flop / 1e9:,.2f} GFLOP a sample, forward and backward (1 MAC = 2 FLOP); {facts.total_flop:.2e} in all',
        f'encoders    {_encoders(facts)}',
        *_memory(phase, cluster, remedies),
        *_loader(phase, cluster, assumed),
        f'checkpoints {facts.checkpoint_bytes / 1e9:,.1f} GB each, {phase.training.num_checkpoints} kept',
        f'throughput  {source.text}',
    ]
    return [f'## {facts.name}: {facts.resolution} px, {recipe.data.kind}', _lines(lines, ' ' * 12)]


def _encoders(facts: Facts) -> str:
    encoders = facts.counts.encoders
    if encoders is None:
        return (
            'not counted: their architecture is not known without their weights (name a folder in the diffusers layout); '
            f'assumed are {PIXELS_PER_LATENT} pixels per latent along a side and captions of {TEXT_LENGTH} tokens'
        )
    text = f'text {encoders.text_flop / 1e9:,.1f} GFLOP ({encoders.text_parameters / 1e6:,.0f} million parameters)'
    vae = f' and VAE {encoders.vae_flop / 1e9:,.1f} GFLOP' if facts.encodes_images else ''
    share = (facts.encoder_flop or 0) / facts.counts.flop
    return f'in each step, forward: {text}{vae} a sample; {share:.1%} of the network, not in its MFU'


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


def _loader(phase: PhasePlan, cluster: Cluster, assumed: Assumptions) -> list[str]:
    facts, rate = phase.facts, phase.rate.images_per_sec
    if facts.recipe.data.kind == 'synthetic':
        return ['loader      synthetic data: nothing is read or stored']
    sample_bytes, nodes = facts.sample_bytes(assumed), counted(cluster.num_nodes, 'node')
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
                f'{phase.training.hours:,.1f}',
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


def check_text(check: MemoryCheck) -> str:
    return (
        f'memory checked: {check.name} on {counted(check.num_gpus, "GPU")}: estimated {check.estimated_bytes / 1e9:,.2f} GB, measured '
        f'{check.measured_bytes / 1e9:,.2f} GB, {check.difference:+.1%}'
    )
