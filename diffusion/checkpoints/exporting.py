"""A checkpoint as a folder in the diffusers layout."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from diffusion.checkpoints.model_card import model_card
from diffusion.checkpoints.reading import (
    batches_trained,
    ema_weights,
    find_checkpoint,
    load_strictly,
    read_checkpoint,
    recipe_yaml,
    training_weights,
)
from diffusion.common.files import replacing_folder
from diffusion.contracts.errors import CheckpointError
from diffusion.encoders.frozen import FrozenEncoders
from diffusion.encoders.pretrained import save_tokenizer
from diffusion.families.registry import build_network, family_for
from diffusion.objectives.registry import build_objective
from diffusion.recipe import recipe_from_yaml
from diffusion.recipe.averaging import coverage


def export(checkpoint: Path, out: Path, weights: str = 'ema', overrides: Sequence[str] = (), license: str | None = None) -> dict[str, object]:
    """Write the folder; returns what `export.json` says.

    Raises:
        CheckpointError, EncoderError, RecipeError: with the remedy.
    """
    if out.exists() and not (out / 'export.json').exists():
        raise CheckpointError(f'{out}: exists and is no export of ours; name a new folder')
    file = find_checkpoint(checkpoint)
    state = read_checkpoint(file)
    recipe = recipe_from_yaml(recipe_yaml(state), str(file), overrides)
    batches = batches_trained(state)
    chosen = ema_weights(state) if weights == 'ema' else training_weights(state)
    if chosen is None:
        raise CheckpointError(
            f'{file}: holds no EMA after {batches} batches (ema.half_life={recipe.ema.half_life}, ema.start={recipe.ema.start}); '
            'take the weights as trained with --weights training'
        )
    family = family_for(recipe)
    network = build_network(recipe.model.network)
    load_strictly(network, chosen, str(file))
    encoders = FrozenEncoders.load(recipe.model.encoders, family.find_text)
    pipeline = family.pipeline(network, encoders, build_objective(recipe.model).scheduler(), recipe.data.resolution)
    covered = coverage(recipe.ema, batches) if weights == 'ema' else None
    facts: dict[str, object] = {
        'weights': weights,
        'checkpoint': file.name,
        'batches': batches,
        'samples_seen': batches * recipe.batch.global_size,
        'resolution': recipe.data.resolution,
        'average': None if covered is None else dataclasses.asdict(covered),
        'guidance': recipe.log.samples.guidance,
        'steps': recipe.log.samples.steps,
    }
    with replacing_folder(out) as temporary:
        pipeline.save_pretrained(temporary, safe_serialization=True)
        for name, tokenizer in encoders.text.tokenizers.items():
            save_tokenizer(tokenizer, temporary / name)
        (temporary / 'recipe.yaml').write_text(recipe_yaml(state))
        (temporary / 'export.json').write_text(json.dumps(facts, indent=1) + '\n')
        (temporary / 'README.md').write_text(model_card(recipe, file, state, facts, license))
    return facts
