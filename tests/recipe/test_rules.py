import pytest

from diffusion.recipe import Duration, load_recipe
from tests.recipe.test_load import BASE, SYNTHETIC, errors_of

ZERO_SNR = ['model.diffusion.schedule.zero_terminal_snr=true', 'model.diffusion.min_snr_gamma=5']


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
        (['model.diffusion.min_snr_gamma=0'], 'model.diffusion.min_snr_gamma: 0 must be at least 1e-12 (command line); write null for no weighting'),
        (['model.diffusion=null', 'model.flow.std=0'], 'model.flow.std: 0 is outside 0.001 .. 10'),
        (['model.diffusion.schedule.num_timesteps=1'], 'model.diffusion.schedule.num_timesteps: 1 must be at least 2'),
        (['model.diffusion=null'], 'of which a run has one; neither is set'),
        (['model.flow.shift=3'], 'of which a run has one; both are set'),
        (['ema.half_life=0ba'], 'ema.half_life: 0ba must be at least 1'),
        ([*ZERO_SNR, 'model.diffusion.prediction=sample'], 'set model.diffusion.prediction=v_prediction (or model.diffusion.min_snr_gamma=null)'),
        (['model.timesteps=halton'], "model.timesteps: 'halton' is not one of uniform, sobol"),
        (['data.caption_dropout=0'], 'log.samples.guidance: 7.5 needs a trained unconditional model'),
        (['data.caption_dropout=1.5'], 'data.caption_dropout: 1.5 is outside'),
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
        (['train.duration=60sec'], 'train.duration: 60sec must be given in ba or ep'),
        (['checkpoint.every=1ep'], 'checkpoint.every: 1ep must be given in ba or sec'),
        (['ema.start=550000ba'], 'ema.start: 550000ba is not before the end of the run'),
        (['optimizer.warmup=600000ba'], 'optimizer.warmup: 600000ba is not before the end'),
        (['train.duration=1000sp'], 'train.duration: 1000sp must be given in ba or ep'),
        (['optimizer.warmup=1ep'], 'optimizer.warmup: 1ep must be given in ba'),
        (['data.cache_limit=2tb', 'data.kind=latents', 'data.streams.train.local=/x'], 'is the only copy'),
        (['data.cache_limit=lots'], 'data.cache_limit: lots is not a size'),
        (['checkpoint.keep=0'], 'checkpoint.keep: 0 would leave nothing'),
        (['optimizer.betas=[2,3]'], 'optimizer.betas[0]: 2 is outside'),
        (['optimizer.weight_decay=-1'], 'optimizer.weight_decay: -1 is outside'),
        (['eval.batches=0'], 'eval.batches: 0 is outside'),
        (
            ['data.kind=images', 'data.streams.train={local: a, proportion: 0}'],
            'proportion: 0 never uses the stream; leave it out with data.streams.train=null',
        ),
        (['data.streams.train={local: a, proportion: 7}'], 'data.streams.train.proportion: 7 is outside'),
        (['data.kind=latents', 'data.streams.train.local=/x', 'eval.streams.val.local=/y'], 'eval.streams: are never used'),
        (['log.every=0'], 'log.every: 0 is outside'),
        (['train.compile=network', 'train.sharding=zero2'], 'train.compile: network makes one graph of the whole network, but train.sharding=zero2'),
        (
            ['train.compile=network', 'train.precision=bf16'],
            'but train.precision=bf16 gathers its weights between the blocks; set train.compile=blocks',
        ),
        (['ema.half_life=null', 'ema.offload=true'], 'ema.offload: has no effect without an average'),
        (
            ['cost.gpu=h1000', 'cost.price_per_gpu_hour=null'],
            "cost.gpu: no price for a 'h1000'; did you mean h100? There are prices for a100-40gb, ",
        ),
        (['cost.price_per_gpu_hour=-1'], 'cost.price_per_gpu_hour: -1 is outside'),
    ],
)
def test_a_contradiction_is_an_error_with_a_remedy(overrides, expected):
    errors = errors_of(*overrides)
    assert any(expected in error for error in errors), errors


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
