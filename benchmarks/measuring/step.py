"""The rows of the ablation: on a GPU measured and written one by one, on a CPU measured in turns and written at the end."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from composer.utils import get_device
from diffusers import UNet2DConditionModel
from tqdm import tqdm

from benchmarks.ablation import build_step, possible, recipe_of
from benchmarks.measured import print_table, record
from benchmarks.optimizations import OPTIMIZATIONS, Optimization, Switches, ladder
from benchmarks.timing import Timing, device, forget_peak_memory, free_memory, interleaved, peak_memory_bytes, timed
from diffusion.cost.hardware import device_name, mfu, peak_flops
from diffusion.encoders.random_encoders import write_stand_in


@dataclass
class StepRow:
    """A optimization with what is built for it and what was measured of it; `status` says why there is nothing.

    `change` is applied to the U-Net before it is compiled.
    """

    optimization: Optimization
    switches: Switches
    status: str = 'measured'
    step: Callable[[], None] | None = None
    flop_per_image: int = 0
    precision: str = ''
    timing: Timing | None = None
    memory: dict[str, int] = field(default_factory=dict)
    change: Callable[[UNet2DConditionModel], None] | None = None

    def build(self, setting: dict[str, Any], encoders: Path) -> None:
        recipe = recipe_of(self.switches, encoders=encoders, device=device(), **setting)
        model, batch, self.step = build_step(self.switches, recipe, device(), self.change)
        self.flop_per_image = model.flops_per_batch(batch) // setting['micro_batch']
        self.precision = recipe.train.precision

    def line(self, setting: dict[str, Any]) -> dict[str, Any]:
        """One line of JSONL; a row without a measurement has no numbers."""
        line = {'benchmark': 'step', 'row': self.optimization.name, **setting, 'num_gpus': int(device().type == 'cuda'), 'status': self.status}
        if self.timing is None:
            return line
        images_per_sec = setting['micro_batch'] / self.timing.median_sec
        return {
            **line,
            'switches': asdict(self.switches),
            'precision': self.precision,
            'accumulation': 1,
            'images_per_sec': images_per_sec,
            'images_per_sec_per_gpu': images_per_sec,  # there is one
            'mfu': mfu(images_per_sec, self.flop_per_image, peak_flops(device_name())),
            'flop_per_image': self.flop_per_image,
            **asdict(self.timing),
            **self.memory,
        }


def plan(only: list[str] | None, may_compile: bool) -> list[StepRow]:
    """The rows to measure; one whose optimization does nothing on this machine is skipped, and those after it go without."""
    rows = []
    above: Switches | None = None
    for optimization, wanted in zip(OPTIMIZATIONS, ladder().values(), strict=True):
        switches, before = possible(wanted, device(), may_compile), above
        above = switches
        if only is None or optimization.name in only:
            rows.append(StepRow(optimization, switches, status=f'skipped: needs {optimization.needs}' if switches == before else 'measured'))
    return rows


def measure_alone(row: StepRow, setting: dict[str, Any], encoders: Path, steps: int, warmup: int) -> None:
    """The row has the device to itself, so that its memory is its own."""
    forget_peak_memory()
    try:
        row.build(setting, encoders)
        assert row.step is not None
        row.timing = timed(row.step, steps, warmup)
        row.memory = {'peak_allocated_bytes': peak_memory_bytes(), 'peak_reserved_bytes': torch.cuda.max_memory_reserved()}
    except torch.cuda.OutOfMemoryError:
        row.status = 'out of memory'
    finally:
        row.step = None
        free_memory()


def measure_together(rows: list[StepRow], setting: dict[str, Any], encoders: Path, steps: int) -> None:
    """The rows take turns, so that what else a CPU does hits all alike; their memory is then one."""
    for row in tqdm(rows, desc='build'):
        row.build(setting, encoders)
    timings = interleaved({row.optimization.name: row.step for row in rows if row.step is not None}, rounds=steps)
    for row in rows:
        row.timing = timings[row.optimization.name]


def measured(rows: list[StepRow], setting: dict[str, Any], encoders: Path, steps: int, warmup: int, alone: bool) -> Iterator[StepRow]:
    """Yield the rows in order, each as soon as it has been measured; those that are skipped too.

    Args:
        alone: one after the other, as on a GPU; otherwise in turns, so that all of them are done at once.
    """
    if not alone:
        measure_together([row for row in rows if row.status == 'measured'], setting, encoders, steps)
    for row in tqdm(rows, desc='rows', disable=not alone):
        if alone and row.status == 'measured':
            measure_alone(row, setting, encoders, steps, warmup)
        yield row


def table(records: list[dict[str, Any]]) -> list[list[Any]]:
    """Return the lines of the printed table."""
    first = next((line['images_per_sec'] for line in records if line['status'] == 'measured'), None)
    lines: list[list[Any]] = []
    for line in records:
        speed = line.get('images_per_sec')
        if speed is None:
            lines.append([line['row'], line['status'], *[None] * 5])
            continue
        mfu = None if line['mfu'] is None else f'{line["mfu"]:.1%}'
        memory_gb = line['peak_allocated_bytes'] / 1e9 if 'peak_allocated_bytes' in line else None
        lines.append([line['row'], speed, speed / first, mfu, line['median_sec'] * 1e3, f'{line["spread"]:.0%}', memory_gb])
    return lines


def run(args: argparse.Namespace) -> None:
    """Measure, record each row as soon as it is measured, and print a table."""
    setting = {'unet': args.unet, 'resolution': args.resolution, 'kind': args.kind, 'micro_batch': args.micro_batch}
    get_device(None)  # Composer's device switches TF32 on, as in training
    on_gpu = device().type == 'cuda'
    rows = plan(args.only, may_compile=args.compile or on_gpu)
    records = []
    with tempfile.TemporaryDirectory() as temporary:
        encoders = Path(temporary)
        write_stand_in(encoders, args.unet)
        for row in measured(rows, setting, encoders, args.steps, args.warmup, alone=on_gpu):
            records.append(row.line(setting))
            record(args.out, records[-1:])  # now: the next row may crash, or the machine be taken away
    print(f'{args.unet}, {args.resolution} px, {args.kind}, micro-batch {args.micro_batch}, {device_name()}, torch {torch.__version__}')
    print_table(['', 'images/s', 'of the first', 'MFU', 'ms a step', 'spread', 'peak GB'], table(records))
