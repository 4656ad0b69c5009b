"""The time of a step by kernel: its kernels by class, and the heaviest of them."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

from benchmarks.checking.cases import Values
from benchmarks.timing import block_sec, device, synchronize

NUM_STEPS, NUM_HEAVIEST = 3, 20
# The first pattern that a kernel's name holds says its class. Names of cuDNN, cuBLAS, CUTLASS, Inductor and ATen; on a CPU of ATen's operations.
CLASSES = {
    'layout change': r'nchwToNhwc|nhwcToNchw|nchw_to_nhwc|convertTensor|transpose_readWrite|_4D_kernel',
    'convolution': r'conv|fprop|dgrad|wgrad|implicit_gemm|winograd',
    'attention': r'flash|fmha|sdpa|attention|mha',
    'matrix product': r'gemm|nvjet|cublas|cutlass|matmul|splitK|addmm|aten::b?mm',
    'optimizer, clipping, average': r'multi_tensor|adam|lerp|foreach|lpnorm|get_total_norm',
    'reductions (Triton)': r'triton_(red|per)_',
    'pointwise (Triton)': r'triton_poi_',
    'other (Triton)': r'triton',
    'normalization (eager)': r'group_?norm|layer_?norm|RowwiseMoments|GammaBeta|ComputeInternal|ComputeFused',
    'copies': r'memcpy|memset|copy|CatArray|aten::cat',
    'pointwise (eager)': r'elementwise|vectorized|unrolled|gelu|silu|aten::(add|mul|sub|div|fill|zero)',
    'reductions (eager)': r'reduce_kernel|aten::(sum|mean)',
}
PATTERNS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in CLASSES.items()}
OTHER = 'other'


def class_of(kernel: str) -> str:
    return next((name for name, pattern in PATTERNS.items() if pattern.search(kernel)), OTHER)


def profiled(step: Callable[[], object]) -> Values:
    """Milliseconds of a step by class and by kernel, on the device that runs it; `busy_ms` is their sum, `wall_ms` the step without the profiler."""
    on_gpu = device().type == 'cuda'
    for _ in range(3):
        step()
    wall_sec = block_sec(step, NUM_STEPS)
    with profiler(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as recorded:
        for _ in range(NUM_STEPS):
            step()
        synchronize()
    took_ms, calls = Counter[str](), Counter[str]()
    events: Any = recorded.events()
    for event in events:
        if (event.device_type == torch.autograd.DeviceType.CUDA) == on_gpu and not (on_gpu and event.is_user_annotation):  # spans kernels
            took_us = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
            took_ms[event.name] += took_us / 1e3 / NUM_STEPS
            calls[event.name] += 1
    by_class = Counter[str]()
    for name, ms in took_ms.items():
        by_class[class_of(name)] += ms
    return {
        'wall_ms': wall_sec * 1e3,
        'busy_ms': took_ms.total(),
        'num_kernels': calls.total() // NUM_STEPS,
        'classes_ms': dict(by_class.most_common()),
        'heaviest': [
            {'name': name[:200], 'class': class_of(name), 'ms': ms, 'calls': calls[name] / NUM_STEPS}
            for name, ms in took_ms.most_common(NUM_HEAVIEST)
        ],
    }
