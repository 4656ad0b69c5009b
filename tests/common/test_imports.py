"""Tests of what each entry point has done before PyTorch is imported: said so, and set how many threads it has and how they wait."""

import os
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

STUB = 'import os, sys; print(f\'torch {os.environ.get("OMP_NUM_THREADS")} {os.environ.get("OMP_WAIT_POLICY")}\', file=sys.stderr, flush=True); os._exit(7)'
TRAINS = ['train.py', 'yamls/shapes.yaml', 'model.encoders.source=.', 'train.cpu_threads=2']
ENTRY_POINTS = [
    TRAINS,
    ['-m', 'diffusion.autoencoder', 'yamls/shapes-vae.yaml'],
    ['-m', 'diffusion.evaluate', 'MODEL', '--data', 'DATA', '--out', 'OUT'],
    ['-m', 'diffusion.export', 'RUN', 'OUT'],
    ['-m', 'diffusion.generate', 'MODEL', 'OUT', '--prompt', 'x'],
    ['-m', 'diffusion.reconstruct', 'VAE', '--data', 'DATA', '--out', 'OUT'],
    ['-m', 'diffusion.serve', 'MODEL', '--port', '0'],
    ['-m', 'diffusion.stand_in', 'OUT', '--like', 'tiny'],
    ['-m', 'data_prep.encode', 'SOURCE', 'DEST', '--resolution', '32', '--encoders', '.'],
    ['-m', 'data_prep.recaption', 'SOURCE', 'DEST', '--model', 'MODEL'],
    ['-m', 'benchmarks.step'],
]


@pytest.fixture
def before_torch(images, tmp_path):
    """Lines that `python ARGUMENTS` prints up to the import of PyTorch, which ends it."""
    (tmp_path / 'torch.py').write_text(STUB)
    (tmp_path / 'MODEL').mkdir()
    (tmp_path / 'MODEL/model_index.json').write_text('{}')
    (tmp_path / 'MODEL/export.json').write_text('{}')

    def run(*arguments, **environment):
        kept = {name: value for name, value in os.environ.items() if not name.startswith('OMP_')}
        where = {'PYTHONPATH': f'{tmp_path}:{REPOSITORY}', 'HF_HOME': str(tmp_path)}
        given = [str({'MODEL': tmp_path / 'MODEL', 'OUT': tmp_path / 'OUT', 'SOURCE': images}.get(word, word)) for word in arguments]
        done = subprocess.run(
            [sys.executable, *given], cwd=REPOSITORY, capture_output=True, text=True, env={**kept, **where, **environment}, check=False
        )
        assert done.returncode == 7, done.stderr
        return done.stderr.splitlines()

    return run


@pytest.mark.parametrize('command', ENTRY_POINTS, ids=lambda command: command[command[0] == '-m'])
def test_threads_wait_without_spinning_and_the_wait_is_announced(command, before_torch):
    *said, torch = before_torch(*command)
    assert torch.endswith(' PASSIVE')
    if command != ['-m', 'benchmarks.step']:
        assert any(line.startswith('loading PyTorch') for line in said)


@pytest.mark.parametrize(
    ('environment', 'threads', 'policy'),
    [({}, '2', 'PASSIVE'), ({'OMP_NUM_THREADS': '1'}, '1', 'PASSIVE'), ({'OMP_NUM_THREADS': '2', 'OMP_WAIT_POLICY': 'ACTIVE'}, '2', 'ACTIVE')],
)
def test_what_the_user_set_counts_more_than_the_recipe(environment, threads, policy, before_torch):
    *said, torch = before_torch(*TRAINS, **environment)
    assert torch == f'torch {threads} {policy}'
    ignored = 'OMP_NUM_THREADS=1 counts, not train.cpu_threads=2; unset it for that'
    assert (ignored in said) == (threads == '1')


def test_only_the_first_rank_of_a_machine_speaks(before_torch):
    assert len(before_torch(*TRAINS, LOCAL_RANK='1')) == 1
