"""Options of convert, encode and recaption that choose an engine."""

from collections.abc import Callable
from contextlib import closing
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, PositiveFloat, PositiveInt, model_validator

from data_prep.engines.engine import Engine, LocalEngine
from data_prep.mds.command import DatasetRequest, run_command
from data_prep.mds.job import Tally
from diffusion.common.command_line import option
from diffusion.common.ray_cluster import wrong_address


def _checked_address(text: str) -> str:
    if wrong := wrong_address(text):
        raise ValueError(wrong)
    return text


def _checked_gpus(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if value >= 0 and (value < 1 or value.is_integer()):
        return value
    raise ValueError('is neither 0 (none), nor a share of one GPU such as 0.5, nor a whole number of GPUs')


def _ray(help: str, metavar: str) -> Any:
    return option(None, help, metavar, group='engine')


class EngineRequest(DatasetRequest):
    """Dataset that an engine writes: processes of this host, or a Ray cluster."""

    engine: Literal['local', 'ray'] = option('local', 'who does the work: processes of this host (default), or a Ray cluster', group='engine')
    ray_address: Annotated[str, AfterValidator(_checked_address)] | None = _ray(
        'head of the cluster; auto: the cluster that runs here; local: a new one (default: RAY_ADDRESS, or a new one)', 'HOST:PORT'
    )
    ray_actors: PositiveInt | None = _ray('workers (default: as many as fit)', 'N')
    ray_cpus: PositiveInt | None = _ray('CPUs, and threads, of a worker (default 1)', 'N')
    ray_resource: str | None = _ray('resource of which a worker takes 1, such as A10G', 'NAME')
    ray_part_min: PositiveFloat | None = _ray('kill the worker of a part that takes longer (default 30); at most 4 attempts', 'MIN')
    ray_wait_min: PositiveFloat | None = _ray('with --ray-actors: how long to wait for machines to come (default: refuse)', 'MIN')

    def _of_ray(self) -> dict[str, Any]:
        """Return the arguments of ClusterEngine that are given."""
        given = {name: value for name, value in self if name.startswith('ray_') and value is not None}
        return {name.removeprefix('ray_'): value for name, value in given.items()}

    @model_validator(mode='after')
    def _refuse_options_of_the_other_engine(self) -> Self:
        given = self._of_ray()
        if self.engine == 'local':
            if given:
                raise ValueError(f'--ray-{next(iter(given)).replace("_", "-")} is for --engine ray; add that, or leave it out')
        elif self.ranks != (0, 1):
            raise ValueError(
                '--engine ray shares the work among machines by itself; leave out --rank and --world-size, and start one process by python -m: '
                'no launcher such as composer, and no RANK and WORLD_SIZE in the environment'
            )
        elif self.merge:
            raise ValueError('--merge writes no part; leave out --engine ray')
        elif self.processes:
            raise ValueError('--processes is for --engine local; --ray-actors and --ray-cpus say what works on a cluster')
        elif 'wait_min' in given and 'actors' not in given:
            raise ValueError('--ray-wait-min needs --ray-actors: how many workers to ask the machines for that come')
        return self

    def run(self, dest: str, work: Callable[[Engine], Tally]) -> int:
        """Do the work by the engine that was asked for, as `run_command`."""
        engine: Engine = LocalEngine(self.num_processes)
        if self.engine == 'ray':
            from data_prep.engines.cluster import ClusterEngine  # nothing of it is there without the option

            engine = ClusterEngine(**self._of_ray())
        with closing(engine):
            return run_command(dest, lambda: work(engine))


class ModelEngineRequest(EngineRequest):
    """Dataset that an engine writes with a model, on a GPU where there is one."""

    ray_gpus: Annotated[float, BeforeValidator(_checked_gpus)] | None = _ray('GPUs of a worker (default 1 if the cluster has any, else 0)', 'F')
    ray_decoders: PositiveInt | None = _ray(
        'tasks of 1 CPU on any machine that read, decode and resize for the workers (default: each worker does so itself)', 'N'
    )
