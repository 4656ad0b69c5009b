"""What does training hold in a GPU's memory, and which micro-batch should fit?

    python -m benchmarks.memory [--unet sd2-base] [--resolutions 256 512] [--out memory.jsonl]

Nothing is measured and no GPU is needed. State (weights, gradients, Adam, EMA ...) is arithmetic on the number of parameters. Activations are
counted: the U-Net's forward and backward pass run eagerly on fake tensors under autocast, and the storages alive at each moment are added up, for two
batch sizes; the difference is what one sample takes. Saved: what the forward pass leaves for the backward pass. Peak: the most that is alive at once.
Compiled steps take less; cuDNN's workspaces and the allocator's gaps, for which 6 % are set aside, take more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from tqdm import tqdm

from benchmarks.live_storages import LiveStorages
from benchmarks.measured import command, print_table, record
from diffusion.arguments import positive_int
from diffusion.micro_batch import MEMORY_SHARE
from diffusion.models.objective import weighted_error
from diffusion.models.unet import build_unet

LATENT_PX, TEXT_LENGTH = 8, 77  # pixels per latent along a side; tokens of a caption
NUM_GPUS = 8  # of the node that zero2 and hsdp divide among; further nodes are replicas of hsdp
GPUS_GB = {'24 GB': 24, 'A100-40GB': 40, 'A100-80GB': 80, 'H200': 141}
BATCHES = (512, 1024)  # so large that activations, which grow with it, decide where the peak is, and not the gradients


@dataclass(frozen=True)
class State:
    """Bytes that one GPU holds from step to step or for the length of one, apart from activations."""

    weights: int
    gradients: int
    adam: int
    ema: int
    working_copies: int
    """bf16 copies of the weights that forward and backward compute with, and under zero2 and hsdp with autocast the gathered fp32 weights."""
    buckets: int
    """In which DDP averages gradients."""

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


def state(num_parameters: int, sharding: str, precision: str, num_gpus: int = NUM_GPUS) -> State:
    """By the recipe's `train.sharding` and `train.precision` (amp_bf16 or bf16)."""
    share = num_parameters if sharding == 'ddp' else -(-num_parameters // num_gpus)
    gathered = 4 * num_parameters if sharding != 'ddp' and precision == 'amp_bf16' else 0
    with_ddp = sharding == 'ddp' and precision == 'amp_bf16' and num_gpus > 1  # FSDP2 reduces block by block instead
    return State(
        weights=4 * share,
        gradients=4 * share,
        adam=8 * share,
        ema=4 * share,
        working_copies=2 * num_parameters + gathered,
        buckets=4 * num_parameters if with_ddp else 0,
    )


@dataclass(frozen=True)
class Activations:
    """Bytes per sample: left for the backward pass, and at the highest moment."""

    saved: int
    peak: int


def activations(unet_name: str, resolution: int, precision: str, checkpointed: bool) -> Activations:
    """Counted on fake tensors; what does not grow with the batch (copies of weights, gradients) is left out."""
    with FakeTensorMode():
        unet = build_unet(unet_name).to(memory_format=torch.channels_last)
        if checkpointed:
            unet.enable_gradient_checkpointing()
        small, large = (alive(unet, batch, resolution // LATENT_PX, precision) for batch in BATCHES)
    more = BATCHES[1] - BATCHES[0]
    return Activations(*((after - before) // more for before, after in zip(small, large, strict=True)))


def alive(unet: UNet2DConditionModel, batch: int, side: int, precision: str) -> tuple[int, int]:
    """Bytes alive after the forward pass, and at the peak, of a training step's U-Net and loss."""
    text_width = unet.config.cross_attention_dim
    with LiveStorages() as storages, as_on_a_gpu(precision):
        noisy = torch.empty(batch, unet.config.in_channels, side, side).contiguous(memory_format=torch.channels_last)
        target = torch.empty_like(noisy)
        text = torch.empty(batch, TEXT_LENGTH, text_width, dtype=torch.bfloat16)
        prediction = unet(noisy, torch.zeros(batch, dtype=torch.int64), text).sample
        loss = weighted_error(prediction, target).mean()
        saved = storages.live_bytes
        loss.backward()
        unet.zero_grad(set_to_none=True)
    return saved, storages.peak_bytes


@contextmanager
def as_on_a_gpu(precision: str) -> Iterator[None]:
    """Autocast of the CPU, which fake tensors can be on without a GPU, made to keep what CUDA's keeps.

    CUDA's autocast normalises in float32 (its list has layer_norm and group_norm), the CPU's does not. With `bf16` there is no autocast
    and everything is bf16, which is what the CPU's does by itself, copies of weights aside.
    """
    functional = torch.nn.functional
    norms = {name: getattr(functional, name) for name in ('group_norm', 'layer_norm')}

    def in_float32(norm: Any) -> Any:
        def call(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return norm(input.float(), *args, **kwargs)

        return call

    patches = {name: in_float32(norm) for name, norm in norms.items()} if precision == 'amp_bf16' else norms
    with torch.autocast('cpu', torch.bfloat16), mock.patch.multiple(functional, **patches):
        yield


def fitting(gpu_gb: float, held: State, per_sample: int) -> int:
    """The largest micro-batch for which state and activations fit, or 0."""
    return max(0, int((gpu_gb * 1e9 * MEMORY_SHARE - held.total) // per_sample))


def main() -> None:
    parser = command('memory', __doc__)
    parser.add_argument('--unet', default='sd2-base', help='configuration in diffusion/models/unets/ (default %(default)s)')
    parser.add_argument('--resolutions', nargs='+', type=positive_int, default=[256, 512], metavar='PX', help='default 256 512')
    args = parser.parse_args()
    with torch.device('meta'):
        num_parameters = sum(parameter.numel() for parameter in build_unet(args.unet).parameters())
    held = {(how, precision): state(num_parameters, how, precision) for how in ('ddp', 'zero2', 'hsdp') for precision in ('amp_bf16', 'bf16')}
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
        counted = activations(args.unet, px, precision, checkpointed)
        fits = {name: fitting(gb, held['ddp', precision], counted.peak) for name, gb in GPUS_GB.items()}
        row = {'benchmark': 'memory', 'unet': args.unet, 'resolution': px, 'precision': precision, 'checkpoint_activations': checkpointed}
        rows.append({**row, 'saved_bytes_per_sample': counted.saved, 'peak_bytes_per_sample': counted.peak, 'micro_batch_ddp': fits})
        how = f'{px} px, {precision}{", checkpointed" if checkpointed else ""}'
        lines.append([how, f'{counted.saved / 1e6:,.0f}', f'{counted.peak / 1e6:,.0f}', *fits.values()])
    print('Activations in MB a sample, eager, and the largest micro-batch that should fit beside the state of ddp (derived, not tried)')
    print_table(['', 'saved', 'peak', *GPUS_GB], lines)
    record(args.out, rows)


if __name__ == '__main__':
    main()
