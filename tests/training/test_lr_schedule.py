"""The rate of each batch, as the optimizer has it and as the log says it."""

import math

import pytest
import torch
from composer.core import Callback
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_cosine_schedule_with_warmup, get_wsd_schedule

from diffusion.monitoring.report.run import read_log
from diffusion.recipe import load_recipe
from diffusion.training.builder import build_trainer
from diffusion.training.optimizers import lr_factor
from tests.conftest import REPOSITORY


def rates_of(schedule, batches):
    """The rate that each batch of a plain PyTorch loop is trained with."""
    optimizer = torch.optim.AdamW(nn.Linear(1, 1).parameters(), lr=1.0)
    scheduler = schedule(optimizer)
    rates = []
    for _ in range(batches):
        rates.append(optimizer.param_groups[0]['lr'])
        optimizer.step()
        scheduler.step()
    return rates


def test_warm_up_begins_above_zero_and_ends_at_the_peak():
    assert [lr_factor(batch, 4, 100, 'constant') for batch in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert lr_factor(0, 0, 100, 'constant') == 1


@pytest.mark.parametrize(
    ('decay', 'theirs'),
    [
        ('cosine', lambda optimizer: get_cosine_schedule_with_warmup(optimizer, 10, 100)),
        ('cooldown', lambda optimizer: get_wsd_schedule(optimizer, 10, 20, 100, decay_type='1-sqrt')),
    ],
)
def test_after_the_warm_up_it_is_transformers_schedule(decay, theirs):
    """Its warm-up begins with the rate 0."""
    expected = rates_of(theirs, 100)
    ours = rates_of(lambda optimizer: LambdaLR(optimizer, lambda batch: lr_factor(batch, 10, 100, decay)), 100)
    assert ours[10:] == pytest.approx(expected[10:])
    assert ours[:10] == pytest.approx(expected[1:11])
    assert min(ours) > 0


def test_each_batch_has_the_rate_of_a_plain_loop_and_the_log_says_so(overrides, tmp_path):
    """tests/faults/test_kill.py: and the same one after a resume."""
    used = []

    class Spy(Callback):
        def after_train_batch(self, state, logger):  # gradients are there, the step is next
            used.append(state.optimizers[0].param_groups[0]['lr'])

    more = ['train.duration=6ba', 'optimizer.warmup=3ba', 'optimizer.decay=cosine', 'optimizer.lr=1e-3']
    trainer = build_trainer(load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', [*overrides, *more]))
    trainer.state.callbacks.append(Spy())
    trainer.fit()
    trainer.close()
    factors = [1 / 3, 2 / 3, 1, *(0.5 * (1 + math.cos(math.pi * i / 3)) for i in range(3))]
    expected = rates_of(lambda optimizer: LambdaLR(optimizer, lambda batch: 1e-3 * [*factors, 0][batch]), 6)
    assert used == pytest.approx(expected)
    logged = {record['batch']: record['lr-AdamW/group0'] for record in read_log(tmp_path / 'run/log.jsonl') if 'lr-AdamW/group0' in record}
    assert logged == dict(enumerate(used, start=1))
