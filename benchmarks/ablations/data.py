"""The data of the studies, made once by the commands that a person would type."""

import sys
from pathlib import Path

from diffusion.contracts.errors import InputError
from diffusion.demo import crawl
from diffusion.demo.stages import stage

NUM_SHAPES = 9200  # of which a tenth is held out: about as many remain as the demo trains on
RESOLUTION = {'shapes': 32, 'emoji': 64}
HELD_OUT = {'shapes': 0.1, 'emoji': 0.15}  # the emoji as diffusion.demo.crawl by default


def prepare(data: str, folder: Path, source: str | None, features: bool) -> None:
    """Make `train/latents`, `held-out/latents`, `encoders` and, if wanted, `features` in `folder`, unless they are there.

    Args:
        data: a key of RESOLUTION.
        source: the crawl of `emoji`: what `data_prep.convert` reads.

    Raises:
        InputError: `emoji` has no source.
        SystemExit: a stage failed.
    """
    if not all((folder / part / 'latents/manifest.json').exists() for part in crawl.PARTS):
        _make_latents(data, folder, source)
    if features and not (folder / 'features').exists():
        words = ['benchmarks.ablations.features', folder / 'train/images', folder / 'features', RESOLUTION[data]]
        stage('Train a feature network', [sys.executable, '-m', *words])


def _make_latents(data: str, folder: Path, source: str | None) -> None:
    if data == 'shapes':
        source = str(folder / 'crawl')
        stage('Draw captioned shapes', [sys.executable, '-m', 'data_prep.shapes', source, '--count', NUM_SHAPES, '--size', RESOLUTION[data]])
    if source is None:
        raise InputError(f'the data of {data} are not in {folder} yet; name the crawl that they are made from: --source FOLDER (docs/evaluation.md)')
    crawl.prepare_crawl(source, folder, RESOLUTION[data], HELD_OUT[data])
