"""Everything about one key of a settings file, at its field: `lr: float = key(1e-4, 'Peak learning rate.', low=0, high=1)`.

A text that does not fit into that line is a string below it, as a docstring is.
`merging.py` enforces types, ranges and units, `load.py` reads `may_change`, `python -m diffusion.check` prints the text. No torch.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from diffusion.common.text import closest

Section = TypeVar('Section')
Keys = tuple[Any, ...]  # names from the outermost section inwards

MISSING = '???'  # in place of a value that must be set: what a key has without a default, and what a file writes to take back its base's
UNITS = {'ba': 'batches', 'ep': 'epochs', 'sp': 'samples', 'sec': 'seconds'}  # of Composer's time strings, which are parsed here without Composer


class Duration(str):
    """A length of training: text that Composer takes as it is, such as `10000ba`, with its number and unit.

    Raises:
        ValueError: not a whole number followed by a unit of UNITS. Composer itself refuses `60s`, `24h` and `1d`.
    """

    value: int
    unit: str  # a key of UNITS

    def __new__(cls, text: str) -> Duration:
        match = re.fullmatch(rf'(\d+)({"|".join(UNITS)})', text)
        if match is None:
            units = ', '.join(f'{unit} ({name})' for unit, name in UNITS.items())
            raise ValueError(f"'{text}' is not a duration; write a whole number and one of {units}, such as 10000ba")
        duration = super().__new__(cls, text)
        duration.value, duration.unit = int(match[1]), match[2]
        return duration

    @property
    def batches(self) -> int:
        """The number, where only batches are allowed."""
        assert self.unit == 'ba', f'{self} is not in batches'
        return self.value


@dataclasses.dataclass(frozen=True)
class Key:
    """Meaning and limits of a key.

    Args:
        doc: meaning and unit, in one or two sentences; empty where they are the string below the field (`meaning` returns either).
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

    @property
    def limits(self) -> str:
        """The limits in words, for the end of a noun phrase; empty if there are none."""
        if self.high == math.inf:
            return '' if self.low == -math.inf else f' of at least {self.low:.10g}'
        return f' from {self.low:.10g} to {self.high:.10g}'


def key(default: Any, doc: str = '', **rest: Any) -> Any:
    """Declare a key: a dataclass field with its default (or the class or type that makes it) and the arguments of Key."""
    if units := rest.get('units'):
        default = Duration(default) if isinstance(default, str) and default != MISSING else default
        rest.setdefault('remedy', f'write {" or ".join(UNITS[unit] for unit in units)}, such as 10000{units[0]}')
    metadata = {'key': Key(doc, **rest)}
    if default == MISSING:  # made for each section, so that the class has no attribute to fall back on (`merging.without_missing`)
        return dataclasses.field(default_factory=lambda: MISSING, metadata=metadata)
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a key; MISSING if it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return MISSING if field.default is dataclasses.MISSING else field.default


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


def meanings(section: Any) -> dict[str, str]:
    """Return the texts of the keys of a section by name."""
    below: dict[str, str] = {}
    for kind in reversed(section.__mro__):
        if dataclasses.is_dataclass(kind):
            below |= _strings_below_fields(kind.__module__).get(kind.__qualname__, {})  # type: ignore[union-attr]
    return {name: key.doc or below.get(name, '') for name, key in keys_of(section).items()}


@cache
def _strings_below_fields(module: str) -> dict[str, dict[str, str]]:
    """Return the string below each field of a module's classes, by class and field; read from the source when texts are asked for, and not before."""
    found: dict[str, dict[str, str]] = {}
    for section in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(section, ast.ClassDef):
            for field, below in itertools.pairwise(section.body):
                if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                    found.setdefault(section.name, {})[ast.unparse(field.target)] = ' '.join(str(below.value.value).split())
    return found


def meaning(schema: Any, path: Keys) -> str:
    """Return the text of the key at `path`; empty for a name that the file chooses."""
    section = next((option for option in options(declared(schema, path[:-1])[0]) if dataclasses.is_dataclass(option)), None)
    return '' if section is None else meanings(section)[path[-1]]


@cache
def hints_of(section: Any) -> dict[str, Any]:
    """Types of the keys of a section, by name: of its fields, not of what the class itself has."""
    hints = typing.get_type_hints(section)
    return {field.name: hints[field.name] for field in dataclasses.fields(section)}


@cache
def declared(schema: Any, path: Keys) -> tuple[Any, Key]:
    """Return type and key of what lies at `path`; the type is None if nothing can lie there. A number in a path counts in a list."""
    found = Key()
    for name in path:
        if isinstance(name, int):
            schema = typing.get_args(next(option for option in options(schema) if typing.get_origin(option) in (list, tuple)))[0]
            continue
        section = next((option for option in options(schema) if is_section(option)), None)
        found, schema = Key(), section
        if dataclasses.is_dataclass(section):
            schema = hints_of(section).get(name)  # type: ignore[arg-type]
            found = keys_of(section).get(name, found)
        elif section is not None:
            schema = typing.get_args(section)[1]
    return schema, found


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
    for field_name, hint in hints_of(section).items():
        path = (*above, field_name)
        yield path
        free = typing.get_origin(hint) is dict
        for inner in options(typing.get_args(hint)[1] if free else hint):
            if dataclasses.is_dataclass(inner):
                yield from known_paths(inner, name, (*path, name) if free else path)


def suggestion(schema: type, path: str) -> str:
    """Suggest what an unknown key may have meant: one of that name elsewhere, a similar path or name, or one described by its words."""
    paths = known_paths(schema, name=path.split('.')[-2] if path.count('.') > 1 else 'NAME')
    docs = {dotted(keys): meaning(schema, keys).lower() for keys in paths}
    known = list(docs)
    last = path.rpartition('.')[2]
    same_name = [candidate for candidate in known if candidate.rpartition('.')[2] == last]
    similar = closest(last, [candidate.rpartition('.')[2] for candidate in known], cutoff=0.7)
    similar_paths = (candidate for candidate in known if candidate.rpartition('.')[2] == similar)
    meant = closest(path, same_name, cutoff=0) or closest(path, known, cutoff=0.75) or next(similar_paths, None)
    words = last.replace('_', ' ').lower()
    if meant is None and len(words) >= 5:  # learning_rate: the text of optimizer.lr begins with "Peak learning rate"
        described_so = [candidate for candidate in known if words in docs[candidate]]
        meant = min(described_so, key=lambda candidate: (docs[candidate].index(words), len(candidate)), default=None)
    return f"; did you mean '{meant}'?" if meant else ''


def described(hint: Any, key: Key) -> str:
    """Say what a key may hold, with its limits: `a number from 0 to 1 or null`."""
    return ' or '.join(_noun(option, key) for option in options(hint))


def _noun(hint: Any, key: Key) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return f'one of {", ".join(map(str, inner))}' if len(inner) > 1 else f'`{inner[0]}`'
    if is_section(hint):
        return 'a section of keys and values'
    if origin is tuple:
        return f'a list of {len(inner)}, each {_noun(inner[0], key)}'
    if origin is list:
        return 'a list' if inner[0] is Any else f'a list, each {_noun(inner[0], key)}'
    if hint is Duration:
        return f'a duration in {" or ".join(key.units)}{key.limits}'
    plain = {int: f'a whole number{key.limits}', float: f'a number{key.limits}', bool: 'true or false', str: 'a text', types.NoneType: 'null'}
    return plain.get(hint, 'anything')


def dotted(path: Keys) -> str:
    """Write a path as `optimizer.betas[0]`."""
    return ''.join(f'[{name}]' if isinstance(name, int) else f'.{name}' for name in path).removeprefix('.')


def to_dict(settings: Any) -> dict[str, Any]:
    """Return settings as plain dictionaries, lists and scalars (for W&B's config and JSON)."""

    def plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name: str(value) if isinstance(value, Duration) else value for name, value in items}

    return dataclasses.asdict(settings, dict_factory=plain)


def neither_folder_nor_hub_id(source: str) -> str:
    """Return what is wrong with the name of a model; empty if it is a folder of this machine or has the form of a Hub id."""
    if Path(source).is_dir() or re.fullmatch(r'[\w.-]+/[\w.-]+', source):
        return ''
    return f"there is no folder '{source}', and a Hub id has the form owner/name"


def pins(revision: str | None) -> bool:
    """Whether a revision on the Hub is a commit, which no later upload changes."""
    return re.fullmatch(r'[0-9a-f]{40}', revision or '') is not None


def hub_source(load_path: str | None) -> tuple[str, str] | None:
    """Return (OWNER/NAME, COMMIT) of a model on the Hub, written OWNER/NAME@COMMIT; None for a file, folder or URL."""
    match = re.fullmatch(r'([\w.-]+/[\w.-]+)@([^/]*)', load_path or '')
    return None if match is None or Path(load_path or '').exists() else (match[1], match[2])
