"""The choice of images per second for a plan, one source per recipe, by the command line."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

from diffusion.common.text import did_you_mean
from diffusion.cost.facts import Cluster, Facts
from diffusion.cost.measured_rates import series_of_file
from diffusion.cost.published import PUBLISHED, PublishedThroughput
from diffusion.cost.rates import RateError, RateSource, assumed_mfu, given_number, points_and_laws, wanted
from diffusion.cost.scaling import ScalingLaws, ScalingPoint
from diffusion.cost.uncertain import Uncertain, draw, spread_text

# Where nothing is published or measured. Tuned runs of SD2's U-Net reached 28 to 36 % on one node (MosaicML, Anyscale, MLPerf) and others less;
# several nodes without a fast network reach half of it.
DEFAULT_MFU = [0.24, 0.36]
# Of an adapter, a few images a step on one machine that anybody lends. SaladCloud's mean job took 2.66 s a step: 13 % of an RTX 4090, activations
# computed twice included, if its batch was its script's four images of 1024 px, and 3 % if it was one; the post says neither.
ADAPTER_MFU = [0.08, 0.30]
# The runs that DEFAULT_MFU is of had SD2's text encoder in the step, 8 % of the network's FLOP at 256 px: what takes more is counted.
TEXT_SHARE = 0.1
PUBLISHED_NETWORK = 'sd2-base'  # of all published rows


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
    several = len({facts.resolution for facts in recipes}) > 1
    for facts in recipes:
        try:
            found.append(_source(throughput, mfu, facts, clusters, several))
        except RateError as error:
            errors.append(str(error))
    if errors:
        raise RateError('\n'.join(dict.fromkeys(errors)))
    return found


def _source(throughput: str | None, mfu: Uncertain | None, facts: Facts, clusters: Sequence[Cluster], several: bool) -> RateSource:
    cluster = clusters[0]
    if mfu is not None:
        return assumed_mfu(draw(mfu, 'mfu'), facts.counts.flop, cluster.gpu)
    if throughput is None:
        return _published(facts, cluster) or _default(facts, cluster.gpu)
    name, _, table = throughput.partition(':')
    if name == 'published':
        if source := _published(facts, cluster, table):
            return source
        raise RateError(f'--throughput {throughput}: nothing was published for {wanted(facts, cluster.gpu)}; {_published_text(table)}')
    if re.fullmatch(r'[\d.,=@e+]+', throughput):
        return _given(throughput, facts, [one.num_gpus for one in clusters], several)
    return series_of_file(Path(throughput), facts, cluster)


def _default(facts: Facts, gpu: str) -> RateSource:
    assumed = DEFAULT_MFU if facts.recipe.adapter is None else ADAPTER_MFU
    mfu, why = draw(assumed, 'mfu'), f' (nothing is published for {wanted(facts, gpu)}; give --throughput or --mfu)'
    encoders = facts.counts.encoders
    if encoders is not None:  # as many FLOP/s, of which the encoders take their share
        flop = facts.counts.flop
        counted = {'VAE': encoders.vae_flop} if facts.encodes_images else {}
        counted |= {'text encoder': encoders.text_flop} if facts.recipe.adapter is None and encoders.text_flop > TEXT_SHARE * flop else {}
        if counted:
            why += f', {spread_text(100 * mfu, 0)} % with the {" and the ".join(counted)} in the step counted'
            mfu = mfu * flop / (flop + sum(counted.values()))
    if facts.recipe.train.checkpoint_activations:
        mfu = mfu * 3 / 4
        why += ', a quarter less because activations are computed twice'
    return assumed_mfu(mfu, facts.counts.flop, gpu, why)


def _published(facts: Facts, cluster: Cluster, table: str = '') -> RateSource | None:
    """The published series of the same GPU, resolution and kind with the most points, and of such the fastest; None if there is none."""
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
    laws = ScalingLaws(points=points, gpus_per_node=cluster.gpus_per_node)
    return points_and_laws(laws, 'published', name, facts.recipe.batch.global_size)


def _published_text(table: str) -> str:
    rows = dict.fromkeys(
        f'{row.table}: {row.gpu} at {" and ".join(map(str, row.images_per_sec))} px, {"images" if "VAE" in row.inside else "latents"}'
        for row in PUBLISHED
        if table in ('', row.table)
    )
    return f'there are {"; ".join(rows)} (all of the network {PUBLISHED_NETWORK}); choose with --gpu, or give --throughput NUMBER or --mfu'


def _given(throughput: str, facts: Facts, gpus: Sequence[int], several: bool) -> RateSource:
    """Parse `RATE`, `RATE@GPUS`, or `PX=RATE[@GPUS]` with commas between."""
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
    rate, num_gpus = rates.get(px) or rates[None]
    num_gpus = num_gpus or next((count for _, count in reversed(rates.values()) if count is not None), None)
    if num_gpus is None and len(gpus) > 1:
        raise RateError(f'--throughput {throughput}: of how many GPUs? write {rate:g}@GPUS, or plan for one number of GPUs (--gpus N)')
    return given_number(rate, num_gpus or gpus[0])
