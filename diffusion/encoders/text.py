"""Text encoders: captions to tokens in the loader's processes, tokens to what a network reads on the device of the model."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    PreTrainedTokenizerBase,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

from diffusion.contracts.batch import Conditioning
from diffusion.contracts.errors import EncoderError
from diffusion.encoders.frozen_part import FrozenPart
from diffusion.encoders.pretrained import LONGEST, describe, load_config, load_model, load_tokenizer, model_type, tokenizer_sha256


class TextKind(NamedTuple):
    """Classes of transformers that a text encoder is made of."""

    model: type
    config: type
    tokenizer: type


CLIP = TextKind(CLIPTextModel, CLIPTextConfig, CLIPTokenizer)
PROJECTED_CLIP = CLIP._replace(model=CLIPTextModelWithProjection)
T5 = TextKind(T5EncoderModel, T5Config, T5Tokenizer)
QWEN3 = TextKind(Qwen3Model, Qwen3Config, Qwen2Tokenizer)
NUMBERS = ('', '_2', '_3')  # ends of the names of their folders


class TokenizePadded:
    """Captions to padded and truncated ids: (B, its length) int64 by text encoder. Goes to the loader's workers by itself, without the encoders.

    Args:
        tokenizers: by text encoder.
        lengths: tokens of a caption, in their order.
        masked: also give `NAME_mask` (B, length) bool, True at the caption's own tokens with their begin and end.
        chat: options of the tokenizers' chat template, in which a caption is what the user says; None: they read the caption as it is.
    """

    def __init__(
        self,
        tokenizers: Mapping[str, PreTrainedTokenizerBase],
        lengths: Sequence[int],
        masked: bool = False,
        chat: Mapping[str, Any] | None = None,
    ):
        self.tokenizers, self.lengths, self.masked, self.chat = tokenizers, lengths, masked, chat

    def __call__(self, captions: Sequence[str]) -> dict[str, Tensor]:
        tokens = {}
        for (name, tokenizer), length in zip(self.tokenizers.items(), self.lengths, strict=True):
            texts: Any = list(captions)
            if self.chat is not None:
                said = [[{'role': 'user', 'content': caption}] for caption in captions]
                texts = [tokenizer.apply_chat_template(each, tokenize=False, add_generation_prompt=True, **self.chat) for each in said]
            found = tokenizer(texts, padding='max_length', truncation=True, max_length=length, return_attention_mask=self.masked)
            # Asked for tensors, transformers flattens the lists number by number in Python.
            tokens[name] = torch.from_numpy(np.array(found['input_ids'], np.int64))
            if self.masked:
                tokens[f'{name}_mask'] = torch.from_numpy(np.array(found['attention_mask'], np.bool_))
        return tokens


class TextEncoders:
    """The text encoders of a family; here a single one, of which the last hidden state after the final normalisation is read.

    Attributes:
        parts, tokenizers: by the names of their folders in the diffusers layout.
        lengths: tokens of a caption by encoder, to which shorter ones are padded and longer ones cut.
        length: tokens of the encoded text.
        width: channels of the encoded text.
        pooled_width: channels of the one vector a caption; None where there is none.

    Raises:
        EncoderError: the architecture is not the one that the family means.
    """

    kinds: ClassVar[Sequence[TextKind]] = (CLIP,)
    masked: ClassVar[bool] = False  # the encoder and the network's attention leave padding out
    chat: ClassVar[Mapping[str, Any] | None] = None  # see TokenizePadded
    layers: ClassVar[Mapping[int, tuple[int, str]]] = {}  # by width: how many config.json has to say, and what they are
    pooled_width: int | None = None

    def __init__(self, *found: tuple[FrozenPart, Any, Any]):  # each with its configuration and its tokenizer
        encoders, configs, tokenizers = zip(*found, strict=True)
        self.parts: dict[str, FrozenPart] = {f'text_encoder{number}': part for number, part in zip(NUMBERS, encoders, strict=False)}
        self.tokenizers: dict[str, Any] = {f'tokenizer{number}': tokenizer for number, tokenizer in zip(NUMBERS, tokenizers, strict=False)}
        limits = [  # T5 has none of its own
            min(tokenizer.model_max_length, getattr(config, 'max_position_embeddings', LONGEST))
            for config, tokenizer in zip(configs, tokenizers, strict=True)
        ]
        self.lengths, self.length, self.width = self.joined(limits, [config.hidden_size for config in configs])
        self.tokenize = TokenizePadded(dict(zip(self.parts, tokenizers, strict=True)), self.lengths, self.masked, self.chat)
        for name, config in zip(self.parts, configs, strict=True):
            layers, meaning = self.layers.get(config.hidden_size, (config.num_hidden_layers, ''))
            if config.num_hidden_layers != layers:
                raise EncoderError(
                    f'{name} has {config.num_hidden_layers} layers of width {config.hidden_size}; {meaning}. Use a folder whose '
                    f'{name}/config.json says num_hidden_layers: {layers}'
                )

    @classmethod
    def joined(cls, limits: Sequence[int], widths: Sequence[int]) -> tuple[list[int], int, int]:
        """Tokens that each encoder reads, then tokens and channels of the text that the network reads; of several encoders they lie side by side.

        Args:
            limits: tokens that each encoder and its tokenizer can take.
            widths: channels of each.
        """
        length = min(limits)
        return [length] * len(limits), length, sum(widths)

    @classmethod
    def of(cls, text_encoder: Any, tokenizer: Any) -> Self:
        """Make one of models in memory."""
        return cls((FrozenPart.of(text_encoder), text_encoder.config, tokenizer))

    @classmethod
    def find(cls, source: str, revision: str | None) -> Self:
        """Find them in a local folder in the diffusers layout or on the Hub; weights are read when they are first used.

        Raises:
            EncoderError: with the location and the remedy.
        """
        return cls(*(_find(kind, source, revision, number) for kind, number in zip(cls.kinds, NUMBERS, strict=False)))

    @property
    def tokenizer_digests(self) -> dict[str, str]:
        """SHA-256 of the tokenizers by the names of their folders."""
        return {name: tokenizer_sha256(tokenizer) for name, tokenizer in self.tokenizers.items()}

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of encoders and tokenizers by the names of their folders."""
        return {**{name: part.sha256 for name, part in self.parts.items()}, **self.tokenizer_digests}

    def encode(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        """Encode what `tokenize` returned, on any device, on that of the encoders."""
        text_encoder = self.parts['text_encoder']
        module = text_encoder.module  # read before inference mode, in which its weights would become inference tensors
        device, mask = text_encoder.device, tokens.get('text_encoder_mask')
        mask = None if mask is None else mask.to(device)
        with text_encoder.computing():
            text = module(tokens['text_encoder'].to(device), attention_mask=mask).last_hidden_state
        return Conditioning(text.clone(), mask)  # autograd refuses to keep an inference tensor, and the cross-attention's weights need it

    def stored(self, text: Tensor, pooled: Tensor | None, tokens: Mapping[str, Tensor]) -> Conditioning:
        """The result of `encode` for `tokens`, made of text (B, length, width) and pooled text (B, pooled_width) that a dataset stores."""
        return Conditioning(text, tokens.get('text_encoder_mask'), None if self.pooled_width is None else pooled)


def _find(kind: TextKind, source: str, revision: str | None, number: str) -> tuple[FrozenPart, Any, Any]:
    """A text encoder, whose weights are read when they are first used, its configuration and its tokenizer; `number` ends their folders' names."""
    folder = f'text_encoder{number}'
    config = load_config(kind.config, source, revision, folder)
    tokenizer = load_tokenizer(source, revision, f'tokenizer{number}', config, kind.tokenizer)
    return FrozenPart(lambda: load_model(kind.model, source, revision, folder)), config, tokenizer


class ClipPenultimate(TextEncoders):
    """Stable Diffusion 2's, which reads the penultimate of OpenCLIP ViT-H's 24 layers: its folder stores 23 of them."""

    layers: ClassVar = {1024: (23, 'Stable Diffusion 2 uses the first 23 of OpenCLIP ViT-H followed by the final LayerNorm')}


class ClipPair(TextEncoders):
    """CLIP ViT-L and OpenCLIP ViT-bigG: of both what their last layer but one leaves, without the final LayerNorm, next to each other; of the second
    also the projected state at the end of the caption.

    The published tokenizers differ in what they pad with: the first in the end of the caption, the second in `!`.
    """

    kinds: ClassVar[Sequence[TextKind]] = (CLIP, PROJECTED_CLIP)
    layers: ClassVar = {width: (count, f'Stable Diffusion XL and 3 use the last but one of {count}') for width, count in ((768, 12), (1280, 32))}

    def __init__(self, *found: tuple[FrozenPart, Any, Any]):
        super().__init__(*found)
        self.pooled_width = found[1][1].projection_dim

    def encode(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        first, second = self._of_clips(tokens)
        # Autograd refuses to keep inference tensors; what is made of them here are none.
        return Conditioning(torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1), pooled=second.text_embeds.clone())

    def _of_clips(self, tokens: Mapping[str, Tensor]) -> list[Any]:
        """Outputs of both, with the states of their layers."""
        outputs = []
        for name in ('text_encoder', 'text_encoder_2'):
            part = self.parts[name]
            module = part.module  # read before inference mode, in which its weights would become inference tensors
            with part.computing():
                outputs.append(module(tokens[name].to(part.device), output_hidden_states=True))
        return outputs


class ClipPairAndT5(ClipPair):
    """Stable Diffusion 3's: the tokens of the pair above, with zeros up to T5's width, then those of T5, whose padding is read like words; and the
    projected states of both CLIPs next to each other.

    T5 takes any number of tokens; StableDiffusion3Pipeline has 256 unless told otherwise, whatever the tokenizer says.
    """

    kinds = (PROJECTED_CLIP, PROJECTED_CLIP, T5)
    t5_length: ClassVar[int] = 256

    def __init__(self, *found: tuple[FrozenPart, Any, Any]):
        super().__init__(*found)
        self.pooled_width = sum(config.projection_dim for _, config, _ in found[:2])

    @classmethod
    def joined(cls, limits: Sequence[int], widths: Sequence[int]) -> tuple[list[int], int, int]:
        if len(limits) != len(cls.kinds):
            raise EncoderError(
                f'model.encoders.source: has {len(limits)} text encoders, and Stable Diffusion 3 reads two CLIPs and a T5; name a folder with them'
            )
        length = min(limits[:2])
        return [length, length, cls.t5_length], length + cls.t5_length, widths[2]

    def encode(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        first, second = self._of_clips(tokens)
        part = self.parts['text_encoder_3']
        module = part.module
        with part.computing():
            of_t5 = module(tokens['text_encoder_3'].to(part.device)).last_hidden_state
        of_clips = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1)
        text = torch.cat([torch.nn.functional.pad(of_clips, (0, of_t5.shape[-1] - of_clips.shape[-1])), of_t5], dim=1)
        return Conditioning(text, pooled=torch.cat([first.text_embeds, second.text_embeds], dim=-1))


class Qwen3Chat(TextEncoders):
    """Z-Image's: a language model that reads a caption as what the user says, in its chat template, up to where the answer would begin. Of that the
    network reads what the last layer but one leaves, without padding; ZImagePipeline cuts it after 512 tokens, whatever the tokenizer says."""

    kinds = (QWEN3,)
    masked = True
    chat: ClassVar = {'enable_thinking': True}
    states: ClassVar[Sequence[int]] = (-2,)  # which of its hidden states are read, next to each other; 0 is the embedding
    num_tokens: ClassVar[int] = 512

    @classmethod
    def joined(cls, limits: Sequence[int], widths: Sequence[int]) -> tuple[list[int], int, int]:
        return [cls.num_tokens], cls.num_tokens, len(cls.states) * sum(widths)

    def encode(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        part = self.parts['text_encoder']
        module = part.module.base_model  # without the head that would say the next word
        ids, mask = (tokens[name].to(part.device) for name in ('text_encoder', 'text_encoder_mask'))
        with part.computing():
            states = module(ids, attention_mask=mask, output_hidden_states=True, use_cache=False).hidden_states
        return Conditioning(torch.cat([states[number] for number in self.states], dim=-1), mask)


class Qwen3Layers(Qwen3Chat):
    """FLUX.2 klein's: what three of its layers leave, next to each other, of all 512 tokens; the network reads padding like words."""

    kinds = (QWEN3._replace(model=Qwen3ForCausalLM),)
    chat: ClassVar = {'enable_thinking': False}
    states = (9, 18, 27)

    def encode(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        return super().encode(tokens)._replace(mask=None)

    def stored(self, text: Tensor, pooled: Tensor | None, tokens: Mapping[str, Tensor]) -> Conditioning:
        return Conditioning(text)


class MaskedClip(TextEncoders):
    """CLIP with the tokenizer's mask."""

    masked = True


class MaskedT5(TextEncoders):
    """T5's encoder (v1.1 and its kin), with the tokenizer's mask. It has no longest caption of its own: the tokenizer's `model_max_length` decides,
    which PRXPipeline reads too."""

    kinds = (T5,)
    masked = True


class MaskedUmt5(MaskedT5):
    """The multilingual one, each of whose layers has position biases of its own."""

    kinds = (TextKind(UMT5EncoderModel, UMT5Config, T5Tokenizer),)


MASKED: dict[str, type[TextEncoders]] = {'clip_text_model': MaskedClip, 't5': MaskedT5, 'umt5': MaskedUmt5}
"""Classes by `model_type` of text_encoder/config.json. A new one is an entry here, and its class above."""


def find_masked(source: str, revision: str | None) -> TextEncoders:
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
    return MASKED[kind].find(source, revision)
