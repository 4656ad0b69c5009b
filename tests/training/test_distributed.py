"""Two processes over gloo: they see different samples and noise, keep equal weights, and agree with one process."""

import os

import pytest
import torch

from diffusion.checkpoints.reading import find_checkpoint, read_checkpoint, training_weights
from diffusion.objectives.objective import spread_points
from tests.conftest import REPOSITORY, TINY, run_python
from tests.faults.children import fit

WORKER = """
import sys, torch
from diffusion.recipe import load_recipe
from diffusion.training.builder import build_trainer
from composer.core import Callback
from composer.utils import dist

out, path, overrides = sys.argv[1], sys.argv[2], sys.argv[3:]
recipe = load_recipe(path, overrides, num_gpus=2)
trainer = build_trainer(recipe)
seen = []
class Spy(Callback):
    def after_forward(self, state, logger):
        seen.append((state.batch['sample_key'].clone(), state.outputs.t.clone(), state.outputs.target.clone()))
trainer.state.callbacks.append(Spy())
trainer.fit()
torch.save({'seen': seen, 'weights': {k: v for k, v in trainer.state.model.module.state_dict().items()}}, f'{out}/rank{dist.get_global_rank()}.pt')
trainer.close()
"""


@pytest.fixture(scope='module')
def two_ranks(latents, encoders_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp('ranks')
    (out / 'worker.py').write_text(WORKER)
    overrides = [
        *TINY, f'model.encoders.source={encoders_folder}', 'data.kind=latents', f'data.streams.train.local={latents}', 'train.duration=8ba',
        'train.cpu_threads=1', 'optimizer.lr=1e-3', 'model.timesteps=sobol',  # which takes the ranks together
    ]  # fmt: skip
    environment = {'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(REPOSITORY)}
    arguments = [out, REPOSITORY / 'yamls/sd2-base-256.yaml', *overrides, f'run_folder={out}/two']
    run_python('-m', 'composer.cli', '-n', '2', out / 'worker.py', *arguments, **environment)
    fit([*overrides, f'run_folder={out}/one'])
    ranks = [torch.load(out / f'rank{rank}.pt', weights_only=True) for rank in range(2)]
    return out, ranks


def test_ranks_steps_and_epochs_draw_different_noise_and_timesteps(two_ranks):
    _, ranks = two_ranks
    keys = [tuple(key) for rank in ranks for batch_keys, _, _ in rank['seen'] for key in batch_keys.tolist()]
    assert len(keys) == 8 * 8 == len(set(keys))  # 8 batches of 8: no (epoch, sample) twice, on any rank
    assert {epoch for epoch, _, _ in keys} == {0, 1}  # 6 batches an epoch
    targets = torch.cat([target.flatten(1) for rank in ranks for _, _, target in rank['seen']])
    similarity = torch.corrcoef(targets) - torch.eye(len(targets))
    assert similarity.abs().max() < 0.35  # independent noise of 256 numbers: 0.06 standard deviation
    timesteps = torch.cat([t for rank in ranks for _, t, _ in rank['seen']])
    assert len(timesteps.unique()) > 50
    by_id = {}
    for (epoch, sample_id, _), t in zip(keys, timesteps.tolist(), strict=True):
        by_id.setdefault(sample_id, {})[epoch] = t
    repeated = [times for times in by_id.values() if len(times) == 2]
    assert repeated
    assert sum(times[0] == times[1] for times in repeated) <= 1


def test_ranks_share_the_timesteps_of_a_global_batch(two_ranks):
    _, ranks = two_ranks
    for batch, parts in enumerate(zip(*(rank['seen'] for rank in ranks), strict=True)):  # a micro-batch is a rank's whole share
        key, timesteps = (torch.cat([part[i] for part in parts]) for i in (0, 1))
        assert torch.equal(timesteps, spread_points(17, key, batch) * 1000 >> 32)
        assert (timesteps // 125).sort().values.tolist() == list(range(8))


def test_ranks_keep_equal_weights(two_ranks):
    _, (first, second) = two_ranks
    assert first['weights'].keys() == second['weights'].keys()
    assert all(torch.equal(first['weights'][name], second['weights'][name]) for name in first['weights'])


def test_two_processes_train_as_one(two_ranks):
    """The same global batches with the same noise; only the order of summation differs."""
    out, _ = two_ranks
    one, two = (training_weights(read_checkpoint(find_checkpoint(out / name))) for name in ('one', 'two'))
    assert one.keys() == two.keys()
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=0, atol=2e-4)


def test_no_rank_writes_over_another(two_ranks):
    out, _ = two_ranks
    lines = (out / 'two/log.jsonl').read_text().splitlines()
    assert len(lines) == 8  # one a batch
    assert os.path.exists(out / 'two/recipe.yaml')
