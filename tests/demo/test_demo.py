"""The demo end to end, too short to learn anything: what matters is that every stage hands over to the next."""

import os
import subprocess
import sys
import time

import pytest

from diffusion.recipe import load_recipe
from tests.conftest import REPOSITORY, read_json, run_python

ARGUMENTS = ['-m', 'diffusion.demo', '--images', '96', '--autoencoder-steps', '2']
SHORT = ['train.duration=12ba', 'checkpoint.every=2ba', 'optimizer.warmup=1ba', 'ema.start=2ba', 'log.every=1', 'log.samples.every=6ba',
         'log.samples.steps=2', 'batch.global_size=32', 'batch.micro_size=32']  # fmt: skip


@pytest.mark.timeout(900)
def test_killed_in_training_and_run_again_it_reports(tmp_path):
    command = [*ARGUMENTS, f'run_folder={tmp_path}/run', *SHORT]
    with subprocess.Popen([sys.executable, *command], cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 480  # a busy machine
            while not (tmp_path / 'run/checkpoints/latest.json').exists():
                assert process.poll() is None, 'the demo ended by itself'
                assert time.monotonic() < deadline
                time.sleep(0.02)
        finally:
            process.kill()  # the demo alone: the launcher and the training must not outlive it
    deadline = time.monotonic() + 30  # the loader's workers look for their parent every few seconds
    while alive := [pid for pid in filter(str.isdigit, os.listdir('/proc')) if f'{tmp_path}/run' in _command_line(pid)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.2)

    out = run_python(*command).stdout
    assert 'Convert them to MDS shards' not in out  # done before
    assert 'is trained to 12ba' in out
    report = tmp_path / 'run/report.html'
    assert f'Open {report}' in out
    page = report.read_text()
    for expected in ('The exported model', 'Samples over training', 'Loss, speed and memory', 'Time and money', 'right background'):
        assert expected in page
    judged = read_json(tmp_path / 'run/judge.json')
    assert judged['num_images'] == judged['real']['num_images'] - 8 == 192
    assert judged['real']['everything'] > 0.98 > judged['noise']['everything'] == 0
    [score] = read_json(tmp_path / 'run/scored/evaluation.json')['scores']
    assert score['metrics']['right_colour']['value'] == judged['foreground']
    assert 'kid@random-conv' in score['metrics']
    assert 'shapes as they should be' in page
    assert 'the same after the autoencoder' in page
    assert page.count('ema weights</figcaption>') == 2 * len(load_recipe(tmp_path / 'run/recipe.yaml').log.samples.prompts)

    again = run_python(*command, 'log.every=2').stdout  # which does not shape the result
    assert '== Train\n' not in again
    assert '== Generate' not in again
    assert '== Score' not in again
    assert f'Open {report}' in again


def _command_line(pid: str) -> str:
    try:
        with open(f'/proc/{pid}/cmdline') as file:
            return file.read()
    except OSError:
        return ''
