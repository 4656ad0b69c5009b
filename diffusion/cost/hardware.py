"""Peak FLOP/s and memory of GPUs, and the name of the present one. Plans need the numbers alone, so torch is imported late."""

from __future__ import annotations

import re
from collections.abc import Iterable

from diffusion.common.text import did_you_mean

# Dense 16-bit tensor FLOP/s from the vendors' data sheets, by names as `gpu_name` looks them up.
PEAK_FLOPS: dict[str, float] = {
    'GB200': 2.5e15,
    'B200': 2.25e15,
    'GH200': 9.89e14,
    'H200 NVL': 8.35e14,
    'H200': 9.89e14,
    'H100 PCIE': 7.56e14,
    'H100 NVL': 8.35e14,
    'H100': 9.89e14,
    'A100': 3.12e14,
    'L40S': 3.62e14,
    'A10G': 7.0e13,  # AWS's own; an A10 has 1.25e14
    'RTX 4090': 1.652e14,  # summed in float32, as training does; twice that in float16
    'TRAINIUM': 1.9e14,
}

# Memory in GB (1e9 bytes) by the names of diffusion/cost/prices.yaml, from the same data sheets. What a device reports differs by a few percent.
MEMORY_GB: dict[str, float] = {
    'a100-40gb': 40,
    'a100-80gb': 80,
    'h100': 80,
    'h100-pcie': 80,
    'h100-nvl': 94,
    'h200': 141,
    'h200-nvl': 141,
    'b200': 180,
    'gb200': 186,
    'l40s': 48,
    'a10g': 24,
    'rtx-4090': 24,
    'trainium': 32,
}

# Hardware with a price and a peak, for comparison only.
NOT_SUPPORTED = {'trainium': 'AWS Trainium needs the Neuron SDK; this stack runs on NVIDIA GPUs'}


def memory_gb(gpu: str) -> float:
    """Return the memory of a GPU (GB) by its name in a list of prices, such as `a100-40gb`.

    Raises:
        ValueError: it is not known.
    """
    if gpu not in MEMORY_GB:
        hint = did_you_mean(gpu, MEMORY_GB, by_prefix=True)
        raise ValueError(f"no GPU '{gpu}' is known{hint} There are {', '.join(MEMORY_GB)}; add one to diffusion/cost/hardware.py")
    return MEMORY_GB[gpu]


def gpu_name(device_name: str, names: Iterable[str] = MEMORY_GB) -> str | None:
    """Return the name of a device such as `NVIDIA A100-SXM4-80GB` in a list of prices, here `a100-80gb`; None if the list has none.

    All words of the name are whole words of the device's, for `b200` is no `GB200`; of several such names the one with the most words. A slice of
    a GPU, `NVIDIA H200 MIG 3g.71gb`, is none of the list: its arithmetic, its memory and its price are others.

    Args:
        names: of the list; those whose memory is known if none are given.
    """
    device = _words(device_name)
    if 'mig' in device:
        return None
    return max((name for name in names if _words(name) <= device), key=lambda name: len(_words(name)), default=None)


def _words(name: str) -> set[str]:
    return set(re.findall('[a-z0-9]+', name.lower()))


def peak_flops(device_name: str) -> float | None:
    """FLOP/s of a device such as `NVIDIA H200` or a price list's `a100-40gb`; None if it is not known."""
    name = gpu_name(device_name, PEAK_FLOPS)
    return None if name is None else PEAK_FLOPS[name]


def mfu(images_per_sec_per_gpu: float, flop_per_image: float, peak: float | None) -> float | None:
    """Model FLOP utilisation (0..1): the network's FLOP per image, forward and backward without recomputation, over a GPU's `peak_flops`.

    None where the peak is not known: no MFU is better than a wrong one.
    """
    return None if peak is None else images_per_sec_per_gpu * flop_per_image / peak


def device_name() -> str:
    """The GPU of this process, or `CPU`."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'


def peak_memory_bytes() -> int:
    """Largest memory allocated on the GPU, or resident on the host without one."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    import resource  # POSIX only

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
