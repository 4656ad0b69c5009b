"""The one place where Composer is kept from unpickling: 0.32 loads every checkpoint, ours on resuming too, with full pickle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from composer.utils import checkpoint

from diffusion.checkpoints.reading import load_safely


def _load(checkpoint_filepath: str | Path, map_location: str) -> Any:
    return load_safely(Path(checkpoint_filepath), map_location)


@contextmanager
def safe_loading() -> Iterator[None]:
    """Inside, Composer loads as the rest of the project does. Its loader is looked up in its module at each call, so it can be replaced there."""
    stock = checkpoint._torch_load_with_validation
    checkpoint._torch_load_with_validation = _load
    try:
        yield
    finally:
        checkpoint._torch_load_with_validation = stock
