"""YAML files and `key=value` overrides -> one checked Recipe, or every mistake in them at once.

Nothing here imports torch: a typo costs a second, not the start of a cluster.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from diffusion.credentials import redacted
from diffusion.faults.exit_codes import BAD_INPUT
from diffusion.recipe.rules import RULES
from diffusion.recipe.schema import Recipe


class RecipeError(ValueError):
    """Everything that is wrong with a recipe, one line each in `errors`."""

    def __init__(self, source: str, errors: list[str]):
        self.errors = [redacted(error) for error in errors]
        count = f'{len(errors)} error' + ('s' if len(errors) > 1 else '')
        super().__init__('\n'.join([f'{source}: {count}', *(f'  - {error}' for error in self.errors)]))


def load_recipe(path: str | Path, overrides: Sequence[str] = (), num_gpus: int = 1) -> Recipe:
    """Merge `path`, the files it is based on, and `key=value` overrides; check the result for `num_gpus` processes.

    Raises:
        RecipeError: with all errors: unknown keys, wrong types, missing values and contradictions.
    """
    errors: list[str] = []
    return _merge(str(path), _file_layers(Path(path), errors), overrides, errors, rules=RULES, num_gpus=num_gpus)


def recipe_from_yaml(text: str, source: str, overrides: Sequence[str] = ()) -> Recipe:
    """A resolved recipe out of a checkpoint or an export. Not judged by today's rules: it has trained.

    Raises:
        RecipeError: an unknown key or a wrong type.
    """
    return _merge(source, [(source, OmegaConf.create(text))], overrides, [], rules=(), num_gpus=1)


def _merge(
    source: str, layers: list[tuple[str, Any]], overrides: Sequence[str], errors: list[str], rules: Sequence[Callable], num_gpus: int
) -> Recipe:
    config = OmegaConf.structured(Recipe)
    for origin, layer in [*layers, *_override_layer(overrides, errors)]:
        for key, value in _leaves(layer):
            _set(config, key, value, origin, errors)
    # A field that was given a wrong value is not missing too.
    errors += [error for error in _unset_or_unresolved(config) if not any(known.startswith(error.split(' ')[0]) for known in errors)]
    for rule in rules:
        try:
            errors += rule(config, num_gpus)
        except OmegaConfBaseException:
            continue  # a value it needs is missing or unresolved, as reported above
    if errors:
        raise RecipeError(source, list(dict.fromkeys(errors)))
    recipe = OmegaConf.to_object(config)
    assert isinstance(recipe, Recipe)
    return recipe


def load_or_exit(arguments: Sequence[str], usage: str, num_gpus: int | None = None, code: int = BAD_INPUT) -> Recipe:
    """The recipe of a command line `RECIPE [key=value ...]`; prints every error and exits with `code` if it is wrong."""
    if not arguments or arguments[0] in ('-h', '--help'):
        print(usage)
        raise SystemExit(0 if arguments else code)
    world_size = os.environ.get('WORLD_SIZE', '1')
    try:
        if num_gpus is None and not world_size.isdigit():
            raise RecipeError('environment', [f"WORLD_SIZE: '{world_size}' is not a number of processes"])
        return load_recipe(arguments[0], arguments[1:], num_gpus or int(world_size))
    except RecipeError as error:
        if os.environ.get('LOCAL_RANK', '0') == '0':  # under the launcher all ranks see the same errors
            print(error, file=sys.stderr)
        raise SystemExit(code) from None


def to_yaml(recipe: Recipe) -> str:
    """The whole recipe, resolved, as YAML that `load_recipe` accepts."""
    return yaml.safe_dump(to_dict(recipe), sort_keys=False, allow_unicode=True)


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """The whole recipe as plain dictionaries, lists and scalars (for W&B's config and JSON)."""
    resolved = OmegaConf.to_container(OmegaConf.structured(recipe), resolve=True)
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def _file_layers(path: Path, errors: list[str], seen: tuple[Path, ...] = ()) -> list[tuple[str, DictConfig]]:
    """The file and what it is based on, the most basic first."""
    if path.resolve() in seen:
        errors.append(f'base: {path} is based on itself by way of {", ".join(map(str, seen))}')
        return []
    try:
        config = OmegaConf.load(path)
    except FileNotFoundError:
        errors.append(f'{path}: no such file')
        return []
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        errors.append(f'{path}: cannot be read as YAML: {" ".join(str(error).split())}')
        return []
    if not isinstance(config, DictConfig):
        errors.append(f'{path}: a recipe is a mapping of keys to values, this file holds a list')
        return []
    base = config.pop('base', None)
    below = _file_layers(path.parent / str(base), errors, (*seen, path.resolve())) if base is not None else []
    return [*below, (str(path), config)]


def _override_layer(overrides: Sequence[str], errors: list[str]) -> list[tuple[str, DictConfig]]:
    layers = []
    for override in overrides:
        key, equals, _ = override.partition('=')
        if not equals or not key or key.startswith('-'):
            errors.append(f"'{override}' is not an override; write key=value, such as batch.micro_size=16")
            continue
        try:
            layers.append(('command line', OmegaConf.from_dotlist([override])))
        except (yaml.YAMLError, OmegaConfBaseException, TypeError, ValueError) as error:
            errors.append(f"'{override}' cannot be read: {_first_line(error)}")
    return layers


def _leaves(config: DictConfig, prefix: str = '') -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of everything that is not itself a non-empty mapping, so that each can fail on its own."""
    for key in config:
        path = f'{prefix}.{key!s}' if prefix else str(key)
        node = config._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing() and len(node):
            yield from _leaves(node, path)
        else:
            yield path, node


def _set(config: DictConfig, path: str, node: Any, origin: str, errors: list[str]) -> None:
    value = OmegaConf.to_container(node) if isinstance(node, (DictConfig, ListConfig)) else node._value()
    *parents, last = path.split('.')
    nested: dict[str, Any] = {last: value}
    for parent in reversed(parents):
        nested = {parent: nested}
    try:
        if value == MISSING:  # `key: ???` takes back what the base or the schema says; a merge would pass over it
            OmegaConf.update(config, path, MISSING)
        else:
            config.merge_with(nested)
    except ConfigKeyError as error:
        errors.append(f'{getattr(error, "full_key", None) or path}: unknown key ({origin}){_suggestion(path)}')
    except (OmegaConfBaseException, TypeError) as error:
        errors.append(f'{path}: {_first_line(error)} ({origin})')


def _suggestion(path: str) -> str:
    known = list(_known_paths(Recipe))
    last = path.rpartition('.')[2]
    best = difflib.get_close_matches(path, known, n=1, cutoff=0.75)
    same_name = [candidate for candidate in known if candidate.rpartition('.')[2] == last]
    similar = difflib.get_close_matches(last, [candidate.rpartition('.')[2] for candidate in known], n=1, cutoff=0.7)
    similar_paths = [candidate for candidate in known if similar and candidate.rpartition('.')[2] == similar[0]]
    matches = same_name or best or similar_paths
    return f"; did you mean '{matches[0]}'?" if matches else ''


def _known_paths(section: type, prefix: str = '') -> Iterator[str]:
    for item in dataclasses.fields(section):
        yield prefix + item.name
        default = item.default_factory() if item.default_factory is not dataclasses.MISSING else None
        if dataclasses.is_dataclass(default):
            yield from _known_paths(type(default), f'{prefix}{item.name}.')


def _unset_or_unresolved(config: DictConfig, prefix: str = '') -> Iterator[str]:
    """An error for each field that is missing, or whose interpolation leads nowhere."""
    for key in config:
        path = f'{prefix}{key!s}'
        if OmegaConf.is_missing(config, key):
            yield f'{path}: missing{_REMEDIES.get(path, "; the recipe must set it")}'
            continue
        try:
            value = config[key]
        except OmegaConfBaseException as error:
            yield f'{path}: {_first_line(error)}'
            continue
        if isinstance(value, DictConfig):
            yield from _unset_or_unresolved(value, f'{path}.')


_REMEDIES = {
    'load_path': '; name the checkpoint of the phase before (or load_path=null to start from random weights)',
    'model.encoders.source': '; name a local folder in the diffusers layout, or a Hub id with its revision',
}


def _first_line(error: Exception) -> str:
    return str(error).strip().split('\n')[0]
