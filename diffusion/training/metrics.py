"""Losses of an evaluation: the mean, and one for each part of the noise levels."""

import itertools

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat


class LossAtTimes(Metric):
    """Mean unweighted error of the samples whose time lies in [low, high).

    Each sample counts once, in the order of ids, in float64: Streaming repeats some samples to fill the last batches, which must
    not make the result depend on the batch size or the number of GPUs.
    """

    ids: list[Tensor]
    errors: list[Tensor]
    times: list[Tensor]

    def __init__(self, low: float, high: float):
        super().__init__()
        self.low, self.high = low, high
        for state in ('ids', 'errors', 'times'):
            self.add_state(state, [], dist_reduce_fx='cat')

    def update(self, sample_id: Tensor, error: Tensor, t: Tensor) -> None:
        """`sample_id` (B,) int64, `error` (B,) float32, `t` (B,) times."""
        self.ids.append(sample_id)
        self.errors.append(error.double())
        self.times.append(t)

    def compute(self) -> Tensor:
        """NaN for a bin that no sample fell into."""
        ids, errors, t = (dim_zero_cat(state) for state in (self.ids, self.errors, self.times))
        order = ids.argsort(stable=True)
        first = torch.ones_like(order, dtype=torch.bool)
        first[1:] = ids[order].diff() != 0
        inside = (t[order] >= self.low) & (t[order] < self.high) & first
        return errors[order][inside].mean().float()


def losses_by_time(end: float, count: int) -> dict[str, Metric]:
    """`loss`, and `loss_tLOW-HIGH` for each of `count` equal parts of the times in [0, end): of 1000 timesteps and of thousandths alike."""
    scale = 1 if end > 1 else 1000
    edges = [i * end / count for i in range(count + 1)]
    bins = {f'loss_t{int(low * scale):03d}-{int(high * scale) - 1:03d}': LossAtTimes(low, high) for low, high in itertools.pairwise(edges)}
    return {'loss': LossAtTimes(0, end), **bins}
