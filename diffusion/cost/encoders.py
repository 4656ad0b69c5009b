"""Encoders next to training: how many keep up, their traffic and price, and from which epoch on encoding once is cheaper.

An encoder is a GPU, a share of one, or some CPU cores, that turns images into the VAE's moments; encoding_rates.py has the images/s of one.
Numbers may be arrays of draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from diffusion.common.text import counted
from diffusion.cost.assumptions import Assumptions, encoding_at
from diffusion.cost.encoding_rates import EncodingRate, rate_of_gpu
from diffusion.cost.facts import Facts
from diffusion.cost.formulas import BYTES_PER_MB, SEC_PER_HOUR, Number
from diffusion.cost.hardware import gpu_name
from diffusion.cost.prices import UNITS, Price, Prices, gpu_of, load_prices
from diffusion.cost.results import Result
from diffusion.cost.uncertain import median, quantiles, spread_text, two_digits
from diffusion.recipe.schema import Cost, RayEncoders

NO_PRICE = 'give cost.price_per_encoder_hour, or name a GPU of diffusion/cost/prices.yaml in data.encoders.ray.resource'
PIXEL_CHANNELS, MOMENT_BYTES = 3, {'float32': 4, 'float16': 2}


def num_that_keep_up(images_per_sec: Number, one_images_per_sec: Number, headroom: float = 0.0) -> Number:
    """Encoders that deliver the images/s of training and `headroom` (0.1: 10 %) more."""
    return np.ceil(np.multiply(images_per_sec, 1 + headroom) / one_images_per_sec - 1e-9)  # 10 x 0.1 is no 1.0000000000000002


def rate_with(num_encoders: Number, images_per_sec: Number, one_images_per_sec: Number) -> Number:
    """Images/s of training that some encoders feed: theirs or its own, the smaller (Figure 6 of the Anyscale post)."""
    return np.minimum(images_per_sec, num_encoders * one_images_per_sec)


def in_step_stretch(network_flop: float, text_flop: float, vae_flop: float) -> float:
    """How much longer a step takes with the VAE in it, if all networks reach the same share of the peak."""
    return 1 + vae_flop / (network_flop + text_flop)


def bytes_out(encoders: RayEncoders, resolution: int, stored_bytes: Number) -> Number:
    """Bytes of one sample on its way to an encoder: an image as stored, or its 8-bit pixels."""
    return stored_bytes if encoders.send == 'bytes' else PIXEL_CHANNELS * resolution**2


def bytes_back(encoders: RayEncoders, resolution: int, latent_channels: int, downsampling: int) -> int:
    """Bytes of one sample's mean and log variance on the way back."""
    return MOMENT_BYTES[encoders.moments] * 2 * latent_channels * (resolution // downsampling) ** 2


def first_cheaper_epoch(once: Number, per_epoch: Number) -> int | None:
    """First number of epochs at which what is paid once costs less than what is paid in every epoch; None if that costs nothing."""
    each = median(per_epoch)
    return int(median(once) // each) + 1 if each > 0 else None


@dataclass(frozen=True)
class PricedEncoder:
    """One encoder: its rate, and the price of its hour.

    Attributes:
        gpu: by the names of prices.yaml; `CPU` without one.
        price: of a unit; None: not known.
        units: of that price in an hour, such as half a GPU-hour.
    """

    gpu: str
    rate: EncodingRate | None
    price: Price | None
    units: float = 1.0

    @property
    def dollars_per_hour(self) -> float | None:
        return None if self.price is None else self.price.dollars * self.units

    @property
    def price_text(self) -> str:
        if self.price is None:
            return 'a price that is not known'
        return f'{self.price.amount} per {self.price.unit}' + (f' x {self.units:g}' if self.units != 1 else '')


def priced_encoder(encoders: RayEncoders, cost: Cost, prices: Prices) -> tuple[str | None, Price | None, float]:
    """Return GPU, price and its units an hour of one encoder of a recipe, as far as the recipe and the list say them.

    The GPU is that of the list whose name is `resource`; the price is `cost.price_per_encoder_hour`, or else the list's first for that GPU.
    """
    gpu = gpu_name(encoders.resource, prices.gpus()) if encoders.resource is not None and encoders.gpus else None
    if cost.price_per_encoder_hour is not None:
        name = 'cost.price_per_encoder_hour'
        return gpu, Price(name, cost.price_per_encoder_hour, UNITS['machine_hour'], 'as given', 'the recipe, for one encoder'), 1.0
    return (gpu, prices[f'gpu_hour.{gpu}'], encoders.gpus) if gpu is not None else (None, None, 1.0)


def encoder_of(
    facts: Facts, assumed: Assumptions, prices: Prices, training_price: Price | None, training_gpu: str, measured: Sequence[Result]
) -> PricedEncoder:
    """Return the encoder of a recipe: on the machines that its `data.encoders` name, else on the GPU that is assumed to encode (`encoding.N.gpu`).

    Raises:
        PriceError: the assumptions name a price that the list has not.
    """
    online, counts = facts.online, facts.counts.encoders
    flop = None if counts is None else float(counts.vae_flop)

    def rate(gpu: str | None) -> EncodingRate | None:
        return rate_of_gpu(gpu, training_gpu, facts.resolution, flop, assumed, measured)

    gpu, price, units = priced_encoder(online, facts.recipe.cost, prices) if online is not None else (None, None, 1.0)
    if online is not None and not online.gpus:
        return PricedEncoder('CPU', rate(None), price, units)
    share = 1.0 if online is None else online.gpus
    if gpu is None:
        nearest = encoding_at(assumed.encoding, facts.resolution)
        named = None if nearest is None else nearest[0].gpu
        gpu = training_gpu if named is None else gpu_of(named)
        if price is None:
            price, units = training_price if named is None else prices[named], share
    found = rate(gpu)
    return PricedEncoder(gpu or 'a GPU', found if found is None else found.of(share), price, units)


@dataclass(frozen=True)
class OnlineFleet:
    """A recipe's encoders next to training at some images/s."""

    encoders: RayEncoders
    encoder: PricedEncoder
    unlimited: Number  # images/s of training if the encoders never made it wait
    headroom: float
    out_bytes: Number  # of a sample
    back_bytes: int

    @property
    def num_needed(self) -> int | None:
        """Encoders that keep up, with the headroom; None if their rate is not known."""
        rate = self.encoder.rate
        return None if rate is None else int(median(num_that_keep_up(self.unlimited, rate.images_per_sec, self.headroom)))

    @property
    def images_per_sec(self) -> Number:
        """Images/s of training with these encoders."""
        rate = self.encoder.rate
        return self.unlimited if rate is None else rate_with(self.encoders.actors, self.unlimited, rate.images_per_sec)

    @property
    def speed(self) -> float:
        """Share of its speed at which training runs (0..1)."""
        return median(self.images_per_sec) / median(self.unlimited)

    @property
    def mb_per_sec(self) -> tuple[Number, Number]:
        """Traffic of all encoders together in MB/s, out and back."""
        return self.images_per_sec * self.out_bytes / BYTES_PER_MB, self.images_per_sec * self.back_bytes / BYTES_PER_MB


def online_fleet(facts: Facts, images_per_sec: Number, encoder: PricedEncoder, assumed: Assumptions) -> OnlineFleet | None:
    """Return the encoders of a recipe; None if it has none (`data.encoders`)."""
    if facts.online is None:
        return None
    channels = facts.counts.latent_channels
    return OnlineFleet(
        encoders=facts.online,
        encoder=encoder,
        unlimited=images_per_sec,
        headroom=assumed.online.headroom,
        out_bytes=bytes_out(facts.online, facts.resolution, assumed.preparation.bytes_per_image),
        back_bytes=bytes_back(facts.online, facts.resolution, channels, facts.pixels_per_latent),
    )


def fleet_text(fleet: OnlineFleet) -> str:
    """Say in one line how many encoders there are, how many keep up, and what travels."""
    num, rate, needed = fleet.encoders.actors, fleet.encoder.rate, fleet.num_needed
    share = f' (each {fleet.encoders.gpus:g} of it)' if 0 < fleet.encoders.gpus < 1 else ''
    have = f'{num:,} on {fleet.encoder.gpu}{share}'
    if rate is None or needed is None:
        return f'{have}; how many keep up is not known, for nobody has measured one: benchmarks.encode does, plan --encoding-rates reads it'
    out, back = (spread_text(one, 0 if median(one) >= 10 else 1) for one in fleet.mb_per_sec)
    training = f'{two_digits(median(fleet.unlimited))} images/s of training (predicted)'
    each = f'{rate.amount} images/s each ({rate.how}: {rate.source}), {fleet.headroom:.0%} headroom'
    traffic = f'{out} MB/s out ({fleet.encoders.send}), {back} MB/s back ({fleet.encoders.moments})'
    return f'{have}; {needed:,} keep up with {training} at {each}; {traffic}'


def fleet_warnings(name: str, fleet: OnlineFleet) -> list[str]:
    """Return what is wrong with the encoders of the recipe `name`: too few, or without a price."""
    found = []
    if fleet.speed < 1:
        assumed = '' if fleet.encoder.rate is None else f' ({fleet.encoder.rate.how})'
        found.append(
            f'{name}: {counted(fleet.encoders.actors, "encoder")} are too few: training would run at about {100 * fleet.speed:.0f} % of its speed'
            f'{assumed}; set data.encoders.ray.actors={fleet.num_needed}'
        )
    if fleet.encoder.price is None:
        found.append(f'{name}: the machines of data.encoders are not in the bill: {NO_PRICE}')
    return found


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


def fleet_json(fleet: OnlineFleet) -> dict[str, Any]:
    """Return the same for machines, unrounded; uncertain numbers as [p10, p50, p90]."""
    out, back = fleet.mb_per_sec
    return {
        'num_encoders': fleet.encoders.actors,
        'num_needed': fleet.num_needed,
        'headroom': fleet.headroom,
        'unlimited_images_per_sec': quantiles(fleet.unlimited),
        'speed': fleet.speed,
        'mb_per_sec_out': quantiles(out),
        'mb_per_sec_back': quantiles(back),
    }


@dataclass(frozen=True)
class EncoderBill:
    """What the encoders of a run have cost so far: they are paid for whenever it runs.

    Attributes:
        units: of the price, an hour of one encoder.
    """

    num_encoders: int
    wall_hours: float
    price: Price | None
    units: float

    @property
    def dollars(self) -> float | None:
        return None if self.price is None else self.num_encoders * self.wall_hours * self.units * self.price.dollars


def encoder_bill(encoders: RayEncoders, cost: Cost, running_sec: float) -> EncoderBill:
    """Return the bill of a run's encoders at the price of its recipe, or the list's of now."""
    _, price, units = priced_encoder(encoders, cost, load_prices())
    return EncoderBill(encoders.actors, running_sec / SEC_PER_HOUR, price, units)
