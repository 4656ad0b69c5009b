"""The house: which room may import which, and what the lower rooms do without."""

import ast
import pkgutil
import subprocess
import sys
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
    for package in ('diffusion', 'data_prep', 'benchmarks'):
        for path in (REPOSITORY / package).rglob('*.py'):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith('_'):
                    places.setdefault(node.name, []).append(str(path.relative_to(REPOSITORY)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def _modules(package) -> list[str]:
    return [module.name for module in pkgutil.iter_modules(package.__path__)]
