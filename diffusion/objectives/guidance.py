"""Classifier-free guidance (arXiv 2207.12598)."""

from collections.abc import Callable

import torch
from torch import Tensor

from diffusion.contracts.batch import Conditioning


def guided(
    denoise: Callable[[Tensor, Tensor, Conditioning], Tensor], given: Conditioning, empty: Conditioning, scale: float
) -> Callable[[Tensor, Tensor], Tensor]:
    """A denoiser whose output is pushed away from the unconditional one; each call is one forward pass of twice the batch.

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
