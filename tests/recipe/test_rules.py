import re

import pytest

from diffusion.recipe import AutoencoderRecipe, Duration, Recipe, RecipeError, load_recipe, rules
from diffusion.recipe.conflicts import CONFLICTS, TABLE
from diffusion.recipe.keys import first_unknown
from diffusion.recipe.schema import present
from diffusion.recipe.techniques import known_techniques
from tests.recipe.test_load import BASE, SYNTHETIC, errors_of

ZERO_SNR = ['model.diffusion.schedule.zero_terminal_snr=true', 'model.diffusion.min_snr_gamma=5']


ONLINE = ['data.kind=images', 'data.streams.train.local=/data', 'data.encoders.ray.actors=2']
FEW = ['data.kind=latents', 'data.streams.train=null', 'load_path=/base']
PHOTOS = 'data.streams.subject={photos: {folder: /photos}}'
DRAWN = 'data.streams.class={drawn: {prompts: [a dog, a cat], num_images: 4}}'


@pytest.mark.parametrize(
    ('overrides', 'expected'),
    [
        ([PHOTOS, DRAWN], None),
        ([PHOTOS, 'data.kind=synthetic'], None),
        ([PHOTOS, 'eval.every=1ba', 'eval.streams.held={photos: {folder: /others}}'], None),
        ([PHOTOS, 'data.caption_dropout=0'], None),  # the base was trained without captions
        ([PHOTOS, 'data.kind=images'], 'data.streams.subject.photos: is encoded before training, and data.kind is images; set data.kind=latents'),
        ([PHOTOS, 'data.aspect_buckets=true', 'data.resolution=320'], 'aspect buckets need a multiple of 128 px, and data.resolution is 320'),
        ([PHOTOS, 'data.cache_limit=1gb'], 'data.streams.subject is encoded into the run folder, which is no cache'),
        (
            ['data.streams.subject={photos: {folder: "s3://bucket/photos"}}'],
            "photos.folder: 's3://bucket/photos' is a URL; expected a folder of this",
        ),
        (
            ['data.streams.subject={photos: {folder: /photos}, local: /data}'],
            'data.streams.subject: names several sources; keep one of photos, drawn',
        ),
        (['data.streams.subject={photos: {caption: x}}'], 'data.streams.subject.photos.folder'),
        (
            [PHOTOS, 'data.streams.subject.loss_weight=0'],
            'loss_weight: 0 learns nothing from the stream; leave it out with data.streams.subject=null',
        ),
        ([PHOTOS, 'eval.every=1ba', 'eval.streams.held={loss_weight: 2, local: /x}'], 'eval.streams.held.loss_weight: 2.0 has no effect'),
        ([DRAWN, 'load_path=null'], 'data.streams.class.drawn: a network with random weights draws noise; set load_path'),
        (['data.streams.class={drawn: {}}'], 'data.streams.class.drawn.prompts: there are none'),
        ([DRAWN, 'data.streams.class.drawn.num_images=1'], 'num_images: 1 images leave out some of 2 prompts; set it to 2'),
        (
            [DRAWN, 'data.streams.class.drawn.cache=s3:/bucket'],
            'drawn.cache: s3:/bucket: is neither a URL nor a folder; did you mean s3://bucket?',
        ),
    ],
)
def test_streams_that_the_run_prepares(overrides, expected):
    if expected is None:
        load_recipe(BASE, [*FEW, *overrides])
    else:
        assert expected in '; '.join(errors_of(*FEW, *overrides))


SCORED = ['data.kind=latents', 'data.streams.train.local=/data', 'eval.samples.every=100ba', 'eval.samples.metrics=[kid@random-conv]']
HELD_OUT = ['eval.every=100ba', 'eval.streams.held.local=/held']


@pytest.mark.parametrize(
    ('overrides', 'expected'),
    [
        (HELD_OUT, None),
        ([*HELD_OUT, 'eval.samples.metrics=[kid, clip, cmmd]'], None),
        (['eval.samples.metrics=[clip]', 'eval.samples.prompts=[a dog]'], None),  # compares images with their prompts alone
        ([*HELD_OUT, 'eval.samples.metrics=[]'], 'eval.samples.metrics: there are none; name some, such as [clip, cmmd, kid]'),
        ([*HELD_OUT, 'eval.samples.metrics=[kit]'], "eval.samples.metrics: no metric 'kit'; did you mean 'kid'?"),
        ([*HELD_OUT, 'eval.samples.metrics=[kid@random_conv]'], "no feature network 'random_conv'; did you mean 'random-conv'?"),
        ([*HELD_OUT, 'eval.samples.metrics=[kid@]'], "kid@: no feature network ''"),
        ([*HELD_OUT, 'eval.samples.metrics=[clip@random-conv]'], 'clip@random-conv: random-conv embeds no captions; those that do: clip-vit-l14,'),
        ([*HELD_OUT, 'eval.samples.metrics=[kid@shapes-look]'], "kid@shapes-look: no feature network 'shapes-look'"),
        ([*HELD_OUT, 'eval.samples.metrics=[shapes@clip-vit-l14]'], 'shapes takes no other network; leave out @clip-vit-l14'),
        ([*HELD_OUT, 'eval.samples.metrics=[kid, kid]'], 'eval.samples.metrics: kid, kid names a metric twice'),
        ([], 'eval.samples.every: 100ba takes captions and real images from the evaluation data; name them in eval.streams and set eval.every'),
        (['eval.samples.prompts=[a dog]'], 'eval.samples.every: 100ba takes real images from the evaluation data'),
        (['eval.samples.metrics=[clip]'], 'eval.samples.every: 100ba takes captions from the evaluation data'),
        (
            [*HELD_OUT, f'eval.samples.prompts={[f"p{i}" for i in range(17)]}', 'eval.samples.count=16'],
            'eval.samples.count: 16 images leave out some of 17 prompts; set it to 17',
        ),
        ([*HELD_OUT, 'eval.samples.count=16'], None),
        ([*HELD_OUT, 'eval.samples.count=15'], 'eval.samples.count: 15 images are too few for a score; set it to 16 or more'),
        ([*HELD_OUT, 'data.aspect_buckets=true'], 'eval.samples.every: draws squares, and data.aspect_buckets=true evaluates rectangles'),
        (
            [*HELD_OUT, 'eval.samples.weights=s3://bucket/weights'],
            "eval.samples.weights: 's3://bucket/weights' is a URL; expected a folder of this machine",
        ),
        ([*HELD_OUT, 'data.caption_dropout=0'], 'eval.samples.guidance: 3.0 needs a trained unconditional model, but data.caption_dropout is 0'),
        ([*HELD_OUT, 'eval.samples.stop.metric=kid@random-conv'], None),
        (['eval.samples.metrics=[shapes]', 'eval.samples.prompts=[a dog]', 'eval.samples.stop.metric=right_everything'], None),
        (
            [*HELD_OUT, 'eval.samples.metrics=[precision_recall@random-conv,kid]', 'eval.samples.stop.metric=precision'],
            "eval.samples.stop.metric: 'precision' is not measured; did you mean 'precision@random-conv'? There are precision@random-conv, recall@",
        ),
        ([*HELD_OUT, 'eval.samples.stop.patience=7'], 'eval.samples.stop.patience: has no effect without eval.samples.stop.metric'),
        (['eval.samples.every=null', 'eval.samples.stop.metric=kid'], 'eval.samples.stop.metric: kid is never measured, eval.samples.every is null'),
        ([*HELD_OUT, 'eval.samples.steps=1000', 'model.diffusion.schedule.num_timesteps=500'], 'eval.samples.steps: 1000 is above model.diffusion'),
        ([*HELD_OUT, 'eval.samples.every=1ep'], 'eval.samples.every'),
    ],
)
def test_scores_of_drawn_images(overrides, expected):
    if expected is None:
        load_recipe(BASE, [*SCORED, *overrides])
    else:
        assert expected in '; '.join(errors_of(*SCORED, *overrides))


def test_null_removes_a_prompt_of_the_base():
    removed = [f'log.samples.prompts.{name}=null' for name in load_recipe(BASE, SYNTHETIC).log.samples.prompts]
    kept = load_recipe(BASE, [*SYNTHETIC, *removed, 'log.samples.prompts.mine=a hare']).log.samples.prompts
    assert present(kept) == {'mine': 'a hare'}
    assert 'without log.samples.prompts' in errors_of(*removed)[0]


def test_batch_arithmetic():
    assert errors_of('batch.micro_size=128', num_gpus=24) == [
        'batch.global_size: 2048 is not divisible by 24 GPUs x batch.micro_size 128 = 3072; nearest: 3072',
    ]
    assert errors_of('batch.micro_size=48', num_gpus=16)[0].endswith('= 768; nearest: 1536 or 2304, or batch.micro_size=32')
    for num_gpus in (1, 2, 4, 8, 16):
        load_recipe(BASE, SYNTHETIC, num_gpus)


@pytest.mark.parametrize(
    ('overrides', 'expected'),
    [
        (['data.flip=true'], 'data.flip: works on images'),
        (['data.kind=latents', 'data.flip=true', 'data.streams.train.local=/x'], 'data.flip: works on images'),
        (['data.aspect_buckets=true'], 'data.aspect_buckets: synthetic latents are squares; set it to false'),
        (['model.diffusion.schedule.zero_terminal_snr=true'], 'model.diffusion.schedule.zero_terminal_snr: '),
        (['model.diffusion.schedule.beta_end=0.0001'], 'model.diffusion.schedule: needs 0 < beta_start < beta_end'),
        (
            ['model.diffusion.min_snr_gamma=0'],
            'model.diffusion.min_snr_gamma: 0 is not a number of at least 1e-12 or null (command line); write null for no weighting',
        ),
        (['model.diffusion=null', 'model.flow.std=0'], 'model.flow.std: 0 is not a number from 0.001 to 10'),
        (['model.diffusion.schedule.num_timesteps=1'], 'model.diffusion.schedule.num_timesteps: 1 is not a whole number from 2 to 100000'),
        (['batch.global_size=1' + '0' * 400], 'is not a whole number from 1 to 1000000000'),
        (['model.diffusion=null'], 'of which a run has one; neither is set'),
        (['model.flow.shift=3'], 'of which a run has one; both are set'),
        (['ema.half_life=0ba'], "ema.half_life: '0ba' is not a duration in ba of at least 1"),
        ([*ZERO_SNR, 'model.diffusion.prediction=sample'], 'set model.diffusion.prediction=v_prediction (or model.diffusion.min_snr_gamma=null)'),
        (['model.timesteps=halton'], "model.timesteps: 'halton' is not one of uniform, sobol"),
        (['data.caption_dropout=0'], 'log.samples.guidance: 7.5 needs a trained unconditional model'),
        (['data.caption_dropout=1.5'], 'data.caption_dropout: 1.5 is not a number from 0 to 0.999999999'),
        (['model.encoders.revision=main'], "model.encoders.revision: 'main' does not pin"),
        (['model.encoders.revision=null'], "model.encoders.revision: 'None' does not pin"),
        (['model.encoders.source=stabilityai/stable-diffusion-2-base'], 'was withdrawn'),
        (['model.encoders.source=/no/such/folder/here'], 'there is no folder'),
        (['model.encoders.source=/tmp'], 'model.encoders.revision: a local folder has none'),
        (['data.kind=images', 'data.streams.train=null'], 'data.streams: no training data is named'),
        (['data.kind=images'], 'data.streams.train: has no data'),
        (['data.kind=images', 'data.streams.train={local: a, proportion: 0.5}', 'data.streams.b.local=c'], 'some streams state a proportion'),
        (['eval.every=100ba', 'data.kind=images', 'data.streams.train.local=/x'], 'eval.every: 100ba without eval.streams'),
        (['train.duration=60s'], "train.duration: '60s' is not a duration"),
        (['train.duration=60sec'], "train.duration: '60sec' is not a duration in ba or ep"),
        (['checkpoint.every=1ep'], "checkpoint.every: '1ep' is not a duration in ba or sec"),
        (['ema.start=550000ba'], 'ema.start: 550000ba is not before the end of the run'),
        (['optimizer.warmup=600000ba'], 'optimizer.warmup: 600000ba is not before the end'),
        (['train.duration=1000sp'], "train.duration: '1000sp' is not a duration in ba or ep"),
        (['optimizer.warmup=1ep'], "optimizer.warmup: '1ep' is not a duration in ba"),
        (['data.cache_limit=2tb', 'data.kind=latents', 'data.streams.train.local=/x'], 'is the only copy'),
        (['data.cache_limit=lots'], 'data.cache_limit: lots is not a size'),
        (['checkpoint.keep=0'], 'checkpoint.keep: 0 would leave nothing'),
        (['optimizer.betas=[2,3]'], 'optimizer.betas[0]: 2 is not a number from 0 to 0.999999999'),
        (['optimizer.weight_decay=-1'], 'optimizer.weight_decay: -1 is not a number from 0 to 1'),
        (['eval.batches=0'], 'eval.batches: 0 is not a whole number from 1 to 1000000000'),
        (
            ['data.kind=images', 'data.streams.train={local: a, proportion: 0}'],
            'proportion: 0 never uses the stream; leave it out with data.streams.train=null',
        ),
        (['data.streams.train={local: a, proportion: 7}'], 'data.streams.train.proportion: 7 is not a number from 0 to 1'),
        (['data.kind=latents', 'data.streams.train.local=/x', 'eval.streams.val.local=/y'], 'eval.streams: are never used'),
        (['log.every=0'], 'log.every: 0 is not a whole number from 1'),
        (['train.compile=network', 'train.sharding=zero2'], 'train.compile: network makes one graph of the whole network, but train.sharding=zero2'),
        (
            ['train.compile=network', 'train.precision=bf16'],
            'but train.precision=bf16 gathers its weights between the blocks; set train.compile=blocks',
        ),
        (['data.encoders.ray.actors=2'], 'data.encoders: encode images while training, and data.kind is synthetic; set data.encoders=null'),
        (
            ['data.encoders.ray.patience_sec=600'],
            'patience_sec: 600 leaves no time for another one before data.timeout_sec, 600; set it to 120, or data.timeout_sec to 3000',
        ),
        (
            ['data.encoders.ray.send=bytes', 'data.max_bad_samples=3'],
            'data.encoders.ray.send: bytes are decoded by the encoders, where nothing can replace a bad sample, and data.max_bad_samples is 3; set',
        ),
        (['data.encoders.ray.gpus=2'], 'data.encoders.ray.gpus: 2'),
        (['data.encoders.ray.address=head'], "data.encoders.ray.address: 'head' is no address of a cluster; write host:port of its head"),
        (['ema.half_life=null', 'ema.offload=true'], 'ema.offload: has no effect without an average'),
        (
            ['cost.gpu=h1000', 'cost.price_per_gpu_hour=null'],
            "cost.gpu: no price for a 'h1000'; did you mean 'h100'? There are prices for a100-40gb, ",
        ),
        (['cost.price_per_gpu_hour=-1'], 'cost.price_per_gpu_hour: -1 is not a number from 0'),
    ],
)
def test_a_contradiction_is_an_error_with_a_remedy(overrides, expected):
    errors = errors_of(*overrides)
    assert any(expected in error for error in errors), errors


def test_encoders_without_ray_name_the_extra(monkeypatch):
    load_recipe(BASE, ONLINE)
    monkeypatch.setattr(rules, 'find_spec', lambda _: None)
    with pytest.raises(RecipeError, match=r"data.encoders.ray: needs the package ray: uv pip install -e '.\[ray\]'"):
        load_recipe(BASE, ONLINE)


def test_min_snr_and_zero_snr_go_together_with_v_prediction():
    load_recipe(BASE, [*SYNTHETIC, *ZERO_SNR, 'model.diffusion.prediction=v_prediction'])


def test_durations():
    for text, value, unit in (('10000ba', 10000, 'ba'), ('1800sec', 1800, 'sec')):
        duration = Duration(text)
        assert (str(duration), duration.value, duration.unit) == (text, value, unit)
    assert Duration('10000ba').batches == 10000
    for wrong in ('60s', '24h', '1d', '1.5ep', '10', 'ba', '-1ba', ''):
        with pytest.raises(ValueError, match='is not a duration'):
            Duration(wrong)


def test_the_table_of_contradictions_names_keys_that_there_are():
    of_techniques = sum(len(technique.conflicts) for technique in known_techniques())
    assert len(CONFLICTS) - of_techniques == sum(line[0] != ' ' for line in TABLE.splitlines() if line) > 30
    assert of_techniques > 6
    for conditions, error in CONFLICTS:
        keys = [re.match(r'!?([\w.]+)', condition)[1] for condition in conditions]
        keys += [error.partition(': ')[0], *re.findall(r'\{([\w.]+)\}', error), *re.findall(r'([a-z]\w*\.[\w.]+)=', error)]
        kind = AutoencoderRecipe if any(key.startswith('autoencoder') for key in keys) else Recipe
        assert [key for key in keys if first_unknown(kind, tuple(key.split('.')))] == [], error
        assert 'set ' in error, error  # the remedy
