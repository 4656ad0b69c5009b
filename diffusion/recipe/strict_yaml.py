"""YAML files and `key=value` overrides -> one dataclass, or every mistake in them at once: recipes, sweeps, a project's assumptions.

An unknown key is an error that suggests the right one, a wrong type is an error, and so is a value that is missing, one that looks like a password or
key, and a reference that is not `${key}` (diffusion/recipe/references.py). No torch.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from diffusion.common.credentials import carries_credentials
from diffusion.common.text import closest, did_you_mean, one_line
from diffusion.recipe.plain_yaml import read_yaml
from diffusion.recipe.references import FollowsFromAnother, References, WrongReference, overlaid

Layer = tuple[str, dict[Any, Any]]  # where it is from, and what it says
Keys = tuple[Any, ...]  # from the outermost

MAX_SHOWN = 80  # letters of a value in a message


def merge(schema: type, layers: Sequence[Layer], errors: list[str], remedies: dict[str, str] | None = None) -> DictConfig:
    """Merge layers, each an (origin, mapping) and stronger than those before it, into the dataclass `schema`.

    Args:
        errors: everything that is wrong is added to it, one line each.
        remedies: what to say of a value that is missing or of the wrong type, by its dotted path.

    Returns:
        The settings, without references; what is wrong or missing in them is MISSING.
    """
    config = OmegaConf.structured(schema)
    defaults: Any = OmegaConf.to_container(config, resolve=False)
    layers = [(origin, _without_secrets(layer, origin, errors)) for origin, layer in layers]
    said: dict[Any, Any] = {}
    for _, layer in layers:
        said = overlaid(said, layer)
    references, unresolved = References(overlaid(defaults, said)), set[str]()
    for origin, layer in [('default', _with_references(defaults, said)), *layers]:
        plain = _resolved(layer, references, origin, errors, unresolved)
        leaves = list(_leaves(plain))
        if not any(value == MISSING or _misfit(schema, path, value) for path, value in leaves):
            with suppress(OmegaConfBaseException, TypeError):
                config.merge_with(plain)
                continue
        for path, value in leaves:  # one by one, which takes ten times as long, so that each mistake is named
            _set(config, schema, path, value, origin, errors, remedies or {})
    # A field that was given a wrong value is not missing too.
    known = unresolved | {error.partition(': ')[0] for error in errors}
    for name in _missing(config):
        if not any(f'{name}.'.startswith(f'{other}.') for other in known):
            errors.append(f'{name}: missing{(remedies or {}).get(name, "; it must be set")}')
    return config


def file_layers(path: Path, errors: list[str], seen: tuple[Path, ...] = ()) -> list[Layer]:
    """The file and what it is based on, the most basic first."""
    if path.resolve() in seen:
        errors.append(f'base: {path} is based on itself by way of {", ".join(map(str, seen))}')
        return []
    try:
        text = path.read_text(encoding='utf-8')
    except FileNotFoundError:
        errors.append(f'{path}: no such file')
        return []
    except IsADirectoryError:
        errors.append(f'{path}: is a folder, not a YAML file')
        return []
    except UnicodeDecodeError:
        errors.append(f'{path}: is not text (UTF-8)')
        return []
    except OSError as error:
        errors.append(f'{path}: cannot be read: {error.strerror}')
        return []
    layers = text_layers(text, str(path), errors)
    base = layers[0][1].pop('base', None) if layers else None
    below = file_layers(path.parent / str(base), errors, (*seen, path.resolve())) if base is not None else []
    return [*below, *layers]


def text_layers(text: str, source: str, errors: list[str]) -> list[Layer]:
    """One layer, or none and an error."""
    try:
        content = read_yaml(text)
    except yaml.YAMLError as error:
        errors.append(f'{source}: cannot be read as YAML: {one_line(error)}')
        return []
    if not isinstance(content, dict | None):
        errors.append(f'{source}: a mapping of keys to values is wanted, this file holds a {type(content).__name__}')
        return []
    return [(source, content or {})]


def override_layers(overrides: Sequence[str], errors: list[str]) -> list[Layer]:
    """`key=value` from a command line, one layer each."""
    layers = []
    for override in overrides:
        key, equals, text = override.partition('=')
        if not equals or not key or key.startswith('-'):
            errors.append(f"'{override}' is not an override; write key=value, such as batch.micro_size=16")
            continue
        try:
            layers.append(('command line', nested(tuple(key.split('.')), read_yaml(text))))
        except yaml.YAMLError as error:
            errors.append(f'{_shown(override)} cannot be read: {one_line(error)}')
    return layers


def _without_secrets(value: Any, origin: str, errors: list[str], path: Keys = ()) -> Any:
    """A copy of a layer without texts that look like credentials, of which the errors name the place and not the value."""
    if isinstance(value, list):
        return [_without_secrets(inner, origin, errors, path) for inner in value]
    if not isinstance(value, dict):
        may_be_commit = bool(path) and path[-1] == 'revision'
        if not isinstance(value, str) or not carries_credentials(value, may_be_commit):
            return value
        errors.append(
            f'{_dotted(path)}: holds a password, key or signature ({origin}); the recipe is written to logs and into checkpoints: leave it out, and '
            'give credentials in the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, GCS_KEY and GCS_SECRET, HF_TOKEN, WANDB_API_KEY) or '
            "in the client's own file"
        )
        return MISSING
    kept = {}
    for key, inner in value.items():
        if carries_credentials(str(key), may_be_commit=False) or '${' in str(key):
            errors.append(f'{_dotted(path) or "top level"}: the name of a key in it holds a secret or a reference ({origin}); write a plain name')
        else:
            kept[key] = _without_secrets(inner, origin, errors, (*path, key))
    return kept


def _with_references(defaults: dict[Any, Any], said: Any) -> dict[Any, Any]:
    """The schema's defaults that refer to other keys, less what the layers say: as if a file had said them."""
    found = {}
    for key, value in defaults.items():
        other = said.get(key) if isinstance(said, dict) else None
        if isinstance(value, dict):
            value = _with_references(value, other)
        if value and (isinstance(value, dict) or (isinstance(value, str) and '${' in value and other is None)):
            found[key] = value
    return found


def _resolved(value: Any, references: References, origin: str, errors: list[str], unresolved: set[str], path: Keys = ()) -> Any:
    """A layer with its references replaced; MISSING where that cannot be done.

    Args:
        unresolved: gains the keys whose references lead to what is missing.
    """
    if isinstance(value, dict) and value:
        return {key: _resolved(inner, references, origin, errors, unresolved, (*path, key)) for key, inner in value.items()}
    try:
        return references.resolve(value)
    except FollowsFromAnother:
        unresolved.add(_dotted(path))
    except WrongReference as error:
        errors.append(f'{_dotted(path)}: {error} ({origin})')
    return MISSING


def _leaves(layer: dict[Any, Any], path: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """(keys, value) of everything that is not itself a non-empty mapping, so that each can fail on its own."""
    for key, value in layer.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def nested(path: Keys, value: Any) -> Any:
    """The value under its keys."""
    for key in reversed(path):
        value = {key: value}
    return value


def _dotted(path: Keys) -> str:
    return '.'.join(map(str, path))


def _set(config: DictConfig, schema: type, path: Keys, value: Any, origin: str, errors: list[str], remedies: dict[str, str]) -> None:
    try:
        if _misfit(schema, path, value):
            raise TypeError
        if value == MISSING:  # `key: ???` takes back what the base or the schema says; a merge would pass over it
            OmegaConf.update(config, _dotted(path), MISSING)
        else:
            config.merge_with(nested(path, value))
    except (OmegaConfBaseException, TypeError):
        if any(error.startswith(f'{_dotted(path)}: ') for error in errors):
            return  # it was left out for a reason that is said
        declared = [(path[:length], hint) for length in range(1, len(path) + 1) if (hint := _hint(schema, path[:length])) is not None]
        known, hint = declared[-1] if declared else ((), schema)
        if len(known) < len(path) and (not known or _is_section(hint)):
            errors.append(f'{_dotted(path[: len(known) + 1])}: unknown key ({origin}){_suggestion(schema, _dotted(path))}')
            return
        value = nested(path[len(known) :], value)
        meant = did_you_mean(str(value), map(str, typing.get_args(hint))).rstrip('.') if typing.get_origin(hint) is Literal else ''
        quotes = f"; if that is the text, write '{value}' in quotes" if isinstance(value, bool | float) and str in _options(hint) else ''
        errors.append(f'{_dotted(known)}: {_shown(value)} is {_not_expected(hint)} ({origin}){meant}{quotes or remedies.get(_dotted(known), "")}')


def _misfit(schema: type, path: Keys, value: Any) -> bool:
    """Whether OmegaConf would silently convert it or let it pass: true to 'True', 1e5 to '100000.0', 2 to true; a list or a mapping as a text."""
    if any((above := _hint(schema, path[:length])) is not None and not _is_section(above) for length in range(1, len(path))):
        return True
    if value is None or isinstance(value, str) or (hint := _hint(schema, path)) is None:
        return False
    options = set(_options(hint)) - {type(None)}
    if isinstance(value, bool):
        return options <= {str, int, float}
    return options <= {str} if isinstance(value, float) else options <= {bool} if isinstance(value, int) else options <= {str, int, float, bool}


@cache
def _hint(schema: Any, path: Keys) -> Any:
    """The declared type of what lies at `path`; None if nothing can lie there."""
    for key in path:
        schema = next((option for option in _options(schema) if _is_section(option)), None)
        if dataclasses.is_dataclass(schema):
            schema = typing.get_type_hints(schema).get(key)
        elif schema is not None:
            schema = typing.get_args(schema)[1]
    return schema


def _is_section(hint: Any) -> bool:
    return any(dataclasses.is_dataclass(option) or typing.get_origin(option) is dict for option in _options(hint))


def _options(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


NAMES = {int: 'a whole number', float: 'a number', bool: 'true or false', str: 'a text', type(None): 'null'}


def _not_expected(hint: Any) -> str:
    """`not a whole number`, `neither a text nor null`."""
    options = [_expected(option) for option in _options(hint)]
    return f'not {options[0]}' if len(options) == 1 else f'neither {" nor ".join(options)}'


def _expected(hint: Any) -> str:
    """The type in words."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return f'one of {", ".join(map(str, args))}'
    if _is_section(hint):
        return 'a section of keys and values'
    if origin is tuple:
        return f'a list of {len(args)} values, each {_expected(args[0])}'
    return NAMES.get(hint, 'a list')


def _shown(value: Any) -> str:
    text = {None: 'null', True: 'true', False: 'false'}[value] if isinstance(value, bool | None) else repr(value)
    return text if len(text) <= MAX_SHOWN else f'{text[:MAX_SHOWN]}...'


def _suggestion(schema: type, path: str) -> str:
    """What a key that is not known may have meant: one of that name elsewhere, a similar path, or a similar name."""
    known = list(_known_paths(schema, name=path.split('.')[-2] if path.count('.') > 1 else 'NAME'))
    last = path.rpartition('.')[2]
    same_name = [candidate for candidate in known if candidate.rpartition('.')[2] == last]
    similar = closest(last, [candidate.rpartition('.')[2] for candidate in known], cutoff=0.7)
    similar_paths = (candidate for candidate in known if candidate.rpartition('.')[2] == similar)
    meant = closest(path, same_name, cutoff=0) or closest(path, known, cutoff=0.75) or next(similar_paths, None)
    return f"; did you mean '{meant}'?" if meant else ''


def _known_paths(section: Any, name: str, prefix: str = '') -> Iterator[str]:
    """Args: name: what stands for the names that a recipe chooses, such as those of its streams."""
    for key, hint in typing.get_type_hints(section).items():
        yield prefix + key
        free = typing.get_origin(hint) is dict
        for inner in _options(typing.get_args(hint)[1] if free else hint):
            if dataclasses.is_dataclass(inner):
                yield from _known_paths(inner, name, f'{prefix}{key}.{name}.' if free else f'{prefix}{key}.')


def _missing(config: DictConfig, prefix: str = '') -> Iterator[str]:
    """The path of each field that has no value."""
    for key in config:
        path = f'{prefix}{key!s}'
        if OmegaConf.is_missing(config, key):
            yield path
        elif isinstance(value := config[key], DictConfig):
            yield from _missing(value, f'{path}.')
