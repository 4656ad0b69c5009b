"""What the README says is true: its commands run, its map leads to files, its make targets exist."""

import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from data_prep.shapes import random_scene, vocabulary, write_shard
from diffusion.models.stand_in import write_stand_in
from tests.conftest import REPOSITORY, TINY, run_python

README = (REPOSITORY / 'README.md').read_text()
BLOCKS = [block.splitlines() for block in re.findall(r'```sh\n(.*?)```', README, re.DOTALL)]
COMMANDS = [[line for line in block if not line.startswith('#')] for block in BLOCKS]


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    """A checkout with a small crawl in data/crawl and encoders beside it."""
    import random

    folder = tmp_path_factory.mktemp('readme')
    for name in ('train.py', 'yamls'):
        (folder / name).symlink_to(REPOSITORY / name)
    (folder / 'data/crawl').mkdir(parents=True)
    rng = random.Random(0)
    write_shard(folder / 'data/crawl', 0, [random_scene(rng) for _ in range(24)], 32, seed=0, first_key=0)
    write_stand_in(folder / 'encoders', 'tiny', words=vocabulary())
    return folder


def scaled_down(line: str, place: Path) -> list[str]:
    """The README's command with small pictures and a tiny model in place of the large ones; everything else as printed."""
    line = re.sub(r'--encoders \S+ --revision \S+', f'--encoders {place}/encoders', line)
    line = line.replace('--min-side 256', '--min-side 32').replace('--resolution 256', '--resolution 32').replace('--gpus 8', '--gpus 2')
    words = shlex.split(line)
    if words[0] == 'composer':
        words = [str(Path(sys.executable).with_name('composer')), *words[1:]]
    elif words[0] == 'python':
        words[0] = sys.executable
    if 'train.py' in words or 'diffusion.check' in words:
        words += [*TINY, f'model.encoders.source={place}/encoders', 'log.samples.every=1ba', 'log.samples.steps=2']
    if 'data.kind=synthetic' in words:
        words += ['run_folder=runs/synthetic', 'data.synthetic_samples=64']
    return words


@pytest.mark.parametrize('block', range(len(COMMANDS)))
def test_the_commands_run_in_order(block, place):
    for line in COMMANDS[block]:
        result = subprocess.run(
            scaled_down(line, place), cwd=place, capture_output=True, text=True, check=False, env={**os.environ, 'PYTHONPATH': str(REPOSITORY)}
        )
        assert result.returncode == 0, f'{line}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}'
    if block == 0:
        for made in ('data/latents-256/manifest.json', 'runs/sd2-base-256/report.html', 'models/mine/model_index.json', 'pictures/grid.png'):
            assert (place / made).exists(), made


def test_inline_commands_run(place):
    inline = re.findall(r'`(python -m \S+[^`]*)`', README)
    assert [command.split()[2] for command in inline] == ['diffusion.models.stand_in']  # a new one needs a line here
    command = [sys.executable, '-m', 'diffusion.models.stand_in', str(place / 'other'), '--like', 'tiny']
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    assert (place / 'other/vae/config.json').exists()


def test_every_command_explains_itself():
    commands = ['data_prep.convert', 'data_prep.encode', 'data_prep.shapes', 'diffusion.check', 'diffusion.export', 'diffusion.generate']
    commands += ['diffusion.report', 'diffusion.demo', 'diffusion.demo.autoencoder', 'diffusion.models.stand_in', 'benchmarks.ema']
    with ThreadPoolExecutor(2) as pool:
        for name, result in zip(commands, pool.map(lambda name: run_python('-m', name, '--help'), commands), strict=True):
            assert f'python -m {name}' in result.stdout
            assert len(result.stdout.splitlines()) > 5


def test_make_targets_exist_and_do_something():
    makefile = (REPOSITORY / 'Makefile').read_text()
    for target in re.findall(r'^    make (\w+)', README, re.MULTILINE):
        dry_run = subprocess.run(['make', '-n', target], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
        assert 'Nothing to be done' not in dry_run
        assert dry_run.strip()
        assert f'\n{target}: ' in makefile
    assert 'make test' in (REPOSITORY / '.ci/run').read_text()
    assert '.ci/run' in (REPOSITORY / '.github/workflows/ci.yaml').read_text()


def test_the_map_matches_the_tree():
    tree_map = README.split('## Map')[1].split('Where do I put')[0]
    named = set(re.findall(r'[\w/-]+\.py', tree_map))
    tracked = subprocess.run(
        ['git', 'ls-files', '-co', '--exclude-standard', '*.py'], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.split()
    modules = {Path(path).name for path in tracked if not path.startswith('tests/') and not path.endswith(('__init__.py', '__main__.py', 'setup.py'))}
    hidden = {'judge.py', 'autoencoder.py', 'units.py'}  # of packages that the map describes as a whole
    assert {Path(name).name for name in named} == modules - hidden
    for folder in re.findall(r'^ +([\w/]+/) ', tree_map, re.MULTILINE):
        assert list(REPOSITORY.glob(f'**/{folder}')), folder
    for path in re.findall(r'`((?:docs|yamls|diffusion|data_prep)/[\w./-]+)`', README):
        assert (REPOSITORY / path).exists(), path


def test_nothing_is_left_to_fill_in():
    assert not re.findall(r'@[A-Z]+@|TODO|FIXME', README)


def test_no_module_downloads_or_unpickles_behind_our_back():
    """The few words whose presence in the package would be a defect."""
    for path in [*REPOSITORY.glob('diffusion/**/*.py'), *REPOSITORY.glob('data_prep/**/*.py'), REPOSITORY / 'train.py']:
        text = path.read_text()
        for word in ('weights_only=False', 'trust_remote_code', '_target_', 'time.sleep', 'except:', 'MAX_IMAGE_PIXELS = None', 'pickle.load'):
            assert word not in text, f'{path}: {word}'
        for call in re.findall(r'torch\.load\([^)]*\)', text):
            assert 'weights_only=True' in call
