"""Images per second of a plan, one source per recipe: an assumed MFU, a number, or measured points of a file or a published table.

Asked for a number of GPUs that was measured, points answer with the measurement, and else with the scaling law's prediction and its uncertainty
(scaling.py). Of a file of benchmarks.throughput the rows that are most like the recipe count, and their differences from it are warnings.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from diffusion.common.text import counted, did_you_mean
from diffusion.contracts.errors import InputError
from diffusion.cost.facts import Cluster, Facts
from diffusion.cost.formulas import Number, Phase, Uncertain, draw, equal_shares, is_uncertain, median, run_hours, spread_text, two_digits
from diffusion.cost.hardware import PEAK_FLOPS, gpu_name, peak_flops
from diffusion.cost.results import Result, ResultError, gpus_per_node, read_results
from diffusion.cost.scaling import ScalingLaws, ScalingPoint
from diffusion.recipe.averaging import profiles

# Where nothing is published or measured. Tuned runs of SD2's U-Net reached 28 to 36 % on one node (MosaicML, Anyscale, MLPerf) and others less;
# several nodes without a fast network reach half of it.
DEFAULT_MFU = [0.24, 0.36]
# Of an adapter, a few images a step on one machine that anybody lends. SaladCloud's mean job took 2.66 s a step: 13 % of an RTX 4090, activations
# computed twice included, if its batch was its script's four images of 1024 px, and 3 % if it was one; the post says neither.
ADAPTER_MFU = [0.08, 0.30]
# The runs that DEFAULT_MFU is of had SD2's text encoder in the step, 8 % of the network's FLOP at 256 px: what takes more is counted.
TEXT_SHARE = 0.1
PUBLISHED_NETWORK = 'sd2-base'  # of all published rows
ALIKE = ('precision', 'compile', 'checkpoint_activations', 'ema')  # in all rows of a series; sharding and micro-batch change with the number of GPUs


@dataclass(frozen=True)
class PublishedThroughput:
    """One row of a published table, of the U-Net of Stable Diffusion 2 (865.9 M parameters), to plan with and to compare against.

    Latents are encoded beforehand where `inside` does not say otherwise. tests/cost/test_published.py works out the days and dollars of the sources
    from these rows.
    """

    table: str
    source: str
    gpu: str  # as in diffusion/cost/prices.yaml
    num_gpus: int
    images_per_sec: dict[int, float]
    price_per_gpu_hour: float | None  # None: the source names none
    inside: str = 'U-Net'  # what runs in a step
    extrapolated: bool = False  # by its authors
    global_size: int = 2048  # images per step of all GPUs together
    configuration: str = ''  # what tells it from other rows of its table

    def hours(self, phases: Sequence[Phase]) -> float:
        """Wall hours of phases one after another."""
        return run_hours(phases, self.images_per_sec)

    def dollars(self, phases: Sequence[Phase]) -> float:
        """Price of the phases, by a source that names one of a GPU-hour."""
        assert self.price_per_gpu_hour is not None, f'{self.source} names no price'
        return self.hours(phases) * self.num_gpus * self.price_per_gpu_hour


# The MosaicML post, January 2023 (table of mosaicml/diffusion-benchmark): encoders in the step, all samples at 512 px, $2 per A100-hour.
MOSAICML_2023_01 = tuple(
    PublishedThroughput('mosaicml-2023-01', 'MosaicML, 2023-01', 'a100-40gb', gpus, {512: rate}, 2.00, 'U-Net, VAE, text', gpus == 256)
    for gpus, rate in ((8, 128.2), (16, 254.0), (32, 485.7), (64, 912.2), (128, 1618.4), (256, 2589.4))
)

# README of mosaicml/diffusion, April 2023: latents encoded beforehand, $2 per A100-hour.
MOSAICML_TWO_PHASE = tuple(
    PublishedThroughput('mosaicml-two-phase', 'mosaicml/diffusion README, 2023', 'a100-40gb', gpus, {256: at_256, 512: at_512}, 2.00)
    for gpus, at_256, at_512 in ((8, 1100, 290), (16, 2180, 585), (32, 4080, 1195), (64, 8530, 2340), (128, 11600, 4590))
)

P4DE_DOLLARS_PER_HOUR = 40.96  # p4de.24xlarge, 8 A100-80GB, on demand in us-west-2, as the Anyscale post prints it

# The Anyscale post, 2024, tables 3a and 3b: one change a row, each on top of those above. Global batch of its README (anyscale/templates).
_CHANGES = ('+ EFA', '+ FSDP', '+ torch.compile')
ANYSCALE_TABLE_3 = tuple(
    PublishedThroughput(
        'anyscale-table-3', f'Anyscale, 2024, table {part}', gpu, gpus, {256: at_256, 512: at_512}, price, 'U-Net', False, 4096, change
    )
    for part, gpu, gpus, price, rates in (
        ('3a', 'a100-40gb', 16, None, ((1269, 474), (1925, 667), (2910, 805))),
        ('3b', 'a100-80gb', 32, P4DE_DOLLARS_PER_HOUR / 8, ((4068, 1029), (5014, 1168), (5908, 1349))),
    )
    for change, (at_256, at_512) in zip(_CHANGES, rates, strict=True)
)

# With everything on, 4 p4de.24xlarge on demand: what its table 4 adds up.
ANYSCALE = ANYSCALE_TABLE_3[-1]


# Table 2 of that post: 40 A10G that encode at 256 px with text, next to training at 4,068 images/s. The post has no rate of one: derived, if the 40
# keep up and no more. FLOP of a forward pass of VAE (272.7 GFLOP) and text encoder (45.1), as diffusion.plan counts them.
A10G_IMAGES_PER_SEC, A10G_FLOP = ANYSCALE_TABLE_3[3].images_per_sec[256] / 40, 3.1785e11

# MLPerf Training, Stable Diffusion at 512 px, from the result logs: images/s over the whole run; latents and text encoded beforehand.
MLPERF = tuple(
    PublishedThroughput('mlperf', f'MLPerf Training {version}, {submitter}', gpu, gpus, {512: rate}, None, 'U-Net', False, global_size)
    for version, submitter, gpu, gpus, global_size, rate in (
        ('v4.1', 'Dell', 'h100', 4, 256, 580),
        ('v4.1', 'NVIDIA', 'h100', 8, 256, 1099),
        ('v4.1', 'NVIDIA', 'h100', 64, 1024, 7934),
        ('v4.1', 'NVIDIA', 'h100', 512, 2048, 38355),
        ('v5.0', 'HPE', 'h200', 8, 512, 1197),
        ('v5.0', 'HPE', 'h200', 32, 1024, 4455),
        ('v5.0', 'Dell', 'b200', 8, 256, 2194),
    )
)

PUBLISHED = (*MOSAICML_2023_01, *MOSAICML_TWO_PHASE, *ANYSCALE_TABLE_3, *MLPERF)


class RateError(InputError):
    """The throughput that was named cannot be used for a recipe."""


@dataclass(frozen=True)
class Rate:
    """Images per second of all GPUs of a training run together, or of one encoder, and their origin."""

    images_per_sec: Number
    how: str  # measured, published, predicted, scaled, given, limited or assumed
    note: str = ''  # source, range and uncertainty
    draws: np.ndarray | None = None  # of a prediction or an assumption, for the ranges of the bill

    @property
    def drawn(self) -> Number:
        """Draws, if there are any, or the number."""
        return self.images_per_sec if self.draws is None else self.draws

    @property
    def amount(self) -> str:
        """Rate in words; two digits of an assumption."""
        is_point = self.how == 'assumed' and not is_uncertain(self.images_per_sec)
        return two_digits(median(self.images_per_sec)) if is_point else spread_text(self.images_per_sec)


@dataclass(frozen=True)
class RateSource:
    """Origin of the images per second of a recipe."""

    text: str  # of the page
    rate: Callable[[int], Rate]  # by number of GPUs
    warnings: Sequence[str] = ()
    rows: Mapping[tuple[int, int], Result] = field(default_factory=dict)  # of a file, by number of GPUs and global batch


def rate_sources(throughput: str | None, mfu: Uncertain | None, recipes: Sequence[Facts], clusters: Sequence[Cluster]) -> list[RateSource]:
    """Choose one source for each recipe.

    Args:
        throughput: a file, `11600@128`, `256=11600@128,512=4590@128`, `published`, `published:TABLE`, or None: published if there is such a
            series, else the default MFU.
        mfu: 0..1, or a range.
        clusters: of one GPU, that are planned for.

    Raises:
        RateError: all recipes for which there is none.
    """
    found, errors = list[RateSource](), list[str]()
    cluster, gpus, several = clusters[0], [one.num_gpus for one in clusters], len({facts.resolution for facts in recipes}) > 1
    for facts in recipes:
        try:
            if mfu is not None:
                found.append(assumed_mfu(draw(mfu, 'mfu'), facts.counts.flop, cluster.gpu))
            elif throughput is None:
                found.append(_published(facts, cluster) or _default(facts, cluster.gpu))
            elif throughput.partition(':')[0] == 'published':
                table = throughput.partition(':')[2]
                source = _published(facts, cluster, table)
                if source is None:
                    raise RateError(f'--throughput {throughput}: nothing was published for {_wanted(facts, cluster.gpu)}; {_tables_text(table)}')
                found.append(source)
            elif re.fullmatch(r'[\d.,=@e+]+', throughput):
                found.append(_given(throughput, facts, gpus, several))
            else:
                found.append(_of_file(Path(throughput), facts, cluster))
        except RateError as error:
            errors.append(str(error))
    if errors:
        raise RateError('\n'.join(dict.fromkeys(errors)))
    return found


def _wanted(facts: Facts, gpu: str) -> str:
    kind = 'images' if facts.encodes_images else 'latents'
    return f'{facts.name} (network {facts.recipe.trained_network}, {facts.resolution} px, {kind}, {gpu})'


def assumed_mfu(mfu: Number, flop: int, gpu: str, why: str = '') -> RateSource:
    """images/s = MFU x peak FLOP/s x GPUs / FLOP of a sample: by the definition of MFU, which counts the network alone.

    The MFU is 0..1, or draws of it; RateError if the peak of the GPU is not known.
    """
    peak = peak_flops(gpu)
    if peak is None:
        known = ', '.join(PEAK_FLOPS)
        raise RateError(f'--mfu: the peak FLOP/s of {gpu} are not known, only those of {known}; give --throughput, or another --gpu')
    per_gpu = mfu * peak / flop
    return RateSource(
        f'assumed: an MFU of {spread_text(100 * mfu, 1)} % of {peak / 1e12:,.0f} TFLOP/s of {gpu} on any number of GPUs{why}',
        lambda num_gpus: Rate(median(per_gpu * num_gpus), 'assumed', draws=per_gpu * num_gpus if is_uncertain(per_gpu) else None),
    )


def _default(facts: Facts, gpu: str) -> RateSource:
    mfu = draw(DEFAULT_MFU if facts.recipe.adapter is None else ADAPTER_MFU, 'mfu')
    why = f' (nothing is published for {_wanted(facts, gpu)}; give --throughput or --mfu)'
    encoders, flop = facts.counts.encoders, facts.counts.flop
    if encoders is not None:  # as many FLOP/s, of which the encoders take their share
        inside = {'VAE': encoders.vae_flop} if facts.encodes_images else {}
        inside |= {'text encoder': encoders.text_flop} if facts.recipe.adapter is None and encoders.text_flop > TEXT_SHARE * flop else {}
        if inside:
            why += f', {spread_text(100 * mfu, 0)} % with the {" and the ".join(inside)} in the step counted'
            mfu = mfu * flop / (flop + sum(inside.values()))
    if facts.recipe.train.checkpoint_activations:
        mfu = mfu * 3 / 4
        why += ', a quarter less because activations are computed twice'
    return assumed_mfu(mfu, flop, gpu, why)


def _given(throughput: str, facts: Facts, gpus: Sequence[int], several: bool) -> RateSource:
    """Read `RATE`, `RATE@GPUS`, or `PX=RATE[@GPUS]` with commas between, which scale linearly to other numbers of GPUs."""
    rates: dict[int | None, tuple[float, int | None]] = {}
    for item in throughput.split(','):
        match = re.fullmatch(r'(?:(\d+)=)?(\d*\.?\d+\.?(?:e\+?\d+)?)(?:@(\d+))?', item)
        if match is None or not 0 < float(match[2]) < math.inf or match[3] == '0':
            raise RateError(
                f"--throughput {throughput}: '{item}' is not a rate; write images/s of all GPUs and their number, 11600@128 or 256=11600@128"
            )
        px = int(match[1]) if match[1] else None
        if px in rates:
            raise RateError(f'--throughput {throughput}: two rates {f"at {px} px" if px else "without a resolution"}; leave out one')
        rates[px] = float(match[2]), int(match[3]) if match[3] else None
    px = facts.resolution
    if px not in rates and (None not in rates or several):
        have = 'a rate without a resolution' if None in rates else f'rates at {", ".join(map(str, rates))} px'
        raise RateError(f'--throughput {throughput}: {have}, and {facts.name} trains at {px} px; add {px}=RATE@GPUS')
    images_per_sec, on_gpus = rates.get(px) or rates[None]
    on_gpus = on_gpus or next((count for _, count in reversed(rates.values()) if count is not None), None)
    if on_gpus is None and len(gpus) > 1:
        raise RateError(f'--throughput {throughput}: of how many GPUs? write {images_per_sec:g}@GPUS, or plan for one number of GPUs (--gpus N)')
    given_on = on_gpus or gpus[0]

    def rate(num_gpus: int) -> Rate:
        if num_gpus == given_on:
            return Rate(images_per_sec, 'given')
        return Rate(images_per_sec * num_gpus / given_on, 'scaled', f'linearly from {counted(given_on, "GPU")}')

    return RateSource(f'given: {images_per_sec:,.6g} images/s on {counted(given_on, "GPU")}; on other numbers of GPUs scaled linearly', rate)


def points_and_laws(laws: ScalingLaws, how: str, name: str, global_size: int) -> RateSource:
    """Return points of one table or file, measured or published, and the scaling laws through them, for a recipe's global batch."""

    def rate(num_gpus: int) -> Rate:
        """Return the measurement, or else the slower law's prediction with that of the other as a note."""
        point = laws.measured_at(num_gpus, global_size)
        if point is not None:
            return Rate(point.images_per_sec, how)
        slower, *_ = both = laws.slowest_first(num_gpus, global_size)
        predicted, *others = (law.predict(num_gpus, global_size) for law in both)
        if len(laws.points) == 1:
            only = laws.points[0]
            batch = '' if only.global_size == global_size else f' and a global batch of {only.global_size:,}'
            return Rate(predicted.images_per_sec, 'scaled', f'linearly from {counted(only.num_gpus, "GPU")}{batch}')
        draws = None
        if slower.degrees_of_freedom:  # within the 95 % interval, as a prediction of few points has tails that no machine has
            draws = slower.quantiles(num_gpus, global_size, np.clip(equal_shares(f'images_per_sec {name}'), 0.025, 0.975))
        other = [f'the lower of two laws, with and without outliers; the other says {one.images_per_sec:,.1f}' for one in others]
        return Rate(predicted.images_per_sec, 'predicted', '; '.join([str(predicted), *other]), draws)

    law = laws.fit_without_outliers
    counts = ', '.join(str(num_gpus) for num_gpus in dict.fromkeys(point.num_gpus for point in laws.points))
    sizes = sorted({point.global_size for point in laws.points})
    batches = f' with global batches of {", ".join(f"{size:,}" for size in sizes)}' if len(sizes) > 1 else ''
    text = f'{how}: {name}, on {counts} GPUs{batches}; else predicted: {law}'
    for point in law.left_out:
        text += f'; {counted(point.num_gpus, "GPU")} ({point.images_per_sec:,.6g} images/s) is an outlier that this law leaves out'
    return RateSource(f'{text}; {law.doubt}' if law.doubt else text, rate)


def _published(facts: Facts, cluster: Cluster, table: str = '') -> RateSource | None:
    """Return the published series of the same GPU, resolution and kind with the most points, and of such the fastest; None if there is none."""
    tables, px = sorted({row.table for row in PUBLISHED}), facts.resolution
    if table and table not in tables:
        raise RateError(f'--throughput published:{table}: no such table{did_you_mean(table, tables)} There are {", ".join(tables)}')
    if facts.recipe.trained_network != PUBLISHED_NETWORK:
        return None
    series: dict[tuple[str, str, str], list[PublishedThroughput]] = {}
    for row in PUBLISHED:
        matches = row.gpu == cluster.gpu and px in row.images_per_sec and ('VAE' in row.inside) == facts.encodes_images
        if matches and not row.extrapolated and table in ('', row.table):
            series.setdefault((row.table, row.configuration, row.inside), []).append(row)
    if not series:
        return None
    rows = max(series.values(), key=lambda rows: (len({row.num_gpus for row in rows}), max(row.images_per_sec[px] / row.num_gpus for row in rows)))
    first, sources = rows[0], ' and '.join(dict.fromkeys(row.source for row in rows))
    name = f'{first.table} ({sources}{", " + first.configuration if first.configuration else ""}; {first.inside} in the step)'
    points = tuple(ScalingPoint(row.num_gpus, row.global_size, row.images_per_sec[px]) for row in rows)
    return points_and_laws(ScalingLaws(points=points, gpus_per_node=cluster.gpus_per_node), 'published', name, facts.recipe.batch.global_size)


def _tables_text(table: str) -> str:
    rows = dict.fromkeys(
        f'{row.table}: {row.gpu} at {" and ".join(map(str, row.images_per_sec))} px, {"images" if "VAE" in row.inside else "latents"}'
        for row in PUBLISHED
        if table in ('', row.table)
    )
    return f'there are {"; ".join(rows)} (all of the network {PUBLISHED_NETWORK}); choose with --gpu, or give --throughput NUMBER or --mfu'


def _of_file(path: Path, facts: Facts, cluster: Cluster) -> RateSource:
    """Return the latest rows of the recipe's network, resolution and kind, one per number of GPUs and global batch.

    Rows of the recipe's own global batch come first; the law goes through those of others too, as it takes the batch into account.
    """
    if not path.is_file():
        missing = 'no such file; give one that benchmarks.throughput wrote, a number such as 11600@128, published, or --mfu instead'
        raise RateError(f'--throughput {path}: {"is a folder; give the file of results in it" if path.is_dir() else missing}')
    try:
        results = read_results([path])
    except ResultError as error:
        raise RateError(f'--throughput {error}') from error
    recipe, kinds = facts.recipe, ('images',) if facts.encodes_images else ('latents', 'synthetic')
    settings = {key: getattr(recipe.train, key) for key in ALIKE[:3]} | {'ema': bool(profiles(recipe.ema))}
    settings |= {'sharding': recipe.train.sharding, 'micro_size': recipe.batch.micro_size}
    by_setting: dict[str, list[Result]] = {}  # a law goes through rows that differ in the number of GPUs, and what it asks for
    for result in results.throughput:
        is_same = (result.text('network'), result.count('resolution')) == (recipe.trained_network, facts.resolution)
        if result.is_rated and is_same and result.text('kind') in kinds:
            by_setting.setdefault(json.dumps([result.row.get(key) for key in ('device', 'interconnect', *ALIKE)]), []).append(result)
    if not by_setting:
        raise RateError(f'--throughput {path}: has no measured row for {_wanted(facts, cluster.gpu)}; {_rows_text(results.throughput)}')

    def likeness(result: Result) -> tuple[bool, ...]:
        return tuple(result.row.get(key) == value for key, value in settings.items())

    def rank(series: list[Result]) -> tuple[Any, ...]:
        points = [result.point for result in series]
        return (
            gpu_name(_device(series[0])) == cluster.gpu,
            likeness(series[0])[: len(ALIKE)],
            len({point.num_gpus for point in points if point.global_size == recipe.batch.global_size}),
            len({point.num_gpus for point in points}),
            max(point.images_per_sec / point.num_gpus for point in points),
        )

    def preference(result: Result) -> tuple[Any, ...]:
        return result.status == 'measured', likeness(result), result.point.images_per_sec

    best: dict[tuple[int, int], Result] = {}
    for result in max(by_setting.values(), key=rank):
        place = result.point.num_gpus, result.point.global_size
        if place not in best or preference(result) > preference(best[place]):
            best[place] = result
    best = dict(sorted(best.items()))
    dates = sorted({result.text('date')[:10] or '?' for result in best.values()})
    devices = ', '.join(sorted({_device(result) for result in best.values()}))
    warnings = [f'{path}: {text}' for text in _differences(list(best.values()), settings, facts, cluster.gpu)]
    if results.num_unread:
        warnings.append(f'{path}: lines that could not be read, as a kill leaves them: {results.num_unread}')
    name = f'{path} ({devices}; {dates[0]}{f" to {dates[-1]}" if len(dates) > 1 else ""})'
    laws = ScalingLaws(points=tuple(result.point for result in best.values()), gpus_per_node=gpus_per_node(best.values(), cluster.gpus_per_node))
    return replace(points_and_laws(laws, 'measured', name, recipe.batch.global_size), warnings=warnings, rows=best)


def _device(result: Result) -> str:
    return result.text('device') or 'an unknown device'


def _differences(results: Sequence[Result], settings: Mapping[str, Any], facts: Facts, gpu: str) -> Iterator[str]:
    """Yield what a reader must know of rows that are not exactly as the recipe."""
    name, batch = facts.name, facts.recipe.batch.global_size
    for key, value in settings.items():
        other = sorted({str(one.row.get(key)) for one in results if one.row.get(key) != value and not (key == 'micro_size' and value == 'auto')})
        if other:
            yield f'measured with {key} {" and ".join(other)}, {name} has {value}'
    same_batch = {one.point.num_gpus for one in results if one.point.global_size == batch}
    if elsewhere := sorted({one.point.num_gpus for one in results} - same_batch):
        sizes = ' and '.join(f'{size:,}' for size in sorted({one.point.global_size for one in results if one.point.num_gpus in elsewhere}))
        yield f'measured on {", ".join(map(str, elsewhere))} GPUs with a global batch of {sizes}, {name} has {batch:,}: predicted for it'
    if devices := sorted({_device(one) for one in results if gpu_name(_device(one)) != gpu}):
        yield f'measured on {", ".join(devices)}, and the plan is for {gpu}'
    if unsteady := sorted({one.point.num_gpus for one in results if one.status != 'measured'}):
        yield f'the rows of {", ".join(map(str, unsteady))} GPUs were not steady'


def _rows_text(results: Sequence[Result]) -> str:
    if not results:
        return 'it has no rows of benchmarks.throughput'
    rows = []
    for one in results:
        network, resolution, kind, num_gpus = (one.text(key) or 'unknown' for key in ('network', 'resolution', 'kind', 'num_gpus'))
        rows.append(f'network {network}, {resolution} px, {kind}, {num_gpus} GPU{"" if num_gpus == "1" else "s"}: {one.status}')
    return 'it has ' + '; '.join(f'{row} ({counted(count, "row")})' if count > 1 else row for row, count in Counter(rows).items())
