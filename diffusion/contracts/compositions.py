"""Scenes of several objects and their captions, in GenEval's categories (arXiv 2310.11513): `data_prep.shapes --scenes composed` draws them,
and the metric `composition` tells which images show what their captions say.

Two categories differ from GenEval's: a position may also be inside, and `held_out` asks for colours of shapes that no training image has, alone and
in pairs. It measures whether a model puts together what it has only seen apart.
"""

import random
import re
from dataclasses import dataclass

from diffusion.contracts.scenes import PALETTE, SHAPES

CATEGORIES = ('single', 'two', 'counting', 'colours', 'position', 'binding', 'held_out')
COLOURED = ('colours', 'binding', 'held_out')  # whose captions name colours; others are drawn in any
NUMBERS = ('one', 'two', 'three', 'four')
RELATIONS = ('left of', 'above', 'inside')
HELD_OUT = frozenset({('red', 'triangle'), ('blue', 'circle'), ('green', 'square'), ('white', 'triangle'), ('black', 'circle'), ('cyan', 'square')})
"""Pairs of colour and shape that only the category `held_out` has."""


@dataclass(frozen=True)
class Composition:
    """The content of an image.

    Args:
        things: (colour, shape) of each object; '' for a colour that the caption leaves open.
        relation: of the first of two objects to the second; '' for none.
    """

    category: str
    things: tuple[tuple[str, str], ...]
    relation: str = ''

    @property
    def caption(self) -> str:
        if self.category == 'counting':
            number, shape = len(self.things), self.things[0][1]
            return f'{NUMBERS[number - 1]} {shape}{"s" if number > 1 else ""}'
        named = [f'a {colour} {shape}' if colour else f'a {shape}' for colour, shape in self.things]
        return f' {self.relation or "and"} '.join(named)

    @staticmethod
    def of(caption: str) -> 'Composition | None':
        """Return what a caption asks for, with '' for colours that it leaves open; None if it is of another form or has other words."""
        if (match := re.fullmatch(r'(\w+) (\w+?)(s?)', caption)) and match[1] in NUMBERS:
            number, shape, plural = NUMBERS.index(match[1]) + 1, match[2], match[3]
            return Composition('counting', (('', shape),) * number) if shape in SHAPES and bool(plural) == (number > 1) else None
        parts = re.split(f' (and|{"|".join(RELATIONS)}) ', caption)
        matches = [re.fullmatch(r'a (?:(\w+) )?(\w+)', part) for part in parts[::2]]
        things = tuple((match[1] or '', match[2]) for match in matches if match)
        colours = [colour for colour, _ in things if colour]
        known = len(things) == len(matches) <= 2 and all(shape in SHAPES and colour in ('', *PALETTE) for colour, shape in things)
        if not known or len(colours) not in (0, len(things)):
            return None
        relation = parts[1] if parts[1:] and parts[1] != 'and' else ''
        if relation:
            return None if colours else Composition('position', things, relation)
        if HELD_OUT & set(things):
            return Composition('held_out', things)
        return Composition(('colours' if colours else 'single') if len(things) == 1 else ('binding' if colours else 'two'), things)


def random_composition(category: str, rng: random.Random) -> Composition:
    """Draw one of a category, as a caption says it; the two objects of a pair have different shapes and different colours."""
    shapes = rng.sample(SHAPES, 2)
    if category in ('single', 'colours'):
        shapes = shapes[:1]
    elif category == 'counting':
        shapes = shapes[:1] * rng.randint(1, len(NUMBERS))
    elif category == 'held_out':
        shapes = shapes[: rng.randint(1, 2)]
    if category not in COLOURED:
        return Composition(category, tuple(('', shape) for shape in shapes), rng.choice(RELATIONS) if category == 'position' else '')
    return Composition(category, coloured(shapes, rng, category == 'held_out'))


def coloured(shapes: list[str], rng: random.Random, held_out: bool = False) -> tuple[tuple[str, str], ...]:
    """Give each shape a colour of its own, such that none of the pairs is held out, or each of them is."""
    while True:
        things = tuple(zip(rng.sample(sorted(PALETTE), len(shapes)), shapes, strict=True))
        if len(HELD_OUT & set(things)) == (len(things) if held_out else 0):
            return things
