"""Peak FLOP/s and memory of GPUs, and the name of the present one and whether PyTorch computes on it. Plans need numbers alone: torch comes late."""

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator

from diffusion.common.text import did_you_mean
from diffusion.contracts.errors import InputError

if TYPE_CHECKING:
    import torch

# Dense 16-bit tensor FLOP/s, and memory in GB (1e9 bytes; a device reports a few percent less or more), from the data sheets, by the names of
# diffusion/cost/prices.yaml. None: there are several sizes.
GPUS: dict[str, tuple[float, float | None]] = {
    'a100-40gb': (3.12e14, 40),
    'a100-80gb': (3.12e14, 80),
    'a100': (3.12e14, None),
    'h100': (9.89e14, 80),
    'h100-pcie': (7.56e14, 80),
    'h100-nvl': (8.35e14, 94),
    'h200': (9.89e14, 141),
    'h200-nvl': (8.35e14, 141),
    'gh200': (9.89e14, None),
    'b200': (2.25e15, 180),
    'gb200': (2.5e15, 186),
    'l40s': (3.62e14, 48),
    'a10g': (7.0e13, 24),  # AWS's own; an A10 has 1.25e14
    'rtx-4090': (1.652e14, 24),  # summed in float32, as training does; twice that in float16
    'trainium': (1.9e14, 32),
}
PEAK_FLOPS = {name: peak for name, (peak, _) in GPUS.items()}
MEMORY_GB = {name: size for name, (_, size) in GPUS.items() if size is not None}

# Compute capability of GPUs that some builds of a PyTorch within the bounds of setup.py have no kernels for.
COMPUTE_CAPABILITY = {'b200': (10, 0), 'gb200': (10, 0)}

# Hardware with a price and a peak, for comparison only.
NOT_SUPPORTED = {'trainium': 'AWS Trainium needs the Neuron SDK; this stack runs on NVIDIA GPUs'}


def memory_gb(gpu: str) -> float:
    """Return the memory of a GPU (GB) by its name in a list of prices, such as `a100-40gb`. Raises ValueError: it is not known."""
    if gpu not in MEMORY_GB:
        hint = did_you_mean(gpu, MEMORY_GB, by_prefix=True)
        raise ValueError(f"no GPU '{gpu}' is known{hint} There are {', '.join(MEMORY_GB)}; add one to diffusion/cost/hardware.py")
    return MEMORY_GB[gpu]


def gpu_name(device_name: str, names: Iterable[str] = MEMORY_GB) -> str | None:
    """Return the name of a device such as `NVIDIA A100-SXM4-80GB` among the names of a list, here `a100-80gb`; None if the list has none.

    All words of the name are whole words of the device's, for `b200` is no `GB200`; of several such names the one with the most words. A slice of
    a GPU, `NVIDIA H200 MIG 3g.71gb`, is none of the list: its arithmetic, its memory and its price are others.
    """
    device = _words(device_name)
    if 'mig' in device:
        return None
    return max((name for name in names if _words(name) <= device), key=lambda name: len(_words(name)), default=None)


def _words(name: str) -> set[str]:
    return set(re.findall('[a-z0-9]+', name.lower()))


def gpu_counts(text: str) -> tuple[int, ...]:
    """Return the numbers of a list, `8,16,24`; `8..256` and `8,16,...,256` double up to the last; ValueError for anything else."""
    counts, doubling = list[int](), False
    for part in text.replace('...', '..').replace('..', ',..,').split(','):
        if part == '..':
            doubling = True
        elif part:
            if not part.isdigit() or int(part) < 1:
                raise ValueError(f"'{part}' is not a whole number of at least 1")
            last = int(part)
            if doubling and (not counts or last < counts[-1]):
                remedy = f'{last}..{counts[-1]}' if counts else '8..256'
                raise ValueError(f'.. doubles from a number to a larger one; write {remedy}')
            while doubling and counts and counts[-1] * 2 < last:
                counts.append(counts[-1] * 2)
            counts.append(last)
            doubling = False
    if not counts or doubling:
        raise ValueError('is not a list of numbers of GPUs; write 8,16,32 or 8..256')
    return tuple(sorted(set(counts)))


GpuCounts = Annotated[tuple[int, ...], BeforeValidator(gpu_counts)]


def peak_flops(device_name: str) -> float | None:
    """FLOP/s of a device such as `NVIDIA H200` or a price list's `a100-40gb`; None if it is not known."""
    name = gpu_name(device_name, PEAK_FLOPS)
    return None if name is None else PEAK_FLOPS[name]


def mfu(images_per_sec_per_gpu: float, flop_per_image: float, peak: float | None) -> float | None:
    """Model FLOP utilisation (0..1): FLOP per image, forward and backward without recomputation, over `peak_flops`; None if that is not known."""
    return None if peak is None else images_per_sec_per_gpu * flop_per_image / peak


def device_name() -> str:
    """The GPU of this process, or `CPU`."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'


def has_kernels(capability: tuple[int, int], built_for: Sequence[str]) -> bool:
    """Whether a GPU of this compute capability runs what was compiled for `built_for`, such as `sm_86` or `compute_90`.

    Machine code (`sm`) also runs on later minor versions of its major version, PTX (`compute`) on everything later; what ends in `a` on its own
    version alone. Without any such entry (no CUDA build) it is not known, and taken to be so.
    """
    found = [each for each in (re.fullmatch(r'(sm|compute)_(\d+)(\d)([af]?)', text) for text in built_for) if each]

    def runs(kind: str, built: tuple[int, int], suffix: str) -> bool:
        if suffix == 'a':
            return built == capability
        return built <= capability and (built[0] == capability[0] or (kind == 'compute' and not suffix))

    return not found or any(runs(each[1], (int(each[2]), int(each[3])), each[4]) for each in found)


def gpu_without_kernels(gpu: str | None = None) -> str:
    """Say why the installed PyTorch cannot compute on a GPU (None: this process's), and what to do; nothing where it can, or this is not known."""
    if gpu is not None and gpu not in COMPUTE_CAPABILITY:
        return ''
    import torch

    if gpu is None:
        if not torch.cuda.is_available():
            return ''
        index = int(os.environ.get('LOCAL_RANK') or 0)
        name, capability, built_for = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index), torch.cuda.get_arch_list()
    else:  # also where there is no GPU, and torch.cuda.get_arch_list() is empty
        flags = torch._C._cuda_getArchFlags() if hasattr(torch._C, '_cuda_getArchFlags') else None
        name, capability, built_for = gpu, COMPUTE_CAPABILITY[gpu], (flags or '').split()
    if has_kernels(capability, built_for):
        return ''
    return (
        f'{name}: PyTorch {torch.__version__} has kernels for {", ".join(built_for)}, and none for compute capability '
        f'{capability[0]}.{capability[1]}; install a PyTorch that has (Blackwell: one for CUDA 12.8 or newer), or use another GPU'
    )


def own_device() -> 'torch.device':
    """Return the launcher's GPU for this process, without a launcher the first, the CPU where there is none; InputError if PyTorch has no kernels."""
    import torch

    if not torch.cuda.is_available():
        return torch.device('cpu')
    if lacking := gpu_without_kernels():
        raise InputError(lacking)
    device = torch.device('cuda', int(os.environ.get('LOCAL_RANK') or 0))
    torch.cuda.set_device(device)  # or pinned memory would go through the first GPU
    return device


def refuse_gpu_apart() -> None:
    """Raise InputError as `own_device`, which a process of its own asks: PyTorch would keep memory of host and GPU in this one."""
    asking = 'from diffusion.cost.hardware import gpu_without_kernels; print(gpu_without_kernels())'
    if lacking := subprocess.run([sys.executable, '-c', asking], capture_output=True, text=True, check=False).stdout.strip():
        raise InputError(lacking)


def peak_memory_bytes() -> int:
    """Largest memory allocated on the GPU, or resident on the host without one."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    import resource  # POSIX only

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
