"""Shared fixtures: small encoders and datasets made on the spot; no test needs a network, a GPU or a download."""

import os
from pathlib import Path

# torch-fidelity installs a package `tests` of its own: a child that starts while a test has changed the folder, as the fork server may, would import that one.
os.environ['PYTHONPATH'] = str(Path(__file__).parents[1])
os.environ.setdefault('OMP_NUM_THREADS', '1')  # before torch is imported: processes must not fight over the cores
os.environ['HF_HUB_OFFLINE'] = '1'
os.environ['WANDB_MODE'] = 'offline'
os.environ['RAY_worker_niceness'] = '0'  # noqa: SIM112  # Ray's name; it is 15 otherwise, and its workers would wait for all other tests
os.environ['RAY_AUTH_MODE'] = 'token'  # Ray reads it when it is imported

import gc
import io
import json
import multiprocessing
import random
import resource
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from diffusion.common.processes import STOP_SIGNALS
from diffusion.recipe import Recipe, load_recipe
from diffusion.recipe.schema import EncoderSource
from tests.selection import pytest_addoption, pytest_collection_modifyitems, pytest_configure  # noqa: F401  # hooks

if TYPE_CHECKING:  # what fixtures import themselves, so that the tests of a room without PyTorch begin in a second
    from diffusion.encoders.frozen import FrozenEncoders
    from tests.common.s3_server import S3Server

REPOSITORY = Path(__file__).parents[1]
NUM_IMAGES = 48
CAPTION = 'a photo of a sks'
OWN_CAPTION = 'a large sks at the left'
RESOLUTION = 32

# A process has one fork server, and what that has not imported each of its children imports again, 15 s on a busy machine: and data_prep's workers
# or the tests of faults may start it: it is this one in both cases.
FORK_SERVER: Any = multiprocessing.get_context('forkserver')
FORK_SERVER.set_forkserver_preload(
    ['data_prep.encoding.dataset', 'data_prep.converting.conversion', 'tests.faults.children', 'tests.faults.stock', 'train']
)
FORK_SERVER.set_forkserver_preload = lambda _: None

# Streaming keeps the segments of every dataset open until its process ends, and this one makes hundreds.
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)


def pytest_collection() -> None:
    gc.disable()  # a fifth of the time of PyTorch's, diffusers' and Composer's imports


def pytest_collection_finish() -> None:
    gc.freeze()  # a million objects of libraries and tests, which each full collection would look through
    gc.enable()


@pytest.fixture(autouse=True)
def same_signals():
    """What a test leaves ignored, the processes of later tests would be started to ignore."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        if handler is not None:  # one that Python has not installed
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def few_segments():
    """Streaming looks at the segments of every number in use and keeps them open: with hundreds of its datasets in one process, files run out."""
    prefix = sys.modules.get('streaming.base.shared.prefix')
    if prefix and prefix.SharedMemory.__module__ != __name__:
        kept_open = prefix.SharedMemory

        def closed_after_a_look(name: str, create: bool | None = None, size: int = 0) -> Any:
            return kept_open(name, create, size, auto_cleanup=create is not False)

        prefix.SharedMemory = closed_after_a_look


@pytest.fixture(scope='session')
def encoders_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny random VAE, text encoder and tokenizer in the diffusers layout."""
    folder = tmp_path_factory.mktemp('encoders')
    from data_prep.shapes import vocabulary
    from diffusion.encoders.random_encoders import write_stand_in

    write_stand_in(folder, 'tiny', words=vocabulary())
    return folder


@pytest.fixture(scope='session')
def encoders(encoders_folder: Path) -> 'FrozenEncoders':
    from diffusion.encoders.frozen import FrozenEncoders

    return FrozenEncoders.load(EncoderSource(str(encoders_folder)))


@pytest.fixture(scope='session')
def base(encoders_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same encoders with a tiny random network: a whole pipeline, which adapters belong to."""
    from tests.families.published import write_base

    return write_base(tmp_path_factory.mktemp('base'), 'tiny', encoders_folder)


@pytest.fixture(scope='session')
def base_xl(encoders_xl_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.families.published import write_base

    return write_base(tmp_path_factory.mktemp('base-xl'), 'tiny-xl', encoders_xl_folder)


class Bases(dict[str, Path]):
    """Whole pipelines by the names of their tiny networks, each made when it is first asked for, with stand-in encoders."""

    def __init__(self, made: dict[str, Path], parent: pytest.TempPathFactory):
        super().__init__(made)
        self.parent = parent

    def __missing__(self, network: str) -> Path:
        from data_prep.shapes import vocabulary
        from diffusion.encoders.random_encoders import write_stand_in
        from diffusion.families.networks import find_network
        from tests.families.published import write_base

        encoders = self.parent.mktemp(f'encoders-{network}')
        write_stand_in(encoders, find_network(network).encoders, words=vocabulary())
        self[network] = write_base(self.parent.mktemp(f'base-{network}'), network, encoders)
        return self[network]


@pytest.fixture(scope='session')
def bases(base: Path, base_xl: Path, tmp_path_factory: pytest.TempPathFactory) -> Bases:
    return Bases({'tiny': base, 'tiny-xl': base_xl}, tmp_path_factory)


@pytest.fixture(scope='session')
def encoders_xl_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with two text encoders and tokenizers, of Stable Diffusion XL's kind."""
    folder = tmp_path_factory.mktemp('encoders-xl')
    from data_prep.shapes import vocabulary
    from diffusion.encoders.random_encoders import write_stand_in

    write_stand_in(folder, 'tiny-xl', words=vocabulary())
    return folder


@pytest.fixture(scope='session')
def crawl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of captioned shapes in img2dataset's webdataset layout."""
    from data_prep.shapes import random_scene, write_shard

    folder = tmp_path_factory.mktemp('crawl')
    rng = random.Random(0)
    half = NUM_IMAGES // 2
    for shard in range(2):
        write_shard(folder, shard, [random_scene(rng) for _ in range(half)], RESOLUTION, seed=0, first_key=shard * half)
    return folder


@pytest.fixture(scope='session')
def images(crawl: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image MDS of NUM_IMAGES."""
    from data_prep.converting.conversion import convert

    folder = tmp_path_factory.mktemp('mds') / 'images'
    convert(crawl, folder)
    return folder


@pytest.fixture(scope='session')
def latents(images: Path, encoders_folder: Path) -> Path:
    """The same as latents."""
    from data_prep.encoding.dataset import encode

    folder = images.parent / 'latents'
    encode(images, folder, [RESOLUTION], EncoderSource(str(encoders_folder)))
    return folder


ASPECT_SIDE = 128
ASPECT_IMAGES = {'128x128': 9, '192x64': 6, '64x192': 3, '64x256': 5}  # in each bucket; none in the fifth, 256x64


@pytest.fixture(scope='session')
def aspect_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image MDS of aspect buckets, several shards each; an image is a little larger than its bucket, and its caption names that."""
    from data_prep.converting.buckets import AspectBuckets
    from data_prep.converting.conversion import Options, convert

    folder = tmp_path_factory.mktemp('aspect')
    rng = np.random.default_rng(0)
    (folder / 'drawn').mkdir()
    for bucket, count in ASPECT_IMAGES.items():
        width, height = map(int, bucket.split('x'))
        for i in range(count):
            size = height + 2 * i + 1, width + i
            Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(folder / f'drawn/{bucket}-{i}.png')
            (folder / f'drawn/{bucket}-{i}.txt').write_text(f'{bucket} {i}')
    convert(folder / 'drawn', folder / 'images', Options(buckets=AspectBuckets(ASPECT_SIDE), shard_bytes=200_000))
    return folder / 'images'


@pytest.fixture(scope='session')
def aspect_latents(aspect_images: Path, encoders_folder: Path) -> Path:
    """The same as latents, each at the size of its bucket."""
    from data_prep.encoding.dataset import encode

    encode(aspect_images, aspect_images.parent / 'latents', None, EncoderSource(str(encoders_folder)))
    return aspect_images.parent / 'latents'


TINY = [
    'model.network=tiny',
    'model.encoders.revision=null',
    f'data.resolution={RESOLUTION}',
    'data.workers=0',
    'data.canonical_nodes=1',
    'batch.global_size=8',
    'batch.micro_size=4',
    'optimizer.warmup=1ba',
    'ema.start=0ba',
    'train.duration=2ba',
    'train.precision=fp32',
    'train.compile=null',
    'train.cpu_threads=1',
    'log.every=1',
    'log.samples.every=null',
]


@pytest.fixture
def overrides(encoders_folder: Path, tmp_path: Path) -> list[str]:
    """What turns any shipped recipe into one that a CPU runs in seconds; on synthetic data."""
    return [
        *TINY,
        f'model.encoders.source={encoders_folder}',
        f'run_folder={tmp_path}/run',
        'data.kind=synthetic',
        'data.synthetic_samples=64',
    ]


@pytest.fixture
def recipe(overrides: list[str]) -> Recipe:
    """A tiny recipe on synthetic data, derived from the shipped one."""
    return load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', overrides)


@pytest.fixture(scope='session')
def s3_server() -> Iterator['S3Server']:
    from tests.common.s3_server import BUCKET, S3Server

    server = S3Server()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        server.client().create_bucket(Bucket=BUCKET)
    yield server
    server.stop()


@pytest.fixture
def s3(s3_server: 'S3Server', monkeypatch: pytest.MonkeyPatch) -> 'S3Server':
    """An S3 server with the empty bucket `bucket`, which s3:// leads to, in child processes too."""
    from diffusion.common import object_storage

    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    s3_server.empty()
    object_storage.client_of.cache_clear()  # of another server
    return s3_server


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Five, one of them with a caption of its own and one lying on its side, larger than they train."""
    folder = tmp_path / 'photos'
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(5):
        image = Image.fromarray(rng.integers(0, 256, (36 + i, 50, 3), dtype=np.uint8))
        exif = Image.Exif()
        exif[0x0112] = 6 if i == 3 else 1
        image.save(folder / f'{i}.png', exif=exif)
    (folder / '2.txt').write_text(OWN_CAPTION)
    return folder


def run_python(*arguments: object, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` in the repository and expect an exit code."""
    result = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=REPOSITORY, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    assert result.returncode == code, f'exit code {result.returncode}, expected {code}\n{result.stdout[-3000:]}\n{result.stderr[-6000:]}'
    return result


def run_here(module: str, *arguments: object, code: int = 0) -> SimpleNamespace:
    """The same as `run_python('-m', module, ...)` in this process, which has imported everything already."""
    out, err = io.StringIO(), io.StringIO()
    ended = None
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, 'argv', [module, *map(str, arguments)])
        try:
            runpy.run_module(module, run_name='__main__')
        except SystemExit as error:
            ended = error.code
    assert (ended or 0) == code, err.getvalue()
    return SimpleNamespace(stdout=out.getvalue(), stderr=err.getvalue())


def write_checkout(folder: Path) -> list[str]:
    """Write a repository with one commit, of the files of this one as they are now; return their names."""
    listed = subprocess.run(['git', 'ls-files', '-co', '--exclude-standard'], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    names = [name for name in listed.stdout.splitlines() if (REPOSITORY / name).is_file() and not (REPOSITORY / name).is_symlink()]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, folder / name)
    git = ['git', '-c', 'user.name=tests', '-c', 'user.email=tests@localhost', '-c', 'commit.gpgsign=false']
    for words in (['init', '--quiet'], ['add', '.'], ['commit', '--quiet', '--message=all']):
        subprocess.run([*git, *words], cwd=folder, check=True)
    return names


def read_json(path: Path) -> dict:
    return json.loads(path.read_text())
