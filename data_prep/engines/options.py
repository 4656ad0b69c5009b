"""Options of convert, encode and recaption that choose an engine."""

import argparse
from contextlib import suppress
from typing import Any

from data_prep.engines.engine import Engine
from data_prep.engines.local import LocalEngine
from data_prep.mds.command import default_processes
from diffusion.common.arguments import positive_float, positive_int
from diffusion.common.ray_cluster import wrong_address

LOCAL, RAY = 'local', 'ray'


def add_engine_options(options: argparse.ArgumentParser, encodes: bool = False) -> None:
    """Add --engine, and --ray-* with it, after --processes; some only for a command that encodes."""
    group = options.add_argument_group('engine')
    group.add_argument('--engine', choices=[LOCAL, RAY], default=LOCAL, help='who does the work: processes of this host (default), or a Ray cluster')
    address = 'head of the cluster; auto: the cluster that runs here; local: a new one (default: RAY_ADDRESS, or a new one)'
    part_min = 'kill the worker of a part that takes longer (default 30); at most 4 attempts'
    decoders = 'tasks of 1 CPU on any machine that read, decode and resize for the workers (default: each worker does so itself)'
    rows: list[tuple[str, Any, str, str]] = [
        ('address', _address, 'HOST:PORT', address),
        ('actors', positive_int, 'N', 'workers (default: as many as fit)'),
        ('cpus', positive_int, 'N', 'CPUs, and threads, of a worker (default 1)'),
        ('resource', str, 'NAME', 'resource of which a worker takes 1, such as A10G'),
        ('part-min', positive_float, 'MIN', part_min),
        ('wait-min', positive_float, 'MIN', 'with --ray-actors: how long to wait for machines to come (default: refuse)'),
    ]
    if encodes:
        rows += [
            ('gpus', _gpus, 'F', 'GPUs of a worker (default 1 if the cluster has any, else 0)'),
            ('decoders', positive_int, 'N', decoders),
        ]
    ray = [group.add_argument(f'--ray-{name}', type=kind, metavar=metavar, help=text) for name, kind, metavar, text in rows]
    options.set_defaults(ray_options=[action.dest for action in ray], processes=None)


def engine_of(options: argparse.ArgumentParser, args: argparse.Namespace) -> Engine:
    """Return the engine that was asked for; ends the command where options contradict each other."""
    given = {name.removeprefix('ray_'): getattr(args, name) for name in args.ray_options if getattr(args, name) is not None}
    if args.engine == LOCAL:
        if given:
            options.error(f'--ray-{next(iter(given)).replace("_", "-")} is for --engine ray; add that, or leave it out')
        return LocalEngine(args.processes or default_processes())
    if args.world_size > 1 or args.rank:
        options.error(
            '--engine ray shares the work among machines by itself; leave out --rank and --world-size, and start one process by python -m: '
            'no launcher such as composer, and no RANK and WORLD_SIZE in the environment'
        )
    if args.merge:
        options.error('--merge writes no part; leave out --engine ray')
    if args.processes:
        options.error('--processes is for --engine local; --ray-actors and --ray-cpus say what works on a cluster')
    if 'wait_min' in given and 'actors' not in given:
        options.error('--ray-wait-min needs --ray-actors: how many workers to ask the machines for that come')
    from data_prep.engines.cluster import ClusterEngine  # nothing of it is there without the option

    return ClusterEngine(**given)


def _address(text: str) -> str:
    """Argparse type: see `ray_cluster.connect`."""
    if wrong := wrong_address(text):
        raise argparse.ArgumentTypeError(wrong)
    return text


def _gpus(text: str) -> float:
    """Argparse type: none, a share of a GPU that others have the rest of, or whole GPUs."""
    with suppress(ValueError):
        value = float(text)
        if value >= 0 and (value < 1 or value.is_integer()):
            return value
    raise argparse.ArgumentTypeError(f"'{text}' is neither 0 (none), nor a share of one GPU such as 0.5, nor a whole number of GPUs")
