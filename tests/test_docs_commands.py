"""Every command that a page prints is run by a test, or says what it needs that no test has; all of them name what there is."""

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from data_prep.encoding.dataset import encode
from data_prep.shapes import vocabulary
from diffusion.cost.assumptions import Assumptions
from diffusion.encoders.random_encoders import write_stand_in
from diffusion.recipe.autoencoder import AutoencoderRecipe
from diffusion.recipe.keys import first_unknown
from diffusion.recipe.schema import EncoderSource, Recipe
from tests import test_readme
from tests.autoencoding.test_run import TINY as TINY_AUTOENCODER
from tests.benchmarks.test_report import row
from tests.conftest import REPOSITORY, RESOLUTION, TINY, run_here
from tests.methods.test_alignment import write_features
from tests.pages import NEEDS, PAGES, blocks, commands, inline, words_of

ELSEWHERE = {page: 'tests/test_readme.py' for page, _ in (getattr(param, 'values', param) for param in test_readme.BLOCKS)}
ELSEWHERE |= {
    'docs/evaluation.md': 'tests/evaluation/test_docs.py',
    'docs/reconstruction.md': 'tests/evaluation/test_docs.py',
    'docs/fleet.md': 'tests/fleet/test_docs.py',
    'docs/clusters.md': 'tests/launch/test_clusters_page.py',
    'docs/serve.md': 'tests/serving/test_page.py',
}
HERE = [page for page in PAGES if page not in ELSEWHERE and commands(page)]
COMMAND = re.compile(r'(?:[A-Z_]+=\S+ )*(?:python3?|composer|make|ray|srun|sbatch|kubectl|sky|docker|podman|pip|curl|git|mkdir|tar) ')
OUTSIDE = ('fleet', 'pip', 'venv')  # commands with commands of their own, or of others

SHORT = ['train.duration=2ba', 'optimizer.warmup=1ba', 'ema.start=0ba', 'batch.global_size=8', 'batch.micro_size=8', 'data.workers=0',
         'train.cpu_threads=1', 'log.every=1', 'log.samples.steps=2']  # fmt: skip
SMALL_VAE = ['autoencoder.num_measured=20', 'data.workers=0', 'train.duration=2ba', 'optimizer.warmup=1ba', 'train.cpu_threads=1']
# What a command of a page is given besides, by a part of it.
MORE = {
    'diffusion.check tutorial/recipe.yaml': ['batch.global_size=8', 'batch.micro_size=8'],
    'train.py tutorial/recipe.yaml': SHORT,
    'train.py yamls/shapes-flow.yaml': [*SHORT, 'log.samples.every=null'],
    'train.py yamls/sd2-base-256.yaml': [
        *TINY,
        'model.encoders.source=encoders',
        'data.kind=synthetic',
        'data.synthetic_samples=64',
        'checkpoint.every=4ba',
        'train.duration=40ba',
        'log.every=20',
    ],
    'yamls/shapes-vae.yaml': SMALL_VAE,
    'yamls/emoji-vae.yaml': [
        *SMALL_VAE,
        'data.resolution=32',
        'data.streams.train.local=IMAGES',
        'eval.streams.held-out.local=IMAGES',
        'eval.every=2ba',
        'log.samples.every=null',
        'batch.global_size=4',
        'batch.micro_size=4',
        'autoencoder.adversarial.filters=8',
    ],
    'vae-f8c4.yaml data.streams': TINY_AUTOENCODER,
    'diffusion.generate': ['--steps', '2'],
    'diffusion.demo ': ['--images', '96', '--autoencoder-steps', '2', *SHORT, 'run_folder=runs/flow', 'batch.global_size=32', 'batch.micro_size=32'],
    'data_prep.convert': ['--processes', '1'],
}
SMALLER = {
    '--count 4096': '--count 48',
    '--count 256': '--count 24',
    '--samples 64': '--samples 16',
    '--steps 20': '--steps 2',
    '--resolution 64': f'--resolution {RESOLUTION} --samples 16',
    '--resolution 256': f'--resolution {RESOLUTION}',
    'keep_every=50000ba': 'keep_every=4ba',
    'composer -n 8 -m ': 'python -m ',
    'composer train.py': 'python train.py',
}


@pytest.fixture(scope='module')
def place(images, encoders_folder, tmp_path_factory):
    """A checkout with what the pages' commands read: images, latents, encoders, features, rows of a sweep."""
    folder = tmp_path_factory.mktemp('pages')
    for name in ('train.py', 'yamls'):
        (folder / name).symlink_to(REPOSITORY / name)
    shapes = folder / 'runs/shapes'
    shapes.mkdir(parents=True)
    write_stand_in(shapes / 'encoders', 'shapes', words=vocabulary())
    encode(images, shapes / 'latents', [RESOLUTION], EncoderSource(str(shapes / 'encoders')))
    for name, target in {
        'encoders': encoders_folder,
        'IMAGES': images,
        'runs/shapes/images': images,
        'runs/emoji-64/held-out/images': images,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(target)
    (folder / 'FEATURES').mkdir()
    write_features(folder / 'FEATURES')
    rows = [row(n, n * rate, px, settings={'num_gpus': n, 'data.resolution': px}) for px, rate in ((256, 800.0), (512, 180.0)) for n in (8, 16, 32)]
    for name in ('h200.jsonl', 'results.jsonl'):
        (folder / name).write_text(''.join(json.dumps(each) + '\n' for each in rows))
    return folder


def start(line, place):
    """Run a page's command, scaled down: our own in this process, but for those that handle signals or import what is elsewhere here."""
    more = [word for part, words in MORE.items() if part in line for word in words]
    for large, small in SMALLER.items():
        line = line.replace(large, small)
    words = [*words_of(line), *more]
    if words[:2] == ['python', '-m'] and words[2] not in ('diffusion.autoencoder', 'diffusion.demo'):
        run_here(*words[2:])
        return
    words[0] = sys.executable if words[0] == 'python' else words[0]
    environment = {**os.environ, 'PYTHONPATH': str(REPOSITORY)}
    result = subprocess.run(words, cwd=place, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, f'{line}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}'


@pytest.mark.timeout(900)
@pytest.mark.parametrize('page', [pytest.param(page, marks=[pytest.mark.long] * (page == 'docs/flow.md')) for page in HERE])
def test_the_commands_run_in_order(page, place, monkeypatch):
    monkeypatch.chdir(place)
    for name, recipe in re.findall(r'as `(\S+\.yaml)`:\n\n```yaml\n(.*?)```', (REPOSITORY / page).read_text(), re.DOTALL):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(recipe)  # which the reader is asked to save
    for block in commands(page):
        for line in block:
            start(line, place)
    made = {
        'docs/tutorial.md': [f'tutorial/{name}' for name in ('images/report.html', 'run/report.html', 'drawings/grid.png', 'scored/evaluation.html')],
        'docs/autoencoders.md': ['LATENTS/manifest.json', 'runs/reconstructed/reconstruction.json'],
        'docs/recipes.md': ['exported-0.08/model_index.json'],
        'docs/methods.md': ['runs/methods/checkpoints/latest.json', 'runs/aligned/checkpoints/latest.json'],
        'docs/plan.md': ['h200-report/report.html'],
    }
    for path in made.get(page, []):
        assert (place / path).exists(), path


def test_every_page_with_commands_has_a_test_that_runs_them():
    for page, test in ELSEWHERE.items():
        assert Path(page).name in (REPOSITORY / test).read_text()
        assert commands(page), page
    assert {*HERE, *ELSEWHERE} == {page for page in PAGES if commands(page)}


@pytest.mark.parametrize('page', PAGES)
def test_commands_are_in_blocks_that_tests_read(page):
    """```sh is run, or begins with what it needs; other blocks show what is no command. `make` is looked at in test_readme.py."""
    for block in blocks(page):
        found = [line for line in block.lines if COMMAND.match(line)]
        if block.language != 'sh':
            assert not [line for line in found if not line.startswith('make ')], f'{page}: write ```sh, with `{NEEDS}...` if no test can run it'
        elif not block.needs:
            assert not [line for line in found if '...' in line.split()], page
        else:
            assert len(block.needs) > 3, page


def test_make_targets_of_all_pages_exist():
    targets = set(re.findall(r'^([\w-]+):', (REPOSITORY / 'Makefile').read_text(), re.MULTILINE))
    for page in PAGES:
        assert set(re.findall(r'^(?:    )?make ([\w-]+)|`make ([\w-]+)`', (REPOSITORY / page).read_text(), re.MULTILINE)) <= {
            pair for target in targets for pair in ((target, ''), ('', target))
        }, page


def answers():
    """What each command says to --help."""
    page = (REPOSITORY / 'docs/commands.md').read_text()
    return dict(re.findall(r'^### (\S+)\n\n```text\n(.*?)^```', page, re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize('page', PAGES)
def test_commands_name_files_options_and_keys_that_there_are(page):
    """Also those that no test runs, and those in sentences."""
    known = answers()
    for line in [*(line for block in blocks(page) if block.language == 'sh' for line in block.lines), *inline(page)]:
        words = words_of(line)
        if 'composer' in words:
            words = words[words.index('composer') + 1 :]
            while words and words[0].startswith('-') and words[0] != '-m':
                words = words[2:]
        elif words[:1] in (['python'], ['python3']):
            words = words[1:]
        else:
            continue
        name = words[1] if words[:1] == ['-m'] else words[0]
        name = name.removesuffix('.py').replace('/', '.') if name != 'train.py' else name
        if name in OUTSIDE or not words:
            continue
        assert name in known or (REPOSITORY / f'{name.replace(".", "/")}.py').exists(), f'{page}: {line}'
        for before, word in pairwise(words):
            option, _, _ = word.partition('=')
            if re.fullmatch(r'--[a-z][\w-]*', option):
                assert re.search(rf'{option}(?![\w-])', known[name]), f'{page}: {name} has no {option}'
            elif re.fullmatch(r'(?:yamls|benchmarks)/[\w./-]+', word):
                assert (REPOSITORY / word).exists(), f'{page}: {word}'
            elif re.fullmatch(r'[a-z_]+(?:\.[\w-]+)+=.*', word) or word.startswith(('name=', 'run_folder=', 'load_path=')):
                schemas = [Assumptions] if before == '--assume' else [Recipe, AutoencoderRecipe]
                assert not all(first_unknown(schema, tuple(option.split('.'))) for schema in schemas), f'{page}: {word}'
