"""Where a plan's images per second come from: a file of measurements, a number, a published table, or an assumed MFU; chosen once a recipe."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from diffusion.common.text import did_you_mean
from diffusion.cost.measured import series_of_file
from diffusion.cost.published import PUBLISHED, PublishedThroughput
from diffusion.cost.scaling import Point
from diffusion.cost.sources import Asked, Assumed, Given, Origin, OriginError, Series
from diffusion.cost.uncertain import Uncertain, draw, spread_text

# Where nothing is published or measured. Tuned runs of this U-Net reached 28 to 36 % on one node (MosaicML, Anyscale, MLPerf) and what is not
# tuned less; several nodes without a fast network reach half of it.
DEFAULT_MFU = [0.24, 0.36]
PUBLISHED_UNET = 'sd2-base'  # of all published rows


def origins(throughput: str | None, mfu: Uncertain | None, asked: Sequence[Asked]) -> list[Origin]:
    """One for each phase, as the command line says.

    Args:
        throughput: a file, `11600@128`, `256=11600@128,512=4590@128`, `published`, `published:TABLE`, or None: published if there is such a
            bar, else the default MFU.
        mfu: 0..1, or a range.

    Raises:
        OriginError: all phases for which there is none.
    """
    found, errors = list[Origin](), list[str]()
    for one in asked:
        try:
            found.append(_origin(throughput, mfu, one, several=len({one.resolution for one in asked}) > 1))
        except OriginError as error:
            errors.append(str(error))
    if errors:
        raise OriginError('\n'.join(dict.fromkeys(errors)))
    return found


def _origin(throughput: str | None, mfu: Uncertain | None, asked: Asked, several: bool) -> Origin:
    if mfu is not None:
        return Assumed(draw(mfu, 'mfu'), asked.facts.counts.flop, asked.gpu, asked.peak, '')
    if throughput is None:
        bars = _published(asked)
        return bars if bars is not None else _default(asked)
    name, _, table = throughput.partition(':')
    if name == 'published':
        bars = _published(asked, table)
        if bars is None:
            raise OriginError(f'--throughput {throughput}: nothing was published for {asked.what}; {_bars_text(table)}')
        return bars
    if re.fullmatch(r'[\d.,=@e+]+', throughput):
        return _given(throughput, asked, several)
    return series_of_file(Path(throughput), asked)


def _default(asked: Asked) -> Assumed:
    facts, mfu, why = asked.facts, draw(DEFAULT_MFU, 'mfu'), f' (nothing is published for {asked.what}; give --throughput or --mfu)'
    encoders = facts.counts.encoders
    if facts.encodes_images and encoders is not None:  # as many FLOP/s, of which the VAE takes its share
        why += f', {spread_text(100 * mfu, 0)} % with the VAE in the step counted'
        mfu = mfu * facts.counts.flop / (facts.counts.flop + encoders.vae_flop)
    if facts.recipe.train.checkpoint_activations:
        mfu = mfu * 3 / 4
        why += ', a quarter less because activations are computed twice'
    return Assumed(mfu, facts.counts.flop, asked.gpu, asked.peak, why)


def _published(asked: Asked, table: str = '') -> Series | None:
    """The published series of the same GPU, resolution and kind with the most points, and of such the fastest; None if there is none."""
    tables = sorted({row.table for row in PUBLISHED})
    if table and table not in tables:
        raise OriginError(f'--throughput published:{table}: no such table{did_you_mean(table, tables)} There are {", ".join(tables)}')
    if asked.facts.recipe.model.network != PUBLISHED_UNET:
        return None
    series: dict[tuple[str, str, str], list[PublishedThroughput]] = {}
    for row in PUBLISHED:
        fits = row.gpu == asked.gpu and asked.resolution in row.images_per_sec and ('VAE' in row.inside) == asked.facts.encodes_images
        if fits and not row.extrapolated and table in ('', row.table):
            series.setdefault((row.table, row.configuration, row.inside), []).append(row)
    if not series:
        return None

    def rank(rows: list[PublishedThroughput]) -> tuple[int, float]:
        return len({row.num_gpus for row in rows}), max(row.images_per_sec[asked.resolution] / row.num_gpus for row in rows)

    (name, configuration, inside), rows = max(series.items(), key=lambda item: rank(item[1]))
    points = tuple(Point(row.num_gpus, row.global_size, row.images_per_sec[asked.resolution]) for row in rows)
    sources = ' and '.join(dict.fromkeys(row.source for row in rows))
    text = f'{name} ({sources}{", " + configuration if configuration else ""}; {inside} in the step)'
    return Series('published', text, points, asked.facts.recipe.batch.global_size, asked.gpus_per_node)


def _bars_text(table: str) -> str:
    rows = [row for row in PUBLISHED if table in ('', row.table)]
    bars = dict.fromkeys(
        f'{row.table}: {row.gpu} at {" and ".join(map(str, row.images_per_sec))} px, {"images" if "VAE" in row.inside else "latents"}' for row in rows
    )
    return f'there are {"; ".join(bars)} (all of the U-Net {PUBLISHED_UNET}); choose with --gpu, or give --throughput NUMBER or --mfu'


def _given(throughput: str, asked: Asked, several: bool) -> Given:
    """`RATE`, `RATE@GPUS`, or `PX=RATE[@GPUS]` with commas between."""
    rates: dict[int | None, tuple[float, int | None]] = {}
    for item in throughput.split(','):
        match = re.fullmatch(r'(?:(\d+)=)?([\d.]+(?:e\+?\d+)?)(?:@(\d+))?', item)
        try:
            rate = float(match[2]) if match else 0.0
        except ValueError:
            rate = 0.0
        if match is None or not 0 < rate < math.inf or match[3] == '0':
            raise OriginError(
                f"--throughput {throughput}: '{item}' is not a rate; write images/s of all GPUs and their number, 11600@128 or 256=11600@128"
            )
        px = int(match[1]) if match[1] else None
        if px in rates:
            raise OriginError(f'--throughput {throughput}: two rates {f"at {px} px" if px else "without a resolution"}; leave out one')
        rates[px] = rate, int(match[3]) if match[3] else None
    if asked.resolution not in rates and (None not in rates or several):
        have = 'a rate without a resolution' if None in rates else f'rates at {", ".join(map(str, rates))} px'
        raise OriginError(
            f'--throughput {throughput}: {have}, and {asked.facts.name} trains at {asked.resolution} px; add {asked.resolution}=RATE@GPUS'
        )
    rate, num_gpus = rates.get(asked.resolution) or rates[None]
    if num_gpus is None:
        num_gpus = next((count for _, count in reversed(rates.values()) if count is not None), None)
    if num_gpus is None:
        if len(asked.gpus) > 1:
            raise OriginError(f'--throughput {throughput}: of how many GPUs? write {rate:g}@GPUS, or plan for one number of GPUs (--gpus N)')
        num_gpus = asked.gpus[0]
    return Given(rate, num_gpus)
