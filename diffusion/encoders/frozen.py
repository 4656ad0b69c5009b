"""The frozen half of a text-to-image model: VAE and text encoders, from one location. The ComposerModel holds them outside its modules.

`Vae` is the one place where latents change between its own units (unscaled: datasets, its input and output) and unit variance (scaled: everything
that a network sees).
"""

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn

from diffusion.encoders.frozen_part import FrozenPart, any_kernel
from diffusion.encoders.pretrained import load_config, load_model
from diffusion.encoders.text import ClipPenultimate, TextEncoders
from diffusion.recipe.schema import EncoderSource


class Vae(FrozenPart[AutoencoderKL]):
    """Attributes:
    latent_channels: channels of the latents, 4 in Stable Diffusion.
    downsampling: pixels per latent along a side, 8 in Stable Diffusion.
    scaling_factor, shift_factor: (latents - shift) x scale have unit variance; 0.18215 and 0 in Stable Diffusion.
    in_bf16: let the encoder multiply in bf16, several times as fast on a GPU; its weights stay float32.
    """

    def __init__(self, load: Any, config: Mapping[str, Any]):
        super().__init__(load)
        self.latent_channels: int = config['latent_channels']
        self.downsampling = 2 ** (len(config['block_out_channels']) - 1)
        self.scaling_factor: float = config['scaling_factor']
        self.shift_factor: float = config.get('shift_factor') or 0.0
        self.in_bf16 = False

    @classmethod
    def find(cls, source: str, revision: str | None, subfolder: str = 'vae') -> Self:
        """Find it in a local folder in the diffusers layout or on the Hub; weights are read when they are first used.

        Args:
            subfolder: of the VAE in it; '' for a VAE alone.

        Raises:
            EncoderError: with the location and the remedy.
        """
        config = load_config(AutoencoderKL, source, revision, subfolder)
        return cls(lambda: load_model(AutoencoderKL, source, revision, subfolder), config)

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

    def in_training(self, module: AutoencoderKL) -> nn.Module:
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
            decoded = self.module.decode(latents.float() / self.scaling_factor + self.shift_factor).sample
        return to_uint8(decoded)


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
