"""Does this device compute what the CPU computes? Each part of a training step against the same in float32 or float64 on the CPU."""

import copy
import math
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from composer.utils import get_device
from torch import Tensor, nn

from benchmarks.checking.cases import Case, Setting, Values, require_gpu
from benchmarks.optimizations import Switches
from benchmarks.step_rows import build_step, recipe_of
from benchmarks.timing import device, free_memory, on_gpu
from diffusion.datasets.keyed_random import Draw, normal, random_bits
from diffusion.encoders.frozen import FrozenEncoders
from diffusion.families.registry import build_network
from diffusion.objectives.objective import weighted_error
from diffusion.recipe.averaging import Profile
from diffusion.recipe.schema import EncoderSource
from diffusion.training.ema import EMA
from diffusion.training.sharding import local

UNET, RESOLUTION, BATCH = 'tiny', 64, 8  # large enough for every kind of layer, small enough for float64 on a CPU
# Gradients of a whole network: roundings of all layers add up, and TF32 (10 bits) multiplies float32 on a GPU.
NETWORK = {'fp32': 1e-4, 'tf32': 5e-3, 'bf16': 6e-2}
# Adam's first step is the rate times the sign of each gradient: those close to 0 may have either.
UPDATE = {'fp32': 2e-2, 'tf32': 0.2, 'bf16': 0.4}
CPU = torch.device('cpu')
# Same noise and objective, everything else as diffusers' example does it: nothing that makes a step fast.
PLAIN = Switches(keyed_noise=True)
FAST = Switches(sdpa=True, channels_last=True, fused_adamw=True, reads_loss=False, keyed_noise=True)


def relative_error(value: Tensor, reference: Tensor) -> float:
    """Norm of the difference over that of the reference, in float64 on the reference's device."""
    exact = reference.detach().double()
    return ((value.detach().to(exact) - exact).norm() / exact.norm()).item()


def num_different(values: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> int:
    """Tensors that are not equal to the bit, or that only one of the two has."""
    common = values.keys() & others.keys()
    return len(values.keys() ^ others.keys()) + sum(not torch.equal(values[name].cpu(), others[name].cpu()) for name in common)


def cases(setting: Setting) -> list[Case]:
    encoders = setting.encoders('tiny')
    get_device(None)  # Composer's device switches TF32 on, as in training
    planned_sec = setting.sec(30)
    return [
        Case('noise', noise),
        Case("U-Net's gradient, fp32, against float64", unet_gradient),
        Case('step, fp32', partial(step, encoders, 'fp32', None)),
        Case('step, amp_bf16', partial(step, encoders, 'amp_bf16', None)),
        Case('step, amp_bf16, compile blocks', partial(step, encoders, 'amp_bf16', 'blocks'), planned_sec),
        Case('step, amp_bf16, compile network', partial(step, encoders, 'amp_bf16', 'network'), planned_sec),
        Case('step, bf16 (FSDP2)', partial(step, encoders, 'bf16', None), planned_sec),
        Case('found_inf', found_inf),
        Case('EMA', average),
        Case('encoders', partial(encode, encoders)),
    ]


def noise() -> Values:
    """Keyed noise: the integers to the bit, the normal numbers to a few roundings of log, sin and cos."""
    key = torch.stack([torch.arange(64), torch.arange(64) << 33, torch.arange(64) % 3], 1)
    here = key.to(device())
    # In float64, from the same integers: the reference that a CPU can fail as well.
    first, second = ((random_bits(17, key, Draw.NOISE, 4096).double() + 0.5) * 2.0**-32).unflatten(1, (-1, 2)).unbind(-1)
    radius, angle = torch.sqrt(-2 * torch.log(first)), 2 * math.pi * second
    exact = torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], -1).flatten(1)
    drawn = normal(17, here, Draw.NOISE, (4, 32, 32)).cpu().double().flatten(1)
    different = (random_bits(17, key, Draw.NOISE, 4096) != random_bits(17, here, Draw.NOISE, 4096).cpu()).sum().item()
    return {'checks': {'words that differ': [different, 0], 'largest error': [(drawn - exact).abs().max().item(), 1e-4]}}


def gradient_of(unet: nn.Module, where: torch.device, dtype: torch.dtype) -> Tensor:
    """All gradients of the U-Net's squared error on fixed inputs, one after the other."""
    generator = torch.Generator().manual_seed(1)
    side = RESOLUTION // 4
    noisy, target = (torch.randn(BATCH, 4, side, side, generator=generator).to(where, dtype) for _ in range(2))
    text = torch.randn(BATCH, 16, unet.config.cross_attention_dim, generator=generator).to(where, dtype)  # type: ignore[union-attr, arg-type]
    noisy = noisy.contiguous(memory_format=torch.channels_last)
    weighted_error(unet(noisy, torch.arange(BATCH, device=where) * 100, text).sample, target).mean().backward()
    return torch.cat([parameter.grad.double().flatten().cpu() for parameter in unet.parameters() if parameter.grad is not None])


def unet_gradient() -> Values:
    torch.manual_seed(0)
    unet = build_network(UNET).to(memory_format=torch.channels_last)
    exact = gradient_of(copy.deepcopy(unet).double(), CPU, torch.float64)
    error = relative_error(gradient_of(unet.to(device()), device(), torch.float32), exact)
    return {'checks': {'gradient': [error, NETWORK['tf32' if on_gpu() else 'fp32']]}}


def gradients_of_step(switches: Switches, precision: str, encoders: Path, where: torch.device) -> tuple[dict[str, Tensor], Tensor]:
    """The gradients that a step leaves, by name, and what it changed of the weights, one after the other; on the CPU."""
    more: dict[str, Any] = {'train.precision': precision, 'optimizer.clip_norm': 'null'}  # its gradients are then the same wherever they are clipped
    recipe = recipe_of(switches, UNET, RESOLUTION, 'latents', BATCH, encoders, where, **more)
    model, batch, train = build_step(switches, recipe, where)
    generator = torch.Generator().manual_seed(2)
    for like in [*batch['tokens'].values(), batch['sample_key'], batch['moments']]:  # drawn on the CPU: generators of other devices draw others
        drawn = torch.randn(like.shape, generator=generator) if like.is_floating_point() else torch.randint(0, 250, like.shape, generator=generator)
        like.copy_(drawn)
    weights = weights_of(model.network)
    train()
    gradients = {name: local(weight.grad).float().cpu() for name, weight in model.network.named_parameters() if weight.grad is not None}
    return gradients, weights_of(model.network) - weights


def weights_of(unet: nn.Module) -> Tensor:
    return torch.cat([local(weight.detach()).double().cpu().flatten() for weight in unet.parameters()])


@cache
def plain_step(encoders: Path) -> tuple[dict[str, Tensor], Tensor]:
    return gradients_of_step(PLAIN, 'fp32', encoders, CPU)


def step(encoders: Path, precision: str, mode: str | None) -> Values:
    """A whole step as train.py takes it, against the plain loop in float32 on the CPU."""
    if mode is not None or precision == 'bf16':
        require_gpu()
    reference, plain_update = plain_step(encoders)
    resident = precision == 'bf16'
    switches = Switches(**{**vars(FAST), 'compile': mode, 'resident_bf16': resident, 'bf16_encoders': precision != 'fp32'})
    gradients, update = gradients_of_step(switches, precision, encoders, device())
    free_memory()
    kind = 'bf16' if precision != 'fp32' else 'tf32' if on_gpu() else 'fp32'
    if gradients.keys() != reference.keys():
        return {'checks': {'gradients that only one of them has': [len(gradients.keys() ^ reference.keys()), 0]}}
    error = relative_error(torch.cat([gradients[name].flatten() for name in reference]), torch.cat([g.flatten() for g in reference.values()]))
    return {
        'checks': {
            'gradient': [error, NETWORK[kind]],
            'update of the weights': [relative_error(update, plain_update), UPDATE[kind]],
        }
    }


def found_inf() -> Values:
    """Fused AdamW leaves weights, moments and its count alone where `found_inf` says so, and takes the step where it does not."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(10_000, device=device()))
    optimizer = torch.optim.AdamW([weight], fused=True)

    def take(gradient: float, skipped: float) -> dict[str, Tensor]:
        weight.grad = torch.full_like(weight, gradient)
        optimizer.found_inf = torch.full((), skipped, device=device())  # type: ignore[attr-defined]
        optimizer.step()
        return {'weight': weight.detach().clone(), **{name: value.clone() for name, value in optimizer.state[weight].items()}}

    first, skipped, second = take(1.0, 0.0), take(math.nan, 1.0), take(1.0, 0.0)
    return {
        'checks': {
            'tensors that a skipped step changes': [num_different(first, skipped), 0],
            'tensors that a step leaves unchanged': [len(first) - num_different(skipped, second), 0],
        }
    }


def average() -> Values:
    """Five updates against the recursion in float64."""
    torch.manual_seed(0)
    layer, ema, keep = nn.Linear(512, 512).to(device()), EMA([Profile.of_half_life(10)]), 0.9
    ema.update(layer, keep)
    exact = layer.weight.detach().double().cpu()
    for _ in range(5):
        with torch.no_grad():
            layer.weight.add_(torch.randn_like(layer.weight))
        ema.update(layer, keep)
        exact = keep * exact + (1 - keep) * layer.weight.detach().double().cpu()
    return {'checks': {'average': [relative_error(ema.average['weight'], exact), 1e-6]}}


def encode(folder: Path) -> Values:
    """Text and images as training encodes them, against the CPU: images in float64, text with attention written out (its mask has no float64)."""
    plain, here = (FrozenEncoders.load(EncoderSource(str(folder))) for _ in range(2))
    here.to(device(), torch.bfloat16 if on_gpu() else torch.float32, vae_in_bf16=on_gpu())
    vae = plain.vae.module.double()
    plain.text.parts['text_encoder'].module.set_attn_implementation('eager')
    tokens = plain.text.tokenize(['a red circle', ''])
    images = torch.randint(0, 256, (4, 3, RESOLUTION, RESOLUTION), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    limit = NETWORK['bf16' if on_gpu() else 'fp32']
    with torch.no_grad():
        exact = vae.encode(images.double() / 127.5 - 1).latent_dist.parameters
    return {
        'checks': {
            'text': [relative_error(here.text.encode(tokens).text, plain.text.encode(tokens).text), limit],
            'moments': [relative_error(here.vae.encode(images.to(device())), exact), limit],
        }
    }
