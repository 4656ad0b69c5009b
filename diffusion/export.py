"""Turn a checkpoint into a diffusers folder that `StableDiffusionPipeline.from_pretrained` opens.

    python -m diffusion.export CHECKPOINT OUT [--weights ema|training] [key=value ...]

CHECKPOINT is a `.pt` file of a run, or its run folder (then the latest is taken). OUT gets safetensors, the sampler's schedule
as it was trained, the encoders, the recipe, and `export.json`, which says which weights these are: the EMA unless asked otherwise.

Exit code 0 when OUT is complete, 2 when the checkpoint or OUT cannot be used.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from diffusers import DDIMScheduler, StableDiffusionPipeline

from diffusion.checkpoints.reading import (
    batches_trained,
    ema_weights,
    find_checkpoint,
    load_strictly,
    read_checkpoint,
    recipe_yaml,
    training_weights,
)
from diffusion.errors import CheckpointError, EncoderError
from diffusion.files import replacing_folder
from diffusion.models.encoders import FrozenEncoders
from diffusion.models.schedule import scheduler_config
from diffusion.models.unet import build_unet
from diffusion.recipe import RecipeError, recipe_from_yaml


def export(checkpoint: Path, out: Path, weights: str = 'ema', overrides: Sequence[str] = ()) -> dict[str, object]:
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
    unet = build_unet(recipe.model.unet)
    load_strictly(unet, chosen, str(file))
    encoders = FrozenEncoders.load(recipe.model.encoders)
    unet.register_to_config(sample_size=recipe.data.resolution // encoders.downsampling)  # what the pipeline draws unless told otherwise
    pipeline = StableDiffusionPipeline(
        vae=encoders.vae,
        text_encoder=encoders.text_encoder,
        tokenizer=encoders.tokenizer,
        unet=unet,
        scheduler=DDIMScheduler(**scheduler_config(recipe.model.schedule, recipe.model.prediction)),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    facts: dict[str, object] = {
        'weights': weights,
        'checkpoint': file.name,
        'batches': batches,
        'samples_seen': batches * recipe.batch.global_size,
        'resolution': recipe.data.resolution,
        'guidance': recipe.log.samples.guidance,
        'steps': recipe.log.samples.steps,
    }
    with replacing_folder(out) as temporary:
        pipeline.save_pretrained(temporary, safe_serialization=True)
        (temporary / 'recipe.yaml').write_text(recipe_yaml(state))
        (temporary / 'export.json').write_text(json.dumps(facts, indent=1) + '\n')
    return facts


def main() -> int:
    parser = argparse.ArgumentParser(prog='python -m diffusion.export', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('checkpoint', type=Path, metavar='CHECKPOINT', help='.pt file, or the folder of a run')
    parser.add_argument('out', type=Path, metavar='OUT', help='folder to write; an earlier export there is replaced')
    parser.add_argument('--weights', choices=('ema', 'training'), default='ema', help='which weights (default %(default)s)')
    parser.add_argument(
        'overrides', nargs='*', metavar='key=value', help="changes to the checkpoint's recipe, such as model.encoders.source=FOLDER if it has moved"
    )
    args = parser.parse_intermixed_args()
    try:
        facts = export(args.checkpoint, args.out, args.weights, args.overrides)
    except (CheckpointError, EncoderError, RecipeError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f'{facts["weights"]} weights after {facts["batches"]:,} batches: {args.out}')
    return 0


if __name__ == '__main__':
    raise SystemExit(main())
