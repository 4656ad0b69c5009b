"""Training steps at full size: the headline, the ladder of the ablation, single settings beyond it, and where the time goes."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from composer.utils import get_device
from diffusers import UNet2DConditionModel
from torch import nn

from benchmarks.checking.cases import Case, NotHere, Setting, Values
from benchmarks.checking.profiling import profiled
from benchmarks.optimizations import OPTIMIZATIONS, Optimization, ladder
from benchmarks.step_rows import StepRow, measure_alone, plan, possible
from benchmarks.timing import cudnn_benchmark, device, forget_peak_memory
from diffusion.encoders.frozen_part import AttentionError, use_attention
from diffusion.encoders.random_encoders import write_stand_in

HEADLINE = '+ compile network'  # the row of the ablation that is train.py without an average of the weights
COMPILE_SEC, EAGER_SEC = 160, 20  # on an H200 with 16 cores, with nothing in the caches


def encoders_of(setting: Setting) -> Path:
    folder = setting.folder / f'encoders-{setting.network}'
    if not folder.exists():
        write_stand_in(folder, setting.network)
    get_device(None)  # Composer's device switches TF32 on, as in training
    return folder


def on_gpu() -> bool:
    return device().type == 'cuda'


def headline_row(change: Callable[[UNet2DConditionModel], None] | None = None) -> StepRow:
    """Return the row of the headline: on a CPU the same without compilation and bf16."""
    optimization = next(one for one in OPTIMIZATIONS if one.name == HEADLINE)
    return StepRow(optimization, possible(ladder()[HEADLINE], device(), may_compile=on_gpu()), change=change)


def described(setting: Setting, resolution: int, micro_batch: int | None = None) -> Values:
    """Return the setting of a row of benchmarks.step."""
    size = setting.micro_batch[resolution] if micro_batch is None else micro_batch
    return {'network': setting.network, 'resolution': resolution, 'kind': 'latents', 'micro_batch': size}


def values_of(row: StepRow, setting: Setting, settings: Values, steps: int = 30, warmup: int = 6) -> Values:
    """Measure a row of benchmarks.step and return what its line says, with the name of its setting in place of that of the row."""
    if setting.tiny:
        steps, warmup = 2, 1
    measure_alone(row, settings, encoders_of(setting), steps, warmup)
    if row.status != 'measured':
        raise torch.cuda.OutOfMemoryError(f'{row.status} with {settings["micro_batch"]} images of {settings["resolution"]} px')
    line = row.line(settings)
    return {'lever': line.pop('row'), **{key: value for key, value in line.items() if key not in ('benchmark', 'status')}}


def smallest(setting: Setting) -> int:
    """The resolution of the recipes' first phase."""
    return min(setting.micro_batch)


def headline(setting: Setting) -> list[Case]:
    def measure(resolution: int) -> Values:
        return values_of(headline_row(), setting, described(setting, resolution))

    return [Case(f'{px} px', partial(measure, px), setting.sec(COMPILE_SEC)) for px in setting.micro_batch]


def ladder_row(setting: Setting, optimization: Optimization) -> Values:
    row = plan([optimization.name], may_compile=on_gpu())[0]
    if row.status != 'measured':
        raise NotHere(row.status.removeprefix('skipped: '))
    return values_of(row, setting, described(setting, smallest(setting)), steps=20, warmup=4)


def rows_of_ladder(setting: Setting) -> list[Case]:
    """All rows of benchmarks.step, those that compile last. The plain loop may not fit."""
    rows = sorted(OPTIMIZATIONS, key=lambda one: ladder()[one.name].compile is not None)
    return [
        Case(
            one.name,
            partial(ladder_row, setting, one),
            setting.sec(COMPILE_SEC if ladder()[one.name].compile else EAGER_SEC),
            may_run_out=True,
        )
        for one in rows
    ]


def profile(setting: Setting) -> list[Case]:
    """The headline's step under PyTorch's profiler."""

    def measure(resolution: int) -> Values:
        row, settings = headline_row(), described(setting, resolution)
        row.build(settings, encoders_of(setting))
        assert row.step is not None
        return {**settings, **profiled(row.step)}

    return [Case(f'{smallest(setting)} px', partial(measure, smallest(setting)), setting.sec(COMPILE_SEC))]


def variations(setting: Setting) -> list[Case]:
    """The headline's step under one more setting each, the cheapest to measure first."""
    resolution = smallest(setting)
    usual = setting.micro_batch[resolution]
    sizes = [usual // 2, 2 * usual]
    changes: dict[str, Callable[[ExitStack], Callable[[UNet2DConditionModel], None] | None]] = {
        'unchanged': lambda stack: None,
        'cudnn.benchmark': search_convolutions,
        **{f'{name} attention': partial(attend_by, name) for name in ('cudnn', 'flash')},
        'no GroupNorm: an upper bound, not a model': lambda stack: without_group_norm,
        'projections of attention fused': lambda stack: UNet2DConditionModel.fuse_qkv_projections,
        'Inductor: force_layout_optimization': partial(inductor_option, 'force_layout_optimization'),
        'Inductor: coordinate_descent_tuning': partial(inductor_option, 'coordinate_descent_tuning'),
    }

    def measure(prepare: Callable[[ExitStack], Callable[[UNet2DConditionModel], None] | None], micro_batch: int) -> Values:
        with ExitStack() as stack:
            change = prepare(stack)
            forget_peak_memory()
            return values_of(headline_row(change), setting, described(setting, resolution, micro_batch))

    cases = {name: partial(measure, prepare, usual) for name, prepare in changes.items()}
    cases |= {f'micro-batch {size}': partial(measure, changes['unchanged'], size) for size in sizes}
    return [Case(name, case, setting.sec(COMPILE_SEC), may_run_out=True) for name, case in cases.items()]


def search_convolutions(stack: ExitStack) -> None:
    """Let cuDNN time its algorithms for each shape."""
    if not on_gpu():
        raise NotHere('needs a GPU')
    stack.enter_context(cudnn_benchmark(True))


def attend_by(kernel: str, stack: ExitStack) -> None:
    """Allow one kernel of attention only."""
    if not on_gpu():
        raise NotHere('needs a GPU')
    stack.callback(use_attention, 'auto')
    try:
        use_attention(kernel)
    except AttentionError as error:
        raise NotHere(str(error)) from error


def inductor_option(name: str, stack: ExitStack) -> None:
    if not on_gpu():
        raise NotHere('needs a GPU: nothing is compiled here')
    import torch._inductor.config as inductor

    stack.enter_context(inductor.patch({name: True}))


def without_group_norm(unet: UNet2DConditionModel) -> None:
    """Remove every GroupNorm: the most that a faster one could gain."""
    for module in list(unet.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.GroupNorm):
                setattr(module, name, nn.Identity())
