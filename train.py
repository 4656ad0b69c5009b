"""Train a recipe.

    composer [-n GPUS] train.py yamls/sd2-base-256.yaml [key=value ...]

Run the same command again to go on after a stop. Exit codes: 0 finished (also if it already was), 64 the recipe is wrong, 65 the data are,
70 crash, 75 stopped from outside and saved, 76 nothing moved for too long, 77 the loss stayed NaN; docs/reliability.md says what to do.
"""

import faulthandler
import os
import sys

from diffusion.faults.ending import end, explain
from diffusion.faults.exit_codes import BAD_RECIPE, FINISHED
from diffusion.faults.preemption import Preempted
from diffusion.processes import end_with_parent
from diffusion.recipe import Recipe, load_or_exit


def main(recipe: Recipe) -> int:
    if recipe.train.cpu_threads is not None:
        os.environ['OMP_NUM_THREADS'] = str(recipe.train.cpu_threads)  # before torch is imported

    if 'LOCAL_RANK' in os.environ:  # under a launcher
        end_with_parent()

    from diffusion.faults import preemption
    from diffusion.training import build_trainer, finished, fit

    faulthandler.enable()  # a crash in native code, CUDA's included, otherwise leaves a number and not a word
    trainer = None
    try:
        preemption.listen()  # after composer was imported, which has its own handlers
        trainer = build_trainer(recipe)
        already = finished(trainer)
        fit(trainer, recipe)
        print(f'{recipe.name} is {"already " if already else ""}trained to {recipe.train.duration}: {recipe.checkpoint.folder}')
        return end(FINISHED)
    except (Exception, Preempted) as error:
        return end(explain(error), trainer)


if __name__ == '__main__':  # also required by Composer's upload processes, which import this file
    raise SystemExit(main(load_or_exit(sys.argv[1:], usage=__doc__ or '', code=BAD_RECIPE)))
