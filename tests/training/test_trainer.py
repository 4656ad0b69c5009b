"""Our Trainer against Composer's: the same training, without waiting for the device."""

import composer
import pytest
from composer.core import Engine

from diffusion.recipe import load_recipe
from diffusion.training.builder import build_trainer
from diffusion.training.trainer import Trainer
from tests.conftest import REPOSITORY
from tests.training.host_syncs import syncs_per_step


def stock_trainer(log_every, left_out, **arguments):
    """Composer's own Trainer with the arguments of ours."""
    return composer.Trainer(**arguments)


def counted(overrides, folder, trainer_class):
    more = ['train.duration=7ba', 'log.every=3', f'run_folder={folder}']
    return syncs_per_step(load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', [*overrides, *more]), trainer_class)


def test_between_log_records_the_host_waits_for_nothing(overrides, tmp_path):
    between, logging = counted(overrides, tmp_path / 'ours', Trainer)
    assert between == 0
    assert 0 < logging <= 4  # the loss and the gradient norm, each written to a file and to the console
    assert counted(overrides, tmp_path / 'stock', stock_trainer)[0] >= 5  # or the counting counts nothing


@pytest.mark.parametrize(('asked_for', 'printed'), [('', False), ('1', True)])
def test_composers_texts_are_made_only_where_somebody_reads_them(overrides, tmp_path, monkeypatch, asked_for, printed):
    texts, make = [], Engine._debug_log
    monkeypatch.setattr(Engine, '_debug_log', lambda engine, event, msg: texts.append(msg) or make(engine, event, msg))
    monkeypatch.setenv('ENGINE_DEBUG', asked_for)
    recipe = load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', [*overrides, 'train.duration=2ba', f'run_folder={tmp_path}'])
    trainer = build_trainer(recipe)
    texts.clear()  # of Composer's constructor
    trainer.fit()
    trainer.close()
    assert bool(texts) == printed
