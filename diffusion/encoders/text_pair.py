"""The two text encoders of Stable Diffusion XL, which read the same caption."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from diffusion.contracts.batch import Conditioning
from diffusion.contracts.errors import EncoderError
from diffusion.encoders.frozen_part import FrozenPart
from diffusion.encoders.text import Found, TokenizePadded, find_clip

LAYERS = {768: 12, 1280: 32}  # of CLIP ViT-L and OpenCLIP ViT-bigG, by width


class ClipPair:
    """CLIP ViT-L and OpenCLIP ViT-bigG: of both what their last layer but one leaves, without the final LayerNorm, next to each other; of the second
    also the projected state at the end of the caption.

    The published tokenizers differ in what they pad with: the first in the end of the caption, the second in `!`.

    Args:
        first, second: the encoder, its configuration and its tokenizer.

    Raises:
        EncoderError: the architecture is not the one that the family means.
    """

    def __init__(self, first: Found, second: Found):
        encoders, configs, tokenizers = zip(first, second, strict=True)
        self.parts: dict[str, FrozenPart] = dict(zip(('text_encoder', 'text_encoder_2'), encoders, strict=True))
        self.tokenizers: dict[str, Any] = dict(zip(('tokenizer', 'tokenizer_2'), tokenizers, strict=True))
        self.length: int = min(*(tokenizer.model_max_length for tokenizer in tokenizers), *(config.max_position_embeddings for config in configs))
        self.width: int = sum(config.hidden_size for config in configs)
        self.pooled_width: int | None = configs[1].projection_dim
        self.tokenize = TokenizePadded(dict(zip(self.parts, tokenizers, strict=True)), self.length)
        for name, config in zip(self.parts, configs, strict=True):
            layers = LAYERS.get(config.hidden_size, config.num_hidden_layers)
            if config.num_hidden_layers != layers:
                raise EncoderError(
                    f'{name} has {config.num_hidden_layers} layers of width {config.hidden_size}; Stable Diffusion XL uses the last but one of '
                    f'{layers}. Use a folder whose {name}/config.json says num_hidden_layers: {layers}'
                )

    @classmethod
    def find(cls, source: str, revision: str | None) -> ClipPair:
        """In a local folder in the diffusers layout or on the Hub; weights are read when they are first used.

        Raises:
            EncoderError: with the location and the remedy.
        """
        return cls(find_clip(CLIPTextModel, source, revision), find_clip(CLIPTextModelWithProjection, source, revision, '_2'))

    def encode(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        states = []
        for name, part in self.parts.items():
            module = part.module  # read before inference mode, in which its weights would become inference tensors
            with part.computing():
                output = module(tokens[name].to(part.device), output_hidden_states=True)
            states.append(output.hidden_states[-2])
        # Autograd refuses to keep inference tensors; what is made of them here are none.
        return Conditioning(torch.cat(states, dim=-1), pooled=output.text_embeds.clone())

    def stored(self, text: Tensor, pooled: Tensor | None, tokens: Mapping[str, Tensor]) -> Conditioning:
        return Conditioning(text, pooled=pooled)
