"""Everything about one key of a settings file, at its field: `lr: float = key(1e-4, 'Peak learning rate.', low=0, high=1)`.

`strict_yaml.merge` enforces types, ranges and units, `resume` reads `may_change`, `python -m diffusion.check` prints the text. No torch.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeVar, Union

from omegaconf import MISSING

from diffusion.recipe.units import UNITS, Duration

Section = TypeVar('Section')
Keys = tuple[Any, ...]  # names from the outermost section inwards


@dataclasses.dataclass(frozen=True)
class Key:
    """What a key means and may hold.

    Args:
        doc: meaning and unit, in one or two sentences.
        low, high: limits of a number, of each number of a list, or of a duration's number; both are allowed values.
        units: that a duration may have, keys of UNITS; a duration's key names at least one.
        may_change: whether a resumed run may have another value; of a section: of all keys in it.
        remedy: what to write instead of a value that is missing or wrong.
        whole: of a dictionary of names: a file that states it replaces what its base says there; `key.name=value` still changes one entry.
    """

    doc: str = ''
    low: float = -math.inf
    high: float = math.inf
    units: tuple[str, ...] = ()
    may_change: bool = False
    remedy: str = ''
    whole: bool = False

    def violation(self, value: Any) -> str:
        """Say which limit a value breaks; empty if none, or if it is neither a number nor a duration."""
        if isinstance(value, Duration) and value.unit not in self.units:
            return f'{value} must be given in {" or ".join(self.units)}'
        try:
            number = value.value if isinstance(value, Duration) else value if isinstance(value, int) else float(value)
        except (TypeError, ValueError):
            return ''
        if self.low <= number <= self.high or (self.low, self.high) == (-math.inf, math.inf):
            return ''
        if self.high == math.inf:
            return f'{value} must be at least {self.low:.10g}'
        return f'{value} is outside {self.low:.10g} .. {self.high:.10g}'


def key(default: Any, doc: str = '', **rest: Any) -> Any:
    """Declare a key: a dataclass field with its default (or the class or type that makes it) and the arguments of Key."""
    if units := rest.get('units'):
        default = Duration(default) if isinstance(default, str) and default != MISSING else default
        rest.setdefault('remedy', f'write {" or ".join(UNITS[unit] for unit in units)}, such as 10000{units[0]}')
    metadata = {'key': Key(doc, **rest)}
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def fields_after(name: str = '') -> Callable[[type[Section]], type[Section]]:
    """Move the fields that a dataclass adds to those of its base behind the base's field `name`, or without one to the front.

    Files are written and printed in the order in which a reader looks for them. The arguments of `__init__`, which are given by name, keep theirs.
    """

    def moved(section: type[Section]) -> type[Section]:
        fields: dict[str, Any] = section.__dataclass_fields__  # type: ignore[attr-defined]
        inherited = [one for one in fields if any(one in getattr(base, '__dataclass_fields__', {}) for base in section.__bases__)]
        place = inherited.index(name) + 1 if name else 0
        added = [one for one in fields if one not in inherited]
        section.__dataclass_fields__ = {one: fields[one] for one in [*inherited[:place], *added, *inherited[place:]]}  # type: ignore[attr-defined]
        return section

    return moved


def keys_of(section: Any) -> dict[str, Key]:
    """Return the keys of a section by name; those of a plain dataclass allow everything."""
    return {item.name: item.metadata.get('key', Key()) for item in dataclasses.fields(section)}


@cache
def declared(schema: Any, path: Keys) -> tuple[Any, Key]:
    """Return type and key of what lies at `path`; the type is None if nothing can lie there."""
    found = Key()
    for name in path:
        section = next((option for option in options(schema) if is_section(option)), None)
        found, schema = Key(), section
        if dataclasses.is_dataclass(section):
            schema = _hints(section).get(name)
            found = keys_of(section).get(name, found)
        elif section is not None:
            schema = typing.get_args(section)[1]
    return schema, found


def _hints(section: Any) -> dict[str, Any]:
    """Types of the keys of a section, by name: of its fields, not of what the class itself has."""
    hints = typing.get_type_hints(section)
    return {field.name: hints[field.name] for field in dataclasses.fields(section)}


def first_unknown(schema: Any, path: Keys) -> Keys:
    """Return a path up to the first name that its section does not declare; empty if it declares all of them."""
    for length in range(1, len(path) + 1):
        if declared(schema, path[:length])[0] is None and is_section(declared(schema, path[: length - 1])[0]):
            return path[:length]
    return ()


def is_section(hint: Any) -> bool:
    """Whether a type has keys of its own: a dataclass, or a dictionary whose names the file chooses."""
    return any(dataclasses.is_dataclass(option) or typing.get_origin(option) is dict for option in options(hint))


def options(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


def known_paths(section: Any, name: str = 'NAME', above: Keys = ()) -> Iterator[Keys]:
    """Yield every path that the schema declares, sections included.

    Args:
        name: stands for the names that a file chooses, such as those of its streams.
    """
    for field_name, hint in _hints(section).items():
        path = (*above, field_name)
        yield path
        free = typing.get_origin(hint) is dict
        for inner in options(typing.get_args(hint)[1] if free else hint):
            if dataclasses.is_dataclass(inner):
                yield from known_paths(inner, name, (*path, name) if free else path)
