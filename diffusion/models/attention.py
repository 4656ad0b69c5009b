"""Which kernel computes attention: chosen by the recipe's `train.attention`, and said.

Everything calls `torch.nn.functional.scaled_dot_product_attention`; PyTorch picks among the kernels that are switched on.
"""

from __future__ import annotations

import torch
from torch.backends import cuda
from torch.nn.attention import SDPBackend

# name: the kernel, and PyTorch's switch for it
KERNELS = {
    'cudnn': (SDPBackend.CUDNN_ATTENTION, cuda.enable_cudnn_sdp),
    'flash': (SDPBackend.FLASH_ATTENTION, cuda.enable_flash_sdp),
    'efficient': (SDPBackend.EFFICIENT_ATTENTION, cuda.enable_mem_efficient_sdp),
    'math': (SDPBackend.MATH, cuda.enable_math_sdp),
}
HEAD_WIDTH = 64  # of Stable Diffusion 2


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


def kernel_in_use(device: torch.device, dtype: torch.dtype, num_tokens: int = 1024, head_width: int = HEAD_WIDTH) -> str:
    """Name of the kernel that PyTorch picks for self-attention of a training step among those switched on.

    Raises:
        AttentionError: none of them can.
    """
    query = torch.zeros(1, 1, num_tokens, head_width, device=device, dtype=dtype, requires_grad=True)
    try:
        chosen = torch._fused_sdp_choice(query, query, query)
    except RuntimeError as error:
        raise AttentionError(f'cannot compute attention of {dtype} with heads of {head_width} on {device.type}: {error}') from error
    return next(name for name, (backend, _) in KERNELS.items() if chosen == backend.value)
