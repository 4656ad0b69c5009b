"""A local log that is always there: one JSON object a line in `log.jsonl`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

import torch
from composer.core import State
from composer.loggers import Logger, LoggerDestination
from composer.utils import dist


class JsonlLog(LoggerDestination):
    """Appends `{"batch": 120, "loss/train/total": 0.31, ...}` on rank 0; metrics of the same batch share a line.

    Training metrics are written every `every` batches, everything else (evaluation, throughput) when it comes. After a resume
    some batches appear twice: the later line is the one that counts.
    """

    def __init__(self, path: Path, every: int):
        self.path, self.every = path, every
        self.pending: dict[str, float | torch.Tensor] = {}
        self.pending_batch = 0
        self.file: TextIO | None = None

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if dist.get_global_rank() != 0 or step is None:
            return
        if step != self.pending_batch:
            self.flush()
            self.pending_batch = step
        for name, value in metrics.items():
            if name.startswith('time/') and name not in ('time/elapsed_hours', 'time/remaining_hours'):
                continue  # Composer's counters, which say what `batch` says
            if isinstance(value, (int, float, torch.Tensor)):
                self.pending[name] = value

    def flush(self) -> None:
        every_batch = ('loss/train/', 'lr-', 'trainer/')
        wanted = self.pending_batch % self.every == 0 or any(not name.startswith(every_batch) for name in self.pending)
        if self.pending and wanted:
            if self.file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                torn = self.path.exists() and not self.path.read_bytes().endswith(b'\n')
                self.file = self.path.open('a', buffering=1)
                self.file.write('\n' if torn else '')  # a line that a kill cut short must not swallow the next
            # Only here are tensors fetched from the device: not in every batch.
            values = {name: float(value) for name, value in self.pending.items()}
            self.file.write(json.dumps({'batch': self.pending_batch, **values}) + '\n')
        self.pending = {}

    def fit_end(self, state: State, logger: Logger) -> None:
        self.flush()

    def close(self, state: State, logger: Logger) -> None:
        self.flush()
        if self.file is not None:
            self.file.close()
            self.file = None


def read_log(path: Path) -> list[dict[str, float]]:
    """Records by batch, in order; where a resumed run repeated a batch, its later record. Half a last line is left out."""
    records: dict[float, dict[str, float]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # the line that a kill cut short
        records[record['batch']] = {**records.get(record['batch'], {}), **record}
    return [records[batch] for batch in sorted(records)]
