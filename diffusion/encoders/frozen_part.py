"""One frozen network: read when it is first used, never trained (an adapter of it may be), never saved in a checkpoint.

The kernel of its attention is chosen by the recipe's `train.attention`: everything calls `scaled_dot_product_attention`, and PyTorch picks among
the kernels that are switched on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import nn
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


Module = TypeVar('Module', bound=nn.Module)


class FrozenPart(Generic[Module]):
    """A process that does not use it holds none of its weights.

    Args:
        load: returns the network, in float32 on the CPU.
    """

    def __init__(self, load: Callable[[], Module]):
        self._load = load
        self.adapted = False
        self.device = torch.device('cpu')
        self._placement: dict[str, Any] = {}
        self._backend: str | None = None

    @classmethod
    def of(cls, module: Module) -> FrozenPart[Module]:
        """One that is in memory."""
        part = cls(lambda: module)
        _ = part.module
        return part

    @property
    def is_loaded(self) -> bool:
        return 'module' in self.__dict__

    @cached_property
    def module(self) -> Module:
        """The network, frozen, on its device; raises EncoderError if it cannot be read, or has missing, unexpected or misshapen weights."""
        module = self._read().eval().requires_grad_(False)
        if self._placement.get('dtype', torch.float32) != torch.float32:
            self.__dict__['sha256'] = weights_sha256(module)  # of what was loaded, not of what is left of it
        module.to(**self._placement)
        if self._backend is not None:
            self.in_training(module).compile(dynamic=False, backend=self._backend)
        return module

    @cached_property
    def sha256(self) -> str:
        """Digest of the weights as they were loaded, to recognise others; a network that is not in use is read for it and let go."""
        return weights_sha256(self.module if self.is_loaded else self._read())

    def to(self, device: torch.device | str, **placement: Any) -> None:
        """Place the network, now or when it is loaded. `placement`: dtype and memory_format, as `nn.Module.to` takes them."""
        self.device = torch.device(device)
        self._placement = {'device': self.device, **placement}
        if self.is_loaded:
            if placement.get('dtype', torch.float32) != torch.float32:
                _ = self.sha256
            self.module.to(**self._placement)

    def adapt(self, add_adapter: Callable[[Module], object]) -> None:
        """Let `add_adapter` add weights that are trained: from then on calls have gradients. The digest stays that of the frozen ones."""
        _ = self.sha256
        add_adapter(self.module)
        self.adapted = True

    def compile(self, backend: str) -> None:
        """Mark what training calls for compilation in its first call."""
        self._backend = backend
        if self.is_loaded:
            self.in_training(self.module).compile(dynamic=False, backend=backend)

    def in_training(self, module: Module) -> nn.Module:
        """The part of the network that training calls."""
        return module

    @contextmanager
    def computing(self, bf16: bool = False) -> Iterator[None]:
        """Context of its calls: no gradients unless it has an adapter, any kernel of attention, float32 (or its matrix products in bf16)."""
        with any_kernel(), nullcontext() if self.adapted else torch.inference_mode(), torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            yield

    def _read(self) -> Module:
        with torch.random.fork_rng(devices=()):  # initialising what is then overwritten must not move the run's random numbers
            return self._load()


def weights_sha256(module: nn.Module) -> str:
    """Digest of names, shapes and float32 values of all weights: equal for equal weights, however the file is laid out.

    CLIP's count without a leading `text_model.`, which classes and versions of transformers have or have not; digests of earlier runs stay valid.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted((name.removeprefix('text_model.'), tensor) for name, tensor in module.state_dict().items()):
        digest.update(f'{name}{tuple(tensor.shape)}'.encode())
        digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
