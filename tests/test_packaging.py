"""Our distribution is not the `diffusion` of the package index, which is somebody else's and imports under the same name."""

import re
import runpy
import subprocess

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import diffusion
from tests.conftest import REPOSITORY

STRANGER = re.compile(
    r'\b(?:install|download|add)\b[^`]*[\s\'"]diffusion(?![\w./-])'  # pip install diffusion
    r'|(?<![\w./-])diffusion\['  # 'diffusion[download]'
    r'|(?:version|distribution|metadata|requires)\([\'"]diffusion[\'"]\)'  # importlib.metadata
)


@pytest.fixture(scope='module')
def described():
    """What setup.py hands to setuptools."""
    arguments = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, 'setup', lambda **given: arguments.update(given))
        runpy.run_path(str(REPOSITORY / 'setup.py'))
    return arguments


def texts():
    tracked = subprocess.run(['git', 'ls-files', '-co', '--exclude-standard'], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    for name in tracked.stdout.split():
        path = REPOSITORY / name
        if path.suffix in ('.py', '.md', '.yaml', '.toml', '') and path.is_file() and path.name != 'test_packaging.py':
            yield name, path.read_text()


def test_nothing_names_the_package_of_a_stranger(described):
    assert described['name'] not in ('diffusion', 'data-prep', 'benchmarks')
    assert described['version'] == diffusion.__version__
    lines = ((name, line) for name, text in texts() for line in text.splitlines() if 'diffusion' in line)
    assert [(name, found[0]) for name, line in lines if (found := STRANGER.search(line))] == []


@pytest.mark.parametrize('line', ["pip install 'diffusion[download]'", 'pip install diffusion', 'uv add diffusion', "version('diffusion')"])
def test_the_search_finds_what_it_looks_for(line):
    assert STRANGER.search(line)
    assert not STRANGER.search("pip install -e '.[download]' && python -m diffusion.check; pip install mosaicml/diffusion")


def test_hints_name_extras_that_there_are(described):
    hints = {(name, extra) for name, text in texts() for extra in re.findall(r"install [^\n`]*'\.\[([\w,-]+)\]'", text)}
    assert {extra for _, extra in hints} >= {'near-duplicates', 'dev'}
    for name, extra in hints:
        assert extra in described['extras_require'], f'{name}: {extra}'


def test_all_is_everything_but_tools(described):
    extras = described['extras_require']
    assert {requirement for name, extra in extras.items() if name not in ('dev', 'docs') for requirement in extra} == {*extras['all']}
    assert not any(Requirement(requirement).name in ('pytest', 'ruff', 'mypy') for requirement in extras['all'])


@pytest.mark.parametrize('python', ['3.11', '3.12', '3.13'])
def test_constraints_have_one_version_of_each_requirement_within_its_bounds(described, python):
    """`make lock` writes them; `make install` and the image take them."""
    lines = (REPOSITORY / 'constraints.txt').read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith('#')]
    linux = {'python_version': python, 'python_full_version': f'{python}.9', 'sys_platform': 'linux', 'platform_machine': 'x86_64'}
    here = [pin for pin in pins if pin.marker is None or pin.marker.evaluate(linux)]
    versions = {canonicalize_name(pin.name): str(pin.specifier) for pin in here}
    assert len(versions) == len(here)
    assert all(re.fullmatch(r'==[\w.+!]+', version) for version in versions.values())
    for requirement in map(Requirement, [*described['install_requires'], *described['extras_require']['all'], *described['extras_require']['dev']]):
        version = versions[canonicalize_name(requirement.name)].removeprefix('==')
        assert requirement.specifier.contains(version), f'{requirement}: constraints.txt has {version}; make lock'


