"""Stable Diffusion 3 and 3.5 medium (arXiv 2403.03206): a transformer whose latents and text attend to both at once, in 3.5 the latents to themselves
besides; it is told the pooled caption of two CLIPs, trained by rectified flow, drawn by StableDiffusion3Pipeline."""

from typing import Any, ClassVar

from diffusers import AutoencoderKL, SchedulerMixin, SD3Transformer2DModel, StableDiffusion3Pipeline
from diffusers.models.attention import JointTransformerBlock
from torch import Tensor, nn
from transformers import CLIPTextModelWithProjection, CLIPTokenizer, T5EncoderModel, T5Tokenizer

from diffusion.contracts.batch import Conditioning
from diffusion.encoders.frozen import FrozenEncoders
from diffusion.encoders.text import ClipPairAndT5
from diffusion.families.family import Config, FlowTransformer, begin_at_zero
from diffusion.objectives.flow import NUM_TRAIN_TIMESTEPS

ATTENTION = ('to_q', 'to_k', 'to_v', 'to_out.0', 'add_q_proj', 'add_k_proj', 'add_v_proj', 'to_add_out')
FEED_FORWARD = tuple(f'{stream}.net.{layer}' for stream in ('ff', 'ff_context') for layer in ('0.proj', '2'))


class StableDiffusion3(FlowTransformer):
    text = ClipPairAndT5
    blocks = (JointTransformerBlock,)
    pipeline_class = StableDiffusion3Pipeline
    tags = ('stable-diffusion-3',)
    adds_shift = True
    pipeline_parts: ClassVar = {
        'vae': (AutoencoderKL,),
        'text_encoder': (CLIPTextModelWithProjection,),
        'text_encoder_2': (CLIPTextModelWithProjection,),
        'text_encoder_3': (T5EncoderModel,),
        'tokenizer': (CLIPTokenizer,),
        'tokenizer_2': (CLIPTokenizer,),
        'tokenizer_3': (T5Tokenizer,),
        'transformer': (SD3Transformer2DModel,),
    }
    adapter_targets: ClassVar = {'attention': ATTENTION, 'attention+ff': (*ATTENTION, *FEED_FORWARD)}

    def build(self, config: Config) -> SD3Transformer2DModel:
        """All modulations and the last layer begin at zero, as arXiv 2212.09748 has them (adaLN-Zero) and diffusers has not."""
        network = SD3Transformer2DModel(**config)
        begin_at_zero(*self._modulations(network), network.norm_out.linear, network.proj_out)
        return network

    def denoise(self, network: nn.Module, noisy: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """Times go in as 0..1000, in float32."""
        assert conditioning.pooled is not None
        pooled = conditioning.pooled.to(conditioning.text.dtype)  # which becomes that of the embedded time, too
        return network(noisy, conditioning.text, pooled, t * NUM_TRAIN_TIMESTEPS, return_dict=False)[0]

    def units(self, network: Any) -> set[nn.Module]:
        return set(network.transformer_blocks)

    def text_width(self, config: Config) -> int:
        return config['joint_attention_dim']

    def pooled_width(self, config: Config) -> int:
        return config['pooled_projection_dim']

    def patch(self, config: Config) -> int:
        return config['patch_size']

    def attention(self, config: Config, side: int, text_length: int) -> list[tuple[int, int, int]]:
        tokens, width = (side // config['patch_size']) ** 2, config['attention_head_dim']
        return [(length, length, width) for length in (tokens + text_length, *([tokens] if config['dual_attention_layers'] else []))]

    def matrices(self, network: Any) -> dict[Tensor, int]:
        """A modulation holds as many matrices as it makes shifts, scales and gates: 2, 6 or, with a second attention, 9."""
        modulations = {id(layer.weight) for layer in self._modulations(network)}
        return {weight: weight.shape[0] // weight.shape[1] if id(weight) in modulations else 1 for weight in super().matrices(network)}

    def pipeline(self, network: Any, encoders: FrozenEncoders, scheduler: SchedulerMixin, resolution: int) -> Any:
        network.register_to_config(sample_size=resolution // encoders.vae.downsampling)  # its positions are stored with its weights
        return self.assemble(network, encoders, scheduler)

    def _modulations(self, network: Any) -> list[nn.Linear]:
        return [norm.linear for block in network.transformer_blocks for norm in (block.norm1, block.norm1_context)]
