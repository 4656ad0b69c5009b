"""Z-Image (Tongyi-MAI; arXiv 2511.22699): a transformer over one sequence of an image's patches and as many tokens as its caption has, after blocks
for each of both; trained by rectified flow, drawn by ZImagePipeline. Its time runs from noise at 0 to the image at 1."""

from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKL, SchedulerMixin, ZImagePipeline, ZImageTransformer2DModel
from diffusers.models.transformers.transformer_z_image import SEQ_MULTI_OF, ZImageTransformerBlock
from torch import Tensor, nn
from transformers import Qwen2Tokenizer, Qwen3ForCausalLM, Qwen3Model

from diffusion.contracts.batch import Conditioning
from diffusion.encoders.frozen import FrozenEncoders
from diffusion.encoders.text import Qwen3Chat
from diffusion.families.family import Config, FlowTransformer, begin_at_zero
from diffusion.objectives.flow import NUM_TRAIN_TIMESTEPS, euler, evenly_shifted
from diffusion.objectives.objective import Denoise

ATTENTION = ('to_q', 'to_k', 'to_v', 'to_out.0')


class ZImage(FlowTransformer):
    text = Qwen3Chat
    blocks = (ZImageTransformerBlock,)
    stacked: ClassVar = {'adaLN_modulation.0': 4}  # scales and gates of attention and feed-forward layers
    masks_text = True
    pipeline_class = ZImagePipeline
    tags = ('z-image',)
    adds_shift = True
    no_guidance = 0.0
    default_px = 1024
    counted_batch = 64  # each goes in by itself, and 1024 would take minutes
    pipeline_parts: ClassVar = {
        'vae': (AutoencoderKL,),
        'text_encoder': (Qwen3Model, Qwen3ForCausalLM),
        'tokenizer': (Qwen2Tokenizer,),
        'transformer': (ZImageTransformer2DModel,),
    }
    adapter_targets: ClassVar = {'attention': ATTENTION, 'attention+ff': (*ATTENTION, *(f'feed_forward.w{number}' for number in (1, 2, 3)))}

    def build(self, config: Config) -> ZImageTransformer2DModel:
        """All modulations and the last layer begin at zero, as arXiv 2212.09748 has them (adaLN-Zero) and diffusers has not."""
        network = ZImageTransformer2DModel(**config)
        (last,) = network.all_final_layer.values()
        modulations = [block.adaLN_modulation[0] for block in (*network.noise_refiner, *network.layers)]
        begin_at_zero(*modulations, last.adaLN_modulation[1], last.linear)
        return network

    def denoise(self, network: nn.Module, noisy: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """Each sample goes in by itself, as a video of one frame, with as much text as it has. The network predicts what leads to the image."""
        reversed_t = (NUM_TRAIN_TIMESTEPS - t * NUM_TRAIN_TIMESTEPS) / NUM_TRAIN_TIMESTEPS  # rounded as the pipeline rounds it
        text, mask = conditioning.text, conditioning.mask
        captions = list(text) if mask is None else [row[own] for row, own in zip(text, mask, strict=True)]
        predicted = network(list(noisy.unsqueeze(2)), reversed_t, captions, return_dict=False)[0]
        return -torch.stack(predicted).squeeze(2)

    def sample(self, objective: Any, denoise: Denoise, noise: Tensor, steps: int) -> Tensor:
        """Euler's steps at the times of its pipeline, which end at 1/N, shifted, and not at 1/1000."""
        return euler(denoise, noise, evenly_shifted(steps, objective.settings.shift))

    def units(self, network: Any) -> set[nn.Module]:
        return {*network.noise_refiner, *network.context_refiner, *network.layers}

    def text_width(self, config: Config) -> int:
        return config['cap_feat_dim']

    def patch(self, config: Config) -> int:
        return config['all_patch_size'][0]

    def attention(self, config: Config, side: int, text_length: int) -> list[tuple[int, int, int]]:
        image, text = (-(-tokens // SEQ_MULTI_OF) * SEQ_MULTI_OF for tokens in ((side // self.patch(config)) ** 2, text_length))
        return [(length, length, config['dim'] // config['n_heads']) for length in (image, text, image + text)]

    def pipeline(self, network: Any, encoders: FrozenEncoders, scheduler: SchedulerMixin, resolution: int) -> Any:
        return self.assemble(network, encoders, scheduler)
