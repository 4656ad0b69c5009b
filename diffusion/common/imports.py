"""Imports of large libraries, in two thirds of their time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import within the context with the garbage collector off, and leave what was imported out of every later collection.

    PyTorch, diffusers and Composer make a million objects that live as long as the process. Collections that look through them take a fifth of
    the import, a quarter of a second each in training, and seconds when the process ends; processes that are forked later
    (a loader's) would copy the memory.

    Where PyTorch is there already it does nothing: by then the process may hold garbage, which must not be kept.
    """
    if 'torch' in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
