"""FLUX.2 klein: encodings, a training step, adapters and images against plain diffusers and the arithmetic of its DreamBooth script."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline, Flux2Transformer2DModel
from torch.utils.flop_counter import FlopCounterMode

from diffusion.checkpoints.exporting import export
from diffusion.checkpoints.initial import load_weights
from diffusion.contracts.errors import CheckpointError, EncoderError
from diffusion.datasets.keyed_random import Draw, normal
from diffusion.encoders.frozen import FrozenEncoders, posterior_sample
from diffusion.evaluation.job.images import Prompt
from diffusion.evaluation.job.models import draw_chunk
from diffusion.families.networks import find_network
from diffusion.families.pipeline import generate, open_model
from diffusion.families.registry import FAMILIES, build_network, training_flops
from diffusion.objectives.flow import times
from diffusion.recipe import load_recipe
from diffusion.recipe.schema import EncoderSource, FlowSettings
from diffusion.training.builder import build_model, build_trainer
from tests.conftest import REPOSITORY, run_here
from tests.families.dreambooth import (
    CLOSE,
    PROMPTS,
    adapter_recipe,
    batch_of,
    compare_adapter_steps,
    compare_compiled,
    compare_images_of_adapter,
    compare_refusal_of_bf16,
    compare_step,
    open_plain,
    published_model,
)

FAMILY, CONFIG = FAMILIES['flux2'], find_network('tiny-flux2').config
FLOW = FlowSettings(uniform_share=1.0)  # the script's default


@pytest.fixture(scope='module')
def base_flux2(bases):
    return bases['tiny-flux2']


@pytest.fixture(scope='module')
def plain(base_flux2):
    return open_plain(base_flux2)


@pytest.fixture
def model(base_flux2):
    return published_model('tiny-flux2', base_flux2, FLOW)


@pytest.fixture
def changes(base_flux2, overrides):
    return [*overrides, 'model.network=tiny-flux2', f'model.encoders.source={base_flux2}', 'model.flow.uniform_share=1', 'model.flow.shift=1']


def encoded(plain, prompts):
    """Text and its positions, by the pipeline."""
    with torch.no_grad():
        return plain.encode_prompt(list(prompts))


def script_sigmas(uniform):
    """Noise levels of the script's weighting scheme `none`: those of its scheduler at whole numbers of a thousand steps."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    return scheduler.sigmas[(uniform * 1000).long()]


def script_latents(plain, drawn):
    """Latents as the script has them, of the VAE's (B, C, h, w)."""
    norm = plain.vae.bn
    std = torch.sqrt(norm.running_var.view(1, -1, 1, 1) + plain.vae.config.batch_norm_eps)
    return (plain._patchify_latents(drawn) - norm.running_mean.view(1, -1, 1, 1)) / std


def script_velocity(plain, transformer, noisy, sigmas, text, text_ids):
    ids = plain._prepare_latent_ids(noisy)
    predicted = transformer(
        hidden_states=plain._pack_latents(noisy),
        timestep=sigmas * 1000 / 1000,
        guidance=None,
        encoder_hidden_states=text,
        txt_ids=text_ids,
        img_ids=ids,
        return_dict=False,
    )[0]
    return torch.as_tensor(plain._unpack_latents_with_ids(predicted, ids))


def script_loss(plain, transformer, images, noise, sigmas, prompts):
    """The script's loss of a batch, its arithmetic written down again."""
    sigma = sigmas.view(-1, 1, 1, 1)
    with torch.no_grad():
        latents = script_latents(plain, plain.vae.encode(images.float() / 127.5 - 1).latent_dist.mode())
    velocity = script_velocity(plain, transformer, (1 - sigma) * latents + sigma * noise, sigmas, *encoded(plain, prompts))
    return (velocity - (noise - latents)).square().flatten(1).mean(dim=1).mean()


def test_text_is_encoded_as_the_pipeline_does(plain, model):
    text = model.encoders.text
    prompts = [*PROMPTS, '', ' '.join(['circle'] * 600)]
    tokens = text.tokenize(prompts)
    ours, (theirs, _) = text.encode(tokens), encoded(plain, prompts)
    torch.testing.assert_close(ours.text, theirs, rtol=0, atol=1e-6)
    assert (ours.mask, ours.pooled, ours.text.shape, text.length, text.width) == (None, None, (4, 512, 48), 512, 48)
    assert text.stored(ours.text, None, tokens).mask is None
    end = '<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n'
    assert text.tokenizers['tokenizer'].decode(tokens['text_encoder'][1]).startswith(f'<|im_start|>user\na cyan square{end}<|endoftext|>')


def test_latents_are_those_of_the_script_and_come_back(plain, model):
    """Moments are of squares, so a draw from them is a draw from those of the VAE."""
    vae, images = model.encoders.vae, batch_of(model, 2, script_sigmas, (16, 4, 6))[1][0]
    assert (vae.latent_channels, vae.downsampling) == (16, 8)
    with torch.no_grad():
        posterior = plain.vae.encode(images.float() / 127.5 - 1).latent_dist
    moments, noise = vae.encode(images), torch.randn(2, 16, 4, 6, generator=torch.Generator().manual_seed(0))
    drawn = posterior.mean + posterior.std * torch.nn.functional.pixel_shuffle(noise, 2)
    torch.testing.assert_close(posterior_sample(moments, noise), plain._patchify_latents(drawn), **CLOSE)
    torch.testing.assert_close(vae.latents(moments, noise), script_latents(plain, drawn), **CLOSE)
    with torch.no_grad():
        expected = plain.vae.decode(drawn).sample
    decoded = vae.decode(vae.latents(moments, noise)).float() / 127.5 - 1
    assert (decoded - expected.clamp(-1, 1)).abs().max() <= 0.5 / 127.5 + 1e-4


def test_stored_latents_need_the_statistics_and_not_the_network(base_flux2):
    vae = FrozenEncoders.find(EncoderSource(str(base_flux2)), FAMILY.find_text).vae
    vae.to('cpu')
    mean, std = vae.statistics
    assert not vae.is_loaded
    assert mean.shape == (16, 1, 1)
    assert mean.std() > 0.1 < std.std()


@pytest.mark.parametrize('count', [1, 3])
def test_a_training_step_is_that_of_the_script(plain, model, count):
    """Loss and all gradients."""
    batch, drawn = batch_of(model, count, script_sigmas, (16, 4, 6))
    compare_step(model, batch, plain.transformer, lambda: script_loss(plain, plain.transformer, *drawn))


def test_times_are_those_of_the_script():
    """Ours are continuous: each lies within the step of the script's scheduler, which has a thousand."""
    words = torch.linspace(2**20, 2**32 - 2**20, 5001).long()
    u = (words.double() + 0.5) / 2**32
    difference = times(words, FLOW) - script_sigmas(1 - u)  # the script counts indices from noise downwards
    assert -1.01e-3 < difference.min() < difference.max() < 1e-5


@pytest.mark.parametrize('guidance', [1.0, 4.0])
def test_plain_diffusers_draws_what_our_sampler_draws(base_flux2, plain, model, guidance):
    """Several prompts at once, in the published pipeline, which moves times by the size of the image; and what an evaluation draws."""
    model.eval()
    noise = normal(5, torch.tensor([[0, 0, 0], [0, 1, 0]]), Draw.NOISE, (16, 4, 4))
    options = {'latents': noise, 'height': 32, 'width': 32, 'num_inference_steps': 7, 'output_type': 'pt', 'guidance_scale': guidance}
    images = plain(prompt=list(PROMPTS), **options).images
    assert images.std() > 0.01
    assert (model.generate(list(PROMPTS), 32, guidance, steps=7, seed=5).float() - images * 255).abs().max() <= 0.5 + 255e-5
    chunk = [Prompt(number, prompt) for number, prompt in enumerate(PROMPTS)]
    evaluated = draw_chunk(open_model(base_flux2)[0], FAMILY, chunk, 5, guidance, 7, 32)
    assert (evaluated.float() - images * 255).abs().max() <= 0.5 + 255e-5


@pytest.mark.parametrize('targets', ['attention', 'attention+ff'])
def test_four_steps_of_an_adapter_are_those_of_the_script(base_flux2, plain, changes, tmp_path, targets):
    def velocity(transformer, noisy, sigmas, conditioning):
        return script_velocity(plain, transformer, noisy, sigmas, conditioning.text, plain._prepare_text_ids(conditioning.text))

    def latents_of(drawn):
        return script_latents(plain, torch.nn.functional.pixel_shuffle(drawn, 2))

    recipe = adapter_recipe('klein', changes, tmp_path, f'adapter.targets={targets}')
    transformer = Flux2Transformer2DModel.from_pretrained(base_flux2, subfolder='transformer')
    compare_adapter_steps(recipe, FAMILY, transformer, latents_of, velocity)


def test_base_and_adapter_draw_what_the_merged_export_draws(base_flux2, changes, tmp_path):
    recipe = adapter_recipe('klein', changes, tmp_path / 'run')
    noise = torch.randn(2, 16, 4, 6, generator=torch.Generator().manual_seed(3))
    compare_images_of_adapter(recipe, FAMILY, base_flux2, tmp_path, {'transformer'}, noise, height=32, width=48, guidance_scale=4.0)


def test_an_adapter_of_a_distilled_sampler_is_refused(base_flux2, changes, tmp_path):
    """Its pipeline does not move the times of such a sampler."""
    for part in base_flux2.iterdir():
        (tmp_path / part.name).symlink_to(part)
    (tmp_path / 'scheduler').unlink()
    FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(tmp_path / 'scheduler')
    with pytest.raises(CheckpointError, match='its sampler is set to use_dynamic_shifting False, and this run trains with use_dynamic_shifting True'):
        build_trainer(adapter_recipe('klein', changes, tmp_path / 'run', f'model.encoders.source={tmp_path}'))


def test_a_whole_run_is_exported_and_draws_squares_of_its_size(changes, tmp_path):
    recipe = load_recipe(REPOSITORY / 'yamls/shapes-flow.yaml', changes)
    trainer = build_trainer(recipe)
    trainer.fit()
    trainer.close()
    assert export(tmp_path / 'run', tmp_path / 'out')['weights'] == 'ema'
    opened = Flux2KleinPipeline.from_pretrained(tmp_path / 'out')
    assert (opened.scheduler.config.use_dynamic_shifting, opened.config.is_distilled) == (True, False)
    network = build_network('tiny-flux2')
    load_weights(network, str(tmp_path / 'out'), recipe.model)
    for name, weight in network.state_dict().items():
        assert torch.equal(weight, opened.transformer.state_dict()[name]), name
    (image,) = generate(tmp_path / 'out', ['a cyan square'], seed=0, guidance=3.0, steps=2)
    assert image.size == (32, 32)  # which its pipeline does not know


def test_it_begins_with_no_prediction_and_learns_everywhere():
    torch.manual_seed(0)
    network = build_network('tiny-flux2')
    inputs = FAMILY.example(CONFIG, 2, (4, 4), 20)
    assert not FAMILY.denoise(network, torch.randn_like(inputs[0]), *inputs[1:]).any()


def test_sizes_of_the_published_network():
    with torch.device('meta'):
        network = build_network('flux2-klein-4b')
    assert sum(parameter.numel() for parameter in network.parameters()) == 3_875_544_576
    matrices = FAMILY.matrices(network)
    assert {(tuple(weight.shape), count) for weight, count in matrices.items() if count > 1} == {((27648, 3072), 9), ((18432, 3072), 2)}
    assert FAMILY.attention(find_network('flux2-klein-4b').config, 64, 512) == [(4608, 4608, 128)]


def test_flop_of_a_step_are_three_forward_passes():
    with torch.device('meta'), FlopCounterMode(display=False) as counter:
        FAMILY.denoise(build_network('tiny-flux2'), *FAMILY.example(CONFIG, 1, (4, 4), 512))
    assert training_flops('tiny-flux2', (4, 4), 512) == pytest.approx(3 * counter.get_total_flops(), rel=0.15)  # none back into text and latents


def test_compiled_it_is_the_same(model, monkeypatch):
    compare_compiled(model, batch_of(model, 2, script_sigmas, (16, 4, 6))[0], FAMILY, monkeypatch)


def test_a_vae_of_another_family_is_refused(changes, bases):
    """Its text encoder would do."""
    recipe = load_recipe(REPOSITORY / 'yamls/shapes-flow.yaml', [*changes, f'model.encoders.source={bases["tiny-z-image"]}'])
    with pytest.raises(EncoderError, match='vae is an AutoencoderKL, and tiny-flux2 takes an AutoencoderKLFlux2'):
        build_model(recipe, torch.device('cpu'))
    said = run_here(
        'diffusion.check', REPOSITORY / 'yamls/shapes-flow.yaml', *changes, f'model.encoders.source={bases["tiny-z-image"]}', code=2
    ).stderr
    assert 'tiny-flux2 reads latent_channels 16' in said


def test_times_are_not_rounded_to_bf16(changes):
    compare_refusal_of_bf16('tiny-flux2', changes)
