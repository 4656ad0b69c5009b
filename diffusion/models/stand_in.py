"""Randomly initialised encoders in the diffusers layout, where the real ones cannot be had.

    python -m diffusion.models.stand_in FOLDER [--like sd2-base]

For tests and the demo (`tiny`, whose tokenizer knows a small vocabulary) and for measuring speed on a machine without the
Hub (`sd2-base`: the real sizes). Images made with untrained ones mean nothing; the folder's README says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffusion.arguments import CommandParser

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


def main() -> None:
    parser = CommandParser('diffusion.models.stand_in', __doc__)
    parser.add_argument('folder', type=Path, metavar='FOLDER')
    parser.add_argument('--like', choices=sorted(KINDS), default='sd2-base', help='sizes to imitate (default %(default)s)')
    args = parser.parse_args()
    from diffusion.models.random_encoders import write_stand_in  # imports torch, so after the arguments are read

    write_stand_in(args.folder, args.like)
    print(f'randomly initialised encoders in the sizes of {args.like}: {args.folder}')


if __name__ == '__main__':
    main()
