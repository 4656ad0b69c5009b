"""YAML files and `key=value` overrides become one checked Recipe, or a list of every mistake in them.

Nothing here imports torch: a typo costs a second, not the start of a cluster.
"""

import dataclasses
import os
import time
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from diffusion.common.text import counted, print_message, print_page, redacted
from diffusion.contracts.errors import BAD_INPUT, InputError
from diffusion.recipe.autoencoder import AnyRecipe, AutoencoderRecipe
from diffusion.recipe.keys import options
from diffusion.recipe.rules import RULES
from diffusion.recipe.schema import Recipe
from diffusion.recipe.strict_yaml import Layer, file_layers, merge, override_layers, text_layers
from diffusion.recipe.units import Duration

Kind = TypeVar('Kind', Recipe, AutoencoderRecipe)

OTHER_COMMAND: dict[type, str] = {
    Recipe: 'autoencoder: is missing; without that section it is the recipe of a text-to-image network, which train.py trains',
    AutoencoderRecipe: 'autoencoder: makes it the recipe of an autoencoder, which python -m diffusion.autoencoder trains and exports',
}

# The launcher ends all ranks once one has ended, and returns the first one's code: -15 if that one was still starting Python.
BEHIND_FIRST_RANK_SEC = 5.0


class RecipeError(InputError):
    """All mistakes in a recipe, one line each in `errors`."""

    def __init__(self, source: str, errors: list[str]):
        self.source, self.errors = source, [redacted(error) for error in errors]
        super().__init__('\n'.join([f'{source}: {counted(len(errors), "error")}', *(f'  - {error}' for error in self.errors)]))

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickle, by which ranks send it to each other and which would call `__init__` with the message alone."""
        return type(self), (self.source, self.errors)


def load_recipe(path: str | Path, overrides: Sequence[str] = (), num_gpus: int = 1, rules: Sequence[Callable] = RULES) -> Recipe:
    """Merge `path`, the files it is based on, and `key=value` overrides; check the result for `num_gpus` processes.

    Raises:
        RecipeError: with all errors: unknown keys, wrong types, missing values and contradictions; or it is an autoencoder's.
    """
    return load_of_kind(Recipe, path, overrides, num_gpus, rules)


def load_any_recipe(path: str | Path, overrides: Sequence[str] = (), num_gpus: int = 1, rules: Sequence[Callable] = RULES) -> AnyRecipe:
    """The same of a recipe of any kind: an autoencoder's has the section `autoencoder`.

    Raises:
        RecipeError: with all errors.
    """
    return load_of_kind(AnyRecipe, path, overrides, num_gpus, rules)


def load_of_kind(kind: Any, path: str | Path, overrides: Sequence[str], num_gpus: int, rules: Sequence[Callable]) -> Any:
    """The same of a recipe that must be of this kind, or of one of a union of them.

    Raises:
        RecipeError: with all errors.
    """
    errors: list[str] = []
    layers = file_layers(Path(path), errors)
    if errors:
        raise RecipeError(str(path), errors)  # without the file every key would be missing; only the file is reported
    return _merge(kind, str(path), layers, overrides, errors, rules=rules, num_gpus=num_gpus)


def recipe_from_yaml(text: str, source: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a resolved recipe out of a checkpoint or an export. Not judged by the rules between keys: it has trained.

    Raises:
        RecipeError: it cannot be read, has an unknown key, a wrong type or a value out of range, holds a secret, or refers to
            something else than its own keys; or it is an autoencoder's.
    """
    return _from_yaml(Recipe, text, source, overrides)


def any_recipe_from_yaml(text: str, source: str, overrides: Sequence[str] = ()) -> AnyRecipe:
    """The same of a recipe of any kind.

    Raises:
        RecipeError: as `recipe_from_yaml`.
    """
    return _from_yaml(AnyRecipe, text, source, overrides)


def _from_yaml(kind: Any, text: str, source: str, overrides: Sequence[str]) -> Any:
    layers = text_layers(text, source, errors := list[str]())
    if errors:
        raise RecipeError(source, errors)
    return _merge(kind, source, layers, overrides, errors, rules=(), num_gpus=1)


def kind_of(layers: Sequence[Layer]) -> type[Recipe] | type[AutoencoderRecipe]:
    """Return the class that layers are to be merged into."""
    return AutoencoderRecipe if any('autoencoder' in content for _, content in layers) else Recipe


def applies(rule: Callable, kind: type) -> bool:
    """Whether a rule is one of recipes of this kind: the annotation of its parameter `recipe` says so; without one it is of all."""
    hint = typing.get_type_hints(rule).get('recipe')
    return hint is None or kind in options(hint)


def _merge(
    wanted: Any, source: str, layers: list[Layer], overrides: Sequence[str], errors: list[str], rules: Sequence[Callable], num_gpus: int
) -> Any:
    layers = [*layers, *override_layers(overrides, errors)]
    kind = kind_of(layers)
    if kind not in options(wanted):
        raise RecipeError(source, [OTHER_COMMAND[kind]])
    config = merge(kind, layers, errors)
    for rule in (rule for rule in rules if applies(rule, kind)):
        try:
            errors += rule(config, num_gpus)
        except OmegaConfBaseException:
            continue  # a value it needs is missing, as reported above
    if errors:
        raise RecipeError(source, list(dict.fromkeys(errors)))
    recipe = OmegaConf.to_object(config)
    assert isinstance(recipe, kind)
    return recipe


def num_processes() -> int:
    """Return how many processes train together, as the launcher says.

    Raises:
        RecipeError: WORLD_SIZE is not a number.
    """
    world_size = os.environ.get('WORLD_SIZE', '1')
    if not world_size.isdigit():
        raise RecipeError('environment', [f"WORLD_SIZE: '{world_size}' is not a number of processes"])
    return int(world_size)


def load_or_exit(
    arguments: Sequence[str],
    usage: str,
    num_gpus: int | None = None,
    code: int = BAD_INPUT,
    rules: Sequence[Callable] = RULES,
    kind: type[Kind] = Recipe,  # type: ignore[assignment]  # mypy knows no default of a type variable
) -> Kind:
    """Load the recipe of a command line `RECIPE [key=value ...]`; prints every error and exits with `code` if it is wrong or not of this `kind`."""
    if not arguments or arguments[0] in ('-h', '--help'):
        print_page(usage)
        raise SystemExit(0 if arguments else code)
    try:
        return load_of_kind(kind, arguments[0], arguments[1:], num_gpus or num_processes(), rules)
    except RecipeError as error:
        if os.environ.get('LOCAL_RANK', '0') == '0':  # under the launcher all ranks see the same errors
            print_message(error)
        else:
            time.sleep(BEHIND_FIRST_RANK_SEC)
        raise SystemExit(code) from None


def to_yaml(recipe: AnyRecipe) -> str:
    """Write the whole recipe, resolved, as YAML that `load_recipe` accepts."""
    return yaml.safe_dump(to_dict(recipe), sort_keys=False, allow_unicode=True)


def to_dict(recipe: AnyRecipe) -> dict[str, Any]:
    """Return the whole recipe as plain dictionaries, lists and scalars (for W&B's config and JSON)."""

    def plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name: str(value) if isinstance(value, Duration) else value for name, value in items}

    return dataclasses.asdict(recipe, dict_factory=plain)
