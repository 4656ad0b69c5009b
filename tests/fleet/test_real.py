"""`fleet run` of real training: an adapter of a tiny model, its export, and diffusers that opens it."""

import json
import os
import random
import signal
import subprocess
import sys
import tarfile

import pytest
import yaml
from diffusers import StableDiffusionPipeline

from data_prep.shapes import draw, random_scene
from diffusion.contracts.errors import BAD_DATA, PREEMPTED
from diffusion.recipe.merging import overlaid
from diffusion.recipe.reading import override_layers
from tests.conftest import REPOSITORY, TINY, read_json
from tests.fleet.conftest import described
from tests.fleet.test_run import processes_of, wait_until

ADAPTER = ['name=tiny', 'data.resolution=128', 'adapter.rank=2', 'adapter.alpha=2', 'data.streams.class.drawn.prompts=[a, b]', 'data.streams.class.drawn.num_images=2',
           'data.streams.class.drawn.steps=1', 'ema.half_life=1ba', 'log.samples.steps=2', 'batch.global_size=4', 'batch.micro_size=2',
           'checkpoint.every=2ba', 'optimizer.lr=1e-2', 'data.streams.subject={photos: {folder: photos, caption: a photo of sks dog}, proportion: 0.5}',
           'data.streams.class.proportion=0.5', 'data.streams.class.drawn.guidance=7.5', 'data.streams.class.drawn.cache=runs/drawn']  # fmt: skip
CAPTION = 'a "sks" photo,\n\ttwo lines: $HOME ${seed}? ~ \\ \x7f \U0001f600'.replace('${seed}', '$seed')


@pytest.fixture
def recipes(tmp_path):
    recipe = {'base': str(REPOSITORY / 'yamls/dreambooth-sd2-lora.yaml')}
    for _, layer in override_layers([*TINY, *ADAPTER], []):
        recipe = overlaid(recipe, layer)
    (tmp_path / 'recipes').mkdir()
    (tmp_path / 'recipes/tiny.yaml').write_text(yaml.safe_dump(json.loads(json.dumps(recipe))))
    return tmp_path / 'recipes'


@pytest.fixture
def job(tmp_path, base):
    rng = random.Random(0)
    (tmp_path / 'photos').mkdir()
    for i in range(5):
        draw(random_scene(rng), 140, rng).save(tmp_path / f'photos/{i}.png')

    def write(**overrides):
        for name, folder in (('subject', tmp_path / 'photos'), ('base', base)):
            with tarfile.open(tmp_path / f'{name}.tar', 'w') as tar:
                tar.add(folder, arcname=name)
        inputs = {name: described(tmp_path / f'{name}.tar') for name in ('subject', 'base')}
        given = {'seed': 7, 'train.duration': '6ba', 'data.streams.subject.photos.caption': CAPTION, **overrides}
        (tmp_path / 'timber.yaml').write_text(yaml.safe_dump({'recipe': 'tiny.yaml', 'overrides': given, 'inputs': inputs}))
        return tmp_path / 'timber.yaml'

    return write


@pytest.fixture
def run(tmp_path, recipes):
    """Start `fleet run` on a machine of that name."""
    started = []

    def start(path, out, machine, *more, **environment):
        words = [
            sys.executable,
            '-m',
            'fleet',
            'run',
            path,
            '--work',
            tmp_path / machine,
            '--outputs',
            tmp_path / out,
            '--recipes',
            recipes,
            *more,
        ]
        output = (tmp_path / f'{machine}.txt').open('w+')
        given = {**os.environ, 'AWS_SECRET_ACCESS_KEY': 'machines-own-secret', **environment}
        process = subprocess.Popen([str(word) for word in words], cwd=REPOSITORY, env=given, stdout=output, stderr=subprocess.STDOUT)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def ended(process, tmp_path, machine, code, timeout_sec=200):
    assert process.wait(timeout_sec) == code, (tmp_path / f'{machine}.txt').read_text()[-6000:]
    return (tmp_path / f'{machine}.txt').read_text()


def until(condition, process, tmp_path, machine):
    """Wait for something that a running process brings about."""
    wait_until(lambda: condition() or process.poll() is not None, 120)
    assert process.poll() is None, (tmp_path / f'{machine}.txt').read_text()[-6000:]


def results(folder):
    found = read_json(folder / 'latest.json')['result']
    return {name: (folder / found['folder'] / name).read_bytes() for name in found['files']}


def losses(log):
    """Losses by batch; after a resume the later line counts."""
    records = map(json.loads, log.decode().splitlines())
    return dict(sorted({record['batch']: record['loss/train/total'] for record in records if 'loss/train/total' in record}.items()))


@pytest.mark.timeout(600)
def test_killed_and_resumed_on_another_machine_the_result_is_the_same_to_the_bit(job, run, tmp_path, base):
    path = job()
    ended(run(path, 'whole', 'm0'), tmp_path, 'm0', 0)
    process = run(path, 'out', 'm1', DIFFUSION_FAILPOINT='save.half@3:sleep')  # while the checkpoint of step 6 is written
    latest = tmp_path / 'out/timber/latest.json'
    until(lambda: latest.exists() and (read_json(latest)['checkpoint'] or {}).get('step') == 4, process, tmp_path, 'm1')
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: processes_of(tmp_path / 'm1') == [], 10)
    said = ended(run(path, 'out', 'm2'), tmp_path, 'm2', 0)
    assert 'resuming at step 4' in said
    assert 'batch 4,' in said or 'batch 4' in said
    assert 'batch 1 (' not in said
    once, twice = results(tmp_path / 'whole/timber'), results(tmp_path / 'out/timber')
    adapter = ['lora/kohya.safetensors', 'lora/pytorch_lora_weights.safetensors']
    assert sorted(once) == ['README.md', 'export.json', 'log.jsonl', *adapter, 'recipe.yaml']
    assert {name for name in once if once[name] != twice[name]} <= {'README.md', 'log.jsonl'}  # they say how many hours it took
    assert losses(once['log.jsonl']) == losses(twice['log.jsonl'])  # of both machines
    assert list(losses(twice['log.jsonl'])) == [1, 2, 3, 4, 5, 6]
    assert yaml.safe_load(once['recipe.yaml'])['data']['streams']['subject']['photos']['caption'] == CAPTION
    everything = b''.join(twice.values()) + said.encode()
    assert b'machines-own-secret' not in everything
    assert str(tmp_path).encode() not in b''.join(twice.values())
    pipeline = StableDiffusionPipeline.from_pretrained(base)
    pipeline.load_lora_weights(
        tmp_path / 'out/timber' / read_json(tmp_path / 'out/timber/latest.json')['result']['folder'] / 'lora',
        weight_name='pytorch_lora_weights.safetensors',
    )
    assert pipeline.get_active_adapters()


@pytest.mark.timeout(600)
def test_asked_to_stop_two_ranks_save_and_the_last_step_is_published(job, run, tmp_path):
    process = run(job(**{'train.duration': '100000ba', 'checkpoint.every': '100000ba'}), 'out', 'm1', '--gpus', '2')
    logs = tmp_path / 'm1/attempts'
    until(lambda: any(len(log.read_text().splitlines()) > 3 for log in logs.glob('*/run/log.jsonl')), process, tmp_path, 'm1')
    process.send_signal(signal.SIGTERM)
    said = ended(process, tmp_path, 'm1', PREEMPTED)
    step = read_json(tmp_path / 'out/timber/latest.json')['checkpoint']['step']
    assert f'saved after batch {step:,}' in said
    assert 'Traceback' not in said


def test_a_photo_that_cannot_be_read_is_65(job, run, tmp_path):
    (tmp_path / 'photos/0.png').write_bytes(b'no image')
    said = ended(run(job(), 'out', 'm1'), tmp_path, 'm1', BAD_DATA)
    assert '0.png' in said
