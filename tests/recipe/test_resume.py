from diffusion.recipe import changed_fields, load_recipe, to_dict
from tests.recipe.test_load import BASE, SYNTHETIC


def changes(*overrides):
    before = to_dict(load_recipe(BASE, SYNTHETIC))
    return changed_fields(before, to_dict(load_recipe(BASE, [*SYNTHETIC, *overrides])))


def test_what_shapes_the_result_must_stay():
    assert changes('optimizer.lr=2e-4', 'model.min_snr_gamma=5', 'data.caption_dropout=0.2') == [
        'data.caption_dropout: 0.1 -> 0.2',
        'model.min_snr_gamma: None -> 5.0',
        'optimizer.lr: 0.0001 -> 0.0002',
    ]


def test_what_does_not_may_change():
    harmless = ['name=other', 'train.duration=600000ba', 'batch.micro_size=64', 'data.workers=2', 'log.every=3', 'cost.price_per_gpu_hour=5']
    assert changes(*harmless, 'checkpoint.every=10ba', 'data.streams.train.local=/elsewhere', 'train.compile=false', 'log.samples.every=null') == []


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
