"""Sizes of the encoders that stand-ins imitate, by name. No torch."""

from __future__ import annotations

from typing import Any

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
