"""The frozen half of a text-to-image model: VAE and text encoders, from one location. The ComposerModel holds them outside its modules.

`Vae` is the one place where latents change between its own units (unscaled: datasets, its input and output) and unit variance (scaled: everything
that a network sees).
"""

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from diffusers import AutoencoderKL, AutoencoderKLFlux2
from torch import Tensor, nn

from diffusion.contracts.errors import EncoderError
from diffusion.encoders.frozen_part import FrozenPart, any_kernel
from diffusion.encoders.pretrained import load_config, load_model, read_configs
from diffusion.encoders.text import ClipPenultimate, TextEncoders
from diffusion.recipe.schema import EncoderSource


class Vae(FrozenPart[Any]):
    """Attributes:
    kind: diffusers' class of the network.
    latent_channels: channels of the latents, 4 in Stable Diffusion.
    downsampling: pixels per latent along a side, 8 in Stable Diffusion.
    scaling_factor, shift_factor: (latents - shift) x scale have unit variance; 0.18215 and 0 in Stable Diffusion.
    in_bf16: let the encoder multiply in bf16, several times as fast on a GPU; its weights stay float32.
    """

    kind: ClassVar[type] = AutoencoderKL

    def __init__(self, load: Any, config: Mapping[str, Any]):
        super().__init__(load)
        self.latent_channels = self.channels_of(config)
        self.downsampling = 2 ** (len(config['block_out_channels']) - 1)
        self.scaling_factor: float = config.get('scaling_factor', 1.0)
        self.shift_factor: float = config.get('shift_factor') or 0.0
        self.in_bf16 = False

    @classmethod
    def channels_of(cls, config: Mapping[str, Any]) -> int:
        """Channels of the latents that a network sees; 0 if config.json does not say."""
        return config.get('latent_channels', 0)

    @classmethod
    def find(cls, source: str, revision: str | None, subfolder: str = 'vae') -> 'Vae':
        """Find it in a local folder in the diffusers layout or on the Hub, of the class that its config.json names; weights are read when first used.

        Args:
            subfolder: of the VAE in it; '' for a VAE alone.

        Raises:
            EncoderError: with the location and the remedy.
        """
        vae = vae_class(read_configs(source, revision, subfolder).get('config.json', {}))
        config = load_config(vae.kind, source, revision, subfolder)
        return vae(lambda: load_model(vae.kind, source, revision, subfolder), config)

    def described(self, source: str, revision: str | None) -> dict[str, Any]:
        """Return the section `encoder` in the manifest of a dataset of its moments, which are stored as float16."""
        return {
            'source': source,
            'revision': revision,
            'vae_sha256': self.sha256,
            'scaling_factor': self.scaling_factor,
            'shift_factor': self.shift_factor,
            'downsampling': self.downsampling,
            'dtype': 'float16',
            'computed_in': 'float32',
        }

    def to(self, device: torch.device | str, **placement: Any) -> None:
        super().to(device, memory_format=torch.channels_last, **placement)

    def in_training(self, module: Any) -> nn.Module:
        return module.encoder

    def encode(self, images: Tensor) -> Tensor:
        """Moments (B, 2 * latent_channels, H/f, W/f) float32, unscaled, of (B, 3, H, W) uint8 images."""
        module = self.module  # read before inference mode, in which its weights would become inference tensors
        with self.computing(self.in_bf16):
            pixels = pixels_to_unit_range(images).contiguous(memory_format=torch.channels_last)
            moments = module.encode(pixels).latent_dist.parameters
        return moments.float().clone()

    def latents(self, moments: Tensor, noise: Tensor) -> Tensor:
        """Scaled latents (B, latent_channels, h, w) float32: a posterior draw from unscaled moments."""
        drawn = posterior_sample(moments, noise)
        return (drawn - self.shift_factor if self.shift_factor else drawn) * self.scaling_factor

    def decode_middle(self, moments: Tensor) -> Tensor:
        """(B, 3, H, W) uint8 images from the middle of the posteriors with these unscaled moments: what the VAE leaves of encoded images."""
        return self.decode(self.latents(moments, torch.zeros_like(moments.chunk(2, dim=1)[0], dtype=torch.float32)))

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """(B, 3, H, W) uint8 images from scaled latents."""
        with any_kernel(), torch.autocast(latents.device.type, enabled=False):
            decoded = self.module.decode(self.unscaled(latents.float())).sample
        return to_uint8(decoded)

    def unscaled(self, latents: Tensor) -> Tensor:
        """Latents in the VAE's own units and shape, of scaled ones."""
        return latents / self.scaling_factor + self.shift_factor


class Flux2Vae(Vae):
    """FLUX.2's: each square of latents is one with so many times the channels, and each channel has a mean and a deviation of its own, kept among the
    weights as a batch norm's. Moments are of such squares too, so that a dataset has the channels and the downsampling that the network sees."""

    kind = AutoencoderKLFlux2

    def __init__(self, load: Any, config: Mapping[str, Any]):
        super().__init__(load, config)
        self.patch: int = config['patch_size'][0]
        self.downsampling *= self.patch

    @classmethod
    def channels_of(cls, config: Mapping[str, Any]) -> int:
        return super().channels_of(config) * math.prod(config.get('patch_size', (2, 2)))

    @cached_property
    def statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation (C, 1, 1) of the channels. Stored latents need them and not the network, which is read for them and let go."""
        norm = (self.module if self.is_loaded else self._read()).bn
        mean, std = norm.running_mean.detach().float(), (norm.running_var.detach() + norm.eps).sqrt().float()
        return mean.to(self.device)[:, None, None], std.to(self.device)[:, None, None]

    def to(self, device: torch.device | str, **placement: Any) -> None:
        super().to(device, **placement)
        self.__dict__.pop('statistics', None)
        _ = self.statistics  # now, and not within a compiled step

    def encode(self, images: Tensor) -> Tensor:
        return torch.nn.functional.pixel_unshuffle(super().encode(images), self.patch)  # means stay before variances

    def latents(self, moments: Tensor, noise: Tensor) -> Tensor:
        mean, std = self.statistics
        return (posterior_sample(moments, noise) - mean) / std

    def unscaled(self, latents: Tensor) -> Tensor:
        mean, std = self.statistics
        return torch.nn.functional.pixel_shuffle(latents * std + mean, self.patch)


VAES: dict[str, type[Vae]] = {vae.kind.__name__: vae for vae in (Vae, Flux2Vae)}
"""Classes by `_class_name` of vae/config.json."""


def vae_class(config: Mapping[str, Any]) -> type[Vae]:
    """The class for a VAE's configuration; Stable Diffusion's if that names none.

    Raises:
        EncoderError: there is none for it.
    """
    name = str(config.get('_class_name', AutoencoderKL.__name__))
    if name not in VAES:
        raise EncoderError(f'vae/config.json: is of {name[:60]}; known are {", ".join(VAES)}: take one of them')
    return VAES[name]


def pixels_to_unit_range(images: Tensor) -> Tensor:
    """uint8 0..255 -> float32 -1..1, the range the VAE was trained on."""
    return images.float() / 127.5 - 1


def to_uint8(pixels: Tensor) -> Tensor:
    """Floats in -1..1, what is beyond cut off -> uint8 0..255."""
    return ((pixels.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def posterior_sample(moments: Tensor, noise: Tensor) -> Tensor:
    """A draw from the VAE's posterior: `moments` (B, 2C, h, w) holds mean and log variance; float32 (B, C, h, w)."""
    mean, log_variance = moments.float().chunk(2, dim=1)
    return mean + torch.exp(0.5 * log_variance.clamp(-30, 20)) * noise


FindText = Callable[[str, str | None], TextEncoders]


class FrozenEncoders:
    """VAE and text encoders that belong together."""

    def __init__(self, vae: Vae, text: TextEncoders):
        self.vae, self.text = vae, text

    @classmethod
    def find(cls, encoders: EncoderSource, find_text: FindText = ClipPenultimate.find) -> Self:
        """Find them in a local folder in the diffusers layout or on the Hub: safetensors only, with all of their weights and no others.

        Configurations and tokenizers are read here, weights when they are first used on this process.

        Args:
            find_text: of the family: its text encoders from a source and a revision.

        Raises:
            EncoderError: with the location and the remedy.
        """
        where = encoders.source, encoders.revision
        return cls(Vae.find(*where), find_text(*where))

    @classmethod
    def load(cls, encoders: EncoderSource, find_text: FindText = ClipPenultimate.find) -> Self:
        """Find them as `find` does, with all weights in memory."""
        found = cls.find(encoders, find_text)
        found.read(images=True, text=True)
        return found

    def read(self, images: bool, text: bool) -> None:
        """Load what this process is going to use now, rather than in the middle of its first step; raises EncoderError as `find`."""
        for part in [*([self.vae] if images else []), *(self.text.parts.values() if text else [])]:
            _ = part.module

    def to(self, device: torch.device | str, text_dtype: torch.dtype = torch.float32, vae_in_bf16: bool = False) -> Self:
        """Move to `device`. The VAE's weights stay float32; `vae_in_bf16` lets its encoder multiply in bf16."""
        self.vae.to(device)
        self.vae.in_bf16 = vae_in_bf16
        for part in self.text.parts.values():
            part.to(device, dtype=text_dtype)
        return self

    def compile(self, backend: str) -> None:
        """Mark what training calls for compilation."""
        for part in (self.vae, *self.text.parts.values()):
            part.compile(backend)

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of each encoder and tokenizer by name, which a run that resumes has to find again."""
        return {'vae': self.vae.sha256, **self.text.digests}
