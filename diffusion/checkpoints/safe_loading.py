"""Keep Composer from unpickling: 0.32 loads every checkpoint, ours on resuming too, with full pickle."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from composer.utils import checkpoint

from diffusion.checkpoints.reading import load_safely


@contextmanager
def safe_loading(load: Callable[[Path, str], Any] = load_safely) -> Iterator[None]:
    """Make Composer load checkpoints as the rest of the project does. It looks its loader up in its module at each call, so it can be replaced.

    Args:
        load: the content of a file (its path, and the device that tensors go to). Composer gives it a temporary link to the checkpoint.
    """
    stock = checkpoint._torch_load_with_validation
    checkpoint._torch_load_with_validation = lambda checkpoint_filepath, map_location: load(Path(checkpoint_filepath), map_location)
    try:
        yield
    finally:
        checkpoint._torch_load_with_validation = stock
