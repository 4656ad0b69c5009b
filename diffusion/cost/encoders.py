"""Encoders that turn images into latents: images/s and price of one, how many keep up with training, their traffic, and where to encode.

An encoder is a GPU, a share of one, or some CPU cores. The rate of one next to training is `online.images_per_encoder_sec` of the
assumptions, if that is set. Else it comes, in this order, from `encoding.N`, if that is of this GPU; published, scaled by FLOP; or from `encoding.N`
of another GPU, by peak FLOP/s. Numbers may be arrays of draws.
"""

from dataclasses import dataclass, replace

import numpy as np

from diffusion.common.text import counted
from diffusion.cost.assumptions import Assumptions, encoding_at
from diffusion.cost.facts import Facts
from diffusion.cost.formulas import BYTES_PER_MB, BYTES_PER_TB, ONLINE_FACTOR, SEC_PER_HOUR, Number, hours, median, spread_text, two_digits
from diffusion.cost.hardware import gpu_name, peak_flops
from diffusion.cost.prices import UNITS, CostRow, Price, Prices, gpu_of, load_prices, priced
from diffusion.cost.throughput import A10G_FLOP, A10G_IMAGES_PER_SEC, Rate
from diffusion.recipe import Recipe
from diffusion.recipe.schema import Cost, RayEncoders

NO_PRICE = 'give cost.price_per_encoder_hour, or name a GPU of diffusion/cost/prices.yaml in data.encoders.ray.resource'
PIXEL_CHANNELS, MOMENT_BYTES = 3, {'float32': 4, 'float16': 2}
IN_STEP, ONLINE, OFFLINE = 'in step', 'online', 'offline'


def num_that_keep_up(images_per_sec: Number, one_images_per_sec: Number, headroom: float = 0.0) -> Number:
    """Encoders that deliver the images/s of training and `headroom` (0.1: 10 %) more."""
    return np.ceil(np.multiply(images_per_sec, 1 + headroom) / one_images_per_sec - 1e-9)  # 10 x 0.1 is no 1.0000000000000002


def rate_of_gpu(gpu: str | None, training_gpu: str, resolution: int, vae_flop: float | None, assumed: Assumptions) -> Rate | None:
    """Return the rate of one GPU (None: CPU cores) that encodes images without text; None if nothing is known."""
    nearest, published = encoding_at(assumed.encoding, resolution), None
    if gpu == 'a10g':
        note = f'{A10G_IMAGES_PER_SEC:,.0f} images/s of an A10G at 256 px with text (Anyscale, 2024, table 2, derived: 4,068 / 40)'
        flop = A10G_FLOP * (resolution / 256) ** 2 if vae_flop is None else vae_flop  # not counted: by pixels
        published = Rate(A10G_IMAGES_PER_SEC * A10G_FLOP / flop, 'assumed', f'{note}, by FLOP')
        if flop == A10G_FLOP:
            published = Rate(A10G_IMAGES_PER_SEC, 'published', note)
    if gpu is None or nearest is None:
        return published
    size, source = nearest
    assumed_gpu = training_gpu if size.gpu is None else gpu_of(size.gpu)
    if gpu == assumed_gpu:
        return Rate(size.images_per_gpu_sec, 'assumed', source)
    peak, other = peak_flops(gpu), peak_flops(assumed_gpu or '')
    if published is not None or peak is None or other is None:
        return published
    share = '' if vae_flop is None else f', {spread_text(100 * size.images_per_gpu_sec * vae_flop / other, 0)} % of the peak'
    return Rate(size.images_per_gpu_sec * peak / other, 'assumed', f'{source} of {assumed_gpu}{share}; {gpu} by peak FLOP/s')


@dataclass(frozen=True)
class PricedEncoder:
    """One encoder: its rate, and the price of its hour."""

    gpu: str  # by the names of prices.yaml; `CPU` without one
    rate: Rate | None
    price: Price | None  # of a unit; None: not known
    units: float = 1.0  # of that price in an hour, such as half a GPU-hour


def priced_encoder(encoders: RayEncoders, cost: Cost, prices: Prices) -> tuple[str | None, Price | None, float]:
    """Return GPU, price and its units an hour of one encoder: the recipe's own price, or the list's first of the GPU that its `resource` names."""
    gpu = gpu_name(encoders.resource, prices.gpus()) if encoders.resource is not None and encoders.gpus else None
    if cost.price_per_encoder_hour is not None:
        name = 'cost.price_per_encoder_hour'
        return gpu, Price(name, cost.price_per_encoder_hour, UNITS['machine_hour'], 'as given', 'the recipe, for one encoder'), 1.0
    return (gpu, prices[f'gpu_hour.{gpu}'], encoders.gpus) if gpu is not None else (None, None, 1.0)


def encoder_of(facts: Facts, assumed: Assumptions, prices: Prices, training_price: Price | None, training_gpu: str) -> PricedEncoder:
    """Return the encoder of a recipe: on the machines that its `data.encoders` name, else on the GPU that is assumed to encode (`encoding.N.gpu`)."""
    online, counts = facts.online, facts.counts.encoders
    gpu, price, units = priced_encoder(online, facts.recipe.cost, prices) if online is not None else (None, None, 1.0)
    share = 1.0 if online is None else online.gpus  # of a GPU; 0: CPU cores
    if gpu is None and share:
        nearest = encoding_at(assumed.encoding, facts.resolution)
        named = None if nearest is None else nearest[0].gpu
        gpu = training_gpu if named is None else gpu_of(named)
        if price is None:
            price, units = training_price if named is None else prices[named], share
    given, rate = assumed.online.images_per_encoder_sec, None
    if online is not None and given is not None:
        rate = Rate(given, 'given', 'online.images_per_encoder_sec')
    elif share:
        rate = rate_of_gpu(gpu, training_gpu, facts.resolution, None if counts is None else float(counts.vae_flop), assumed)
        if rate is not None and share != 1:
            rate = replace(rate, images_per_sec=rate.images_per_sec * share, note=f'{rate.note}; {share:g} of it')
    return PricedEncoder(gpu or ('a GPU' if share else 'CPU'), rate, price, units)


@dataclass(frozen=True)
class OnlineFleet:
    """A recipe's encoders next to training."""

    encoders: RayEncoders
    encoder: PricedEncoder
    unlimited: Number  # images/s of training if the encoders never made it wait
    headroom: float
    out_bytes: Number  # of a sample on its way to an encoder: an image as stored, or its 8-bit pixels
    back_bytes: int  # of its mean and log variance

    @property
    def num_needed(self) -> int | None:
        """Encoders that keep up, with the headroom; None if their rate is not known."""
        rate = self.encoder.rate
        return None if rate is None else int(median(num_that_keep_up(self.unlimited, rate.images_per_sec, self.headroom)))

    @property
    def images_per_sec(self) -> Number:
        """Images/s of training: its own or what the encoders deliver, the smaller (Figure 6 of the Anyscale post)."""
        rate = self.encoder.rate
        return self.unlimited if rate is None else np.minimum(self.unlimited, self.encoders.actors * rate.images_per_sec)

    @property
    def speed(self) -> float:
        """Share of its speed at which training runs (0..1)."""
        return median(self.images_per_sec) / median(self.unlimited)

    @property
    def mb_per_sec(self) -> tuple[Number, Number]:
        """Traffic of all encoders together in MB/s, out and back."""
        return self.images_per_sec * self.out_bytes / BYTES_PER_MB, self.images_per_sec * self.back_bytes / BYTES_PER_MB

    def __str__(self) -> str:
        """Say in one line how many encoders there are, how many keep up, and what travels."""
        encoders, rate = self.encoders, self.encoder.rate
        share = f' (each {encoders.gpus:g} of it)' if 0 < encoders.gpus < 1 else ''
        have = f'{encoders.actors:,} on {self.encoder.gpu}{share}'
        if rate is None:
            remedy = 'diffusion.plan takes your measurement, --assume online.images_per_encoder_sec=N'
            return f'{have}; how many keep up is not known, for nobody has measured one; {remedy}'
        out, back = (spread_text(one, 0 if median(one) >= 10 else 1) for one in self.mb_per_sec)
        training = f'{two_digits(median(self.unlimited))} images/s of training (predicted)'
        each = f'{rate.amount} images/s each ({rate.how}: {rate.note}), {self.headroom:.0%} headroom'
        return (
            f'{have}; {self.num_needed:,} keep up with {training} at {each}; {out} MB/s out ({encoders.send}), {back} MB/s back ({encoders.moments})'
        )

    def warnings(self, name: str) -> list[str]:
        """Return what is wrong with the encoders of the recipe `name`: too few, or without a price."""
        found = []
        if self.speed < 1 and self.encoder.rate is not None:
            found.append(
                f'{name}: {counted(self.encoders.actors, "encoder")} are too few: training would run at about {100 * self.speed:.0f} % of its speed '
                f'({self.encoder.rate.how}); set data.encoders.ray.actors={self.num_needed}'
            )
        if self.encoder.price is None:
            found.append(f'{name}: the machines of data.encoders are not in the bill: {NO_PRICE}')
        return found


def online_fleet(facts: Facts, images_per_sec: Number, encoder: PricedEncoder, assumed: Assumptions) -> OnlineFleet | None:
    """Return the encoders of a recipe; None if it has none (`data.encoders`)."""
    encoders, px = facts.online, facts.resolution
    if encoders is None:
        return None
    out_bytes = assumed.preparation.bytes_per_image if encoders.send == 'bytes' else PIXEL_CHANNELS * px**2
    back_bytes = MOMENT_BYTES[encoders.moments] * 2 * facts.counts.latent_channels * (px // facts.pixels_per_latent) ** 2
    return OnlineFleet(encoders, encoder, images_per_sec, assumed.online.headroom, out_bytes, back_bytes)


def text_warnings(facts: Facts) -> list[str]:
    """Warn where the text encoder takes more FLOP than the network that is trained."""
    encoders, flop = facts.counts.encoders, facts.counts.flop
    if encoders is None or encoders.text_flop <= flop:
        return []
    return [
        f'{facts.name}: the text encoder takes {encoders.text_flop / 1e9:,.1f} GFLOP for a caption of {encoders.text_length} tokens, '
        f'{encoders.text_flop / flop:.1f} times the {flop / 1e9:,.1f} of the network in a step; take a smaller encoder or fewer tokens, or store '
        'the encoded captions (data_prep.encode --text-embeddings)'
    ]


def ways_to_encode(
    facts: Facts, images_per_sec: Number, num_gpus: int, encoder: PricedEncoder, price: Price, assumed: Assumptions, prices: Prices, kind: str
) -> list[CostRow]:
    """Return what the steps and the encoding of a recipe take, in the step, next to training or once beforehand: a group of rows each.

    In the step, training takes longer by the VAE's share of the FLOP, if all networks reach the same share of the peak. Online, other machines
    encode for as long as the steps take: the recipe's own (`data.encoders`), or as many as keep up. Offline, they encode each image once, and the
    latents are stored for `storage.latent_months`; a row says the first number of epochs at which that costs less than another way. Where rate or
    price of an encoder is not known there is only the way in the step; nothing where nothing is to be encoded (synthetic data, an autoencoder's
    training), or for unknown numbers of images.

    Args:
        images_per_sec: of training as the recipe has it, if its encoders keep up.
        price: of a training GPU's hour.
        kind: of the source of those images per second.
    """
    counts, in_step, num_samples = facts.counts.encoders, facts.encodes_images, facts.phase.num_samples
    if not isinstance(facts.recipe, Recipe) or facts.recipe.data.kind == 'synthetic' or facts.num_images is None or facts.epochs is None:
        return []
    stretch, why = ONLINE_FACTOR, 'published by MosaicML for SD2'
    if counts is not None:
        stretch, why = 1 + counts.vae_flop / (facts.counts.flop + counts.text_flop), "assumed, by the VAE's share of the FLOP"

    def row(way: str, what: str, quantity: Number, at: Price, formula: str, is_assumed: bool) -> CostRow:
        return priced(way, what, quantity, at, formula, 'assumed' if is_assumed else kind, recipe=facts.name, num_gpus=num_gpus)

    def steps(way: str, rate: Number, is_assumed: bool) -> CostRow:
        formula = f'{spread_text(rate)} images/s; a step with the VAE in it takes {stretch:.2f} times as long ({why})'
        return row(way, 'steps', hours(num_samples, rate) * num_gpus, price, formula, is_assumed)

    without_vae = images_per_sec * stretch if in_step else images_per_sec
    rows = [steps(IN_STEP, images_per_sec if in_step else images_per_sec / stretch, not in_step)]
    if encoder.rate is None or encoder.price is None:
        return rows
    one, guessed = encoder.rate.images_per_sec, encoder.rate.how == 'assumed'
    num = num_that_keep_up(without_vae, one, assumed.online.headroom) if facts.online is None else facts.online.actors
    limited = np.minimum(without_vae, num * one)
    each = f'on {encoder.gpu}, {encoder.rate.amount} images/s each ({encoder.rate.how}: {encoder.rate.note})'
    stored = facts.num_images * facts.latent_bytes / BYTES_PER_TB * assumed.storage.latent_months
    rows += [
        steps(ONLINE, limited, in_step or (guessed and median(limited) < median(without_vae))),
        row(ONLINE, 'encoders', num * hours(num_samples, limited) * encoder.units, encoder.price, f'{median(num):,.0f} {each}', guessed),
        steps(OFFLINE, without_vae, in_step),
        row(OFFLINE, 'encoders', hours(facts.num_images, one) * encoder.units, encoder.price, f'once {each}', guessed),
        row(OFFLINE, 'storage', stored, prices[assumed.storage.price], f'for {spread_text(assumed.storage.latent_months)} months', guessed),
    ]
    dollars = {(row.group, row.what): row.dollars for row in rows}
    once = median(dollars[OFFLINE, 'encoders'] + dollars[OFFLINE, 'storage'])
    for other in (ONLINE, IN_STEP):
        per_epoch = median((dollars[other, 'steps'] + dollars.get((other, 'encoders'), 0.0) - dollars[OFFLINE, 'steps']) / facts.epochs)
        if per_epoch > 0:
            rows.append(CostRow(OFFLINE, f'cheaper than {other}', int(once // per_epoch) + 1, 'epochs', recipe=facts.name))
    return rows


def encoder_row(encoders: RayEncoders, cost: Cost, running_sec: float) -> CostRow:
    """Return what the encoders of a run took so far, paid for whenever it runs; its price is the recipe's, or the list's of now, or not known."""
    _, price, units = priced_encoder(encoders, cost, load_prices())
    wall_hours = running_sec / SEC_PER_HOUR
    formula = f'{counted(encoders.actors, "encoder")} x {wall_hours:,.3f} h in which training ran' + (f' x {units:g}' if units != 1 else '')
    return CostRow('encoding', 'encoders', encoders.actors * wall_hours * units, '' if price is None else price.unit, price, formula)
