"""The README and the map are true: their commands run, paths and make targets exist, every room and command is listed."""

import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from data_prep.shapes import draw, random_scene, vocabulary
from diffusion.common.files import read_json_lines
from diffusion.contracts.manifest import Manifest
from diffusion.encoders.random_encoders import write_stand_in
from tests.conftest import REPOSITORY, TINY, run_here
from tests.data_prep.captioner import write_captioner
from tests.families.published import write_base
from tests.pages import commands

README = (REPOSITORY / 'README.md').read_text()
MAP = (REPOSITORY / 'docs/map.md').read_text()
PAGES = [REPOSITORY / 'README.md', REPOSITORY / 'CONTRIBUTING.md', *(REPOSITORY / 'docs').glob('*.md')]
MAX_WORDS = 1300
NUM_IMAGES = 24


PAGES_RUN_HERE = ('README.md', 'docs/finetuning.md', 'docs/data.md', 'docs/recaptioning.md')
BLOCKS: list = [(page, i) for page in PAGES_RUN_HERE for i in range(len(commands(page)))]
BLOCKS += [pytest.param('docs/ray.md', i, marks=pytest.mark.long) for i in range(len(commands('docs/ray.md')))]


TINY_ADAPTER = ['data.resolution=128', 'adapter.rank=2', 'adapter.alpha=2', 'data.streams.class.drawn.prompts=[a, b]',
                'data.streams.class.drawn.num_images=2', 'data.streams.class.drawn.steps=1',
                'ema.half_life=1ba', 'log.samples.steps=2']  # fmt: skip
NOT_HERE = ('benchmarks.throughput',)  # handles signals
# In place of a sweep for a GPU.
SWEEP = {
    'recipe': str(REPOSITORY / 'yamls/shapes.yaml'),
    'set': {'model.network': 'tiny', 'data.kind': 'synthetic', 'batch.global_size': 8, 'batch.micro_size': 4, 'train.cpu_threads': 1},
    'stand_in_encoders': True,
    'warmup_steps': 2,
    'windows': 2,
    'steps_per_window': 2,
    'max_steps': 6,
}


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    """A checkout with encoders, and lists of URLs that a server on loopback answers."""
    folder = tmp_path_factory.mktemp('readme')
    for name in ('train.py', 'yamls', 'data_prep'):
        (folder / name).symlink_to(REPOSITORY / name)
    rng = random.Random(0)
    (folder / 'web').mkdir()
    scenes = [random_scene(rng) for _ in range(NUM_IMAGES)]
    for i, scene in enumerate(scenes):
        draw(scene, 32, rng).save(folder / f'web/{i}.jpg')
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder / 'web'))
    with ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f'http://127.0.0.1:{server.server_address[1]}'
        laion = {'punsafe': 0.01, 'AESTHETIC_SCORE': 5.0}
        rows = [{'URL': f'{url}/{i}.jpg', 'TEXT': scene.caption, **laion} for i, scene in enumerate(scenes)]
        (folder / 'lists').mkdir()
        for path in (folder / 'urls.parquet', folder / 'lists/part-00000.parquet'):
            pq.write_table(pa.Table.from_pylist(rows), path)
        write_stand_in(folder / 'stand-in', 'tiny', words=vocabulary())
        write_base(folder / 'encoders', 'tiny', folder / 'stand-in')
        write_captioner(folder / 'models/blip')
        (folder / 'photos').mkdir()
        for i, scene in enumerate(scenes[:5]):
            draw(scene, 140, rng).save(folder / f'photos/{i}.png')
        (folder / 'sweep.yaml').write_text(yaml.safe_dump(SWEEP))
        yield folder
        server.shutdown()


def scaled_down(line: str, place: Path) -> list[str]:
    """A page's command with small images and a tiny model in place of the large ones; everything else as printed."""
    line = re.sub(r'--encoders \S+ --revision \S+', f'--encoders {place}/encoders', line)
    for large, small in (
        ('--min-side 256', '--min-side 32'),
        ('--resolution 256 512', '--resolution 16 32'),
        ('--resolution 256', '--resolution 32'),
        ('benchmarks/sweeps/h200-single.yaml', f'{place}/sweep.yaml'),
        ('--samples 1000', '--samples 16 --steps 2'),
    ):
        line = line.replace(large, small)
    line = line.replace('latents/256', 'latents/32').replace('--gpus 8', '--gpus 2').replace('--processes 16', '--processes 1')
    words = shlex.split(line)
    if words[0] == 'composer':
        words = [sys.executable, '-m', 'composer.cli', *words[1:]]
    elif words[0] == 'python':
        words[0] = sys.executable
    if 'data_prep.download' in words:
        words += ['--allow-network', '127.0.0.0/8']
    if ('train.py' in words or 'diffusion.check' in words) and 'photos' not in line:
        words += [*TINY, f'model.encoders.source={place}/encoders', 'log.samples.every=1ba', 'log.samples.steps=2']
    if 'diffusion.plan' in words and 'data.streams.train.local=data/latents-256' in words:
        words += [*TINY, f'model.encoders.source={place}/encoders']
    if 'data.streams.subject.photos.folder=photos' in words:
        words += [*TINY, *TINY_ADAPTER, f'model.encoders.source={place}/encoders']
    if 'data.kind=synthetic' in words:
        words += ['run_folder=runs/synthetic', 'data.synthetic_samples=64']
    if '--throughput' in words:  # a plan for what the sweep measured
        words += ['model.network=tiny', 'data.resolution=32', 'data.kind=synthetic', f'model.encoders.source={place}/encoders']
        words.append('model.encoders.revision=null')
    return words


@pytest.fixture(scope='module')
def started():
    """The commands and launched scripts that have been started as a reader does."""
    return set()


@pytest.mark.timeout(600)  # the first block is two minutes of one core
@pytest.mark.parametrize(('page', 'block'), BLOCKS)
def test_the_commands_run_in_order(page, block, place, started, s3, monkeypatch):
    """Each is once a process that has imported nothing; what comes again does its work in this process, or without the launcher."""
    monkeypatch.chdir(place)
    for line in commands(page)[block]:
        words = scaled_down(line, place)
        launcher = [sys.executable, '-m', 'composer.cli']
        command = tuple(words[:4] if words[:3] == launcher else words[:3])
        again = command in started
        started.add(command)
        if again and words[1] == '-m' and words[:3] != launcher and words[2] not in NOT_HERE:
            run_here(*words[2:])
            continue
        if again and words[:3] == launcher:
            words = [sys.executable, *words[3:]]
        result = subprocess.run(words, cwd=place, capture_output=True, text=True, check=False, env={**os.environ, 'PYTHONPATH': str(REPOSITORY)})
        assert result.returncode == 0, f'{line}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}'
    made = {
        ('README.md', 0): [
            'data/latents-256/report.html',
            'runs/sd2-base-256/report.html',
            'models/mine/model_index.json',
            'images/grid.png',
            'scored/evaluation.html',
        ],
        ('README.md', 2): ['models/my-dog/lora/kohya.safetensors', 'models/my-dog/model_index.json'],
        ('README.md', 3): ['h200-report/report.html'],
        ('docs/data.md', 0): ['images.html'],
        ('docs/recaptioning.md', 0): ['data/described/manifest.json', 'data/recaptioned/manifest.json'],
    }
    if (page, block) == ('README.md', 3):  # one process; a busy machine may be unsteady
        (row,) = read_json_lines(place / 'h200.jsonl')
        assert (row['status'] in ('measured', 'unsteady'), row['num_gpus']) == (True, 1)
    for path in made.get((page, block), []):
        assert (place / path).exists(), path
    if (page, block) == ('docs/data.md', 0):
        for stream in ('16', '32'):
            assert Manifest.read(f's3://bucket/latents/{stream}').num_samples == NUM_IMAGES
    shutil.rmtree(place / 'data', ignore_errors=True)


def test_inline_commands_run(place):
    inline = re.findall(r'`(python -m \S+[^`]*)`', README)
    # A new one needs a line here; tests/serving/test_page.py runs diffusion.serve.
    assert [command.split()[2] for command in inline] == ['diffusion.serve', 'diffusion.stand_in']
    command = [sys.executable, '-m', 'diffusion.stand_in', str(place / 'other'), '--like', 'tiny']
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    assert (place / 'other/vae/config.json').exists()


def test_make_targets_exist_and_do_something():
    makefile = (REPOSITORY / 'Makefile').read_text()
    for target in re.findall(r'^    make ([\w-]+)', README, re.MULTILINE):
        dry_run = subprocess.run(['make', '-n', target], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
        assert 'Nothing to be done' not in dry_run
        assert dry_run.strip()
        assert f'\n{target}: ' in makefile
    assert 'make test' in (REPOSITORY / '.ci/run').read_text()
    assert '.ci/run' in (REPOSITORY / '.github/workflows/ci.yaml').read_text()


def test_the_map_lists_every_room_and_command():
    tracked = subprocess.run(
        ['git', 'ls-files', '-co', '--exclude-standard', '*.py'], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.split()
    paths = [Path(path) for path in tracked if path.startswith(('diffusion/', 'data_prep/', 'fleet/', 'benchmarks/'))]
    rooms = {f'{path.parts[0]}/{path.parts[1]}/' for path in paths if len(path.parts) > 2}
    commands = {str(path) for path in paths if len(path.parts) == 2 and path.parts[0] != 'benchmarks' and path.name != '__init__.py'}
    listed = set(re.findall(r'^\| `([\w/.]+)`', MAP, re.MULTILINE))
    assert rooms | commands == {
        path for path in listed if path.startswith(('diffusion/', 'data_prep/', 'fleet/', 'benchmarks/')) and path.count('/') > path.endswith('/')
    }


def test_the_map_lists_the_rooms_in_the_order_of_their_imports():
    """A room may import those below it; of rooms that stand side by side in pyproject.toml the order is free."""
    order = re.findall(r'"(diffusion\.[^"]*)"', (REPOSITORY / 'pyproject.toml').read_text().partition('layers = [')[2].partition(']')[0])
    level = {name.strip(): i for i, layer in enumerate(order) for name in layer.split('|')}
    listed = re.findall(r'^\| `(diffusion/\w+)/`', MAP, re.MULTILINE)
    assert listed == sorted(listed, key=lambda room: level[room.replace('/', '.')])


def test_paths_and_links_of_the_pages_exist():
    for page in PAGES:
        text = page.read_text()
        for path in re.findall(r'`((?:docs|yamls|launch|diffusion|data_prep|fleet|benchmarks|tests)/[\w./-]+)`', text):
            assert (REPOSITORY / path).exists(), f'{page.name}: {path}'
        for link in re.findall(r'\]\((?!https?:)([^)#]+)', text):
            assert (page.parent / link).exists(), f'{page.name}: {link}'


def test_the_readme_is_short():
    assert len(README.split()) <= MAX_WORDS


def test_every_promise_names_tests_that_exist():
    text = (REPOSITORY / 'docs/reliability.md').read_text()
    promises = re.findall(r'^- .*(?:\n  .*)*', text[text.index('## Promises') : text.index('## Not promised')], re.MULTILINE)
    assert len(promises) >= 39
    for row in promises:
        file, held = '', 0
        for name in re.findall(r'`([\w/]*test_\w+\.py)?(?:::(test_\w+))?`', row):
            file = name[0] or file
            found = [path for path in (REPOSITORY / file, REPOSITORY / 'tests/faults' / file) if path.is_file()]
            assert found, row
            assert f'def {name[1]}(' in found[0].read_text() if name[1] else True, f'{file} has no {name[1]}'
            held += 1
        assert held, row


def test_nothing_is_left_to_fill_in():
    for page in PAGES:
        assert not re.findall(r'@[A-Z]+@|TODO|FIXME', page.read_text()), page


# To hang on request; to wait for another process, as load.py for the first rank of its node, or for storage or the Hub before the next try.
MAY_SLEEP = (
    'fleet.py',  # of the demo, which waits for its processes
    'guards.py',
    'http.py',
    'load.py',
    'peers.py',
    'pool.py',
    'prepare.py',
    'pretrained.py',
    'processes.py',
    'ray_cluster.py',
    'storage.py',
    'strict.py',
    'verified.py',
    'watcher.py',
)


def test_no_module_downloads_or_unpickles_behind_our_back():
    """The few words whose presence in the package would be a defect."""
    for path in [
        *REPOSITORY.glob('diffusion/**/*.py'),
        *REPOSITORY.glob('data_prep/**/*.py'),
        *REPOSITORY.glob('fleet/**/*.py'),
        REPOSITORY / 'train.py',
    ]:
        text = path.read_text().replace('trust_remote_code=False', '').replace("'trust_remote_code'", '')  # to say so, or to refuse it, is no defect
        for word in ('weights_only=False', 'trust_remote_code', '_target_', 'time.sleep', 'except:', 'MAX_IMAGE_PIXELS = None', 'pickle.load'):
            assert word not in text or (word == 'time.sleep' and path.name in MAY_SLEEP), f'{path}: {word}'
        for call in re.findall(r'torch\.load\([^)]*\)', text):
            assert 'weights_only=True' in call
