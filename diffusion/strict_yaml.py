"""YAML files and `key=value` overrides -> one dataclass, or every mistake in them at once: recipes, sweeps, a project's assumptions.

An unknown key is an error that suggests the right one, a wrong type is an error, and so is a value that is missing. No torch.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException


def merge(schema: type, layers: Sequence[tuple[str, Any]], errors: list[str], remedies: dict[str, str] | None = None) -> DictConfig:
    """Merge layers, each an (origin, mapping) and stronger than those before it, into the dataclass `schema`.

    Args:
        errors: everything that is wrong is added to it, one line each.
        remedies: what to say of a missing value, by its dotted path.
    """
    config = OmegaConf.structured(schema)
    for origin, layer in layers:
        leaves = list(_leaves(layer))
        if not any(node._is_missing() for _, node in leaves):
            with suppress(OmegaConfBaseException, TypeError):
                config.merge_with(layer)
                continue
        for key, node in leaves:  # one by one, which takes ten times as long, so that each mistake is named
            _set(config, schema, key, node, origin, errors)
    # A field that was given a wrong value is not missing too.
    missing = _unset_or_unresolved(config, remedies or {})
    errors += [error for error in missing if not any(known.startswith(error.split(' ')[0]) for known in errors)]
    return config


def file_layers(path: Path, errors: list[str], seen: tuple[Path, ...] = ()) -> list[tuple[str, DictConfig]]:
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
        errors.append(f'{path}: a mapping of keys to values is wanted, this file holds a list')
        return []
    base = config.pop('base', None)
    below = file_layers(path.parent / str(base), errors, (*seen, path.resolve())) if base is not None else []
    return [*below, (str(path), config)]


def override_layers(overrides: Sequence[str], errors: list[str]) -> list[tuple[str, DictConfig]]:
    """`key=value` from a command line, one layer each."""
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


def _set(config: DictConfig, schema: type, path: str, node: Any, origin: str, errors: list[str]) -> None:
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
        errors.append(f'{getattr(error, "full_key", None) or path}: unknown key ({origin}){_suggestion(schema, path)}')
    except (OmegaConfBaseException, TypeError) as error:
        errors.append(f'{path}: {_first_line(error)} ({origin})')


def _suggestion(schema: type, path: str) -> str:
    known = list(_known_paths(schema))
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


def _unset_or_unresolved(config: DictConfig, remedies: dict[str, str], prefix: str = '') -> Iterator[str]:
    """An error for each field that is missing, or whose interpolation leads nowhere."""
    for key in config:
        path = f'{prefix}{key!s}'
        if OmegaConf.is_missing(config, key):
            yield f'{path}: missing{remedies.get(path, "; it must be set")}'
            continue
        try:
            value = config[key]
        except OmegaConfBaseException as error:
            yield f'{path}: {_first_line(error)}'
            continue
        if isinstance(value, DictConfig):
            yield from _unset_or_unresolved(value, remedies, f'{path}.')


def _first_line(error: Exception) -> str:
    return str(error).strip().split('\n')[0]
