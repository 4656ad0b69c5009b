"""The frozen half of a text-to-image model: VAE and text encoders, from one location. The ComposerModel holds them outside its modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from diffusion.contracts.batch import Conditioning
from diffusion.encoders.text import ClipPenultimate, TextEncoders, Tokenize, tokenizer_digests
from diffusion.encoders.vae import Vae
from diffusion.recipe.schema import EncoderSource

FindText = Callable[[str, str | None], TextEncoders]


class FrozenEncoders:
    """VAE and text encoders that belong together."""

    def __init__(self, vae: Vae, text: TextEncoders):
        self.vae, self.text = vae, text
        self.latent_channels, self.downsampling, self.scaling_factor = vae.latent_channels, vae.downsampling, vae.scaling_factor

    @classmethod
    def find(cls, encoders: EncoderSource, find_text: FindText = ClipPenultimate.find) -> FrozenEncoders:
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
    def load(cls, encoders: EncoderSource, find_text: FindText = ClipPenultimate.find) -> FrozenEncoders:
        """The same with all weights in memory.

        Raises:
            EncoderError: with the location and the remedy.
        """
        found = cls.find(encoders, find_text)
        found.read(images=True, text=True)
        return found

    def read(self, images: bool, text: bool) -> None:
        """Load what this process is going to use now, rather than in the middle of its first step.

        Raises:
            EncoderError: as `load`.
        """
        for part in [*([self.vae] if images else []), *(self.text.parts.values() if text else [])]:
            _ = part.module

    def to(self, device: torch.device | str, text_dtype: torch.dtype = torch.float32, vae_in_bf16: bool = False) -> FrozenEncoders:
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
    def tokenize(self) -> Tokenize:
        return self.text.tokenize

    @property
    def device(self) -> torch.device:
        return self.vae.device

    @property
    def vae_sha256(self) -> str:
        """Digest of the VAE's weights, to recognise latents that another VAE made."""
        return self.vae.sha256

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of each encoder and tokenizer by name, which a run that resumes has to find again."""
        return {'vae': self.vae.sha256, **{name: part.sha256 for name, part in self.text.parts.items()}, **self.tokenizer_digests}

    @property
    def tokenizer_digests(self) -> dict[str, str]:
        """SHA-256 of the tokenizers by name."""
        return tokenizer_digests(self.text)

    def encode_text(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        return self.text.encode(tokens)

    def encode_images(self, images: Tensor) -> Tensor:
        return self.vae.encode(images)

    def latents(self, moments: Tensor, noise: Tensor) -> Tensor:
        return self.vae.latents(moments, noise)

    def decode(self, latents: Tensor) -> Tensor:
        return self.vae.decode(latents)
