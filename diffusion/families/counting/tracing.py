"""Parameters, FLOP and activations of networks, counted without weights: on the meta device, and a training step on fake tensors, whose shapes and
dtypes are exact.

The network's forward and backward pass run eagerly as they would under CUDA's autocast, and the storages alive at each moment are added up.
Compiled steps take less; cuDNN's workspaces and the allocator's gaps take more.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from diffusion.encoders.frozen import VAES
from diffusion.encoders.random_encoders import text_encoders_like, text_lengths_like, vae_like
from diffusion.families.adapters import ADAPTED_TEXT, TEXT_TARGETS, add_adapter, let_gradients_reach, store_frozen_in_bf16, trained_weights
from diffusion.families.family import Config, Family
from diffusion.families.networks import find_network
from diffusion.families.registry import build_network, family_of
from diffusion.families.registry import training_flops as training_flops  # asked for here, as all that needs torch
from diffusion.objectives.objective import weighted_error
from diffusion.recipe.rules import TEXT_LENGTH
from diffusion.recipe.schema import Adapter

Module = TypeVar('Module', bound=nn.Module)

ENCODED_BATCH = 64  # large enough for the VAE's own weights not to count


class Activations(NamedTuple):
    """Bytes per sample: left for the backward pass, and at the highest moment."""

    saved: int
    peak: int


def network_facts(name: str) -> list[int]:
    """Parameters, channels of latents, channels of text."""
    with torch.device('meta'):
        parameters = sum(parameter.numel() for parameter in build_network(name).parameters())
    family, config = family_of(name), find_network(name).config
    return [parameters, family.latent_channels(config), family.text_width(config)]


def family_facts(network: str) -> list[int]:
    """Whether its family reads size and crop, is trained by a flow, takes bf16, and has tokens."""
    family = family_of(network)
    facts = family.reads_geometry, family.objective == 'flow', family.takes_bf16, family.token_arguments
    return [int(bool(has)) for has in facts]


def num_in_matrices(name: str) -> int:
    """Parameters that an optimizer may treat as matrices."""
    with torch.device('meta'):
        return sum(weight.numel() for weight in family_of(name).matrices(build_network(name)))


def num_trained(name: str, adapter: Adapter) -> int:
    """Parameters of the network's adapter."""
    with torch.device('meta'):
        network = build_network(name)
        add_adapter(network, adapter, family_of(name).adapter_targets[adapter.targets], seed=0)
    return sum(weight.numel() for weight in trained_weights(network).values())


def adapted_text(like: str, adapter: Adapter) -> list[int]:
    """Parameters of the text encoders' adapters, and FLOP of a caption forward and back; `like`: see random_encoders.text_encoders_like."""
    parameters = 0
    with torch.device('meta'), FlopCounterMode(display=False) as counter:
        for text in _adapted_like(like):
            add_adapter(text, adapter, TEXT_TARGETS, seed=0)
            parameters += sum(weight.numel() for weight in trained_weights(text).values())
            text(torch.zeros(1, text.config.max_position_embeddings, dtype=torch.long))[0].sum().backward()
    return [parameters, counter.get_total_flops()]


def _adapted_like(like: str) -> list[Any]:
    """Text encoders that `adapter.text_encoders` adapts."""
    return [text for text in text_encoders_like(like) if isinstance(text, ADAPTED_TEXT)]


def encoder_facts(like: str, network: str) -> list[int]:
    """Pixels per latent, channels of latents, tokens, channels of text, parameters of the text encoders and of the VAE, and FLOP of a caption.

    Args:
        like: see random_encoders.text_encoders_like.
        network: whose family says how the outputs of several text encoders are joined.
    """
    with torch.device('meta'), torch.no_grad():
        texts, vae = text_encoders_like(like), vae_like(like)
        lengths, length, text_width = family_of(network).text.joined(text_lengths_like(like), [text.config.hidden_size for text in texts])
        with FlopCounterMode(display=False) as counter:
            for text, tokens in zip(texts, lengths, strict=True):
                text(torch.zeros(1, tokens, dtype=torch.long))
    text_parameters = sum(parameter.numel() for text in texts for parameter in text.parameters())
    vae_parameters = sum(parameter.numel() for parameter in vae.parameters())
    sizes = VAES[type(vae).__name__](None, vae.config)
    return [sizes.downsampling, sizes.latent_channels, length, text_width, text_parameters, vae_parameters, counter.get_total_flops()]


def encoding_flop(like: str, resolution: int) -> int:
    """FLOP of the VAE's encoding of an image."""
    with torch.device('meta'), torch.no_grad(), FlopCounterMode(display=False) as counter:
        vae_like(like).encode(torch.zeros(1, 3, resolution, resolution))
    return counter.get_total_flops()


def activations(
    name: str, side: int, precision: str, checkpointed: bool, text_length: int = TEXT_LENGTH, adapter: Adapter | None = None
) -> Activations:
    """Count those of latents of `side` x `side`, by the recipe's `train.precision` and `train.checkpoint_activations`, and with its `adapter`.

    The bf16 copies of the weights, which do not grow with the batch, are left out.
    """
    family, config = family_of(name), find_network(name).config
    with FakeTensorMode():
        network: Any = family.build(config)
        network = channels_last(network) if family.channels_last else network
        if checkpointed:
            family.checkpoint_activations(network)
        if adapter is not None:
            _add_fake_adapter(network, adapter, family.adapter_targets[adapter.targets])
            if precision != 'fp32':
                store_frozen_in_bf16(network)
        copies = 0 if precision == 'fp32' else 2 * sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
        batch = family.counted_batch
        alive = alive_bytes(network, family, config, batch, side, precision, text_length, adapter)
        return Activations(*((held - copies) // batch for held in alive))


def channels_last(module: Module) -> Module:
    """Lay out the weights as `Module.to` does, which PyTorch (2.11, 2.14) refuses for fake tensors that something else refers to."""
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None and weight.ndim == 4:
                part._parameters[name] = nn.Parameter(weight.detach().contiguous(memory_format=torch.channels_last), weight.requires_grad)
    return module


def _add_fake_adapter(module: Module, adapter: Adapter, targets: Iterable[str]) -> None:
    """Add an adapter of fake tensors. Peft leaves weights without a device where they are, and moves others, which PyTorch refuses as above."""
    with torch.device('meta'):
        add_adapter(module, adapter, targets, seed=0)
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None and weight.device.type == 'meta':
                part._parameters[name] = nn.Parameter(torch.empty_like(weight, device='cpu'), weight.requires_grad)


def alive_bytes(
    network: nn.Module,
    family: Family,
    config: Config,
    batch: int,
    side: int,
    precision: str,
    text_length: int,
    adapter: Adapter | None = None,
) -> tuple[int, int]:
    """Bytes alive after the forward pass, and at the peak, of a training step's network and loss."""
    text_dtype = torch.float32 if precision == 'fp32' else torch.bfloat16
    with LiveStorages() as storages, as_on_a_gpu(precision):
        noisy, t, conditioning = family.example(config, batch, (side, side), text_length, text_dtype)
        if adapter is not None:
            let_gradients_reach(conditioning, adapter)
        target = torch.empty_like(noisy)
        prediction = family.denoise(network, noisy, t, conditioning)
        del t  # 8 bytes a sample that are no activation
        loss = weighted_error(prediction, target).mean()
        saved = storages.live_bytes
        loss.backward()
        network.zero_grad(set_to_none=True)
    return saved, storages.peak_bytes


def text_saved_bytes(like: str, precision: str, adapter: Adapter) -> int:
    """Bytes per caption that text encoders with adapters leave for the backward pass; `like`: see random_encoders.text_encoders_like."""
    saved = 0
    with FakeTensorMode():
        for text in _adapted_like(like):
            _add_fake_adapter(text, adapter, TEXT_TARGETS)
            if precision != 'fp32':
                store_frozen_in_bf16(text)
            with LiveStorages() as storages:
                kept = text(torch.zeros(ENCODED_BATCH, text.config.max_position_embeddings, dtype=torch.int64))
                saved += storages.live_bytes
            del kept
    return saved // ENCODED_BATCH


def encoding_bytes(like: str, resolution: int, precision: str) -> int:
    """Bytes per sample at the highest moment of the VAE's encoding, which is over when the network begins; `like`: see random_encoders.vae_like."""
    with FakeTensorMode():
        vae = channels_last(vae_like(like))
        with LiveStorages() as storages, torch.no_grad(), as_on_a_gpu('fp32' if precision == 'fp32' else 'amp_bf16'):
            pixels = torch.empty(ENCODED_BATCH, 3, resolution, resolution).contiguous(memory_format=torch.channels_last)
            vae.encode(pixels)
    return storages.peak_bytes // ENCODED_BATCH


@contextmanager
def as_on_a_gpu(precision: str) -> Iterator[None]:
    """Autocast of the CPU, which fake tensors can be on without a GPU, made to keep what CUDA's keeps.

    CUDA's autocast normalises in float32 (its list has layer_norm and group_norm), the CPU's does not. With `bf16` there is no autocast
    and everything is bf16, which is what the CPU's does by itself, copies of weights aside. With `fp32` there is none either.
    """
    functional = torch.nn.functional
    norms = {name: getattr(functional, name) for name in ('group_norm', 'layer_norm')}

    def in_float32(norm: Any) -> Any:
        def call(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            args, kwargs = torch.utils._pytree.tree_map_only(Tensor, lambda weight: weight.float(), (args, kwargs))  # of a frozen network in bf16
            return norm(input.float(), *args, **kwargs)

        return call

    patches = {name: in_float32(norm) for name, norm in norms.items()} if precision == 'amp_bf16' else norms
    with torch.autocast('cpu', torch.bfloat16, enabled=precision != 'fp32'), mock.patch.multiple(functional, **patches):
        yield


class LiveStorages(TorchDispatchMode):
    """Within the context `live_bytes` are those of all storages made in it that something still refers to; views count once.

    What a kernel allocates for itself (cuDNN's workspaces) and what an allocator rounds up or leaves unused in between is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in [result] if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        if address not in self._known:
            self._known[address] = weakref.ref(storage, lambda _: self._forget(address, size))
            self.live_bytes += size

    def _forget(self, address: int, size: int) -> None:
        self._known.pop(address, None)
        self.live_bytes -= size
