"""In one process; tests/training/test_distributed.py has two."""

from types import SimpleNamespace

import torch
from composer.core import Callback

from diffusion.objectives import build_objective
from diffusion.objectives.objective import spread_points
from diffusion.recipe import load_recipe
from diffusion.training.builder import build_trainer
from diffusion.training.model import SpreadTimes, global_batch_algorithms
from tests.conftest import REPOSITORY


class Spy(Callback):
    """{(batch, epoch, sample id): timestep} as the model used them."""

    def __init__(self):
        self.seen = {}
        self.keys = {}

    def after_forward(self, state, logger):
        batch = state.timestamp.batch.value
        self.keys.setdefault(batch, []).append(state.batch['sample_key'])
        for key, t in zip(state.batch['sample_key'].tolist(), state.outputs.t.tolist(), strict=True):
            self.seen[batch, *key] = t


def fit(overrides, *more):
    trainer = build_trainer(load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', [*overrides, 'model.timesteps=sobol', *more]))
    spy = Spy()
    trainer.state.callbacks.append(spy)
    trainer.fit()
    trainer.close()
    return spy


def test_each_batch_trains_at_its_points_whatever_the_micro_batch_the_workers_and_a_resume(overrides, latents, tmp_path):
    overrides = [*overrides, 'data.kind=latents', f'data.streams.train.local={latents}', 'train.duration=8ba']  # 6 batches an epoch
    whole = fit(overrides, f'run_folder={tmp_path}/whole')
    assert len(whole.seen) == 8 * 8
    for batch, parts in whole.keys.items():
        assert len(parts) == 2  # micro-batches of 4
        key = torch.cat(parts)
        timesteps = [whole.seen[batch, *row] for row in key.tolist()]
        assert timesteps == (spread_points(17, key, batch) * 1000 >> 32).tolist()
        assert sorted(t // 125 for t in timesteps) == list(range(8))
    first = fit(overrides, f'run_folder={tmp_path}/stopped', 'train.duration=3ba')
    second = fit(overrides, f'run_folder={tmp_path}/stopped', 'batch.micro_size=8', 'data.workers=2')
    assert (len(first.seen), len(second.seen)) == (3 * 8, 5 * 8)
    assert {**first.seen, **second.seen} == whole.seen


def test_only_a_recipe_that_asks_for_them_gets_them(recipe):
    model = SimpleNamespace(objective=build_objective(recipe.model), methods={})
    assert global_batch_algorithms(recipe, model) == []
    recipe.model.timesteps = 'sobol'
    assert [type(algorithm) for algorithm in global_batch_algorithms(recipe, model)] == [SpreadTimes]
