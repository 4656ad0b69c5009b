"""PRX (Photoroom): a transformer over patches of latents that attends to encoded text and to itself at once, trained by rectified flow, drawn by
PRXPipeline. Here with one text encoder, CLIP's or of T5's family, whose padding is masked."""

import logging
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKL, PRXPipeline, PRXTransformer2DModel, SchedulerMixin
from diffusers.models.transformers.transformer_prx import PRXBlock
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTokenizer, T5EncoderModel, T5Tokenizer, UMT5EncoderModel

from diffusion.contracts.batch import Conditioning
from diffusion.encoders.frozen import FrozenEncoders
from diffusion.encoders.text import TextEncoders, find_masked
from diffusion.families.family import Config, FlowTransformer, begin_at_zero

# Of diffusers' own class, and of the text encoder that its annotation names: nothing that a user of this project can change.
warnings.filterwarnings('ignore', message='`LoraLoaderMixin` is deprecated', category=FutureWarning)
logging.getLogger('diffusers.pipelines.pipeline_utils').addFilter(
    lambda record: not record.getMessage().startswith('Expected types for text_encoder')
)

ATTENTION = ('img_qkv_proj', 'txt_kv_proj', 'to_out.0')


class Prx(FlowTransformer):
    blocks = (PRXBlock,)
    stacked: ClassVar = {'img_qkv_proj': 3, 'txt_kv_proj': 2, 'modulation.lin': 6}
    masks_text = True
    pipeline_class = PRXPipeline
    tags = ('prx',)
    adds_shift: ClassVar = True
    token_arguments: ClassVar = {'hidden_states': 1, 'image_rotary_emb': 2}
    adapter_targets: ClassVar = {'attention': ATTENTION, 'attention+ff': (*ATTENTION, 'gate_proj', 'up_proj', 'down_proj')}
    pipeline_parts: ClassVar = {
        'vae': (AutoencoderKL,),
        'text_encoder': (CLIPTextModel, T5EncoderModel, UMT5EncoderModel),
        'tokenizer': (CLIPTokenizer, T5Tokenizer),
        'transformer': (PRXTransformer2DModel,),
    }
    schedulers = ('FlowMatchEulerDiscreteScheduler', 'FlowMatchHeunDiscreteScheduler')
    pipeline_batch = 1  # with guidance PRXPipeline of diffusers 0.42 makes two times for 2B samples
    # Captions are trained as they are; the pipeline's cleaning would change them, and its sizes are those of published models.
    pipeline_options: ClassVar = {'skip_text_cleaning': True, 'use_resolution_binning': False}

    def find_text(self, source: str, revision: str | None) -> TextEncoders:
        return find_masked(source, revision)

    def build(self, config: Config) -> PRXTransformer2DModel:
        """The last layer begins at zero, as in the original's code (Photoroom/PRX); diffusers does so with the blocks' modulation alone."""
        network = PRXTransformer2DModel(**config)
        begin_at_zero(network.final_layer.linear, network.final_layer.adaLN_modulation[1])
        return network

    def denoise(self, network: nn.Module, noisy: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """Times go in as 0..1, in float32; the network multiplies them by 1000 itself."""
        return network(noisy, t, conditioning.text, attention_mask=conditioning.mask, return_dict=False)[0]

    def units(self, network: Any) -> set[nn.Module]:
        return set(network.blocks)

    def token_blocks(self, network: Any) -> Sequence[nn.Module]:
        return list(network.blocks)

    def token_width(self, config: Config) -> int:
        return config['hidden_size']

    def text_width(self, config: Config) -> int:
        return config['context_in_dim']

    def patch(self, config: Config) -> int:
        return config['patch_size']

    def attention(self, config: Config, side: int, text_length: int) -> list[tuple[int, int, int]]:
        tokens = (side // config['patch_size']) ** 2
        return [(tokens, text_length + tokens, config['hidden_size'] // config['num_heads'])]

    def example_conditioning(self, config: Config, batch: int, text_length: int, dtype: torch.dtype) -> Conditioning:
        plain = super().example_conditioning(config, batch, text_length, dtype)
        return plain._replace(mask=torch.ones(batch, text_length, dtype=torch.bool))

    def pipeline(self, network: Any, encoders: FrozenEncoders, scheduler: SchedulerMixin, resolution: int) -> Any:
        return self.assemble(network, encoders, scheduler, default_sample_size=resolution)
