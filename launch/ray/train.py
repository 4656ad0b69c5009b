"""Train on machines of a Ray cluster that may leave and come back: Ray Train starts the run again on those that are there.

    python -m launch.ray.train RECIPE --workers 2..8 --gpus 8 [--address HOST:PORT] [key=value ...]

A worker is a machine: it starts Composer's launcher with one rank for each of its GPUs. Machines have the same commit at the same path. When one is
lost, the ranks of the others end, and Ray starts the run on those that are left, or waits for the least number. When more are there, all ranks save
and stop, and Ray starts them on all. Each start resumes from the newest complete checkpoint. Workers whose number does not divide the batch wait.

Exit codes are train.py's. 64, 65, 73 and 77 are final; after anything else Ray starts again, at most --failures times.
"""

import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, NonNegativeInt, PositiveFloat, PositiveInt

from diffusion.common.command_line import Arguments, option, positional
from diffusion.common.processes import RESUMED_BY
from diffusion.common.ray_cluster import ClusterError, ClusterRefusal, connect, disconnect
from diffusion.common.text import counted, first_line, print_message
from diffusion.contracts.errors import BAD_DATA, BAD_RECIPE, CRASH, FINISHED, NON_FINITE, PREEMPTED, STALLED, SUPERSEDED
from diffusion.cost.prices import RULES
from diffusion.recipe import RecipeError, load_any_recipe
from diffusion.recipe.rules import batch_divides

REPOSITORY = Path(__file__).resolve().parents[2]
START_SEC = 30  # for all workers to start: of a machine that was just lost Ray may believe for a while that it is there, and then asks in vain
FINAL = (FINISHED, BAD_RECIPE, BAD_DATA, SUPERSEDED, NON_FINITE)
# Composer's launcher, which stops its ranks when the shell that started it is gone. Ray kills the processes that a worker has started, and all of
# its session: that is the shell alone, and the ranks are asked to save.
SHELL = ['/bin/sh', '-c', '"$@"; exit $?', 'sh']
LAUNCHER = """
import runpy, signal
from diffusion.common.processes import end_with_parent
end_with_parent(signal.SIGTERM)
runpy.run_module('composer.cli', run_name='__main__', alter_sys=True)
"""


def workers_of(text: str) -> tuple[int, int]:
    """Read `2..8`, or one number for no other."""
    words = text.split('..')
    if not all(word.isdigit() for word in words) or len(words) > 2 or not 1 <= int(words[0]) <= int(words[-1]):
        raise ValueError(f'{text!r} is neither a number of workers nor a range such as 2..8')
    return int(words[0]), int(words[-1])


class TrainRequest(Arguments):
    """The recipe to train, and on what."""

    recipe: str = positional('RECIPE')
    workers: Annotated[tuple[int, int], BeforeValidator(workers_of)] = option(..., 'machines, at least and at most, such as 2..8', 'N..M')
    gpus: NonNegativeInt = option(8, 'GPUs of a worker, all of its machine; 0: one rank on one CPU core')
    address: str = option('auto', "HOST:PORT of the cluster's head; auto: RAY_ADDRESS, or the one that runs here")
    failures: PositiveInt = option(20, 'starts again after a failure at most')
    look_sec: PositiveFloat = option(60.0, 'seconds between two looks for more machines')
    overrides: list[str] = positional('key=value', default=[])


def main() -> int:
    args = TrainRequest.parse('launch.ray.train', __doc__)
    (least, most), ranks = args.workers, args.gpus or 1
    try:
        recipe = load_any_recipe(args.recipe, args.overrides, ranks, rules=RULES)
        if least > max(sizes := [number for number in range(1, most + 1) if not batch_divides(recipe, number * ranks)]):
            raise RecipeError(args.recipe, batch_divides(recipe, least * ranks))
        connect(args.address, 'launch.ray.train', show_output=True)
    except (RecipeError, ClusterRefusal, ClusterError) as error:
        print_message(str(error))
        return STALLED if isinstance(error, ClusterError) else BAD_RECIPE
    os.environ.setdefault('RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S', str(START_SEC))  # Ray's: 60
    from ray.exceptions import RayActorError
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer  # TorchTrainer's workers would join a process group of their own
    from ray.train.v2.api.exceptions import TrainingFailedError

    asked = {'words': [str(Path(args.recipe).resolve()), *args.overrides], 'ranks': ranks, 'sizes': sizes, 'folder': os.getcwd()}
    trainer = DataParallelTrainer(
        start_ranks,
        train_loop_config={**asked, 'command': shlex.join(['python', '-m', 'launch.ray.train', *sys.argv[1:]])},
        scaling_config=ScalingConfig(
            num_workers=(least, most) if least < most else most,
            use_gpu=args.gpus > 0,
            resources_per_worker={'GPU': args.gpus} if args.gpus else {'CPU': 1},
            elastic_resize_monitor_interval_s=args.look_sec,
        ),
        run_config=RunConfig(storage_path=str(Path(recipe.run_folder).resolve() / 'ray'), failure_config=FailureConfig(max_failures=args.failures)),
    )
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # Ray hears Ctrl-C while it trains, and ends its workers
    try:
        return trainer.fit().return_value
    except (KeyboardInterrupt, SystemExit):
        print_message('asked to stop: the ranks save their step and end; run the same command again to resume')
        return PREEMPTED
    except RayActorError as error:
        print_message(f'Ray Train is gone, with its machine or the head of the cluster; run the same command again to resume: {first_line(error)}')
        return STALLED
    except TrainingFailedError as error:
        causes = [str(cause) for cause in getattr(error, 'worker_failures', {}).values()] or [str(error)]
        print_message(f'not started again after {args.failures} failures, the last: {"; ".join(causes)}')
        return CRASH
    finally:
        disconnect()


def start_ranks(asked: dict[str, Any]) -> int:
    """Run the ranks of one machine, as a worker of Ray Train; return a final exit code.

    Raises:
        RuntimeError: another exit code: Ray starts all workers again.
    """
    import ray.train.collective

    context = ray.train.get_context()
    node, num_workers, ranks = context.get_world_rank(), context.get_world_size(), asked['ranks']
    size = max(number for number in asked['sizes'] if number <= num_workers)
    with socket.socket() as listener:  # for a port that is free on the first machine
        listener.bind(('', 0))
        address, port = ray.train.collective.broadcast_from_rank_zero((ray.util.get_node_ip_address(), listener.getsockname()[1]))
    if node == 0:
        sys.stderr.write(f'{size} of {num_workers} workers train, with {counted(ranks, "rank")} each\n')  # Ray would show a print twice
    if node >= size:
        return FINISHED
    world = {'WORLD_SIZE': size * ranks, 'LOCAL_WORLD_SIZE': ranks, 'NODE_RANK': node, 'MASTER_ADDR': address, 'MASTER_PORT': port}
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get('PYTHONPATH')])])
    environment = {**os.environ, **{name: str(value) for name, value in world.items()}, 'PYTHONPATH': path, 'PYTHONUNBUFFERED': '1'}
    environment[RESUMED_BY] = asked['command']
    environment.pop('OMP_NUM_THREADS', None)  # Ray's, not the user's
    command = [*SHELL, sys.executable, '-c', LAUNCHER, '-n', str(ranks), str(REPOSITORY / 'train.py'), *asked['words']]
    code = subprocess.run(command, cwd=asked['folder'], env=environment, start_new_session=True, check=False).returncode
    if code not in FINAL:
        raise RuntimeError(f'worker {node}: exit code {code}')
    return code


if __name__ == '__main__':
    raise SystemExit(main())
