"""Recipes of autoencoders: their rules, what a resume may change, check and plan."""

import json
from dataclasses import fields

import pytest

from diffusion.autoencoding.losses import training_flops
from diffusion.autoencoding.networks import build_autoencoder
from diffusion.autoencoding.planning import counts
from diffusion.recipe import AutoencoderRecipe, Recipe, RecipeError, load_any_recipe, refuse_changes, to_dict, to_yaml
from diffusion.recipe.autoencoder import Adversarial, AutoencoderSettings, Perceptual
from tests.conftest import REPOSITORY, run_here

F8C4 = REPOSITORY / 'yamls/vae-f8c4.yaml'
SYNTHETIC = ['data.kind=synthetic', 'autoencoder.perceptual.network=lpips@random-conv']


def errors_of(*overrides):
    with pytest.raises(RecipeError) as caught:
        load_any_recipe(F8C4, [*SYNTHETIC, *overrides])
    return caught.value.errors


@pytest.mark.parametrize(
    ('overrides', 'expected'),
    [
        (['autoencoder.network=f8c5'], "autoencoder.network: no configuration 'f8c5'; known: f8c16, f8c4, shapes, tiny"),
        (['data.resolution=260'], 'data.resolution: 260 is not a multiple of 8, the pixels of a latent along a side; nearest: 256 or 264'),
        (['autoencoder.l1=0'], 'autoencoder.l1: with l2 at 0 too'),
        (['autoencoder.perceptual.weight=0'], 'autoencoder.perceptual.weight: 0 has no effect'),
        (['data.resolution=8'], 'autoencoder.perceptual: needs images of 16 px'),
        (['data.resolution=24', 'autoencoder.adversarial.layers=3'], 'autoencoder.adversarial.layers: 3 need images of 32 px, data.resolution is 24'),
        (['optimizer.muon.momentum=0.9'], 'optimizer.muon: is for'),
        (['train.sharding=zero2'], 'train.sharding: zero2 divides weights'),
        (['train.precision=bf16'], 'train.precision: bf16'),
        (['train.compile=network'], 'train.compile: network is for networks that denoise'),
        (['train.attention=flash'], 'train.attention: flash may not take'),
        (['data.streams.train.loss_weight=2'], 'data.streams.train.loss_weight: 2.0 has no effect on an autoencoder'),
        (['data.streams.train.photos.folder=/x'], 'data.streams.train: photos and drawn images become latents'),
        (['log.samples.every=10ba'], 'log.samples.every: grids show images of eval.streams'),
        (['ema.half_life=null', 'ema.offload=true'], 'ema.offload: has no effect'),
        (['data.kind=images'], 'data.streams.train: has no data'),
        (['checkpoint.keep=0'], 'checkpoint.keep: 0 would leave nothing'),
        (['optimizer.warmup=200000ba'], 'optimizer.warmup: 200000ba is not before the end of the run'),
        (['cost.gpu=abacus', 'cost.price_per_gpu_hour=null'], None),
        (['model.network=tiny'], 'model: unknown key'),
        (['data.caption_dropout=0.1'], 'data.caption_dropout: unknown key'),
    ],
)
def test_contradictions_are_named_with_their_remedy(overrides, expected):
    if expected is None:
        load_any_recipe(F8C4, [*SYNTHETIC, *overrides])  # a rule of cost, which check and train ask
    else:
        assert any(error.startswith(expected) for error in errors_of(*overrides))


def test_all_mistakes_come_at_once():
    assert len(errors_of('train.sharding=zero2', 'autoencoder.l1=0', 'checkpoint.keep=0')) == 3


@pytest.mark.parametrize(('kind', 'first'), [(Recipe, 'model'), (AutoencoderRecipe, 'autoencoder')])
def test_fields_lie_where_a_reader_looks_for_them(kind, first):
    names = [field.name for field in fields(kind)]
    assert names[: names.index(first)] == ['name', 'seed', 'run_folder', 'load_path']
    assert names[-9:] == ['batch', 'optimizer', 'ema', 'train', 'eval', 'checkpoint', 'faults', 'log', 'cost']
    assert 'data' in names[:-9]


def test_a_resolved_recipe_is_read_again(tmp_path):
    recipe = load_any_recipe(F8C4, SYNTHETIC)
    (tmp_path / 'recipe.yaml').write_text(to_yaml(recipe))
    assert load_any_recipe(tmp_path / 'recipe.yaml') == recipe
    json.dumps(to_dict(recipe))


@pytest.mark.parametrize(
    ('override', 'refused'),
    [
        ('autoencoder.kl=1e-5', 'autoencoder.kl: 1e-06 -> 1e-05'),
        ('autoencoder.adversarial.start=0.4', 'autoencoder.adversarial.start: 0.3 -> 0.4'),
        ('data.crop=center', 'data.crop: random -> center'),
        ('autoencoder.perceptual.weights=/elsewhere', None),
        ('log.every=7', None),
        ('data.workers=3', None),
    ],
)
def test_what_shapes_the_result_must_stay(override, refused):
    before, now = (load_any_recipe(F8C4, [*SYNTHETIC, *more]) for more in ([], [override]))
    if refused is None:
        refuse_changes(now, to_yaml(before))
        return
    with pytest.raises(RecipeError) as caught:
        refuse_changes(now, to_yaml(before))
    assert caught.value.errors == [refused]


@pytest.mark.parametrize(('adversarial', 'allowed'), [('null', True), ('{weight: 0.1}', False)])
def test_a_run_may_be_made_longer_unless_its_discriminator_began_at_a_share_of_it(adversarial, allowed):
    more = [*SYNTHETIC, 'optimizer.decay=constant', f'autoencoder.adversarial={adversarial}']
    before, now = (load_any_recipe(F8C4, [*more, f'train.duration={length}ba']) for length in (100000, 200000))
    if allowed:
        refuse_changes(now, to_yaml(before))
    else:
        with pytest.raises(RecipeError, match='train.duration: 100000ba -> 200000ba'):
            refuse_changes(now, to_yaml(before))


def test_flop_are_three_passes_of_the_autoencoder_and_its_losses():
    """Stable Diffusion's: encode 0.273 and decode 0.622 TFLOP at 256 px (diffusers' networks, counted apart from this code)."""
    plain = AutoencoderSettings('f8c4')
    assert training_flops(plain, 256) == pytest.approx(3 * (0.273e12 + 0.622e12), rel=2e-3)
    # LPIPS: originals forward, reconstructions forward and back to their pixels, of VGG16's 15.3 GMAC at 224 px without its classifier.
    perceptual = training_flops(AutoencoderSettings('f8c4', perceptual=Perceptual()), 224) - training_flops(plain, 224)
    assert perceptual == pytest.approx(3 * 2 * 15.35e9, rel=0.03)
    # A discriminator's forward pass goes over originals and reconstructions, back to both and to its weights, and once to the pixels.
    convolutions = [(3, 64, 128), (64, 128, 64), (128, 256, 32), (256, 512, 31), (512, 1, 30)]
    forward = sum(2 * 16 * a * b * side**2 for a, b, side in convolutions)
    adversarial = training_flops(AutoencoderSettings('f8c4', adversarial=Adversarial()), 256) - training_flops(plain, 256)
    assert adversarial == pytest.approx(7 * forward, rel=0.03)


def test_parameters_are_stable_diffusions_and_without_1x1_convolutions_those_of_its_successors():
    of = {name: sum(weight.numel() for weight in build_autoencoder(name).parameters()) for name in ('f8c4', 'f8c16', 'shapes')}
    assert of == {'f8c4': 83_653_863, 'f8c16': 83_819_683, 'shapes': 655_547}
    found = counts(load_any_recipe(F8C4, SYNTHETIC), activations=False)
    assert (found.num_parameters, found.trained_parameters) == (83_653_863, 83_653_863 + 2_765_633)


def test_check_prints_the_resolved_recipe_and_what_is_trained():
    page = run_here('diffusion.check', F8C4, *SYNTHETIC, '--gpus', '8').stdout
    assert 'autoencoder:\n  network: f8c4' in page
    assert '# 8 GPUs x 32 in the largest passes that fit = 256 samples a batch' in page
    assert '# 83,653,863 parameters of the autoencoder, 2,7' in page
    wrong = run_here('diffusion.check', F8C4, 'data.kind=synthetic', 'autoencoder.perceptual.weights=/nowhere', code=2).stderr
    assert 'autoencoder.perceptual.weights: ' in wrong


def test_plan_says_what_it_takes(tmp_path):
    small = [*SYNTHETIC, 'autoencoder.network=tiny', 'data.resolution=64', 'batch.micro_size=32', 'data.kind=images']
    page = run_here('diffusion.plan', F8C4, *small, '--gpus', '8', '--gpu', 'h200', '--price', '3', '--json', tmp_path / 'plan.json').stdout
    assert 'network     tiny' in page
    assert 'and 2,765,633 of its discriminator' in page
    assert 'encoders    none' in page
    plan = json.loads((tmp_path / 'plan.json').read_text())
    rows = {row['what']: row for row in plan['rows']}
    assert '; fits into 94%' in rows['memory']['formula']
    assert rows['activations']['quantity'] > 0
    assert not {'in step', 'online', 'offline'} & {row['group'] for row in plan['rows']}
    assert rows['network']['formula'].startswith('tiny')
