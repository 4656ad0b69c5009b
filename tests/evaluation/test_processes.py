"""Evaluations in processes of their own: under the launcher, killed, from a cold start; and their memory."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import REPOSITORY, read_json, run_here, run_python
from tests.evaluation.test_evaluate import OPTIONS, figures_of, files_of, scored  # noqa: F401
from tests.test_after_training import run  # noqa: F401


def start(out, base, images, *launcher, code=0, **environment):
    arguments = (base, '--data', images, '--out', out, *OPTIONS, '--keep-images')
    return run_python(*launcher, *arguments, code=code, **environment)


@pytest.mark.long
def test_two_ranks_under_the_launcher_draw_the_same(scored, base, images, tmp_path):  # noqa: F811
    start(tmp_path / 'out', base, images, '-m', 'composer.cli', '-n', 2, 'diffusion/evaluate.py')
    assert files_of(tmp_path / 'out') == files_of(scored[0])
    assert figures_of(tmp_path / 'out') == figures_of(scored[0])


@pytest.mark.long
@pytest.mark.parametrize('place', ['evaluation.real', 'evaluation.drawn@1', 'evaluation.drawn@5'])
def test_a_killed_evaluation_resumes(scored, base, images, tmp_path, place):  # noqa: F811
    launched = '-m', 'diffusion.evaluate'
    start(tmp_path / 'out', base, images, *launched, code=-signal.SIGKILL, DIFFUSION_FAILPOINT=f'{place}:kill')
    assert not (tmp_path / 'out/evaluation.json').exists()
    start(tmp_path / 'out', base, images, *launched)
    assert files_of(tmp_path / 'out') == files_of(scored[0])
    assert figures_of(tmp_path / 'out') == figures_of(scored[0])


@pytest.mark.long
@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_stop_is_answered_and_costs_nothing(scored, base, images, tmp_path, number):  # noqa: F811
    out = tmp_path / 'out'
    words = [sys.executable, '-m', 'diffusion.evaluate', base, '--data', images, '--out', out, *OPTIONS, '--keep-images']
    environment = {**os.environ, 'DIFFUSION_FAILPOINT': 'evaluation.drawn@2:sleep'}
    with subprocess.Popen([*map(str, words)], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True, env=environment) as process:
        deadline = time.monotonic() + 120
        while len(list(out.glob('drawn/*/*.safetensors'))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert f'{out}: stopped; nothing is lost, run the same command again to resume' in said
    assert 'Traceback' not in said
    run_here(*words[2:])
    assert files_of(out) == files_of(scored[0])
    assert figures_of(out) == figures_of(scored[0])


@pytest.mark.long
def test_a_run_is_exported_and_scored_from_a_cold_start(run, images, tmp_path):  # noqa: F811
    """The same images as of its export; a resumed evaluation keeps to the checkpoint that it was begun with."""
    arguments = '-m', 'diffusion.evaluate', run, '--data', images, '--out', tmp_path / 'out', *OPTIONS
    assert 'kid@random-conv' in run_python(*arguments).stdout
    found = read_json(tmp_path / 'out/evaluation.json')
    assert found['model']['batches'] == 6
    assert found['protocol']['resolution'] == 32
    run_python('-m', 'diffusion.export', run, tmp_path / 'export')
    run_python('-m', 'diffusion.evaluate', tmp_path / 'export', '--data', images, '--out', tmp_path / 'exported', *OPTIONS)
    assert read_json(tmp_path / 'exported/evaluation.json')['scores'] == found['scores']
    run_here(*arguments[1:])
    said = run_here('diffusion.evaluate', run / 'checkpoints', *arguments[3:], code=2).stderr
    assert f'was begun with {run}, now it is {run}/checkpoints; name another OUT' in said


@pytest.mark.long
def test_memory_does_not_grow_with_the_images(base, tmp_path):
    """Features grow, and some copies of them in float64 while a distance is computed: 28 KB an image with 368 features."""
    few, many = (int(run_python('-m', 'tests.evaluation.memory', base, count, tmp_path / str(count)).stdout.split()[-1]) for count in (1_000, 8_000))
    assert many - few < 400  # MB
    assert read_json(tmp_path / '8000/out/evaluation.json')['scores'][0]['count'] == 8_000
