"""Sample grids of a run's checkpoints, drawn as the run itself draws them, without a Trainer."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from composer.core import get_precision_context
from composer.utils import get_device
from PIL import Image

from diffusion.checkpoints.manifest import CheckpointManifest
from diffusion.checkpoints.reading import load_strictly, weights_by_part, zeros_for_empty
from diffusion.checkpoints.resume import refuse_other_encoders
from diffusion.families.adapters import adapted_parts, load_adapters
from diffusion.families.registry import kernels_in_use
from diffusion.monitoring.sample_grid import draw_grid
from diffusion.recipe import Recipe
from diffusion.recipe.schema import Samples
from diffusion.training.builder import build_model, frozen_digests
from diffusion.training.machine import fit_machine


class GridDrawer:
    """The model of a run: its encoders and the base of its adapter are loaded once, what it trains from each checkpoint.

    Args:
        recipe: of the first checkpoint; a run keeps its `model`, `data.resolution` and `train.precision`.

    Raises:
        EncoderError, RecipeError: the model cannot be built here, with the remedy.
    """

    def __init__(self, recipe: Recipe):
        on_gpu = get_device(None).name == 'gpu'  # Composer's device switches TF32 on, as in training
        self.recipe = as_drawn(recipe, on_gpu)
        fit_machine(self.recipe, partial(kernels_in_use, self.recipe), trains=False)
        # As of a run that resumes: its weights come from a checkpoint, not from load_path.
        self.model: Any = build_model(self.recipe, torch.device('cuda' if on_gpu else 'cpu'), resumes=True).eval()

    def load(self, state: dict[str, Any], manifest: CheckpointManifest, weights: str) -> str:
        """Load the EMA (`ema`), where the checkpoint has none yet the weights as trained, or those in any case (`training`); returns which.

        Raises:
            CheckpointError: another network, or trained with other encoders.
        """
        refuse_other_encoders(manifest, frozen_digests(self.model))
        family, network = self.model.family, self.model.network
        average = weights_by_part(state, family.component, average=True) if weights == 'ema' else None
        self.model.zeros_for_empty = self.model.zeros_for_empty or zeros_for_empty(state)
        chosen = average or weights_by_part(state, family.component, average=False) or {}
        if self.recipe.adapter is None:
            load_strictly(network, chosen[family.component], manifest.file)
        else:
            load_adapters(adapted_parts(family, network, self.model.encoders.text), chosen, manifest.file)
        return 'training' if average is None else 'ema'

    def draw(self, samples: Samples) -> Image.Image:
        with get_precision_context('fp32' if self.recipe.train.precision == 'fp32' else 'amp_bf16'):
            return draw_grid(self.model, samples, self.recipe.data.resolution)


def as_drawn(recipe: Recipe, on_gpu: bool) -> Recipe:
    """The recipe for one process that draws: nothing sharded or compiled; bf16 by autocast on a GPU, float32 elsewhere."""
    train = replace(recipe.train, sharding='ddp', compile=None, checkpoint_activations=False)
    train.precision = 'amp_bf16' if on_gpu and train.precision != 'fp32' else 'fp32'
    train.attention = train.attention if on_gpu else 'auto'
    return replace(recipe, train=train)
