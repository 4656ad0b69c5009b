"""Photos, and recipes that train on them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from diffusion.recipe import Recipe, load_recipe
from tests.conftest import CAPTION, REPOSITORY


@pytest.fixture
def settings(overrides: list[str], photos: Path) -> list[str]:
    """Overrides of a run on the photos."""
    subject = f'data.streams.subject={{photos: {{folder: {photos}, caption: {CAPTION}}}}}'
    return [*overrides, 'data.kind=latents', 'data.streams.train=null', subject]


@pytest.fixture
def load(settings: list[str]) -> Callable[..., Recipe]:
    return lambda *more: load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', [*settings, *more])
