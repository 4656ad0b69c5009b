"""YAML files and `key=value` overrides become layers of settings: plain data, from files that a stranger may have written.

Refused are duplicate keys, aliases, too much depth or length, texts that look like passwords, and references that are not `${key}`.
"""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from diffusion.common.files import read_regular
from diffusion.common.text import carries_credentials, one_line
from diffusion.recipe.keys import MISSING, Keys, dotted

COMMAND_LINE = 'command line'  # origin of overrides
Layer = tuple[str, dict[Any, Any]]  # origin and content

MAX_DEPTH = 30  # the deepest shipped recipe has 5
MAX_NODES = 20_000  # keys and values; the longest shipped recipe has 300
MAX_BYTES = 2**20  # of a file; the longest shipped recipe has 10 kB
MAX_BASES = 20  # below a file
MAX_SHOWN = 80  # characters of a value in a message

REFERENCE = re.compile(r'\$\{([A-Za-z_][\w-]*(?:\.[\w-]+)*)\}')


class Change(dict[Any, Any]):
    """The mapping that `key.name=value` stands for: it changes one entry of a dictionary of names, where a file's mapping replaces all of them."""


class PlainSafeLoader(yaml.SafeLoader):
    """PyYAML's safe loader, which also refuses duplicate keys, aliases (ten lines can expand to gigabytes), and too much depth or length.

    Numbers are those of YAML 1.2 too (`1e-4`), dates stay text, and so do all keys.
    """

    depth = num_nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        mark = self.peek_event().start_mark
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, 'aliases (*name) are not read; write the value again, or ${key}', mark)
        if self.depth == MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, f'nested more than {MAX_DEPTH} deep', mark)
        if self.num_nodes == MAX_NODES:
            raise yaml.composer.ComposerError(None, None, f'more than {MAX_NODES:,} keys and values', mark)
        self.num_nodes += 1
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[str]()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, 'a key is text; this one is a list or a mapping', key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key '{key.value}' comes twice", key.start_mark)
            seen.add(key.value)
            key.tag = 'tag:yaml.org,2002:str'  # 256, on and null are names here
        return super().construct_mapping(node, deep)


PlainSafeLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != 'tag:yaml.org,2002:timestamp']
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_EXPONENT = re.compile(r'[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?\d+\Z')  # to the end: a digest may begin so
PlainSafeLoader.add_implicit_resolver('tag:yaml.org,2002:float', _EXPONENT, list('-+.0123456789'))


def read_yaml(text: str) -> Any:
    """Parse YAML into plain data; raise yaml.YAMLError if it is not YAML, or not of the kind above."""
    try:
        return yaml.load(text, Loader=PlainSafeLoader)  # noqa: S506 - a subclass of the safe one
    except ValueError as error:
        raise yaml.YAMLError('it holds a number of more digits than Python reads') from error


def yaml_problem(error: yaml.YAMLError) -> str:
    """Describe what is wrong in a text, with its place in front and the line below, to which an arrow points."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return one_line(error).replace(' in "<unicode string>",', ' at')
    mark, begun = error.problem_mark, error.context_mark
    context = f', {error.context} from line {begun.line + 1}' if error.context and begun is not None and begun.line != mark.line else ''
    snippet = mark.get_snippet(indent=6)
    return f'line {mark.line + 1}, column {mark.column + 1}: {error.problem}{context}' + ('' if snippet is None else f'\n{snippet}')


def file_layers(path: Path, errors: list[str], above: tuple[str, ...] = ()) -> list[Layer]:
    """Read a file and those that it is based on, the most basic first; `above` are the real paths of the files by way of which it is read."""
    name, layers = str(path)[:1000], list[Layer]()
    try:
        text = read_regular(path, MAX_BYTES).decode()
        real = os.path.realpath(path)
    except FileNotFoundError:
        errors.append(f'{name}: no such file' + (f', on which {above[-1]} is based' if above else ''))
    except UnicodeDecodeError:
        errors.append(f'{name}: is not text (UTF-8)')
    except (OSError, ValueError) as error:
        is_folder = isinstance(error, ValueError) and path.is_dir()
        errors.append(
            f'{name}: ' + ('is a folder, not' if is_folder else f'cannot be read: {getattr(error, "strerror", error)}; name') + ' a YAML file'
        )
    else:
        if len(above) > MAX_BASES:
            errors.append(f'base: {above[0]} is based on more than {MAX_BASES} files, each on the next; put some of them together')
        elif real in above:
            errors.append(f'base: {name} is based on itself by way of {", ".join(above)}')
        else:
            layers = text_layers(text, str(path), errors)
    base = layers[0][1].pop('base', None) if layers else None
    return [*(file_layers(path.parent / str(base), errors, (*above, real)) if base is not None else []), *layers]


def text_layers(text: str, source: str, errors: list[str]) -> list[Layer]:
    """Parse a layer; none, and an error, if that fails."""
    try:
        content = read_yaml(text)
    except yaml.YAMLError as error:
        errors.append(f'{source}: cannot be read as YAML: {yaml_problem(error)}')
        return []
    if not isinstance(content, dict | None):
        errors.append(f'{source}: expected a mapping of keys to values, this file holds a {type(content).__name__}')
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
            errors.append(f'{shown(override)}: a key of {num_names:,} names; no key has more than {MAX_DEPTH}')
            continue
        try:
            content = read_yaml(text)
        except yaml.YAMLError as error:
            errors.append(f'{shown(override)} cannot be read: {yaml_problem(error).splitlines()[0]}')
            continue
        for name in reversed(key.split('.')):
            content = Change({name: content})
        layers.append((COMMAND_LINE, content))
    return layers


def trusted(value: Any, origin: str, errors: list[str], path: Keys = ()) -> Any:
    """Copy a layer with MISSING in place of texts that look like credentials or hold a reference to anything but a key.

    OmegaConf's interpolation, for one, also reads the environment (`${oc.env:NAME}`, with quotes, nested, with defaults); a recipe is data, may come
    with a stranger's checkpoint, and is written to logs. The errors name the key of a credential, not its value.
    """
    if isinstance(value, dict):
        kept = type(value)()
        for key, inner in value.items():
            if not _is_utf8(str(key)):
                errors.append(f'{dotted(path) or "top level"}: the name of a key in it holds half of a character ({origin})')
            elif carries_credentials(str(key), may_be_commit=False) or '${' in str(key):
                errors.append(f'{dotted(path) or "top level"}: the name of a key in it holds a secret or a reference ({origin}); write a plain name')
            else:
                kept[key] = trusted(inner, origin, errors, (*path, key))
        return kept
    if isinstance(value, list):
        return [trusted(inner, origin, errors, path) for inner in value]
    if not isinstance(value, str):
        return value
    if not _is_utf8(value):
        errors.append(f'{dotted(path)}: holds half of a character ({origin}); write the character, or \\U0001F600, not \\ud83d\\ude00')
        return MISSING
    if carries_credentials(value, may_be_commit=bool(path) and path[-1] == 'revision'):
        errors.append(
            f'{dotted(path)}: holds a password, key or signature ({origin}); the recipe is written to logs and into checkpoints: leave it out, and '
            'give credentials in the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, GCS_KEY and GCS_SECRET, HF_TOKEN, WANDB_API_KEY) or '
            "in the client's own file"
        )
        return MISSING
    if '${' in REFERENCE.sub('', value):
        errors.append(
            f"{dotted(path)}: '{value}' is not read: only ${{key}}, with a key of these settings such as ${{run_folder}}, is replaced; nothing is "
            f'taken from the environment. Write the value itself, or give it on the command line as key=value ({origin})'
        )
        return MISSING
    return value


def _is_utf8(text: str) -> bool:
    """Whether a text has no half of a surrogate pair, which JSON can spell and no file, database or validator takes."""
    return not any('\ud800' <= character <= '\udfff' for character in text)


def leaves(layer: dict[Any, Any], path: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield (path, value) of everything that is not a non-empty mapping."""
    for key, value in layer.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def shown(value: Any) -> str:
    """Write a value for a message, cut to MAX_SHOWN characters."""
    text = {None: 'null', True: 'true', False: 'false'}[value] if isinstance(value, bool | None) else repr(value)
    return text if len(text) <= MAX_SHOWN else f'{text[:MAX_SHOWN]}...'
