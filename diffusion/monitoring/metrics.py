"""Which metrics are worth writing, and which batch they belong to. The local log and W&B ask here."""

from collections.abc import Mapping
from typing import Any

# Logged before Composer counts the batch, and written every `log.every` batches; the rest is logged after, and written when it comes.
BEFORE_THE_COUNT = ('loss/train/', 'grad_norm', 'lr-')
# Composer's own counters and settings, which say what the batch number and the recipe say.
REPEATED = ('time/', 'trainer/')
OUR_TIMES = ('time/elapsed_hours', 'time/remaining_hours')

LEARNING_RATE = 'learning rate'


def plain_name(metric: str) -> str:
    """Return the name of a metric whatever the optimizer: LEARNING_RATE for `lr-AdamW/group0`, the rate of the optimizer's first group."""
    return LEARNING_RATE if metric.startswith('lr-') and metric.endswith('/group0') else metric


def worth_writing(metrics: Mapping[str, Any], step: int, every: int) -> dict[int, dict[str, Any]]:
    """Return the metrics to keep, by the number of finished batches that they describe."""
    kept: dict[int, dict[str, Any]] = {}
    for name, value in metrics.items():
        batch = step + 1 if name.startswith(BEFORE_THE_COUNT) else step
        repeated = name.startswith(REPEATED) and name not in OUR_TIMES
        between = name.startswith(BEFORE_THE_COUNT) and batch % every != 0
        if not repeated and not between:
            kept.setdefault(batch, {})[name] = value
    return kept
