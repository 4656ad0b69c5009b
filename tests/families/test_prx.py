"""The flow transformer, against plain diffusers and counts made by hand."""

import logging
import math
import shutil
import warnings

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, PRXPipeline
from torch.utils.flop_counter import FlopCounterMode
from transformers import T5EncoderModel

from data_prep.shapes import vocabulary
from diffusion.checkpoints.exporting import export
from diffusion.checkpoints.initial import load_weights
from diffusion.contracts.errors import CheckpointError
from diffusion.cost.facts import load_for_planning
from diffusion.datasets.keyed_random import Draw, normal
from diffusion.encoders.frozen import FrozenEncoders
from diffusion.encoders.frozen_part import weights_sha256
from diffusion.encoders.random_encoders import write_stand_in
from diffusion.encoders.sizes import KINDS
from diffusion.encoders.text import ClipPenultimate, MaskedClip
from diffusion.evaluation.job.models import DrawingModel
from diffusion.evaluation.job.planning import count
from diffusion.families.counting.counts import Counter
from diffusion.families.networks import find_network
from diffusion.families.pipeline import open_model
from diffusion.families.prx import Prx
from diffusion.families.registry import build_network, training_flops
from diffusion.objectives.flow import Flow, sampling_times
from diffusion.recipe import RecipeError, load_recipe
from diffusion.recipe.schema import EncoderSource, FlowSettings, Model
from diffusion.stand_in import write_pipeline
from diffusion.training.builder import build_model, build_trainer
from diffusion.training.machine import compile_network
from diffusion.training.micro_batch import blank_batch
from diffusion.training.model import TextToImage
from tests.conftest import REPOSITORY, run_here
from tests.families.dreambooth import compare_images_of_adapter

CONFIG = find_network('tiny-prx').config
PROMPTS = ['a small red circle at the left on a blue background', 'a cyan square']


@pytest.fixture
def masked(encoders_folder):
    return FrozenEncoders.load(EncoderSource(str(encoders_folder)), MaskedClip.find)


def random_network(seed=0):
    """All parameters random: its own start has gates of zero, behind which nothing of the blocks would be seen."""
    torch.manual_seed(seed)
    network = build_network('tiny-prx')
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return network.eval()


def inputs(batch=3):
    generator = torch.Generator().manual_seed(1)
    mask = torch.arange(16)[None] < torch.tensor([16, 5, 2])[:batch, None]
    return (
        torch.randn(batch, 4, 8, 8, generator=generator),
        torch.rand(batch, generator=generator),
        torch.randn(batch, 16, 32, generator=generator),
        mask,
    )


def test_padding_changes_nothing():
    network, (noisy, t, text, mask) = random_network(), inputs()
    other = torch.where(mask[..., None], text, 7.0)
    before, after = (network(noisy, t, each, attention_mask=mask, return_dict=False)[0] for each in (text, other))
    assert torch.equal(before, after)
    assert not torch.allclose(before, network(noisy, t, other, return_dict=False)[0])  # or the test tests nothing


def test_it_begins_with_no_prediction():
    """The last layer and all gates are zero: the first step sees the target itself."""
    noisy, t, text, mask = inputs()
    assert not build_network('tiny-prx')(noisy, t, text, attention_mask=mask, return_dict=False)[0].any()


@pytest.mark.parametrize('shift', [1.0, 3.0])
@pytest.mark.parametrize('guidance', [1.0, 3.0])
def test_plain_diffusers_draws_what_our_sampler_draws(masked, encoders_folder, tmp_path, shift, guidance):
    model = TextToImage(random_network(), masked, Model('tiny-prx', flow=FlowSettings(shift=shift)), seed=0).eval()
    ours = model.generate(PROMPTS, 32, guidance, steps=7, seed=5)
    Prx().pipeline(random_network(), masked, model.objective.scheduler(), 32).save_pretrained(tmp_path)
    pipeline = PRXPipeline.from_pretrained(tmp_path)
    pipeline.set_progress_bar_config(disable=True)
    for i, prompt in enumerate(PROMPTS):
        noise = normal(5, torch.tensor([[0, i, 0]]), Draw.NOISE, (4, 8, 8))
        options = {'num_inference_steps': 7, 'guidance_scale': guidance, **Prx.pipeline_options}
        latents = pipeline(prompt, latents=noise, output_type='latent', **options).images
        image = pipeline(prompt, latents=noise, output_type='pt', **options).images[0]
        assert image.std() > 0.01
        assert (ours[i].float() - image * 255).abs().max() <= 0.5 + 255e-5  # ours are whole numbers
        given, empty = (masked.text.encode(masked.text.tokenize([caption])) for caption in (prompt, ''))

        def denoise(noisy, t, given=given, empty=empty):
            conditional, unconditional = model.denoise(noisy, t, given), model.denoise(noisy, t, empty)
            return unconditional + guidance * (conditional - unconditional)

        torch.testing.assert_close(model.objective.sample(denoise, noise, 7), latents, rtol=1e-5, atol=1e-5)


def test_diffusers_is_silent_of_what_a_user_cannot_change(masked, tmp_path):
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger('diffusers.pipelines.pipeline_utils')
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as warned:  # with the filters that there are
            Prx().pipeline(random_network(), masked, Flow(FlowSettings()).scheduler(), 32).save_pretrained(tmp_path)
            open_model(tmp_path)
    finally:
        logger.removeHandler(handler)
    assert said == [str(warning.message) for warning in warned] == []


def test_flop_of_a_step_by_hand():
    """Matrix products alone, forward; backward costs twice that, but nothing flows back into text, latents and times."""
    width, tokens, text = CONFIG['hidden_size'], 16, 16
    hidden = int(width * CONFIG['mlp_ratio'])
    projections = tokens * (3 * width * width + width * width + 3 * width * hidden) + text * 2 * width * width
    attention = 2 * tokens * (tokens + text) * width
    block = 2 * (projections + attention + 6 * width * width)  # 6: the modulation, once a sample
    assert training_flops('tiny-prx', (8, 8), text) == pytest.approx(3 * CONFIG['depth'] * block, rel=0.25)  # the rest are embeddings and the ends


def matrices(config, side, text):
    """Multiplications of each matrix of the network: those whose input has a gradient, those whose input has none, and of attention's products."""
    width, tokens = config['hidden_size'], (side // config['patch_size']) ** 2
    hidden, patch = int(width * config['mlp_ratio']), config['in_channels'] * config['patch_size'] ** 2
    block = tokens * (4 * width**2 + 3 * width * hidden) + text * 2 * width**2 + 6 * width**2
    inner = config['depth'] * block + width**2 + 2 * width**2 + tokens * width * patch
    first = tokens * patch * width + text * config['context_in_dim'] * width + 256 * width
    return inner, first, config['depth'] * 2 * tokens * (tokens + text) * width


def test_parameters_of_the_budget_network_by_hand():
    """Matrices as they are listed above, at one token each, and what is no matrix: biases and the scales of normalised heads."""
    config = find_network('prx-600m').config
    width, depth = config['hidden_size'], config['depth']
    inner, first, _ = matrices(config, side=2, text=1)
    head = width // config['num_heads']
    biases = 4 * width + depth * 6 * width + 2 * width + config['in_channels'] * 2 * 2
    with torch.device('meta'):
        counted = sum(parameter.numel() for parameter in build_network('prx-600m').parameters())
    assert counted == inner + first + biases + depth * 3 * head == 596_675_136
    assert sum(config['axes_dim']) == head


@pytest.mark.parametrize(('side', 'gflop'), [(32, 630.61), (64, 2638.90)])
def test_flop_of_the_budget_network_by_hand(side, gflop):
    """A product costs as much forward as for the gradient of each of its two factors; latents, text and times need none."""
    inner, first, attention = matrices(find_network('prx-600m').config, side, text=77)
    counted = Counter.from_file().counts(load_for_planning(str(REPOSITORY / f'yamls/prx-budget-{side * 8}.yaml'), [])).flop
    assert counted == 2 * (3 * inner + 2 * first + 3 * attention)
    assert counted / 1e9 == pytest.approx(gflop, abs=0.005)


@pytest.mark.parametrize('checkpointed', [False, True])
@pytest.mark.parametrize('mode', ['network', 'blocks'])
def test_compiled_it_is_the_same(mode, checkpointed, monkeypatch):
    monkeypatch.setattr('diffusion.training.machine.BACKEND', 'aot_eager')
    (noisy, t, text, mask), expected = inputs(), []
    for compiled in (False, True):
        network = random_network()
        if checkpointed:
            Prx().checkpoint_activations(network)
        if compiled:
            compile_network(network, mode, Prx.blocks)
        network(noisy, t, text, attention_mask=mask, return_dict=False)[0].square().mean().backward()
        expected.append([parameter.grad for parameter in network.parameters()])
    for one, other in zip(*expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_run_is_exported_and_refuses_weights_of_another_family(overrides, tmp_path, capsys):
    recipe = load_recipe(REPOSITORY / 'yamls/shapes-flow.yaml', [*overrides, 'model.network=tiny-prx'])
    trainer = build_trainer(recipe)
    trainer.fit()
    trainer.close()
    assert export(tmp_path / 'run', tmp_path / 'out')['weights'] == 'ema'
    assert isinstance(PRXPipeline.from_pretrained(tmp_path / 'out'), PRXPipeline)
    assert 'tags:\n- prx\n' in (tmp_path / 'out/README.md').read_text()
    load_weights(build_network('tiny-prx'), str(tmp_path / 'out'), Model('tiny-prx', flow=FlowSettings(shift=1.5)))
    assert f'its sampler is set to shift {recipe.model.flow.shift}, and this run trains with shift 1.5' in capsys.readouterr().err
    with pytest.raises(CheckpointError, match='holds another network than model.network'):
        load_weights(build_network('tiny'), str(tmp_path / 'run'), recipe.model)


@pytest.mark.parametrize('px', [256, 512])
def test_plain_diffusers_draws_with_t5_what_a_budget_run_of_it_draws(px, overrides, tmp_path):
    """Sampler and training share the shift of the resolution, and the VAE has a shift of its own."""
    write_stand_in(tmp_path / 'encoders', 'tiny-t5', words=vocabulary())
    more = ['model.network=tiny-prx', f'model.encoders.source={tmp_path}/encoders', 'data.resolution=32', 'load_path=null']
    recipe = load_recipe(REPOSITORY / f'yamls/prx-budget-{px}.yaml', [*overrides, *more])
    assert recipe.model.flow.shift == math.sqrt(px**2 / 256**2)
    trainer = build_trainer(recipe)
    trainer.fit()
    trainer.close()
    export(tmp_path / 'run', tmp_path / 'out')
    pipeline, family = open_model(tmp_path / 'out')
    assert (type(pipeline), type(pipeline.text_encoder), family.component) == (PRXPipeline, T5EncoderModel, 'transformer')
    assert weights_sha256(pipeline.text_encoder) == weights_sha256(T5EncoderModel.from_pretrained(tmp_path / 'encoders/text_encoder'))
    side = pipeline.vae_scale_factor
    with torch.device('meta'), FlopCounterMode(display=False) as counter:
        Prx().denoise(build_network('tiny-prx'), *Prx().example(CONFIG, 1, (32 // side, 32 // side), text_length=24))
    assert count(DrawingModel('out', tmp_path / 'out'), 32)[0] == counter.get_total_flops()  # what an evaluation's plan says
    plain = PRXPipeline.from_pretrained(tmp_path / 'out')
    plain.set_progress_bar_config(disable=True)
    assert (plain.tokenizer.model_max_length, plain.vae.config.shift_factor) == (24, 0.25)
    expected = FlowMatchEulerDiscreteScheduler(shift=px / 256)
    for scheduler in (expected, plain.scheduler):
        scheduler.set_timesteps(28)
    torch.testing.assert_close(plain.scheduler.sigmas, expected.sigmas, rtol=0, atol=0)
    torch.testing.assert_close(sampling_times(28, recipe.model.flow.shift), expected.sigmas, rtol=0, atol=1e-6)
    torch.manual_seed(0)
    for parameter in plain.transformer.parameters():  # two batches of training leave it near zero
        torch.nn.init.normal_(parameter, std=0.1)
    network = random_network()
    network.load_state_dict(plain.transformer.state_dict())
    encoders = FrozenEncoders.load(recipe.model.encoders, Prx().find_text)
    model = TextToImage(network, encoders, recipe.model, seed=0).eval()
    ours = model.generate(PROMPTS, 32, 3.0, steps=7, seed=5)
    for i, prompt in enumerate(PROMPTS):
        noise = normal(5, torch.tensor([[0, i, 0]]), Draw.NOISE, (4, 8, 8))
        image = plain(prompt, latents=noise, output_type='pt', num_inference_steps=7, guidance_scale=3.0, **Prx.pipeline_options).images[0]
        assert image.std() > 0.01
        assert (ours[i].float() - image * 255).abs().max() <= 0.5 + 255e-5


def test_a_whole_stand_in_is_a_pipeline_of_the_flow(tmp_path, monkeypatch):
    monkeypatch.setitem(KINDS, 'tiny-prx', KINDS['tiny'])
    write_stand_in(tmp_path, 'tiny-prx')
    write_pipeline(tmp_path, 'tiny-prx')
    pipeline = PRXPipeline.from_pretrained(tmp_path)
    assert (type(pipeline.scheduler), pipeline.default_sample_size) == (FlowMatchEulerDiscreteScheduler, 32 * pipeline.vae_scale_factor)
    said = run_here('diffusion.stand_in', tmp_path / 'other', '--like', 'tiny-t5', '--pipeline', code=2).stderr
    assert '--pipeline: no network is called tiny-t5; leave --pipeline out' in said


@pytest.mark.parametrize('targets', ['attention', 'attention+ff'])
def test_base_and_adapter_draw_what_the_merged_export_draws(targets, bases, overrides, tmp_path):
    base = shutil.copytree(bases['tiny-prx'], tmp_path / 'base')
    random_network().save_pretrained(base / 'transformer')
    adapter = [f'adapter.{setting}' for setting in (f'targets={targets}', 'rank=4', 'alpha=8')]
    more = ['model.network=tiny-prx', f'model.encoders.source={base}', 'train.duration=4ba', 'optimizer.lr=1e-2', 'data.kind=synthetic']
    recipe = load_recipe(REPOSITORY / 'yamls/shapes-flow.yaml', [*overrides, *more, *adapter])
    noise = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(3))
    compare_images_of_adapter(recipe, Prx(), base, tmp_path, {'transformer'}, noise, PROMPTS[:1], guidance_scale=3.0, **Prx.pipeline_options)
    assert '```python\nfrom diffusers' in (tmp_path / 'out/README.md').read_text()
    run_here('diffusion.export', tmp_path / 'run', tmp_path / 'adapter', '--weights', 'training')
    assert '```sh\npython -m diffusion.generate' in (tmp_path / 'adapter/README.md').read_text()


def test_stored_text_is_masked_as_encoded_text_is(masked, encoders_folder, overrides):
    """At padding it is whatever an encoder without a mask makes of it."""
    recipe = load_recipe(REPOSITORY / 'yamls/shapes-flow.yaml', [*overrides, 'model.network=tiny-prx'])
    model = TextToImage(random_network(), masked, recipe.model, recipe.seed)
    batch = blank_batch(2, recipe, model)
    batch['tokens'] = masked.text.tokenize(PROMPTS)
    plain = ClipPenultimate.find(str(encoders_folder), None)
    stored = plain.encode(plain.tokenize(PROMPTS)).text.half()
    expected = model(batch).prediction
    torch.testing.assert_close(model({**batch, 'text_embeddings': stored}).prediction, expected, rtol=1e-2, atol=1e-3)
    everywhere = {**batch['tokens'], 'text_encoder_mask': torch.ones(2, masked.text.length, dtype=torch.bool)}
    unmasked = model({**batch, 'tokens': everywhere, 'text_embeddings': stored}).prediction
    assert (unmasked - expected).abs().max() > 0.01  # or the test tests nothing


def test_times_are_not_rounded_to_bf16(overrides):
    recipe = load_recipe(REPOSITORY / 'yamls/shapes-flow.yaml', [*overrides, 'model.network=tiny-prx'])
    recipe.train.precision = 'bf16'
    with pytest.raises(RecipeError, match='train.precision: bf16 would round the times that tiny-prx is given'):
        build_model(recipe, torch.device('cpu'))


def test_a_side_that_is_no_whole_number_of_patches_is_refused(overrides):
    recipe = load_recipe(REPOSITORY / 'yamls/shapes-flow.yaml', [*overrides, 'model.network=tiny-prx', 'data.resolution=40'])
    build_model(recipe, torch.device('cpu'))
    recipe.data.resolution = 36
    with pytest.raises(RecipeError, match='data.resolution: 36 is not a multiple of 8, the pixels of a patch; nearest: 32 or 40'):
        build_model(recipe, torch.device('cpu'))
