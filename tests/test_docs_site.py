"""The documentation site: built strictly from what readers of the repository see, complete, whole, and without anything from another host."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from markdown_it import MarkdownIt

from tests.conftest import REPOSITORY
from tests.pages import GENERATED, num_words, sentences

PAGES = runpy.run_path(str(REPOSITORY / 'docs/pages.py'))
SOURCES = {name: REPOSITORY / source for source, name in PAGES['OUTSIDE'].items()}
SOURCES |= {path.name: path for path in (REPOSITORY / 'docs').glob('*.md')}
LOADED = {'script': 'src', 'img': 'src', 'iframe': 'src', 'source': 'src', 'link': 'href'}  # by the browser, without a click
COMPARED = ('h1', 'h2', 'h3', 'h4', 'p', 'li', 'table', 'tr', 'pre', 'code', 'img', 'a', 'strong', 'em')

MAX_WORDS, MAX_WORDS_OF_A_SENTENCE = 2500, 30  # of a page, as `wc -w` counts


def build(project, out, code=0):
    """`mkdocs build --strict` in a folder; returns what it says."""
    command = [sys.executable, '-m', 'mkdocs', 'build', '--strict', '--site-dir', str(out)]
    environment = {**os.environ, 'NO_MKDOCS_2_WARNING': '1'}
    result = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == code, result.stderr
    return result.stderr


@pytest.fixture(scope='module')
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp('docs') / 'site'
    assert 'WARNING' not in build(REPOSITORY, out)
    return out


@pytest.fixture
def project(tmp_path):
    """What the site is built from, to be changed."""
    for name in ('mkdocs.yml', *PAGES['OUTSIDE']):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    shutil.copytree(REPOSITORY / 'docs', tmp_path / 'docs')
    (tmp_path / 'yamls').mkdir()
    (tmp_path / 'yamls/mine.yaml').write_text('name: mine\n')
    return tmp_path


class Elements(HTMLParser):
    """(tag, attributes) of every element of a page."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page.read_text())

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def test_every_page_of_the_repository_is_a_page_of_the_site(site):
    assert {path.stem for path in site.glob('*.html')} == {Path(name).stem for name in SOURCES} | {'404'}
    assert not list(site.rglob('*.py'))
    assert '<h1 id="train-stable-diffusion-on-your-own-data">' in (site / 'index.html').read_text()


def test_the_build_is_strict_about_everything():
    levels = yaml.safe_load((REPOSITORY / 'mkdocs.yml').read_text().replace('!!python', 'python'))['validation']
    assert {level for section in levels.values() for level in section.values()} == {'warn'}
    assert {name: set(section) for name, section in levels.items()} == {
        'nav': {'omitted_files', 'not_found', 'absolute_links'},
        'links': {'not_found', 'anchors', 'absolute_links', 'unrecognized_links'},
    }


def test_a_defect_ends_the_build_and_is_named(project):
    with (project / 'docs/data.md').open('a') as page:
        page.write('\n[a](nowhere.md) [b](cost.md#nothing) [c](../yamls/none.yaml) [d](/cost.md)\n')
    (project / 'docs/orphan.md').write_text('# Orphan\n')
    said = build(project, project / 'site', code=1)
    for defect in ("'nowhere.md'", "'cost.md#nothing'", 'none.yaml', "'/cost.md'", 'orphan.md'):
        assert defect in said, said


def test_links_to_files_of_the_repository_lead_to_them(project):
    with (project / 'docs/data.md').open('a') as page:
        page.write('\n[recipe](../yamls/mine.yaml) [readme](../README.md#recipes) [how](../CONTRIBUTING.md)\n')
    build(project, project / 'site')
    text = (project / 'site/data.html').read_text()
    for link in ('yamls/mine.yaml', 'index.html#recipes', 'contributing.html'):
        assert f'href="{link}"' in text
    assert (project / 'site/yamls/mine.yaml').read_text() == 'name: mine\n'


def test_links_lead_to_files_and_places_of_the_site(site):
    """Also those that the theme and the generated pages make, which the builder does not look at."""
    elements = {path.name: Elements(path).found for path in site.glob('*.html')}
    ids = {name: {given['id'] for _, given in found if given.get('id')} | {''} for name, found in elements.items()}
    for name, found in elements.items():
        if name == '404.html':  # its links are absolute: it is shown anywhere
            continue
        for tag, given in found:
            url = urlsplit(given.get('href') or given.get('src') or '')
            if url.scheme or url.netloc:
                assert tag == 'a', f'{name}: {tag} {given}'
                continue
            target = site / (unquote(url.path) or name)
            assert target.exists(), f'{name}: {url.geturl()}'
            if target.suffix == '.html' and tag == 'a':
                assert unquote(url.fragment) in ids[target.name] | {'__skip'}, f'{name}: {url.geturl()}'


def test_nothing_is_loaded_from_another_host(site):
    for path in site.glob('*.html'):
        for tag, given in Elements(path).found:
            address = given.get(LOADED.get(tag, ''), '')
            assert not re.match(r'[a-z]+:|//', address) or given.get('rel') == 'canonical', f'{path.name}: {address}'
            # The theme fetches these from a network of its makers' choice as soon as a page has one.
            assert not {'mermaid', 'typeset-math'} & set((given.get('class') or '').split()), path.name
    for path in site.rglob('*.css'):
        assert not re.findall(r'(?:url\(["\']?|@import\s+["\']?)(?:https?:)?//', path.read_text()), path


@pytest.mark.parametrize('name', sorted(SOURCES))
def test_a_page_reads_the_same_on_the_site_and_in_the_repository(name, site):
    """The site's Markdown and CommonMark, which GitHub shows, differ in lists, indented code and tables: pages are written so that both agree."""
    article = re.search(r'<article.*?</article>', (site / name).with_suffix('.html').read_text(), re.DOTALL)[0]
    article = re.sub(r'<a (?:class="headerlink"|id="__codelineno).*?</a>', '', article)
    github = MarkdownIt('commonmark').enable('table').render(SOURCES[name].read_text())
    on_site, there = (Counter(re.findall(r'<(\w+)[ >]', html)) for html in (article, github))
    assert {tag: on_site[tag] for tag in COMPARED} == {tag: there[tag] for tag in COMPARED}


@pytest.mark.parametrize('name', ['recipe-reference.md', 'commands.md', 'fleet-protocol.md'])
def test_the_generated_pages_are_those_of_the_code(name):
    assert (REPOSITORY / 'docs' / name).read_text() == PAGES['generated']()[name], 'python docs/pages.py writes them again'


@pytest.mark.parametrize('name', sorted({path.name for path in (REPOSITORY / 'docs').glob('*.md')} - {Path(page).name for page in GENERATED}))
def test_a_page_and_its_sentences_are_short(name):
    text = (REPOSITORY / 'docs' / name).read_text()
    assert len(text.split()) <= MAX_WORDS
    assert [sentence for sentence in sentences(text) if num_words(sentence) > MAX_WORDS_OF_A_SENTENCE] == []


def test_sentences_are_told_apart_as_a_reader_tells_them():
    text = """## A heading. With two

One of 0.5 s (e.g. of J. T. Daly, i.e. `run.py --all`). Two [ends](cost.md)! "Three?" Four
goes on,
- five: `a.b`, `c`
- **six**: x = 1 - a / b

| no | cell |
| --- | --- |
| counts | here. |

```sh
python -m none. Of this
```
"""
    found = [' '.join(sentence.split()) for sentence in sentences(text)]
    assert found == [
        'A heading',
        'With two',
        'One of 0.5 s (e.g. of J. T. Daly, i.e. )',
        'Two ends',
        '"Three',
        'Four goes on,',
        'five: ,',
        'six: x = 1 - a / b',
    ]
    assert [num_words(sentence) for sentence in found] == [2, 2, 10, 2, 1, 3, 1, 5]
