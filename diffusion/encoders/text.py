"""Text encoders: captions to tokens in the loader's processes, tokens to what a network reads on the device of the model."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, PreTrainedTokenizerBase

from diffusion.contracts.batch import Conditioning
from diffusion.contracts.errors import EncoderError
from diffusion.encoders.frozen_part import FrozenPart
from diffusion.encoders.pretrained import load_config, load_model, load_tokenizer, tokenizer_sha256


class Tokenize(Protocol):
    """Goes to the loader's workers by itself: it must be picklable, and must not carry encoders along."""

    def __call__(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """(B, L) id tensors by text encoder, and masks next to them for families that attend by mask."""


class TextEncoders(Protocol):
    """The text encoders of a family.

    Attributes:
        parts: the encoders by the names of their folders in the diffusers layout.
        tokenizers: the same for tokenizers.
        length: tokens of a caption.
        width: channels of the encoded text.
        pooled_width: channels of the one vector a caption; None where there is none.
    """

    parts: dict[str, FrozenPart]
    tokenizers: dict[str, Any]
    length: int
    width: int
    pooled_width: int | None

    @property
    def tokenize(self) -> Tokenize: ...

    def encode(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        """What `tokenize` returned, on any device, encoded on that of the encoders."""

    def stored(self, text: Tensor, pooled: Tensor | None, tokens: Mapping[str, Tensor]) -> Conditioning:
        """What `encode` returns for `tokens`, of text (B, length, width) and pooled text (B, pooled_width) that a dataset stores."""


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
        """From models in memory."""
        return cls(FrozenPart.of(text_encoder), text_encoder.config, tokenizer)

    @classmethod
    def find(cls, source: str, revision: str | None) -> Self:
        """In a local folder in the diffusers layout or on the Hub; weights are read when they are first used.

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
