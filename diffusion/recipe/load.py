"""YAML files and `key=value` overrides -> one checked Recipe, or every mistake in them at once.

Nothing here imports torch: a typo costs a second, not the start of a cluster.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from diffusion.common.credentials import redacted
from diffusion.common.tables import print_page
from diffusion.common.text import counted
from diffusion.contracts.errors import InputError
from diffusion.contracts.exit_codes import BAD_INPUT
from diffusion.recipe.rules import DURATIONS, RULES
from diffusion.recipe.schema import Recipe
from diffusion.recipe.strict_yaml import Layer, file_layers, merge, override_layers, text_layers
from diffusion.recipe.units import UNITS

REMEDIES = {  # of what is missing or of the wrong type
    **{key: f'; write {" or ".join(UNITS[unit] for unit in units)}, such as 10000{units[0]}' for key, units in DURATIONS.items()},
    'ema.start': '; write batches, such as 10000ba (to have no average: ema.half_life=null)',
    'load_path': '; name the checkpoint of the phase before (or load_path=null to start from random weights)',
    'model.encoders.source': '; name a local folder in the diffusers layout, or a Hub id with its revision',
}


class RecipeError(InputError):
    """Everything that is wrong with a recipe, one line each in `errors`."""

    def __init__(self, source: str, errors: list[str]):
        self.source, self.errors = source, [redacted(error) for error in errors]
        super().__init__('\n'.join([f'{source}: {counted(len(errors), "error")}', *(f'  - {error}' for error in self.errors)]))

    def __reduce__(self) -> tuple[Any, ...]:
        """Ranks send it to each other, and pickle would call `__init__` with the message alone."""
        return type(self), (self.source, self.errors)


def load_recipe(path: str | Path, overrides: Sequence[str] = (), num_gpus: int = 1, rules: Sequence[Callable] = RULES) -> Recipe:
    """Merge `path`, the files it is based on, and `key=value` overrides; check the result for `num_gpus` processes.

    Raises:
        RecipeError: with all errors: unknown keys, wrong types, missing values and contradictions.
    """
    errors: list[str] = []
    layers = file_layers(Path(path), errors)
    if errors:
        raise RecipeError(str(path), errors)  # all that would be missing without the file is no mistake
    return _merge(str(path), layers, overrides, errors, rules=rules, num_gpus=num_gpus)


def recipe_from_yaml(text: str, source: str, overrides: Sequence[str] = ()) -> Recipe:
    """A resolved recipe out of a checkpoint or an export. Not judged by today's rules: it has trained.

    Raises:
        RecipeError: it cannot be read, has an unknown key or a wrong type, holds a secret, or refers to something else than its own keys.
    """
    layers = text_layers(text, source, errors := list[str]())
    if errors:
        raise RecipeError(source, errors)
    return _merge(source, layers, overrides, errors, rules=(), num_gpus=1)


def _merge(source: str, layers: list[Layer], overrides: Sequence[str], errors: list[str], rules: Sequence[Callable], num_gpus: int) -> Recipe:
    config = merge(Recipe, [*layers, *override_layers(overrides, errors)], errors, REMEDIES)
    for rule in rules:
        try:
            errors += rule(config, num_gpus)
        except OmegaConfBaseException:
            continue  # a value it needs is missing, as reported above
    if errors:
        raise RecipeError(source, list(dict.fromkeys(errors)))
    recipe = OmegaConf.to_object(config)
    assert isinstance(recipe, Recipe)
    return recipe


def load_or_exit(
    arguments: Sequence[str], usage: str, num_gpus: int | None = None, code: int = BAD_INPUT, rules: Sequence[Callable] = RULES
) -> Recipe:
    """The recipe of a command line `RECIPE [key=value ...]`; prints every error and exits with `code` if it is wrong."""
    if not arguments or arguments[0] in ('-h', '--help'):
        print_page(usage)
        raise SystemExit(0 if arguments else code)
    world_size = os.environ.get('WORLD_SIZE', '1')
    try:
        if num_gpus is None and not world_size.isdigit():
            raise RecipeError('environment', [f"WORLD_SIZE: '{world_size}' is not a number of processes"])
        return load_recipe(arguments[0], arguments[1:], num_gpus or int(world_size), rules)
    except RecipeError as error:
        if os.environ.get('LOCAL_RANK', '0') == '0':  # under the launcher all ranks see the same errors
            print(error, file=sys.stderr)
        raise SystemExit(code) from None


def to_yaml(recipe: Recipe) -> str:
    """The whole recipe, resolved, as YAML that `load_recipe` accepts."""
    return yaml.safe_dump(to_dict(recipe), sort_keys=False, allow_unicode=True)


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """The whole recipe as plain dictionaries, lists and scalars (for W&B's config and JSON)."""
    return dataclasses.asdict(recipe)
