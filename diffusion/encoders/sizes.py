"""Sizes of the encoders that stand-ins imitate, by name and by the folders of the diffusers layout. No torch."""

from typing import Any

PROJECTS = ['CLIPTextModelWithProjection']  # transformers' class, as config.json names it; a text encoder that does not say is a CLIPTextModel

STABLE_DIFFUSION_VAE = {'block_out_channels': (128, 256, 512, 512), 'layers_per_block': 2, 'norm_num_groups': 32}
FLUX_VAE = {
    **STABLE_DIFFUSION_VAE,
    'latent_channels': 16,
    'use_quant_conv': False,
    'use_post_quant_conv': False,
    'sample_size': 1024,
    'scaling_factor': 0.3611,
    'shift_factor': 0.1159,
}

OPENCLIP_H = {  # Stable Diffusion 2's
    'hidden_size': 1024,
    'intermediate_size': 4096,
    'num_hidden_layers': 23,
    'num_attention_heads': 16,
    'max_position_embeddings': 77,
    'projection_dim': 512,
    'vocab_size': 49408,
    'hidden_act': 'gelu',
}

T5_XXL = {  # of version 1.1
    'model_type': 't5',
    'd_model': 4096,
    'd_kv': 64,
    'd_ff': 10240,
    'num_layers': 24,
    'num_heads': 64,
    'vocab_size': 32128,
    'feed_forward_proj': 'gated-gelu',
    'n_positions': 256,  # a choice: it takes any number
}

KINDS: dict[str, dict[str, dict[str, Any]]] = {
    'tiny': {
        'vae': {'block_out_channels': (8, 16, 16), 'layers_per_block': 1, 'norm_num_groups': 4, 'sample_size': 32, 'scaling_factor': 0.5},
        'text_encoder': {
            'hidden_size': 32,
            'intermediate_size': 64,
            'num_hidden_layers': 2,
            'num_attention_heads': 2,
            'max_position_embeddings': 16,
            'hidden_act': 'gelu',
        },
    },
    'tiny-xl': {  # all widths differ, so that none can be taken for another
        'vae': {'block_out_channels': (8, 16, 16), 'layers_per_block': 1, 'norm_num_groups': 4, 'sample_size': 32, 'scaling_factor': 0.5},
        'text_encoder': {
            'hidden_size': 32,
            'intermediate_size': 64,
            'num_hidden_layers': 3,
            'num_attention_heads': 2,
            'max_position_embeddings': 16,
            'hidden_act': 'quick_gelu',
        },
        'text_encoder_2': {
            'architectures': PROJECTS,
            'hidden_size': 48,
            'intermediate_size': 96,
            'num_hidden_layers': 3,
            'num_attention_heads': 4,
            'max_position_embeddings': 16,
            'projection_dim': 24,
            'hidden_act': 'gelu',
        },
    },
    'shapes': {  # the demo; its GroupNorm has one group, several would normalise away the very colours
        'vae': {'block_out_channels': (16, 32, 64), 'layers_per_block': 1, 'norm_num_groups': 1, 'sample_size': 32, 'mid_block_add_attention': False},
        'text_encoder': {
            'hidden_size': 64,
            'intermediate_size': 128,
            'num_hidden_layers': 2,
            'num_attention_heads': 4,
            'max_position_embeddings': 16,
            'hidden_act': 'gelu',
        },
    },
    'sd2-base': {
        'vae': {**STABLE_DIFFUSION_VAE, 'sample_size': 512, 'scaling_factor': 0.18215},
        'text_encoder': OPENCLIP_H,
    },
    'sdxl-base': {
        'vae': {**STABLE_DIFFUSION_VAE, 'sample_size': 1024, 'scaling_factor': 0.13025},
        'text_encoder': {  # CLIP ViT-L
            'hidden_size': 768,
            'intermediate_size': 3072,
            'num_hidden_layers': 12,
            'num_attention_heads': 12,
            'max_position_embeddings': 77,
            'projection_dim': 768,
            'vocab_size': 49408,
            'hidden_act': 'quick_gelu',
        },
        'text_encoder_2': {  # OpenCLIP ViT-bigG
            'architectures': PROJECTS,
            'hidden_size': 1280,
            'intermediate_size': 5120,
            'num_hidden_layers': 32,
            'num_attention_heads': 20,
            'max_position_embeddings': 77,
            'projection_dim': 1280,
            'vocab_size': 49408,
            'hidden_act': 'gelu',
        },
    },
    'tiny-t5': {  # its VAE has a shift, too
        'vae': {
            'block_out_channels': (8, 16, 16),
            'layers_per_block': 1,
            'norm_num_groups': 4,
            'sample_size': 32,
            'scaling_factor': 0.5,
            'shift_factor': 0.25,
        },
        'text_encoder': {
            'model_type': 't5',
            'd_model': 32,
            'd_kv': 8,
            'd_ff': 64,
            'num_layers': 2,
            'num_heads': 4,
            'feed_forward_proj': 'gated-gelu',
            'n_positions': 24,
        },
    },
    'prx-600m': {'vae': FLUX_VAE, 'text_encoder': OPENCLIP_H},
    'prx-600m-t5-xxl': {'vae': FLUX_VAE, 'text_encoder': T5_XXL},
}
"""`vae`, `text_encoder` and perhaps `text_encoder_2`: arguments of diffusers' and transformers' configurations, and `model_type` of
a text encoder that is no CLIP; tokens of a caption are its `max_position_embeddings`, or T5's `n_positions`."""
