"""A whole model, trained on this device: the demo's shapes."""

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from benchmarks.checking.cases import Case, Setting, Values
from diffusion.common.files import read_json_lines
from diffusion.common.processes import end_with_parent
from diffusion.demo.stages import REPOSITORY

# The tiny form takes four steps and learns nothing.
SMALL = (
    '--images', '64', '--autoencoder-steps', '1', 'train.duration=4ba', 'optimizer.warmup=1ba', 'ema.start=1ba', 'checkpoint.every=2ba',
    'log.every=2', 'batch.global_size=16', 'batch.micro_size=16', 'log.samples.every=null', 'log.samples.steps=2', 'data.workers=0',
)  # fmt: skip
LINES = 5  # of a failed demo, in the row


def cases(setting: Setting) -> list[Case]:
    return [Case('drawn shapes', partial(shapes, setting), 120 if setting.tiny else 200)]


def shapes(setting: Setting) -> Values:
    """Run `make demo` in a folder of its own, and return its verdict, losses and picture. Killed, it resumes.

    Raises:
        RuntimeError: it failed; with the end of what it printed.
    """
    folder = (setting.folder / 'runs' / 'demo').resolve()
    done = subprocess.run(
        [sys.executable, '-m', 'diffusion.demo', *(SMALL if setting.tiny else ()), f'run_folder={folder}'],
        cwd=REPOSITORY,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=end_with_parent,
    )
    print(done.stdout, flush=True)  # to this process's log
    if done.returncode:
        raise RuntimeError(f'diffusion.demo ended with exit code {done.returncode}: {" / ".join(done.stdout.strip().splitlines()[-LINES:])}')
    records = list(read_json_lines(folder / 'log.jsonl'))
    losses = [record['loss/train/total'] for record in records if 'loss/train/total' in record]
    rates = [rate for record in records if (rate := record.get('throughput/images_per_sec')) is not None]
    image = Path(f'{setting.images}-demo.png')  # next to the rows, where it survives the machine
    shutil.copy(folder / 'generated/grid.png', image)
    verdict = json.loads((folder / 'judge.json').read_text())
    # The fastest record: the last ones may include a checkpoint.
    return {**verdict, 'first_loss': losses[0], 'last_loss': losses[-1], 'images_per_sec': max(rates, default=None), 'image': image.name}
