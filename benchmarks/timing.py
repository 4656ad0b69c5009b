"""Timing of a step and its memory, for all benchmarks.

A GPU runs behind the host, so a time is taken between two synchronisations only. Between them lies a block of several steps, because
waiting after each would forbid the host to run ahead, as it does in training. The number is the median over blocks, its spread
the distance between their quartiles.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from diffusion.cost.hardware import own_device
from diffusion.monitoring.throughput import synchronize

device = own_device


def on_gpu() -> bool:
    return device().type == 'cuda'


MAX_BLOCKS = 10


@dataclass(frozen=True)
class Timing:
    """Seconds of one step: the median, and the interquartile range as a share of it (0..)."""

    median_sec: float
    spread: float
    num_steps: int

    @classmethod
    def of(cls, seconds: Sequence[float], num_steps: int | None = None) -> Timing:
        """From one number for each block, or for each step."""
        median = statistics.median(seconds)
        low, _, high = statistics.quantiles(seconds, n=4, method='inclusive') if len(seconds) > 1 else (median, median, median)
        return cls(median, (high - low) / median, num_steps or len(seconds))


def timed(step: Callable[[], object], steps: int, warmup: int) -> Timing:
    """Time `steps` calls after `warmup` others, in at most ten blocks of equal length (steps that are left over are not run)."""
    for _ in range(warmup):
        step()
    block = max(1, steps // MAX_BLOCKS)
    seconds = [block_sec(step, block) for _ in range(steps // block)]
    return Timing.of(seconds, len(seconds) * block)


def interleaved(ways: Mapping[str, Callable[[], object]], rounds: int, block: int = 1) -> dict[str, Timing]:
    """Time each way once a round, a block of calls at a time, after a round to warm up: what else the machine does hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, step in ways.items():
            seconds[name].append(block_sec(step, block))
    return {name: Timing.of(values[1:], rounds * block) for name, values in seconds.items()}


def block_sec(step: Callable[[], object], steps: int) -> float:
    """Mean seconds of one step of a block."""
    synchronize()
    start = time.monotonic()
    for _ in range(steps):
        step()
    synchronize()
    return (time.monotonic() - start) / steps


def free_memory() -> None:
    """Let go of what is no longer referred to: models, compiled code, the allocator's reserve."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif hasattr(libc := ctypes.CDLL(None), 'malloc_trim'):  # glibc keeps what was freed in the resident set
        libc.malloc_trim(0)


def forget_peak_memory() -> None:
    """Let peaks be counted from here."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        Path('/proc/self/clear_refs').write_text('5')  # Linux: the peak of the resident set


def memory_bytes() -> int:
    """Return the memory that PyTorch has allocated on the GPU now, or the process's resident set without one."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else _resident_bytes('VmRSS')


def peak_memory_bytes() -> int:
    """The highest `memory_bytes` since `forget_peak_memory`."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _resident_bytes('VmHWM')


def _resident_bytes(field: str) -> int:
    lines = Path('/proc/self/status').read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f'{field}:'))
