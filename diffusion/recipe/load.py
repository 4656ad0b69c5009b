"""YAML files and `key=value` overrides become one checked Recipe, or a list of every mistake in them.

Nothing here imports torch: a typo costs a second, not the start of a cluster.
"""

import os
import time
import typing
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import yaml

from diffusion.common.text import counted, print_message, print_page, redacted
from diffusion.contracts.errors import BAD_INPUT, InputError
from diffusion.recipe.autoencoder import AnyRecipe, AutoencoderRecipe
from diffusion.recipe.keys import Keys, declared, dotted, options, to_dict
from diffusion.recipe.merging import merge, without_missing
from diffusion.recipe.reading import Layer, file_layers, leaves, override_layers, text_layers
from diffusion.recipe.rules import RULES
from diffusion.recipe.schema import Recipe, present

Kind = TypeVar('Kind', Recipe, AutoencoderRecipe)

OTHER_COMMAND: dict[type, str] = {
    Recipe: 'autoencoder: is missing; without that section it is the recipe of a text-to-image network, which train.py trains',
    AutoencoderRecipe: 'autoencoder: makes it the recipe of an autoencoder, which python -m diffusion.autoencoder trains and exports',
}

# The launcher ends all ranks once one has ended, and returns the first one's code: -15 if that one was still starting Python.
BEHIND_FIRST_RANK_SEC = 5.0

# What a resumed run may not change although its keys may, and the other way round.
DURATION, STREAMS, ENCODERS, SCORES = ('train', 'duration'), ('data', 'streams'), ('data', 'encoders'), ('eval', 'samples')
ENCODED = {(*ENCODERS, 'ray', 'moments'): 'float32'}  # also by the GPUs that train: a run may go from one way to the other


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
    """Load a recipe of any kind, as `load_recipe` does: an autoencoder's has the section `autoencoder`."""
    return load_of_kind(AnyRecipe, path, overrides, num_gpus, rules)


def load_of_kind(kind: Any, path: str | Path, overrides: Sequence[str], num_gpus: int, rules: Sequence[Callable]) -> Any:
    """Load a recipe that must be of this kind, or of one of a union of them, as `load_recipe` does."""
    layers = file_layers(Path(path), errors := list[str]())
    return merged_recipe(kind, str(path), layers, errors, overrides, num_gpus, rules)


def recipe_from_yaml(text: str, source: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a resolved recipe out of a checkpoint or an export. Not judged by the rules between keys: it has trained.

    Raises:
        RecipeError: it cannot be read, has an unknown key, a wrong type or a value out of range, holds a secret, or refers to
            something else than its own keys; or it is an autoencoder's.
    """
    layers = text_layers(text, source, errors := list[str]())
    return merged_recipe(Recipe, source, layers, errors, overrides)


def any_recipe_from_yaml(text: str, source: str, overrides: Sequence[str] = ()) -> AnyRecipe:
    """Read a resolved recipe of any kind, as `recipe_from_yaml` does."""
    layers = text_layers(text, source, errors := list[str]())
    return merged_recipe(AnyRecipe, source, layers, errors, overrides)


def kind_of(layers: Sequence[Layer]) -> type[Recipe] | type[AutoencoderRecipe]:
    """Return the class that layers are to be merged into."""
    return AutoencoderRecipe if any('autoencoder' in content for _, content in layers) else Recipe


def applies(rule: Callable, kind: type) -> bool:
    """Whether a rule is one of recipes of this kind: the annotation of its parameter `recipe` says so; without one it is of all."""
    hint = typing.get_type_hints(rule).get('recipe')
    return hint is None or kind in options(hint)


def merged_recipe(
    wanted: Any, source: str, layers: list[Layer], errors: list[str], overrides: Sequence[str], num_gpus: int = 1, rules: Sequence[Callable] = ()
) -> Any:
    """Merge layers that have been read, of a recipe that must be `wanted` or of one of a union of them; the layers stay as they are.

    Args:
        errors: of reading them.

    Raises:
        RecipeError: with all errors.
    """
    if errors:  # without the file every key would be missing; only the file is reported
        raise RecipeError(source, errors)
    layers = [*layers, *override_layers(overrides, errors)]
    kind = kind_of(layers)
    if kind not in options(wanted):
        raise RecipeError(source, [OTHER_COMMAND[kind]])
    recipe = merge(kind, layers, errors)
    if errors:
        recipe = without_missing(recipe)
    for rule in (rule for rule in rules if applies(rule, kind)):
        with suppress(AttributeError) if errors else nullcontext():  # a value it needs is missing, as reported above
            errors += rule(recipe, num_gpus)
    if errors:
        raise RecipeError(source, list(dict.fromkeys(errors)))
    return recipe


def num_processes() -> int:
    """Return how many processes train together, as the launcher says; RecipeError if WORLD_SIZE is not a number."""
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


def changed_fields(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return `optimizer.lr: 0.0001 -> 0.001` for every key that differs and may not (`may_change` in schema.py); recipes as plain dictionaries.

    Composer takes the optimizer's settings and the data order of a resumed run from its checkpoint, and everything else from the recipe: a changed
    learning rate would be recorded and never used, a changed objective used halfway. So what shapes the result must stay; what does not may change.
    So must what the scores of drawn images depend on, once there are some: the log and the report draw one curve over them.
    """
    kind = AutoencoderRecipe if 'autoencoder' in now else Recipe
    kept = before['data']['streams'].keys() & now['data']['streams'].keys()  # of the others their names say enough
    old, new = (
        {
            **ENCODED,
            **{path: value for path, value in leaves(recipe) if path != ENCODERS and (path[:2] != STREAMS or path[2:] == () or path[2] in kept)},
            STREAMS: sorted(present(recipe['data']['streams'])),
        }
        for recipe in (before, now)
    )
    # The learning rate, towards the end of the run, which must stay; and the discriminator begins at a share of it.
    falls = now['optimizer']['decay'] != 'constant' or now.get('autoencoder', {}).get('adversarial') is not None
    free = SCORES if old.get((*SCORES, 'every')) is None else None  # nothing has been scored that other scores would have to be like
    return [
        f'{dotted(path)}: {old.get(path)} -> {new.get(path)}'
        for path in sorted({**old, **new})
        if old.get(path) != new.get(path) and path[: len(SCORES)] != free and (not _may_change(kind, path) or (path == DURATION and falls))
    ]


def _may_change(kind: type, path: Keys) -> bool:
    return any(declared(kind, path[:length])[1].may_change for length in range(1, len(path) + 1))


def refuse_changes(recipe: AnyRecipe, begun_with: str) -> None:
    """Raise RecipeError if resuming with `recipe` would not continue the run whose resolved recipe is `begun_with`, as YAML.

    A key that is younger than the run has its default there, which stands for what was done before it existed.
    """
    changes = changed_fields(to_dict(any_recipe_from_yaml(begun_with, recipe.run_folder)), to_dict(recipe))
    if changes:
        remedy = f'undo it, or train another run from these weights: {of_another_run(recipe)} load_path={recipe.run_folder}'
        raise RecipeError(f'{recipe.run_folder} was begun with another recipe; {remedy}', changes)


def of_another_run(recipe: AnyRecipe) -> str:
    """The overrides that make it another run: its name, and each folder that may not follow from it, which a resolved recipe does not say."""
    default = {'run_folder': f'runs/{recipe.name}', 'checkpoint.folder': f'{recipe.run_folder}/checkpoints'}
    folders = {'run_folder': recipe.run_folder, 'checkpoint.folder': recipe.checkpoint.folder}
    written = [key for key in folders if folders[key] != default[key]]
    return ' '.join(f'{key}={"ANOTHER" if key.startswith("checkpoint") else "NEW"}' for key in ['name', *written])
