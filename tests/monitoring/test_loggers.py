"""Loggers by name, through Composer's own."""

import inspect

import composer.loggers
import pytest

from diffusion.monitoring.report.run import read_log
from diffusion.recipe import RecipeError, catalog, load_recipe
from diffusion.recipe.catalog import LOGGERS
from diffusion.training.builder import build_trainer
from tests.conftest import REPOSITORY

BASE = REPOSITORY / 'yamls/sd2-base-256.yaml'


@pytest.mark.parametrize('name', LOGGERS)
def test_composers_constructors_take_what_they_are_given(name, recipe, tmp_path):
    given = LOGGERS[name].arguments(recipe, tmp_path, 'id')
    inspect.signature(getattr(composer.loggers, LOGGERS[name].composer_class)).bind(**given)


def test_tensorboard_has_the_numbers_of_the_log(overrides, tmp_path):
    accumulators = pytest.importorskip('tensorboard.backend.event_processing.event_accumulator')

    samples = ['log.samples.every=2ba', 'log.samples.steps=2']
    for duration in ('2ba', '4ba'):  # the second resumes the first
        trainer = build_trainer(load_recipe(BASE, [*overrides, *samples, 'log.to=[tensorboard]', f'train.duration={duration}']))
        trainer.fit()
        trainer.close()
    written = accumulators.EventAccumulator(str(tmp_path / 'run/tensorboard/sd2-base-256'))
    written.Reload()
    losses = {event.step: event.value for event in written.Scalars('loss/train/total')}
    expected = {record['batch']: record['loss/train/total'] for record in read_log(tmp_path / 'run/log.jsonl') if 'loss/train/total' in record}
    assert sorted(expected) == [1, 2, 3, 4]
    assert losses == pytest.approx(expected)
    assert any(tag.startswith('samples/') for tag in written.Tags()['images'])
    assert len(list((tmp_path / 'run/tensorboard').rglob('events.out.tfevents.*'))) == 2  # one a process


def test_a_logger_that_cannot_be_had_is_refused_before_anything_starts(overrides, monkeypatch):
    def refused(*more):
        with pytest.raises(RecipeError) as error:
            load_recipe(BASE, [*overrides, *more])
        return error.value.errors

    monkeypatch.setattr(catalog, 'find_spec', lambda name: None if name == 'mlflow' else object())
    assert refused('log.to=[tensorbord]') == [
        "log.to: no logger 'tensorbord'; did you mean 'tensorboard'? There are wandb, tensorboard, mlflow, comet"
    ]
    assert refused('log.to=wandb') == ["log.to: 'wandb' is not a list, each a text (command line)"]
    assert refused('log.to=[wandb]') == ['log.project: wandb needs one; set log.project=NAME']
    assert 'has no effect' in refused('log.to=[tensorboard]', 'log.project=x')[0]
    assert 'twice' in refused('log.to=[tensorboard,tensorboard]')[0]
    assert refused('log.to=[mlflow]', 'log.project=x') == ["log.to: mlflow needs the package mlflow: uv pip install -e '.[mlflow]'"]
    monkeypatch.setattr(catalog, 'find_spec', lambda name: None)
    assert refused('log.to=[wandb]', 'log.project=x') == ['log.to: wandb needs the package wandb: uv pip install wandb']
