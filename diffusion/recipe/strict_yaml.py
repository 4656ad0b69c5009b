"""YAML files and `key=value` overrides become one dataclass, or a list of every mistake: recipes, sweeps, a project's assumptions.

An unknown key is an error that suggests the right one. Errors are also a wrong type, a value outside the limits of its key (keys.py), a missing
value, one that looks like a password, and a reference that is not `${key}` (references.py). No torch.
"""

import os
import typing
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from diffusion.common.files import read_regular
from diffusion.common.text import carries_credentials, closest, did_you_mean
from diffusion.recipe.keys import Keys, declared, first_unknown, is_section, known_paths, options
from diffusion.recipe.plain_yaml import MAX_DEPTH, read_yaml, yaml_problem
from diffusion.recipe.references import FollowsFromAnother, References, WrongReference, overlaid
from diffusion.recipe.units import Duration

COMMAND_LINE = 'command line'  # origin of overrides
Layer = tuple[str, dict[Any, Any]]  # origin and content

MAX_SHOWN = 80  # characters of a value in a message
MAX_BYTES = 2**20  # of a file; the longest shipped recipe has 10 kB
MAX_BASES = 20  # below a file
MAX_ERRORS = 100  # each takes up to 10 ms to be told, with its suggestion


class Change(dict[Any, Any]):
    """The mapping that `key.name=value` stands for: it changes one entry of a dictionary of names, where a file's mapping replaces all of them."""


def merge(schema: type, layers: Sequence[Layer], errors: list[str]) -> DictConfig:
    """Merge layers, each an (origin, mapping) and stronger than those before it, into the dataclass `schema`.

    Args:
        errors: gains every mistake, one line each.

    Returns:
        The settings with their references replaced. A wrong value is left out: the key keeps its default or what a weaker layer gave it.
    """
    config = OmegaConf.structured(schema, flags={'allow_objects': True})  # which Durations are; `_misfit` holds their type
    defaults: Any = OmegaConf.to_container(config, resolve=False)
    layers = [(origin, _without_secrets(layer, origin, errors)) for origin, layer in in_force(schema, layers)]
    said: dict[Any, Any] = {}
    for _, layer in layers:
        said = overlaid(said, layer)
    references, unresolved = References(overlaid(defaults, said)), set[str]()
    for origin, layer in [('default', _with_references(defaults, said)), *layers]:
        plain = _with_durations(schema, _resolved(layer, references, origin, errors, unresolved))
        said_here = list(leaves(plain))
        if not any(value == MISSING or _misfit(schema, path, value) or _violations(schema, path, value) for path, value in said_here):
            with suppress(OmegaConfBaseException, TypeError):
                config.merge_with(plain)
                continue
        for path, value in said_here:  # one by one, which takes ten times as long, so that each mistake is named
            if len(errors) >= MAX_ERRORS:
                errors.append(f'{origin}: more than {MAX_ERRORS} mistakes; the others are not listed')
                return config
            _set(config, schema, path, value, origin, errors)
    # A key whose only value was wrong is not reported as missing too.
    known = unresolved | {error.partition(': ')[0] for error in errors}
    for name in _missing(config):
        if not any(f'{name}.'.startswith(f'{other}.') for other in known):
            errors.append(f'{name}: missing{_remedy(schema, tuple(name.split("."))) or "; it must be set"}')
    return config


def in_force(schema: type, layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers without what a stronger one replaces: the dictionaries of names (`Key.whole`) that it states."""
    whole = [path for path in known_paths(schema) if declared(schema, path)[1].whole]
    replaced, kept = set[Keys](), list[Layer]()
    for origin, layer in reversed(layers):
        kept.append((origin, _without(layer, replaced)))
        for path in whole:
            value: Any = layer
            for name in path:
                value = value.get(name, Change()) if isinstance(value, dict) else Change()
            if not isinstance(value, Change):
                replaced.add(path)
    return kept[::-1]


def _without(value: Any, left_out: Container[Keys], path: Keys = ()) -> Any:
    """Copy a layer without what lies at some paths."""
    if not isinstance(value, dict):
        return value
    return {key: _without(inner, left_out, (*path, key)) for key, inner in value.items() if (*path, key) not in left_out}


def origins(schema: type, layers: Sequence[Layer]) -> dict[Keys, str]:
    """Return which layer the value of each key comes from, of those that a layer states."""
    return {path: origin for origin, layer in in_force(schema, layers) for path, _ in leaves(layer)}


def file_layers(path: Path, errors: list[str], above: tuple[str, ...] = ()) -> list[Layer]:
    """Read a file and those that it is based on, the most basic first.

    Args:
        above: the real paths of the files by way of which this one is read.
    """
    shown = str(path)[:1000]
    if len(above) > MAX_BASES:
        errors.append(f'base: {above[0]} is based on more than {MAX_BASES} files, each on the next; put some of them together')
        return []
    try:
        text = read_regular(path, MAX_BYTES).decode()
        real = os.path.realpath(path)
    except FileNotFoundError:
        errors.append(f'{shown}: no such file' + (f', on which {above[-1]} is based' if above else ''))
        return []
    except UnicodeDecodeError:
        errors.append(f'{shown}: is not text (UTF-8)')
        return []
    except (OSError, ValueError) as error:
        reason = (
            'is a folder, not' if isinstance(error, ValueError) and path.is_dir() else f'cannot be read: {getattr(error, "strerror", error)}; name'
        )
        errors.append(f'{shown}: {reason} a YAML file')
        return []
    if real in above:
        errors.append(f'base: {shown} is based on itself by way of {", ".join(above)}')
        return []
    layers = text_layers(text, str(path), errors)
    base = layers[0][1].pop('base', None) if layers else None
    below = file_layers(path.parent / str(base), errors, (*above, real)) if base is not None else []
    return [*below, *layers]


def text_layers(text: str, source: str, errors: list[str]) -> list[Layer]:
    """Parse a layer; none, and an error, if that fails."""
    try:
        content = read_yaml(text)
    except yaml.YAMLError as error:
        errors.append(f'{source}: cannot be read as YAML: {yaml_problem(error)}')
        return []
    if not isinstance(content, dict | None):
        errors.append(f'{source}: a mapping of keys to values is wanted, this file holds a {type(content).__name__}')
        return []
    return [(source, content or {})]


def override_layers(overrides: Sequence[str], errors: list[str]) -> list[Layer]:
    """Parse each `key=value` of a command line into a layer."""
    layers = []
    for override in overrides:
        key, equals, text = override.partition('=')
        if not equals or not key or key.startswith('-'):
            errors.append(f"'{override}' is not an override; write key=value, such as batch.micro_size=16")
            continue
        if (num_names := key.count('.') + 1) > MAX_DEPTH:
            errors.append(f'{_shown(override)}: a key of {num_names:,} names; no key has more than {MAX_DEPTH}')
            continue
        try:
            layers.append((COMMAND_LINE, nested(tuple(key.split('.')), read_yaml(text), Change)))
        except yaml.YAMLError as error:
            errors.append(f'{_shown(override)} cannot be read: {yaml_problem(error).splitlines()[0]}')
    return layers


def _without_secrets(value: Any, origin: str, errors: list[str], path: Keys = ()) -> Any:
    """Copy a layer without texts that look like credentials; the errors name their key, not the value."""
    if isinstance(value, list):
        return [_without_secrets(inner, origin, errors, path) for inner in value]
    if not isinstance(value, dict):
        may_be_commit = bool(path) and path[-1] == 'revision'
        if not isinstance(value, str) or not carries_credentials(value, may_be_commit):
            return value
        errors.append(
            f'{dotted(path)}: holds a password, key or signature ({origin}); the recipe is written to logs and into checkpoints: leave it out, and '
            'give credentials in the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, GCS_KEY and GCS_SECRET, HF_TOKEN, WANDB_API_KEY) or '
            "in the client's own file"
        )
        return MISSING
    kept = {}
    for key, inner in value.items():
        if carries_credentials(str(key), may_be_commit=False) or '${' in str(key):
            errors.append(f'{dotted(path) or "top level"}: the name of a key in it holds a secret or a reference ({origin}); write a plain name')
        else:
            kept[key] = _without_secrets(inner, origin, errors, (*path, key))
    return kept


def _with_references(defaults: dict[Any, Any], said: Any) -> dict[Any, Any]:
    """Return the defaults that refer to other keys and that no layer replaces, as if a file had set them."""
    found = {}
    for key, value in defaults.items():
        other = said.get(key) if isinstance(said, dict) else None
        if isinstance(value, dict):
            value = _with_references(value, other)
        if value and (isinstance(value, dict) or (isinstance(value, str) and '${' in value and other is None)):
            found[key] = value
    return found


def _resolved(value: Any, references: References, origin: str, errors: list[str], unresolved: set[str], path: Keys = ()) -> Any:
    """Replace the references in a layer; MISSING where that cannot be done.

    Args:
        unresolved: gains the keys whose references lead to a missing or wrong value.
    """
    if isinstance(value, dict) and value:
        return {key: _resolved(inner, references, origin, errors, unresolved, (*path, key)) for key, inner in value.items()}
    try:
        return references.resolve(value)
    except FollowsFromAnother:
        unresolved.add(dotted(path))
    except WrongReference as error:
        errors.append(f'{dotted(path)}: {error} ({origin})')
    return MISSING


def leaves(layer: dict[Any, Any], path: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield (path, value) of everything that is not a non-empty mapping, so that each can fail on its own."""
    for key, value in layer.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def nested(path: Keys, value: Any, mapping: type[dict[Any, Any]] = dict) -> Any:
    """Nest a value under its path: {a: {b: value}}."""
    for key in reversed(path):
        value = mapping({key: value})
    return value


def dotted(path: Keys) -> str:
    return '.'.join(map(str, path))


def _set(config: DictConfig, schema: type, path: Keys, value: Any, origin: str, errors: list[str]) -> None:
    try:
        if _misfit(schema, path, value):
            raise TypeError
        if violations := _violations(schema, path, value):
            errors += [f'{violation} ({origin}){_remedy(schema, path)}' for violation in violations]
            return
        if value == MISSING:  # `key: ???` takes back what the base or the schema says; a merge would pass over it
            OmegaConf.update(config, dotted(path), MISSING)
        else:
            config.merge_with(nested(path, value))
    except (OmegaConfBaseException, TypeError):
        if any(error.startswith(f'{dotted(path)}: ') for error in errors):
            return  # already reported
        if unknown := first_unknown(schema, path):
            errors.append(f'{dotted(unknown)}: unknown key ({origin}){_suggestion(schema, dotted(path))}')
            return
        known = next(path[:length] for length in range(len(path), 0, -1) if declared(schema, path[:length])[0] is not None)
        hint = declared(schema, known)[0]
        value = nested(path[len(known) :], value)
        meant = did_you_mean(str(value), map(str, typing.get_args(hint))).rstrip('.') if typing.get_origin(hint) is Literal else ''
        quotes = f"; if that is the text, write '{value}' in quotes" if isinstance(value, bool | float) and str in options(hint) else ''
        errors.append(f'{dotted(known)}: {_shown(value)} is {_not_expected(hint)} ({origin}){meant}{quotes or _remedy(schema, known)}')


def _remedy(schema: type, path: Keys) -> str:
    remedy = declared(schema, path)[1].remedy
    return f'; {remedy}' if remedy else ''


def _with_durations(schema: type, value: Any, path: Keys = ()) -> Any:
    """Copy a layer, with valid texts of duration keys as Durations."""
    if isinstance(value, dict):
        return {key: _with_durations(schema, inner, (*path, key)) for key, inner in value.items()}
    if isinstance(value, str) and Duration in options(declared(schema, path)[0]):
        with suppress(ValueError):
            return Duration(value)
    return value


def _violations(schema: type, path: Keys, value: Any) -> list[str]:
    """Return `optimizer.lr: 7 is outside 0 .. 1` for each number outside its limits."""
    key, name = declared(schema, path)[1], dotted(path)
    numbers = {f'{name}[{index}]': number for index, number in enumerate(value)} if isinstance(value, list) else {name: value}
    return [f'{place}: {violation}' for place, number in numbers.items() if (violation := key.violation(number))]


def _misfit(schema: type, path: Keys, value: Any) -> bool:
    """Whether a value is of the wrong type, of those that OmegaConf lets pass or converts silently.

    It makes 'True' of true, '100000.0' of 1e5, true of 2, and a text of a list or a mapping.
    """
    if any((above := declared(schema, path[:length])[0]) is not None and not is_section(above) for length in range(1, len(path))):
        return True
    hint = declared(schema, path)[0]
    kinds = set(options(hint)) - {type(None)}
    if Duration in kinds:
        return not isinstance(value, Duration) and value != MISSING and (value is not None or type(None) not in options(hint))
    if value is None or isinstance(value, str) or hint is None:
        return False
    if isinstance(value, bool):
        return kinds <= {str, int, float}
    return kinds <= {str} if isinstance(value, float) else kinds <= {bool} if isinstance(value, int) else kinds <= {str, int, float, bool}


NAMES = {int: 'a whole number', float: 'a number', bool: 'true or false', str: 'a text', Duration: 'a duration', type(None): 'null'}


def _not_expected(hint: Any) -> str:
    """`not a whole number`, `neither a text nor null`."""
    expected = [_expected(option) for option in options(hint)]
    return f'not {expected[0]}' if len(expected) == 1 else f'neither {" nor ".join(expected)}'


def _expected(hint: Any) -> str:
    """Describe a type in words."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return f'one of {", ".join(map(str, args))}'
    if is_section(hint):
        return 'a section of keys and values'
    if origin is tuple:
        return f'a list of {len(args)} values, each {_expected(args[0])}'
    return NAMES.get(hint, 'a list')


def _shown(value: Any) -> str:
    text = {None: 'null', True: 'true', False: 'false'}[value] if isinstance(value, bool | None) else repr(value)
    return text if len(text) <= MAX_SHOWN else f'{text[:MAX_SHOWN]}...'


def _suggestion(schema: type, path: str) -> str:
    """Suggest what an unknown key may have meant: one of that name elsewhere, a similar path or name, or one described by its words."""
    paths = known_paths(schema, name=path.split('.')[-2] if path.count('.') > 1 else 'NAME')
    docs = {dotted(keys): declared(schema, keys)[1].doc.lower() for keys in paths}
    known = list(docs)
    last = path.rpartition('.')[2]
    same_name = [candidate for candidate in known if candidate.rpartition('.')[2] == last]
    similar = closest(last, [candidate.rpartition('.')[2] for candidate in known], cutoff=0.7)
    similar_paths = (candidate for candidate in known if candidate.rpartition('.')[2] == similar)
    meant = closest(path, same_name, cutoff=0) or closest(path, known, cutoff=0.75) or next(similar_paths, None)
    words = last.replace('_', ' ').lower()
    if meant is None and len(words) >= 5:  # learning_rate: the text of optimizer.lr begins with "Peak learning rate"
        described = [candidate for candidate in known if words in docs[candidate]]
        meant = min(described, key=lambda candidate: (docs[candidate].index(words), len(candidate)), default=None)
    return f"; did you mean '{meant}'?" if meant else ''


def _missing(config: DictConfig, prefix: str = '') -> Iterator[str]:
    """Yield the path of each key without a value."""
    for key in config:
        path = f'{prefix}{key!s}'
        if OmegaConf.is_missing(config, key):
            yield path
        elif isinstance(value := config[key], DictConfig):
            yield from _missing(value, f'{path}.')
