"""FLUX.2 klein base (Black Forest Labs): a transformer whose latents and text attend to both at once, in the first blocks through weights of their
own; trained by rectified flow, drawn by Flux2KleinPipeline, which moves times by the size of the image."""

import math
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline, Flux2Transformer2DModel, SchedulerMixin
from diffusers.models.transformers.transformer_flux2 import Flux2SingleTransformerBlock, Flux2TransformerBlock
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from torch import Tensor, nn
from transformers import Qwen2Tokenizer, Qwen3ForCausalLM

from diffusion.contracts.batch import Conditioning
from diffusion.encoders.frozen import FrozenEncoders
from diffusion.encoders.text import Qwen3Layers
from diffusion.families.family import Config, FlowTransformer, begin_at_zero
from diffusion.objectives.flow import NUM_TRAIN_TIMESTEPS, euler, evenly_shifted
from diffusion.objectives.objective import Denoise

# By number: `to_out` alone would also name what holds that of the first blocks. The largest klein has 24.
JOINT = ('to_qkv_mlp_proj', *(f'single_transformer_blocks.{number}.attn.to_out' for number in range(24)))
ATTENTION = ('to_q', 'to_k', 'to_v', 'to_out.0', *JOINT)
FEED_FORWARD = tuple(f'{stream}.{layer}' for stream in ('ff', 'ff_context') for layer in ('linear_in', 'linear_out'))


class Flux2Klein(FlowTransformer):
    text = Qwen3Layers
    blocks = (Flux2TransformerBlock, Flux2SingleTransformerBlock)
    # A gate lies above what it opens. In the joint blocks both, each three times as tall, lie below queries, keys and values.
    stacked: ClassVar = {'linear_in': 2, 'to_qkv_mlp_proj': 9}
    pipeline_class = Flux2KleinPipeline
    tags = ('flux-2-klein',)
    default_px = 1024
    pipeline_parts: ClassVar = {
        'vae': (AutoencoderKLFlux2,),
        'text_encoder': (Qwen3ForCausalLM,),
        'tokenizer': (Qwen2Tokenizer,),
        'transformer': (Flux2Transformer2DModel,),
    }
    adapter_targets: ClassVar = {'attention': ATTENTION, 'attention+ff': (*ATTENTION, *FEED_FORWARD)}

    def build(self, config: Config) -> Flux2Transformer2DModel:
        """All modulations and the last layer begin at zero, as arXiv 2212.09748 has them (adaLN-Zero) and diffusers has not."""
        network = Flux2Transformer2DModel(**config)
        modulations = network.double_stream_modulation_img, network.double_stream_modulation_txt, network.single_stream_modulation
        begin_at_zero(*(modulation.linear for modulation in modulations), network.norm_out.linear, network.proj_out)
        return network

    def denoise(self, network: nn.Module, noisy: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """Positions are four numbers a token: the rows and columns of latents are the second and third, the place in a caption the fourth."""
        device, (height, width), length = noisy.device, noisy.shape[-2:], conditioning.text.shape[1]
        rows, columns = torch.arange(height, device=device), torch.arange(width, device=device)
        at_latents = torch.zeros(height, width, 4, device=device)
        at_latents[..., 1], at_latents[..., 2] = rows[:, None], columns
        at_text = torch.nn.functional.pad(torch.arange(length, device=device)[:, None], (3, 0))
        predicted = network(
            noisy.flatten(2).transpose(1, 2),
            conditioning.text,
            t * NUM_TRAIN_TIMESTEPS / NUM_TRAIN_TIMESTEPS,  # rounded as the pipeline rounds it
            at_latents.flatten(0, 1),
            at_text,
            return_dict=False,
        )[0]
        return predicted.transpose(1, 2).reshape(noisy.shape)

    def scheduler(self, objective: Any) -> SchedulerMixin:
        """Make the published one: its pipeline says by how much times are shifted, and `shift` means nothing to it."""
        return FlowMatchEulerDiscreteScheduler(num_train_timesteps=NUM_TRAIN_TIMESTEPS, shift=3.0, use_dynamic_shifting=True)

    def sample(self, objective: Any, denoise: Denoise, noise: Tensor, steps: int) -> Tensor:
        """Take Euler's steps at the times of its pipeline, which depend on the number of latents and of steps."""
        mu = compute_empirical_mu(noise.shape[-2] * noise.shape[-1], steps)
        return euler(denoise, noise, evenly_shifted(steps, math.exp(mu)))

    def units(self, network: Any) -> set[nn.Module]:
        return {*network.transformer_blocks, *network.single_transformer_blocks}

    def text_width(self, config: Config) -> int:
        return config['joint_attention_dim']

    def attention(self, config: Config, side: int, text_length: int) -> list[tuple[int, int, int]]:
        length = side**2 + text_length
        return [(length, length, config['attention_head_dim'])]

    def noise_shape(self, pipeline: Any, resolution: int) -> tuple[int, int, int]:
        side = resolution // pipeline.vae_scale_factor // 2
        return pipeline.transformer.config.in_channels, side, side

    def unscaled(self, pipeline: Any, latents: Tensor) -> Tensor:
        """Return them as they are: the pipeline has brought them into the VAE's own units."""
        return latents.float()

    def pipeline(self, network: Any, encoders: FrozenEncoders, scheduler: SchedulerMixin, resolution: int) -> Any:
        return self.assemble(network, encoders, scheduler, is_distilled=False)
