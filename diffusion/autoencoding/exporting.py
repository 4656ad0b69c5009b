"""The latents of a trained autoencoder, measured and brought to unit variance, and its folder.

`AutoencoderKL.from_pretrained(FOLDER, subfolder='vae')` opens it, with the scale of its latents.
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from composer.utils import dist
from diffusers import AutoencoderKL

from diffusion.autoencoding.model import AutoencoderTraining
from diffusion.autoencoding.networks import moments_layer
from diffusion.common.collective import unwrap_model
from diffusion.common.files import read_json, replacing_folder
from diffusion.contracts.errors import CheckpointError
from diffusion.evaluation.metrics.reconstructions import LatentStatistics
from diffusion.recipe import AutoencoderRecipe, to_yaml
from diffusion.training.ema import averaged_weights
from diffusion.training.trainer import Trainer

TOGETHER = 16  # crops that are encoded at once


@torch.no_grad()
def measure_latents(model: AutoencoderTraining, dataset: Any, count: int) -> dict[str, Any]:
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
def normalise_latents(network: AutoencoderKL, record: dict[str, Any]) -> dict[str, Any]:
    """Fold mean and deviation of the latents into the weights where that can be; return the entries of config.json that bring them to 0 and 1.

    With 1 x 1 convolutions on both sides of the latents, as Stable Diffusion's has, these take over each channel's mean and deviation, exactly:
    scale 1 and shift 0 are left for every pipeline. Else there is one scale and one shift for all channels, which pipelines of transformers
    (SD3, Flux, PRX) read, and that of Stable Diffusion does not. `latents_mean` and `latents_std` are those of the channels as they are then.
    """
    mean, std = (torch.tensor([channel[name] for channel in record['channels']]) for name in ('mean', 'std'))
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


FACTS = 'export.json'


def export(trainer: Trainer, recipe: AutoencoderRecipe, out: Path) -> dict[str, Any] | None:
    """Measure the latents of the averaged weights and write the folder, unless it is there already; all ranks must call it.

    Returns:
        What export.json says; None if the folder held the autoencoder of this batch already. Delete it to have it written again.

    Raises:
        CheckpointError: `out` is not an export.
    """
    batches = trainer.state.timestamp.batch.value
    if out.exists():
        if not (out / FACTS).exists():
            raise CheckpointError(f'{out}: exists and is not an export of this project; move it away')
        if read_json(out / FACTS, dict[str, Any], CheckpointError, f'delete {out} to have it written again').get('batches') == batches:
            return None
    model = unwrap_model(trainer.state)
    model.eval()
    with averaged_weights(trainer.state) as weights:
        record = measure_latents(model, trainer.state.train_dataloader.dataset, recipe.autoencoder.num_measured)  # type: ignore[union-attr]
        facts: dict[str, Any] = {
            'weights': weights,
            'batches': batches,
            'samples_seen': batches * recipe.batch.global_size,
            'resolution': recipe.data.resolution,
            'latents_as_trained': record,
        }
        if dist.get_global_rank() == 0:
            network = copy.deepcopy(model.network).cpu()
            config = normalise_latents(network, record)
            network.register_to_config(sample_size=recipe.data.resolution, **config)
            facts |= config
            with replacing_folder(out) as temporary:
                network.save_pretrained(temporary / 'vae', safe_serialization=True)
                (temporary / 'recipe.yaml').write_text(to_yaml(recipe))
                (temporary / FACTS).write_text(json.dumps(facts, indent=1) + '\n')
    dist.barrier()
    return facts
