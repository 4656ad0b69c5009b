"""An exported adapter draws what the trained model draws: with diffusers' own loaders, in each of its files."""

import hashlib
import shutil

import pytest
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from huggingface_hub import ModelCard
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.conftest import read_json, run_here
from tests.training.test_adapters import WITH_TEXT, train, trained  # noqa: F401

LATENTS = torch.randn(2, 4, 8, 12, generator=torch.Generator().manual_seed(3))  # not square
WHOLE = 'pytorch_lora_weights.safetensors'


def drawn(pipeline):
    """Latents (2, 4, 8, 12) after a few steps."""
    pipeline.set_progress_bar_config(disable=True)
    prompts = ['a red circle', 'a large blue square']
    return pipeline(prompts, latents=LATENTS.clone(), height=32, width=48, guidance_scale=3.0, num_inference_steps=4, output_type='latent').images


def opened(folder):
    return StableDiffusionPipeline.from_pretrained(folder)


@pytest.fixture(scope='module')
def exported(trained):  # noqa: F811
    folder, _ = trained
    run_here('diffusion.export', folder, folder / 'export', '--weights', 'training', '--merged')
    return folder / 'export'


@pytest.fixture(scope='module')
def expected(base, trained):  # noqa: F811
    """What the model draws that was trained, alpha twice its rank, in the base's pipeline."""
    pipeline, model = opened(base), trained[1].state.model.eval()
    pipeline.unet, pipeline.text_encoder = model.network, model.text_encoders['text_encoder']
    with torch.no_grad():
        return drawn(pipeline)


def test_diffusers_draws_with_it_what_was_trained_and_without_it_the_base(base, exported, expected):
    pipeline = opened(base)
    before = drawn(pipeline)
    assert (before - expected).abs().max() > 0.01
    pipeline.load_lora_weights(exported / 'lora', weight_name=WHOLE)
    torch.testing.assert_close(drawn(pipeline), expected, rtol=0, atol=1e-4)
    pipeline.fuse_lora()
    torch.testing.assert_close(drawn(pipeline), expected, rtol=0, atol=1e-4)
    pipeline.unfuse_lora()
    torch.testing.assert_close(drawn(pipeline), expected, rtol=0, atol=1e-4)
    pipeline.unload_lora_weights()
    torch.testing.assert_close(drawn(pipeline), before, rtol=0, atol=1e-4)


def test_unloaded_it_leaves_the_base_to_the_bit(base, exported):
    pipeline = opened(base)
    before = drawn(pipeline)
    pipeline.load_lora_weights(exported / 'lora', weight_name=WHOLE)
    pipeline.unload_lora_weights()
    assert torch.equal(drawn(pipeline), before)


def test_the_kohya_file_is_the_same_adapter(base, exported, expected):
    weights = load_file(exported / 'lora/kohya.safetensors')
    alphas = [tensor for name, tensor in weights.items() if name.endswith('.alpha')]
    assert {float(alpha) for alpha in alphas} == {8.0}  # the rank is 4
    assert len(alphas) == len(weights) / 3
    assert {name.split('_text_model')[0].split('_down')[0].split('_up')[0].split('_mid')[0] for name in weights} == {'lora_unet', 'lora_te'}
    pipeline = opened(base)
    pipeline.load_lora_weights(exported / 'lora', weight_name='kohya.safetensors')
    torch.testing.assert_close(drawn(pipeline), expected, rtol=0, atol=1e-4)


def test_the_merged_pipeline_is_the_same_model(base, exported, expected):
    pipeline = opened(exported)
    assert not [name for name in pipeline.unet.state_dict() if 'lora' in name or 'base_layer' in name]
    pipeline.scheduler = opened(base).scheduler
    torch.testing.assert_close(drawn(pipeline), expected, rtol=0, atol=1e-4)


def test_generate_draws_the_same_with_the_merged_folder_and_with_base_and_adapter(base, trained, exported, tmp_path):  # noqa: F811
    folder, _ = trained
    alone, moved = tmp_path / 'alone', tmp_path / 'moved'
    run_here('diffusion.export', folder, alone, '--weights', 'training')
    assert sorted(path.name for path in alone.iterdir()) == ['README.md', 'export.json', 'lora', 'recipe.yaml']
    card = ModelCard.load(alone / 'README.md')
    assert f'"{base}"' in card.text
    assert f'weight_name="{WHOLE}"' in card.text
    shutil.copytree(base, moved)
    shutil.copy(exported / 'scheduler/scheduler_config.json', moved / 'scheduler/scheduler_config.json')  # the merged one has that of the training
    draw = ('--prompt', 'a red circle', '--steps', 2, '--guidance', 2)
    for model, *more in ((exported,), (alone, '--base', moved), (alone,)):
        run_here('diffusion.generate', model, tmp_path / f'{model.name}{len(more)}', *draw, *more)
    one, other = (Image.open(tmp_path / name / '0000.png').tobytes() for name in ('export0', 'alone2'))
    assert max(abs(x - y) for x, y in zip(one, other, strict=True)) <= 2
    unet = moved / 'unet/diffusion_pytorch_model.safetensors'
    weights = load_file(unet)
    save_file({**weights, 'conv_in.bias': weights['conv_in.bias'] + 1}, unet, metadata={'format': 'pt'})
    said = run_here('diffusion.generate', alone, tmp_path / 'x', *draw, '--base', moved, code=2).stderr
    assert 'its adapter was trained on another unet than that of' in said
    said = run_here('diffusion.export', folder, tmp_path / 'y', f'load_path={moved}', code=2).stderr
    assert 'an adapter belongs to one network: put its weights back into model.encoders.source, or name them with load_path' in said
    assert not (tmp_path / 'y').exists()
    assert 'name the folder with --base' in run_here('diffusion.generate', alone, tmp_path / 'x', *draw, '--base', '/nowhere', code=2).stderr


def test_two_exports_are_equal_to_the_byte(trained, exported, tmp_path):  # noqa: F811
    run_here('diffusion.export', trained[0], tmp_path / 'again', '--weights', 'training')
    for name in (WHOLE, 'kohya.safetensors'):
        one, other = (hashlib.sha256((folder / 'lora' / name).read_bytes()).hexdigest() for folder in (exported, tmp_path / 'again'))
        assert one == other
    with safe_open(exported / 'lora' / WHOLE, 'pt') as file:
        assert '"unet.lora_alpha": 8' in file.metadata()['lora_adapter_metadata']
    assert read_json(exported / 'export.json')['base'].keys() == {'network', 'source', 'revision', 'sha256'}


def test_both_text_encoders_of_sdxl_are_exported(base_xl, tmp_path):
    more = ['model.network=tiny-xl', 'train.sharding=ddp', *WITH_TEXT, 'adapter.text_lr=1e-2', 'ema.half_life=null', 'ema.offload=false']
    model = train(base_xl, tmp_path / 'run', *more, of='sdxl-base-256').state.model.eval()
    run_here('diffusion.export', tmp_path / 'run', tmp_path / 'out', '--weights', 'training', '--merged')
    pipeline = StableDiffusionXLPipeline.from_pretrained(base_xl)
    before = drawn(pipeline)
    own = {name: getattr(pipeline, name) for name in ('unet', 'text_encoder', 'text_encoder_2')}
    pipeline.register_modules(unet=model.network, **dict(model.text_encoders))
    with torch.no_grad():
        expected = drawn(pipeline)
    assert (before - expected).abs().max() > 0.01
    pipeline.register_modules(**own)
    for name in (WHOLE, 'kohya.safetensors'):
        pipeline.load_lora_weights(tmp_path / 'out/lora', weight_name=name)
        torch.testing.assert_close(drawn(pipeline), expected, rtol=0, atol=1e-4)
        pipeline.unload_lora_weights()
    assert {name.split('_')[1] for name in load_file(tmp_path / 'out/lora/kohya.safetensors')} == {'unet', 'te1', 'te2'}
    merged = StableDiffusionXLPipeline.from_pretrained(tmp_path / 'out')
    merged.scheduler = pipeline.scheduler
    torch.testing.assert_close(drawn(merged), expected, rtol=0, atol=1e-4)
