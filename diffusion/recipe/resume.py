"""Which fields of a recipe may differ when a run goes on.

Composer takes the optimizer, the schedule and the data order of a resumed run from its checkpoint: a changed learning rate would
be recorded and never used. So what shapes the result must stay, and only what does not may change.
"""

from __future__ import annotations

from typing import Any

MAY_CHANGE = (
    'name',
    'run_folder',
    'load_path',
    'train.duration',
    'train.compile',
    'train.cpu_threads',
    'batch.micro_size',
    'data.streams',
    'data.workers',
    'data.predownload',
    'data.cache_limit',
    'eval',
    'checkpoint',
    'log',
    'cost',
)


def changed_fields(before: dict[str, Any], now: dict[str, Any], prefix: str = '') -> list[str]:
    """`optimizer.lr: 0.0001 -> 0.001` for every field that differs and may not; recipes as plain dictionaries."""
    changes = []
    for key in sorted({**before, **now}):
        path, old, new = f'{prefix}{key}', before.get(key), now.get(key)
        if path in MAY_CHANGE:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            changes += changed_fields(old, new, f'{path}.')
        elif old != new:
            changes.append(f'{path}: {old} -> {new}')
    return changes
