"""The loader of a recipe alone: how many images a second it gives while nothing else runs. Started by a sweep on all processes of a point.

composer -n 2 -m benchmarks.sweeping.loader OUT.json SECONDS RECIPE.yaml [key=value ...]
"""

import json
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from diffusion.common.arguments import CommandParser, positive_float
from diffusion.common.files import keep_private, replacing
from diffusion.common.processes import end_with_parent, quick_imports
from diffusion.recipe import Recipe, load_recipe


def main() -> int:
    parser = CommandParser('benchmarks.sweeping.loader', __doc__)
    parser.add_argument('out', type=Path, metavar='OUT.json', help='images per second of all ranks')
    parser.add_argument('seconds', type=positive_float, metavar='SECONDS', help='to measure')
    parser.add_argument('recipe', metavar='RECIPE.yaml')
    parser.add_argument('overrides', nargs='*', metavar='key=value')
    args = parser.parse_args()
    keep_private()
    if 'LOCAL_RANK' in os.environ:  # under a launcher
        end_with_parent()
    recipe = load_recipe(args.recipe, args.overrides, num_gpus=int(os.environ.get('WORLD_SIZE', '1')))
    with quick_imports(recipe.train.cpu_threads):
        from composer.utils import dist

        import diffusion.families.registry  # noqa: F401  # for `rates`

    found = sum(rates(recipe, args.seconds))
    if dist.get_global_rank() == 0:
        with replacing(args.out) as temporary:
            temporary.write_text(json.dumps({'loader_images_per_sec': found}) + '\n')
    return 0


def rates(recipe: Recipe, seconds: float) -> list[float]:
    """Return the images per second of each rank's loader, all measured at the same time. All ranks must call it.

    What the loader's processes prepared before the clock begins would look like speed, so as many batches are left out first as they may hold; that
    takes at most twice `seconds`.
    """
    from composer.utils import dist, get_device

    from diffusion.datasets.loader import train_loader
    from diffusion.encoders.frozen import FrozenEncoders
    from diffusion.families.registry import family_of

    dist.initialize_dist(get_device(None))
    family = family_of(recipe.model.network)
    loader: Any = train_loader(recipe, FrozenEncoders.find(recipe.model.encoders, family.find_text), family.reads_geometry)
    batches = _endless(loader)
    dist.barrier()
    end_sec = time.monotonic() + 2 * seconds  # a slow loader is not waited for
    for _ in range(max(1, loader.num_workers * (loader.prefetch_factor or 0))):
        next(batches)
        if time.monotonic() > end_sec:
            break
    start_sec = now_sec = time.monotonic()
    num_images = 0
    while now_sec < start_sec + seconds:
        num_images += len(next(batches)['sample_key'])
        now_sec = time.monotonic()
    batches.close()
    return dist.all_gather_object(num_images / (now_sec - start_sec))


def _endless(loader: Any) -> Generator[Any, None, None]:
    while True:
        yield from loader


if __name__ == '__main__':
    raise SystemExit(main())
