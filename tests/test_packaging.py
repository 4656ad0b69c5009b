"""Our distribution is not the `diffusion` of the package index, which is somebody else's and imports under the same name."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib import metadata

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

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


# Bounds of Composer and Streaming that pyproject.toml overrides (docs/stack.md); what `uv pip check` complains of.
OVERRIDDEN = {
    *(('mosaicml', name) for name in ('torch', 'torchvision', 'torchmetrics', 'numpy', 'pillow')),
    *(('mosaicml-streaming', name) for name in ('transformers', 'numpy')),
}


def test_what_is_installed_breaks_the_overridden_bounds_and_no_others():
    broken = set()
    found_in_environment = list(metadata.distributions(path=[sysconfig.get_path('purelib')]))  # not those inside setuptools
    installed = {canonicalize_name(one.name): one.version for one in found_in_environment}
    for one in found_in_environment:
        for needed in map(Requirement, one.requires or ()):
            if needed.marker is None or needed.marker.evaluate({'extra': ''}):
                found = installed.get(canonicalize_name(needed.name))
                if found is None or not needed.specifier.contains(found, prereleases=True):
                    broken.add((canonicalize_name(one.name), canonicalize_name(needed.name)))
    assert broken == OVERRIDDEN
    overrides = tomllib.loads((REPOSITORY / 'pyproject.toml').read_text())['tool']['uv']['override-dependencies']
    assert {Requirement(line).name for line in overrides} == {name for _, name in OVERRIDDEN}


def test_torchvision_was_built_for_the_torch_that_is_installed():
    """Both are overridden, so that no installer compares them; with another torch `torchvision::nms` is missing."""
    (needed,) = [one for one in map(Requirement, metadata.requires('torchvision')) if one.name == 'torch']
    assert needed.specifier.contains(metadata.version('torch'), prereleases=True)
    assert {Version(one.version).release[:2] for one in needed.specifier} == {Version(metadata.version('torch')).release[:2]}


def copy_what_installers_read(folder):
    for name in ('setup.py', 'pyproject.toml', 'diffusion/__init__.py', 'README.md'):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, folder / name)


@pytest.mark.timeout(600)  # it asks the package index about everything
def test_uv_sync_takes_the_overridden_versions_by_itself(described, tmp_path):
    copy_what_installers_read(tmp_path)
    command = [f'{sysconfig.get_path("scripts")}/uv', 'sync', '--dry-run', '--python', sys.executable]
    answer = subprocess.run(command, cwd=tmp_path, env={**os.environ, 'VIRTUAL_ENV': ''}, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    taken = dict(line[3:].split('==') for line in answer.stderr.splitlines() if line.startswith(' + ') and '==' in line)
    needed = {canonicalize_name(one.name): one.specifier for one in map(Requirement, described['install_requires'])}
    for name in ('torch', 'torchvision', 'transformers', 'diffusers', 'mosaicml', 'mosaicml-streaming'):
        assert needed[name].contains(taken[name]), (name, taken[name])


def pip(folder, *arguments, **variables):
    copy_what_installers_read(folder)
    environment = {name: value for name, value in os.environ.items() if not name.startswith('PIP_')} | {'PIP_CONFIG_FILE': os.devnull} | variables
    command = [sys.executable, '-m', 'pip', *arguments, '--no-build-isolation', '--no-index']
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize('what', [['.'], ['-e', '.']])
def test_plain_pip_ends_early_and_says_what_to_run(tmp_path, what):
    answer = pip(tmp_path, 'install', '--dry-run', *what)
    assert answer.returncode != 0
    assert 'pip cannot install this' in answer.stdout + answer.stderr
    assert 'pip install uv && uv pip install -e .' in answer.stdout + answer.stderr
    assert 'No matching distribution' not in answer.stdout + answer.stderr  # it got no further


def test_pip_may_build_this_package_alone(tmp_path):
    answer = pip(tmp_path, 'wheel', '.', PIP_NO_DEPS='1')
    assert answer.returncode == 0, answer.stderr
    assert list(tmp_path.glob('text_to_image_recipes-*.whl'))


@pytest.mark.parametrize('backend', [None, 'cu128'])
def test_a_variable_chooses_the_build_of_pytorch(backend):
    command = ['make', '--dry-run', '--always-make', 'install', *([f'TORCH={backend}'] if backend else [])]
    printed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True, env={**os.environ, 'TORCH': ''}).stdout
    installs = [line for line in printed.splitlines() if '/uv pip install ' in line]
    assert len(installs) == 2
    for line in installs:
        assert line.partition('--torch-backend')[2].split()[:1] == ([backend] if backend else [])


THERE = [
    'torch',
    'torchvision',
    'torchmetrics',
    'transformers',
    'accelerate',
    'peft',
    'scipy',
    'pyarrow',
    'matplotlib',
    'jinja2',
    'psutil',
]  # on a bare machine
NO_NETWORK = {
    'wandb',
    'aiohttp',
    'google-cloud-storage',
    'oci',
    'paramiko',
    *(f'azure-{name}' for name in ('identity', 'storage-blob', 'storage-file-datalake')),
}


def needed_by(name):
    requirements = map(Requirement, metadata.requires(name) or [])
    return {canonicalize_name(each.name) for each in requirements if each.marker is None or each.marker.evaluate({'extra': ''})}


def test_a_bare_machine_gets_every_wheel_that_it_lacks_in_the_locked_version(described):
    """What the packages say that they need, of training and of one another."""
    lines = [line for line in (REPOSITORY / 'benchmarks/checking/wheels.txt').read_text().splitlines() if not line.startswith('#')]
    assert lines[0] == '-c ../../constraints.txt'
    wheels = {canonicalize_name(line) for line in lines[1:]}
    locked = {canonicalize_name(re.split('[= ]', line)[0]) for line in (REPOSITORY / 'constraints.txt').read_text().splitlines()}
    assert wheels <= locked
    there = set()
    while more := {*THERE, *(need for name in there for need in needed_by(name))} - there:
        there |= more
    needed = {canonicalize_name(Requirement(each).name) for each in described['install_requires']}
    needed |= {need for name in wheels for need in needed_by(name)}
    assert needed - there - NO_NETWORK <= wheels
