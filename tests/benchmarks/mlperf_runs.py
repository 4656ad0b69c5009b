"""Run folders as train.py and diffusion.evaluate leave them, made up: the record of runs that nobody has hours for."""

import dataclasses
import functools
import json

from benchmarks.mlperf.runs import RECIPE
from diffusion.contracts.manifest import Manifest
from diffusion.evaluation.job.request import PRESETS
from diffusion.recipe import load_recipe, to_yaml

BEGAN, STEP_SEC = 1_800_000_000.0, 2.0
FAILS, PASSES = (120.0, 0.12), (85.0, 0.17)


def write_dataset(folder, num_samples=6_513_144):
    folder.mkdir(parents=True, exist_ok=True)
    manifest = Manifest('latents', {}, num_samples, num_samples, {}, {}, [], '0')
    (folder / 'manifest.json').write_text(manifest.to_json())
    return folder


def write_run(folder, data, seed=1, scores=(FAILS, FAILS, FAILS, PASSES), changes=(), events=None, environment=None):
    """A run that saved a checkpoint for each of `scores`, (FID, cosine) or None where it was not evaluated."""
    recipe = recipe_with(*changes)
    recipe = dataclasses.replace(recipe, seed=seed, run_folder=str(folder))
    recipe.data.streams['train'].local = str(data)
    folder.mkdir(parents=True)
    (folder / 'recipe.yaml').write_text(to_yaml(recipe))
    (folder / 'environment.json').write_text(json.dumps(environment or {'num_gpus': 8, 'device': 'NVIDIA H200', 'micro_batch': 32}))
    interval = recipe.checkpoint.every.value
    lines = events or list(saves(interval, len(scores)))
    (folder / 'events.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    for number, score in enumerate(scores, start=1):
        if score is not None:
            write_evaluation(folder, number * interval, *score)
    return folder


@functools.cache
def recipe_with(*changes):
    return load_recipe(RECIPE, ['data.streams.train.local=.', *changes])


def saves(interval, count, process='a'):
    """Lines of one process that started 30 s before its first line, and was ready after 90."""
    yield {'event': 'start', 'process': process, 'time': BEGAN + 30, 'gpus': 8, 'sec': {'start': 30.0}}
    yield {'event': 'begin', 'process': process, 'time': BEGAN + 120, 'batch': 0, 'steps': 0, 'saved': 0, 'sec': {'start': 90.0}}
    for number in range(1, count + 1):
        batch, time = number * interval, BEGAN + 120 + number * interval * STEP_SEC
        yield line('save', batch, time, batch, process)


def line(event, batch, time, saved, process='a'):
    return {'event': event, 'process': process, 'time': time, 'batch': batch, 'steps': 0, 'saved': saved, 'sec': {'save': 0.0}}


def write_evaluation(folder, batches, fid, cosine, preset='mlperf', name=None, digest='d'):
    out = folder / 'evaluations' / (name or f'ba{batches:08d}')
    out.mkdir(parents=True)
    protocol = dataclasses.asdict(PRESETS['mlperf']) | {'preset': preset, 'seed': 0, 'resolution': 512, 'precision': 'fp32', 'resize': ''}
    protocol |= {'chunk': 16, 'extractors': {}, 'prompts': {}, 'real': {}}
    metrics = {'fid': {'value': fid}, 'clip@openclip-vit-h14': {'value': 100 * cosine}}
    result = {
        'version': 1,
        'protocol': protocol,
        'digest': digest,
        'model': {'where': 'model', 'sha256': 'm', 'label': 'model', 'batches': batches},
        'real': {'where': 'data', 'identity': 'i', 'count': 30_000, 'left_out': ''},
        'scores': [{'guidance': 8.0, 'count': 30_000, 'metrics': metrics}],
        'neighbours': None,
        'samples': {},
        'seconds': 1.0,
        'images_per_sec': 1.0,
        'environment': {},
    }
    (out / 'evaluation.json').write_text(json.dumps(result))
