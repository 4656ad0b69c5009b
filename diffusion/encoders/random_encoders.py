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
from diffusion.encoders.sizes import KINDS


def build_vae(block_out_channels: Sequence[int], **config: Any) -> AutoencoderKL:
    """An AutoencoderKL that halves the side once for every level after the first."""
    levels = len(block_out_channels)
    return AutoencoderKL(
        down_block_types=('DownEncoderBlock2D',) * levels,
        up_block_types=('UpDecoderBlock2D',) * levels,
        block_out_channels=tuple(block_out_channels),
        latent_channels=4,
        **config,
    )


def vae_like(like: str) -> AutoencoderKL:
    """With random weights: one of KINDS, or that of a folder in the diffusers layout, of which only config.json is read."""
    if like in KINDS:
        return build_vae(**KINDS[like]['vae'])
    return AutoencoderKL.from_config(AutoencoderKL.load_config(like, subfolder='vae', local_files_only=True))


def text_encoders_like(like: str) -> list[CLIPTextModel | CLIPTextModelWithProjection]:
    """The same for the text encoders: one of KINDS has one, a folder those in `text_encoder`, `text_encoder_2` and so on."""
    if like in KINDS:
        return [CLIPTextModel(CLIPTextConfig(**KINDS[like]['text'], hidden_act='gelu'))]
    found = []
    for folder in sorted(Path(like).glob('text_encoder*')):
        config = CLIPTextConfig.from_pretrained(like, subfolder=folder.name, local_files_only=True)
        projects = 'CLIPTextModelWithProjection' in (config.architectures or ())
        found.append((CLIPTextModelWithProjection if projects else CLIPTextModel)(config))
    return found


def build_tokenizer(folder: Path, words: Sequence[str], length: int) -> CLIPTokenizer:
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
    vocabulary += ['<|startoftext|>', '<|endoftext|>']
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'vocab.json').write_text(json.dumps({token: i for i, token in enumerate(vocabulary)}))
    (folder / 'merges.txt').write_text('\n'.join(['#version: 0.2', *merges]) + '\n')
    tokenizer = CLIPTokenizer(str(folder / 'vocab.json'), str(folder / 'merges.txt'), model_max_length=length)
    tokenizer.save_pretrained(folder)
    return tokenizer


def write_stand_in(folder: Path, kind: str = 'tiny', words: Sequence[str] = (), seed: int = 0, vae: AutoencoderKL | None = None) -> None:
    """Write `vae/`, `text_encoder/` and `tokenizer/` that `FrozenEncoders.load` reads; a given `vae` takes the random one's place."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer(folder / 'tokenizer', words, KINDS[kind]['text']['max_position_embeddings'])
    config = {'vocab_size': len(tokenizer), **KINDS[kind]['text']}
    special = {'bos_token_id': tokenizer.bos_token_id, 'eos_token_id': tokenizer.eos_token_id, 'pad_token_id': tokenizer.pad_token_id}
    save_text_encoder(CLIPTextModel(CLIPTextConfig(**config, **special, hidden_act='gelu')), folder / 'text_encoder')
    (vae or build_vae(**KINDS[kind]['vae'])).save_pretrained(folder / 'vae')
    (folder / 'README.md').write_text(f'Stand-in encoders ({kind}, seed {seed}); the text encoder is random. For tests, demos and speed.\n')
