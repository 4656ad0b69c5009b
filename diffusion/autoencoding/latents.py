"""The latents of a trained autoencoder: measured, and brought to zero mean and unit variance."""

from typing import Any

import torch
from composer.utils import dist
from diffusers import AutoencoderKL

from diffusion.autoencoding.model import AutoencoderTraining
from diffusion.autoencoding.networks import moments_layer
from diffusion.evaluation.latent_statistics import LatentRecord, LatentStatistics

TOGETHER = 16  # crops that are encoded at once


@torch.no_grad()
def measure(model: AutoencoderTraining, dataset: Any, count: int) -> LatentRecord:
    """Return mean and deviation of the latents of `count` evenly spaced training crops, those of the first epoch, or of all if there are fewer.

    All ranks must call it: each encodes its part, and all get the same, whatever their number.

    Args:
        dataset: of the training loader.
    """
    count = min(count, dataset.num_samples)
    ids = [i * dataset.num_samples // count for i in range(count)]
    statistics = LatentStatistics(model.network.config['latent_channels'])
    rank, together = dist.get_global_rank(), TOGETHER * dist.get_world_size()
    for first in range(0, count, together):
        of_round = ids[first : first + together]
        own = [*of_round, *[of_round[-1]] * together][rank * TOGETHER : (rank + 1) * TOGETHER]  # filled up, as ranks exchange equally many
        images = torch.stack([dataset.view(i, 0, epoch=0)['images'] for i in own]).to(model.device)
        everyone = torch.cat(list(dist.all_gather(model.moments(images).contiguous())))
        statistics.add(everyone[: len(of_round)])
    return statistics.record()


@torch.no_grad()
def normalise(network: AutoencoderKL, record: LatentRecord) -> dict[str, Any]:
    """Fold mean and deviation of the latents into the weights where that can be; return the entries of config.json that bring them to 0 and 1.

    With 1 x 1 convolutions on both sides of the latents, as Stable Diffusion's has, these take over each channel's mean and deviation, exactly:
    scale 1 and shift 0 are left for every pipeline. Else there is one scale and one shift for all channels, which pipelines of transformers
    (SD3, Flux, PRX) read, and that of Stable Diffusion does not. `latents_mean` and `latents_std` are those of the channels as they are then.
    """
    mean, std = (torch.tensor([channel[name] for channel in record['channels']]) for name in ('mean', 'std'))  # type: ignore[literal-required]
    if network.quant_conv is None or network.post_quant_conv is None:
        factors = {'scaling_factor': 1 / record['std'], 'shift_factor': record['mean']}
        return {**factors, 'latents_mean': mean.tolist(), 'latents_std': std.tolist()}
    before, after, channels = moments_layer(network), network.post_quant_conv, len(mean)
    mean, std = mean.to(before.weight), std.to(before.weight)
    before.weight[:channels] /= std.view(-1, 1, 1, 1)
    before.bias[:channels] = (before.bias[:channels] - mean) / std
    before.bias[channels:] -= 2 * std.log()  # log variance
    assert after.bias is not None
    after.bias += after.weight[:, :, 0, 0] @ mean
    after.weight *= std.view(1, -1, 1, 1)
    return {'scaling_factor': 1.0, 'shift_factor': 0.0, 'latents_mean': [0.0] * channels, 'latents_std': [1.0] * channels}
