"""What `check` accepts can be trained, and what it refuses says why."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from PIL import Image

from diffusion.check import data_errors, describe
from diffusion.encoders.sizes import KINDS
from diffusion.recipe import load_recipe, rules, to_dict
from tests.conftest import NUM_IMAGES, REPOSITORY, TINY, read_json, run_here, run_python

BASE = REPOSITORY / 'yamls/sd2-base-256.yaml'
SYNTHETIC = ['data.kind=synthetic']


def checked(encoders_folder, *overrides, code=0):
    result = run_here('diffusion.check', BASE, *TINY, f'model.encoders.source={encoders_folder}', *overrides, code=code)
    return result.stderr if code else result.stdout


def recipe_of(encoders_folder, *overrides):
    return load_recipe(BASE, [*TINY, f'model.encoders.source={encoders_folder}', *overrides])


@pytest.mark.parametrize(
    ('override', 'expected'),
    [
        ('data.resolution=65', 'data.resolution: 65 is not a multiple of 8'),
        ('data.streams.train.local=nowhere', 'data.streams.train.local: there is no folder nowhere on this machine'),
        ('data.streams.train.remote=nowhere', 'data.streams.train.remote: there is no folder nowhere'),
        ('load_path=nothing.pt', 'load_path: there is no nothing.pt on this machine'),
        (
            'data.streams.train.remote=s3:/bucket/x',
            'data.streams.train.remote: s3:/bucket/x: is neither a URL nor a folder; did you mean s3://bucket/x?',
        ),
        ('data.streams.train.remote=s4://bucket/x', 's4:// is not known; use a local path or s3://, gs://, oci://'),
        ('data.streams.train.remote=s3://bucket/x?versionId=1', '?versionId=1 would be passed over: URLs of folders have no query'),
        ('checkpoint.folder=s3://bucket/x#y', 'checkpoint.folder: s3://bucket/x#y: #y would be passed over'),
        ('load_path=s3://bucket/x.pt?versionId=1', 'load_path: s3://bucket/x.pt?versionId=1: ?versionId=1 would be passed over'),
        ('checkpoint.folder=gs:/bucket', 'did you mean gs://bucket?'),
        ('data.streams.train.remote=oci:bucket@x/y', 'did you mean oci://bucket@x/y?'),
        ('run_folder=s3://bucket/run', 'run_folder: .* is a URL; expected a folder of this machine'),
        ('log.samples.prompts.fox.red=x', "log.samples.prompts.fox: {'red': 'x'} is not a text or null (command line)"),
        (
            'log.samples.prompts.fox=true',
            "log.samples.prompts.fox: true is not a text or null (command line); if that is the text, write 'True' in quotes",
        ),
        ('model.network=shapes', 'model.network: shapes reads hidden_size 64, and '),
        ('data.resolution=64', 'manifest resolution is 32, data.resolution is 64'),
        ('batch.global_size=64', f'the training data holds {NUM_IMAGES} samples an epoch, fewer than batch.global_size 64; lower it'),
        ('name=../../evil', "name: '../../evil' cannot name a folder of runs/"),
        ('name=..', "name: '..' cannot name a folder of runs/"),
        ('ema.start=null', 'write batches, such as 10000ba (to have no average: ema.half_life=null)'),
        ('optimizer.warmup=null', 'optimizer.warmup: null is not a duration in ba (command line); write batches, such as 10000ba'),
        ('train.duration=null', 'write batches or epochs, such as 10000ba'),
    ],
)
def test_what_cannot_be_trained_is_refused(override, expected, encoders_folder, latents):
    said = checked(encoders_folder, 'data.kind=latents', f'data.streams.train.local={latents}', override, code=2).replace('\n', ' ')
    before, _, after = expected.partition(' .* ')
    assert before in said
    assert after in said


@pytest.fixture
def tampered(latents, tmp_path):
    """A copy of the latents whose manifest promises one sample more than index.json lists."""
    folder = tmp_path / 'tampered'
    shutil.copytree(latents, folder)
    manifest = read_json(folder / 'manifest.json')
    (folder / 'manifest.json').write_text(json.dumps({**manifest, 'num_samples': NUM_IMAGES + 1, 'attempted': manifest['attempted'] + 1}))
    return folder


def test_data_that_training_refuses_are_refused_in_both_sections(encoders_folder, images, latents, tampered, tmp_path):
    parent = tmp_path / 'parent'
    parent.mkdir()
    whole = {**read_json(latents / 'manifest.json'), 'streams': ['32', '64']}
    (parent / 'manifest.json').write_text(json.dumps(whole))
    (tmp_path / 'empty').mkdir()
    refused = {
        parent: 'manifest names the streams 32, 64; name the one to train on: ',
        images: 'manifest kind is images, data.kind is latents; set data.kind=images',
        tampered: f'num_samples is {NUM_IMAGES + 1}, the shards in index.json hold {NUM_IMAGES}',
        tmp_path / 'empty': 'manifest.json: no such file',
    }
    evaluated = ['data.kind=latents', f'data.streams.train.local={latents}', 'eval.every=1ba']
    for folder, expected in refused.items():
        for overrides in (['data.kind=latents', f'data.streams.train.local={folder}'], [*evaluated, f'eval.streams.val.local={folder}']):
            (error,) = data_errors(recipe_of(encoders_folder, *overrides))
            assert expected in error
    assert data_errors(recipe_of(encoders_folder, *evaluated, f'eval.streams.val.local={latents}')) == []
    streams = [f'data.streams.s{number}.local={folder}' for number, folder in enumerate(refused)]
    said = checked(encoders_folder, 'data.kind=latents', 'data.streams.train=null', *streams, 'model.network=shapes', code=2)
    assert all(expected in said for expected in (*refused.values(), 'shapes reads hidden_size 64', '6 errors'))


def test_aspect_buckets_are_looked_at_one_by_one(encoders_folder, aspect_images):
    data = ['data.kind=images', f'data.streams.train.local={aspect_images}', 'data.resolution=128', 'batch.global_size=4']
    whole = [*data, 'data.aspect_buckets=true']
    assert data_errors(recipe_of(encoders_folder, *whole)) == []
    (error,) = data_errors(recipe_of(encoders_folder, *data))
    assert 'train on all of these aspect-ratio buckets with data.aspect_buckets=true' in error
    (error,) = data_errors(recipe_of(encoders_folder, *whole, 'batch.global_size=32'))
    assert 'no aspect bucket of train fills a batch' in error


def test_data_in_object_storage_are_not_looked_at(encoders_folder):
    assert data_errors(recipe_of(encoders_folder, 'data.kind=latents', 'data.streams.train.remote=s3://no-such-bucket/x')) == []


def test_a_warmup_is_compared_with_epochs_of_data_that_are_here(encoders_folder, latents):
    for data in (['data.kind=latents', f'data.streams.train.local={latents}'], [*SYNTHETIC, f'data.synthetic_samples={NUM_IMAGES}']):
        per_epoch = NUM_IMAGES // 8
        epochs = [*data, 'train.duration=2ep', 'ema.half_life=null']
        assert data_errors(recipe_of(encoders_folder, *epochs, f'optimizer.warmup={2 * per_epoch - 1}ba')) == []
        (error,) = data_errors(recipe_of(encoders_folder, *epochs, f'optimizer.warmup={2 * per_epoch}ba'))
        assert error.startswith(f'optimizer.warmup: {2 * per_epoch}ba is not before the end of the run, {2 * per_epoch}ba')


def test_mistakes_of_the_recipe_and_missing_folders_are_listed_together(encoders_folder):
    said = checked(encoders_folder, 'data.kind=latents', 'data.streams.train.local=nowhere', 'optimizer.lr=7', 'load_path=no.pt', 'name=a/b', code=2)
    for key in ('data.streams.train.local: there is no folder nowhere', 'optimizer.lr: 7', 'load_path: there is no no.pt', "name: 'a/b'", '4 errors'):
        assert key in said


def test_a_file_that_is_no_recipe_is_told_apart(tmp_path):
    (tmp_path / 'latin.yaml').write_bytes('name: é'.encode('latin-1'))
    for path, expected in ((tmp_path, 'is a folder, not a YAML file'), (tmp_path / 'latin.yaml', 'is not text (UTF-8)')):
        assert f'{path}: {expected}' in run_here('diffusion.check', path, code=2).stderr


def test_a_network_that_training_cannot_call_is_refused(encoders_folder, tmp_path, monkeypatch):
    tiny = json.loads((rules.NETWORKS / 'tiny.json').read_text())
    changes = {
        'sdxl': {'addition_embed_type': 'text_time', 'addition_time_embed_dim': 8, 'projection_class_embeddings_input_dim': 48},
        'unknown': {'down_block_types': ['NoSuchBlock'] * len(tiny['down_block_types'])},
        'six': {'out_channels': 6},
    }
    for name, change in changes.items():
        (tmp_path / f'{name}.json').write_text(json.dumps({**tiny, **change}))
    monkeypatch.setattr(rules, 'NETWORKS', tmp_path)
    monkeypatch.setattr('diffusion.families.networks.NETWORKS', tmp_path)
    monkeypatch.setattr('diffusion.families.counting.counts.NETWORKS', tmp_path)
    for name in changes:
        said = checked(encoders_folder, *SYNTHETIC, f'model.network={name}', code=2)
        assert f'model.network: {name} ' in said
        assert 'Traceback' not in said


@pytest.mark.parametrize('num_gpus', [1, 8, 128])
@pytest.mark.parametrize('name', ['sd2-base-256', 'sd2-base-512', 'sd2-budget-256', 'sd2-budget-512'])
def test_the_shipped_recipes_fit_the_gpus_of_the_published_runs(name, num_gpus):
    load_recipe(REPOSITORY / f'yamls/{name}.yaml', [*SYNTHETIC, 'load_path=null'], num_gpus)


def test_the_objective_that_a_recipe_has_is_described():
    diffusion = load_recipe(BASE, SYNTHETIC)
    flow = load_recipe(BASE, [*SYNTHETIC, 'model.diffusion=null', 'model.flow.shift=3'])
    for recipe, absent, line in ((diffusion, 'flow', '    prediction: epsilon'), (flow, 'diffusion', '    shift: 3.0')):
        lines = describe(recipe, to_dict(recipe))
        assert any(text.startswith(f'  {absent}: null ') and '# The objective of' in text for text in lines)
        assert any(text.startswith(line) and '  # ' in text for text in lines)


@pytest.mark.parametrize('name', ['prx-budget-256', 'prx-budget-512'])
def test_the_budget_transformers_are_checked_and_a_large_text_encoder_is_warned_of(name, tmp_path):
    """Of the encoders configurations alone are read; T5-XXL's 120 tokens cost more than the network at 256 px, and less at 512."""
    vae = {**KINDS['prx-600m']['vae'], 'down_block_types': ['DownEncoderBlock2D'] * 4, 'up_block_types': ['UpDecoderBlock2D'] * 4}
    configs = {'vae': vae, 'text_encoder': {'model_type': 't5', **KINDS['prx-600m-t5-xxl']['text_encoder']}}
    for folder, config in configs.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / 'config.json').write_text(json.dumps(config))
    (tmp_path / 'tokenizer').mkdir()
    (tmp_path / 'tokenizer/tokenizer_config.json').write_text('{"model_max_length": 120}')
    of = [
        'diffusion.check',
        REPOSITORY / f'yamls/{name}.yaml',
        'data.kind=synthetic',
        'load_path=null',
        f'model.encoders.source={tmp_path}',
        '--gpus=8',
    ]
    printed = run_here(*of, 'model.network=prx-600m-t5-xxl')
    assert 'network: prx-600m-t5-xxl' in printed.stdout
    warning = 'the text encoder takes 1,117.0 GFLOP for a caption of 120 tokens, 1.7 times the 649.0 of the network in a step'
    assert (warning in printed.stderr) == (name == 'prx-budget-256')
    refused = run_here(*of, code=2).stderr
    assert 'prx-600m reads hidden_size 1024, and' in refused
    assert 'says 4096; they must be the same' in refused
    (tmp_path / 'text_encoder/config.json').write_text(json.dumps({'hidden_size': 1024, **KINDS['prx-600m']['text_encoder']}))
    assert 'warning' not in run_here(*of).stderr
    (tmp_path / 'text_encoder/config.json').write_text(json.dumps(configs['text_encoder']))
    (tmp_path / 'tokenizer/tokenizer_config.json').unlink()
    assert 'gives no model_max_length' in run_here(*of, 'model.network=prx-600m-t5-xxl', code=2).stderr


def test_a_sound_recipe_of_counted_networks_needs_no_torch():
    """An adapter too. A network that is not counted is built, and so are encoders in a folder."""
    spy = """
import runpy, sys
for name in ('sd2-base-256', 'sdxl-base-512', 'dreambooth-sd2-lora'):
    sys.argv = ['check', f'yamls/{name}.yaml', '--gpus=8', 'data.kind=synthetic', 'load_path=null', 'batch.global_size=256', 'data.streams={}',
                'data.aspect_buckets=false']
    try:
        runpy.run_module('diffusion.check', run_name='__main__')
    except SystemExit as end:
        assert not end.code, name
    assert not {'torch', 'diffusers', 'transformers'} & {*sys.modules}, name
"""
    assert run_python('-c', spy).stdout.count('is sound for 8 GPUs') == 3


@pytest.mark.parametrize(
    ('overrides', 'refused'),
    [
        (['train.precision=amp_bf16'], 'warning: train.precision: amp_bf16 needs a GPU, and this machine has none'),
        (['train.cudnn_benchmark=true'], 'warning: train.cudnn_benchmark: needs a GPU, and this machine has none'),
        (['train.compile=blocks'], 'warning: train.compile: blocks compiles for minutes on a CPU'),
        ([], ''),
    ],
)
def test_what_this_machine_cannot_do_is_warned_of_unless_others_are_meant(overrides, refused, monkeypatch):
    for has_gpu, options in ((False, []), (True, []), (False, ['--gpus=1'])):
        monkeypatch.setattr('diffusion.common.environment.has_gpu', lambda has_gpu=has_gpu: has_gpu)
        result = run_here('diffusion.check', BASE, *SYNTHETIC, 'train.precision=fp32', 'train.compile=null', *overrides, *options)
        warned = refused and not has_gpu and not options
        assert result.stderr.startswith(refused) if warned else result.stderr == ''
        verdict = 'is sound, but this machine cannot train it' if warned and 'needs a GPU' in refused else 'is sound for 1 GPU'
        assert result.stdout.endswith(f'{verdict}\n')


def test_nothing_of_a_recipe_reaches_the_terminal_as_an_order_to_it(tmp_path):
    evil = r'\e[2J\e]0;t\a\u202e\x85\0'  # as YAML writes it
    path = tmp_path / 'a\x1b[31m\u202e.yaml'
    content = f'base: "{BASE}"\n"key{evil}": 1\nname: "n{evil}"\nrun_folder: "${{no{evil}}}"\nlog: {{project: "p{evil}"}}\n'
    for text in (content, f'base: "b{evil}.yaml"\n', f'"{evil}": 1\n"{evil}": 1\n'):
        path.write_text(text)
        said = run_here('diffusion.check', path, *SYNTHETIC, code=2).stderr
        assert '\\x1b[2J' in said
        assert not re.search('[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]', said)
    path.write_text(f'base: {BASE}\nlog: {{samples: {{prompts: {{"n\\e[2J\\u202e": "\\e[31mred\\u202e"}}}}}}\n')
    shown = run_here('diffusion.check', path, *SYNTHETIC).stdout
    assert not re.search('[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]', shown)
    assert load_recipe(path, SYNTHETIC).log.samples.prompts == {'n\x1b[2J\u202e': '\x1b[31mred\u202e'}  # what is trained with stays


def test_one_gpu_is_singular(encoders_folder):
    assert '# 1 GPU x 2 micro-batches x 4 = 8 samples a batch' in checked(encoders_folder, *SYNTHETIC)
    assert '# 2 GPUs x 1 micro-batch x 4 = 8 samples a batch' in checked(encoders_folder, *SYNTHETIC, '--gpus', '2')


def test_a_reader_may_leave_early():
    """`| head`: a pipe whose other end is closed."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, '-m', 'diffusion.check', str(BASE), '--gpus=8', *SYNTHETIC]
    result = subprocess.run(command, cwd=REPOSITORY, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (result.returncode, result.stderr) == (0, '')


def test_photos_are_decoded_and_their_dataset_is_not_looked_for(encoders_folder, tmp_path):
    for i in range(3):
        Image.new('RGB', (40, 50)).save(tmp_path / f'{i}.png')
    subject = f'data.streams={{train: null, subject: {{photos: {{folder: {tmp_path}, caption: a sks}}}}}}'
    arguments = encoders_folder, 'data.kind=latents', subject, 'train.duration=2ep', 'optimizer.warmup=0ba', 'ema.half_life=null'
    assert checked(*arguments)
    assert 'ema.start: 2ba is not before the end of the run, 2ba' in checked(
        *arguments, 'ema.half_life=1ba', 'ema.start=2ba', code=2
    )  # 3 photos, 8 a batch
    (tmp_path / 'x.heic').write_bytes(b'ftypheic')
    assert f'{tmp_path}/x.heic: not a readable JPEG, PNG or WebP' in checked(*arguments, code=2)
    assert 'photos.folder: there is no folder nowhere' in checked(*arguments, 'data.streams.subject.photos.folder=nowhere', code=2)
