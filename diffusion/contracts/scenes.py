"""Scenes of one shape on a plain background: what data_prep.shapes draws, and what `shapes` among the metrics looks for."""

import random
import re
from dataclasses import dataclass

from typing_extensions import TypedDict

# The corners of the RGB cube, pulled in a little: as far apart as eight colours can be.
PALETTE: dict[str, tuple[int, int, int]] = {
    'red': (225, 40, 40),
    'green': (40, 190, 60),
    'blue': (45, 60, 225),
    'yellow': (235, 225, 45),
    'magenta': (215, 50, 205),
    'cyan': (50, 215, 225),
    'white': (245, 245, 245),
    'black': (20, 20, 20),
}
SHAPES = ('circle', 'square', 'triangle')
NEW_SHAPE = 'cross'  # in no caption and no image of a base: what its adapters learn
ARM = 0.3  # half the width of a cross's arms, in half sides
SIZES = {'small': 0.19, 'large': 0.3}  # half the side of the shape, in image sides
PLACES = {'left': (0.34, 0.5), 'right': (0.66, 0.5), 'top': (0.5, 0.34), 'bottom': (0.5, 0.66), 'center': (0.5, 0.5)}


@dataclass(frozen=True)
class Scene:
    """The content of one image; every value is a word of its caption."""

    size: str
    colour: str
    shape: str
    place: str
    background: str

    @property
    def caption(self) -> str:
        return f'a {self.size} {self.colour} {self.shape} at the {self.place} on a {self.background} background'

    @staticmethod
    def of(caption: str) -> 'Scene | None':
        """Return the scene that a caption describes; None if it is of another form or has other words."""
        match = re.fullmatch(r'a (\w+) (\w+) (\w+) at the (\w+) on a (\w+) background', caption)
        if match is None:
            return None
        size, colour, shape, place, background = match.groups()
        known = size in SIZES and colour in PALETTE and shape in SHAPES and place in PLACES and background in PALETTE
        return Scene(size, colour, shape, place, background) if known else None


class Verdict(TypedDict, total=False):
    """Shares of images (0..1) that show what their captions say, as the demo's judge.json holds them."""

    num_images: int
    foreground: float  # the right colour of the shape
    background: float  # the right colour behind it
    shape: float  # by itself, as are size and place
    size: float
    place: float
    everything: float  # all five


def vocabulary() -> list[str]:
    """Return every word that a caption can hold."""
    return sorted({'a', 'at', 'the', 'on', 'background', *SIZES, *PALETTE, *SHAPES, *PLACES})


def random_scene(rng: random.Random) -> Scene:
    """Draw a scene with two different colours; equal generators give equal scenes."""
    colour, background = rng.sample(sorted(PALETTE), 2)
    return Scene(rng.choice(sorted(SIZES)), colour, rng.choice(SHAPES), rng.choice(sorted(PLACES)), background)
