"""Model folders that somebody else wrote: what they may name, and numbers that would fill the memory or draw black images."""

import json
import math
import shutil
import sys
from pathlib import Path

import pytest
from diffusers import StableDiffusionPipeline
from safetensors.torch import load_file, save_file
from transformers import CLIPImageProcessor

from diffusion.contracts.errors import EncoderError
from diffusion.encoders.patches import PatchFeatures
from diffusion.encoders.pretrained import read_configs
from diffusion.evaluation.job.models import DrawingModel
from diffusion.families.pipeline import open_model, part_classes
from diffusion.families.registry import FAMILIES, family_of

CODE = "open(__file__ + '.ran', 'w').close()\nfrom diffusers import DDIMScheduler as C\n"


@pytest.fixture
def model(base, tmp_path, monkeypatch):
    """A whole pipeline to change, in a folder that Python imports modules from, and modules in it that leave a file when they run."""
    folder = tmp_path / 'models/mine'
    shutil.copytree(base, folder)
    for path in (tmp_path / 'evil.py', folder / 'pipeline.py', folder / 'scheduler/evil.py'):
        path.write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    assert not list(tmp_path.rglob('*.ran'))
    for name in [name for name in sys.modules if name.startswith(('evil', 'models.mine'))]:
        del sys.modules[name]


def change(file: Path, **entries: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


@pytest.mark.parametrize(
    ('part', 'entry'),
    [
        ('scheduler', ['models.mine.scheduler.evil', 'C']),
        ('scheduler', ['evil', 'C']),
        ('scheduler', ['diffusers', 'StableDiffusionPipeline']),
        ('scheduler', ['evil', 'DDIMScheduler']),
        ('scheduler', {'a': 1}),
        ('tokenizer', ['subprocess', 'Popen']),
        ('tokenizer', ['transformers', 'AutoTokenizer']),
        ('feature_extractor', ['evil', 'C']),
        ('safety_checker', ['evil', 'C']),
        ('image_encoder', ['evil', 'C']),
        ('unet', ['diffusers', 'AutoencoderKL']),
        ('vae', ['diffusers']),
        ('vae', [['diffusers'], {'a': 1}]),
        ('vae', 'diffusers'),
        ('unknown', ['evil', 'C']),
    ],
)
def test_only_classes_that_the_family_lists_are_loaded(model, part, entry):
    change(model / 'model_index.json', **{part: entry})
    named = DrawingModel(str(model), model)
    with pytest.raises(EncoderError, match=f'model_index.json: (lists no )?{part}'):
        open_model(model)
    if part == 'scheduler':
        with pytest.raises(EncoderError, match=f'model_index.json: {part}'):
            named.scheduler(named.sampler)


@pytest.mark.parametrize('name', [['pipeline', 'StableDiffusionPipeline'], {'a': 1}, None, 'DiffusionPipeline'])
def test_only_pipelines_of_our_families_are_drawn_with(model, name):
    change(model / 'model_index.json', _class_name=name)
    with pytest.raises(EncoderError, match='this project draws with StableDiffusionPipeline, '):
        open_model(model)


@pytest.mark.parametrize(
    ('file', 'entries', 'said'),
    [
        ('model_index.json', {'custom_pipeline': 'pipeline.py'}, 'names code'),
        ('model_index.json', {'default_sample_size': 'evil'}, 'cannot be opened as a StableDiffusionPipeline: TypeError'),
        ('unet/config.json', {'sample_size': [10**6, 32]}, 'draws 4,000,000 pixels a side'),
        ('unet/config.json', {'sample_size': 'evil'}, 'cannot be opened as a StableDiffusionPipeline: '),
        ('text_encoder/config.json', {'auto_map': {'AutoModel': 'evil.C'}}, 'names code'),
        ('text_encoder/config.json', {'nested': [{'trust_remote_code': True}]}, 'names code'),
        ('text_encoder/config.json', {'attn_implementation': 'owner/kernel'}, 'names code on the Hub'),
        ('tokenizer/tokenizer_config.json', {'auto_map': {'AutoTokenizer': ['evil.C', None]}}, 'names code'),
        ('scheduler/scheduler_config.json', {'beta_start': math.nan}, 'beta_start: nan is not a number'),
        ('scheduler/scheduler_config.json', {'beta_end': 3.0}, 'make no noise levels'),
        ('scheduler/scheduler_config.json', {'num_train_timesteps': 10**9}, 'at most 16,777,216'),
        ('vae/config.json', {'scaling_factor': 0}, 'no scale of latents'),
        ('vae/config.json', {'scaling_factor': math.nan}, 'scaling_factor: nan is not a number'),
        ('vae/config.json', {'scaling_factor': 'a'}, 'no scale of latents'),
        ('vae/config.json', {'shift_factor': math.inf}, 'no shift of latents'),
        ('unet/config.json', {'cross_attention_dim': 10**9}, 'at most 16,777,216'),
        ('unet/config.json', {'layers_per_block': 10**9}, 'at most 1,000'),
        ('unet/config.json', {'block_out_channels': [320_000] * 2}, r'a network of [\d,]{18} weights, the files hold'),
        ('unet/config.json', {'sample_size': 10**6}, 'draws 4,000,000 pixels a side, at most 4,096'),
        ('tokenizer/tokenizer_config.json', {'model_max_length': 0}, 'gives no model_max_length of at most 4096 and at least 2, but 0'),
        ('tokenizer/tokenizer_config.json', {'model_max_length': 'many'}, "but 'many'"),
    ],
)
def test_names_of_code_and_numbers_that_no_model_has_are_refused(model, file, entries, said):
    change(model / file, **entries)
    with pytest.raises(EncoderError, match=said):
        open_model(model)


def test_an_empty_scheduler_is_none(model):
    (model / 'scheduler/scheduler_config.json').write_text('{}')
    with pytest.raises(EncoderError, match='says nothing of how the network was trained'):
        open_model(model)


@pytest.mark.parametrize('file', ['unet/diffusion_pytorch_model', 'vae/diffusion_pytorch_model', 'text_encoder/model'])
def test_weights_that_are_not_finite_are_refused(model, file):
    file = model / f'{file}.safetensors'
    weights = load_file(file)
    name = max(weights)
    loaded = name.removeprefix('text_model.')
    weights[name].view(-1)[-1] = math.nan
    save_file(weights, file, metadata={'format': 'pt'})
    with pytest.raises(EncoderError, match=rf'{file.parent}: .* 1 NaN or infinite \({loaded}\)'):
        open_model(model)


@pytest.mark.parametrize('content', [None, '{}'])
def test_a_tokenizer_without_settings_reads_as_many_tokens_as_its_encoder(model, content):
    """As training does; diffusers would pad captions to 10^30 tokens."""
    expected = open_model(model)[0].tokenizer(['a red circle'] * 2, padding='max_length').input_ids
    (model / 'tokenizer/tokenizer_config.json').unlink()
    if content is not None:
        (model / 'tokenizer/tokenizer_config.json').write_text(content)
    assert open_model(model)[0].tokenizer(['a red circle'] * 2, padding='max_length').input_ids == expected


def test_feature_networks_name_no_code_either(tmp_path):
    (tmp_path / 'config.json').write_text(json.dumps({'model_type': 'dinov2', 'auto_map': {'AutoModel': 'evil.C'}}))
    with pytest.raises(EncoderError, match='auto_map: .* names code'):
        PatchFeatures.find(str(tmp_path), None)


def test_harmless_entries_of_published_folders_are_read(tmp_path):
    """Lengths that stand for no limit, samplers that clip nothing, and what says that no code is needed."""
    harmless = {
        'config.json': {'trust_remote_code': False, 'auto_map': None, 'vocab_size': 250_112, 'rope_theta': 1e7},
        'scheduler_config.json': {'lambda_min_clipped': -math.inf},
        'tokenizer_config.json': {'model_max_length': 10**30},
    }
    for name, content in harmless.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert read_configs(str(tmp_path), None, '') == harmless


def test_a_safety_checker_and_older_names_are_known(model):
    entries = {'safety_checker': ['stable_diffusion', 'StableDiffusionSafetyChecker'], 'feature_extractor': ['transformers', 'CLIPFeatureExtractor']}
    change(model / 'model_index.json', **entries, tokenizer=['transformers', 'CLIPTokenizerFast'])
    classes = part_classes(family_of('tiny'), str(model), None)
    assert classes['safety_checker'].__name__ == 'StableDiffusionSafetyChecker'
    assert classes['feature_extractor'] is CLIPImageProcessor


def test_it_opens_as_diffusers_opens_it(base):
    """The pipeline is put together here, without what diffusers would import by name."""
    ours, theirs = open_model(base)[0], StableDiffusionPipeline.from_pretrained(base)
    assert {name: type(part) for name, part in ours.components.items()} == {name: type(part) for name, part in theirs.components.items()}
    settings = [{key: value for key, value in pipeline.config.items() if key[0] != '_'} for pipeline in (ours, theirs)]
    assert settings[0] == settings[1]
    assert dict(ours.scheduler.config) == dict(theirs.scheduler.config)


@pytest.mark.parametrize('family', FAMILIES)
def test_the_samplers_of_each_family_exist(family):
    import diffusers

    assert all(hasattr(diffusers, name) for name in FAMILIES[family].schedulers)
