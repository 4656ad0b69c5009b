"""Z-Image: encodings, a training step, adapters and images against plain diffusers and the arithmetic of its DreamBooth script."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from torch.utils.flop_counter import FlopCounterMode

from diffusion.checkpoints.exporting import export
from diffusion.checkpoints.initial import load_weights
from diffusion.contracts.errors import CheckpointError, EncoderError
from diffusion.datasets.keyed_random import Draw, normal
from diffusion.encoders.frozen import FrozenEncoders
from diffusion.evaluation.job.images import Prompt
from diffusion.evaluation.job.models import draw_chunk
from diffusion.families.networks import find_network
from diffusion.families.pipeline import generate, open_model
from diffusion.families.registry import FAMILIES, build_network, training_flops
from diffusion.objectives.flow import times
from diffusion.recipe import load_recipe
from diffusion.recipe.schema import EncoderSource, FlowSettings, Model
from diffusion.training.builder import build_trainer
from tests.conftest import REPOSITORY
from tests.families.dreambooth import (
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

FAMILY, CONFIG = FAMILIES['z-image'], find_network('tiny-z-image').config
FLOW = FlowSettings(uniform_share=1.0, shift=6.0)  # the published model's, and the script's defaults
LENGTHS = [30, 22]  # tokens of the two prompts with their chat


@pytest.fixture(scope='module')
def base_z_image(bases):
    return bases['tiny-z-image']


@pytest.fixture(scope='module')
def plain(base_z_image):
    return open_plain(base_z_image)


@pytest.fixture
def model(base_z_image):
    return published_model('tiny-z-image', base_z_image, FLOW)


@pytest.fixture
def changes(base_z_image, overrides):
    flow = ['model.flow.shift=6', 'model.flow.uniform_share=1']
    return [*overrides, 'model.network=tiny-z-image', f'model.encoders.source={base_z_image}', *flow]


def encoded(plain, prompts):
    """Texts of their own lengths, by the pipeline, which changes the list of prompts."""
    with torch.no_grad():
        return plain.encode_prompt(list(prompts), do_classifier_free_guidance=False)[0]


def script_sigmas(uniform):
    """Noise levels of the script's weighting scheme `none`: those of its scheduler at whole numbers of a thousand steps."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=6.0)
    return scheduler.sigmas[(uniform * 1000).long()]


def script_velocity(transformer, noisy, sigmas, texts):
    return -torch.stack(transformer(list(noisy.unsqueeze(2).unbind(0)), (1000 - sigmas * 1000) / 1000, texts, return_dict=False)[0]).squeeze(2)


def script_loss(plain, transformer, images, noise, sigmas, prompts):
    """The script's loss of a batch, its arithmetic written down again."""
    sigma, config = sigmas.view(-1, 1, 1, 1), plain.vae.config
    with torch.no_grad():
        mode = plain.vae.encode(images.float() / 127.5 - 1).latent_dist.mode()
    latents = (mode - config.shift_factor) * config.scaling_factor
    velocity = script_velocity(transformer, (1 - sigma) * latents + sigma * noise, sigmas, encoded(plain, prompts))
    return (velocity - (noise - latents)).square().flatten(1).mean(dim=1).mean()


def test_text_is_encoded_as_the_pipeline_does(plain, model):
    text = model.encoders.text
    prompts = [*PROMPTS, '', ' '.join(['circle'] * 600)]
    tokens = text.tokenize(prompts)
    ours, theirs = text.encode(tokens), encoded(plain, prompts)
    assert [len(one) for one in theirs] == [*LENGTHS, 19, 512] == ours.mask.sum(dim=1).tolist()
    for row, mask, expected in zip(ours.text, ours.mask, theirs, strict=True):
        torch.testing.assert_close(row[mask], expected, rtol=0, atol=1e-6)
    assert (ours.pooled, ours.text.shape, text.length, text.width, text.pooled_width) == (None, (4, 512, 48), 512, 48, None)
    stored = text.stored(ours.text.half(), None, tokens)
    torch.testing.assert_close(stored.text[0][stored.mask[0]].float(), theirs[0], rtol=1e-3, atol=1e-3)
    assert text.tokenizers['tokenizer'].decode(tokens['text_encoder'][1][:22]) == '<|im_start|>user\na cyan square<|im_end|>\n<|im_start|>assistant\n'


@pytest.mark.parametrize('count', [1, 3])
def test_a_training_step_is_that_of_the_script(plain, model, count):
    """Loss and all gradients, of captions of several lengths in one batch."""
    batch, drawn = batch_of(model, count, script_sigmas, (4, 8, 12))
    compare_step(model, batch, plain.transformer, lambda: script_loss(plain, plain.transformer, *drawn))


def test_what_lies_at_padding_changes_nothing(model):
    batch = batch_of(model, 2, script_sigmas, (4, 8, 12))[0]
    conditioning = model.conditioning(batch)
    noisy, t = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0.2, 0.7])
    expected = model.denoise(noisy, t, conditioning)
    other = conditioning.text.masked_fill(~conditioning.mask[..., None], 7.0)
    assert torch.equal(model.denoise(noisy, t, conditioning._replace(text=other)), expected)
    changed = conditioning.text.clone()
    changed[1, LENGTHS[1] - 1] += 1
    assert not torch.equal(model.denoise(noisy, t, conditioning._replace(text=changed))[1], expected[1])


def test_times_are_those_of_the_script():
    """Ours are continuous: each lies within the step of the script's scheduler, whose thousand times are shifted in the same way."""
    words = torch.linspace(2**20, 2**32 - 2**20, 5001).long()
    u = (words.double() + 0.5) / 2**32
    difference = times(words, FLOW) - script_sigmas(1 - u)  # the script counts indices from noise downwards
    assert -6.01e-3 < difference.min() < difference.max() < 1e-5  # steps of 1/1000, shifted by at most 6 times that


@pytest.mark.parametrize('guidance', [1.0, 5.0])
def test_plain_diffusers_draws_what_our_sampler_draws(base_z_image, plain, model, guidance):
    """Several prompts at once, in the published pipeline with its own sampler and its own counting of guidance; and what an evaluation draws."""
    model.eval()
    noise = normal(5, torch.tensor([[0, 0, 0], [0, 1, 0]]), Draw.NOISE, (4, 8, 8))
    options = {'latents': noise, 'height': 32, 'width': 32, 'num_inference_steps': 7, 'output_type': 'pt'}
    images = plain(list(PROMPTS), guidance_scale=guidance - 1, **options).images
    assert images.std() > 0.01
    assert (model.generate(list(PROMPTS), 32, guidance, steps=7, seed=5).float() - images * 255).abs().max() <= 0.5 + 255e-5
    chunk = [Prompt(number, prompt) for number, prompt in enumerate(PROMPTS)]
    evaluated = draw_chunk(open_model(base_z_image)[0], FAMILY, chunk, 5, guidance, 7, 32)
    assert (evaluated.float() - images * 255).abs().max() <= 0.5 + 255e-5


@pytest.mark.parametrize('targets', ['attention', 'attention+ff'])
def test_four_steps_of_an_adapter_are_those_of_the_script(base_z_image, plain, changes, tmp_path, targets):
    def velocity(transformer, noisy, sigmas, conditioning):
        return script_velocity(transformer, noisy, sigmas, [row[own] for row, own in zip(conditioning.text, conditioning.mask, strict=True)])

    recipe = adapter_recipe('z-image', changes, tmp_path, f'adapter.targets={targets}')
    transformer, vae = ZImageTransformer2DModel.from_pretrained(base_z_image, subfolder='transformer'), plain.vae.config
    compare_adapter_steps(recipe, FAMILY, transformer, lambda drawn: (drawn - vae.shift_factor) * vae.scaling_factor, velocity)


def test_base_and_adapter_draw_what_the_merged_export_draws(base_z_image, changes, tmp_path):
    recipe = adapter_recipe('z-image', changes, tmp_path / 'run')
    noise = torch.randn(2, 4, 8, 12, generator=torch.Generator().manual_seed(3))
    compare_images_of_adapter(recipe, FAMILY, base_z_image, tmp_path, {'transformer'}, noise, height=32, width=48, guidance_scale=4.0)


def test_an_adapter_of_another_shift_is_refused(changes, tmp_path):
    with pytest.raises(CheckpointError, match='its sampler is set to shift 6.0, and this run trains with shift 3.0'):
        build_trainer(adapter_recipe('z-image', changes, tmp_path, 'model.flow.shift=3'))


def test_a_network_in_several_files_is_loaded_whole(base_z_image, model, tmp_path):
    """The published one lies so."""
    ZImageTransformer2DModel.from_pretrained(base_z_image, subfolder='transformer').save_pretrained(tmp_path / 'transformer', max_shard_size='40KB')
    files = sorted((tmp_path / 'transformer').glob('*.safetensors'))
    assert len(files) > 1
    network = build_network('tiny-z-image')
    load_weights(network, str(tmp_path), Model('tiny-z-image', flow=FLOW))
    for name, weight in network.state_dict().items():
        assert torch.equal(weight, model.network.state_dict()[name]), name
    files[1].unlink()
    with pytest.raises(CheckpointError, match=f'{files[1].name} is damaged'):
        load_weights(network, str(tmp_path), Model('tiny-z-image', flow=FLOW))


def test_a_whole_run_is_exported_and_draws_squares_of_its_size(changes, tmp_path):
    recipe = load_recipe(REPOSITORY / 'yamls/shapes-flow.yaml', changes)
    trainer = build_trainer(recipe)
    trainer.fit()
    trainer.close()
    assert export(tmp_path / 'run', tmp_path / 'out')['weights'] == 'ema'
    opened = ZImagePipeline.from_pretrained(tmp_path / 'out')
    assert opened.scheduler.config.shift == 6.0
    network = build_network('tiny-z-image')
    load_weights(network, str(tmp_path / 'out'), recipe.model)
    for name, weight in network.state_dict().items():
        assert torch.equal(weight, opened.transformer.state_dict()[name]), name
    (image,) = generate(tmp_path / 'out', ['a cyan square'], seed=0, guidance=3.0, steps=2)
    assert image.size == (32, 32)  # which its pipeline does not know
    assert 'guidance_scale=' in (tmp_path / 'out/README.md').read_text()


def test_it_begins_with_no_prediction_and_learns_everywhere():
    torch.manual_seed(0)
    network = build_network('tiny-z-image')
    inputs = FAMILY.example(CONFIG, 2, (8, 8), 20)
    assert not FAMILY.denoise(network, torch.randn_like(inputs[0]), *inputs[1:]).any()


def test_sizes_of_the_published_network():
    with torch.device('meta'):
        network = build_network('z-image')
    assert sum(parameter.numel() for parameter in network.parameters()) == 6_154_908_736
    matrices = FAMILY.matrices(network)
    assert {count for weight, count in matrices.items() if weight.shape == (4 * 3840, 256)} == {4}
    assert FAMILY.attention(find_network('z-image').config, 128, 100) == [(4096, 4096, 128), (128, 128, 128), (4224, 4224, 128)]


def test_flop_of_a_step_are_three_forward_passes():
    with torch.device('meta'), FlopCounterMode(display=False) as counter:
        FAMILY.denoise(build_network('tiny-z-image'), *FAMILY.example(CONFIG, 1, (8, 8), 512))
    assert training_flops('tiny-z-image', (8, 8), 512) == pytest.approx(3 * counter.get_total_flops(), rel=0.15)  # none back into text and latents


def test_compiled_it_is_the_same(model, monkeypatch):
    compare_compiled(model, batch_of(model, 2, script_sigmas, (4, 8, 12))[0], FAMILY, monkeypatch)


def test_a_tokenizer_without_a_chat_template_is_refused(base_z_image, changes, tmp_path):
    for part in base_z_image.iterdir():
        (tmp_path / part.name).symlink_to(part)
    (tmp_path / 'tokenizer').unlink()
    (tmp_path / 'tokenizer').mkdir()
    for file in (base_z_image / 'tokenizer').iterdir():
        if file.name != 'chat_template.jinja':
            (tmp_path / 'tokenizer' / file.name).symlink_to(file)
    with pytest.raises(EncoderError, match='has no chat template'):
        FrozenEncoders.find(EncoderSource(str(tmp_path)), FAMILY.find_text)


def test_times_are_not_rounded_to_bf16(changes):
    compare_refusal_of_bf16('tiny-z-image', changes)
