"""The page that shows what an inspection found: what is wrong, pictures with their captions, histograms, what conversion left out.

All texts come from the web or from files that anyone can have written, so each is escaped.
"""

from __future__ import annotations

import datetime
import html
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use('Agg')
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import MaxNLocator

from data_prep.inspect import Inspected, described
from data_prep.inspecting.inspection import SCALES
from diffusion.datasets.manifest import Manifest
from diffusion.pages import data_uri, number_boxes, table, write_page

STYLE = """
.numbers { gap: .8rem } .number { flex: 1; min-width: 5rem; padding: .6rem .9rem } .number b { font-size: 1.3rem; white-space: nowrap }
.verdict { border-radius: 8px; padding: .8rem 1.2rem; margin: 1.5rem 0; border-left: 6px solid }
.sound { background: #e9f6ec; border-color: #2e8b57 } .unsound { background: #fdecea; border-color: #c62828 }
.unsound h3 { margin: .8rem 0 .2rem; color: #c62828; font-size: 1rem } .unsound li { overflow-wrap: anywhere }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(8.4rem, 1fr)); gap: 1.2rem 1rem }
.gallery .frame { background: #f4f5f7; border-radius: 6px; aspect-ratio: 1; padding: 6px }
.gallery img { width: 100%; height: 100%; object-fit: contain }
.gallery figcaption { overflow-wrap: anywhere; line-height: 1.35; margin-top: .3rem } .gallery small { color: #888 }
.histograms { display: grid; grid-template-columns: repeat(auto-fill, minmax(24rem, 1fr)); gap: 1rem 2rem } .histograms img { width: 100% }
.histograms figcaption { max-width: none } .streams :is(th, td):nth-child(2) { text-align: left }
.bars { width: 100% } .bars td:last-child { width: 45% } .bar { height: .8rem; border-radius: 3px; min-width: 2px; background: #c0504d }
.bar.kept { background: #2e8b57 } .bar.note { background: #d9a441 } summary { cursor: pointer }
"""
MAX_CAPTION = 120
MAX_LISTED = 200  # files with a problem, of each kind
MAX_BARS = 40
COLOUR = '#3b6ea5'


@dataclass(frozen=True)
class Axis:
    """How a histogram is shown.

    Attributes:
        title: what is counted.
        span: of values that is shown at least, so that one bar does not fill the picture.
        text: of a value.
    """

    title: str
    span: float
    text: Callable[[float], str] = '{:,.0f}'.format


def _ratio(log2: float) -> str:
    return f'{2**log2:.3g}:1' if log2 >= 0 else f'1:{2**-log2:.3g}'


AXES = {
    'width': Axis('width, pixels', 40),
    'height': Axis('height, pixels', 40),
    'aspect': Axis('aspect ratio, width : height', 3, _ratio),
    'caption': Axis('length of the caption, characters', 20),
    'mean': Axis('mean of a latent, scaled as in training', 0.4, '{:.2f}'.format),
    'std': Axis('standard deviation of a latent, scaled as in training', 0.4, '{:.2f}'.format),
}


def write_report(found: Inspected, path: Path) -> None:
    """Write the page, whole or not at all."""
    name = found.where.rstrip('/').rpartition('/')[2] or found.where
    sections = [_headline(found, name), _verdict(found), _numbers(found), _gallery(found), _histograms(found), _conversion(found.books.manifest)]
    write_page(path, f'{name}: data set', [*sections, _streams(found), _manifest(found)], STYLE)


def _headline(found: Inspected, name: str) -> str:
    manifest = found.books.manifest
    kind = {'images': 'Captioned pictures', 'latents': 'VAE latents with captions'}.get(manifest.kind, manifest.kind)
    source = ', '.join(str(manifest.source[key]) for key in ('path', 'format') if key in manifest.source)
    when = datetime.datetime.now().astimezone().strftime('%Y-%m-%d %H:%M %Z')
    return (
        f'<h1>{html.escape(name)}</h1><div class="lead">{html.escape(kind)} in <code>{html.escape(found.where)}</code><br>'
        f'made from {html.escape(source)} by version {html.escape(manifest.code_version)}<br>inspected {when}</div>'
    )


def _verdict(found: Inspected) -> str:
    books, findings = found.books, found.findings
    if not findings.problems and findings.checked == books.num_samples:
        return '<div class="verdict sound"><b>Sound.</b> Every shard has the SHA-256 it was written with, and every sample can be used.</div>'
    if not findings.problems:
        looked = f'{findings.checked:,} of {books.num_samples:,} samples were checked, in {found.num_read:,} of {len(books.shards):,} shards.'
        return f'<div class="verdict sound"><b>Sound as far as was looked.</b> {looked}</div>'
    lists = []
    for what, problems in found.problems:
        items = ''.join(f'<li>{html.escape(described(problem))}</li>' for problem in problems[:MAX_LISTED])
        more = f'<li>and {len(problems) - MAX_LISTED:,} more files</li>' if len(problems) > MAX_LISTED else ''
        lists.append(f'<h3>{html.escape(what)}</h3><ul>{items}{more}</ul>')
    steps = ''.join(f'<li>{html.escape(remedy)}</li>' for remedy in found.remedies)
    how_many = f'{findings.sound:,} of the {findings.checked:,} samples checked can be used.'
    return f'<div class="verdict unsound"><b>Not sound.</b> {how_many}{"".join(lists)}<h3>What to do</h3><ol>{steps}</ol></div>'


def _numbers(found: Inspected) -> str:
    books, manifest, findings = found.books, found.books.manifest, found.findings
    numbers = [
        ('samples', f'{books.num_samples:,}'),
        ('attempted', f'{manifest.attempted:,}'),
        ('on disk', _size(books.num_bytes)),
        ('shards', f'{len(books.shards):,}'),
        ('streams', f'{max(1, len(manifest.streams)):,}'),
        ('checked', f'{findings.checked:,}'),
        ('sound', f'{100 * findings.sound / max(1, findings.checked):.4g} %'),
    ]
    return number_boxes(numbers)


def _gallery(found: Inspected) -> str:
    thumbnails = found.findings.thumbnails
    if not thumbnails:
        return ''
    latents = found.books.manifest.kind == 'latents'
    figures = []
    for thumbnail in thumbnails:
        caption = thumbnail.caption if len(thumbnail.caption) <= MAX_CAPTION else f'{thumbnail.caption[:MAX_CAPTION].rstrip()} …'
        figures.append(
            f'<figure><div class="frame"><img{" class=pixels" * latents} alt="" src="{data_uri(thumbnail.content, thumbnail.media_type)}"></div>'
            f'<figcaption>{html.escape(caption)}<br><small>{html.escape(thumbnail.label)}</small></figcaption></figure>'
        )
    heading, how = 'Pictures', ''
    if latents:
        heading, how = 'Latents', ' False colours: the first three channels of the mean, each stretched to its range; no VAE was loaded.'
    return f'<h2>{heading}</h2><p>{len(thumbnails)} samples from all over the data set.{how}</p><div class="gallery">{"".join(figures)}</div>'


def _histograms(found: Inspected) -> str:
    counts = found.findings.histograms
    pictures = ''.join(_histogram(name, counts[name], axis) for name, axis in AXES.items() if name in counts)
    return f'<h2>Distributions</h2><p>Of the {found.findings.sound:,} sound samples.</p><div class="histograms">{pictures}</div>' if pictures else ''


def bars(counts: np.ndarray, span: int) -> tuple[int, int, np.ndarray]:
    """(first bin, bins in each bar, heights) of at most MAX_BARS bars that show the occupied bins; a long tail is all in the last one.

    Args:
        span: bins that MAX_BARS such bars reach over at least.
    """
    occupied = np.flatnonzero(counts)
    first, end, body = int(occupied[0]), int(occupied[-1]), _quantile(counts, 0.995)
    if end - first > max(span, 1.25 * (body - first)):
        end = body
    joined = -(-max(end - first + 1, span) // MAX_BARS)
    return first, joined, np.add.reduceat(counts, np.arange(first, end + 1, joined))


def _quantile(counts: np.ndarray, share: float) -> int:
    """The bin up to which this share of all lies."""
    return int(np.searchsorted(np.cumsum(counts), share * counts.sum()))


def _histogram(name: str, counts: np.ndarray, axis: Axis) -> str:
    scale = SCALES[name]
    first, joined, heights = bars(counts, round(axis.span / scale.step))
    middle = 0.0 if scale.step == 1 else 0.5  # of a bin; whole numbers stand for themselves
    left = scale.start + scale.step * (first + joined * np.arange(len(heights)) + middle - 0.5)
    right = left[-1] + scale.step * joined
    margin = max(axis.span - (right - left[0]), 0.04 * (right - left[0])) / 2
    figure, plot = plt.subplots(figsize=(5, 2.4), layout='constrained')
    plot.bar(left, heights, width=scale.step * joined * 0.94, align='edge', color=COLOUR)
    plot.set_xlim(left[0] - margin, right + margin)
    plot.set_xlabel(axis.title)
    plot.xaxis.set_major_locator(MaxNLocator(6, integer=axis.span >= 1))
    plot.xaxis.set_major_formatter(lambda value, _: axis.text(value))
    plot.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    plot.yaxis.set_major_formatter('{x:,.0f}')
    plot.spines[['top', 'right', 'left']].set_visible(False)
    plot.tick_params(axis='y', length=0, labelcolor='#777')
    plot.grid(axis='y', alpha=0.3)
    plot.set_axisbelow(True)
    content = io.BytesIO()
    figure.savefig(content, format='png', dpi=160)
    plt.close(figure)
    last = np.flatnonzero(counts)[-1]
    least, median, most = (axis.text(scale.start + scale.step * (number + middle)) for number in (first, _quantile(counts, 0.5), last))
    beyond = '; the last bar has all that is above' if first + joined * len(heights) <= last else ''
    spread = f'all are {most}' if first == last else f'median {median}, from {least} to {most}{beyond}'
    return f'<figure><img alt="{axis.title}" src="{data_uri(content.getvalue())}"><figcaption>{spread}</figcaption></figure>'


def _conversion(manifest: Manifest) -> str:
    """What became of the rows of the source, each with a bar."""
    rows = [('kept', manifest.num_samples, 'kept'), *((f'dropped: {reason}', count, 'dropped') for reason, count in _largest_first(manifest.dropped))]
    rows += [(f'of those kept, {note}', count, 'note') for note, count in _largest_first(manifest.notes)]
    share = 100 / max(1, manifest.attempted)
    body = ''.join(
        f'<tr><td>{html.escape(label)}</td><td>{count:,}</td><td>{count * share:.1f} %</td>'
        f'<td><div class="bar {kind}" style="width: {count * share:.2f}%"></div></td></tr>'
        for label, count, kind in rows
    )
    what = 'rows of the source' if manifest.kind == 'images' else 'samples of the source, each counted once for every resolution'
    return f'<h2>From source to data set</h2><p>What became of {manifest.attempted:,} {what}:</p><table class="bars">{body}</table>'


def _largest_first(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: -item[1])


def _streams(found: Inspected) -> str:
    books = found.books
    if not books.manifest.streams:
        return ''
    rows = []
    for name, manifest in books.streams.items():
        shards = [shard for shard in books.shards if shard.stream == name]
        num_bytes = sum(shard.entry['raw_data']['bytes'] for shard in shards)
        share = 100 * manifest.num_samples / max(1, books.manifest.num_samples)
        rows.append((name, _bucket(manifest), f'{manifest.num_samples:,}', f'{share:.1f} %', f'{len(shards):,}', _size(num_bytes)))
    return f'<h2>Streams</h2><div class="streams">{table(("stream", "holds", "samples", "share", "shards", "on disk"), rows)}</div>'


def _bucket(manifest: Manifest) -> str:
    bucket = manifest.bucket
    if manifest.resolution is not None:
        return f'squares of {manifest.resolution} px'
    if 'min_side_px' in bucket:
        below = bucket.get('below_px')
        return f'short side of {bucket["min_side_px"]} px or more' + (f', below {below} px' if below is not None else '')
    if 'width_px' in bucket:
        return f'{"aspect ratio of " if manifest.kind == "images" else ""}{bucket["width_px"]} × {bucket["height_px"]} px'
    return ''


def _manifest(found: Inspected) -> str:
    texts = {'manifest.json': found.books.manifest} | {f'{name}/manifest.json': manifest for name, manifest in found.books.streams.items() if name}
    details = ''.join(
        f'<details><summary>{html.escape(name)}</summary><pre>{html.escape(manifest.to_json())}</pre></details>' for name, manifest in texts.items()
    )
    return f'<h2>Manifest</h2>{details}'


def _size(num_bytes: int) -> str:
    """As people read it: 9.0 MB."""
    value, units = float(num_bytes), ['bytes', 'kB', 'MB', 'GB', 'TB', 'PB']
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f'{value:,.0f} bytes' if units[0] == 'bytes' else f'{value:,.1f} {units[0]}'
