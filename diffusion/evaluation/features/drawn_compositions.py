"""An analytic look at drawn scenes of several objects: how many of which colour and shape an image shows, and how two of them lie to each other.

As with drawn_shapes.py there is no network. Each pixel takes the nearest colour among those that really occur, so that soft edges, where two
colours are mixed, do not count as a third. An object is a connected area in which a square of three pixels fits; what lies in a hole of it is
inside it.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from scipy import ndimage
from torch import Tensor

from diffusion.contracts.compositions import CATEGORIES, COLOURED, RELATIONS, Composition
from diffusion.contracts.errors import DataError
from diffusion.contracts.scenes import PALETTE, SHAPES
from diffusion.evaluation.features.drawn_shapes import LEAST_OVERLAP, SMALLEST_AREA, nearest_shape

LEAST_OFFSET = 0.1  # of the image's side, by which one object is beside or above another
PAIRS = [(colour, shape) for colour in PALETTE for shape in SHAPES]
DIMENSION = len(PAIRS) + len(SHAPES) + 1 + len(RELATIONS) + len(CATEGORIES)
"""Counts of each colour and shape, of each shape, of areas that have none; relations of the first shape (as SHAPES has them) to the other: 1, -1 the
other way round, 0 for neither; of captions the category."""
RULE = [LEAST_OVERLAP, SMALLEST_AREA, LEAST_OFFSET, PAIRS, RELATIONS, CATEGORIES]
"""Constants that an embedding depends on, besides those of drawn_shapes.py."""


class SeenObject(NamedTuple):
    """A connected area of one colour; its shape is '' where none fits it."""

    colour: str
    shape: str
    centre: tuple[float, float]  # (x, y) in image sides
    filled: np.ndarray  # (H, W) bool, without its holes


def look(image: Image.Image) -> list[SeenObject]:
    """Return the objects before the background, which is the commonest colour of the border."""
    names, palette = list(PALETTE), np.array(list(PALETTE.values()), dtype=np.float32)  # (colours, 3)
    pixels = np.asarray(image.convert('RGB'), dtype=np.float32)  # (H, W, 3)
    distance = ((pixels[:, :, None] - palette) ** 2).sum(axis=-1)  # (H, W, colours)
    nearest = distance.argmin(axis=-1)
    border = np.concatenate([nearest[0], nearest[-1], nearest[:, 0], nearest[:, -1]])
    background = int(np.bincount(border, minlength=len(names)).argmax())
    there = [number for number in range(len(names)) if number == background or any(True for _ in _areas(nearest == number))]
    nearest = np.array(there)[distance[:, :, there].argmin(axis=-1)]
    seen = []
    for number in there:
        for area in _areas(nearest == number) if number != background else ():
            filled = ndimage.binary_fill_holes(area)
            y, x = (float(each.mean() + 0.5) / len(area) for each in np.nonzero(filled))
            seen.append(SeenObject(names[number], nearest_shape(filled), (x, y), filled))
    return seen


def _areas(mask: np.ndarray) -> list[np.ndarray]:
    """Connected areas of a mask (H, W) that are large and thick enough to be objects; the seam of two colours is neither."""
    labels, count = ndimage.label(mask)
    areas = (labels == number for number in range(1, count + 1))
    return [area for area in areas if area.sum() >= SMALLEST_AREA * area.size and ndimage.binary_opening(area, np.ones((3, 3))).any()]


def embedded(image: Image.Image) -> Tensor:
    """(DIMENSION,) float32 of what an image shows."""
    seen = look(image)
    found = _counts([(one.colour, one.shape) for one in seen])
    if len(seen) == 2 and all(one.shape for one in seen):
        first, second = sorted(seen, key=lambda one: SHAPES.index(one.shape))
        right, down = (there - here for here, there in zip(first.centre, second.centre, strict=True))
        inside = float((second.filled & first.filled).any())
        if inside:  # the larger one has the other in a hole
            found['inside'] = 1.0 if first.filled.sum() < second.filled.sum() else -1.0
        elif max(abs(right), abs(down)) >= LEAST_OFFSET:
            name, offset = ('left of', right) if abs(right) > abs(down) else ('above', down)
            found[name] = math.copysign(1.0, offset)
    return _vector(found)


def embedded_caption(asked: Composition) -> Tensor:
    """(DIMENSION,) float32 of what a caption asks for."""
    found = _counts([*asked.things])
    if asked.relation:
        (_, first), (_, second) = asked.things
        found[asked.relation] = 1.0 if SHAPES.index(first) < SHAPES.index(second) else -1.0
    return _vector({**found, asked.category: 1.0})


def _counts(things: Sequence[tuple[str, str]]) -> dict[object, float]:
    found: dict[object, float] = {}
    for colour, shape in things:
        for name in ((colour, shape), shape):
            found[name] = found.get(name, 0.0) + 1
    return found


def _vector(found: dict[object, float]) -> Tensor:
    return torch.tensor([found.get(name, 0.0) for name in (*PAIRS, *SHAPES, '', *RELATIONS, *CATEGORIES)])


def compositions_of(captions: Sequence[str]) -> list[Composition]:
    """Return what each caption asks for.

    Raises:
        DataError: a caption is of another form.
    """
    asked = [Composition.of(caption) for caption in captions]
    for caption, one in zip(captions, asked, strict=True):
        if one is None:
            raise DataError(
                f"'{caption[:80]}' is no caption of data_prep.shapes --scenes composed, and the metric composition is for those alone; leave it out"
            )
    return [one for one in asked if one]


def agreement(drawn: Tensor, texts: Tensor) -> dict[str, Tensor]:
    """Return, for each category that occurs in the captions, a one for each of its images that shows exactly what is asked for: (N,) float64.

    Args:
        drawn, texts: (B, DIMENSION) of images and of their captions.
    """
    seen, asked = (part.split([len(PAIRS), len(SHAPES) + 1, len(RELATIONS), len(CATEGORIES)], dim=1) for part in (drawn, texts))
    is_coloured = asked[3][:, [CATEGORIES.index(name) for name in COLOURED]].any(dim=1)
    colours = (seen[0] == asked[0]).all(dim=1) | ~is_coloured
    relation = ((seen[2] == asked[2]) | (asked[2] == 0)).all(dim=1)
    right = (colours & (seen[1] == asked[1]).all(dim=1) & relation).double()
    return {name: right[mask] for name, mask in zip(CATEGORIES, asked[3].bool().unbind(dim=1), strict=True) if mask.any()}
