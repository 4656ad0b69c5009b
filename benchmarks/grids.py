"""Measure what a sample grid costs in training steps.

    python -m benchmarks.grids RECIPE [--gpus 1] [--rounds 5] [--out grids.jsonl] [key=value ...]

A step is an optimizer step of the recipe on one of --gpus GPUs, as `train.py` does it: its micro-batches are timed one by one and added up. A grid is
`log.samples` of the recipe, drawn by the modules that are loaded for training. Both take turns in one process, so that what else the machine does
hits both. Weights and data are random and encoders stand-ins of the real sizes: neither changes the time.

Next to it stands an estimate for machines that are not at hand: FLOP of the network's forward passes (prompts x sampling steps, twice with guidance)
over FLOP of its forward and backward passes in a step. It leaves out the VAE, and that small batches use a GPU less well.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measured import command, print_table, record
from diffusion.common.arguments import positive_int
from diffusion.common.text import counted
from diffusion.contracts.errors import InputError, run_command
from diffusion.recipe.averaging import profiles
from diffusion.recipe.schema import present

if TYPE_CHECKING:
    from diffusion.recipe import Recipe


def passes(recipe: Recipe) -> int:
    """Images that go through the network, forward, for one grid."""
    samples = recipe.log.samples
    return len(present(samples.prompts)) * samples.steps * (1 if samples.guidance == 1 else 2)


def forward_flops(name: str, latent_size: tuple[int, int], text_length: int) -> int:
    """FLOP of the network's forward pass over latents of one (height, width), counted as `training_flops` counts."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from diffusion.families.networks import find_network
    from diffusion.families.registry import family_of

    family, config = family_of(name), find_network(name).config
    with torch.device('meta'), torch.no_grad():
        network, inputs = family.build(config), family.example(config, 1, latent_size, text_length)
        with FlopCounterMode(display=False) as counter:
            family.denoise(network, *inputs)
    return counter.get_total_flops()


def measure(recipe: Recipe, rounds: int, gpus: int) -> dict[str, Any]:
    """The row of a recipe whose encoders are there."""
    from composer.core import get_precision_context
    from composer.utils import get_device

    from benchmarks.optimizations import Switches
    from benchmarks.step_rows import build_step, possible
    from benchmarks.timing import device, interleaved
    from diffusion.families.registry import training_flops
    from diffusion.monitoring.sample_grid import draw_grid

    on_gpu = get_device(None).name == 'gpu'  # Composer's device switches TF32 on, as in training
    train, micro = recipe.train, int(recipe.batch.micro_size)
    trained = Switches(
        sdpa=True, channels_last=True, fused_adamw=True, reads_loss=False, keyed_noise=True, bf16_encoders=True, compile=train.compile,
        resident_bf16=train.precision == 'bf16', ema=bool(profiles(recipe.ema)),
    )  # fmt: skip
    model, batch, step = build_step(possible(trained, device(), may_compile=on_gpu), recipe, device())

    def draw() -> None:
        model.eval()
        with get_precision_context('fp32' if train.precision == 'fp32' else 'amp_bf16'):
            draw_grid(model, recipe.log.samples, recipe.data.resolution)
        model.train()

    timings = interleaved({'step': step, 'grid': draw}, rounds)
    micro_batches = recipe.batch.global_size / (micro * gpus)
    step_sec, grid_sec = timings['step'].median_sec * micro_batches, timings['grid'].median_sec
    height, width = batch['moments'].shape[-2:]
    counted_for = model.named.name, (height, width), model.encoders.text.length
    flop = training_flops(*counted_for) * micro * micro_batches
    samples = recipe.log.samples
    return {
        'benchmark': 'grids', 'recipe': recipe.name, 'network': model.named.name, 'resolution': recipe.data.resolution, 'precision': train.precision,
        'micro_batch': micro, 'micro_batches': micro_batches, 'num_gpus': gpus if on_gpu else 0, 'num_prompts': len(present(samples.prompts)),
        'sampling_steps': samples.steps, 'guidance': samples.guidance, 'rounds': rounds, 'step_sec': step_sec, 'step_spread': timings['step'].spread,
        'grid_sec': grid_sec, 'grid_spread': timings['grid'].spread, 'grid_in_steps': grid_sec / step_sec,
        'estimated_in_steps': passes(recipe) * forward_flops(*counted_for) / flop,
    }  # fmt: skip


def main() -> int:
    parser = command('grids', __doc__)
    parser.add_argument('recipe', metavar='RECIPE', help='its log.samples are drawn')
    parser.add_argument('overrides', nargs='*', metavar='key=value', help='changes to it')
    parser.add_argument('--gpus', type=positive_int, default=1, help='that share a global batch; 1 is measured (default %(default)s)')
    parser.add_argument('--rounds', type=positive_int, default=5, help='grids to time, each with a micro-batch (default %(default)s)')
    args = parser.parse_intermixed_args()

    def work() -> None:
        import torch

        from diffusion.cost.hardware import device_name
        from diffusion.encoders.random_encoders import write_stand_in
        from diffusion.families.networks import find_network
        from diffusion.recipe import load_recipe

        with tempfile.TemporaryDirectory() as encoders:
            stand_in = [f'model.encoders.source={encoders}', 'model.encoders.revision=null', 'data.kind=synthetic']
            here = [] if torch.cuda.is_available() else ['train.precision=fp32', 'train.compile=null']
            recipe = load_recipe(args.recipe, [*args.overrides, *stand_in, *here], args.gpus)
            if not isinstance(recipe.batch.micro_size, int):
                raise InputError(f'batch.micro_size: {recipe.batch.micro_size}: what is measured needs a number; set batch.micro_size=NUMBER')
            if (kind := find_network(recipe.model.network).encoders) is None:
                raise InputError(f'model.network: {recipe.model.network}: its file names no stand-ins for its encoders')
            write_stand_in(Path(encoders), kind)
            row = measure(recipe, args.rounds, args.gpus)
        print(f'{row["recipe"]}, {row["network"]}, {row["resolution"]} px, {device_name()}, torch {torch.__version__}')
        print_table(
            ['', 'seconds', 'spread', 'steps', 'estimated steps'],
            [
                ['optimizer step', row['step_sec'], f'{row["step_spread"]:.0%}', 1.0, 1.0],
                ['sample grid', row['grid_sec'], f'{row["grid_spread"]:.0%}', row['grid_in_steps'], row['estimated_in_steps']],
            ],
        )
        print(
            f'A grid of {counted(row["num_prompts"], "prompt")} x {counted(row["sampling_steps"], "sampling step")} costs as much as '
            f'{row["grid_in_steps"]:.2g} training steps (by FLOP {row["estimated_in_steps"]:.2g}).'
        )
        every = recipe.log.samples.every
        if every is not None:
            print(f'With log.samples.every={every} that is {row["grid_in_steps"] / every.batches:.2%} more time.')
        record(args.out, [row])

    return run_command(work)


if __name__ == '__main__':
    raise SystemExit(main())
