"""What is kept is what is counted, and both are what others counted."""

import pytest

from diffusion.planning import counts
from diffusion.planning.counts import Counter
from diffusion.recipe.schema import Recipe


def recipe_of(unet, resolution, precision='amp_bf16', checkpointed=False):
    recipe = Recipe()
    recipe.model.unet, recipe.data.resolution = unet, resolution
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
    'of', [('sd2-base', 256, 'amp_bf16', False), ('sd2-base', 512, 'bf16', True), ('shapes', 32, 'fp32', False), ('tiny', 32, 'bf16', True)]
)
def test_what_is_kept_is_what_is_counted(of):
    kept = Counter.from_file()
    assert kept.counts(recipe_of(*of)) == Counter({}).counts(recipe_of(*of))


def test_shipped_recipes_need_no_counting(monkeypatch):
    for name in ('_parameters', '_flop', '_activations', '_text', '_vae_flop', '_vae_peak'):
        monkeypatch.setattr(counts, name, None)
    counter = Counter.from_file()
    for unet, resolution in counts.SHIPPED:
        for checkpointed in (False, True):
            counter.counts(recipe_of(unet, resolution, checkpointed=checkpointed))


def test_another_configuration_of_the_same_name_is_counted_anew(tmp_path, monkeypatch):
    text = (counts.UNET_FOLDER / 'tiny.json').read_text()
    (tmp_path / 'tiny.json').write_text(text.replace('[16, 32]', '[16, 64]'))
    monkeypatch.setattr(counts, 'UNET_FOLDER', tmp_path)
    monkeypatch.setattr('diffusion.models.unet.UNET_FOLDER', tmp_path)
    before = Counter.from_file().kept
    counter = Counter.from_file()
    counted = counter.counts(recipe_of('tiny', 32))
    assert counted.num_parameters > 203_204
    assert len(counter.kept) > len(before)


def test_encoders_of_an_unknown_width_are_not_made_up(tmp_path, monkeypatch):
    (tmp_path / 'other.json').write_text((counts.UNET_FOLDER / 'tiny.json').read_text())
    monkeypatch.setattr(counts, 'UNET_FOLDER', tmp_path)
    monkeypatch.setattr('diffusion.models.unet.UNET_FOLDER', tmp_path)
    assert Counter({}).counts(recipe_of('other', 32)).encoders is None
