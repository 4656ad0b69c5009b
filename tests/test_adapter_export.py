"""An exported adapter draws what the trained model draws: with diffusers' own loaders, in each of its files."""

import hashlib
import json
import re
import shutil

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from huggingface_hub import ModelCard
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from diffusion.checkpoints.reading import weights_by_part
from diffusion.contracts.errors import EncoderError
from diffusion.datasets.keyed_random import Draw, by_id, normal
from diffusion.families import pipeline as pipelines
from diffusion.families.adapters import adapted_parts, load_adapters
from diffusion.families.pipeline import open_model
from diffusion.finetuning.drawn import Base
from diffusion.recipe import recipe_from_yaml
from diffusion.training.builder import build_model
from tests.conftest import read_json, run_here
from tests.training.test_adapters import WITH_TEXT, state, train, trained  # noqa: F401

LATENTS = torch.randn(2, 4, 8, 12, generator=torch.Generator().manual_seed(3))  # not square
PROMPTS = ['a red circle', 'a large blue square']
WHOLE = 'pytorch_lora_weights.safetensors'


def drawn(pipeline, guidance=3.0):
    """Latents (2, 4, 8, 12) after a few steps."""
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        PROMPTS, latents=LATENTS.clone(), height=32, width=48, guidance_scale=guidance, num_inference_steps=4, output_type='latent'
    ).images


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


def test_generate_draws_the_same_with_the_merged_folder_and_with_base_and_adapter(base, base_xl, trained, exported, tmp_path):  # noqa: F811
    folder, _ = trained
    alone, moved = tmp_path / 'alone', tmp_path / 'moved'
    run_here('diffusion.export', folder, alone, '--weights', 'training')
    assert sorted(path.name for path in alone.iterdir()) == ['README.md', 'export.json', 'lora', 'recipe.yaml']
    card = ModelCard.load(alone / 'README.md')
    assert f'"{base}"' in card.text
    assert f'weight_name="{WHOLE}"' in card.text
    shutil.copytree(base, moved)
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
    said = run_here('diffusion.generate', alone, tmp_path / 'x', *draw, '--base', base_xl, code=2).stderr
    assert f'its adapter belongs to a StableDiffusionPipeline, and {base_xl} is a StableDiffusionXLPipeline; name the folder of the right one' in said


def test_two_exports_are_equal_to_the_byte(trained, exported, tmp_path):  # noqa: F811
    run_here('diffusion.export', trained[0], tmp_path / 'again', '--weights', 'training')
    for name in (WHOLE, 'kohya.safetensors'):
        one, other = (hashlib.sha256((folder / 'lora' / name).read_bytes()).hexdigest() for folder in (exported, tmp_path / 'again'))
        assert one == other
    with safe_open(exported / 'lora' / WHOLE, 'pt') as file:
        assert '"unet.lora_alpha": 8' in file.metadata()['lora_adapter_metadata']
    base = read_json(exported / 'export.json')['base']
    assert base.keys() == {'network', 'source', 'revision', 'sha256', 'scheduler', 'force_zeros_for_empty_prompt'}


@pytest.fixture(scope='module')
def trained_xl(base_xl, tmp_path_factory):
    """Run folder and model of adapters on all three networks of Stable Diffusion XL."""
    folder = tmp_path_factory.mktemp('xl') / 'run'
    more = ['model.network=tiny-xl', 'train.sharding=ddp', *WITH_TEXT, 'adapter.text_lr=1e-2', 'ema.half_life=null', 'ema.offload=false']
    return folder, train(base_xl, folder, *more, of='sdxl-base-256').state.model.eval()


def saying(base_xl, zeros, folder):
    """The base, whose model_index.json says this of force_zeros_for_empty_prompt."""
    shutil.copytree(base_xl, folder)
    index = read_json(folder / 'model_index.json')
    assert index['force_zeros_for_empty_prompt'] is True  # diffusers' default, and what the published model says
    (folder / 'model_index.json').write_text(json.dumps({**index, 'force_zeros_for_empty_prompt': zeros}))
    return folder


def test_both_text_encoders_of_sdxl_are_exported(base_xl, trained_xl, tmp_path):
    folder, model = trained_xl
    run_here('diffusion.export', folder, tmp_path / 'out', '--weights', 'training')
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


@pytest.mark.parametrize('zeros', [True, False])
def test_drawing_settings_are_those_of_the_base(base_xl, trained_xl, tmp_path, zeros):
    """Its sampler, and whether guidance leads away from zeros or from the encoded empty caption: in the merged model, from base and adapter, in grids."""
    folder, base = trained_xl[0], saying(base_xl, zeros, tmp_path / 'base')
    run_here('diffusion.export', folder, tmp_path / 'out', '--weights', 'training', '--merged', f'model.encoders.source={base}')
    plain = StableDiffusionXLPipeline.from_pretrained(base)
    plain.load_lora_weights(tmp_path / 'out/lora', weight_name=WHOLE)
    merged = StableDiffusionXLPipeline.from_pretrained(tmp_path / 'out')
    assert type(merged.scheduler) is type(plain.scheduler)
    for guidance in (4.0, 1.0):
        torch.testing.assert_close(drawn(merged, guidance), drawn(plain, guidance), rtol=0, atol=1e-4)
    (tmp_path / 'out/model_index.json').unlink()  # what is left is the adapter
    for where in (None, str(base_xl)):  # the recorded settings hold, also for a copy of the base that says something else
        ours, _ = open_model(tmp_path / 'out', where)
        torch.testing.assert_close(drawn(ours, 4.0), drawn(plain, 4.0), rtol=0, atol=1e-4)
    recipe = recipe_from_yaml((tmp_path / 'out/recipe.yaml').read_text(), 'here', [f'model.encoders.source={base}', f'run_folder={tmp_path}'])
    model = build_model(recipe, torch.device('cpu')).eval()
    load_adapters(adapted_parts(model.family, model.network, model.encoders.text), weights_by_part(state(folder), 'unet', False), 'here')
    noise = normal(0, by_id(torch.arange(2)), Draw.NOISE, (4, 8, 8))
    expected = plain(PROMPTS, latents=noise, height=32, width=32, guidance_scale=4.0, num_inference_steps=4, output_type='pt').images
    grid = model.generate(PROMPTS, 32, guidance=4.0, steps=4, seed=0)
    assert (grid.float() - expected * 255).abs().max() < 1.5
    class_images, untrained = Base(recipe).pipeline(), StableDiffusionXLPipeline.from_pretrained(base)
    torch.testing.assert_close(drawn(class_images, 4.0), drawn(untrained, 4.0), rtol=0, atol=1e-4)


def first(weights):
    return min(name for name in weights if name.endswith('.down.weight'))


@pytest.mark.parametrize(
    ('damage', 'message'),
    [
        (lambda weights: {f'other.{name}': weight for name, weight in weights.items()}, '80 weights missing, such as .*; 80 weights unexpected'),
        (
            lambda weights: {name: weight for name, weight in weights.items() if name != first(weights)},
            '1 weights missing, such as text_encoder.*down.weight',
        ),
        (lambda weights: {name: weight for name, weight in weights.items() if '.to_q.' not in name}, '16 weights missing, such as unet.*to_q'),
        (lambda weights: {**weights, 'unet.nonsense.lora_A.weight': torch.zeros(4, 4)}, '1 weights unexpected, such as unet.nonsense'),
        (lambda weights: {**weights, first(weights): torch.zeros(4, 5)}, '1 weights of another shape, such as text_encoder'),
        (lambda weights: {**weights, first(weights): weights[first(weights)] * torch.nan}, '1 weights not finite, such as text_encoder'),
    ],
)
def test_an_adapter_is_opened_with_exactly_the_weights_that_its_settings_imply(exported, tmp_path, damage, message):
    alone = tmp_path / 'alone'
    shutil.copytree(exported, alone, ignore=shutil.ignore_patterns('model_index.json'))
    save_file(damage(load_file(alone / 'lora' / WHOLE)), alone / 'lora' / WHOLE)
    with pytest.raises(EncoderError, match=rf'is not the adapter that recipe.yaml describes \(rank 4, attention, text encoders\): {message}'):
        open_model(alone)


@pytest.mark.parametrize(
    ('file', 'change', 'message'),
    [
        ('export.json', {'base': 5}, 'export.json: base: .*, not 5'),
        ('export.json', {'base': {}}, 'export.json: base.network: Field required'),
        ('export.json', {'base': None}, 'export.json: base: '),
        ('export.json', {'guidance': 'much'}, "export.json: guidance: .*, not 'much'"),
        ('export.json', {'base.network': '../../../x'}, 'base.network: unknown network'),
        ('export.json', {'base.sha256': {}}, 'its adapter was trained on another'),
        ('export.json', {'base.scheduler': {'_class_name': 'StableDiffusionPipeline'}}, 'none of the samplers that this project draws with'),
        ('recipe.yaml', 'adapter: {rank: 0}', 'adapter.*rank|rank.*0'),
        ('recipe.yaml', 'adapter: null', 'describes no adapter'),
        ('recipe.yaml', None, 'recipe.yaml: which the adapter needs, cannot be read'),
    ],
)
def test_damaged_settings_of_an_adapter_are_named(exported, tmp_path, file, change, message):
    alone = tmp_path / 'alone'
    shutil.copytree(exported, alone, ignore=shutil.ignore_patterns('model_index.json', *([] if change else [file])))
    if isinstance(change, dict):
        facts = read_json(alone / file)
        for key, value in change.items():
            part, _, name = key.rpartition('.')
            (facts[part] if part else facts)[name] = value
        (alone / file).write_text(json.dumps(facts))
    elif change:
        (alone / file).write_text(change)
    said = run_here('diffusion.generate', alone, tmp_path / 'out', '--prompt', 'a', '--steps', 1, code=2).stderr
    assert re.search(message, said), said


@pytest.mark.parametrize('merged', [True, False])
def test_images_are_drawn_in_bf16_on_a_gpu_and_where_it_is_asked_for(exported, tmp_path, monkeypatch, merged):
    model = exported
    if not merged:
        model = tmp_path / 'alone'
        shutil.copytree(exported, model, ignore=shutil.ignore_patterns('model_index.json'))
    images = {}
    for precision, dtype in (('bf16', torch.bfloat16), ('fp32', torch.float32)):
        parts = [part for part in open_model(model, precision=precision)[0].components.values() if isinstance(part, torch.nn.Module)]
        assert {weight.dtype for part in parts for weight in part.parameters()} == {dtype}
        run_here(
            'diffusion.generate', model, tmp_path / precision, '--prompt', 'a red circle', '--steps', 2, '--guidance', 1, '--precision', precision
        )
        image = Image.open(tmp_path / precision / '0000.png')
        assert image.text['precision'] == precision
        images[precision] = np.asarray(image).astype(int)
    assert 0 < np.abs(images['bf16'] - images['fp32']).mean() < 4
    on = []
    monkeypatch.setattr(pipelines, 'own_device', lambda: torch.device('cuda'))
    monkeypatch.setattr(pipelines, 'placed', lambda pipeline, precision: on.append(precision) or pipeline)
    assert merged == (open_model(model)[0].unet.dtype == torch.bfloat16)  # that of an adapter is compared with its digest before
    open_model(model, precision='fp32')
    assert on == ['bf16', 'fp32']
