"""Randomly initialised encoders in the sizes that stand_in.py lists."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from diffusion.encoders.pretrained import save_text_encoder
from diffusion.encoders.sizes import KINDS, PROJECTS

END = '<|endoftext|>'
PADS = (END, '!')  # of the published tokenizers, the first and the second of Stable Diffusion XL


def build_vae(block_out_channels: Sequence[int], latent_channels: int = 4, **config: Any) -> AutoencoderKL:
    """An AutoencoderKL that halves the side once for every level after the first."""
    levels = len(block_out_channels)
    return AutoencoderKL(
        down_block_types=('DownEncoderBlock2D',) * levels,
        up_block_types=('UpDecoderBlock2D',) * levels,
        block_out_channels=tuple(block_out_channels),
        latent_channels=latent_channels,
        **config,
    )


def vae_like(like: str) -> AutoencoderKL:
    """With random weights: one of KINDS, or that of a folder in the diffusers layout, of which only config.json is read."""
    if like in KINDS:
        return build_vae(**KINDS[like]['vae'])
    return AutoencoderKL.from_config(AutoencoderKL.load_config(like, subfolder='vae', local_files_only=True))


def build_text_encoder(config: CLIPTextConfig) -> CLIPTextModel | CLIPTextModelWithProjection:
    """Of the class that the configuration names, with random weights."""
    return (CLIPTextModelWithProjection if config.architectures == PROJECTS else CLIPTextModel)(config)


def text_encoders_like(like: str) -> list[CLIPTextModel | CLIPTextModelWithProjection]:
    """The same for the text encoders, in `text_encoder`, `text_encoder_2` and so on."""
    if like in KINDS:
        return [build_text_encoder(CLIPTextConfig(**config)) for config in _text_encoders_of(like).values()]
    folders = sorted(folder.name for folder in Path(like).glob('text_encoder*'))
    return [build_text_encoder(CLIPTextConfig.from_pretrained(like, subfolder=folder, local_files_only=True)) for folder in folders]


def _text_encoders_of(kind: str) -> dict[str, dict[str, Any]]:
    return {folder: config for folder, config in KINDS[kind].items() if folder != 'vae'}


def build_tokenizer(folder: Path, words: Sequence[str], length: int, pad: str = END) -> CLIPTokenizer:
    """A CLIP tokenizer with one token for each of `words` and single bytes for everything else."""
    symbols = list(bytes_to_unicode().values())
    vocabulary = [*symbols, *(symbol + '</w>' for symbol in symbols)]
    merges: list[str] = []
    for word in words:
        pieces = [*word[:-1], word[-1] + '</w>']
        while len(pieces) > 1:  # from the end: merges that hold the end-of-word mark cannot disturb other words
            merge = f'{pieces[-2]} {pieces[-1]}'
            pieces[-2:] = [pieces[-2] + pieces[-1]]
            if merge not in merges:
                merges.append(merge)
                vocabulary.append(pieces[-1])
    vocabulary += ['<|startoftext|>', END]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'vocab.json').write_text(json.dumps({token: i for i, token in enumerate(vocabulary)}))
    (folder / 'merges.txt').write_text('\n'.join(['#version: 0.2', *merges]) + '\n')
    tokenizer = CLIPTokenizer(str(folder / 'vocab.json'), str(folder / 'merges.txt'), model_max_length=length, pad_token=pad)
    tokenizer.save_pretrained(folder)
    return tokenizer


def write_stand_in(folder: Path, kind: str = 'tiny', words: Sequence[str] = (), seed: int = 0, vae: AutoencoderKL | None = None) -> None:
    """Write `vae/`, `text_encoder/` and `tokenizer/`, or two of the latter (`_2`), that `FrozenEncoders.load` reads.

    Args:
        words: that the tokenizers have a token for.
        vae: takes the random one's place.
    """
    torch.manual_seed(seed)
    for (name, sizes), pad in zip(_text_encoders_of(kind).items(), PADS, strict=False):
        tokenizer = build_tokenizer(folder / name.replace('text_encoder', 'tokenizer'), words, sizes['max_position_embeddings'], pad)
        special = {'bos_token_id': tokenizer.bos_token_id, 'eos_token_id': tokenizer.eos_token_id, 'pad_token_id': tokenizer.pad_token_id}
        save_text_encoder(build_text_encoder(CLIPTextConfig(**{'vocab_size': len(tokenizer), **sizes}, **special)), folder / name)
    (vae or build_vae(**KINDS[kind]['vae'])).save_pretrained(folder / 'vae')
    (folder / 'README.md').write_text(f'Stand-in encoders ({kind}, seed {seed}); text encoders are random. For tests, demos and speed.\n')
