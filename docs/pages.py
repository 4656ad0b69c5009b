"""What the builder of the site (mkdocs.yml) does not do itself: pages of files outside docs/, links to such files, and generated pages.

python docs/pages.py        writes recipe-reference.md, commands.md and fleet-protocol.md; a test holds them equal to the code (`make docs` runs it)
"""

import contextlib
import io
import os
import posixpath
import re
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

REPOSITORY = Path(__file__).parents[1]
OUTSIDE = {
    'README.md': 'index.md',
    'CONTRIBUTING.md': 'contributing.md',
}  # files outside docs/ that are pages, by their names on the site
ROOMS = ('diffusion', 'data_prep', 'fleet', 'benchmarks', 'launch')  # of commands


def on_files(files: Any, config: Any) -> Any:
    """Add the pages outside docs/."""
    for source, name in OUTSIDE.items():
        _add(files, config, source, name)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let links, which are written for readers of the repository, lead to the same files on the site."""
    names = {name: source for source, name in OUTSIDE.items()}
    source = names.get(page.file.src_uri, f'docs/{page.file.src_uri}')

    def on_site(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1]))
        target = OUTSIDE.get(path, path.removeprefix('docs/'))
        if target == path and (REPOSITORY / path).is_file() and files.get_file_from_path(path) is None:
            _add(files, config, path, path)  # such as a recipe: it becomes a file of the site
        return f']({target}'

    return re.sub(r'\]\((?![a-z]+:|#)([^)#\s]+)', on_site, markdown)


def _add(files: Any, config: Any, source: str, name: str) -> None:
    from mkdocs.structure.files import File  # here: the pages are written without it

    files.append(File.generated(config, name, abs_src_path=str(REPOSITORY / source)))


def command_reference() -> str:
    """Return docs/commands.md: what each command says to --help."""
    lines = ['# Commands', '', 'What each command answers to `--help`. [The map](map.md#commands) lists those that you need first.']
    lines += _described(Path('train.py'), 'train')
    for room in ROOMS:
        lines += ['', f'## {room}']
        for path in sorted(path.relative_to(REPOSITORY) for path in (REPOSITORY / room).rglob('*.py')):
            if "\nif __name__ == '__main__':" in (REPOSITORY / path).read_text():
                lines += _described(path, '.'.join(path.with_suffix('').parts).removesuffix('.__main__'))
    return '\n'.join([*lines, ''])


def _described(path: Path, module: str) -> list[str]:
    """Return heading and answer of a command to --help, for which it imports nothing heavy; wrapped as on a terminal of 118 columns."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as said,
        contextlib.redirect_stderr(io.StringIO()),  # runpy warns of modules that are imported already
        patch.object(sys, 'argv', [str(path), '--help']),
        patch.dict(os.environ, {'COLUMNS': '118'}),
        contextlib.suppress(SystemExit),
    ):
        runpy.run_module(module, run_name='__main__')
    return ['', f'### {path if path.parent == Path() else module}', '', '```text', said.getvalue().rstrip(), '```']


def fleet_protocol() -> str:
    """Return docs/fleet-protocol.md: what the fleet's service says of itself in /openapi.json."""
    from fleet.queue.database import Database
    from fleet.service.app import create_app
    from fleet.service.bucket import Bucket
    from fleet.service.gate import FleetService

    api = create_app(FleetService(Database(''), Bucket('s3://bucket'))).openapi()
    lines = ["# Protocol of the fleet's service", '', api['info']['description'], '', 'A service tells the same to programs: `GET /openapi.json`.']
    tags: dict[str, list[str]] = {}
    for path, methods in api['paths'].items():
        for method, said in methods.items():
            bodies = [content['schema'] for content in said.get('requestBody', {}).get('content', {}).values()]
            answers = [content['schema'] for content in said['responses']['200'].get('content', {}).values()]
            query = [f'`{one["name"]}` {_type(one["schema"])}' for one in said.get('parameters', []) if one['in'] != 'path']
            cells = [f'`{method.upper()} {path}`', ', '.join([*map(_type, bodies), *query]), ', '.join(map(_type, answers)), said['description']]
            tags.setdefault(said['tags'][0], []).append(f'| {" | ".join(" ".join(cell.split()) for cell in cells)} |')
    for tag, rows in tags.items():
        lines += ['', f'## {tag.capitalize()}', '', '| | body, query | answer | |', '| --- | --- | --- | --- |', *rows]
    lines += ['', '## Objects']
    inline = {}  # what needs no table
    for name, model in sorted(api['components']['schemas'].items()):
        if not model.get('properties'):
            inline[_type({'$ref': name})] = _type(model) if 'enum' in model else 'empty object'
        elif not name.endswith('ValidationError'):
            rows = [
                f'| `{key}` | {_type(field)}{"" if key in model.get("required", []) else ", optional"} | {field.get("description", "")} |'
                for key, field in model['properties'].items()
            ]
            lines += ['', f'### {name}', '', '| | | |', '| --- | --- | --- |', *rows]
    text = '\n'.join([*lines, ''])
    for link, words in inline.items():
        text = text.replace(link, words)
    return text


def _type(schema: dict[str, Any]) -> str:
    """Return a JSON schema in a few words, with its limits."""
    if '$ref' in schema:
        name = schema['$ref'].rpartition('/')[2]
        return f'[{name}](#{name.lower()})'
    if 'anyOf' in schema:
        return ' or '.join(map(_type, schema['anyOf']))
    if 'enum' in schema:
        return ', '.join(f'`{value}`' for value in schema['enum'])
    kind = str(schema.get('type', 'anything'))
    if kind == 'array':
        return f'array of {_type(schema["items"])}'
    of = schema.get('additionalProperties') or next(iter(schema.get('patternProperties', {}).values()), None)
    if isinstance(of, dict):
        kind = f'object of {_type(of)}'
    limits = [f'{word} {schema[key]:,.18g}' for key, word in (('minimum', 'from'), ('maximum', 'to'), ('maxLength', 'at most')) if key in schema]
    return ' '.join([kind, *limits, *([f'`{schema["pattern"]}`'] if 'pattern' in schema else [])])


def generated() -> dict[str, str]:
    """The generated pages by name."""
    recipe_reference = runpy.run_path(str(Path(__file__).with_name('recipe_reference.py')))['recipe_reference']  # here: the site is built without it
    return {'recipe-reference.md': recipe_reference(), 'commands.md': command_reference(), 'fleet-protocol.md': fleet_protocol()}


if __name__ == '__main__':
    sys.path[0] = str(REPOSITORY)
    for page, text in generated().items():
        (REPOSITORY / 'docs' / page).write_text(text)
