"""The page that shows what an audit found: what is wrong, images with their captions, histograms, what conversion left out.

All texts come from the web or from files that anyone can have written: the template escapes each.
"""

import datetime
from pathlib import Path

import numpy as np
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

from data_prep.auditing.dataset import AuditResult
from data_prep.auditing.samples import SCALES, Scale
from diffusion.common.pages import data_uri, new_figure, page_style, svg, write_page
from diffusion.contracts.manifest import Manifest

MAX_CAPTION = 120
MAX_LISTED = 200  # files with a problem, of each kind
MAX_BARS = 40


def write_report(found: AuditResult, path: Path) -> None:
    """Write the page, whole or not at all."""
    name = found.where.rstrip('/').rpartition('/')[2] or found.where
    manifest, findings = found.manifest, found.findings
    texts = {'manifest.json': manifest} | {f'{stream}/manifest.json': own for stream, own in found.streams.items() if stream}
    fates = [('kept', manifest.num_samples, 'kept')]  # what became of the rows of the source
    for counts, label, css_class in ((manifest.dropped, 'dropped: ', 'dropped'), (manifest.notes, 'of those kept, ', 'note')):
        fates += [(f'{label}{reason}', count, css_class) for reason, count in sorted(counts.items(), key=lambda item: -item[1])]
    write_page(
        path,
        'dataset.html',
        title=f'{name}: dataset',
        name=name,
        found=found,
        manifest=manifest,
        latents=manifest.kind == 'latents',
        kind={'images': 'Captioned images', 'latents': 'VAE latents with captions'}.get(manifest.kind, manifest.kind),
        source=', '.join(str(manifest.source[key]) for key in ('path', 'format') if key in manifest.source),
        when=datetime.datetime.now().astimezone().strftime('%Y-%m-%d %H:%M %Z'),
        problems=[(what, list(map(str, problems[:MAX_LISTED])), max(0, len(problems) - MAX_LISTED)) for what, problems in found.problems],
        numbers=[
            ('samples', f'{found.num_samples:,}'),
            ('attempted', f'{manifest.attempted:,}'),
            ('on disk', _size(found.num_bytes)),
            ('shards', f'{len(found.shards):,}'),
            ('streams', f'{max(1, len(manifest.streams)):,}'),
            ('checked', f'{findings.checked:,}'),
            ('sound', f'{100 * findings.sound / max(1, findings.checked):.4g} %'),
        ],
        oddities=[
            (
                oddity,
                f'{count:,}',
                f'{100 * count / max(1, findings.sound):.1f}\N{NO-BREAK SPACE}%',
                found.examples(oddity),
                found.definition(oddity),
            )
            for oddity, count in findings.odd.most_common()
            if count
        ],
        thumbnails=[(data_uri(one.content, one.media_type), _shortened(one.caption), one.label) for one in findings.thumbnails],
        histograms=[_histogram(findings.histograms[name], scale) for name, scale in SCALES.items() if name in findings.histograms],
        fates=[(label, count, 100 * count / max(1, manifest.attempted), css_class) for label, count, css_class in fates],
        streams=_streams(found),
        manifests=[(name, own.to_json()) for name, own in texts.items()],
    )


def _shortened(caption: str) -> str:
    return caption if len(caption) <= MAX_CAPTION else f'{caption[:MAX_CAPTION].rstrip()} …'


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


def _histogram(counts: np.ndarray, scale: Scale) -> tuple[Markup, str]:
    """The figure, and what it shows in words."""
    first, joined, heights = bars(counts, round(scale.span / scale.step))
    middle = 0.0 if scale.step == 1 else 0.5  # of a bin; whole numbers stand for themselves
    left = scale.start + scale.step * (first + joined * np.arange(len(heights)) + middle - 0.5)
    right = left[-1] + scale.step * joined
    margin = max(scale.span - (right - left[0]), 0.04 * (right - left[0])) / 2
    with page_style():
        figure = new_figure(4.2, 2.1)
        plot = figure.subplots()
        plot.bar(left, heights, width=scale.step * joined * 0.94, align='edge', color='C0')
        plot.set_xlim(left[0] - margin, right + margin)
        plot.set_xlabel(scale.title)
        plot.xaxis.set_major_locator(MaxNLocator(6, integer=scale.span >= 1))
        plot.xaxis.set_major_formatter(lambda value, _: scale.text(value))
        plot.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        plot.yaxis.set_major_formatter('{x:,.0f}')
        plot.spines['left'].set_visible(False)
        plot.tick_params(axis='y', length=0)
        plot.grid(axis='y', alpha=0.8, linewidth=0.6)
        drawn = svg(figure, scale.title)
    last = np.flatnonzero(counts)[-1]
    least, median, most = (scale.text(scale.start + scale.step * (number + middle)) for number in (first, _quantile(counts, 0.5), last))
    beyond = '; the last bar has all that is above' if first + joined * len(heights) <= last else ''
    spread = f'all are {most}' if first == last else f'median {median}, from {least} to {most}{beyond}'
    return drawn, spread


def _streams(found: AuditResult) -> list[tuple[str, ...]]:
    """Rows of the table of streams; none where the dataset is one."""
    rows = list[tuple[str, ...]]()
    for name, manifest in found.streams.items() if found.manifest.streams else ():
        shards = [shard for shard in found.shards if shard.stream == name]
        num_bytes = sum(shard.num_bytes for shard in shards)
        share = 100 * manifest.num_samples / max(1, found.manifest.num_samples)
        rows.append((name, _bucket(manifest), f'{manifest.num_samples:,}', f'{share:.1f} %', f'{len(shards):,}', _size(num_bytes)))
    return rows


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


def _size(num_bytes: int) -> str:
    """Format a size for people: 9.0 MB."""
    value, units = float(num_bytes), ['bytes', 'kB', 'MB', 'GB', 'TB', 'PB']
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f'{value:,.0f} bytes' if units[0] == 'bytes' else f'{value:,.1f} {units[0]}'
