"""Whole models, trained on this device: the demo's shapes, and real images if there are some."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.checking.cases import Case, NotHere, Setting, Values
from diffusion.common.files import read_json_lines
from diffusion.common.processes import end_with_parent
from diffusion.demo.stages import REPOSITORY

PROMPTS = ('smiling face with sunglasses', 'red apple', 'dog face', 'umbrella with rain drops')
LINES = 5  # of a failed command, in the row


def demo(setting: Setting) -> list[Case]:
    return [Case('drawn shapes', partial(shapes, setting), 120 if setting.tiny else 200)]


def emoji(setting: Setting) -> list[Case]:
    return [Case('captioned images', partial(crawled, setting), 150 if setting.tiny else 240)]


def run(*words: object) -> None:
    """Run `python WORDS` in the repository; what it prints goes to this process's log.

    Raises:
        RuntimeError: it failed; with the end of what it printed.
    """
    command = [str(word) for word in words]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=REPOSITORY,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=end_with_parent,
    )
    print(done.stdout, flush=True)
    if done.returncode:
        end = ' / '.join(done.stdout.strip().splitlines()[-LINES:])
        raise RuntimeError(f'python {" ".join(command[:3])} ... ended with exit code {done.returncode}: {end}')


def kept_image(setting: Setting, name: str, image: Path) -> Values:
    """Copy it next to the rows, where it survives the machine."""
    path = Path(f'{setting.images}-{name}.png')
    shutil.copy(image, path)
    return {'image': path.name}


def logged(run_folder: Path) -> Values:
    """First and last loss, and the fastest record: the last ones may include a checkpoint."""
    records = list(read_json_lines(run_folder / 'log.jsonl'))
    found = [row['loss/train/total'] for row in records if 'loss/train/total' in row]
    rates = [row['throughput/images_per_sec'] for row in records if row.get('throughput/images_per_sec') is not None]
    return {'first_loss': found[0], 'last_loss': found[-1], 'images_per_sec': max(rates, default=None), 'num_records': len(found)}


def shapes(setting: Setting) -> Values:
    """`make demo` in a folder of its own; the tiny form takes four steps and learns nothing. Killed, it resumes."""
    folder = setting.folder / 'runs' / 'demo'
    small = (
        'train.duration=4ba', 'optimizer.warmup=1ba', 'ema.start=1ba', 'checkpoint.every=2ba', 'log.every=2', 'batch.global_size=16',
        'batch.micro_size=16', 'log.samples.every=null', 'log.samples.steps=2', 'data.workers=0',
    )  # fmt: skip
    options: Sequence[object] = ('--images', 64, '--autoencoder-steps', 1) if setting.tiny else ()
    run('-m', 'diffusion.demo', *options, f'run_folder={folder.resolve()}', *(small if setting.tiny else ()))
    verdict = json.loads((folder / 'judge.json').read_text())
    return {**verdict, **logged(folder), **kept_image(setting, 'demo', folder / 'generated/grid.png')}


def crawled(setting: Setting) -> Values:
    """yamls/emoji-64.yaml, shorter, on the images of --crawl, which `diffusion.demo.crawl` prepares; exported. Killed, it resumes.

    Raises:
        NotHere: no folder was given.
    """
    if setting.crawl is None:
        raise NotHere('no images were given; --crawl FOLDER names a webdataset folder as img2dataset writes it')
    folder = (setting.folder / 'runs' / 'emoji').resolve()
    px, few_steps = (32, ('--autoencoder-steps', 1)) if setting.tiny else (64, ())
    run('-m', 'diffusion.demo.crawl', Path(setting.crawl).resolve(), folder, '--resolution', px, *few_steps)
    duration, average, warmup, save, size = (4, 1, 1, 2, 16) if setting.tiny else (2500, 500, 200, 500, 256)
    run(
        '-m', 'composer.cli', '-n', 1, 'train.py', 'yamls/emoji-64.yaml', f'run_folder={folder}', f'data.resolution={px}',
        f'data.workers={0 if setting.tiny else 4}', f'batch.global_size={size}', f'batch.micro_size={size}',
        f'optimizer.warmup={warmup}ba', f'train.duration={duration}ba',
        f'train.precision={"amp_bf16" if torch.cuda.is_available() else "fp32"}', f'ema.half_life={average}ba', f'ema.start={average}ba',
        f'checkpoint.every={save}ba', f'log.every={save // 2}', 'log.samples.every=null', f'eval.every={duration}ba', 'eval.samples.every=null',
    )  # fmt: skip
    shutil.rmtree(folder / 'model', ignore_errors=True)
    run('-m', 'diffusion.export', folder, folder / 'model')
    shutil.rmtree(folder / 'generated', ignore_errors=True)
    run(
        '-m',
        'diffusion.generate',
        folder / 'model',
        folder / 'generated',
        *(word for prompt in PROMPTS for word in ('--prompt', prompt)),
        '--seed',
        7,
    )
    return {**logged(folder), **kept_image(setting, 'emoji', folder / 'generated/grid.png')}
