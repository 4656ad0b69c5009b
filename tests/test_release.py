"""What GitHub reads: the steps of the release workflow run here, and its forms, citation and workflows have the form that it asks for."""

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version

import diffusion
from diffusion.contracts import errors
from tests.conftest import REPOSITORY, write_checkout

GITHUB = REPOSITORY / '.github'
WORKFLOWS = sorted((GITHUB / 'workflows').iterdir())
FORMS = [path for path in sorted((GITHUB / 'ISSUE_TEMPLATE').iterdir()) if path.name != 'config.yml']
TAG = f'v{diffusion.__version__}'


def jobs(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())['jobs']


RELEASE = jobs(GITHUB / 'workflows/release.yml')['release']
STEPS = {step['name']: step for step in RELEASE['steps'] if 'run' in step}


@pytest.mark.parametrize('path', WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_what_cannot_change_and_know_no_secret(path):
    text = path.read_text()
    assert yaml.safe_load(text)['permissions'] == {'contents': 'read'}
    assert 'secrets' not in text
    used = re.findall(r'uses: (\S+)', text)
    assert used
    for name in used:
        assert re.fullmatch(r'actions/[\w-]+@[0-9a-f]{40}', name) or (REPOSITORY / name).is_file(), name
    for job in jobs(path).values():
        for step in job.get('steps', ()):
            assert '${{ github.event' not in step.get('run', '')  # text of strangers in a shell


def test_a_release_follows_its_tests():
    assert jobs(GITHUB / 'workflows/release.yml')['test']['uses'] == './.github/workflows/ci.yaml'
    assert RELEASE['needs'] == 'test'
    assert RELEASE['permissions'] == {'contents': 'write'}


class TestSteps:
    @pytest.fixture
    def checkout(self, tmp_path: Path) -> Path:
        """A commit whose changelog has the version, as CONTRIBUTING.md asks for."""
        write_checkout(tmp_path / 'checkout')
        changes = tmp_path / 'checkout/CHANGELOG.md'
        if f'## [{diffusion.__version__}]' not in changes.read_text():
            changes.write_text(changes.read_text().replace('## [Unreleased]\n', f'## [Unreleased]\n\n## [{diffusion.__version__}] - 2026-01-01\n'))
        return tmp_path / 'checkout'

    def run(self, checkout: Path, step: str, tag: str = TAG, code: int = 0) -> str:
        """Run a step as GitHub does; `gh` writes down its arguments."""
        programs = checkout.parent / 'bin'
        programs.mkdir(exist_ok=True)
        (programs / 'gh').write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {checkout.parent}/gh\n')
        (programs / 'gh').chmod(0o755)
        environment = {
            **os.environ,
            'PATH': f'{programs}:{Path(sys.executable).parent}:{os.environ["PATH"]}',
            'PYTHONPATH': '',  # what is installed, or in this folder
            'GITHUB_REF_NAME': tag,
            'GITHUB_REPOSITORY': 'owner/name',
        }
        words = ['bash', '-e', '-c', STEPS[step]['run']]
        ended = subprocess.run(words, cwd=checkout, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        assert ended.returncode == code, ended.stdout
        return ended.stdout

    def test_all_of_them_make_a_release(self, checkout):
        try:
            if not importlib.util.find_spec('build') or Version(version('setuptools')) < Version('70'):
                pytest.skip('needs build and setuptools 70: make install')
        except PackageNotFoundError:
            pytest.skip('needs setuptools: make install')
        assert list(STEPS)[1] == 'Tools'  # what this environment has
        for name in STEPS:
            if name != 'Tools':
                self.run(checkout, name)
        stem = f'text_to_image_recipes-{diffusion.__version__}'
        assert sorted(path.name for path in (checkout / 'dist').iterdir()) == [f'{stem}-py3-none-any.whl', f'{stem}.tar.gz']
        arguments = (checkout.parent / 'gh').read_text().splitlines()
        assert arguments[:3] == ['release', 'create', TAG]
        assert {f'dist/{stem}.tar.gz', f'dist/{stem}-py3-none-any.whl', '--verify-tag'} <= {*arguments}
        assert '### Added' in (checkout / 'notes.md').read_text()
        with zipfile.ZipFile(checkout / f'dist/{stem}-py3-none-any.whl') as wheel:
            assert {name.split('/')[0] for name in wheel.namelist()} == {'benchmarks', 'data_prep', 'diffusion', 'fleet', f'{stem}.dist-info'}
        with tarfile.open(checkout / f'dist/{stem}.tar.gz') as archive:
            names = {name.partition('/')[2] for name in archive.getnames()}
        assert {'train.py', 'yamls/shapes.yaml', 'docs/map.md', 'tests/conftest.py', 'constraints.txt', 'fleet/queue/schema.sql'} <= names

    def test_a_tag_that_is_not_the_version_is_refused(self, checkout):
        assert f'the tag is v9.9.9, __version__ in diffusion/__init__.py is {TAG[1:]}' in self.run(
            checkout, 'Tag, version and changelog agree', 'v9.9.9', 1
        )

    @pytest.mark.parametrize(
        'changes', ['# Changelog\n\n## [Unreleased]\n\n- much\n', f'# Changelog\n\n## [{TAG[1:]}] - 2026-01-01\n\n## [0.0.1]\n\n- a\n']
    )
    def test_a_version_without_changes_is_refused(self, checkout, changes):
        (checkout / 'CHANGELOG.md').write_text(changes)
        assert 'CHANGELOG.md has nothing below' in self.run(checkout, 'Tag, version and changelog agree', code=1)

    def test_notes_are_those_of_the_version(self, checkout):
        (checkout / 'CHANGELOG.md').write_text(
            f'## [Unreleased]\n\n- new\n\n## [{TAG[1:]}] - 2026-01-01\n\n### Added\n\n- this\n\n## [0.0.1]\n\n- old\n'
        )
        self.run(checkout, 'Tag, version and changelog agree')
        assert (checkout / 'notes.md').read_text().split('\n') == ['', '### Added', '', '- this', '', '']

    def test_a_file_that_the_wheel_lacks_is_named(self, checkout):
        (checkout / 'dist').mkdir()
        with zipfile.ZipFile(checkout / 'dist/a.whl', 'w') as wheel:
            tracked = subprocess.run(['git', 'ls-files'], cwd=checkout, capture_output=True, text=True, check=True).stdout.split()
            for name in tracked:
                if name != 'diffusion/cost/prices.yaml':
                    wheel.writestr(name, '')
        said = self.run(checkout, 'The wheel is complete', code=1)
        assert said.splitlines()[0] == 'diffusion/cost/prices.yaml'
        assert 'package_data' in said


def test_the_changelog_keeps_its_form():
    """https://keepachangelog.com/en/1.1.0/: versions newest first, each with its date, changes in groups."""
    text = (REPOSITORY / 'CHANGELOG.md').read_text()
    versions = re.findall(r'^## (.*)$', text, re.MULTILINE)
    assert versions[0] == '[Unreleased]'
    assert all(re.fullmatch(r'\[\d+\.\d+\.\d+\] - \d{4}-\d{2}-\d{2}', one) for one in versions[1:])
    numbers = [Version(one[1:].partition(']')[0]) for one in versions[1:]]
    assert numbers == sorted(numbers, reverse=True)
    assert {*re.findall(r'^### (.*)$', text, re.MULTILINE)} <= {'Added', 'Changed', 'Deprecated', 'Removed', 'Fixed', 'Security'}


def test_the_citation_is_valid():
    """By https://github.com/citation-file-format/citation-file-format/blob/1.2.0/schema-guide.md."""
    citation = yaml.safe_load((REPOSITORY / 'CITATION.cff').read_text())
    assert {'cff-version', 'message', 'title', 'authors'} <= citation.keys()  # those that it must have
    assert citation.keys() <= {
        'abstract', 'authors', 'cff-version', 'commit', 'contact', 'date-released', 'doi', 'identifiers', 'keywords', 'license', 'license-url', 'message',
        'preferred-citation', 'references', 'repository', 'repository-artifact', 'repository-code', 'title', 'type', 'url', 'version',
    }  # fmt: skip
    assert (citation['cff-version'], citation['type']) == ('1.2.0', 'software')
    assert citation['version'] == diffusion.__version__
    assert f"license='{citation['license']}'" in (REPOSITORY / 'setup.py').read_text()
    for author in citation['authors']:
        assert 'name' in author or {'family-names', 'given-names'} <= author.keys()
    assert all(isinstance(word, str) for word in citation['keywords'])


ATTRIBUTES = {
    'markdown': {'value'},
    'textarea': {'label', 'description', 'placeholder', 'value', 'render'},
    'input': {'label', 'description', 'placeholder', 'value'},
    'dropdown': {'label', 'description', 'multiple', 'options', 'default'},
    'checkboxes': {'label', 'description', 'options'},
}


@pytest.mark.parametrize('path', FORMS, ids=lambda path: path.name)
def test_issue_forms_are_what_github_accepts(path):
    """By https://docs.github.com/en/communities/using-templates-to-encourage-useful-issues-and-pull-requests/syntax-for-githubs-form-schema."""
    form = yaml.safe_load(path.read_text())
    assert form.keys() <= {'name', 'description', 'title', 'labels', 'assignees', 'projects', 'type', 'body'}
    assert form['name']
    assert form['description']
    questions = [part for part in form['body'] if part['type'] != 'markdown']
    assert questions
    for part in form['body']:
        assert part.keys() <= {'type', 'id', 'attributes', 'validations'}
        assert part['attributes'].keys() <= ATTRIBUTES[part['type']]
        assert ('value' if part['type'] == 'markdown' else 'label') in part['attributes']
        assert part.get('validations', {}).keys() <= {'required'}
        options = part['attributes'].get('options', ['one'])
        assert len({*options}) == len(options)
        assert all(isinstance(option, str) and option.lower() != 'none' for option in options)
    for values in ([part['id'] for part in questions], [part['attributes']['label'] for part in questions]):
        assert len({*values}) == len(values)
    assert all(re.fullmatch(r'[\w-]+', part['id']) for part in questions)


def test_the_bug_form_asks_for_every_exit_code():
    (codes,) = [part for part in yaml.safe_load((GITHUB / 'ISSUE_TEMPLATE/bug.yml').read_text())['body'] if part.get('id') == 'code']
    asked = {int(option.split()[0]) for option in codes['attributes']['options'] if option[0].isdigit()}
    assert asked == {value for name, value in vars(errors).items() if name.isupper() and isinstance(value, int)}
