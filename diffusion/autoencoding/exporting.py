"""A trained autoencoder as a folder that `AutoencoderKL.from_pretrained(FOLDER, subfolder='vae')` opens, with the scale of its latents."""

import copy
import json
from pathlib import Path
from typing import Any

from composer.utils import dist

from diffusion.autoencoding.callbacks import bare
from diffusion.autoencoding.latents import measure, normalise
from diffusion.checkpoints.reading import CheckpointError
from diffusion.common.files import read_json, replacing_folder
from diffusion.recipe import AutoencoderRecipe, to_yaml
from diffusion.training.ema import averaged_weights
from diffusion.training.trainer import Trainer

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
    model = bare(trainer.state)
    model.eval()
    with averaged_weights(trainer.state) as weights:
        record = measure(model, trainer.state.train_dataloader.dataset, recipe.autoencoder.num_measured)  # type: ignore[union-attr]
        facts: dict[str, Any] = {
            'weights': weights,
            'batches': batches,
            'samples_seen': batches * recipe.batch.global_size,
            'resolution': recipe.data.resolution,
            'latents_as_trained': record,
        }
        if dist.get_global_rank() == 0:
            network = copy.deepcopy(model.network).cpu()
            config = normalise(network, record)
            network.register_to_config(sample_size=recipe.data.resolution, **config)
            facts |= config
            with replacing_folder(out) as temporary:
                network.save_pretrained(temporary / 'vae', safe_serialization=True)
                (temporary / 'recipe.yaml').write_text(to_yaml(recipe))
                (temporary / FACTS).write_text(json.dumps(facts, indent=1) + '\n')
    dist.barrier()
    return facts
