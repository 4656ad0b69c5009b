"""Stable Diffusion as Composer trains it: a thin ComposerModel that calls the functions of this folder in order."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from composer.models import ComposerModel
from diffusers import UNet2DConditionModel
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from diffusion.contracts.batch import Batch
from diffusion.contracts.errors import EncoderError
from diffusion.datasets.keyed_random import Draw, integers, normal
from diffusion.encoders.frozen import FrozenEncoders
from diffusion.families.unet import training_flops
from diffusion.objectives.diffusion import PREDICTIONS, add_noise, loss_weight, offset, signal_and_sigma, weighted_error
from diffusion.objectives.sampling import sample_latents
from diffusion.objectives.schedule import alphas_cumprod
from diffusion.recipe.schema import Model
from diffusion.training.compilation import BACKEND, compile_unet, compiled, eager

GENERATE_BATCH = 16  # pictures drawn together, which bounds the memory of a sample grid
EVAL_SEED_OFFSET = 1  # evaluation noise must not be training noise of the same sample


class Outputs(NamedTuple):
    """What one forward pass leaves for the loss and the metrics."""

    prediction: Tensor  # (B, 4, h, w)
    target: Tensor  # (B, 4, h, w) float32
    weight: Tensor | None  # (B,) float32
    t: Tensor  # (B,) int64


class StableDiffusion(ComposerModel):
    """Trains the U-Net; the encoders stay outside the registered modules and thus out of checkpoints and wrappers.

    Args:
        unet: the network to train.
        encoders: frozen VAE, text encoder and tokenizer.
        model: the recipe's `model` section.
        seed: keys all noise and timesteps, together with each sample's key.
        eval_timesteps: number of evenly spaced timesteps that evaluation uses.
        autocast: follow the surrounding precision; False where the U-Net's weights are bf16 already.
    """

    alphas_cumprod: Tensor

    def __init__(
        self, unet: UNet2DConditionModel, encoders: FrozenEncoders, model: Model, seed: int, eval_timesteps: int = 10, autocast: bool = True
    ):
        super().__init__()
        if unet.config.cross_attention_dim != encoders.text_width:
            raise EncoderError(
                f"the U-Net '{model.network}' expects text of width {unet.config.cross_attention_dim}, the text encoder gives "
                f'{encoders.text_width}; use encoders made for this U-Net'
            )
        self.network = unet
        self._encoders = [encoders]  # in a list, so that nn.Module does not register its modules
        self.model = model
        self.seed = seed
        self.eval_timesteps = eval_timesteps
        self.autocast = autocast
        self._noised = self.noised
        self.register_buffer('alphas_cumprod', alphas_cumprod(model.diffusion.schedule), persistent=False)

    @property
    def encoders(self) -> FrozenEncoders:
        return self._encoders[0]

    def forward(self, batch: Batch) -> Outputs:
        """The U-Net's prediction at a random timestep of each sample."""
        return self._predict(batch, self._timesteps(batch), self.seed)

    def _timesteps(self, batch: Batch) -> Tensor:
        """(B,) int64: those that the batch brings, or a draw for each sample. Only the whole global batch can be spread evenly."""
        if 'timesteps' in batch or self.model.timesteps == 'sobol':  # whose absence must not pass for a uniform draw
            return batch['timesteps']
        return integers(self.seed, batch['sample_key'], Draw.TIMESTEP, len(self.alphas_cumprod))

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        return weighted_error(outputs.prediction, outputs.target, outputs.weight).mean()

    def eval_forward(self, batch: Batch, outputs: Outputs | None = None) -> Outputs:
        """At a fixed timestep with fixed noise for each sample id, so that equal weights give equal losses to the bit."""
        if outputs is not None:
            return outputs
        sample_id = batch['sample_key'][:, 1]
        key = by_id(sample_id)  # the same in every epoch
        t = evenly_spaced(self.eval_timesteps, len(self.alphas_cumprod)).to(sample_id.device)[sample_id % self.eval_timesteps]
        with eager():
            return self._predict({**batch, 'sample_key': key}, t, self.seed + EVAL_SEED_OFFSET)

    def compile_step(self, mode: str) -> None:
        """Compile what a training step runs: the U-Net as `mode` says, the noising, and the encoders."""
        compile_unet(self.network, mode)
        self._noised = compiled(self.noised)
        self.encoders.compile(BACKEND)

    def _predict(self, batch: Batch, t: Tensor, seed: int) -> Outputs:
        moments = batch['moments'] if 'moments' in batch else self.encoders.encode_images(batch['images'])
        with torch.autocast(moments.device.type, enabled=False):  # schedule arithmetic is float32
            noisy, target = self._noised(moments, batch['sample_key'], self.alphas_cumprod[t], seed)
            weight = loss_weight(self.model.diffusion.prediction, self.alphas_cumprod[t], self.model.diffusion.min_snr_gamma)
        text = batch['text_embeddings'] if 'text_embeddings' in batch else self.encoders.encode_text(batch['token_ids'])
        return Outputs(self.denoise(noisy, t, text), target, weight, t)

    def noised(self, moments: Tensor, key: Tensor, alphas_cumprod_t: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """What the U-Net sees and what it should predict, both (B, 4, h, w) float32 channels_last, of the VAE's moments (B, 8, h, w).

        Args:
            key: (B, 3) int64 sample keys, on which all noise depends.
            alphas_cumprod_t: (B,) float32 at each sample's timestep.
        """
        shape = (moments.shape[1] // 2, *moments.shape[2:])
        latents = self.encoders.latents(moments, normal(seed, key, Draw.POSTERIOR, shape))
        noise = normal(seed, key, Draw.NOISE, shape)
        if self.model.diffusion.offset_noise:
            noise = offset(noise, normal(seed, key, Draw.OFFSET_NOISE, (shape[0], 1, 1)), self.model.diffusion.offset_noise)
        signal, sigma = signal_and_sigma(alphas_cumprod_t)
        noisy = add_noise(latents, noise, signal, sigma)
        target = PREDICTIONS[self.model.diffusion.prediction].target(latents, noise, signal, sigma)
        return noisy.contiguous(memory_format=torch.channels_last), target.contiguous(memory_format=torch.channels_last)

    def denoise(self, noisy: Tensor, t: Tensor, text: Tensor) -> Tensor:
        """The U-Net's output (B, 4, h, w)."""
        device = noisy.device.type
        with nullcontext() if self.autocast else torch.autocast(device, enabled=False):
            # Text in the dtype of the arithmetic: 32 attentions would each convert it again.
            dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else noisy.dtype
            return self.network(noisy, t, text.to(dtype)).sample

    def get_metrics(self, is_train: bool) -> dict[str, Metric]:
        if is_train:
            return {}  # the training loss is logged as it is
        edges = [i * len(self.alphas_cumprod) // self.eval_timesteps for i in range(self.eval_timesteps + 1)]
        bins = itertools.pairwise(edges)
        return {
            'loss': DiffusionLoss(0, len(self.alphas_cumprod)),
            **{f'loss_t{low:03d}-{high - 1:03d}': DiffusionLoss(low, high) for low, high in bins},
        }

    def update_metric(self, batch: Any, outputs: Outputs, metric: Metric) -> None:
        metric.update(batch['sample_key'][:, 1], weighted_error(outputs.prediction, outputs.target), outputs.t)

    def flops_per_batch(self, batch: Batch) -> int:
        """Counted FLOP of the U-Net's forward and backward pass over the batch; the encoders are left out."""
        if 'moments' in batch:
            height, width = batch['moments'].shape[-2:]
        else:
            height, width = (side // self.encoders.downsampling for side in batch['images'].shape[-2:])
        num_samples, text_length = batch['token_ids'].shape
        return num_samples * training_flops(self.model.network, (height, width), text_length)

    @torch.no_grad()
    def generate(self, prompts: list[str], resolution: int, guidance: float, steps: int, seed: int) -> Tensor:
        """(B, 3, H, W) uint8 images. Noise depends on the seed and a prompt's position alone, on any device."""
        side = resolution // self.encoders.downsampling
        device = self.alphas_cumprod.device
        noise = normal(seed, by_id(torch.arange(len(prompts))), Draw.NOISE, (self.encoders.latent_channels, side, side)).to(device)
        noise = noise.contiguous(memory_format=torch.channels_last)
        pictures = []
        with eager():
            text = self.encoders.encode_text(self.encoders.tokenize(prompts))
            empty = self.encoders.encode_text(self.encoders.tokenize([''] * len(prompts)))
            for part in zip(noise.split(GENERATE_BATCH), text.split(GENERATE_BATCH), empty.split(GENERATE_BATCH), strict=True):
                latents = sample_latents(self.denoise, *part, self.alphas_cumprod, self.model.diffusion.prediction, steps, guidance)
                pictures.append(self.encoders.decode(latents))
        return torch.cat(pictures)


class DiffusionLoss(Metric):
    """Mean unweighted error of the samples whose timestep lies in [low, high).

    Each sample counts once, in the order of ids, in float64: Streaming repeats some samples to fill the last batches, which must
    not make the result depend on the batch size or the number of GPUs.
    """

    ids: list[Tensor]
    errors: list[Tensor]
    timesteps: list[Tensor]

    def __init__(self, low: int, high: int):
        super().__init__()
        self.low, self.high = low, high
        for state in ('ids', 'errors', 'timesteps'):
            self.add_state(state, [], dist_reduce_fx='cat')

    def update(self, sample_id: Tensor, error: Tensor, t: Tensor) -> None:
        """`sample_id` (B,) int64, `error` (B,) float32, `t` (B,) int64."""
        self.ids.append(sample_id)
        self.errors.append(error.double())
        self.timesteps.append(t)

    def compute(self) -> Tensor:
        """NaN for a bin that no sample fell into."""
        ids, errors, t = (dim_zero_cat(state) for state in (self.ids, self.errors, self.timesteps))
        order = ids.argsort(stable=True)
        first = torch.ones_like(order, dtype=torch.bool)
        first[1:] = ids[order].diff() != 0
        inside = (t[order] >= self.low) & (t[order] < self.high) & first
        return errors[order][inside].mean().float()


def by_id(sample_id: Tensor) -> Tensor:
    """(B, 3) int64 keys of (B,) ids, in epoch 0, at their first occurrence."""
    zero = torch.zeros_like(sample_id)
    return torch.stack([zero, sample_id, zero], dim=1)


def evenly_spaced(count: int, num_timesteps: int) -> Tensor:
    """(count,) int64: the middle of each of `count` equal bins of 0 .. T-1."""
    return ((torch.arange(count, dtype=torch.float64) + 0.5) * num_timesteps / count).long()
