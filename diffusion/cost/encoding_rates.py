"""Images per second of one encoder: measured, published, or assumed and scaled.

In this order: rows of benchmarks.encode of that GPU; cost/assumptions.yaml, if it says it of that GPU; published, scaled by FLOP; and else what is
assumed of another GPU, by peak FLOP/s. Numbers may be arrays of draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diffusion.common.files import read_json_lines
from diffusion.contracts.errors import InputError
from diffusion.cost.assumptions import Assumptions, encoding_at
from diffusion.cost.formulas import Number
from diffusion.cost.hardware import gpu_name, peak_flops
from diffusion.cost.prices import gpu_of
from diffusion.cost.published import ANYSCALE_ENCODING, PublishedEncoding
from diffusion.cost.results import Result
from diffusion.cost.uncertain import is_uncertain, median, spread_text, two_digits


class EncodingRateError(InputError):
    """A file of measured encoding rates cannot be used."""


@dataclass(frozen=True)
class EncodingRate:
    """Images per second of one encoder."""

    images_per_sec: Number
    how: str  # measured, published or assumed
    source: str

    @property
    def amount(self) -> str:
        """In words: of an assumption two digits."""
        is_point = self.how == 'assumed' and not is_uncertain(self.images_per_sec)
        return two_digits(median(self.images_per_sec)) if is_point else spread_text(self.images_per_sec)

    def of(self, share: float) -> EncodingRate:
        """The rate of a share of the GPU."""
        return self if share == 1 else EncodingRate(self.images_per_sec * share, self.how, f'{self.source}; {share:g} of it')


def read_encoding_rows(path: Path) -> list[Result]:
    """Read the rows of benchmarks.encode that have a rate; others are left out, and of equal settings the latest counts.

    Raises:
        EncodingRateError: there is no such file, or no such row in it.
    """
    try:
        rows = [Result(row) for row in read_json_lines(path) if row.get('kind') == 'encode'] if path.is_file() else None
    except OSError as error:
        raise EncodingRateError(f'--encoding-rates {path}: cannot be read: {error.strerror}') from None
    if rows is None:
        raise EncodingRateError(f'--encoding-rates {path}: no such file; python -m benchmarks.encode --out FILE.jsonl writes one')
    rated = [row for row in rows if row.images_per_sec is not None and row.count('resolution') is not None and row.text('device')]
    if not rated:
        raise EncodingRateError(f'--encoding-rates {path}: has no row of benchmarks.encode with device, resolution and images_per_sec')
    return rated


def _is_of(row: Result, gpu: str | None) -> bool:
    device = row.text('device')
    return gpu_name(device) == gpu and (gpu is not None or 'nvidia' not in device.lower())


def measured_rate(rows: Sequence[Result], gpu: str | None, resolution: int) -> EncodingRate | None:
    """Return the rate of one encoder on a GPU (None: on CPU cores) by measured rows; None if there are none of it.

    A row of the same resolution comes first, then one without text, then the one of most images/s per encoder: what can be reached. From another
    resolution it is scaled by pixels, and assumed.
    """
    rows = [row for row in rows if _is_of(row, gpu)]
    if not rows:
        return None

    def one(row: Result) -> float:
        return (row.images_per_sec or 0.0) / (row.count('num_encoders') or 1)

    def preference(row: Result) -> tuple[float, ...]:
        return -abs(math.log((row.count('resolution') or 1) / resolution)), not row.row.get('with_text'), one(row)

    best = max(rows, key=preference)
    px = best.count('resolution') or resolution
    text = ' with text' if best.row.get('with_text') else ''
    source = f'{best.text("device")} at {px} px{text}, engine {best.text("engine") or "unknown"}'
    if px == resolution:
        return EncodingRate(one(best), 'measured', source)
    return EncodingRate(one(best) * (px / resolution) ** 2, 'assumed', f'{one(best):,.3g} images/s measured on {source}, by pixels')


def published_rate(row: PublishedEncoding, gpu: str | None, resolution: int, flop: float | None) -> EncodingRate | None:
    """Return the published rate scaled by FLOP of a sample (None: not counted, and by pixels); None for another GPU."""
    if gpu != row.gpu:
        return None
    needed = row.flop_per_image * (resolution / row.resolution) ** 2 if flop is None else flop
    source = f'{row.images_per_sec:,.0f} images/s of {row.what} ({row.source})'
    if (needed, resolution) == (row.flop_per_image, row.resolution):
        return EncodingRate(row.images_per_sec, 'published', source)
    return EncodingRate(row.images_per_sec * row.flop_per_image / needed, 'assumed', f'{source}, by FLOP')


def rate_of_gpu(
    gpu: str | None, training_gpu: str, resolution: int, vae_flop: float | None, assumed: Assumptions, measured: Sequence[Result] = ()
) -> EncodingRate | None:
    """Return the rate of one GPU that encodes images without text; None if nothing is known of it.

    Args:
        gpu: by the names of prices.yaml; None: CPU cores, which only measured rows know.
        training_gpu: what `encoding.N.gpu: null` means.
    """
    if found := measured_rate(measured, gpu, resolution):
        return found
    nearest = encoding_at(assumed.encoding, resolution)
    if gpu is None or nearest is None:
        return published_rate(ANYSCALE_ENCODING, gpu, resolution, vae_flop)
    size, source = nearest
    assumed_gpu = training_gpu if size.gpu is None else gpu_of(size.gpu)
    if gpu == assumed_gpu:
        return EncodingRate(size.images_per_gpu_sec, 'assumed', source)
    if found := published_rate(ANYSCALE_ENCODING, gpu, resolution, vae_flop):
        return found
    peak, other = peak_flops(gpu), peak_flops(assumed_gpu or '')
    if peak is None or other is None:
        return None
    share = '' if vae_flop is None else f', {spread_text(100 * size.images_per_gpu_sec * vae_flop / other, 0)} % of the peak'
    return EncodingRate(size.images_per_gpu_sec * peak / other, 'assumed', f'{source} of {assumed_gpu}{share}; {gpu} by peak FLOP/s')
