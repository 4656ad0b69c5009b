"""Layers of settings become one dataclass, or a list of every mistake: recipes, sweeps, a project's assumptions.

pydantic holds types and limits as `keys.py` declares them. An unknown key is an error that suggests the right one; so are a missing value and a
reference that leads nowhere. Each error names its key, the value, what is allowed, and the file or command line that it comes from. No torch.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any, Literal

from pydantic_core import SchemaValidator, ValidationError, core_schema

from diffusion.common.text import did_you_mean
from diffusion.recipe.keys import (
    MISSING,
    Duration,
    Key,
    Keys,
    declared,
    default_of,
    described,
    dotted,
    hints_of,
    keys_of,
    known_paths,
    options,
    suggestion,
)
from diffusion.recipe.reading import REFERENCE, Change, Layer, leaves, shown, trusted

MAX_ERRORS = 100  # each takes up to 10 ms to be told, with its suggestion
MAX_REPLACED = 1000  # references; each doubles a text at most: without a limit thirty lines could fill the memory


def merge(schema: type, layers: Sequence[Layer], errors: list[str]) -> Any:
    """Merge layers, each an (origin, mapping) and stronger than those before it, into the dataclass `schema`.

    Args:
        errors: gains every mistake, one line each.

    Returns:
        The settings with their references replaced. A wrong value is left out: the key keeps its default or what a weaker layer gave it. A key
        without any value has MISSING.
    """
    layers = [(origin, trusted(layer, origin, errors)) for origin, layer in layers]
    unresolved = set[str]()
    while True:
        values: Any = {field.name: _plain(default_of(field)) for field in dataclasses.fields(schema)}
        for _, layer in layers:
            values = overlaid(values, layer, _whole(schema))
        references = References(values, errors, unresolved)
        try:
            settings = _validator(schema).validate_python(references.replace_all(layers))
            break
        except ValidationError as error:
            problems = error.errors(include_url=False, include_context=False)
            # A list that is too short lacks one of its places.
            paths = [problem['loc'][:-1] if problem['type'] == 'missing' else problem['loc'] for problem in problems]
            places = [_strongest(layers, path) for path in paths]
            in_order = sorted(zip(places, paths, problems, strict=True), key=lambda one: one[0][0])  # as files and command line state them
            for (index, section, name), path, problem in in_order:
                origin = layers[index][0]
                section.pop(name, None)
                if len(errors) < MAX_ERRORS:
                    errors.append(_message(schema, path, problem['type'] == 'unexpected_keyword_argument', problem['input'], origin))
                elif 'more than' not in errors[-1]:
                    errors.append(f'{origin}: more than {MAX_ERRORS} mistakes; the others are not listed')
    # A key whose only value was wrong is not reported as missing too.
    known = unresolved | {error.partition(': ')[0] for error in errors}
    for path in _missing(settings):
        if not any(f'{dotted(path)}.'.startswith(f'{other}.') for other in known):
            errors.append(f'{dotted(path)}: missing; {declared(schema, path)[1].remedy or "it must be set"}')
    return settings


def overlaid(below: Any, above: Any, whole: frozenset[Keys] = frozenset(), path: Keys = ()) -> Any:
    """Lay settings over others: sections key by key, everything else replaced, and so is a dictionary of names that a file states (`Key.whole`)."""
    if not isinstance(below, dict) or not isinstance(above, dict) or (path in whole and not isinstance(above, Change)):
        return above
    return {**below, **{name: overlaid(below.get(name), value, whole, (*path, name)) for name, value in above.items()}}


@cache
def _whole(schema: type) -> frozenset[Keys]:
    return frozenset(path for path in known_paths(schema) if declared(schema, path)[1].whole)


def origins(schema: type, layers: Sequence[Layer]) -> dict[Keys, str]:
    """Return which layer the value of each key comes from, of those that a layer states; of an empty section by a path that ends in None."""
    found: Any = {}
    for origin, layer in layers:
        found = overlaid(found, _marked(layer, origin), _whole(schema))
    return dict(leaves(found))


def _marked(value: Any, origin: str) -> Any:
    """Copy a layer with its origin in place of each value."""
    if not isinstance(value, dict):
        return origin
    return type(value)({name: _marked(inner, origin) for name, inner in value.items()} or {None: origin})


def _strongest(layers: Sequence[Layer], path: Keys) -> tuple[int, dict[Any, Any], Any]:
    """Return the index of the strongest layer that states a value, or the list or text around it, with the section and name that hold it there."""
    for index, (_, layer) in reversed([*enumerate(layers)]):
        section, place = layer, path
        while len(place) > 1 and isinstance(section.get(place[0]), dict):
            section, place = section[place[0]], place[1:]
        if place[0] in section:
            return index, section, place[0]
    raise AssertionError(f'{dotted(path)}: no layer states it')


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]


class References:
    """Replaces each `${key}` by the value of another key of the same settings, and by nothing else.

    Args:
        settings: in which the keys are looked up.
        errors: gains a line for each key whose reference leads nowhere, back to itself, or to what is not a text.
        unresolved: gains the keys that refer to a wrong or missing value, which is reported as an error of that key.
    """

    def __init__(self, settings: dict[Any, Any], errors: list[str], unresolved: set[str]):
        self.settings, self.errors, self.unresolved = settings, errors, unresolved
        self.replaced = 0

    def replace_all(self, layers: Sequence[Layer]) -> dict[Any, Any]:
        """Return the settings without references; MISSING where that cannot be done."""

        def copied(value: Any, path: Keys = ()) -> Any:
            if isinstance(value, dict):
                return {name: copied(inner, (*path, name)) for name, inner in value.items()}
            try:
                return self._resolve(value)
            except _WrongReference as error:
                origin = next((origin for origin, layer in reversed(layers) if path in dict(leaves(layer))), 'default')
                message = f'{dotted(path)}: {error} ({origin})'
                if not str(error):
                    self.unresolved.add(dotted(path))
                elif message not in self.errors:
                    self.errors.append(message)
            return MISSING

        return copied(self.settings)

    def _resolve(self, value: Any, by_way_of: tuple[str, ...] = ()) -> Any:
        """Return the value without references; a text that is one reference and nothing else takes over the other value's type."""
        if isinstance(value, dict):
            return {key: self._resolve(inner, by_way_of) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._resolve(inner, by_way_of) for inner in value]
        if not isinstance(value, str) or '${' not in value:
            return value
        if whole := REFERENCE.fullmatch(value):
            return self._value_of(whole[1], by_way_of)
        text = REFERENCE.sub(lambda match: self._text_of(match[1], by_way_of), value)
        if '${' in text:  # assembled from harmless parts
            raise _WrongReference(f"'{value}' becomes '{text}', which is another reference; write the value itself")
        return text

    def _text_of(self, key: str, by_way_of: tuple[str, ...]) -> str:
        value = self._value_of(key, by_way_of)
        if value is None or isinstance(value, dict | list):
            what = 'null' if value is None else 'a section' if isinstance(value, dict) else 'a list'
            raise _WrongReference(f'${{{key}}} is {what}, which cannot be a part of a text')
        return str(value)

    def _value_of(self, key: str, by_way_of: tuple[str, ...]) -> Any:
        if key in by_way_of:
            raise _Circle(f'${{{key}}} leads back to itself by way of {", ".join(by_way_of)}')
        self.replaced += 1
        if self.replaced > MAX_REPLACED:
            raise _WrongReference(f'more than {MAX_REPLACED:,} references have to be replaced; write the values themselves')
        value: Any = self.settings
        for name in key.split('.'):
            if not isinstance(value, dict) or name not in value:
                raise _WrongReference(f"${{{key}}} leads nowhere: there is no key '{key}'")
            value = value[name]
        if value == MISSING:
            raise _WrongReference
        try:
            return self._resolve(value, (*by_way_of, key))
        except _Circle:
            raise
        except _WrongReference as error:
            raise _WrongReference from error


class _WrongReference(ValueError):
    """A reference that cannot be replaced; without a text if that follows from another value's error, which is reported there."""


class _Circle(_WrongReference):
    pass


@cache
def _validator(schema: type) -> SchemaValidator:
    return SchemaValidator(_checks(schema, Key()))


def _checks(hint: Any, key: Key) -> core_schema.CoreSchema:
    """Return pydantic's schema of a type: strict, with the limits and units that its key declares, also for each value of a list."""
    kinds, origin, inner = options(hint), typing.get_origin(hint), typing.get_args(hint)
    if len(kinds) > 1:
        made: list[Any] = [_checks(kind, key) for kind in kinds if kind is not types.NoneType]
        one = made[0] if len(made) == 1 else core_schema.union_schema(made, mode='left_to_right', custom_error_type='union', custom_error_message='-')
        return core_schema.nullable_schema(one) if types.NoneType in kinds else one
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        hints, keys = hints_of(hint), keys_of(hint)
        fields = []
        for field in dataclasses.fields(hint):
            value = core_schema.no_info_wrap_validator_function(_or_missing, _checks(hints[field.name], keys[field.name]))
            fields.append(core_schema.dataclass_field(field.name, core_schema.with_default_schema(value, default_factory=partial(default_of, field))))
        arguments = core_schema.dataclass_args_schema(hint.__name__, fields, extra_behavior='forbid')
        return core_schema.dataclass_schema(hint, arguments, [field.name for field in dataclasses.fields(hint)])  # type: ignore[arg-type]
    if origin is dict:
        return core_schema.dict_schema(core_schema.str_schema(), core_schema.no_info_wrap_validator_function(_or_missing, _checks(inner[1], key)))
    if origin is list:
        return core_schema.list_schema(_checks(inner[0], key))
    if origin is tuple:
        return core_schema.tuple_schema([_checks(one, key) for one in inner])
    if origin is Literal:
        return core_schema.literal_schema(list(inner))
    if hint is Duration:
        return core_schema.no_info_plain_validator_function(partial(_duration, key))
    if hint is str:
        return core_schema.no_info_before_validator_function(_text, core_schema.str_schema(strict=True))
    low, high = (None if math.isinf(limit) else limit for limit in (key.low, key.high))
    if hint is int:
        return core_schema.int_schema(strict=True, ge=low, le=high)  # type: ignore[arg-type]
    if hint is float:
        return core_schema.float_schema(strict=True, ge=low, le=high, allow_inf_nan=low is None and high is None)
    return core_schema.bool_schema(strict=True) if hint is bool else core_schema.any_schema()


def _or_missing(value: Any, check: Any) -> Any:
    return value if isinstance(value, str) and value == MISSING else check(value)


def _text(value: Any) -> Any:
    """Take `name: 7` as a text; `true` and 1e5 would not be written as they were."""
    return str(value) if type(value) is int else value


def _duration(key: Key, value: Any) -> Duration:
    if not isinstance(value, str):
        raise ValueError
    duration = Duration(value)
    if duration.unit not in key.units or not key.low <= duration.value <= key.high:
        raise ValueError
    return duration


def _message(schema: type, path: Keys, is_unknown: bool, value: Any, origin: str) -> str:
    if is_unknown:
        return f'{dotted(path)}: unknown key ({origin}){suggestion(schema, dotted(path))}'
    hint, key = declared(schema, path)
    choices = typing.get_args(next((option for option in options(hint) if typing.get_origin(option) is Literal), None))
    remedy = f'; {key.remedy}' if key.remedy else ''
    if choices:
        remedy = did_you_mean(str(value), map(str, choices)).rstrip('.') or remedy
    if isinstance(value, bool | float) and str in options(hint):
        remedy = f"; if that is the text, write '{value}' in quotes"
    return f'{dotted(path)}: {shown(value)} is not {described(hint, key)} ({origin}){remedy}'


def _missing(section: Any, path: Keys = ()) -> Iterator[Keys]:
    """Yield the path of each key without a value."""
    for name, value in (section if isinstance(section, dict) else vars(section)).items():
        if isinstance(value, str) and value == MISSING:
            yield (*path, name)
        elif isinstance(value, dict) or dataclasses.is_dataclass(value):
            yield from _missing(value, (*path, name))


def without_missing(settings: Any) -> Any:
    """Delete the attributes that have no value, so that a rule that reads one fails with AttributeError."""
    for *above, name in list(_missing(settings)):
        section = settings
        for key in above:
            section = section[key] if isinstance(section, dict) else getattr(section, key)
        if isinstance(section, dict):
            del section[name]
        else:
            delattr(section, name)
    return settings
