"""Contrastive flow matching, against sums in float64."""

import numpy as np
import torch

from diffusion.datasets.keyed_random import by_id
from diffusion.methods.contrastive import ContrastiveFlow, partners
from diffusion.objectives.objective import Outputs, weighted_error
from diffusion.recipe.techniques import Contrastive


def test_each_sample_has_another_one_and_is_another_ones_once():
    key = by_id(torch.arange(100, 164))
    other = partners(17, key)
    assert sorted(other.tolist()) == list(range(64))
    assert all(i != j for i, j in enumerate(other.tolist()))
    seen, at = {0}, int(other[0])  # one ring: no small circles, in which two samples would have only one another
    while at not in seen:
        seen.add(at)
        at = int(other[at])
    assert len(seen) == 64


def test_partners_do_not_depend_on_the_order_and_change_with_the_epoch():
    key = by_id(torch.arange(32))
    pairs = dict(zip(key[:, 1].tolist(), key[partners(17, key), 1].tolist(), strict=True))
    shuffled = key[torch.randperm(32, generator=torch.Generator().manual_seed(1))]
    assert dict(zip(shuffled[:, 1].tolist(), shuffled[partners(17, shuffled), 1].tolist(), strict=True)) == pairs
    later = key + torch.tensor([1, 0, 0])
    assert dict(zip(later[:, 1].tolist(), later[partners(17, later), 1].tolist(), strict=True)) != pairs
    assert partners(17, key[:2]).tolist() == [1, 0]


def test_the_loss_by_hand():
    rng = np.random.default_rng(0)
    prediction, target, other = rng.normal(size=(3, 5, 4, 8, 8))
    outputs = Outputs(torch.tensor(prediction).float(), torch.tensor(target).float(), None, torch.zeros(5))
    batch = {'other_moments': torch.tensor(other).float(), 'other_key': by_id(torch.arange(5))}
    method = ContrastiveFlow(Contrastive(0.05), lambda moments, key, t: moments, seed=0)  # moments stand for the target that is made of them
    error = weighted_error(outputs.prediction, outputs.target)
    expected = ((prediction - target) ** 2).mean(axis=(1, 2, 3)) - 0.05 * ((prediction - other) ** 2).mean(axis=(1, 2, 3))
    np.testing.assert_allclose(method(error, outputs, batch).numpy(), expected, rtol=1e-5)
