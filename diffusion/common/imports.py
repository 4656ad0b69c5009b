"""Imports of large libraries, in two thirds of their time and not in silence."""

import gc
import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports(cpu_threads: int | None = None) -> Iterator[None]:
    """Say so, import within the context with the garbage collector off, and leave what was imported out of every later collection.

    PyTorch, diffusers and Composer make a million objects that live as long as the process. Collections that look through them take a fifth of
    the import, a quarter of a second each in training, and seconds when the process ends; processes that are forked later
    (a loader's) would copy the memory.

    Where PyTorch is there already it does nothing: by then the process may hold garbage, which must not be kept.

    Args:
        cpu_threads: of PyTorch's arithmetic, where the user has not set OMP_NUM_THREADS; None leaves the number to PyTorch.
    """
    if 'torch' in sys.modules:
        yield
        return
    speaks = os.environ.get('LOCAL_RANK', '0') == '0' and multiprocessing.parent_process() is None
    given = os.environ.get('OMP_NUM_THREADS')
    if cpu_threads is not None and not given:
        os.environ['OMP_NUM_THREADS'] = str(cpu_threads)
    elif cpu_threads is not None and given != str(cpu_threads) and speaks:
        print(f'OMP_NUM_THREADS={given} counts, not train.cpu_threads={cpu_threads}; unset it for that', file=sys.stderr)
    if speaks:
        print('loading PyTorch and what needs it: seconds, on a cold or busy machine half a minute', file=sys.stderr, flush=True)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
