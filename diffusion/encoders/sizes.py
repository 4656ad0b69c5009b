"""Sizes of the encoders that stand-ins imitate, by name and by the folders of the diffusers layout. No torch."""

from typing import Any

PROJECTS = ['CLIPTextModelWithProjection']  # transformers' class, as config.json names it; a text encoder that does not say is a CLIPTextModel
HAS_HEAD = ['Qwen3ForCausalLM']  # likewise
FLUX2 = 'AutoencoderKLFlux2'  # diffusers' class of a VAE that is no AutoencoderKL


def _clip(width: int, mlp_width: int, layers: int, heads: int, activation: str = 'gelu', length: int = 77, **more: Any) -> dict[str, Any]:
    """Arguments of transformers' CLIPTextConfig."""
    sizes = {'hidden_size': width, 'intermediate_size': mlp_width, 'num_hidden_layers': layers, 'num_attention_heads': heads}
    return {**sizes, 'max_position_embeddings': length, 'hidden_act': activation, **more}


def _t5(width: int, head_width: int, mlp_width: int, layers: int, heads: int, length: int, **more: Any) -> dict[str, Any]:
    """Arguments of transformers' T5Config, version 1.1. It takes any number of tokens: `length` is a choice."""
    sizes = {'d_model': width, 'd_kv': head_width, 'd_ff': mlp_width, 'num_layers': layers, 'num_heads': heads}
    return {'model_type': 't5', **sizes, 'feed_forward_proj': 'gated-gelu', 'n_positions': length, **more}


def _qwen3(width: int, mlp_width: int, layers: int, heads: int, key_heads: int, head_width: int, **more: Any) -> dict[str, Any]:
    """Arguments of transformers' Qwen3Config."""
    sizes = {'hidden_size': width, 'intermediate_size': mlp_width, 'num_hidden_layers': layers}
    heads_of = {'num_attention_heads': heads, 'num_key_value_heads': key_heads, 'head_dim': head_width}
    return {'model_type': 'qwen3', **sizes, **heads_of, 'max_position_embeddings': 40960, 'tie_word_embeddings': True, **more}


TINY_VAE = {'block_out_channels': (8, 16, 16), 'layers_per_block': 1, 'norm_num_groups': 4, 'sample_size': 32, 'scaling_factor': 0.5}
STABLE_DIFFUSION_VAE = {'block_out_channels': (128, 256, 512, 512), 'layers_per_block': 2, 'norm_num_groups': 32}
FLUX_VAE = STABLE_DIFFUSION_VAE | {'latent_channels': 16, 'sample_size': 1024, 'scaling_factor': 0.3611, 'shift_factor': 0.1159}
FLUX_VAE |= {'use_quant_conv': False, 'use_post_quant_conv': False}
FLUX2_VAE = STABLE_DIFFUSION_VAE | {'_class_name': FLUX2, 'latent_channels': 32, 'sample_size': 1024}
OPENCLIP_H = _clip(1024, 4096, 23, 16, projection_dim=512, vocab_size=49408)  # Stable Diffusion 2's
T5_XXL = _t5(4096, 64, 10240, 24, 64, 256, vocab_size=32128)
QWEN3_4B = _qwen3(2560, 9728, 36, 32, 8, 128, vocab_size=151936)
CLIP_L = _clip(768, 3072, 12, 12, 'quick_gelu', projection_dim=768, vocab_size=49408)
OPENCLIP_BIGG = _clip(1280, 5120, 32, 20, projection_dim=1280, vocab_size=49408, architectures=PROJECTS)

KINDS: dict[str, dict[str, dict[str, Any]]] = {
    'tiny': {'vae': TINY_VAE, 'text_encoder': _clip(32, 64, 2, 2, length=16)},
    'tiny-xl': {  # all widths differ, so that none can be taken for another
        'vae': TINY_VAE,
        'text_encoder': _clip(32, 64, 3, 2, 'quick_gelu', length=16),
        'text_encoder_2': _clip(48, 96, 3, 4, length=16, projection_dim=24, architectures=PROJECTS),
    },
    'shapes': {  # the demo; its GroupNorm has one group, several would normalise away the very colours
        'vae': {'block_out_channels': (16, 32, 64), 'latent_channels': 8, 'layers_per_block': 1, 'norm_num_groups': 1}
        | {'sample_size': 32, 'mid_block_add_attention': False},
        'text_encoder': _clip(64, 128, 2, 4, length=16),
    },
    'sd2-base': {'vae': {**STABLE_DIFFUSION_VAE, 'sample_size': 512, 'scaling_factor': 0.18215}, 'text_encoder': OPENCLIP_H},
    'sdxl-base': {
        'vae': {**STABLE_DIFFUSION_VAE, 'sample_size': 1024, 'scaling_factor': 0.13025},
        'text_encoder': CLIP_L,
        'text_encoder_2': OPENCLIP_BIGG,
    },
    'tiny-t5': {'vae': {**TINY_VAE, 'shift_factor': 0.25}, 'text_encoder': _t5(32, 8, 64, 2, 4, 24)},  # its VAE has a shift, too
    'tiny-sd3': {  # widths differ here too; the pair's 80 channels are padded to T5's
        'vae': {**TINY_VAE, 'shift_factor': 0.25},
        'text_encoder': _clip(32, 64, 3, 2, 'quick_gelu', length=16, projection_dim=20, architectures=PROJECTS),
        'text_encoder_2': _clip(48, 96, 3, 4, length=16, projection_dim=24, architectures=PROJECTS),
        'text_encoder_3': _t5(96, 8, 64, 2, 4, 256),
    },
    'sd35-medium': {
        'vae': FLUX_VAE | {'scaling_factor': 1.5305, 'shift_factor': 0.0609},
        'text_encoder': CLIP_L | {'architectures': PROJECTS},
        'text_encoder_2': OPENCLIP_BIGG,
        'text_encoder_3': T5_XXL,
    },
    'tiny-z-image': {'vae': {**TINY_VAE, 'shift_factor': 0.25}, 'text_encoder': _qwen3(48, 64, 3, 4, 2, 16)},
    'z-image': {'vae': FLUX_VAE, 'text_encoder': QWEN3_4B},
    'tiny-flux2': {
        'vae': {name: value for name, value in TINY_VAE.items() if name != 'scaling_factor'} | {'_class_name': FLUX2},
        'text_encoder': _qwen3(16, 32, 28, 2, 1, 8, architectures=HAS_HEAD),
    },
    'flux2-klein-4b': {'vae': FLUX2_VAE, 'text_encoder': QWEN3_4B | {'architectures': HAS_HEAD}},
    'prx-600m': {'vae': FLUX_VAE, 'text_encoder': OPENCLIP_H},
    'prx-600m-t5-xxl': {'vae': FLUX_VAE, 'text_encoder': T5_XXL},
}
"""`vae`, `text_encoder` and perhaps `text_encoder_2` and `_3`: arguments of diffusers' and transformers' configurations, and `model_type` of
a text encoder that is no CLIP; tokens of a caption are its `max_position_embeddings`, or T5's `n_positions`, unless the family's class of text
encoders says how many."""
