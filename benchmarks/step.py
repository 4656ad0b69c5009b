"""Measure a training step, and what each optimization gains.

    python -m benchmarks.step [--network sd2-base] [--resolution 256] [--micro-batch 64] [--kind latents] [--out step.jsonl]

An ablation: each row adds one optimization to the row above, from the loop of diffusers' own example (fp32 weights under autocast, NCHW, eager
attention, AdamW as PyTorch makes it) to what `train.py` does. Inside the step: text encoder (and with `--kind images` the VAE), noising,
the network forward and backward, clipping, AdamW, one micro-batch on one GPU; no loader. The weights and the data are random.

MFU = images/s x counted FLOP of the network's forward and backward pass per image / dense 16-bit peak of the GPU; empty where that is unknown.
Compilation and the first steps are not timed. Each row runs by itself and is written to --out as soon as it is measured, and one that does not fit
stays in the table and says so. OMP_NUM_THREADS=1 makes a CPU that others use too less noisy.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.measured import command, print_table, record
from benchmarks.optimizations import OPTIMIZATIONS
from diffusion.common.arguments import positive_int
from diffusion.encoders.sizes import KINDS
from diffusion.families.networks import find_network
from diffusion.recipe.rules import NETWORKS

# With stand-ins of the same name, and trained by diffusion, as its rows are.
NAMES = sorted(name for name in KINDS if (NETWORKS / f'{name}.json').exists() and find_network(name).family != 'prx')
DEFAULTS = {
    'cuda': {'network': 'sd2-base', 'resolution': 256, 'micro_batch': 64, 'steps': 50, 'warmup': 10},
    'cpu': {'network': 'tiny', 'resolution': 32, 'micro_batch': 16, 'steps': 50, 'warmup': 3},
}


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


def measure(args: argparse.Namespace) -> None:
    """Measure, record each row as soon as it is measured, and print a table."""
    import torch

    from benchmarks.step_rows import step_row
    from benchmarks.timing import device
    from diffusion.cost.hardware import device_name
    from diffusion.encoders.random_encoders import write_stand_in

    for name, value in DEFAULTS[device().type].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    setting = {'network': args.network, 'resolution': args.resolution, 'kind': args.kind, 'micro_batch': args.micro_batch}
    rows = [step_row(name) for name in OPTIMIZATIONS if args.only is None or name in args.only]
    records = []
    with tempfile.TemporaryDirectory() as temporary:
        encoders = Path(temporary)
        write_stand_in(encoders, args.network)
        for row in tqdm(rows, desc='rows'):
            if row.status == 'measured':
                row.measure(setting, encoders, args.steps, args.warmup)
            records.append(row.line(setting))
            record(args.out, records[-1:])  # now: the next row may crash, or the machine be taken away
    print(f'{args.network}, {args.resolution} px, {args.kind}, micro-batch {args.micro_batch}, {device_name()}, torch {torch.__version__}')
    print_table(['', 'images/s', 'of the first', 'MFU', 'ms a step', 'spread', 'peak GB'], table(records))


def main() -> None:
    parser = command('step', __doc__)

    def by_device(option: str, what: str, **more: Any) -> None:
        """An option whose default depends on the device, which is looked at after parsing."""
        on_gpu, on_cpu = (defaults[option.removeprefix('--').replace('-', '_')] for defaults in DEFAULTS.values())
        parser.add_argument(option, help=f'{what} (default {on_gpu} on a GPU, {on_cpu} on a CPU)', **more)

    by_device('--network', 'configuration in diffusion/families/networks/', choices=NAMES)
    by_device('--resolution', 'px', type=positive_int)
    by_device('--micro-batch', 'images of a step', type=positive_int)
    parser.add_argument('--kind', choices=('latents', 'images'), default='latents', help='images: the VAE runs in the step (default %(default)s)')
    parser.add_argument('--only', nargs='+', metavar='ROW', choices=OPTIMIZATIONS, help='these rows')
    by_device('--steps', 'to measure', type=positive_int)
    by_device('--warmup', 'steps before', type=positive_int)
    measure(parser.parse_args())


if __name__ == '__main__':
    main()
