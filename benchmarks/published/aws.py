"""The AWS post on the cost of training: $600,000 for Stable Diffusion, by way of round numbers."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published.cells import OTHER_SOURCES, Cell, PublishedTable, down
from benchmarks.published.mosaicml import MODEL_CARD_GPU_HOURS
from diffusion.cost.formulas import baseline_of_ratio, days, discounted, dollars
from diffusion.cost.plans import HOURS_PER_YEAR

HOURS = 150_000  # of one A100
MACHINE = 32  # dollars per hour of a p4d.24xlarge, "over $32", 8 A100-40GB


def _cells() -> Iterator[Cell]:
    price = MACHINE / 8
    total = dollars(HOURS, price)
    yield Cell(
        'p4d.24xlarge', '$ per A100-hour', 4, price, '$32 / 8', '${:.2f}', note='list price of the time; AWS lowered its GPU prices in June 2025'
    )
    yield Cell('initial training', 'cost', 600_000, total, 'F4', '${:,.0f}')
    yield Cell('initial training', 'years on one A100, over', 17, HOURS / HOURS_PER_YEAR, 'F2', rounding=down())
    yield Cell(
        'initial training', 'A100-hours', HOURS, MODEL_CARD_GPU_HOURS, 'model card', '{:,.0f}', 0.01,
        differs=OTHER_SOURCES, note='under ours stands what the model card, Anyscale and MosaicML say: nothing that is worked out here',
    )  # fmt: skip
    yield Cell('32 machines', '$ per hour, over', 1_000, dollars(32, MACHINE), 'F4', '${:,.0f}', rounding=down(-3), note='256 A100')
    yield Cell('256 A100', 'days', None, days(baseline_of_ratio(HOURS, 256)), 'F2', '{:.1f}')
    yield Cell('reserved or savings plan', 'cost at 40 % less', None, discounted(total, 0.4), 'F10', '${:,.0f}')
    yield Cell('reserved or savings plan', 'cost at 60 % less', None, discounted(total, 0.6), 'F10', '${:,.0f}')
    yield Cell(
        'spot', 'cost at up to 90 % less', None, discounted(total, 0.9), 'F10', '${:,.0f}', note='only for runs that go on after any interruption'
    )
    yield Cell('other cost', 'share of the GPUs, at most', None, 1 / 0.9 - 1, 'F11', '{:.1%}', note='"GPUs are often over 90 %"')


AWS = PublishedTable(
    'aws-600k',
    'AWS: what Stable Diffusion cost',
    'the AWS post on the cost of training generative models',
    '150,000 A100-hours at about $4, on demand.',
    tuple(_cells()),
    ('The dollars are a product of two round numbers, not a bill.',),
)
