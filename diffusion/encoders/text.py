"""Text encoders: captions to tokens in the loader's processes, tokens to what a network reads on the device of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    PreTrainedTokenizerBase,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

from diffusion.contracts.batch import Conditioning
from diffusion.contracts.errors import EncoderError
from diffusion.encoders.frozen_part import FrozenPart
from diffusion.encoders.pretrained import describe, load_config, load_model, load_tokenizer, model_type, tokenizer_sha256


class Tokenize(Protocol):
    """Goes to the loader's workers by itself: it must be picklable, and must not carry encoders along."""

    def __call__(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """(B, L) id tensors by text encoder, and masks next to them for families that attend by mask."""


class TextEncoders(Protocol):
    """The text encoders of a family."""

    parts: dict[str, FrozenPart]  # the encoders by the names of their folders in the diffusers layout
    tokenizers: dict[str, Any]  # the same for tokenizers
    length: int  # tokens of a caption
    width: int  # channels of the encoded text
    pooled_width: int | None  # channels of the one vector a caption; None where there is none

    @property
    def tokenize(self) -> Tokenize: ...

    def encode(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        """Encode what `tokenize` returned, on any device, on that of the encoders."""

    def stored(self, text: Tensor, pooled: Tensor | None, tokens: Mapping[str, Tensor]) -> Conditioning:
        """The result of `encode` for `tokens`, made of text (B, length, width) and pooled text (B, pooled_width) that a dataset stores."""


class TokenizePadded:
    """Captions to padded and truncated ids: (B, length) int64 by text encoder.

    Args:
        tokenizers: by text encoder.
        masked: also give `NAME_mask` (B, length) bool, True at the caption's own tokens with their begin and end.
    """

    def __init__(self, tokenizers: Mapping[str, PreTrainedTokenizerBase], length: int, masked: bool = False):
        self.tokenizers, self.length, self.masked = tokenizers, length, masked

    def __call__(self, captions: Sequence[str]) -> dict[str, Tensor]:
        tokens = {}
        for name, tokenizer in self.tokenizers.items():
            found = tokenizer(list(captions), padding='max_length', truncation=True, max_length=self.length, return_tensors='pt')
            tokens[name] = found['input_ids']
            if self.masked:
                tokens[f'{name}_mask'] = found['attention_mask'].bool()
        return tokens


def tokenizer_digests(text: TextEncoders) -> dict[str, str]:
    """SHA-256 of the tokenizers by the names of their folders."""
    return {name: tokenizer_sha256(tokenizer) for name, tokenizer in text.tokenizers.items()}


Found = tuple[FrozenPart, Any, Any]
"""A text encoder, its configuration and its tokenizer."""


def find_clip(kind: type, source: str, revision: str | None, number: str = '') -> Found:
    """A CLIP text encoder of class `kind`; see `find_encoder`."""
    return find_encoder(kind, CLIPTextConfig, CLIPTokenizer, source, revision, number)


def find_encoder(kind: type, config_kind: type, tokenizer_kind: type, source: str, revision: str | None, number: str = '') -> Found:
    """A text encoder of class `kind`, whose weights are read when they are first used, its configuration and its tokenizer.

    Args:
        number: what their folders' names end in, such as `_2`.

    Raises:
        EncoderError: with the location and the remedy.
    """
    folder = f'text_encoder{number}'
    config = load_config(config_kind, source, revision, folder)
    tokenizer = load_tokenizer(source, revision, f'tokenizer{number}', config, tokenizer_kind)
    return FrozenPart(lambda: load_model(kind, source, revision, folder)), config, tokenizer


class OneEncoder:
    """One text encoder: its last hidden state after the final normalisation."""

    masked = False
    pooled_width: int | None = None

    def __init__(self, text_encoder: FrozenPart, config: Any, tokenizer: Any):
        self.parts: dict[str, FrozenPart] = {'text_encoder': text_encoder}
        self.tokenizers: dict[str, Any] = {'tokenizer': tokenizer}
        self.length: int = self.num_tokens(config, tokenizer)
        self.width: int = config.hidden_size
        self.tokenize = TokenizePadded({'text_encoder': tokenizer}, self.length, self.masked)
        self.check(config)

    def num_tokens(self, config: Any, tokenizer: Any) -> int:
        """Return the tokens of a caption, to which shorter ones are padded and longer ones cut."""
        raise NotImplementedError

    def check(self, config: Any) -> None:
        """Raises EncoderError: the architecture is not the one that the family means."""

    @classmethod
    def of(cls, text_encoder: Any, tokenizer: Any) -> Self:
        """Make one of models in memory."""
        return cls(FrozenPart.of(text_encoder), text_encoder.config, tokenizer)

    @classmethod
    def find(cls, source: str, revision: str | None) -> Self:
        """Find it in a local folder in the diffusers layout or on the Hub; weights are read when they are first used.

        Raises:
            EncoderError: with the location and the remedy.
        """
        raise NotImplementedError

    def encode(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        text_encoder = self.parts['text_encoder']
        module = text_encoder.module  # read before inference mode, in which its weights would become inference tensors
        device, mask = text_encoder.device, tokens.get('text_encoder_mask')
        mask = None if mask is None else mask.to(device)
        with text_encoder.computing():
            text = module(tokens['text_encoder'].to(device), attention_mask=mask).last_hidden_state
        return Conditioning(text.clone(), mask)  # autograd refuses to keep an inference tensor, and the cross-attention's weights need it

    def stored(self, text: Tensor, pooled: Tensor | None, tokens: Mapping[str, Tensor]) -> Conditioning:
        return Conditioning(text, tokens.get('text_encoder_mask'))


class Clip(OneEncoder):
    """One CLIP text encoder."""

    def num_tokens(self, config: CLIPTextConfig, tokenizer: CLIPTokenizer) -> int:
        return min(tokenizer.model_max_length, config.max_position_embeddings)

    @classmethod
    def find(cls, source: str, revision: str | None) -> Self:
        return cls(*find_clip(CLIPTextModel, source, revision))


class ClipPenultimate(Clip):
    """Stable Diffusion 2's, which reads the penultimate of OpenCLIP ViT-H's 24 layers: its folder stores 23 of them."""

    def check(self, config: CLIPTextConfig) -> None:
        if config.hidden_size == 1024 and config.num_hidden_layers != 23:
            raise EncoderError(
                f'the text encoder has {config.num_hidden_layers} layers of width 1024; Stable Diffusion 2 uses the first 23 of '
                'OpenCLIP ViT-H followed by the final LayerNorm. Use a folder whose text_encoder/config.json says num_hidden_layers: 23'
            )


class MaskedClip(Clip):
    """The same with the tokenizer's mask, which the encoder and the network's attention leave padding out by."""

    masked = True


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
        """Find it in a local folder in the diffusers layout or on the Hub; weights are read when they are first used.

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


class MaskedT5(OneEncoder):
    """T5's encoder (v1.1 and its kin), with the tokenizer's mask. It has no longest caption of its own: the tokenizer's `model_max_length` decides,
    which PRXPipeline reads too."""

    masked = True
    kinds: ClassVar[tuple[type, type]] = (T5EncoderModel, T5Config)

    def num_tokens(self, config: Any, tokenizer: Any) -> int:
        return tokenizer.model_max_length

    @classmethod
    def find(cls, source: str, revision: str | None) -> Self:
        return cls(*find_encoder(*cls.kinds, T5Tokenizer, source, revision))


class MaskedUmt5(MaskedT5):
    """The multilingual one, each of whose layers has position biases of its own."""

    kinds = (UMT5EncoderModel, UMT5Config)


MASKED: dict[str, Callable[[str, str | None], OneEncoder]] = {
    'clip_text_model': MaskedClip.find,
    't5': MaskedT5.find,
    'umt5': MaskedUmt5.find,
}
"""Classes by `model_type` of text_encoder/config.json. A new one is a line here, and its class above."""


def find_masked(source: str, revision: str | None) -> OneEncoder:
    """Find the text encoder in a local folder in the diffusers layout or on the Hub, of the class that its config.json names.

    Raises:
        EncoderError: with the location and the remedy; or it is of another class.
    """
    kind = model_type(source, revision, 'text_encoder') or 'clip_text_model'
    if kind not in MASKED:
        raise EncoderError(
            f'{describe(f"{source}/text_encoder", revision)}: config.json says model_type {kind}; known are {", ".join(MASKED)}: '
            'take one of them, or add its class to diffusion/encoders/text.py'
        )
    return MASKED[kind](source, revision)
