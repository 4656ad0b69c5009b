"""Which kernel computes attention: chosen by the recipe's `train.attention`, and said.

Everything calls `torch.nn.functional.scaled_dot_product_attention`; PyTorch picks among the kernels that are switched on.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch.backends import cuda, cudnn
from torch.nn.attention import SDPBackend, sdpa_kernel

from diffusion.models.unet import unet_config
from diffusion.recipe import Recipe
from diffusion.recipe.rules import PIXELS_PER_LATENT, TEXT_LENGTH

# name: the kernel, and PyTorch's switch for it
KERNELS = {
    'cudnn': (SDPBackend.CUDNN_ATTENTION, cuda.enable_cudnn_sdp),
    'flash': (SDPBackend.FLASH_ATTENTION, cuda.enable_flash_sdp),
    'efficient': (SDPBackend.EFFICIENT_ATTENTION, cuda.enable_mem_efficient_sdp),
    'math': (SDPBackend.MATH, cuda.enable_math_sdp),
}
RIGHT_CUDNN = 91501  # before 9.15.1 its kernels were wrong for lengths that 128 does not divide (pytorch#169849), as 77, 64 and 16 are


class AttentionError(RuntimeError):
    """The kernel that the recipe names cannot run here."""


def cudnn_is_right() -> bool:
    """Whether cuDNN's attention, if there is one, computes what it should for all lengths."""
    return (cudnn.version() or RIGHT_CUDNN) >= RIGHT_CUDNN


def any_kernel() -> AbstractContextManager:
    """Context for the encoders, whose attention some kernels cannot compute: CLIP has a mask, the VAE one head of 512 channels in float32."""
    return sdpa_kernel([backend for name, (backend, _) in KERNELS.items() if name != 'cudnn' or cudnn_is_right()])


def use_attention(name: str) -> None:
    """Switch on the one kernel for the rest of the process, or for `auto` all that compute what they should.

    Raises:
        AttentionError: an unknown name, or a version of cuDNN whose kernels are wrong.
    """
    if name not in (*KERNELS, 'auto'):
        raise AttentionError(f'{name} is not one of auto, {", ".join(KERNELS)}')
    if name == 'cudnn' and not cudnn_is_right():
        raise AttentionError(
            f'needs cuDNN 9.15.1 (91501), and PyTorch {torch.__version__} here brings {cudnn.version()}, whose attention is wrong for numbers '
            'of tokens that 128 does not divide (pytorch#169849)'
        )
    for kernel, (_, enable) in KERNELS.items():
        enable(name in (kernel, 'auto') and (kernel != 'cudnn' or cudnn_is_right()))


def shapes(recipe: Recipe) -> list[tuple[int, int, int]]:
    """(queries, keys, width of a head) of every attention of the recipe's U-Net, over latents of its square resolution."""
    config, side = unet_config(recipe.model.unet), recipe.data.resolution // PIXELS_PER_LATENT
    channels, heads = config['block_out_channels'], config['attention_head_dim']  # which is their number: a misnomer of diffusers
    levels = [level for level, block in enumerate(config['down_block_types']) if 'CrossAttn' in block]
    found = []
    for level in [*levels, len(channels) - 1]:  # the last is the middle's
        tokens = max(1, side >> level) ** 2
        found += [(tokens, keys, channels[level] // heads[level]) for keys in (tokens, TEXT_LENGTH)]
    return found


def kernels_in_use(recipe: Recipe) -> str:
    """Names of the kernels that PyTorch picks, among those switched on, in a training step on this machine: mostly one, or several with a comma.

    Raises:
        AttentionError: none of them can compute one of the `shapes`.
    """
    precision, device = recipe.train.precision, 'cuda' if torch.cuda.is_available() else 'cpu'
    dtype = torch.float32 if precision == 'fp32' else torch.bfloat16
    names = {backend.value: name for name, (backend, _) in KERNELS.items()}
    chosen = set()
    for queries, keys, width in shapes(recipe):
        query, key = (torch.zeros(1, 1, tokens, width, device=device, dtype=dtype, requires_grad=True) for tokens in (queries, keys))
        try:
            chosen.add(names[torch._fused_sdp_choice(query, key, key)])
        except RuntimeError as error:
            raise AttentionError(
                f'cannot compute attention of {queries} to {keys} tokens in {precision} with heads of {width} on the {device}: {error}'
            ) from error
    return ', '.join(sorted(chosen))
