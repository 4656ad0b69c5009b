"""Randomly initialised encoders in the diffusers layout, where the real ones cannot be had.

    python -m diffusion.models.stand_in FOLDER [--like sd2-base]

For tests and the demo (`tiny`, whose tokenizer knows a small vocabulary) and for measuring speed on a machine without the
Hub (`sd2-base`: the real sizes). Images made with untrained ones mean nothing; the folder's README says so.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

KINDS: dict[str, dict[str, dict[str, Any]]] = {
    'tiny': {
        'vae': {'block_out_channels': (8, 16, 16), 'layers_per_block': 1, 'norm_num_groups': 4, 'sample_size': 32, 'scaling_factor': 0.5},
        'text': {'hidden_size': 32, 'intermediate_size': 64, 'num_hidden_layers': 2, 'num_attention_heads': 2, 'max_position_embeddings': 16},
    },
    'shapes': {  # the demo; its GroupNorm has one group, several would normalise away the very colours
        'vae': {'block_out_channels': (16, 32, 64), 'layers_per_block': 1, 'norm_num_groups': 1, 'sample_size': 32, 'mid_block_add_attention': False},
        'text': {'hidden_size': 64, 'intermediate_size': 128, 'num_hidden_layers': 2, 'num_attention_heads': 4, 'max_position_embeddings': 16},
    },
    'sd2-base': {
        'vae': {
            'block_out_channels': (128, 256, 512, 512),
            'layers_per_block': 2,
            'norm_num_groups': 32,
            'sample_size': 512,
            'scaling_factor': 0.18215,
        },
        'text': {
            'hidden_size': 1024,
            'intermediate_size': 4096,
            'num_hidden_layers': 23,
            'num_attention_heads': 16,
            'max_position_embeddings': 77,
            'projection_dim': 512,
            'vocab_size': 49408,
        },
    },
}


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
    CLIPTextModel(CLIPTextConfig(**config, **special, hidden_act='gelu')).save_pretrained(folder / 'text_encoder')
    (vae or build_vae(**KINDS[kind]['vae'])).save_pretrained(folder / 'vae')
    (folder / 'README.md').write_text(f'Stand-in encoders ({kind}, seed {seed}); the text encoder is random. For tests, demos and speed.\n')


def main() -> None:
    parser = argparse.ArgumentParser(
        prog='python -m diffusion.models.stand_in', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('folder', type=Path, metavar='FOLDER')
    parser.add_argument('--like', choices=sorted(KINDS), default='sd2-base', help='sizes to imitate (default %(default)s)')
    args = parser.parse_args()
    write_stand_in(args.folder, args.like)
    print(f'randomly initialised encoders in the sizes of {args.like}: {args.folder}')


if __name__ == '__main__':
    main()
