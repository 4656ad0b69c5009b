"""Counts of a recipe's networks (families/counting makes them): parameters, FLOP and bytes of activations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EncoderCounts:
    """The frozen networks. FLOP of a forward pass over one sample; bytes a sample at the highest moment of encoding an image."""

    downsampling: int  # pixels per latent along a side
    latent_channels: int
    text_length: int  # tokens of a caption
    text_width: int  # channels of the encoded text
    text_parameters: int
    vae_parameters: int
    text_flop: int
    vae_flop: int
    vae_peak_bytes: int


@dataclass(frozen=True)
class Counts:
    """Counts of one recipe.

    Attributes:
        flop: of the network's forward and backward pass over one sample.
        saved_bytes, peak_bytes: activations of one sample (diffusion/families/counting/activations.py).
        latent_channels: of the network's input.
        encoders: None where their architecture is not known without their weights.
    """

    num_parameters: int
    flop: int
    saved_bytes: int
    peak_bytes: int
    latent_channels: int
    encoders: EncoderCounts | None
