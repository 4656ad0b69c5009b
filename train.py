"""Train a recipe.

    composer [-n GPUS] train.py yamls/sd2-base-256.yaml [key=value ...]

Run the same command again to resume after a stop. Exit codes: 0 finished (also if it already was), 64 the recipe is wrong, 65 the data are,
70 crash, 73 another process continues the run, 75 stopped on request and saved, 76 nothing moved for too long, 77 the loss stayed NaN,
130 a second Ctrl-C; docs/reliability.md says what to do.
"""

from diffusion.faults import preemption, terminal

if __name__ == '__main__':  # also required by Composer's upload processes, which import this file
    preemption.listen(preemption.READING)  # first, as imports take seconds
    terminal.take()

import sys

from diffusion.common.processes import quick_imports
from diffusion.contracts.errors import BAD_RECIPE, FINISHED
from diffusion.cost.prices import RULES
from diffusion.faults.process import before_imports, end, explain
from diffusion.recipe import Recipe, load_or_exit


def main(recipe: Recipe) -> int:
    before_imports()
    with preemption.kept(), quick_imports(recipe.train.cpu_threads):
        from diffusion.finetuning.prepare import prepare_streams
        from diffusion.training.builder import build_trainer, finished, fit, outcome

    trainer = None
    try:
        preemption.listen()
        prepare_streams(recipe)
        trainer = build_trainer(recipe)
        already = finished(trainer)
        fit(trainer, recipe)
        print(f'{recipe.name} is {"already " if already else ""}{outcome(trainer, recipe)}: {recipe.checkpoint.folder}')
        return end(FINISHED)
    except (Exception, preemption.Preempted) as error:
        return end(explain(error), trainer)


if __name__ == '__main__':
    raise SystemExit(main(load_or_exit(sys.argv[1:], usage=__doc__ or '', code=BAD_RECIPE, rules=RULES)))
