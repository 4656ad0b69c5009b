"""Training steps at full size: the headline, and where its time goes by kernel."""

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

from benchmarks.checking.cases import Case, Setting, Values
from benchmarks.step_rows import StepRow, step_row
from benchmarks.timing import block_sec, on_gpu, synchronize

HEADLINE = '+ compile network'  # the row of the ablation that is train.py without an average of the weights
COMPILE_SEC = 160  # on an H200 with 16 cores, with nothing in the caches
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


def headline_row(change: Callable[[UNet2DConditionModel], None] | None = None) -> StepRow:
    """Return the row of the headline: on a CPU the same without compilation and bf16."""
    row = step_row(HEADLINE, change)
    row.status = 'measured'
    return row


def described(setting: Setting, resolution: int) -> Values:
    """Return the setting of a row of benchmarks.step."""
    return {'network': setting.network, 'resolution': resolution, 'kind': 'latents', 'micro_batch': setting.micro_batch[resolution]}


def values_of(row: StepRow, setting: Setting, settings: Values, steps: int = 30, warmup: int = 6) -> Values:
    """Measure a row of benchmarks.step and return what its line says, with the name of its setting in place of that of the row."""
    row.measure(settings, setting.encoders(), *((2, 1) if setting.tiny else (steps, warmup)))
    if row.status != 'measured':
        raise torch.cuda.OutOfMemoryError(f'{row.status} with {settings["micro_batch"]} images of {settings["resolution"]} px')
    line = row.line(settings)
    return {'lever': line.pop('row'), **{key: value for key, value in line.items() if key not in ('benchmark', 'status')}}


def headline(setting: Setting) -> list[Case]:
    def measure(resolution: int) -> Values:
        return values_of(headline_row(), setting, described(setting, resolution))

    return [Case(f'{px} px', partial(measure, px), setting.sec(COMPILE_SEC)) for px in setting.micro_batch]


def profile(setting: Setting) -> list[Case]:
    """The headline's step under PyTorch's profiler."""

    def measure() -> Values:
        row, settings = headline_row(), described(setting, setting.first_px)
        row.build(settings, setting.encoders())
        assert row.step is not None
        return {**settings, **profiled(row.step)}

    return [Case(f'{setting.first_px} px', measure, setting.sec(COMPILE_SEC))]


def class_of(kernel: str) -> str:
    return next((name for name, pattern in PATTERNS.items() if pattern.search(kernel)), OTHER)


def profiled(step: Callable[[], object]) -> Values:
    """Milliseconds of a step by class and by kernel, on the device that runs it; `busy_ms` is their sum, `wall_ms` the step without the profiler."""
    is_cuda = on_gpu()
    for _ in range(3):
        step()
    wall_sec = block_sec(step, NUM_STEPS)
    with profiler(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]) as recorded:
        for _ in range(NUM_STEPS):
            step()
        synchronize()
    took_ms, calls = Counter[str](), Counter[str]()
    events: Any = recorded.events()
    for event in events:
        if (event.device_type == torch.autograd.DeviceType.CUDA) == is_cuda and not (is_cuda and event.is_user_annotation):  # spans kernels
            took_us = event.time_range.elapsed_us() if is_cuda else event.self_cpu_time_total
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
