"""Is it the subject, and does it do what the prompt says? CLIP-I, DINO and CLIP-T of DreamBooth (arXiv 2208.12242), of embeddings."""

import math

from torch import Tensor

from diffusion.evaluation.distances import Estimate, mean_of, unit


def subject_fidelity(drawn: Tensor, photos: Tensor) -> Estimate:
    """Return the mean cosine of all pairs of a drawn image (N, D) and a photo (M, D): CLIP-I or DINO, by whose embeddings they are.

    Returns:
        Its error is the standard error over drawn images, for these photos.
    """
    return mean_of((unit(drawn) @ unit(photos).T).mean(dim=1))


def photo_fidelity(photos: Tensor) -> Estimate:
    """Return the mean cosine of all pairs of two different photos (M, D): what a perfect model could reach. NaN for a single photo."""
    count = len(photos)
    if count < 2:
        return Estimate(math.nan, math.nan)
    cosines = unit(photos) @ unit(photos).T
    return mean_of((cosines.sum(dim=1) - cosines.diagonal()) / (count - 1))


def prompt_fidelity(drawn: Tensor, prompts: Tensor) -> Estimate:
    """Return the mean cosine of images (N, D) and their own prompts (N, D): CLIP-T, which unlike the CLIP score is neither clamped nor times 100."""
    return mean_of((unit(drawn) * unit(prompts)).sum(dim=1))
