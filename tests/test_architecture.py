"""The house: which room may import which, and what the lower rooms do without."""

import ast
import pkgutil
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

from importlinter.cli import lint_imports

import data_prep
import diffusion
from tests.conftest import REPOSITORY

WITHOUT_TORCH = ('common', 'contracts', 'recipe', 'cost')


def test_imports_point_downwards_and_no_two_rooms_import_each_other(capsys):
    """The order is in pyproject.toml; it has no list of exceptions."""
    assert lint_imports(config_filename=str(REPOSITORY / 'pyproject.toml'), no_cache=True) == 0, capsys.readouterr().out


def test_every_room_is_in_that_order():
    config = (REPOSITORY / 'pyproject.toml').read_text().partition('[tool.importlinter]')[2]
    assert 'ignore_imports' not in config
    assert [name for name in _modules(diffusion) if f'diffusion.{name}' not in config] == []


def test_files_at_the_top_are_commands():
    for package in (diffusion, data_prep):
        for name in _modules(package):
            path = Path(package.__path__[0]) / f'{name}.py'
            assert not path.exists() or '\ndef main(' in path.read_text(), f'{path}: belongs in a room'


def test_a_laptop_can_check_and_plan_without_torch():
    modules = [
        module.name for room in WITHOUT_TORCH for module in pkgutil.walk_packages([str(REPOSITORY / 'diffusion' / room)], f'diffusion.{room}.')
    ]
    assert len(modules) > 20
    code = f"""
import importlib, sys
for name in {modules}:
    importlib.import_module(name)
    assert not {{'torch', 'composer', 'diffusers', 'transformers'}} & set(sys.modules), name
"""
    subprocess.run([sys.executable, '-c', code], check=True, cwd=REPOSITORY)


def test_no_two_classes_share_a_name():
    """A reader who searches for a class finds one; names that begin with an underscore stay in their files."""
    places: dict[str, list[str]] = {}
    for package in ('diffusion', 'data_prep', 'fleet', 'benchmarks'):
        for path in (REPOSITORY / package).rglob('*.py'):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith('_'):
                    places.setdefault(node.name, []).append(str(path.relative_to(REPOSITORY)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_no_files_of_a_room_import_each_other_in_a_circle():
    """Imports inside functions count: they hide a circle from Python, not from a reader."""
    for package in ('diffusion', 'data_prep', 'fleet', 'benchmarks'):
        imports: dict[str, set[str]] = {}
        for path in (REPOSITORY / package).rglob('*.py'):
            name = '.'.join(path.relative_to(REPOSITORY).with_suffix('').parts).removesuffix('.__init__')
            nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom) and node.module]
            imports[name] = {target for node in nodes for target in [node.module, *(f'{node.module}.{one.name}' for one in node.names)]}
        inside = {name: {other for other in found & imports.keys() if other != name} for name, found in imports.items()}
        list(TopologicalSorter(inside).static_order())  # raises CycleError with the files of a circle


def test_docstrings_begin_with_a_verb_or_a_noun():
    """`Of a process and its children` leaves out its noun, and an English reader reads it twice."""
    fragments = {'Of', 'That', 'Those', 'As', 'By', 'From', 'For', 'What', 'Whose', 'Who', 'Where', 'In'}
    found = []
    packages = (REPOSITORY / package for package in ('diffusion', 'data_prep', 'fleet'))
    for path in [*(path for package in packages for path in package.rglob('*.py')), REPOSITORY / 'train.py']:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
                found += [f'{path}: {text[:60]}'] if text.split()[0] in fragments else []
    assert found == []


def test_rooms_keep_to_the_lines_that_the_map_grants_them():
    """Whoever raises a number in docs/map.md says in the commit what a user gets for it; whoever removes lines lowers it."""
    rows = re.findall(
        r'^\| `((?:diffusion|data_prep|fleet|benchmarks)/[a-z]*/?)` \| ([\d,]+) \|', (REPOSITORY / 'docs' / 'map.md').read_text(), re.MULTILINE
    )
    granted = {room: int(lines.replace(',', '')) for room, lines in rows}
    rooms = {'diffusion/', 'data_prep/', 'fleet/', 'benchmarks/'}
    for package in (diffusion, data_prep):
        rooms |= {f'{package.__name__}/{module.name}/' for module in pkgutil.iter_modules(package.__path__) if module.ispkg}
    assert granted.keys() == rooms
    for room, lines in granted.items():
        files = (REPOSITORY / room).glob('*.py') if room in ('diffusion/', 'data_prep/') else (REPOSITORY / room).rglob('*.py')
        assert sum(len(path.read_text().splitlines()) for path in files) <= lines, room


def _modules(package) -> list[str]:
    return [module.name for module in pkgutil.iter_modules(package.__path__)]
