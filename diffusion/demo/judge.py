"""An analytic check of samples: nearest palette colour of the background and of what stands before it.

It knows nothing about the model. On real shapes it is right in over 98 %, on noise it is near chance (one in eight).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from data_prep.shapes import PALETTE, Scene

NAMES = tuple(PALETTE)
COLOURS = np.array(list(PALETTE.values()), dtype=np.float32)  # (8, 3)


@dataclass(frozen=True)
class Verdict:
    """Shares of images (0..1) that show the right colour."""

    num_images: int
    foreground: float
    background: float


def colours(image: Image.Image) -> tuple[str, str]:
    """(foreground, background): the commonest colour of the border, and the commonest other colour inside."""
    pixels = np.asarray(image.convert('RGB'), dtype=np.float32)  # (H, W, 3)
    nearest = ((pixels[:, :, None] - COLOURS) ** 2).sum(axis=-1).argmin(axis=-1)  # (H, W)
    border = max(1, len(nearest) // 16)
    inside = np.zeros_like(nearest, dtype=bool)
    inside[border:-border, border:-border] = True
    background = np.bincount(nearest[~inside], minlength=len(NAMES)).argmax()
    counts = np.bincount(nearest[inside], minlength=len(NAMES))
    counts[background] = 0
    return NAMES[counts.argmax()], NAMES[background]


def judge(images: Sequence[Image.Image], scenes: Sequence[Scene]) -> Verdict:
    """How many of the images have the colours of their scenes."""
    seen = [colours(image) for image in images]
    right = [(seen_f == scene.colour, seen_b == scene.background) for (seen_f, seen_b), scene in zip(seen, scenes, strict=True)]
    foreground, background = (sum(column) / len(right) for column in zip(*right, strict=True))
    return Verdict(len(right), foreground, background)
