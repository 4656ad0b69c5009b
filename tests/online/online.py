"""Runs with encoders of a small Ray cluster, and digests of what they trained."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from composer.core import Callback

from diffusion.monitoring.throughput import EncodersLog
from diffusion.online.pool import Member, Pool
from diffusion.recipe import load_recipe
from diffusion.training.builder import build_trainer
from tests.conftest import REPOSITORY, TINY
from tests.faults.driver import digest

YAML = REPOSITORY / 'yamls/sd2-base-256.yaml'
NUM_BATCHES, BATCH, EVALUATED = 8, 8, 48


def base_overrides(encoders_folder: Path, folder: Path) -> list[str]:
    return [*TINY, f'model.encoders.source={encoders_folder}', f'run_folder={folder}/run', f'train.duration={NUM_BATCHES}ba']


def of_images(overrides: Sequence[str], images: Path) -> list[str]:
    """What makes a tiny recipe train on images."""
    return [*overrides, 'data.kind=images', f'data.streams.own.local={images}', 'data.streams.train=null', 'data.flip=true']


def ray_keys(address: str | None, actors: int, **keys: Any) -> list[str]:
    given = {'address': address or 'null', 'actors': actors, 'gpus': 0, 'ahead': 3, **keys}
    return [f'data.encoders.ray.{name}={value}' for name, value in given.items()]


class AtBatch(Callback):
    """Calls `work` with the pool once `batch` batches are done."""

    def __init__(self, batch: int, work: Callable[[Pool], object]):
        self.batch, self.work = batch, work

    def batch_end(self, state: Any, logger: Any) -> None:
        if state.timestamp.batch.value == self.batch:
            self.work(pool_of(state))


def pool_of(state: Any) -> Pool:
    return next(callback.pool for callback in state.callbacks if isinstance(callback, EncodersLog))


def process_of(pool: Pool, member: Member) -> int:
    return pool.ray.get(member.actor.__ray_call__.remote(lambda _: os.getpid()))


def trained(overrides: Sequence[str], *callbacks: Callback) -> str:
    """SHA-256 of all weights at the end."""
    trainer = build_trainer(load_recipe(YAML, overrides))
    try:
        trainer.state.callbacks.extend(callbacks)
        trainer.fit()
        return digest(trainer.state.model.state_dict())
    finally:
        trainer.close()


def soon(condition: Callable[[], Any], limit_sec: float = 60) -> bool:
    """Whether it comes true in time."""
    end = time.monotonic() + limit_sec
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True
