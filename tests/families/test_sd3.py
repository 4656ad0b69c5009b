"""Stable Diffusion 3: encodings, a training step, adapters and images against plain diffusers and the arithmetic of its DreamBooth script."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from torch.utils.flop_counter import FlopCounterMode

from diffusion.checkpoints.exporting import export
from diffusion.checkpoints.initial import load_weights
from diffusion.contracts.errors import CheckpointError, EncoderError
from diffusion.datasets.keyed_random import Draw, normal
from diffusion.families.networks import find_network
from diffusion.families.registry import FAMILIES, build_network, family_of, training_flops
from diffusion.objectives.flow import times
from diffusion.recipe import load_recipe
from diffusion.recipe.schema import FlowSettings
from diffusion.training.builder import build_model, build_trainer
from tests.conftest import REPOSITORY, run_here
from tests.families.dreambooth import (
    CLOSE,
    PROMPTS,
    adapter_recipe,
    compare_adapter_steps,
    compare_compiled,
    compare_images_of_adapter,
    compare_refusal_of_bf16,
    compare_step,
    open_plain,
    published_model,
)

FAMILY, CONFIG = FAMILIES['sd3'], find_network('tiny-sd3').config
FLOW = FlowSettings(uniform_share=0.0, shift=3.0)  # the published model's, and the script's defaults


@pytest.fixture(scope='module')
def base_sd3(bases):
    return bases['tiny-sd3']


@pytest.fixture(scope='module')
def plain(base_sd3):
    return open_plain(base_sd3)


@pytest.fixture
def model(base_sd3):
    return published_model('tiny-sd3', base_sd3, FLOW)


@pytest.fixture
def changes(base_sd3, overrides):
    return [*overrides, 'model.network=tiny-sd3', f'model.encoders.source={base_sd3}', 'model.flow.shift=3', 'model.flow.uniform_share=0']


def encoded(plain, prompts):
    """Text and pooled text, by the pipeline."""
    with torch.no_grad():
        text, _, pooled, _ = plain.encode_prompt(prompts, None, None, do_classifier_free_guidance=False)
    return text, pooled


def script_sigmas(normals):
    """Noise levels of the script's `logit_normal` weighting scheme: those of its scheduler at whole numbers of a thousand steps."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    indices = (torch.sigmoid(normals) * 1000).long()
    assert torch.equal(scheduler.timesteps[indices], scheduler.sigmas[indices] * 1000)
    return scheduler.sigmas[indices]


def script_loss(plain, transformer, images, draw, noise, sigmas, prompts, precondition):
    """The script's loss of a batch, its arithmetic written down again."""
    sigma, (text, pooled) = sigmas.view(-1, 1, 1, 1), encoded(plain, prompts)
    with torch.no_grad():
        posterior = plain.vae.encode(images.float() / 127.5 - 1).latent_dist
    latents = (posterior.mean + posterior.std * draw - plain.vae.config.shift_factor) * plain.vae.config.scaling_factor
    noisy = (1 - sigma) * latents + sigma * noise
    velocity = transformer(noisy, encoder_hidden_states=text, pooled_projections=pooled, timestep=sigmas * 1000).sample
    if precondition:
        return (noisy - sigma * velocity - latents).square().flatten(1).mean(dim=1).mean()
    return (velocity - (noise - latents)).square().flatten(1).mean(dim=1).mean()


def batch_of(model, count, first=0):
    """Images with captions and times of the script, and the draws of noise that belong to them."""
    generator = torch.Generator().manual_seed(first)
    key = torch.stack([torch.zeros(count), torch.arange(first, first + count), torch.zeros(count)], dim=1).long()
    images = torch.randint(0, 256, (count, 3, 32, 48), dtype=torch.uint8, generator=generator)
    prompts = [PROMPTS[i % 2] for i in range(count)]
    sigmas = script_sigmas(torch.randn(count, generator=generator))
    batch = {'images': images, 'tokens': model.encoders.text.tokenize(prompts), 'sample_key': key, 'timesteps': sigmas}
    return batch, (images, *(normal(model.seed, key, draw, (4, 8, 12)) for draw in (Draw.POSTERIOR, Draw.NOISE)), sigmas, prompts)


def test_text_is_encoded_as_the_pipeline_does(plain, model):
    text = model.encoders.text
    prompts = [*PROMPTS, '', ' '.join(['circle'] * 300)]
    ours, (theirs, pooled) = text.encode(text.tokenize(prompts)), encoded(plain, prompts)
    torch.testing.assert_close(ours.text, theirs, rtol=0, atol=1e-6)
    torch.testing.assert_close(ours.pooled, pooled, rtol=0, atol=1e-6)
    assert (ours.mask, ours.text.shape, text.length, text.width, text.pooled_width) == (None, (4, 16 + 256, 96), 272, 96, 44)
    assert not ours.text[:, :16, 80:].any()  # of the CLIPs' 80 channels the rest is zeros
    stored = text.stored(ours.text.half(), ours.pooled.half(), text.tokenize(prompts))
    torch.testing.assert_close(stored.text.float(), theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize('count', [1, 3])
def test_a_training_step_is_that_of_the_script(plain, model, count):
    """Loss and all gradients. The script's other loss, of preconditioned outputs, is the same error times the square of the noise level."""
    batch, drawn = batch_of(model, count)
    outputs = compare_step(model, batch, plain.transformer, lambda: script_loss(plain, plain.transformer, *drawn, precondition=False))
    per_sample = (outputs.prediction - outputs.target).square().flatten(1).mean(dim=1)
    torch.testing.assert_close((drawn[3] ** 2 * per_sample).mean(), script_loss(plain, plain.transformer, *drawn, precondition=True), **CLOSE)


def test_times_are_those_of_the_script():
    """Ours are continuous: each lies within the step of the script's scheduler, whose thousand times are shifted in the same way."""
    words = torch.linspace(2**20, 2**32 - 2**20, 5001).long()
    u = (words.double() + 0.5) / 2**32
    theirs = script_sigmas(torch.special.ndtri(1 - u))  # the script counts indices from noise downwards
    difference = times(words, FLOW) - theirs
    assert difference.min() > -3.01e-3  # steps of 1/1000, shifted by at most 3 times that
    assert difference.max() < 1e-5
    assert theirs.min() < 0.1 < 0.99 < theirs.max()


@pytest.mark.parametrize('guidance', [1.0, 4.0])
def test_plain_diffusers_draws_what_our_sampler_draws(plain, model, guidance):
    """Several prompts at once, in the published pipeline with its own sampler."""
    model.eval()
    noise = normal(5, torch.tensor([[0, 0, 0], [0, 1, 0]]), Draw.NOISE, (4, 8, 8))
    images = plain(list(PROMPTS), latents=noise, output_type='pt', num_inference_steps=7, guidance_scale=guidance).images
    assert images.std() > 0.01
    assert (model.generate(list(PROMPTS), 32, guidance, steps=7, seed=5).float() - images * 255).abs().max() <= 0.5 + 255e-5


@pytest.mark.parametrize('targets', ['attention', 'attention+ff'])
def test_four_steps_of_an_adapter_are_those_of_the_script(base_sd3, plain, changes, tmp_path, targets):
    def velocity(transformer, noisy, sigmas, conditioning):
        text, pooled = conditioning.text, conditioning.pooled
        return transformer(noisy, encoder_hidden_states=text, pooled_projections=pooled, timestep=sigmas * 1000).sample

    recipe = adapter_recipe('sd35', changes, tmp_path, f'adapter.targets={targets}')
    transformer = SD3Transformer2DModel.from_pretrained(base_sd3, subfolder='transformer')
    vae = plain.vae.config
    compare_adapter_steps(recipe, FAMILY, transformer, lambda drawn: (drawn - vae.shift_factor) * vae.scaling_factor, velocity)


@pytest.mark.parametrize('text', [False, True])
def test_base_and_adapter_draw_what_the_merged_export_draws(base_sd3, changes, tmp_path, text):
    of_text = ['adapter.text_encoders=true', 'adapter.text_lr=1e-2'] if text else []
    recipe = adapter_recipe('sd35', changes, tmp_path / 'run', *of_text)
    parts = {'transformer', *(['text_encoder', 'text_encoder_2'] if text else [])}  # diffusers loads none of T5
    noise = torch.randn(2, 4, 8, 12, generator=torch.Generator().manual_seed(3))
    compare_images_of_adapter(recipe, FAMILY, base_sd3, tmp_path, parts, noise, height=32, width=48, guidance_scale=4.0)


def test_an_adapter_of_another_shift_is_refused(changes, tmp_path):
    with pytest.raises(CheckpointError, match='its sampler is set to shift 3.0, and this run trains with shift 1.0'):
        build_trainer(adapter_recipe('sd35', changes, tmp_path, 'model.flow.shift=1'))


def test_a_whole_run_is_exported_and_begins_again_from_that(changes, tmp_path):
    """Its positions are a buffer, which is saved, and averaged by nobody."""
    recipe = load_recipe(REPOSITORY / 'yamls/shapes-flow.yaml', changes)
    trainer = build_trainer(recipe)
    trainer.fit()
    trainer.close()
    assert export(tmp_path / 'run', tmp_path / 'out')['weights'] == 'ema'
    opened = StableDiffusion3Pipeline.from_pretrained(tmp_path / 'out')
    assert (opened.default_sample_size * opened.vae_scale_factor, opened.scheduler.config.shift) == (32, 3.0)
    network = build_network('tiny-sd3')
    load_weights(network, str(tmp_path / 'out'), recipe.model)
    assert torch.equal(network.pos_embed.pos_embed, trainer.state.model.network.pos_embed.pos_embed)
    for name, weight in network.state_dict().items():
        assert torch.equal(weight, opened.transformer.state_dict()[name]), name
    with pytest.raises(CheckpointError, match='holds another network than model.network'):
        load_weights(build_network('tiny-prx'), str(tmp_path / 'run'), recipe.model)


def test_it_begins_with_no_prediction_and_learns_everywhere():
    torch.manual_seed(0)
    network = build_network('tiny-sd3')
    inputs = FAMILY.example(CONFIG, 2, (8, 8), 20)
    assert not FAMILY.denoise(network, torch.randn_like(inputs[0]), *inputs[1:]).any()


def test_sizes_of_the_published_network():
    with torch.device('meta'):
        network = build_network('sd35-medium')
    assert sum(parameter.numel() for parameter in network.parameters()) == 2_243_171_520
    matrices = family_of('sd35-medium').matrices(network)
    assert {count for weight, count in matrices.items() if weight.shape[0] // weight.shape[1] == count > 1} == {2, 6, 9}
    assert FAMILY.attention(find_network('sd35-medium').config, 128, 333) == [(4429, 4429, 64), (4096, 4096, 64)]


def test_flop_of_a_step_are_three_forward_passes():
    with torch.device('meta'), FlopCounterMode(display=False) as counter:
        FAMILY.denoise(build_network('tiny-sd3'), *FAMILY.example(CONFIG, 1, (8, 8), 272))
    assert training_flops('tiny-sd3', (8, 8), 272) == pytest.approx(3 * counter.get_total_flops(), rel=0.15)  # none back into text and latents


@pytest.mark.parametrize('checkpointed', [False, True])
@pytest.mark.parametrize('mode', ['network', 'blocks'])
def test_compiled_it_is_the_same(model, mode, checkpointed, monkeypatch):
    compare_compiled(model, batch_of(model, 2)[0], FAMILY, monkeypatch, mode, checkpointed)


def test_encoders_of_another_family_are_refused(changes, encoders_xl_folder):
    recipe = load_recipe(REPOSITORY / 'yamls/shapes-flow.yaml', [*changes, f'model.encoders.source={encoders_xl_folder}'])
    with pytest.raises(EncoderError, match='text_encoder_3'):
        build_model(recipe, torch.device('cpu'))
    said = run_here('diffusion.check', REPOSITORY / 'yamls/shapes-flow.yaml', *changes, f'model.encoders.source={encoders_xl_folder}', code=2).stderr
    assert 'has 2 text encoders, and Stable Diffusion 3 reads two CLIPs and a T5' in said


def test_times_are_not_rounded_to_bf16(changes):
    compare_refusal_of_bf16('tiny-sd3', changes)
