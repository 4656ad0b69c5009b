"""Pages for readers: their sentences, and the commands that they print in blocks and in sentences."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt

REPOSITORY = Path(__file__).parents[1]
GENERATED = ('docs/commands.md', 'docs/fleet-protocol.md', 'docs/recipe-reference.md')  # from the code
PAGES = sorted(
    str(path.relative_to(REPOSITORY))
    for pattern in ('README.md', 'CONTRIBUTING.md', 'docs/*.md', 'benchmarks/*.md', 'launch/**/*.md')
    for path in REPOSITORY.glob(pattern)
    if str(path.relative_to(REPOSITORY)) not in GENERATED
)
NEEDS = '# needs: '  # the first line of a block that no test can run: hardware, an account, a cluster, weights

# A stop ends a sentence before a space, with what closes after it; the stop of an abbreviation or an initial ("J. T. Daly") does not.
STOP = re.compile(r'(?<!\be\.g)(?<!\bi\.e)(?<!\bvs)(?<!\bcf)(?<!\bNo)(?<!\b[A-Z])[.!?][)"\'’”]*\s+')


class Block(NamedTuple):
    """A fenced or indented block; `lines` without comments, a backslash continues one; `needs` says what no test has, or is empty."""

    language: str
    lines: list[str]
    needs: str


def blocks(page: str) -> Iterator[Block]:
    text = (REPOSITORY / page).read_text()
    for language, content in re.findall(r'^```(\w*)\n(.*?)^```', text, re.DOTALL | re.MULTILINE):
        yield _block(language, content)
    text = re.sub(r'^```.*?^```', '', text, flags=re.DOTALL | re.MULTILINE)
    for content in re.findall(r'(?:^    .*\n)+', text, re.MULTILINE):
        yield _block('', re.sub('^    ', '', content, flags=re.MULTILINE))


def _block(language: str, content: str) -> Block:
    lines = [line for line in content.replace('\\\n', ' ').splitlines() if line.strip() and not line.startswith('#')]
    first = content.partition('\n')[0]
    return Block(language, lines, first.removeprefix(NEEDS) if first.startswith(NEEDS) else '')


def commands(page: str) -> list[list[str]]:
    """The commands in each block of a page that a test can run."""
    return [block.lines for block in blocks(page) if block.language == 'sh' and not block.needs]


def inline(page: str) -> list[str]:
    """The commands of our own in the sentences of a page."""
    text = re.sub(r'^```.*?^```', '', (REPOSITORY / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    found = [' '.join(code.split()) for code in re.findall(r'`([^`]+)`', text)]
    return [code for code in found if re.match(r'(?:python (?:-m )?|composer )\S*[./]\S', code)]


def words_of(line: str) -> list[str]:
    """A command's words, without the launcher and variables before it and what comments or pipes it."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r'[A-Z_]+=.*', words[0]):
        words = words[1:]
    for end in ('|', '||', '&&', '>', ';'):
        words = words[: words.index(end)] if end in words else words
    return words


def sentences(markdown: str) -> Iterator[str]:
    """Sentences of headings, paragraphs and list items; without tables and blocks of code, and with a blank for code in a sentence."""
    tables = 0
    for token in MarkdownIt('commonmark').enable('table').parse(markdown):
        tables += {'table_open': 1, 'table_close': -1}.get(token.type, 0)
        if token.type == 'inline' and not tables:
            yield from STOP.split(''.join(part.content if part.type == 'text' else ' ' * (not part.nesting) for part in token.children or ()))


def num_words(sentence: str) -> int:
    """Words of a sentence; signs of a formula or a dash are none."""
    return len(re.findall(r'\S*\w\S*', sentence))
