"""The methods of a recipe, attached to a network. A new one is a file here, a section in recipe/methods.py and a line in `attach`."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from diffusion.contracts.errors import EncoderError
from diffusion.encoders.patches import PatchFeatures
from diffusion.methods.alignment import FeatureAlignment
from diffusion.methods.contrastive import ContrastiveFlow, Target
from diffusion.methods.method import TrainingMethod
from diffusion.methods.routing import TokenRouting
from diffusion.methods.uncertainty import LearnedWeights
from diffusion.recipe import RecipeError
from diffusion.recipe.methods import Methods


class Tokens(NamedTuple):
    """Where the tokens of the image are in a network; as the family says (families/family.py)."""

    blocks: Sequence[nn.Module]
    arguments: Mapping[str, int]
    width: int
    patch: int


def attach(methods: Methods, tokens: Tokens, end: float, target: Target, seed: int) -> dict[str, TrainingMethod]:
    """By name, in the order in which they change the loss. Hooks of routing come first: behind its last block all tokens are there.

    Args:
        end: the objective's times lie in [0, end].
        target: what the network should predict of samples, by their moments, keys and times.

    Raises:
        RecipeError: the network has no such block, or the feature network cannot be read.
    """
    routing, alignment = methods.routing, methods.alignment
    _refuse_missing_blocks(methods, len(tokens.blocks))
    found: dict[str, TrainingMethod] = {}
    if routing is not None:
        found['routing'] = TokenRouting(routing, tokens.blocks, tokens.arguments, seed)
    if methods.uncertainty is not None:
        found['uncertainty'] = LearnedWeights(methods.uncertainty, end)
    if methods.contrastive is not None:
        found['contrastive'] = ContrastiveFlow(methods.contrastive, target)
    if alignment is not None:
        try:
            features = PatchFeatures.find(alignment.source, alignment.revision)
        except EncoderError as error:
            raise RecipeError('methods', [f'methods.alignment.source: {error}']) from error
        found['alignment'] = FeatureAlignment(alignment, tokens.blocks, tokens.width, tokens.patch, features)
    return found


def _refuse_missing_blocks(methods: Methods, num_blocks: int) -> None:
    named = {}
    if methods.routing is not None:
        named['routing.last_block'] = methods.routing.last_block
    if methods.alignment is not None:
        named['alignment.block'] = methods.alignment.block
    errors = [
        f'methods.{key}: there is no block {block}; the network has {num_blocks}, counted from 0'
        for key, block in named.items()
        if block >= num_blocks
    ]
    if errors:
        raise RecipeError('methods', errors)
