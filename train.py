"""Train a recipe.

    composer [-n GPUS] train.py yamls/sd2-base-256.yaml [key=value ...]

Run the same command again to go on after a stop. Exit codes: 0 finished (also if it already was), 2 the recipe is wrong or
does not fit the data or this machine.
"""

import os
import sys

from diffusion.processes import end_with_parent
from diffusion.recipe import EXIT_BAD_RECIPE, Recipe, RecipeError, load_or_exit


def main(recipe: Recipe) -> int:
    if recipe.train.cpu_threads is not None:
        os.environ['OMP_NUM_THREADS'] = str(recipe.train.cpu_threads)  # before torch is imported

    if 'LOCAL_RANK' in os.environ:  # under a launcher
        end_with_parent()

    from diffusion.datasets.manifest import ManifestError
    from diffusion.errors import CheckpointError, EncoderError
    from diffusion.training import build_trainer, finished

    try:
        trainer = build_trainer(recipe)
    except (RecipeError, ManifestError, EncoderError, CheckpointError) as error:
        print(error, file=sys.stderr)
        return EXIT_BAD_RECIPE
    if finished(trainer):
        print(f'{recipe.name} is already trained to {recipe.train.duration}: {recipe.checkpoint.folder}')
    else:
        trainer.fit()
        print(f'{recipe.name} is trained to {recipe.train.duration}: {recipe.checkpoint.folder}')
    trainer.close()
    return 0


if __name__ == '__main__':  # also required by Composer's upload processes, which import this file
    raise SystemExit(main(load_or_exit(sys.argv[1:], usage=__doc__ or '')))
