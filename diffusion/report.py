"""One page that shows a run: samples, loss, throughput, time and money. Self-contained, for a browser or an e-mail.

    python -m diffusion.report RUN_FOLDER

Reads `recipe.yaml`, `environment.json`, `log.jsonl`, `events.jsonl`, `samples/` and, where they are, `export/`, `generated/` and `judge.json`; writes
`report.html`. Can be run while the run goes on. Exit code 2 if RUN_FOLDER is no run.
"""

from __future__ import annotations

import argparse
import html
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from PIL import Image

from diffusion.callbacks.jsonl_log import read_log
from diffusion.cost.formulas import SD2_BASE, days
from diffusion.cost.prices import Price, price_of_run
from diffusion.cost.published import ANYSCALE, MOSAICML_TWO_PHASE
from diffusion.goodput import account, propose, rows
from diffusion.json_lines import read_lines
from diffusion.pages import data_uri, figure_png, number_boxes, table, write_page
from diffusion.recipe import RecipeError, recipe_from_yaml, to_dict
from diffusion.recipe.schema import Cost
from diffusion.stopwatch import EVENTS


def write_report(run: Path) -> Path:
    """Write RUN/report.html and return its path.

    Raises:
        FileNotFoundError: the folder has no recipe.yaml.
        RecipeError: it is not one of ours.
    """
    recipe_text = (run / 'recipe.yaml').read_text()
    recipe = to_dict(recipe_from_yaml(recipe_text, str(run / 'recipe.yaml')))
    log = read_log(run / 'log.jsonl')
    environment = _json(run / 'environment.json')
    sections = [
        _headline(recipe, environment, log, _json(run / 'judge.json')),
        _generated(run),
        _grids(run, recipe),
        _curves(log),
        _time_and_money(recipe, environment, log),
        _where_the_time_went(run, recipe),
        _data(run),
        _sd2_cost(),
        f'<h2>Recipe</h2><details><summary>The run, resolved</summary><pre>{html.escape(recipe_text)}</pre></details>',
    ]
    write_page(run / 'report.html', f'{recipe["name"]}: training report', sections, style='.accounts td:last-child { text-align: left; color: #555 }')
    return run / 'report.html'


def _headline(recipe: dict[str, Any], environment: dict[str, Any], log: Sequence[dict[str, float]], judged: dict[str, Any]) -> str:
    last = _last(log)
    numbers = [
        ('batches', f'{last.get("batch", 0):,.0f}'),
        ('images/s', _format(last.get('throughput/images_per_sec'), '{:,.0f}')),
        ('hours so far', _format(last.get('time/elapsed_hours'), '{:.2f}')),
        ('dollars so far', _format(last.get('cost/dollars_so_far'), '${:,.3f}')),
        ('final loss', _format(_mean_loss(log), '{:.4f}')),
    ]
    if 'throughput/mfu' in last:
        numbers.insert(2, ('MFU', f'{last["throughput/mfu"]:.1%}'))
    if judged:
        numbers += [('right foreground', f'{judged["foreground"]:.1%}'), ('right background', f'{judged["background"]:.1%}')]
    device = html.escape(f'{environment.get("num_gpus", 1)} x {environment.get("device", "unknown device")}')
    return (
        f'<h1>{html.escape(recipe["name"])}</h1><div class="lead">U-Net <code>{html.escape(recipe["model"]["unet"])}</code>, '
        f'{recipe["data"]["resolution"]} px, {html.escape(recipe["train"]["duration"])} of {recipe["batch"]["global_size"]} samples, '
        f'on {device}</div>'
        f'{number_boxes(numbers)}'
    )


def _generated(run: Path) -> str:
    pictures = sorted((run / 'generated').glob('[0-9]*.png'))[:16]
    if not pictures:
        return ''
    export = _json(run / 'export' / 'export.json')
    cards = []
    for path in pictures:
        with Image.open(path, formats=('PNG',)) as picture:
            prompt = str(picture.info.get('prompt', ''))
            cards.append(f'<figure>{_img(picture, min_width_px=128)}<figcaption>{html.escape(prompt)}</figcaption></figure>')
    total = len(list((run / 'generated').glob('[0-9]*.png')))
    return (
        f'<h2>The exported model</h2><p>The first {len(cards)} of {total} pictures from the exported pipeline '
        f'({html.escape(str(export.get("weights", "")))} weights), each from the noise of its own seed.</p><div class="cards">{"".join(cards)}</div>'
    )


def _grids(run: Path, recipe: dict[str, Any]) -> str:
    paths = sorted((run / 'samples').glob('ba*.png'))
    if not paths:
        return ''
    figures = []
    for path in paths:
        batch, _, weights = path.stem.removeprefix('ba').partition('-')
        with Image.open(path, formats=('PNG',)) as picture:
            figures.append(f'<figure>{_img(picture, min_width_px=200)}<figcaption>batch {int(batch):,}, {weights} weights</figcaption></figure>')
    prompts = ''.join(f'<li>{html.escape(prompt)}</li>' for prompt in recipe['log']['samples']['prompts'].values())
    return (
        '<h2>Samples over training</h2><p>The same prompts from the same noise, row by row:</p>'
        f'<ol>{prompts}</ol><div class="grids">{"".join(figures)}</div>'
    )


def _curves(log: Sequence[dict[str, float]]) -> str:
    panels = [
        ('loss/train/total', 'training loss', 1.0),
        ('throughput/images_per_sec', 'images/s', 1.0),
        ('throughput/peak_memory_gb', 'peak memory, GB', 1.0),
        ('throughput/data_wait_share', 'waiting for data, %', 100.0),
    ]
    present = [(key, label, factor) for key, label, factor in panels if any(key in record for record in log)]
    if not present:
        return ''
    figure = Figure(figsize=(10, 6), layout='constrained')
    axes = figure.subplots(2, 2)
    for axis in axes.flat:
        axis.set_visible(False)
    for axis, (key, label, factor) in zip(axes.flat, present, strict=False):
        points = [(record['batch'], record[key] * factor) for record in log if key in record]
        axis.set_visible(True)
        axis.plot(*zip(*points, strict=True), linewidth=1, alpha=0.45 if 'loss' in key else 1)
        if 'loss' in key:
            axis.plot([x for x, _ in points], _smooth([y for _, y in points]), linewidth=2, color='C0')
            axis.set_yscale('log')
        else:
            axis.set_ylim(0, 1.15 * max(y for _, y in points) or 1)
        axis.set_title(label)
        axis.set_xlabel('batch')
        axis.grid(alpha=0.3)
    return f'<h2>Loss, speed and memory</h2>{_figure(figure, "curves")}'


def _time_and_money(recipe: dict[str, Any], environment: dict[str, Any], log: Sequence[dict[str, float]]) -> str:
    last = _last(log)
    price = _price(recipe, environment)
    rows = [
        ('device', f'{environment.get("num_gpus", 1)} x {environment.get("device", "?")}'),
        ('samples seen', f'{last.get("batch", 0) * recipe["batch"]["global_size"]:,.0f}'),
        ('images/s per GPU', _format(last.get('throughput/images_per_sec_per_gpu'), '{:,.1f}')),
        ('MFU', _format(last.get('throughput/mfu'), '{:.1%}')),
        ('peak memory', _format(last.get('throughput/peak_memory_gb'), '{:.2f} GB')),
        ('waiting for data', _format(last.get('throughput/data_wait_share'), '{:.1%}')),
        ('training, wall time', _format(last.get('time/elapsed_hours'), '{:.3f} h')),
        ('to go', _format(last.get('time/remaining_hours'), '{:.3f} h')),
        ('price', str(price) if price is not None else 'not known'),
        ('spent', _format(last.get('cost/dollars_so_far'), '${:,.4f}')),
        ('to spend', _format(last.get('cost/dollars_to_go'), '${:,.4f}')),
    ]
    return '<h2>Time and money</h2>' + table(('', ''), rows)


def _price(recipe: dict[str, Any], environment: dict[str, Any]) -> Price | None:
    """The one that the run reckoned with; a run of before prices were recorded has at most a number of its own."""
    if 'price' in environment:
        return Price(**environment['price']) if environment['price'] is not None else None
    return price_of_run(Cost(**recipe['cost'])) if recipe['cost']['price_per_gpu_hour'] is not None else None


# Told apart without colour, and neighbours in the bar by their brightness too: (brightness 0..1, hatch).
TEXTURES = {
    'compute': (0.45, ''), 'recompute': (0.95, 'xxx'), 'start': (0.8, '///'), 'data wait': (1.0, '...'), 'save': (0.25, ''),
    'upload': (0.6, '+++'),
    'evaluation': (0.9, '---'), 'sampling': (0.7, '|||'), 'stopped': (1.0, ''), 'other': (0.0, ''),
}  # fmt: skip


def _where_the_time_went(run: Path, recipe: dict[str, Any]) -> str:
    accounts = account(read_lines(run / EVENTS))
    if not accounts.wall_sec:
        return ''
    figure = Figure(figsize=(10, 1.5), layout='constrained')
    axis = figure.subplots()
    left = 0.0
    for name, (brightness, hatch) in TEXTURES.items():
        share = 100 * accounts.sec[name] / accounts.wall_sec
        if share >= 0.05:
            axis.barh(0, share, left=left, color=str(brightness), hatch=hatch, edgecolor='black', linewidth=0.8, label=f'{name} {share:.1f} %')
        left += share
    axis.set_xlim(0, 100)
    axis.set_yticks([])
    axis.set_xlabel('% of the wall time')
    for side in ('left', 'right', 'top'):
        axis.spines[side].set_visible(False)
    figure.legend(loc='outside upper left', ncols=5, frameon=False, handlelength=2.5, handleheight=1.3)
    proposal = propose(accounts, recipe['checkpoint']['every'], recipe['faults']['gpu_hours_between_failures'])
    return (
        f'<h2>Where the time went</h2><p>{accounts.goodput:.1%} of the wall time computed steps that are in the weights now.</p>'
        f'{_figure(figure, "where the time went")}<div class="accounts">{table(("", "time", "share", ""), rows(accounts))}</div>'
        + (f'<p>{html.escape(str(proposal))}.</p>' if proposal is not None else '')
    )


def _figure(figure: Figure, alt: str) -> str:
    return f'<img alt="{alt}" src="{data_uri(figure_png(figure))}">'


def _data(run: Path) -> str:
    rows = []
    for path in sorted(run.glob('*/manifest.json')):
        manifest = _json(path)
        dropped = ', '.join(f'{reason}: {count:,}' for reason, count in manifest['dropped'].items()) or 'none'
        rows.append((path.parent.name, manifest['kind'], f'{manifest["attempted"]:,}', f'{manifest["num_samples"]:,}', dropped))
    return '<h2>Data</h2>' + table(('data set', 'kind', 'attempted', 'kept', 'dropped'), rows) if rows else ''


def _sd2_cost() -> str:
    rows = [
        (
            f'{row.num_gpus} x {row.gpu}',
            f'{row.images_per_sec[256]:,.0f}',
            f'{row.images_per_sec[512]:,.0f}',
            f'{days(row.hours(SD2_BASE)):,.2f}',
            f'${row.price_per_gpu_hour:.2f}',
            f'${row.dollars(SD2_BASE):,.0f}',
            row.source,
        )
        for row in (*MOSAICML_TWO_PHASE, ANYSCALE)
    ]
    samples = ' and '.join(f'{phase.num_samples / 1e9:.2f} billion samples at {phase.resolution} px' for phase in SD2_BASE)
    return (
        f'<h2>What this recipe shape costs for Stable Diffusion 2 base</h2><p>By published throughputs: {samples}, '
        'U-Net only, latents encoded beforehand. Encoding, storage and restarts come on top.</p>'
        + table(('GPUs', 'images/s at 256', 'at 512', 'days', 'per GPU-hour', 'dollars', 'throughput from'), rows)
    )


def _img(picture: Image.Image, min_width_px: int) -> str:
    """Inline PNG; small pictures are enlarged by the browser, pixel by pixel."""
    content = io.BytesIO()
    picture.save(content, 'PNG')
    width = max(picture.width, min_width_px)
    return f'<img class="pixels" width="{width}" alt="" src="{data_uri(content.getvalue())}">'


def _last(log: Sequence[dict[str, float]]) -> dict[str, float]:
    """The latest value of every metric."""
    merged: dict[str, float] = {}
    for record in log:
        merged.update(record)
    return merged


def _mean_loss(log: Sequence[dict[str, float]], count: int = 10) -> float | None:
    losses = [record['loss/train/total'] for record in log if 'loss/train/total' in record][-count:]
    return sum(losses) / len(losses) if losses else None


def _smooth(values: Sequence[float], reach: int = 5) -> list[float]:
    """The mean over `reach` values to either side, fewer at the ends."""
    windows = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _format(value: float | None, pattern: str) -> str:
    return 'not measured' if value is None else pattern.format(value)


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def main() -> int:
    parser = argparse.ArgumentParser(prog='python -m diffusion.report', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('run', type=Path, metavar='RUN_FOLDER')
    args = parser.parse_args()
    try:
        print(f'report: {write_report(args.run)}')
    except FileNotFoundError as error:
        print(f'{error.filename}: no such file; {args.run} is not the folder of a run', file=sys.stderr)
        return 2
    except RecipeError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == '__main__':
    raise SystemExit(main())
