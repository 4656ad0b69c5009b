"""Kernels of this machine: its ceilings, and attention, convolution and normalization in the shapes of the U-Net."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.checking.cases import Case, NotHere, Setting, Values
from benchmarks.checking.errors import kernel_checks
from benchmarks.timing import cudnn_benchmark, device, timed
from diffusion.encoders.frozen_part import KERNELS, AttentionError, use_attention
from diffusion.families.networks import find_network
from diffusion.families.registry import family_of
from diffusion.recipe.rules import PIXELS_PER_LATENT, TEXT_LENGTH

NO_KERNEL = ('No available kernel', 'No viable backend')  # what PyTorch says on a GPU and on a CPU
NUM_EXACT = 2  # samples of a batch whose attention is computed in float64 too
# (channels in, channels out, side) of 3 x 3 convolutions of SD2's levels at 256 px; two of them read a concatenation.
CONVOLUTIONS = ((320, 320, 32), (640, 320, 32), (640, 640, 16), (1280, 1280, 8), (2560, 1280, 8))
NORMS = ((320, 32), (640, 16), (320, 64))  # (channels, side)
LAYOUTS = {'channels_last': torch.channels_last, 'contiguous': torch.contiguous_format}


def dtype() -> torch.dtype:
    """Return the dtype of the U-Net's products on this device."""
    return torch.bfloat16 if device().type == 'cuda' else torch.float32


def seconds(call: Callable[[], object]) -> float:
    """Median seconds of a call; many calls of microseconds are timed together."""
    return timed(call, steps=100, warmup=5).median_sec if device().type == 'cuda' else timed(call, steps=3, warmup=1).median_sec


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=device(), dtype=dtype())


def ceilings(setting: Setting) -> list[Case]:
    return [Case('matmul', partial(matmul, 512 if setting.tiny else 8192)), Case('copy', partial(copy, 1 << (22 if setting.tiny else 30)))]


def matmul(side: int) -> Values:
    """Square, in bf16 on a GPU: the highest rate that any layer can reach."""
    a, b = random(side, side), random(side, side)
    sec = seconds(lambda: a @ b)
    return {'side': side, 'dtype': str(dtype()), 'median_sec': sec, 'tflop_per_sec': 2 * side**3 / sec / 1e12}


def copy(count: int) -> Values:
    """Reads and writes each of `count` float32 once."""
    source = torch.randn(count, device=device())
    target = torch.empty_like(source)
    sec = seconds(lambda: target.copy_(source))
    return {'bytes': 8 * count, 'median_sec': sec, 'gb_per_sec': 8 * count / sec / 1e9}


def in_the_unet(setting: Setting) -> list[Case]:
    """All kernels of the U-Net that are measured one by one."""
    return [*attention(setting), *convolution(setting), *group_norm(setting)]


def attention(setting: Setting) -> list[Case]:
    """Each shape of the U-Net at both resolutions, by each kernel; on a GPU without `math`, which holds the whole matrix of weights."""
    named = find_network(setting.network)
    kernels = [name for name in KERNELS if name != 'math' or device().type == 'cpu']
    cases = []
    for px, batch in setting.micro_batch.items():
        side = px // PIXELS_PER_LATENT
        for tokens, keys, width in dict.fromkeys(family_of(setting.network).attention(named.config, side, TEXT_LENGTH)):
            level = (side // math.isqrt(tokens)).bit_length() - 1  # of the U-Net: each halves the side
            heads = named.config['block_out_channels'][level] // width
            for name in kernels:
                case = partial(attend, name, batch, heads, tokens, keys, width)
                cases.append(Case(f'attention, {px} px, {tokens} x {keys}, {name}', case, may_run_out=True))
    return cases


def attend(kernel: str, batch: int, heads: int, tokens: int, keys: int, width: int) -> Values:
    """Forward, and forward with backward, laid out as the U-Net's: (B, L, heads, width) seen as (B, heads, L, width)."""
    query, key, value = (random(batch, length, heads, width).transpose(1, 2).requires_grad_() for length in (tokens, keys, keys))
    gradient = random(batch, tokens, heads, width).transpose(1, 2)
    names = {backend.value: name for name, (backend, _) in KERNELS.items()}
    automatic = names.get(torch._fused_sdp_choice(query, key, value), 'another')
    forward = partial(F.scaled_dot_product_attention, query, key, value)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), (query, key, value), gradient)

    try:
        use_attention(kernel)
        out, gradients = forward(), both()
        forward_sec, both_sec = seconds(forward), seconds(both)
    except AttentionError as error:
        raise NotHere(str(error)) from error
    except RuntimeError as error:
        if not any(sign in str(error) for sign in NO_KERNEL):
            raise
        raise NotHere(f'PyTorch {torch.__version__} has no such kernel for this shape on this device') from error
    finally:
        use_attention('auto')
    exact = [tensor[:NUM_EXACT].detach().double().requires_grad_() for tensor in (query, key, value)]
    exact_out = torch.softmax(exact[0] @ exact[1].mT / width**0.5, -1) @ exact[2]
    exact_gradients = torch.autograd.grad(exact_out, exact, gradient[:NUM_EXACT].double())
    flop = 4 * batch * heads * tokens * keys * width  # two products of the forward pass; five of the backward pass
    return {
        'kernel': kernel,
        'chosen_by_pytorch': automatic,
        'forward_sec': forward_sec,
        'both_sec': both_sec,
        'tflop_per_sec': 3.5 * flop / both_sec / 1e12,
        **kernel_checks(
            ('output', 'query', 'key', 'value'),
            [out[:NUM_EXACT], *(part[:NUM_EXACT] for part in gradients)],
            [exact_out, *exact_gradients],
        ),
    }


def convolution(setting: Setting) -> list[Case]:
    shapes: Sequence[tuple[int, int, int]] = ((32, 32, 8), (64, 32, 8)) if setting.tiny else CONVOLUTIONS
    batch = 2 if setting.tiny else setting.micro_batch[256]
    searches = (False, True) if device().type == 'cuda' else (False,)
    return [
        Case(f'convolution, {shape[0]} to {shape[1]}, {shape[2]} x {shape[2]}, {layout}{", cudnn.benchmark" if search else ""}',
             partial(convolve, batch, *shape, layout, search))
        for shape in shapes for layout in LAYOUTS for search in searches
    ]  # fmt: skip


def convolve(batch: int, channels_in: int, channels_out: int, side: int, layout: str, search: bool) -> Values:
    """Forward, and forward with backward.

    Args:
        search: let cuDNN time its algorithms instead of guessing the best one.
    """
    x, weight, gradient = (
        random(*shape).contiguous(memory_format=LAYOUTS[layout])
        for shape in ((batch, channels_in, side, side), (channels_out, channels_in, 3, 3), (batch, channels_out, side, side))
    )
    x, weight = x.requires_grad_(), weight.requires_grad_()
    forward = partial(F.conv2d, x, weight, padding=1)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), (x, weight), gradient)

    with cudnn_benchmark(search):
        out, gradients = forward(), both()
        forward_sec, both_sec = seconds(forward), seconds(both)
    exact = [tensor.detach().double().contiguous().requires_grad_() for tensor in (x, weight)]
    exact_out = F.conv2d(exact[0], exact[1], padding=1)
    exact_gradients = torch.autograd.grad(exact_out, exact, gradient.double().contiguous())
    flop = 2 * batch * channels_in * channels_out * 9 * side**2
    return {
        'layout': layout,
        'cudnn_benchmark': search,
        'forward_sec': forward_sec,
        'both_sec': both_sec,
        'tflop_per_sec': 3 * flop / both_sec / 1e12,
        **kernel_checks(('output', 'input', 'weight'), [out, *gradients], [exact_out, *exact_gradients]),
    }


def group_norm(setting: Setting) -> list[Case]:
    shapes, batch = (((32, 8),), 2) if setting.tiny else (NORMS, setting.micro_batch[256])
    return [
        Case(f'group norm, {channels} x {side} x {side}, {how}', partial(normalize, batch, channels, side, how == 'compiled'), setting.sec(10))
        for channels, side in shapes for how in ('eager', 'compiled')
    ]  # fmt: skip


def normalize(batch: int, channels: int, side: int, compiles: bool) -> Values:
    """GroupNorm and SiLU of channels_last activations under autocast: is the layout kept, and how many bytes move a second?"""
    on_gpu = device().type == 'cuda'
    if compiles and not on_gpu:
        raise NotHere('needs a GPU: compiling for a CPU takes longer than this whole check')
    x = random(batch, channels, side, side).contiguous(memory_format=torch.channels_last).requires_grad_()
    norm = nn.GroupNorm(32, channels).to(device())

    def layer(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=on_gpu):
            return F.silu(norm(x)).to(x.dtype)

    function = torch.compile(layer, dynamic=False) if compiles else layer
    out = function(x)
    gradient = torch.randn_like(out)
    inputs = (x, *norm.parameters())
    gradients = torch.autograd.grad(function(x), inputs, gradient)
    forward_sec = seconds(lambda: function(x))
    both_sec = seconds(lambda: torch.autograd.grad(function(x), inputs, gradient))
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    exact_out = F.silu(F.group_norm(exact[0], 32, exact[1], exact[2], norm.eps))
    exact_gradients = torch.autograd.grad(exact_out, exact, gradient.double())
    num_bytes = x.numel() * x.element_size()
    return {
        'keeps_channels_last': out.is_contiguous(memory_format=torch.channels_last),
        'forward_sec': forward_sec,
        'both_sec': both_sec,
        'gb_per_sec': 3 * num_bytes / forward_sec / 1e9,  # read for the statistics, read again, written
        **kernel_checks(('output', 'input'), [out, gradients[0]], [exact_out, exact_gradients[0]]),
    }
