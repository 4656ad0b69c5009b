"""Streams of a dataset, into which images are sorted: one for all, one for each range of sizes, or one for each aspect ratio."""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any


class Buckets:
    """A way to sort images into streams: one stream of all images, where a subclass does not say otherwise."""

    def settings(self) -> str:
        """Return the text of it on the command line."""
        return 'none'

    def streams(self) -> dict[str, dict[str, Any]]:
        """Name of each stream, and what the manifest says of its images."""
        return {'': {}}

    def place(self, width_px: int, height_px: int) -> tuple[str, None] | tuple[None, str]:
        """(stream, None) of an image, or (None, reason)."""
        return '', None


@dataclass(frozen=True)
class MinSideBuckets(Buckets):
    """Streams `side-256`, `side-512` ...: the shorter side is at least this many pixels, and less than the next.

    A run at 512 px then streams only what is large enough (as the ancestors of the SD2 recipe sorted LAION, at 64 to 1024 px).
    """

    sides_px: tuple[int, ...]

    def settings(self) -> str:
        return f'min-side:{",".join(map(str, self.sides_px))}'

    def streams(self) -> dict[str, dict[str, Any]]:
        upper = [*self.sides_px[1:], None]
        return {
            f'side-{side}': {'bucket': {'min_side_px': side, 'below_px': next_side}} for side, next_side in zip(self.sides_px, upper, strict=True)
        }

    def place(self, width_px: int, height_px: int) -> tuple[str, None] | tuple[None, str]:
        fitting = [side for side in self.sides_px if side <= min(width_px, height_px)]
        return (f'side-{fitting[-1]}', None) if fitting else (None, f'short side below {self.sides_px[0]} px')


@dataclass(frozen=True)
class AspectBuckets(Buckets):
    """Streams `WIDTHxHEIGHT` of about side x side pixels in total, each image in the one with the nearest aspect ratio.

    Both sides are multiples of 64 between half and twice `side`; those of 1024 are SDXL's (arXiv:2307.01952, section 2.3 and appendix I). A
    image that would have to be enlarged to fill its bucket is left out.
    """

    side_px: int

    def settings(self) -> str:
        return f'aspect:{self.side_px}'

    def sizes(self) -> list[tuple[int, int]]:
        """(width, height) of all buckets, from the narrowest."""
        return _sizes(self.side_px)

    def streams(self) -> dict[str, dict[str, Any]]:
        return {f'{width}x{height}': {'bucket': {'width_px': width, 'height_px': height}} for width, height in self.sizes()}

    def place(self, width_px: int, height_px: int) -> tuple[str, None] | tuple[None, str]:
        ratio = math.log(width_px / height_px)
        width, height = min(self.sizes(), key=lambda size: abs(math.log(size[0] / size[1]) - ratio))
        if width_px < width or height_px < height:
            return None, 'smaller than its aspect bucket'
        return f'{width}x{height}', None


@cache
def _sizes(side_px: int, multiple_px: int = 64) -> list[tuple[int, int]]:
    """Sizes of all buckets: to each side the longest other one that keeps the area within side x side, and what else comes within a tenth of that."""
    sides, area = range(side_px // 2, 2 * side_px + 1, multiple_px), side_px**2
    tall = {(area // height // multiple_px * multiple_px, height) for height in sides if height >= side_px}
    tall |= {(width, height) for width in sides for height in sides if width <= height and 0.9 * area <= width * height <= area}
    largest = {width / height: (width, height) for width, height in sorted(tall)}  # of those with the same aspect ratio
    return sorted({*largest.values(), *((height, width) for width, height in largest.values())}, key=lambda size: size[0] / size[1])


def buckets(text: str) -> Buckets:
    """`min-side:256,512,1024` or `aspect:512`, as on the command line."""
    kind, _, numbers = text.partition(':')
    try:
        values = tuple(int(number) for number in numbers.split(','))
    except ValueError:
        values = ()
    if kind == 'min-side' and values and list(values) == sorted(set(values)) and values[0] > 0:
        return MinSideBuckets(values)
    if kind == 'aspect' and len(values) == 1 and values[0] >= 128 and values[0] % 128 == 0:
        return AspectBuckets(values[0])
    raise ValueError(
        f'{text!r} is neither min-side:PX,PX,... with growing numbers, such as min-side:256,512,1024, '
        'nor aspect:PX with a multiple of 128, such as aspect:512'
    )
