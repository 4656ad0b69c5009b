"""Which kernel computes attention: chosen by the recipe's `train.attention`, and said.

Everything calls `torch.nn.functional.scaled_dot_product_attention`; PyTorch picks among the kernels that are switched on.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

# name: the kernel, and PyTorch's switch for it
KERNELS = {
    'cudnn': (SDPBackend.CUDNN_ATTENTION, cuda.enable_cudnn_sdp),
    'flash': (SDPBackend.FLASH_ATTENTION, cuda.enable_flash_sdp),
    'efficient': (SDPBackend.EFFICIENT_ATTENTION, cuda.enable_mem_efficient_sdp),
    'math': (SDPBackend.MATH, cuda.enable_math_sdp),
}
HEAD_WIDTH, NUM_TOKENS = 64, 1024  # of Stable Diffusion 2's first blocks at 256 px


any_kernel: Callable[[], AbstractContextManager] = partial(sdpa_kernel, [backend for backend, _ in KERNELS.values()])
"""Context for the encoders, whose attention some kernels cannot compute: CLIP has a mask, the VAE one head of 512 channels in float32."""


class AttentionError(RuntimeError):
    """The kernel that the recipe names cannot run here."""


def use_attention(name: str) -> None:
    """Switch on the one kernel for the rest of the process, or all of them for `auto`.

    Raises:
        AttentionError: an unknown name.
    """
    if name not in (*KERNELS, 'auto'):
        raise AttentionError(f'{name} is not one of auto, {", ".join(KERNELS)}')
    for kernel, (_, enable) in KERNELS.items():
        enable(name in (kernel, 'auto'))


def kernel_in_use(precision: str) -> str:
    """Name of the kernel that PyTorch picks, among those switched on, for self-attention in a training step of this precision on this machine.

    Raises:
        AttentionError: none of them can.
    """
    device, dtype = 'cuda' if torch.cuda.is_available() else 'cpu', torch.float32 if precision == 'fp32' else torch.bfloat16
    query = torch.zeros(1, 1, NUM_TOKENS, HEAD_WIDTH, device=device, dtype=dtype, requires_grad=True)
    try:
        chosen = torch._fused_sdp_choice(query, query, query)
    except RuntimeError as error:
        raise AttentionError(f'cannot compute attention in {precision} with heads of {HEAD_WIDTH} on the {device}: {error}') from error
    return next(name for name, (backend, _) in KERNELS.items() if chosen == backend.value)
