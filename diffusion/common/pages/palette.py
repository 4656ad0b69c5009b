"""The colours of pages and their figures, light and dark."""

# name: (light, dark). Each is the CSS variable `--name`; figures are drawn with the light ones, and inside a page they follow the variables.
# Contrast with the page is at least 4.5:1 for ink and faint, 3:1 for the series.
PALETTE = {
    'page': ('#ffffff', '#14171a'),
    'panel': ('#f4f5f7', '#20252b'),
    'line': ('#d9dce1', '#3a424b'),
    'ink': ('#1c2024', '#e4e7eb'),
    'faint': ('#5b636d', '#9aa4b0'),
    'good': ('#2e7d4f', '#5cc98a'),
    'bad': ('#c62828', '#ff7b72'),
    'note': ('#a86a00', '#e0ac4a'),
    'series1': ('#1f5fa8', '#6cb0ff'),
    'series2': ('#d1491b', '#ff9a6b'),
    'series3': ('#2a8a57', '#6fdca0'),
    'series4': ('#8b4fc0', '#c9a2f5'),
    'series5': ('#8a6d10', '#e3c454'),
    'series6': ('#0b8390', '#5fd6e3'),
}
LIGHT = {name: light for name, (light, _) in PALETTE.items()}
SERIES = [name for name in PALETTE if name.startswith('series')]
