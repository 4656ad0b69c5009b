"""What does training hold in a GPU's memory, and which micro-batch should fit?

    python -m benchmarks.memory [--unet sd2-base] [--resolutions 256 512] [--out memory.jsonl]

Nothing is measured and no GPU is needed. State (weights, gradients, Adam, EMA ...) is arithmetic on the number of parameters. Activations are
counted: the U-Net's forward and backward pass run eagerly on fake tensors under autocast, and the storages alive at each moment are added up, for two
batch sizes; the difference is what one sample takes. Saved: what the forward pass leaves for the backward pass. Peak: the most that is alive at once.
Compiled steps take less; cuDNN's workspaces and the allocator's gaps, for which 6 % are set aside, take more.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tqdm import tqdm

from benchmarks.measured import command, print_table, record
from diffusion.common.arguments import positive_int
from diffusion.cost.hardware import memory_gb

LATENT_PX = 8  # pixels per latent along a side
NUM_GPUS = 8  # of the node that zero2 and hsdp divide among; further nodes are replicas of hsdp
GPUS = ('rtx-4090', 'a100-40gb', 'a100-80gb', 'h200')


def main() -> None:
    parser = command('memory', __doc__)
    parser.add_argument('--unet', default='sd2-base', help='configuration in diffusion/families/networks/ (default %(default)s)')
    parser.add_argument('--resolutions', nargs='+', type=positive_int, default=[256, 512], metavar='PX', help='default 256 512')
    args = parser.parse_args()
    import torch  # after the arguments are read

    from diffusion.cost.memory import State, fitting, state
    from diffusion.families.counting.activations import activations
    from diffusion.families.registry import build_network as build_unet

    with torch.device('meta'):
        num_parameters = sum(parameter.numel() for parameter in build_unet(args.unet).parameters())
    held = {
        (how, precision): state(num_parameters, how, precision, NUM_GPUS) for how in ('ddp', 'zero2', 'hsdp') for precision in ('amp_bf16', 'bf16')
    }
    rows: list[dict[str, Any]] = []
    for (sharding, precision), parts in held.items():
        row = {'benchmark': 'memory', 'unet': args.unet, 'num_gpus': NUM_GPUS, 'sharding': sharding, 'precision': precision}
        rows.append({**row, **asdict(parts), 'total': parts.total})
    print(f'{args.unet}: {num_parameters:,} parameters. GB of state on each of {NUM_GPUS} GPUs (hsdp: on any number of such nodes)')
    columns = (*State.__dataclass_fields__, 'total')
    print_table(['', *columns], [[f'{row["sharding"]}, {row["precision"]}', *(row[name] / 1e9 for name in columns)] for row in rows])
    lines = []
    cases = [(px, precision, checkpointed) for px in args.resolutions for precision in ('amp_bf16', 'bf16') for checkpointed in (False, True)]
    for px, precision, checkpointed in tqdm(cases, desc='activations'):
        counted = activations(args.unet, px // LATENT_PX, precision, checkpointed)
        fits = {gpu: fitting(memory_gb(gpu), held['ddp', precision].total, counted.peak) for gpu in GPUS}
        row = {'benchmark': 'memory', 'unet': args.unet, 'resolution': px, 'precision': precision, 'checkpoint_activations': checkpointed}
        rows.append({**row, 'saved_bytes_per_sample': counted.saved, 'peak_bytes_per_sample': counted.peak, 'micro_batch_ddp': fits})
        how = f'{px} px, {precision}{", checkpointed" if checkpointed else ""}'
        lines.append([how, f'{counted.saved / 1e6:,.0f}', f'{counted.peak / 1e6:,.0f}', *fits.values()])
    print('Activations in MB a sample, eager, and the largest micro-batch that should fit beside the state of ddp (derived, not tried)')
    print_table(['', 'saved', 'peak', *GPUS], lines)
    record(args.out, rows)


if __name__ == '__main__':
    main()
