"""Training in processes that can be killed, without twelve seconds of imports in each: they are forked from one that has imported everything."""

import multiprocessing
import multiprocessing.util
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import torch

from diffusion.recipe import load_recipe
from diffusion.training.builder import build_trainer
from tests.conftest import REPOSITORY

CONTEXT = multiprocessing.get_context('forkserver')
multiprocessing.util.get_temp_dir()  # of its sockets, whose names have to be short: before a test moves TMPDIR
DEADLINE_SEC = 400  # tells a hang from a machine that other work keeps busy, where a start takes minutes
NAMES = ('S3_ENDPOINT_URL', 'AWS_ACCESS_KEY_ID', 'AWS_SECRET_ACCESS_KEY', 'AWS_DEFAULT_REGION', 'AWS_EC2_METADATA_DISABLED')


def fit(overrides: Sequence[str]) -> None:
    """In this process."""
    trainer = build_trainer(load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', overrides, num_gpus=int(os.environ.get('WORLD_SIZE', 1))))
    trainer.fit()
    trainer.close()


def start(function: Callable[..., None], *arguments: object, **environment: str) -> BaseProcess:
    """`function(*arguments)` in a child; the server of the forks has an older environment than this process."""
    inherited = {name: os.environ[name] for name in NAMES if name in os.environ}
    process = CONTEXT.Process(target=_run, args=({**inherited, **environment}, function, arguments))
    process.start()
    return process


def exit_code(process: BaseProcess) -> int:
    """Negative if a signal ended it."""
    process.join(DEADLINE_SEC)
    if process.exitcode is None:
        for stuck in [*psutil.Process(process.pid).children(recursive=True), process]:  # Composer's uploaders outlive the process that started them
            stuck.kill()
        raise AssertionError(f'still running after {DEADLINE_SEC} s')
    return process.exitcode


def ranks(function: Callable[..., object], arguments: Sequence[Sequence[object]], out: Path, nodes: int = 1, **environment: str) -> list[str]:
    """What `function` returns in one process for each of `arguments`, together over gloo: as text, or the error that it raised."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = str(free.getsockname()[1])
    local = len(arguments) // nodes
    processes = []
    for rank, own in enumerate(arguments):
        places = {'RANK': rank, 'LOCAL_RANK': rank % local, 'NODE_RANK': rank // local, 'WORLD_SIZE': len(arguments), 'LOCAL_WORLD_SIZE': local}
        shared = {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': port, **environment}
        processes.append(start(_rank, function, own, out / f'rank{rank}.txt', **{name: str(value) for name, value in places.items()}, **shared))
    for process in processes:
        exit_code(process)
    return [(out / f'rank{rank}.txt').read_text() for rank in range(len(arguments))]


def _rank(function: Callable[..., object], arguments: Sequence[object], out: Path) -> None:
    try:
        answer = str(function(*arguments))
    except Exception as error:
        answer = f'{type(error).__name__}: {error}'
    out.write_text(answer)
    os._exit(0)


def _run(environment: Mapping[str, str], function: Callable[..., None], arguments: Sequence[object]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)  # they would fight for the cores
    multiprocessing.set_start_method(None, force=True)  # a fork server's child would start its own children, as a loader's, by a further fork server
    function(*arguments)
