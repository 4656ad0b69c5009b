"""Train a recipe.

    composer [-n GPUS] train.py yamls/sd2-base-256.yaml [key=value ...]

Run the same command again to resume after a stop. Exit codes: 0 finished (also if it already was), 64 the recipe is wrong, 65 the data are,
70 crash, 73 another process continues the run, 75 stopped on request and saved, 76 nothing moved for too long, 77 the loss stayed NaN,
130 a second Ctrl-C; docs/reliability.md says what to do.
"""

from diffusion.faults import preemption, terminal

if __name__ == '__main__':  # also required by Composer's upload processes, which import this file
    preemption.listen(preemption.IMPORTING)  # first, as imports take seconds
    terminal.take()

import faulthandler
import os
import signal
import sys

from diffusion.common.belongings import use_own_temporary_folder
from diffusion.common.files import keep_private
from diffusion.common.imports import quick_imports
from diffusion.common.processes import command, end_with_parent
from diffusion.contracts.exit_codes import BAD_RECIPE, FINISHED
from diffusion.cost.prices import RULES
from diffusion.faults.ending import end, explain
from diffusion.recipe import Recipe, load_or_exit


def main(recipe: Recipe) -> int:
    keep_private()
    preemption.listen(preemption.IMPORTING)
    terminal.survive_its_end()
    use_own_temporary_folder()
    if recipe.train.cpu_threads is not None:
        os.environ['OMP_NUM_THREADS'] = str(recipe.train.cpu_threads)  # before torch is imported

    if 'LOCAL_RANK' in os.environ:  # under a launcher
        command()  # while the launcher lives
        end_with_parent(signal.SIGTERM)  # a launcher that is killed, or whose terminal closes, costs no steps
        # Pages of C++ frames for every connection that a lost rank leaves behind; what matters of it arrives as an exception.
        os.environ.setdefault('TORCH_CPP_LOG_LEVEL', 'ERROR')

    with preemption.kept(), quick_imports():
        from diffusion.finetuning.prepare import prepare
        from diffusion.training.builder import build_trainer, finished, fit

    faulthandler.enable()  # a crash in native code, CUDA's included, otherwise leaves a number and nothing else
    trainer = None
    try:
        preemption.listen()
        prepare(recipe)
        trainer = build_trainer(recipe)
        already = finished(trainer)
        fit(trainer, recipe)
        print(f'{recipe.name} is {"already " if already else ""}trained to {recipe.train.duration}: {recipe.checkpoint.folder}')
        return end(FINISHED)
    except (Exception, preemption.Preempted) as error:
        return end(explain(error), trainer)


if __name__ == '__main__':
    raise SystemExit(main(load_or_exit(sys.argv[1:], usage=__doc__ or '', code=BAD_RECIPE, rules=RULES)))
