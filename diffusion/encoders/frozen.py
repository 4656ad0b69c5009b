"""The frozen half of Stable Diffusion: VAE, text encoder and tokenizer, from one location.

They are never trained, never wrapped, never saved in a checkpoint; the ComposerModel holds them outside its modules.
Here, and nowhere else, latents change between the VAE's own units (unscaled: data sets, VAE input and output) and
unit variance (scaled: everything the U-Net sees).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property

import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTokenizer

from diffusion.contracts.errors import EncoderError
from diffusion.encoders.attention import any_kernel
from diffusion.encoders.pretrained import describe, load_model, load_tokenizer
from diffusion.objectives.diffusion import posterior_sample
from diffusion.recipe.schema import Encoders


class Tokenize:
    """Captions to token ids. Goes to the loader's workers by itself: they must not carry the encoders along."""

    def __init__(self, tokenizer: CLIPTokenizer, length: int):
        self.tokenizer, self.length = tokenizer, length

    def __call__(self, captions: Sequence[str]) -> Tensor:
        """(B, length) int64, padded and truncated as Stable Diffusion does."""
        return self.tokenizer(list(captions), padding='max_length', truncation=True, max_length=self.length, return_tensors='pt')['input_ids']


class FrozenEncoders:
    """VAE, text encoder and tokenizer that belong together.

    Attributes:
        latent_channels: channels of the latents, 4 in Stable Diffusion.
        downsampling: pixels per latent along a side, 8 in Stable Diffusion.
        scaling_factor: what brings the VAE's latents to unit variance, 0.18215 in Stable Diffusion.
        text_length: tokens of a caption, 77 in Stable Diffusion.
        text_width: channels of the encoded text, 1024 in Stable Diffusion 2.
        vae_sha256: digest of the VAE's weights, to recognise latents that another VAE made.
        text_sha256: digest of the text encoder's weights as they were loaded, to recognise another one when a run resumes.
    """

    def __init__(self, vae: AutoencoderKL, text_encoder: CLIPTextModel, tokenizer: CLIPTokenizer):
        _check_penultimate(text_encoder)
        self.vae = vae.eval().requires_grad_(False)
        self.text_encoder = text_encoder.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.tokenize = Tokenize(tokenizer, min(tokenizer.model_max_length, text_encoder.config.max_position_embeddings))
        self.latent_channels: int = vae.config.latent_channels
        self.downsampling = 2 ** (len(vae.config.block_out_channels) - 1)
        self.scaling_factor: float = vae.config.scaling_factor
        self.text_length = self.tokenize.length
        self.text_width: int = text_encoder.config.hidden_size
        self.vae_in_bf16 = False

    @classmethod
    def load(cls, encoders: Encoders) -> FrozenEncoders:
        """From a local folder in the diffusers layout or the Hub: safetensors only, with all of their weights and no others.

        Raises:
            EncoderError: with the location and the remedy.
        """
        where = encoders.source, encoders.revision
        vae = load_model(AutoencoderKL, *where, subfolder='vae')
        text_encoder = load_model(CLIPTextModel, *where, subfolder='text_encoder')
        tokenizer = load_tokenizer(*where, subfolder='tokenizer')
        if len(tokenizer) > text_encoder.config.vocab_size:
            raise EncoderError(
                f'{describe(*where)}: the tokenizer has {len(tokenizer):,} tokens, the text encoder knows '
                f'{text_encoder.config.vocab_size:,}; they do not belong together: take both from one folder'
            )
        return cls(vae, text_encoder, tokenizer)

    def to(self, device: torch.device | str, text_dtype: torch.dtype = torch.float32, vae_in_bf16: bool = False) -> FrozenEncoders:
        """Move to `device`. The VAE's weights stay float32; `vae_in_bf16` lets its encoder multiply in bf16, several times as fast on a GPU."""
        if text_dtype != torch.float32:
            _ = self.text_sha256  # of what was loaded, not of what is left of it
        self.vae.to(device=device, memory_format=torch.channels_last)
        self.text_encoder.to(device=device, dtype=text_dtype)  # type: ignore[call-arg]
        self.vae_in_bf16 = vae_in_bf16
        return self

    def compile(self, backend: str) -> None:
        """Mark what training calls for compilation."""
        self.text_encoder.compile(dynamic=False, backend=backend)
        self.vae.encoder.compile(dynamic=False, backend=backend)

    @cached_property
    def vae_sha256(self) -> str:
        return weights_sha256(self.vae)

    @cached_property
    def text_sha256(self) -> str:
        return weights_sha256(self.text_encoder)

    @property
    def digests(self) -> dict[str, str]:
        """By encoder: what a run that resumes has to find again."""
        return {'vae': self.vae_sha256, 'text_encoder': self.text_sha256}

    @property
    def device(self) -> torch.device:
        return self.text_encoder.device

    def encode_text(self, token_ids: Tensor) -> Tensor:
        """(B, text_length, text_width): the last hidden state after the final LayerNorm."""
        with any_kernel(), torch.inference_mode(), torch.autocast(self.device.type, enabled=False):
            text = self.text_encoder(token_ids.to(self.device)).last_hidden_state
        return text.clone()  # autograd refuses to keep an inference tensor, and the cross-attention's weights need it

    def encode_images(self, images: Tensor) -> Tensor:
        """VAE moments (B, 2 * latent_channels, H/f, W/f) float32, unscaled, of (B, 3, H, W) uint8 images."""
        with any_kernel(), torch.inference_mode(), torch.autocast(images.device.type, torch.bfloat16, enabled=self.vae_in_bf16):
            pixels = pixels_to_unit_range(images).contiguous(memory_format=torch.channels_last)
            moments = self.vae.encode(pixels).latent_dist.parameters
        return moments.float().clone()

    def latents(self, moments: Tensor, noise: Tensor) -> Tensor:
        """Scaled latents (B, latent_channels, h, w) float32: a posterior draw from unscaled moments."""
        return posterior_sample(moments, noise) * self.scaling_factor

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """(B, 3, H, W) uint8 images from scaled latents."""
        with any_kernel(), torch.autocast(latents.device.type, enabled=False):
            decoded = self.vae.decode(latents.float() / self.scaling_factor).sample
        return ((decoded.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def pixels_to_unit_range(images: Tensor) -> Tensor:
    """uint8 0..255 -> float32 -1..1, the range the VAE was trained on."""
    return images.float() / 127.5 - 1


def weights_sha256(module: nn.Module) -> str:
    """Digest of names, shapes and float32 values of all weights: equal for equal weights, however the file is laid out.

    Transformers 5 calls CLIP's weights what transformers 4 does, without a leading `text_model.`.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted((name.removeprefix('text_model.'), tensor) for name, tensor in module.state_dict().items()):
        digest.update(f'{name}{tuple(tensor.shape)}'.encode())
        digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _check_penultimate(text_encoder: CLIPTextModel) -> None:
    """Stable Diffusion 2 reads the penultimate layer of OpenCLIP ViT-H (24 layers), so its folder stores 23 of them."""
    config = text_encoder.config
    if config.hidden_size == 1024 and config.num_hidden_layers != 23:
        raise EncoderError(
            f'the text encoder has {config.num_hidden_layers} layers of width 1024; Stable Diffusion 2 uses the first 23 of '
            'OpenCLIP ViT-H followed by the final LayerNorm. Use a folder whose text_encoder/config.json says num_hidden_layers: 23'
        )
