"""Draw captioned shapes: a dataset that anyone can make, in the layout that img2dataset writes.

    python -m data_prep.shapes DEST [--count 8192] [--size 32] [--seed 0] [--scenes one | composed | held-out]

Each image shows one shape on a plain background and says so: "a small red circle at the left on a blue background". With
`--scenes composed` it shows one to four shapes in six categories (one, two, counted, coloured, in a relation, colours of two), such as "a
square left of a circle"; some colours of some shapes never occur, and `held-out` adds a seventh category that has only those.
The shards (`00000.tar` with `.jpg`, `.txt`, `.json` a sample, `00000.parquet`, `00000_stats.json`) are what
`img2dataset --output_format webdataset` leaves, so `data_prep.convert` reads them as it reads a crawl.
"""

import hashlib
import io
import json
import random
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from PIL import Image, ImageDraw
from pydantic import PositiveInt
from tqdm import tqdm

from data_prep.mds.job import Job
from diffusion.common.command_line import Arguments, Seed, option, positional
from diffusion.common.storage import LocalFolder
from diffusion.common.text import counted, print_message
from diffusion.contracts.compositions import CATEGORIES, Composition, coloured, random_composition
from diffusion.contracts.errors import BAD_INPUT, DataError
from diffusion.contracts.scenes import ARM, NEW_SHAPE, PALETTE, PLACES, SIZES, Scene, random_scene, vocabulary

__all__ = ['PALETTE', 'PLACES', 'SIZES', 'Scene', 'draw', 'random_scene', 'vocabulary', 'write_shard']

SUPERSAMPLING = 8  # drawn this many times larger, then averaged: smooth edges


def draw(scene: Scene, side_px: int, rng: random.Random, palette: Mapping[str, tuple[int, int, int]] = PALETTE) -> Image.Image:
    """The scene as an RGB image of `side_px` x `side_px`, its shape shifted a little by `rng`, in colours of `palette`."""
    jitter = 0.03
    x, y = (place + rng.uniform(-jitter, jitter) for place in PLACES[scene.place])
    return _drawn([(scene.colour, scene.shape, x, y, SIZES[scene.size])], scene.background, side_px, palette)


def _drawn(
    things: Sequence[tuple[str, str, float, float, float]], background: str, side_px: int, palette: Mapping[str, tuple[int, int, int]]
) -> Image.Image:
    """Draw (colour, shape, x, y, half side) of each thing, lengths in image sides, later ones over earlier ones."""
    side = side_px * SUPERSAMPLING
    image = Image.new('RGB', (side, side), palette[background])
    pen = ImageDraw.Draw(image)
    for colour, shape, *lengths in things:
        x, y, r = (length * side for length in lengths)
        fill = palette[colour]
        if shape == 'circle':
            pen.ellipse((x - r, y - r, x + r, y + r), fill=fill)
        elif shape == 'square':
            pen.rectangle((x - 0.85 * r, y - 0.85 * r, x + 0.85 * r, y + 0.85 * r), fill=fill)
        elif shape == NEW_SHAPE:
            pen.rectangle((x - r, y - ARM * r, x + r, y + ARM * r), fill=fill)
            pen.rectangle((x - ARM * r, y - r, x + ARM * r, y + r), fill=fill)
        else:
            pen.polygon([(x, y - r), (x - r, y + 0.8 * r), (x + r, y + 0.8 * r)], fill=fill)
    return image.resize((side_px, side_px), Image.Resampling.BOX)


INSIDE = {'circle': (0.5, 0.5), 'square': (0.5, 0.5), 'triangle': (0.5, 0.58)}  # where in the outer shape the most room is


def draw_composition(scene: Composition, side_px: int, rng: random.Random, palette: Mapping[str, tuple[int, int, int]] = PALETTE) -> Image.Image:
    """The scene as an RGB image of `side_px` x `side_px`: what its caption leaves open (colours, places, the background) is drawn by `rng`."""
    named = all(colour for colour, _ in scene.things)
    shapes = [shape for _, shape in scene.things]
    if scene.category == 'counting':
        ((colour, _),) = coloured(shapes[:1], rng)
        things = tuple((colour, shape) for shape in shapes)
    else:
        things = scene.things if named else coloured(shapes, rng)
    background = rng.choice(sorted(set(palette) - {colour for colour, _ in things}))
    if scene.relation == 'inside':
        places = [(*INSIDE[shapes[1]], 0.13), (0.5, 0.5, 0.42)]
    elif len(things) == 1 and scene.category != 'counting':
        places = [(rng.uniform(0.35, 0.65), rng.uniform(0.35, 0.65), rng.choice(sorted(SIZES.values())))]
    elif len(things) <= 2 and scene.category != 'counting':
        low, high = (0.26, rng.uniform(0.35, 0.65), 0.19), (0.74, rng.uniform(0.35, 0.65), 0.19)
        if not scene.relation and rng.random() < 0.5:
            low, high = high, low
        is_vertical = scene.relation == 'above' or (not scene.relation and rng.random() < 0.5)
        places = [(v, u, r) if is_vertical else (u, v, r) for u, v, r in (low, high)]
    else:
        places = rng.sample([(x, y, 0.17) for x in (0.27, 0.73) for y in (0.27, 0.73)], len(things))
    jitter = 0.015
    placed = [
        (colour, shape, x + rng.uniform(-jitter, jitter), y + rng.uniform(-jitter, jitter), half_side)
        for (colour, shape), (x, y, half_side) in zip(things, places, strict=True)
    ]
    return _drawn(sorted(placed, key=lambda thing: -thing[-1]), background, side_px, palette)


def write_shard(folder: Path, shard: int, scenes: Sequence[Scene | Composition], side_px: int, seed: int, first_key: int) -> None:
    """One shard in img2dataset's `webdataset` layout: tar, parquet with a row a sample, stats."""
    import pyarrow as pa  # here: the scenes and their words are wanted without it
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = []
    with tarfile.open(folder / f'{shard:05d}.tar', 'w') as tar:
        for i, scene in enumerate(scenes):
            key = f'{first_key + i:09d}'
            buffer = io.BytesIO()
            # A generator for each image: a longer dataset begins with the shorter one.
            rng = random.Random(f'{seed}/{key}')
            image = draw(scene, side_px, rng) if isinstance(scene, Scene) else draw_composition(scene, side_px, rng)
            image.save(buffer, 'JPEG', quality=95, subsampling=0)
            row = {
                'url': f'shapes://{seed}/{key}',
                'caption': scene.caption,
                'key': key,
                'status': 'success',
                'error_message': None,
                'width': side_px,
                'height': side_px,
                'original_width': side_px,
                'original_height': side_px,
                'exif': '{}',
                'sha256': hashlib.sha256(buffer.getvalue()).hexdigest(),
            }
            rows.append(row)
            for suffix, content in (('jpg', buffer.getvalue()), ('json', json.dumps(row).encode()), ('txt', scene.caption.encode())):
                entry = tarfile.TarInfo(f'{key}.{suffix}')
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    pq.write_table(pa.Table.from_pylist(rows), folder / f'{shard:05d}.parquet')
    stats = {'count': len(rows), 'successes': len(rows), 'failed_to_download': 0, 'failed_to_resize': 0}
    # Last, as img2dataset does: a shard without stats is not finished.
    (folder / f'{shard:05d}_stats.json').write_text(json.dumps({**stats, 'status_dict': {'success': len(rows)}}, indent=1))


class ShapesRequest(Arguments):
    """Images to draw."""

    dest: Path = positional('DEST', 'folder to write the shards to')
    count: PositiveInt = option(8192, 'images to draw')
    size: PositiveInt = option(32, 'side of an image in pixels')
    seed: Seed = option(0, 'another seed, another dataset')
    per_shard: PositiveInt = option(1024, 'images a shard')
    scenes: Literal['one', 'composed', 'held-out'] = option('one', 'a shape an image; several; several, with the pairs that `composed` never has')


def main() -> int:
    args = ShapesRequest.parse('data_prep.shapes', __doc__)
    made_with: dict[str, Any] = {'count': args.count, 'size': args.size, 'seed': args.seed, 'per_shard': args.per_shard}
    made_with |= {'scenes': args.scenes} if args.scenes != 'one' else {}  # as folders of before say it
    try:
        Job(LocalFolder(str(args.dest)), made_with, 'shapes.json').begin()
    except DataError as error:
        print_message(str(error))
        return BAD_INPUT
    rng = random.Random(f'{args.seed}/scenes')
    categories = CATEGORIES if args.scenes == 'held-out' else CATEGORIES[:-1]
    scenes: list[Scene | Composition] = [
        random_scene(rng) if args.scenes == 'one' else random_composition(categories[number % len(categories)], rng) for number in range(args.count)
    ]
    starts = range(0, args.count, args.per_shard)
    for shard, start in enumerate(tqdm(starts, desc='draw', unit='shard')):
        if not (args.dest / f'{shard:05d}_stats.json').exists():
            write_shard(args.dest, shard, scenes[start : start + args.per_shard], args.size, args.seed, start)
    print(f'{args.count:,} captioned images of {args.size} px in {counted(len(starts), "shard")}: {args.dest}')
    return 0


if __name__ == '__main__':
    raise SystemExit(main())
