"""The command that a message names to resume a run."""

import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

SCRIPT = """import os, sys
sys.path.insert(0, 'REPOSITORY')
from diffusion.common.processes import command
os.environ['LOCAL_RANK'] = '0'  # as Composer does when it begins, with or without a launcher
print(command())
"""
PARENT = 'import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]], check=True)'


@pytest.mark.parametrize(
    ('launched', 'named'),
    [({}, 'python train.py recipe.yaml a=1'), ({'LOCAL_RANK': '0'}, 'python -u parent.py train.py recipe.yaml a=1')],
    ids=['wrapper', 'launcher'],
)
def test_a_launcher_is_named_and_a_wrapper_is_not(launched, named, tmp_path):
    (tmp_path / 'train.py').write_text(SCRIPT.replace('REPOSITORY', str(REPOSITORY)))
    (tmp_path / 'parent.py').write_text(PARENT)
    arguments = [sys.executable, '-u', 'parent.py', 'train.py', 'recipe.yaml', 'a=1']
    said = subprocess.run(arguments, cwd=tmp_path, env={'PATH': '/usr/bin:/bin', **launched}, capture_output=True, text=True, check=True).stdout
    assert said.strip().replace('python3.12 ', 'python ').replace('python3 ', 'python ') == named
