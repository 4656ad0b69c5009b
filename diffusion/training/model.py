"""The ComposerModel: a thin wrapper that calls a family, its encoders and its objective in order."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from composer.models import ComposerModel
from torch import Tensor
from torchmetrics import Metric

from diffusion.contracts.batch import Batch
from diffusion.contracts.conditioning import Conditioning
from diffusion.contracts.errors import EncoderError
from diffusion.datasets.keyed_random import Draw, normal, random_bits
from diffusion.encoders.frozen import FrozenEncoders
from diffusion.families.networks import find_network
from diffusion.families.registry import family_of, training_flops
from diffusion.objectives.guidance import guided, split
from diffusion.objectives.objective import weighted_error
from diffusion.objectives.registry import build_objective
from diffusion.recipe.schema import Model
from diffusion.training.compilation import BACKEND, compile_network, compiled, eager
from diffusion.training.metrics import losses_by_time

GENERATE_BATCH = 16  # images drawn together, which bounds the memory of a sample grid
EVAL_SEED_OFFSET = 1  # evaluation noise must not be training noise of the same sample


class Outputs(NamedTuple):
    """What one forward pass leaves for the loss and the metrics."""

    prediction: Tensor  # (B, C, h, w)
    target: Tensor  # (B, C, h, w) float32
    weight: Tensor | None  # (B,) float32
    t: Tensor  # (B,) times


class TextToImage(ComposerModel):
    """Trains the network; the encoders stay outside the registered modules and thus out of checkpoints and wrappers.

    Args:
        network: the module to train.
        encoders: frozen VAE and text encoders.
        model: the recipe's `model` section, which names the network's family and the objective.
        seed: keys all noise and times, together with each sample's key.
        eval_timesteps: number of evenly spaced times that evaluation uses.
        autocast: follow the surrounding precision; False where the network's weights are bf16 already.

    Raises:
        EncoderError: the network reads text of another width than the encoders write.
    """

    network: Any
    objective: Any

    def __init__(self, network: Any, encoders: FrozenEncoders, model: Model, seed: int, eval_timesteps: int = 10, autocast: bool = True):
        super().__init__()
        named = find_network(model.network)
        self.network, self.named, self.family, self.objective = network, named, family_of(model.network), build_objective(model)
        width = self.family.text_width(named.config)
        if width != encoders.text.width:
            raise EncoderError(
                f"the network '{named.name}' expects text of width {width}, the text encoder gives {encoders.text.width}; use encoders made for "
                'this network'
            )
        self._encoders = [encoders]  # in a list, so that nn.Module does not register its modules
        self.seed, self.timesteps, self.eval_timesteps, self.autocast = seed, model.timesteps, eval_timesteps, autocast
        self._noised = self.noised

    @property
    def encoders(self) -> FrozenEncoders:
        return self._encoders[0]

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    def forward(self, batch: Batch) -> Outputs:
        """The network's prediction at a random time of each sample."""
        return self._predict(batch, self._times(batch), self.seed)

    def _times(self, batch: Batch) -> Tensor:
        """(B,): those that the batch brings, or a draw for each sample. Only the whole global batch can be spread evenly."""
        if 'timesteps' in batch or self.timesteps == 'sobol':  # whose absence must not pass for a uniform draw
            return batch['timesteps']
        return self.objective.times(random_bits(self.seed, batch['sample_key'], Draw.TIMESTEP, 1)[:, 0])

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        return weighted_error(outputs.prediction, outputs.target, outputs.weight).mean()

    def eval_forward(self, batch: Batch, outputs: Outputs | None = None) -> Outputs:
        """At a fixed time with fixed noise for each sample id, so that equal weights give equal losses to the bit."""
        if outputs is not None:
            return outputs
        sample_id = batch['sample_key'][:, 1]
        key = by_id(sample_id)  # the same in every epoch
        t = self.objective.evenly_spaced(self.eval_timesteps).to(sample_id.device)[sample_id % self.eval_timesteps]
        with eager():
            return self._predict({**batch, 'sample_key': key}, t, self.seed + EVAL_SEED_OFFSET)

    def compile_step(self, mode: str) -> None:
        """Compile what a training step runs: the network as `mode` says, the noising, and the encoders."""
        compile_network(self.network, mode, self.family.blocks)
        self._noised = compiled(self.noised)
        self.encoders.compile(BACKEND)

    def _predict(self, batch: Batch, t: Tensor, seed: int) -> Outputs:
        moments = batch['moments'] if 'moments' in batch else self.encoders.encode_images(batch['images'])
        with torch.autocast(moments.device.type, enabled=False):  # the objective's arithmetic is float32
            noisy, target = self._noised(moments, batch['sample_key'], t, seed)
            weight = self.objective.weight(t)
        stored = batch.get('text_embeddings')
        tokens = batch['tokens']
        conditioning = self.encoders.encode_text(tokens) if stored is None else Conditioning(stored, tokens.get('text_encoder_mask'))
        return Outputs(self.denoise(noisy, t, conditioning), target, weight, t)

    def noised(self, moments: Tensor, key: Tensor, t: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """What the network sees and what it should predict, both (B, C, h, w) float32, of the VAE's moments (B, 2C, h, w).

        Args:
            key: (B, 3) int64 sample keys, on which all noise depends.
            t: (B,) times.
        """
        shape = (moments.shape[1] // 2, *moments.shape[2:])
        latents = self.encoders.latents(moments, normal(seed, key, Draw.POSTERIOR, shape))
        noisy, target = self.objective.noised(latents, self.objective.noise(seed, key, shape), t)
        return self.family.laid_out(noisy), self.family.laid_out(target)

    def denoise(self, noisy: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """The network's output (B, C, h, w)."""
        device = noisy.device.type
        with nullcontext() if self.autocast else torch.autocast(device, enabled=False):
            # Text in the dtype of the arithmetic: every attention would convert it again.
            dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else noisy.dtype
            return self.family.denoise(self.network, noisy, t, conditioning._replace(text=conditioning.text.to(dtype)))

    def get_metrics(self, is_train: bool) -> dict[str, Metric]:
        """The training loss is logged without one."""
        return {} if is_train else losses_by_time(self.objective.end, self.eval_timesteps)

    def update_metric(self, batch: Any, outputs: Outputs, metric: Metric) -> None:
        metric.update(batch['sample_key'][:, 1], weighted_error(outputs.prediction, outputs.target), outputs.t)

    def flops_per_batch(self, batch: Batch) -> int:
        """Counted FLOP of the network's forward and backward pass over the batch; the encoders are left out."""
        if 'moments' in batch:
            height, width = batch['moments'].shape[-2:]
        else:
            height, width = (side // self.encoders.downsampling for side in batch['images'].shape[-2:])
        return len(batch['sample_key']) * training_flops(self.named.name, (height, width), self.encoders.text.length)

    @torch.no_grad()
    def generate(self, prompts: list[str], resolution: int, guidance: float, steps: int, seed: int) -> Tensor:
        """(B, 3, H, W) uint8 images. Noise depends on the seed and a prompt's position alone, on any device."""
        side = resolution // self.encoders.downsampling
        noise = normal(seed, by_id(torch.arange(len(prompts))), Draw.NOISE, (self.encoders.latent_channels, side, side)).to(self.device)
        noise = self.family.laid_out(noise)
        images = []
        with eager():
            given, empty = (self.encoders.encode_text(self.encoders.tokenize(captions)) for captions in (prompts, [''] * len(prompts)))
            for part, prompted, unprompted in zip(
                noise.split(GENERATE_BATCH), split(given, GENERATE_BATCH), split(empty, GENERATE_BATCH), strict=True
            ):
                latents = self.objective.sample(guided(self.denoise, prompted, unprompted, guidance), part, steps)
                images.append(self.encoders.decode(latents))
        return torch.cat(images)


def by_id(sample_id: Tensor) -> Tensor:
    """(B, 3) int64 keys of (B,) ids, in epoch 0, at their first occurrence."""
    zero = torch.zeros_like(sample_id)
    return torch.stack([zero, sample_id, zero], dim=1)
