import json

import pytest

from diffusion.cost.facts import Cluster, Facts, drawing_flop, load_for_planning
from diffusion.families.counting.counts import Counter
from diffusion.recipe import RecipeError
from tests.conftest import REPOSITORY, RESOLUTION

PHASE_1, PHASE_2 = (f'{REPOSITORY}/yamls/sd2-base-{px}.yaml' for px in (256, 512))
N = 865_910_724


def facts_of(path=PHASE_1, *overrides, num_images=790e6):
    recipe = load_for_planning(path, overrides)
    return Facts(recipe, Counter.from_file().counts(recipe), num_images)


def cluster(num_gpus=8, gpu_gb=80.0):
    return Cluster('a100-80gb', gpu_gb, num_gpus, 8)


def test_what_only_training_needs_is_not_asked_for():
    assert load_for_planning(PHASE_2, []).data.resolution == 512
    elsewhere = ['model.encoders.source=/cluster/encoders', 'model.encoders.revision=null']
    assert load_for_planning(PHASE_2, elsewhere).model.network == 'sd2-base'
    assert load_for_planning(f'{REPOSITORY}/yamls/shapes.yaml', []).model.network == 'shapes'
    with pytest.raises(RecipeError, match=r'model\.encoders\.source: there is no folder'):
        load_for_planning(PHASE_2, ['model.encoders.source=encoders'])
    with pytest.raises(RecipeError) as caught:
        load_for_planning(PHASE_2, ['optimizer.lrr=1', 'load_path=null', 'data.streams.train.remot=x'])
    assert [error.split(':')[0] for error in caught.value.errors] == ['optimizer.lrr', 'data.streams.train.remot']


def test_samples_and_flop_of_the_published_run():
    first, second = facts_of(), facts_of(PHASE_2, num_images=300e6)
    assert (first.phase.num_samples, second.phase.num_samples) == (1_126_400_000, 1_740_800_000)
    assert first.epochs == pytest.approx(1.43, abs=0.005)
    assert second.epochs == pytest.approx(5.80, abs=0.005)
    assert first.total_flop + second.total_flop == pytest.approx(4.80e21, rel=1e-3)


def test_epochs_are_steps_of_the_images_there_are():
    assert facts_of(PHASE_1, 'train.duration=2ep', num_images=1_000_000).num_batches == 976  # 2 x 1,000,000 // 2048
    with pytest.raises(RecipeError, match='of how many images'):
        _ = facts_of(PHASE_1, 'train.duration=2ep', num_images=None).num_batches


def test_memory_by_hand():
    memory = facts_of(PHASE_1, 'batch.micro_size=128').memory(cluster())
    encoders = 2 * 340_387_840 + 4 * 83_653_863
    assert memory.total == N * (4 + 4 + 8 + 4 + 2 + 4) + encoders + 128 * 317_416_353
    assert memory.fits
    assert 'EMA' not in facts_of(PHASE_1, 'ema.offload=true').memory(cluster()).parts
    sharded = facts_of(
        PHASE_1, 'batch.micro_size=128', 'train.sharding=hsdp', 'train.compile=blocks', 'train.precision=bf16', 'batch.global_size=8192'
    )
    assert sharded.memory(cluster(64)).parts['weights'] == 4 * -(-N // 8)  # in a node
    assert sharded.memory(cluster(32)).parts['gradients'] == 4 * N  # two micro-batches: whole gradients wait for the second


def test_auto_is_the_largest_divisor_that_fits():
    facts = facts_of(PHASE_1, 'batch.micro_size=auto')
    memory = facts.memory(cluster(8))  # of 256 a GPU
    assert (memory.micro_size, memory.fits) == (128, True)
    assert not facts.memory(cluster(8), 256).fits
    assert facts.memory(cluster(64)).micro_size == 32  # all there is
    assert facts.memory(cluster(8, gpu_gb=16)).micro_size == 0
    assert not facts.memory(cluster(8, gpu_gb=16)).fits


def test_what_does_not_fit_has_remedies_that_do():
    facts = facts_of(PHASE_1, 'batch.micro_size=128')
    counted = Counter.from_file().counts
    small = cluster(8, gpu_gb=40)
    assert not facts.memory(small).fits
    remedies = facts.remedies(small, counted)
    assert remedies == ['batch.micro_size=32', 'train.checkpoint_activations=true']
    for remedy in remedies:
        assert facts_of(PHASE_1, *remedy.split()).memory(small).fits
    tight = cluster(8, gpu_gb=24)
    (remedy,) = facts_of(PHASE_1, 'batch.micro_size=16').remedies(tight, counted)
    assert remedy == 'train.sharding=zero2 train.compile=blocks'
    assert facts_of(PHASE_1, 'batch.micro_size=16', *remedy.split()).memory(tight).fits


def test_images_are_encoded_before_the_unet_begins():
    latents = facts_of(PHASE_1, 'train.checkpoint_activations=true')
    images = facts_of(PHASE_1, 'train.checkpoint_activations=true', 'data.kind=images')
    assert latents.per_sample_bytes == latents.counts.peak_bytes < images.per_sample_bytes == images.counts.encoders.vae_peak_bytes
    assert images.encoder_flop == pytest.approx((45.1 + 272.7) * 1e9, rel=1e-3)


def test_a_sample_of_latents_is_as_large_as_encode_writes_it(latents, encoders_folder):
    """Moments and no more than was assumed for text, of samples that data_prep.encode wrote."""
    folder = latents
    shards = json.loads((folder / 'index.json').read_text())['shards']
    mean = sum(shard['raw_data']['bytes'] for shard in shards) / sum(shard['samples'] for shard in shards)
    encoders = [f'model.encoders.source={encoders_folder}', 'model.encoders.revision=null']
    planned = facts_of(PHASE_1, f'data.resolution={RESOLUTION}', 'model.network=tiny', *encoders).latent_bytes
    moments = 2 * 8 * (RESOLUTION // 4) ** 2  # the small VAE halves the side twice
    assert moments < mean <= planned + 50  # a shard's header is shared by few samples here


def test_checkpoints_are_as_large_as_the_recipe_says():
    """10.4 GB, and 13.9 GB with EMA (comment in yamls/sd2-base-256.yaml)."""
    assert facts_of().checkpoint_bytes / 1e9 == pytest.approx(13.9, abs=0.05)
    assert facts_of(PHASE_1, 'ema.half_life=null').checkpoint_bytes / 1e9 == pytest.approx(10.4, abs=0.05)
    by_batches = facts_of(PHASE_1, 'checkpoint.every=1000ba')
    assert by_batches.save_interval_sec(2048.0) == 1000
    for keep, keep_every, count in (('3', 'null', 3), ('3', '100000ba', 8), ('-1', 'null', 550), ('3', '1000ba', 550)):
        assert (
            facts_of(PHASE_1, 'checkpoint.every=1000ba', f'checkpoint.keep={keep}', f'checkpoint.keep_every={keep_every}').checkpoints_kept(2048.0)
            == count
        )
    assert facts_of(PHASE_1, 'checkpoint.every=500000ba', 'checkpoint.keep_every=null').checkpoints_kept(2048.0) == 1  # no more than are written


def test_an_evaluation_of_stable_diffusion_2():
    """0.80 TFLOP a pass, 50 steps with guidance: 80 TFLOP an image, 2.4e18 of 30,000, 9.6e18 at four scales. Without guidance it is half."""
    assert drawing_flop(30_000, (7.5,), 50, 0.80e12) == pytest.approx(2.4e18)
    assert drawing_flop(30_000, (1.5, 3, 5, 7.5), 50, 0.80e12) == pytest.approx(9.6e18)
    assert drawing_flop(10, (1.0, 2.0), 4, 3.0, decode_flop=5.0) == 10 * ((4 * 3 + 5) + (2 * 4 * 3 + 5))
