"""The environment record of a run or a measurement: commit, versions, CPU and GPU."""

import ctypes
import hashlib
import os
import platform
import subprocess
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ('torch', 'mosaicml', 'mosaicml-streaming', 'diffusers', 'transformers')  # that decide what a run computes


@cache
def environment() -> dict[str, Any]:
    """Return the record of this machine; a package that is not installed is None. Asked once: git and the driver take a second."""
    return {
        'commit': commit(),
        'cpu': cpu_name(),
        'num_cores': len(os.sched_getaffinity(0)),
        'omp_num_threads': os.environ.get('OMP_NUM_THREADS'),  # null: PyTorch's choice, all cores
        **_gpu(),
        'python': platform.python_version(),
        **{name: _version(name) for name in (*PACKAGES, 'numpy', 'pillow')},
    }


@cache
def code_identity() -> dict[str, str | None]:
    """Return what decides the bytes that are made of an input: the digest of this project's modules, versions of Python and of the packages.

    Two machines of a cluster that differ in it would write unequal parts of one dataset.
    """
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for path in sorted(path for package in ('diffusion', 'data_prep') for path in (root / package).rglob('*.py')):
        digest.update(f'{path.relative_to(root)}\0'.encode())
        digest.update(path.read_bytes())
    packages = (*PACKAGES, 'numpy', 'pillow', 'pyarrow')
    return {'code': digest.hexdigest()[:16], 'python': platform.python_version(), **{name: _version(name) for name in packages}}


def commit() -> str | None:
    """Return the commit of this checkout, `-dirty` if files differ from it; outside a checkout, such as a copy of the files, GIT_COMMIT or None."""
    return _output('git', 'describe', '--always', '--dirty', '--exclude=*', '--abbrev=12') or os.environ.get('GIT_COMMIT')


def cpu_name() -> str:
    """Return the processor's name as Linux has it, such as `AMD EPYC 7B13`; elsewhere its architecture."""
    with suppress(OSError):
        for line in Path('/proc/cpuinfo').read_text().splitlines():
            if line.startswith('model name'):
                return line.partition(':')[2].strip()
    return platform.machine()


def has_gpu() -> bool:
    """Whether the driver shows this process a GPU, asked without PyTorch, whose import takes seconds."""
    count = ctypes.c_int()
    with suppress(OSError):  # no driver
        driver = ctypes.CDLL('libcuda.so.1')
        return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    return False


def _gpu() -> dict[str, Any]:
    import torch  # late: commands that write a manifest need the commit alone

    if not torch.cuda.is_available():
        return {'gpu': None}
    properties = torch.cuda.get_device_properties(0)
    return {
        'gpu': properties.name,
        'gpu_memory_bytes': properties.total_memory,
        'num_gpus': torch.cuda.device_count(),
        'cuda': torch.version.cuda,
        'cudnn': torch.backends.cudnn.version(),
        'driver': _output('nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader', '--id=0') or None,
    }


def _version(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def _output(*arguments: str) -> str:
    """Return what a program prints, or nothing if it fails or is not installed."""
    try:
        return subprocess.run(arguments, capture_output=True, text=True, check=True, cwd=Path(__file__).parent).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ''
