import pytest
import yaml

from diffusion.recipe import RecipeError, changed_fields, load_recipe, refuse_changes, to_dict, to_yaml
from tests.recipe.test_load import BASE, SYNTHETIC


def changes(*overrides):
    before = to_dict(load_recipe(BASE, SYNTHETIC))
    return changed_fields(before, to_dict(load_recipe(BASE, [*SYNTHETIC, *overrides])))


def test_what_shapes_the_result_must_stay():
    assert changes('optimizer.lr=2e-4', 'model.diffusion.min_snr_gamma=5', 'data.caption_dropout=0.2') == [
        'data.caption_dropout: 0.1 -> 0.2',
        'model.diffusion.min_snr_gamma: None -> 5.0',
        'optimizer.lr: 0.0001 -> 0.0002',
    ]


@pytest.mark.parametrize('override', ['model.timesteps=sobol', 'model.diffusion.min_snr_gamma=4', 'model.diffusion.prediction=epsilon'])
def test_no_field_of_the_model_may_change(override):
    model = ['model.diffusion.min_snr_gamma=5', 'model.diffusion.prediction=v_prediction']
    begun, now = (load_recipe(BASE, [*SYNTHETIC, *model, *more]) for more in ([], [override]))
    with pytest.raises(RecipeError, match=override.partition('=')[0]):
        refuse_changes(now, to_yaml(begun))


def test_a_run_older_than_a_field_resumes():
    recipe = load_recipe(BASE, SYNTHETIC)
    begun = to_dict(recipe)
    del begun['model']['timesteps'], begun['model']['flow'], begun['model']['diffusion']['offset_noise']
    refuse_changes(recipe, yaml.safe_dump(begun))
    with pytest.raises(RecipeError, match='model.timesteps: uniform -> sobol'):
        refuse_changes(load_recipe(BASE, [*SYNTHETIC, 'model.timesteps=sobol']), yaml.safe_dump(begun))


def test_the_objective_may_not_change():
    assert changes('model.diffusion=null', 'model.flow.shift=3')[-1] == 'model.flow.uniform_share: None -> 0.1'
    assert 'model.flow.shift: None -> 3.0' in changes('model.diffusion=null', 'model.flow.shift=3')


def test_what_does_not_may_change():
    harmless = ['name=other', 'train.duration=600000ba', 'batch.micro_size=64', 'data.workers=2', 'log.every=3', 'cost.price_per_gpu_hour=5']
    assert (
        changes(
            *harmless,
            'checkpoint.every=10ba',
            'data.streams.train.local=/elsewhere',
            'train.compile=blocks',
            'train.sharding=zero2',
            'train.attention=math',
            'log.samples.every=null',
        )
        == []
    )


def test_a_run_may_go_to_encoders_of_other_machines_and_back_with_equal_moments():
    images = ['data.kind=images', 'data.streams.train.local=/data']
    in_step, online, half = (
        to_dict(load_recipe(BASE, [*images, *more]))
        for more in ([], ['data.encoders.ray.actors=2', 'data.encoders.ray.send=bytes'], ['data.encoders.ray.moments=float16'])
    )
    assert changed_fields(in_step, online) == changed_fields(online, in_step) == []
    assert changed_fields(in_step, half) == ['data.encoders.ray.moments: float32 -> float16']
    assert changed_fields(half, in_step) == ['data.encoders.ray.moments: float16 -> float32']


def test_streams_may_move_but_not_change():
    assert changes('data.streams.train.remote=s3://elsewhere') == []
    assert changes('data.streams.new.local=/x') == ["data.streams: ['train'] -> ['new', 'train']"]
    assert changes('data.streams.train.proportion=0.5') == ['data.streams.train.proportion: None -> 0.5']


def test_squares_cannot_become_buckets():
    before, now = ({'data': {'streams': {}, 'aspect_buckets': value}, 'optimizer': {'decay': 'constant'}} for value in (False, True))
    assert changed_fields(before, now) == ['data.aspect_buckets: False -> True']


def test_a_cosine_cannot_be_made_longer():
    before = to_dict(load_recipe(BASE, [*SYNTHETIC, 'optimizer.decay=cosine']))
    longer = to_dict(load_recipe(BASE, [*SYNTHETIC, 'optimizer.decay=cosine', 'train.duration=600000ba']))
    assert changed_fields(before, longer) == ['train.duration: 550000ba -> 600000ba']
