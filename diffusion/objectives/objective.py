"""Protocol of an objective: which noise, which times, what the network sees and should predict, and how images are sampled with it.

An objective is built from its section of the recipe's `model`. Its tensors are buffers, so it moves with the model; they are constants and stay
out of checkpoints. All arithmetic is float32. What all share is here too: the error, samplers of diffusers, classifier-free guidance, and times of a
global batch from a Sobol sequence.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from diffusers import SchedulerMixin
from torch import Tensor, nn

from diffusion.contracts.batch import Conditioning
from diffusion.datasets.keyed_random import MASK, Draw, normal, random_bits, random_order

Denoise = Callable[[Tensor, Tensor], Tensor]
"""(noisy latents (B, C, h, w), times (B,)) -> the network's output, guided."""


class Outputs(NamedTuple):
    """Results of one forward pass, for the loss and the metrics."""

    prediction: Tensor  # (B, C, h, w)
    target: Tensor  # (B, C, h, w) float32
    weight: Tensor | None  # (B,) float32
    t: Tensor  # (B,) times
    loss_map: Tensor | None = None  # (B, h, w) factors of the error by place


class Objective(nn.Module, ABC):
    """A time is what `times` returns: an integer timestep or a number in [0, 1].

    Attributes:
        end: times of training lie in [0, end], those of evaluation below it.
    """

    end: float

    @abstractmethod
    def times(self, points: Tensor) -> Tensor:
        """(B,) times from (B,) int64 numerators over 2^32: random words, or points of a Sobol sequence."""

    @abstractmethod
    def evenly_spaced(self, count: int) -> Tensor:
        """(count,) times: the middle of each of `count` equal bins."""

    def noise(self, seed: int, key: Tensor, shape: tuple[int, ...]) -> Tensor:
        """(B, *shape) float32 of (B, 3) sample keys."""
        return normal(seed, key, Draw.NOISE, shape)

    @abstractmethod
    def noised(self, latents: Tensor, noise: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Noisy latents, which the network sees, and the target of its prediction, both (B, C, h, w), at times (B,)."""

    def weight(self, t: Tensor) -> Tensor | None:
        """(B,) float32 weights of the squared error, or None for none."""
        return None

    @abstractmethod
    def sample(self, denoise: Denoise, noise: Tensor, steps: int) -> Tensor:
        """Latents (B, C, h, w) float32 from standard normal `noise` of the same shape, in `steps` steps, as the exported `scheduler` takes them."""

    @abstractmethod
    def scheduler(self) -> SchedulerMixin:
        """The sampler that an exported pipeline uses."""

    @abstractmethod
    def describe(self) -> str:
        """A few words for a model card."""


@torch.no_grad()
def sample_with(scheduler: Any, denoise: Denoise, noise: Tensor, steps: int, generators: list[torch.Generator]) -> Tensor:
    """Latents (B, C, h, w) float32 from standard normal `noise` of the same shape by a sampler of diffusers, as its pipelines call it.

    Args:
        scheduler: for discrete timesteps.
        denoise: given the scheduler's timesteps as times.
        generators: one a sample, for samplers that add noise.
    """
    scheduler.set_timesteps(steps, device=noise.device)
    latents = noise.float() * scheduler.init_noise_sigma
    options = {'generator': generators} if 'generator' in inspect.signature(scheduler.step).parameters else {}
    for t in scheduler.timesteps:
        time = t.long() if t == t.round() else t  # whole numbers stay exact where sharding hands floating-point inputs over in bf16
        output = denoise(scheduler.scale_model_input(latents, t), time.expand(len(latents))).float()
        latents = scheduler.step(output, t, latents, **options).prev_sample
    return latents


def weighted_error(output: Tensor, target: Tensor, weight: Tensor | None = None, loss_map: Tensor | None = None) -> Tensor:
    """(B,) float32: each sample's mean squared error, times its weight if there is one.

    Args:
        loss_map: (B, h, w) factors of the squared error of (B, C, h, w) outputs by place. The mean is over all places, so a small mask counts less.
    """
    squared = (output.float() - target.float()).square()
    error = (squared if loss_map is None else squared * loss_map[:, None]).flatten(1).mean(dim=1)
    return error if weight is None else error * weight


def guided(
    denoise: Callable[[Tensor, Tensor, Conditioning], Tensor], given: Conditioning, empty: Conditioning, scale: float
) -> Callable[[Tensor, Tensor], Tensor]:
    """A denoiser whose output is pushed away from the unconditional one (classifier-free guidance, arXiv 2207.12598).

    Each call is one forward pass of twice the batch.

    Args:
        denoise: (noisy latents (B, C, h, w), times (B,), conditioning) -> output.
        given: what the prompts say.
        empty: the empty caption, which caption dropout trained, of the same shapes.
        scale: guidance scale; 1 is none and costs half.
    """
    if scale == 1:
        return lambda noisy, t: denoise(noisy, t, given)
    both = joined(empty, given)

    def denoise_both(noisy: Tensor, t: Tensor) -> Tensor:
        unconditional, conditional = denoise(torch.cat([noisy, noisy]), torch.cat([t, t]), both).float().chunk(2)
        return unconditional + scale * (conditional - unconditional)

    return denoise_both


def joined(*parts: Conditioning) -> Conditioning:
    """The rows of all parts, one part after the other."""
    fields = [None if field[0] is None else torch.cat(field) for field in zip(*parts, strict=True)]
    return Conditioning(*fields)  # type: ignore[arg-type]


def split(whole: Conditioning, size: int) -> list[Conditioning]:
    """Parts of at most `size` rows."""
    fields = [None if field is None else field.split(size) for field in whole]
    count = -(-len(whole.text) // size)
    return [Conditioning(*(None if field is None else field[i] for field in fields)) for i in range(count)]  # type: ignore[arg-type]


def spread_points(seed: int, sample_key: Tensor, batch_index: int) -> Tensor:
    """(B,) int64 numerators over 2^32: one of a Sobol sequence's next B points for each sample of the global batch.

    They are spread evenly over the noise levels, where independent draws leave gaps and heaps. The loss differs more between timesteps than between
    images, so how a batch happens to fall on the timesteps is much of the noise of its gradient. A low-discrepancy sequence takes that part away and
    leaves the mean as it is (arXiv 2107.00630 does so for the variational bound). All is integer arithmetic on the tensors' device: CPU and GPU give
    the same timesteps.

    Which sample gets which point depends on its key and on the keys it shares the batch with, and not on their order: on any
    number of GPUs a sample has the same time.

    Args:
        seed: of the run.
        sample_key: (B, 3) int64 of the whole global batch, in any order.
        batch_index: number of global batches before this one, all of B samples.
    """
    size = len(sample_key)
    index = torch.arange(batch_index * size, (batch_index + 1) * size, device=sample_key.device)
    points = sobol_points(seed, index)
    rank = random_order(seed, sample_key, Draw.TIMESTEP_ORDER).argsort()
    return points[rank]


def sobol_points(seed: int, index: Tensor) -> Tensor:
    """The points at `index` (N,) int64 of a one-dimensional Sobol sequence, as (N,) int64 numerators over 2^32.

    2^k points from a multiple of 2^k on lie one in each of 2^k equal intervals. The sequence is the base-2 radical inverse under a
    random digital shift: each seed flips the same bits of all points, which keeps that property and makes every point uniform
    (Owen, "Monte Carlo theory, methods and examples", chapter 17). It begins again after 2^32 points.
    """
    nobody = torch.zeros(1, 3, dtype=torch.int64, device=index.device)  # the shift belongs to the run, not to a sample
    return _reversed_bits(index & MASK) ^ random_bits(seed, nobody, Draw.TIMESTEP_SHIFT, 1)[0]


def _reversed_bits(words: Tensor) -> Tensor:
    """The 32 bits of each word in reverse order: neighbours are swapped, then pairs, and so on."""
    for distance, kept in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF), (16, 0x0000FFFF)):
        words = (words & kept) << distance | words >> distance & kept
    return words
