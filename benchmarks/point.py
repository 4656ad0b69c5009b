"""One point of a sweep, in each of its processes: started by the launcher that benchmarks/throughput.py fills in.

    composer -n 2 -m benchmarks.point FOLDER

FOLDER holds recipe.yaml and method.json; rank 0 writes result.json there, and a rank that fails failure-RANK.json.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from benchmarks.sweeping.sweep import Method
from diffusion.common.arguments import CommandParser
from diffusion.common.files import keep_private, replacing
from diffusion.common.processes import end_with_parent
from diffusion.contracts.exit_codes import BAD_RECIPE, FINISHED
from diffusion.recipe import RecipeError, load_recipe, to_yaml

RESULT, ENVIRONMENT = 'result.json', 'environment.json'


def write_task(folder: Path, recipe: Any, method: Method) -> None:
    """What `main` reads."""
    (folder / 'recipe.yaml').write_text(to_yaml(recipe))
    write(folder / 'method.json', dataclasses.asdict(method))


def write(path: Path, content: dict[str, Any]) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, allow_nan=False) + '\n')


def main(folder: Path) -> int:
    keep_private()
    rank = int(os.environ.get('RANK', '0'))
    if 'LOCAL_RANK' in os.environ:  # under a launcher
        end_with_parent()
    try:
        recipe = load_recipe(folder / 'recipe.yaml', num_gpus=int(os.environ.get('WORLD_SIZE', '1')))
    except RecipeError as error:  # checked by the sweep, for as many GPUs as it asked for
        write(folder / f'failure-{rank}.json', {'status': 'refused', 'reason': '; '.join(error.errors), 'code': BAD_RECIPE, 'rank': rank})
        raise
    if recipe.train.cpu_threads is not None:
        os.environ['OMP_NUM_THREADS'] = str(recipe.train.cpu_threads)  # before torch is imported

    from benchmarks.measured import environment
    from benchmarks.sweeping.measuring import measure
    from benchmarks.sweeping.rows import status_of_code
    from diffusion.faults.ending import end, explain
    from diffusion.faults.peers import announced
    from diffusion.training.micro_batch import out_of_memory

    try:
        if rank == 0:
            write(folder / ENVIRONMENT, environment())
        row, trainer = measure(recipe, Method(**json.loads((folder / 'method.json').read_text())))
        if rank == 0:
            write(folder / RESULT, row)
        trainer.close()
        return end(FINISHED)
    except Exception as error:
        full, follows = out_of_memory(error), announced() is not None
        code = explain(error)
        if full or not follows:
            reason = ' '.join(f'{type(error).__name__}: {error}'.split())[:500]
            status = 'out of memory' if full else status_of_code(code)
            write(folder / f'failure-{rank}.json', {'status': status, 'reason': reason, 'code': code, 'rank': rank})
        return end(code)


if __name__ == '__main__':
    parser = CommandParser('benchmarks.point', __doc__)
    parser.add_argument('folder', type=Path, metavar='FOLDER')
    raise SystemExit(main(parser.parse_args().folder))
