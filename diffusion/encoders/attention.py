"""Which kernel computes attention: chosen by the recipe's `train.attention`, and said.

Everything calls `torch.nn.functional.scaled_dot_product_attention`; PyTorch picks among the kernels that are switched on.
"""

from contextlib import AbstractContextManager

import torch
from torch.backends import cuda, cudnn
from torch.nn.attention import SDPBackend, sdpa_kernel

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
