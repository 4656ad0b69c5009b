"""An analytic look at drawn shapes: colours, shape, size and place of what an image shows, without a network.

The colours are the nearest ones of the palette. What stands before the background is measured: the largest connected area whose colour is nearer to
the foreground than to the background. The shape is the one that overlaps best with it if drawn as large and around the same centre of mass; where
none overlaps well there is no shape. Soft edges and corners, which small autoencoders draw, change little of that.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from scipy import ndimage
from torch import Tensor

from diffusion.contracts.errors import DataError
from diffusion.contracts.scenes import ARM, NEW_SHAPE, PALETTE, PLACES, SHAPES, SIZES, Scene

LEAST_OVERLAP = 0.8  # of an area and a shape as large (intersection over union); real ones have 0.9 and more
SMALLEST_AREA = 0.01  # of the image; the smallest shape that is drawn, a small triangle, covers 6 %
# Of a shape whose half side (as SIZES has it) is 1: its area, and how far its centre of mass is below its place.
AREA = {'circle': math.pi, 'square': 1.7**2, 'triangle': 1.8, NEW_SHAPE: 4 * (2 * ARM - ARM**2)}
CENTRE = {'circle': 0.0, 'square': 0.0, 'triangle': 0.2, NEW_SHAPE: 0.0}

WORDS: dict[str, tuple[str, ...]] = {
    'colour': tuple(PALETTE),
    'background': tuple(PALETTE),
    'shape': SHAPES,
    'size': tuple(SIZES),
    'place': tuple(PLACES),
}
"""Fields of a scene and the words that each may hold: the order of an embedding."""
DIMENSION = sum(map(len, WORDS.values()))
RULE = [LEAST_OVERLAP, SMALLEST_AREA, *({shape: lengths[shape] for shape in SHAPES} for lengths in (AREA, CENTRE)), PALETTE, SIZES, PLACES, WORDS]
"""Constants that an embedding depends on; their digest is in protocols, because there are no weights."""


def scenes_of(captions: Sequence[str]) -> list[Scene]:
    """Return what each caption describes.

    Raises:
        DataError: a caption describes no such scene.
    """
    found = []
    for caption in captions:
        scene = Scene.of(caption)
        if scene is None:
            raise DataError(f"'{caption[:80]}' is no caption of data_prep.shapes, and the metric shapes is for those alone; leave it out")
        found.append(scene)
    return found


def embedded(scene: Scene) -> Tensor:
    """(26,) float32: a one for each word that applies, zeros for the others."""
    said = dataclasses.asdict(scene)
    return torch.tensor([float(said[field] == word) for field, words in WORDS.items() for word in words])


def agreement(drawn: Tensor, texts: Tensor) -> dict[str, Tensor]:
    """(B,) float64 of zeros and ones for each field of a scene: the image shows what its caption says; `everything`: in all of them."""
    widths = [len(words) for words in WORDS.values()]
    parts = zip(WORDS, drawn.split(widths, dim=1), texts.split(widths, dim=1), strict=True)
    right = {field: (seen == said).all(dim=1).double() for field, seen, said in parts}
    return {**right, 'everything': torch.stack(list(right.values())).amin(dim=0)}


def colours(image: Image.Image) -> tuple[str, str]:
    """(foreground, background): the commonest colour of the border, and the commonest other colour inside."""
    names, known = list(PALETTE), np.array(list(PALETTE.values()), dtype=np.float32)  # (colours, 3)
    pixels = np.asarray(image.convert('RGB'), dtype=np.float32)  # (H, W, 3)
    nearest = ((pixels[:, :, None] - known) ** 2).sum(axis=-1).argmin(axis=-1)  # (H, W)
    border = max(1, len(nearest) // 16)
    inside = np.zeros_like(nearest, dtype=bool)
    inside[border:-border, border:-border] = True
    background = np.bincount(nearest[~inside], minlength=len(names)).argmax()
    counts = np.bincount(nearest[inside], minlength=len(names))
    counts[background] = 0
    return names[np.argmax(counts)], names[background]


def look(image: Image.Image, shapes: Sequence[str] = SHAPES) -> Scene:
    """Return the scene that the image shows, with one of these shapes; shape, size and place are '' where there is none of them."""
    colour, background = colours(image)
    area = largest_area(image, PALETTE[colour], PALETTE[background])
    if area is None:
        return Scene('', colour, '', '', background)
    shape = nearest_shape(area, shapes)
    if not shape:
        return Scene('', colour, '', '', background)
    half_side = math.sqrt(area.sum() / AREA[shape]) / len(area)  # in image sides
    y, x = (mean / len(area) for mean in _centre(area))
    size = min(SIZES, key=lambda name: abs(SIZES[name] - half_side))
    place = min(PLACES, key=lambda name: math.dist(PLACES[name], (x, y - CENTRE[shape] * half_side)))
    return Scene(size, colour, shape, place, background)


def largest_area(image: Image.Image, colour: tuple[int, int, int], background: tuple[int, int, int]) -> np.ndarray | None:
    """(H, W) bool: the largest connected area that is nearer to `colour` than to `background`; None if it is next to nothing.

    An edge, where the two are mixed, ends in the middle, whatever third colour the mixture resembles.
    """
    pixels, front, behind = (np.asarray(each, dtype=np.float32) for each in (image.convert('RGB'), colour, background))
    is_front = ((pixels - front) ** 2).sum(axis=-1) < ((pixels - behind) ** 2).sum(axis=-1)  # (H, W)
    labels, count = ndimage.label(is_front)
    if count == 0:
        return None
    sizes = np.bincount(labels.ravel())[1:]
    return labels == np.argmax(sizes) + 1 if np.max(sizes) >= SMALLEST_AREA * labels.size else None


def nearest_shape(area: np.ndarray, shapes: Sequence[str] = SHAPES) -> str:
    """The shape that the (H, W) bool area has; '' for none."""
    overlap = {}
    for shape in shapes:
        half_side = math.sqrt(area.sum() / AREA[shape])  # in pixels
        y, x = _centre(area)
        v, u = np.meshgrid(np.arange(area.shape[0]) + 0.5 - y, np.arange(area.shape[1]) + 0.5 - x, indexing='ij')
        ideal = _inside(shape, u / half_side, v / half_side + CENTRE[shape])
        overlap[shape] = (area & ideal).sum() / (area | ideal).sum()
    best = max(overlap, key=lambda shape: overlap[shape])
    return best if overlap[best] >= LEAST_OVERLAP else ''


def _centre(area: np.ndarray) -> tuple[float, float]:
    """(y, x) of the centre of mass in pixels."""
    y, x = np.nonzero(area)
    return float(y.mean()) + 0.5, float(x.mean()) + 0.5


def _inside(shape: str, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return which points, in half sides to the right of the shape's place and below it, are in the shape (as data_prep.shapes draws it)."""
    if shape == 'circle':
        return u**2 + v**2 <= 1
    if shape == 'square':
        return np.maximum(np.abs(u), np.abs(v)) <= 0.85
    if shape == NEW_SHAPE:
        return (np.maximum(np.abs(u), np.abs(v)) <= 1) & (np.minimum(np.abs(u), np.abs(v)) <= ARM)
    return (v <= 0.8) & (np.abs(u) <= (v + 1) / 1.8)
