"""The page docs/recipe-reference.md, made from the declarations of a recipe's keys and nothing else; pages.py runs it."""

import dataclasses
import re
import types
import typing
from collections.abc import Iterator
from typing import Any

import yaml

from diffusion.recipe.autoencoder import AutoencoderRecipe
from diffusion.recipe.conflicts import CONFLICTS
from diffusion.recipe.keys import MISSING, UNITS, Duration, Keys, declared, default_of, described, dotted, known_paths, meaning, meanings, options
from diffusion.recipe.schema import Recipe

HEAD = '| key | value | default | meaning |\n| --- | --- | --- | --- |'
CHANGES = ' ↻'


def recipe_reference() -> str:
    """Return the page: a table for each section of a recipe, then what autoencoders have instead."""
    units = ', '.join(f'`{unit}` ({name})' for unit, name in UNITS.items())
    return '\n'.join(
        [
            '# Recipe keys',
            '',
            'Every key of a recipe, as `diffusion/recipe/schema.py` declares it. `python -m diffusion.check RECIPE` prints these texts',
            'next to the values of one recipe, and reports what contradicts another key. [Recipes](recipes.md) explains the whole.',
            '',
            f'-{CHANGES}: may change when a run resumes. All other keys must stay; another value is refused.',
            '- required: has no default; null: off, or left to the program, as the text says.',
            f'- A duration is a whole number with a unit: {units}.',
            '- NAME stands for names of your own. The keys of a section that may be null count if it is not.',
            *_sections(Recipe),
            '',
            '## Recipes of autoencoders',
            '',
            'A file with the section `autoencoder` trains one ([autoencoders.md](autoencoders.md)). It has no `model`, `adapter` and',
            '`methods`, and draws and scores nothing from prompts. Other keys are those above, but for these:',
            *_sections(AutoencoderRecipe, unlike=Recipe),
            '',
            '## Contradictions',
            '',
            'Conditions that must not hold together, and the error if they do. `key`: neither null, false nor empty; `!key`: the',
            'opposite; `{key}`: its value. Others depend on numbers, files and datasets: `diffusion/recipe/rules.py`.',
            '',
            '| together | error |',
            '| --- | --- |',
            *(f'| {", ".join(f"`{condition}`" for condition in conditions)} | {_cell(error)} |' for conditions, error in CONFLICTS),
            '',
        ]
    )


def _sections(schema: type, unlike: type | None = None) -> Iterator[str]:
    """Yield lines of Markdown: a heading and a table for each section; with `unlike` only keys that this schema does not declare just so."""
    tables: dict[Keys, list[str]] = {}
    depth = 1 if unlike is None else 2
    places: dict[Any, Keys] = {}  # where each section is described: once, also if several keys hold one of its kind
    for path in known_paths(schema):
        section, (hint, key) = _section(declared(schema, path[:-1])[0]), declared(schema, path)
        if section is None or places.setdefault(section, path[:-1]) != path[:-1]:
            continue  # a name that the file chooses, or a section that has its table already
        if unlike is None or declared(unlike, path) != (hint, key) or meaning(unlike, path) != meaning(schema, path):
            rows = tables.setdefault(path[:-1], [])
            rows += [] if dataclasses.is_dataclass(hint) else [_row(schema, section, path, places)]  # one that is always there is a heading only
    for path, rows in ((path, rows) for path, rows in tables.items() if rows or unlike is None):
        yield from ('', f'{"#" * min(depth + max(len(path), 1), 4)} {dotted(path) or "Top level"}', '', *([HEAD] if rows else []), *rows)


def _section(hint: Any) -> Any:
    """Return the dataclass that a type is or may be; None if it has no keys that are declared."""
    return next((option for option in options(hint) if dataclasses.is_dataclass(option)), None)


def _row(schema: type, section: Any, path: Keys, places: dict[Any, Keys]) -> str:
    hint, key = declared(schema, path)
    value = described(hint, key)
    named = typing.get_args(hint)[1] if typing.get_origin(hint) is dict else hint
    if inner := _section(named):
        at = dotted(places.get(inner, (*path, 'NAME') if named is not hint else path))
        value = f'section [{at}](#{at.lower().replace(".", "")})'
        value = ('by name: ' if named is not hint else '') + value + (' or null' if types.NoneType in options(named) else '')
    field = next(field for field in dataclasses.fields(section) if field.name == path[-1])
    default = default_of(field)
    plain = list(default) if isinstance(default, tuple) else str(default) if isinstance(default, Duration) else default
    shown = 'required' if default == MISSING else f'`{yaml.safe_dump(plain, default_flow_style=True).splitlines()[0]}`'
    changes = any(declared(schema, path[:length])[1].may_change for length in range(1, len(path) + 1))
    cells = (f'`{path[-1]}`{CHANGES if changes else ""}', value, shown, meanings(section)[path[-1]])
    return f'| {" | ".join(map(_cell, cells))} |'


def _cell(text: str) -> str:
    return re.sub(r'[|*]', r'\\\g<0>', text)  # neither the end of a cell nor emphasis
