"""A plan for machines: unrounded; uncertain numbers as [p10, p50, p90]."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from diffusion.cost.assumptions import Assumptions
from diffusion.cost.bill import Bill
from diffusion.cost.prices import Price
from diffusion.cost.project import Column, PhasePlan, ProjectPlan
from diffusion.cost.rates import RateSource
from diffusion.cost.uncertain import median, quantiles


def plan_json(plan: ProjectPlan) -> dict[str, Any]:
    cluster = plan.chosen.cluster
    return {
        'gpu': cluster.gpu,
        'gpus_per_node': cluster.gpus_per_node,
        'price': asdict(plan.price),
        'recipes': [_recipe(phase, source) for phase, source in zip(plan.chosen.phases, plan.sources, strict=True)],
        'gpu_counts': [_column(column, plan.price, plan.assumed) for column in plan.columns],
        'bill_gpus': cluster.num_gpus,
        'bill': bill_json(plan.bill),
        'taken_for_certain': plan.taken_for_certain,
        'deadline_days': plan.deadline_days,
        'plans': [
            asdict(outcome) | {'wall_hours': quantiles(outcome.wall_hours), 'dollars': quantiles(outcome.dollars)} for outcome in plan.outcomes
        ],
        'memory_checks': [asdict(check) | {'difference': check.difference} for check in plan.checks],
        'warnings': [*plan.warnings, *plan.unfit],
    }


def bill_json(bill: Bill) -> dict[str, Any]:
    lines = [
        asdict(line) | {'quantity': quantiles(line.quantity), 'unit': line.price.unit, 'dollars': quantiles(line.dollars), 'share': share}
        for line, share in zip(bill.lines, bill.shares(), strict=True)
    ]
    totals = {'dollars': quantiles(bill.dollars), 'gpu_hours': quantiles(bill.gpu_hours), 'wall_hours': quantiles(bill.wall_hours)}
    return {**totals, 'groups': {group: quantiles(bill.of(group)) for group in bill.groups}, 'lines': lines}


def _recipe(phase: PhasePlan, source: RateSource) -> dict[str, Any]:
    facts, encoders = phase.facts, phase.facts.counts.encoders
    return {
        'name': facts.name,
        'network': facts.recipe.model.network,
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
        'throughput': source.text,
    }


def _column(column: Column, price: Price, assumed: Assumptions) -> dict[str, Any]:
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
            'hours': phase.training.hours,
            'micro_size': phase.memory.micro_size,
            'needs': phase.needs or None,
            'memory_bytes': {**phase.memory.parts, 'total': phase.memory.total},
            'fits': phase.memory.fits,
            'loader_bytes_per_sec_per_node': median(phase.facts.sample_bytes(assumed)) * phase.rate.images_per_sec / column.cluster.num_nodes,
        }
        for phase in column.phases
    ]
    return {**counts, 'phases': phases, 'days': column.days, 'gpu_hours': column.gpu_hours, 'dollars': column.gpu_hours * price.dollars}
