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
            'data.streams.left-out=null',
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


SCORED = ['data.kind=latents', 'data.streams.train.local=/data', 'eval.every=100ba', 'eval.streams.held.local=/held']
SCORED += ['eval.samples.metrics=[kid@random-conv]', 'eval.samples.count=16', 'eval.samples.every=100ba']


def score_changes(*overrides, before=()):
    return changed_fields(*(to_dict(load_recipe(BASE, [*SCORED, *more])) for more in (before, [*before, *overrides])))


@pytest.mark.parametrize(
    ('key', 'value', 'shown'),
    [
        ('count', '32', '16 -> 32'),
        ('steps', '5', '25 -> 5'),
        ('guidance', '2', '3.0 -> 2.0'),
        ('seed', '1', '0 -> 1'),
        ('prompts', '[a dog]', "[] -> ['a dog']"),
        ('metrics', '[kid]', "['kid@random-conv'] -> ['kid']"),
    ],
)
def test_the_scores_of_a_run_stay_comparable(key, value, shown):
    assert score_changes(f'eval.samples.{key}={value}') == [f'eval.samples.{key}: {shown}']
    off = 'eval.samples.every=null'
    assert score_changes('eval.samples.every=50ba', f'eval.samples.{key}={value}', before=[off]) == []  # nothing is scored yet


def test_scores_may_come_at_other_times_and_evaluation_may_change():
    assert score_changes('eval.samples.every=50ba', 'eval.samples.weights=/weights') == []
    assert score_changes('eval.samples.every=null') == []
    assert score_changes('eval.every=50ba', 'eval.batches=3', 'eval.timesteps=5', 'eval.streams.more.local=/more', 'eval.streams.held=null') == []


@pytest.mark.parametrize(
    ('overrides', 'remedy'),
    [
        ([], 'name=NEW load_path=runs/a'),
        (['run_folder=/disk/a'], 'name=NEW run_folder=NEW load_path=/disk/a'),
        (['checkpoint.folder=s3://bucket/a'], 'name=NEW checkpoint.folder=ANOTHER load_path=runs/a'),
        (['run_folder=/disk/a', 'checkpoint.folder=s3://bucket/a'], 'name=NEW run_folder=NEW checkpoint.folder=ANOTHER load_path=/disk/a'),
    ],
)
def test_the_remedy_leads_to_another_run(overrides, remedy):
    begun, now = (load_recipe(BASE, [*SYNTHETIC, 'name=a', *overrides, *more]) for more in ([], ['optimizer.lr=1e-3']))
    with pytest.raises(RecipeError) as refused:
        refuse_changes(now, to_yaml(begun))
    assert f': {remedy}: 1 error' in str(refused.value)
    asked = remedy.replace('NEW', 'b').replace('ANOTHER', 's3://bucket/b').split()
    another = load_recipe(BASE, [*SYNTHETIC, 'name=a', *overrides, 'optimizer.lr=1e-3', *asked])
    assert another.run_folder != begun.run_folder
    assert another.checkpoint.folder != begun.checkpoint.folder


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
