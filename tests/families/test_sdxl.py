"""Stable Diffusion XL, against plain diffusers and published counts."""

import json
import shutil

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionXLPipeline, UNet2DConditionModel
from diffusers.models.attention import BasicTransformerBlock
from diffusers.pipelines.stable_diffusion_xl import pipeline_stable_diffusion_xl
from torch.utils.flop_counter import FlopCounterMode

from diffusion.checkpoints.exporting import export
from diffusion.checkpoints.initial import load_weights
from diffusion.checkpoints.reading import read_checkpoint
from diffusion.checkpoints.resume import find_newest
from diffusion.contracts.errors import CheckpointError, EncoderError
from diffusion.datasets.keyed_random import Draw, normal
from diffusion.datasets.loader import Collate
from diffusion.encoders.frozen import FrozenEncoders
from diffusion.encoders.random_encoders import text_encoders_like
from diffusion.encoders.text import ClipPair
from diffusion.families.counting.counts import Counter
from diffusion.families.networks import find_network
from diffusion.families.pipeline import generate
from diffusion.families.registry import FAMILIES, build_network, training_flops
from diffusion.objectives.objective import guided
from diffusion.recipe import load_recipe, recipe_from_yaml
from diffusion.recipe.schema import DiffusionSettings, EncoderSource, Model, Recipe
from diffusion.training.builder import build_trainer
from diffusion.training.machine import compile_network
from diffusion.training.micro_batch import blank_batch
from diffusion.training.model import TextToImage
from diffusion.watching.drawing import GridDrawer
from tests.conftest import REPOSITORY, read_json

CONFIG = find_network('tiny-xl').config
FAMILY = FAMILIES['sdxl']
PROMPTS = ['a small red circle at the left on a blue background', 'a cyan square!']


@pytest.fixture(scope='module')
def pair(encoders_xl_folder):
    return FrozenEncoders.load(EncoderSource(str(encoders_xl_folder)), ClipPair.find)


@pytest.fixture
def model(pair):
    return TextToImage(network(), pair, Model('tiny-xl', diffusion=DiffusionSettings()), seed=0).eval()


def network():
    torch.manual_seed(0)
    return build_network('tiny-xl').eval()


def opened(model, folder):
    """What plain diffusers makes of an export."""
    FAMILY.pipeline(network(), model.encoders, model.objective.scheduler(), 32).save_pretrained(folder)
    pipeline = StableDiffusionXLPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def test_it_is_the_published_network():
    with torch.device('meta'):
        unet = build_network('sdxl-base')
    assert sum(parameter.numel() for parameter in unet.parameters()) == 2_567_463_684
    assert len(unet.state_dict()) == 1_680
    assert max(parameter.numel() for parameter in unet.parameters()) == 29_491_200
    assert sum(isinstance(module, BasicTransformerBlock) for module in unet.modules()) == 70
    with torch.device('meta'):
        parameters = [sum(parameter.numel() for parameter in text.parameters()) for text in text_encoders_like('sdxl-base')]
    assert parameters == [123_060_480, 694_659_840]


@pytest.mark.parametrize(
    ('resolution', 'tflop', 'saved_gb', 'peak_gb', 'vae_tflop'),
    [(256, 1.231, 0.564, 0.567, 0.273), (512, 4.714, 2.18, 2.19, 1.117), (1024, 20.231, 8.64, 8.68, 4.879)],
)
def test_the_plan_has_the_published_counts(resolution, tflop, saved_gb, peak_gb, vae_tflop):
    recipe = Recipe()
    recipe.model.network, recipe.data.resolution = 'sdxl-base', resolution
    recipe.model.encoders.source = 'stabilityai/stable-diffusion-xl-base-1.0'
    counts = Counter.from_file().counts(recipe)
    assert counts.flop / 1e12 == pytest.approx(tflop, abs=1e-3)
    assert (counts.saved_bytes / 1e9, counts.peak_bytes / 1e9) == pytest.approx((saved_gb, peak_gb), abs=6e-3)
    assert (counts.encoders.text_parameters, counts.encoders.text_width) == (817_720_320, 2048)
    assert counts.encoders.text_flop / 1e12 == pytest.approx(0.0133 + 0.0979, abs=1e-4)
    assert counts.encoders.vae_flop / 1e12 == pytest.approx(vae_tflop, abs=1e-3)


def test_a_step_takes_three_times_the_flop_of_a_forward_pass():
    """Less what would flow back into text, size and latents."""
    with torch.device('meta'), FlopCounterMode(display=False) as counter:
        FAMILY.denoise(FAMILY.build(CONFIG), *FAMILY.example(CONFIG, 1, (8, 8), 16))
    assert training_flops('tiny-xl', (8, 8), 16) == pytest.approx(3 * counter.get_total_flops(), rel=0.05)


def test_its_output_is_that_of_diffusers():
    plain = UNet2DConditionModel(**CONFIG).eval()
    plain.load_state_dict(network().state_dict())
    noisy, t, conditioning = FAMILY.example(CONFIG, 3, (8, 12), 16)
    conditioning = conditioning._replace(geometry=torch.arange(18, dtype=torch.int32).view(3, 6) * 50)
    added = {'text_embeds': conditioning.pooled, 'time_ids': conditioning.geometry.float()}
    noisy, t = torch.randn_like(noisy), t + torch.tensor([0, 500, 999])
    expected = plain(noisy, t, conditioning.text, added_cond_kwargs=added).sample
    torch.testing.assert_close(FAMILY.denoise(network(), noisy, t, conditioning), expected, rtol=1e-5, atol=1e-5)
    for field in ('pooled', 'geometry'):  # or the test tests nothing
        without = conditioning._replace(**{field: torch.zeros_like(getattr(conditioning, field))})
        assert (FAMILY.denoise(network(), noisy, t, without) - expected).abs().max() > 1e-3


def test_text_is_what_the_pipeline_encodes(pair, model, tmp_path):
    given, empty, pooled, empty_pooled = opened(model, tmp_path).encode_prompt(PROMPTS, device='cpu')
    for captions, text, vector in ((PROMPTS, given, pooled), (['', ''], empty, empty_pooled)):
        ours = pair.text.encode(pair.text.tokenize(captions))
        torch.testing.assert_close(ours.text, text, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.pooled, vector, rtol=1e-5, atol=1e-5)
    assert empty.abs().max() > 0.1  # and not zeros
    tokens = pair.text.tokenize(['a'])
    assert tokens['text_encoder'][0, -1] == pair.text.tokenizers['tokenizer'].eos_token_id
    assert tokens['text_encoder_2'][0, -1] == 0  # the published second tokenizer pads with `!`


def test_another_architecture_is_refused(encoders_folder, encoders_xl_folder, pair, tmp_path):
    with pytest.raises(EncoderError, match='text_encoder_2: cannot be loaded'):
        ClipPair.find(str(encoders_folder), None)
    with pytest.raises(EncoderError, match="the network 'sdxl-base' expects text of width 2048, the text encoder gives 80"):
        TextToImage(network(), pair, Model('sdxl-base', diffusion=DiffusionSettings()), seed=0)
    config = read_json(encoders_xl_folder / 'text_encoder/config.json')
    for folder in ('text_encoder_2', 'tokenizer', 'tokenizer_2'):
        (tmp_path / folder).symlink_to(encoders_xl_folder / folder)
    (tmp_path / 'text_encoder').mkdir()
    (tmp_path / 'text_encoder/config.json').write_text(json.dumps({**config, 'hidden_size': 768, 'num_hidden_layers': 11}))
    with pytest.raises(EncoderError, match='text_encoder has 11 layers of width 768; .* says num_hidden_layers: 12'):
        ClipPair.find(str(tmp_path), None)


@pytest.mark.parametrize('guidance', [1.0, 5.0])
def test_plain_diffusers_draws_what_our_sampler_draws(model, tmp_path, guidance):
    ours, pipeline = model.generate(PROMPTS, 32, guidance, steps=4, seed=5), opened(model, tmp_path)
    noise = normal(5, torch.tensor([[0, 0, 0], [0, 1, 0]]), Draw.NOISE, (4, 8, 8))
    images = pipeline(PROMPTS, latents=noise, output_type='pt', num_inference_steps=4, guidance_scale=guidance).images
    assert images.std() > 0.01
    assert (ours.float() - images * 255).abs().max() <= 0.5 + 255e-5  # ours are whole numbers


def test_a_rectangle_that_was_cut_out_of_a_larger_image(model, pair, tmp_path):
    """Size, crop and target in diffusers' order: what Collate makes of a sample is what the pipeline makes of the same numbers."""
    sample = {
        'moments': np.zeros((8, 4, 12), np.float16),  # 16 x 48 px
        'size': np.array([200, 400], np.int32),
        'crop': np.array([3, 70], np.int32),
        'captions': [(PROMPTS[0], 1.0)],
        'sample_key': (0, 0, 0),
    }
    given, empty = (Collate(pair.text.tokenize, 0, dropout, downsampling=4)([sample]) for dropout in (0.0, 1.0))
    assert given['geometry'].dtype == torch.int32
    given, empty = (pair.text.encode(batch['tokens'])._replace(geometry=batch['geometry']) for batch in (given, empty))
    pipeline, noise = opened(model, tmp_path), normal(5, torch.zeros(1, 3, dtype=torch.int64), Draw.NOISE, (4, 4, 12))
    where = {'original_size': (200, 400), 'crops_coords_top_left': (3, 70), 'target_size': (16, 48)}
    options = {'height': 16, 'width': 48, 'num_inference_steps': 4, 'guidance_scale': 5.0, 'output_type': 'latent'}
    expected = pipeline(PROMPTS[0], latents=noise, **options, **where).images
    ours = model.objective.sample(guided(model.denoise, given, empty, 5.0), noise, 4)
    assert (ours - expected).abs().max() < 1e-5 * expected.abs().max()  # the latents of an untrained network grow
    turned = {**where, 'original_size': (400, 200)}
    assert (
        pipeline(PROMPTS[0], latents=noise, **options, **turned).images - expected
    ).abs().max() > 1e-3 * expected.abs().max()  # or the test tests nothing


def test_a_run_is_exported_and_resumes_to_the_bit(overrides, encoders_xl_folder, tmp_path, monkeypatch):
    changes = [*overrides, 'model.network=tiny-xl', f'model.encoders.source={encoders_xl_folder}', 'train.duration=3ba', 'checkpoint.every=1ba']

    def trained(name, *more):
        recipe = load_recipe(REPOSITORY / 'yamls/sdxl-base-256.yaml', [*changes, f'run_folder={tmp_path}/{name}', *more])
        trainer = build_trainer(recipe)
        trainer.fit()
        trainer.close()
        return {name: tensor.clone() for name, tensor in trainer.state.model.network.state_dict().items()}

    whole = trained('whole')
    trained('resumed', 'train.duration=2ba')
    resumed = trained('resumed')
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    export(tmp_path / 'whole', tmp_path / 'out')
    index = read_json(tmp_path / 'out/model_index.json')
    assert (index['force_zeros_for_empty_prompt'], index['add_watermarker']) == (False, False)
    monkeypatch.setattr(pipeline_stable_diffusion_xl, 'is_invisible_watermark_available', lambda: True)  # as on a machine that has the package
    assert StableDiffusionXLPipeline.from_pretrained(tmp_path / 'out').watermark is None
    assert [image.size for image in generate(tmp_path / 'out', PROMPTS, seed=0, steps=2)] == [(32, 32)] * 2
    assert 'tags:\n- stable-diffusion-xl\n' in (tmp_path / 'out/README.md').read_text()
    load_weights(build_network('tiny-xl'), str(tmp_path / 'out'), Model('tiny-xl', diffusion=DiffusionSettings()))
    with pytest.raises(CheckpointError, match='holds another network than model.network'):
        load_weights(build_network('tiny'), str(tmp_path / 'out'), Model('tiny', diffusion=DiffusionSettings()))


def test_what_begins_from_a_published_model_keeps_its_zeros(overrides, base_xl, tmp_path):
    """All weights trained: dropped captions and guidance have zeros in place of the empty caption; the export says so, and the next run that begins here."""
    changes = [*overrides, 'model.network=tiny-xl', f'model.encoders.source={base_xl}', 'checkpoint.every=1ba']

    def start(name, load_path, *more):
        places = [f'run_folder={tmp_path}/{name}', f'load_path={load_path}', 'model.diffusion.prediction=epsilon', *more]
        return build_trainer(load_recipe(REPOSITORY / 'yamls/sdxl-base-256.yaml', [*changes, *places]))

    trainer = start('run', shutil.copytree(base_xl, tmp_path / 'base'))
    trainer.fit()
    trainer.close()
    shutil.rmtree(tmp_path / 'base')  # a run that resumes does not need it
    for name, load_path in (('run', tmp_path / 'base'), ('next', tmp_path / 'run')):
        model = start(name, load_path, 'train.duration=3ba').state.model
        tokens = model.encoders.text.tokenize(['', 'a red circle'])
        text, pooled = model.conditioning({'tokens': tokens, 'geometry': None})[::2]
        assert [bool(each.any()) for each in (*text, *pooled)] == [False, True] * 2
    export(tmp_path / 'run', tmp_path / 'out')
    assert read_json(tmp_path / 'out/model_index.json')['force_zeros_for_empty_prompt'] is True
    assert read_json(tmp_path / 'out/scheduler/scheduler_config.json')['_class_name'] == 'DDIMScheduler'  # that of what it was trained by
    guided_by_zeros = StableDiffusionXLPipeline.from_pretrained(tmp_path / 'out')
    recipe = recipe_from_yaml((tmp_path / 'out/recipe.yaml').read_text(), 'here')
    ours = GridDrawer(recipe)
    found = find_newest(str(tmp_path / 'run/checkpoints'), tmp_path)
    ours.load(read_checkpoint(found.path), found.manifest, 'ema')
    noise = normal(5, torch.tensor([[0, 0, 0], [0, 1, 0]]), Draw.NOISE, (4, 8, 8))
    images = guided_by_zeros(PROMPTS, latents=noise, output_type='pt', num_inference_steps=4, guidance_scale=5.0).images
    assert (ours.model.generate(PROMPTS, 32, 5.0, steps=4, seed=5).float() - images * 255).abs().max() <= 1


@pytest.mark.parametrize('text_stored', [False, True])
def test_the_batch_that_is_tried_is_one_that_trains(model, pair, text_stored):
    recipe = Recipe()
    recipe.data.kind, recipe.data.resolution = 'latents', 32
    batch = blank_batch(2, recipe, model, text_stored)
    assert ('pooled_embeddings' in batch) == text_stored
    assert model(batch).prediction.shape == model.eval_forward(batch).prediction.shape == (2, 4, 8, 8)


@pytest.mark.long
@pytest.mark.parametrize('mode', ['network', 'blocks'])
def test_compiled_and_checkpointed_it_is_the_same(mode, monkeypatch):
    monkeypatch.setattr('diffusion.training.machine.BACKEND', 'aot_eager')
    noisy, t, conditioning = FAMILY.example(CONFIG, 2, (8, 8), 16)
    conditioning, noisy = conditioning._replace(geometry=torch.arange(12, dtype=torch.int32).view(2, 6)), torch.randn_like(noisy)
    found = []
    for changed in (False, True):
        unet = network()
        if changed:
            FAMILY.checkpoint_activations(unet)
            compile_network(unet, mode, FAMILY.blocks)
        FAMILY.denoise(unet, noisy, t, conditioning).square().mean().backward()
        found.append([parameter.grad for parameter in unet.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
