"""Protocol of a model family. Training, sharding, compilation, counting, planning, export and generation know no model by name."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from diffusers import DiffusionPipeline, SchedulerMixin
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from diffusion.contracts.batch import GEOMETRY, Conditioning
from diffusion.encoders.frozen import FrozenEncoders
from diffusion.encoders.text import TextEncoders
from diffusion.objectives.objective import Denoise

Config = Mapping[str, Any]
"""Configuration of a network: its file in networks/, in diffusers' own terms, without the keys that only this project reads."""


class Family(ABC):
    """Attributes:
    objective: the section of the recipe's `model` that trains it.
    component: the network's folder in the diffusers layout.
    text: class of its text encoders, which says how their outputs are joined.
    blocks: classes of the modules that `train.compile: blocks` compiles one by one.
    stacked: how many matrices a linear layer's weight in these blocks holds one below another, by the end of the layer's name; one if not named.
    channels_last: convolutions make up the network: activations and 4-dimensional weights lie in channels_last.
    takes_bf16: precision bf16, under which FSDP2 hands every floating-point input over in bf16, is exact enough for it.
    masks_text: attention leaves out the padding of captions by a mask.
    reads_geometry: the network is told size and crop of an image (`Conditioning.geometry`), which its data must hold.
    pipeline_class: diffusers' class that draws with an exported model.
    pipeline_parts: the classes that each part of such a pipeline may have, the usual one first, by the name of its folder: model_index.json names one
        of them, and a part or a class that is not here is refused.
    schedulers: names of diffusers' classes that its sampler may have.
    pipeline_batch: images that one call of the pipeline can draw; None for any number.
    adds_shift: the pipeline adds the VAE's `shift_factor` to latents before it decodes them.
    pipeline_options: further arguments of such a call.
    no_guidance: the pipeline's guidance_scale that is none; 1 in this project, as in most.
    default_px: side that the pipeline draws, where neither its network nor its model_index.json says so.
    counted_batch: samples of the step in which activations are counted without data: so many that these decide where the peak is, not the gradients.
    tags: of an exported model's card on the Hub.
    older_adapters: readers expect its adapters under the names that diffusers had before peft, and other programs under kohya's; those of newer
        networks have peft's names everywhere.
    adapter_targets: by `adapter.targets` of a recipe, how the names of the network's layers that gain an adapter end.
    token_arguments: of the forward function of `token_blocks`: the arguments that lie along the image's tokens, and in which dimension; the first is
        what they return. Empty where a network has no such blocks.
    """

    objective: ClassVar[str]
    component: ClassVar[str]
    text: ClassVar[type[TextEncoders]] = TextEncoders
    blocks: ClassVar[tuple[type[nn.Module], ...]]
    stacked: ClassVar[Mapping[str, int]] = {}
    channels_last: ClassVar[bool]
    takes_bf16: ClassVar[bool] = True
    masks_text: ClassVar[bool] = False
    reads_geometry: ClassVar[bool] = False
    pipeline_class: ClassVar[type[DiffusionPipeline]]
    pipeline_parts: ClassVar[Mapping[str, tuple[type, ...]]]
    schedulers: ClassVar[tuple[str, ...]]
    pipeline_batch: ClassVar[int | None] = None
    adds_shift: ClassVar[bool] = False
    pipeline_options: ClassVar[Mapping[str, Any]] = {}
    no_guidance: ClassVar[float] = 1.0
    default_px: ClassVar[int | None] = None
    counted_batch: ClassVar[int] = 1024
    tags: ClassVar[tuple[str, ...]] = ()
    older_adapters: ClassVar[bool] = False
    adapter_targets: ClassVar[Mapping[str, tuple[str, ...]]]
    token_arguments: ClassVar[Mapping[str, int]] = {}

    def find_text(self, source: str, revision: str | None) -> TextEncoders:
        """Its text encoders, in a folder in the diffusers layout or on the Hub."""
        return self.text.find(source, revision)

    @property
    def loads_adapters(self) -> bool:
        """Whether diffusers' pipeline loads adapters of this network; PRX's has the methods, of a U-Net that it has not."""
        save = getattr(self.pipeline_class, 'save_lora_weights', None)
        return save is not None and f'{self.component}_lora_layers' in inspect.signature(save).parameters

    @abstractmethod
    def build(self, config: Config) -> Any:
        """The network with random weights; seed torch before to get the same ones again."""

    @abstractmethod
    def denoise(self, network: nn.Module, noisy: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """The network's output (B, C, h, w) for noisy latents at the objective's times (B,)."""

    @abstractmethod
    def units(self, network: nn.Module) -> set[nn.Module]:
        """The parts whose weights FSDP2 gathers and reduces together, so that communication overlaps with arithmetic."""

    @abstractmethod
    def latent_channels(self, config: Config) -> int:
        """Channels of the latents that the network reads and predicts."""

    @abstractmethod
    def text_width(self, config: Config) -> int:
        """Channels of the encoded text that the network reads."""

    @abstractmethod
    def attention(self, config: Config, side: int, text_length: int) -> list[tuple[int, int, int]]:
        """(queries, keys, width of a head) of every attention over latents of `side` x `side`."""

    @abstractmethod
    def pipeline(self, network: Any, encoders: FrozenEncoders, scheduler: SchedulerMixin, resolution: int) -> Any:
        """The pipeline that `diffusion.export` saves; draws squares of `resolution` pixels unless told otherwise."""

    def assemble(self, network: Any, encoders: FrozenEncoders, scheduler: SchedulerMixin, **settings: Any) -> Any:
        """Make the pipeline of its parts, by the names of their folders, and of arguments that its class has besides."""
        text = {name: part.module for name, part in encoders.text.parts.items()}
        parts = {'vae': encoders.vae.module, **text, **encoders.text.tokenizers, self.component: network, 'scheduler': scheduler}
        return self.pipeline_class(**parts, **settings)

    def call_options(self, guidance: float, size: tuple[int, int] | None = None, resolution: int | None = None) -> dict[str, Any]:
        """Arguments of a call of the pipeline.

        Args:
            size: (width, height) in pixels; None for the model's own.
            resolution: side of what the model was trained on, if that is known.
        """
        if size is None and self.default_px:
            size = (resolution or self.default_px,) * 2
        sized = {} if size is None else {'width': size[0], 'height': size[1]}
        return {'guidance_scale': guidance - 1 + self.no_guidance, **sized, **self.pipeline_options}

    def scheduler(self, objective: Any) -> SchedulerMixin:
        """Make the sampler of its pipeline for a network that was trained by the objective."""
        return objective.scheduler()

    def noise_shape(self, pipeline: Any, resolution: int) -> tuple[int, int, int]:
        """Channels and sides of the `latents` that a call of the pipeline starts from."""
        side = resolution // pipeline.vae_scale_factor
        return pipeline.vae.config.latent_channels, side, side

    def unscaled(self, pipeline: Any, latents: Tensor) -> Tensor:
        """Bring what the pipeline returns as `latent` into the units of its VAE, in float32."""
        config = pipeline.vae.config
        return latents.float() / config.scaling_factor + (config.shift_factor or 0.0)

    def sample(self, objective: Any, denoise: Denoise, noise: Tensor, steps: int) -> Tensor:
        """Latents (B, C, h, w) float32 from `noise` as its pipeline draws them; here as the objective's sampler does by itself."""
        return objective.sample(denoise, noise, steps)

    def token_blocks(self, network: Any) -> Sequence[nn.Module]:
        """The blocks through which the image's tokens pass one after another, as (B, L, D)."""
        return ()

    def token_width(self, config: Config) -> int:
        """Channels D of these tokens; 0 where there are none."""
        return 0

    def pooled_width(self, config: Config) -> int | None:
        """Channels of the one vector a caption that the network reads; None if it reads none."""
        return None

    def matrices(self, network: nn.Module) -> dict[Tensor, int]:
        """The 2-D weights that Muon may train, with the number of matrices stacked in each: of linear layers inside its blocks, so no embeddings,
        convolutions or layers around the blocks."""
        inside = {module for block in network.modules() if isinstance(block, self.blocks) for module in block.modules()}
        layers = {name: module for name, module in network.named_modules() if module in inside and isinstance(module, nn.Linear)}
        return {layer.weight: next((number for ending, number in self.stacked.items() if name.endswith(ending)), 1) for name, layer in layers.items()}

    def patch(self, config: Config) -> int:
        """Latents along a side that the network takes together: sides of latents must be multiples of it."""
        return 1

    def example_times(self, batch: int) -> Tensor:
        """(B,) times of the dtype that the objective has."""
        return torch.zeros(batch, dtype=torch.int64)

    def example(
        self, config: Config, batch: int, size: tuple[int, int], text_length: int, text_dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor, Conditioning]:
        """Inputs of `denoise` after the network, to count or try what a step does: latents of one (height, width), times, conditioning."""
        noisy = self.laid_out(torch.empty(batch, self.latent_channels(config), *size))
        return noisy, self.example_times(batch), self.example_conditioning(config, batch, text_length, text_dtype)

    def example_conditioning(self, config: Config, batch: int, text_length: int, dtype: torch.dtype) -> Conditioning:
        """Conditioning of the right shapes, to count what a step takes."""
        pooled, width = None, self.pooled_width(config)
        if width is not None:
            pooled = torch.randn(batch, width, dtype=dtype)
        geometry = torch.zeros(batch, GEOMETRY, dtype=torch.int32) if self.reads_geometry else None
        return Conditioning(torch.randn(batch, text_length, self.text_width(config), dtype=dtype), pooled=pooled, geometry=geometry)

    def checkpoint_activations(self, network: Any) -> None:
        """Compute the activations of its blocks again in the backward pass instead of keeping them."""
        # Diffusers' own function calls `block.__call__.__call__` where a network passes a bound method, which breaks compiled graphs in PyTorch 2.11.
        network.enable_gradient_checkpointing(partial(checkpoint, use_reentrant=False))

    def prepare(self, network: Any) -> None:
        """Lay out the weights as training wants them."""
        if self.channels_last:
            network.to(memory_format=torch.channels_last)

    def laid_out(self, latents: Tensor) -> Tensor:
        """Latents (B, C, h, w) in the memory format of the network's activations."""
        return latents.contiguous(memory_format=torch.channels_last) if self.channels_last else latents.contiguous()


class FlowTransformer(Family):
    """Base of transformers trained by rectified flow. Their times are floating-point inputs, and 8 bits of a time are too few."""

    objective = 'flow'
    component = 'transformer'
    channels_last = False
    takes_bf16 = False
    schedulers: ClassVar[tuple[str, ...]] = ('FlowMatchEulerDiscreteScheduler',)

    def latent_channels(self, config: Config) -> int:
        return config['in_channels']

    def example_times(self, batch: int) -> Tensor:
        return torch.zeros(batch)

    def assemble(self, network: Any, encoders: FrozenEncoders, scheduler: SchedulerMixin, **settings: Any) -> Any:
        if self.adds_shift:  # null in Stable Diffusion's files, and the pipelines add it to a tensor
            encoders.vae.module.register_to_config(shift_factor=encoders.vae.shift_factor)
        return super().assemble(network, encoders, scheduler, **settings)


def begin_at_zero(*layers: nn.Linear) -> None:
    """Set their weights and biases to 0: what they modulate or predict is nothing at first (adaLN-Zero, arXiv 2212.09748)."""
    for parameter in (parameter for layer in layers for parameter in layer.parameters()):
        nn.init.zeros_(parameter)
