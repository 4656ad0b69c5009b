"""Figures of an evaluation: means over images, each of which counts once."""

from collections.abc import Callable

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat


class MeanOfImages(Metric):
    """Mean of a figure of reconstructions.

    Each image counts once, in the order of ids, in float64: Streaming repeats some to fill the last batches, which must not make the
    result depend on the batch size or the number of GPUs.

    Args:
        figure: (B,) of uint8 reconstructions and originals (B, 3, H, W).
    """

    ids: list[Tensor]
    values: list[Tensor]

    def __init__(self, figure: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.figure = figure
        for state in ('ids', 'values'):
            self.add_state(state, [], dist_reduce_fx='cat')

    def update(self, sample_id: Tensor, images: Tensor, originals: Tensor) -> None:
        """`sample_id` (B,) int64."""
        self.ids.append(sample_id)
        self.values.append(self.figure(images, originals).double())

    def compute(self) -> Tensor:
        ids, values = (dim_zero_cat(state) for state in (self.ids, self.values))
        order = ids.argsort(stable=True)
        first = torch.ones_like(order, dtype=torch.bool)
        first[1:] = ids[order].diff() != 0
        return values[order][first].mean().float()
