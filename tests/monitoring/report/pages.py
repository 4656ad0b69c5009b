"""Pages as a browser reads them."""

from html.parser import HTMLParser

VOID = {'meta', 'img', 'br', 'link', 'input'}


class Page(HTMLParser):
    """Elements, texts by element, and whether every element is closed."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.texts, self.rows = [], [], [], []
        self.feed(text)
        assert not self.open, f'not closed: {self.open}'

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag == 'tr':
            self.rows.append([])
        if tag in ('td', 'th'):
            self.rows[-1].append('')
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ('style',):
            self.texts.append(data)
        if 'td' in self.open or 'th' in self.open:
            self.rows[-1][-1] += data

    @property
    def text(self):
        return ' '.join(' '.join(self.texts).split())

    def attributes(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    def row(self, first):
        """The other cells of the one row that begins with this text."""
        (cells,) = [row[1:] for row in self.rows if row and row[0].strip() == first]
        return [cell.strip() for cell in cells]


def assert_stands_alone(text):
    """A page that needs nothing else, runs nothing, fits a telephone and follows the colour scheme."""
    page = Page(text)
    metas = {attributes.get('name'): attributes.get('content') for attributes in page.attributes('meta')}
    assert metas['viewport'] == 'width=device-width, initial-scale=1'
    assert metas['color-scheme'] == 'light dark'
    assert '@media (prefers-color-scheme: dark)' in text
    assert not {'script', 'iframe', 'object', 'link'} & {tag for tag, _ in page.elements}
    for tag, attributes in page.elements:
        assert not [name for name in attributes if name.startswith('on')], (tag, attributes)
        for name in ('src', 'href', 'xlink:href'):
            assert attributes.get(name, 'data:').startswith(('data:', '#')), (tag, attributes)
    figures = [attributes for attributes in page.attributes('svg') if attributes.get('class') == 'figure']
    assert 'fill: #000000' not in text  # black letters on a dark page
    assert not figures or 'var(--ink)' in text
    return page
