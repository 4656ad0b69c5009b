"""The local log of every run: one JSON object per line in `log.jsonl`."""

import math
from pathlib import Path
from typing import Any, BinaryIO

import torch
from composer.core import State
from composer.loggers import Logger, LoggerDestination
from composer.utils import dist

from diffusion.common.files import append_json_line, open_to_append
from diffusion.monitoring.metrics import worth_writing


class JsonlLog(LoggerDestination):
    """Append `{"batch": 120, "loss/train/total": 0.31, ...}` on rank 0; metrics of the same batch share a line.

    Training metrics are written every `every` batches, everything else (evaluation, throughput) when it comes. What is not
    finite becomes null. After a resume some batches appear twice: the later line is the one that counts.
    """

    def __init__(self, path: Path, every: int):
        self.path, self.every = path, every
        self.pending: dict[str, Any] = {}
        self.pending_batch = 0
        self.file: BinaryIO | None = None

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if dist.get_global_rank() != 0 or step is None:
            return
        for batch, kept in worth_writing(metrics, step, self.every).items():
            if batch != self.pending_batch:
                self.flush()
                self.pending_batch = batch
            self.pending.update({name: value for name, value in kept.items() if isinstance(value, (int, float, torch.Tensor))})

    def flush(self) -> None:
        if not self.pending:
            return
        if self.file is None:
            self.file = open_to_append(self.path)
        # Only here are tensors fetched from the device: not in every batch.
        values = {name: float(value) for name, value in self.pending.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        append_json_line(self.file, {'batch': self.pending_batch, **finite})
        self.pending = {}

    def fit_end(self, state: State, logger: Logger) -> None:
        self.flush()

    def close(self, state: State, logger: Logger) -> None:
        self.flush()
        if self.file is not None:
            self.file.close()
            self.file = None
