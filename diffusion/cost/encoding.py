"""Ways to encode the images of a phase, side by side: in the step, next to training on other machines, or once beforehand.

In the step, training takes longer by the VAE's share of the FLOP. Online, other machines encode for as long as the steps take. Offline, they
encode each image once, and the latents are stored for `storage.latent_months`, the run and a margin.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from diffusion.cost.assumptions import Assumptions
from diffusion.cost.encoders import PricedEncoder, first_cheaper_epoch, in_step_stretch, num_that_keep_up, rate_with
from diffusion.cost.facts import Facts
from diffusion.cost.formulas import BYTES_PER_TB, ONLINE_FACTOR, Number, hours
from diffusion.cost.prices import Price, Prices
from diffusion.cost.uncertain import median, quantiles
from diffusion.recipe import Recipe

IN_STEP, ONLINE, OFFLINE = 'in step', 'online', 'offline'


@dataclass(frozen=True)
class Way:
    """One way to encode the images of a phase.

    Attributes:
        num_encoders: machines next to training; None: none, or as many as one likes.
        images_per_sec: of training.
        training_hours: wall hours of the steps.
        encoder_hours: of all encoders together.
        steps_assumed: the hours of the steps rest on an assumption about the VAE or the encoders.
        encoders_assumed: those of the encoders do.
    """

    name: str
    num_encoders: Number | None
    images_per_sec: Number
    training_hours: Number
    training_dollars: Number
    encoder_hours: Number = 0.0
    encoder_dollars: Number = 0.0
    storage_dollars: Number = 0.0
    steps_assumed: bool = False
    encoders_assumed: bool = False

    @property
    def dollars(self) -> Number:
        return self.training_dollars + self.encoder_dollars + self.storage_dollars


@dataclass(frozen=True)
class EncodingWays:
    """The ways of one phase."""

    name: str  # of the phase
    encoder: PricedEncoder
    ways: tuple[Way, ...]
    stretch: float  # of a step with the VAE in it
    stretch_source: str
    epochs: Number

    def way(self, name: str) -> Way | None:
        return next((way for way in self.ways if way.name == name), None)

    @property
    def cheapest(self) -> Way:
        return min(self.ways, key=lambda way: median(way.dollars))

    def offline_from(self, other: str) -> int | None:
        """First number of epochs at which offline costs less than another way; None where one is not known, or it never does."""
        offline, way = self.way(OFFLINE), self.way(other)
        if offline is None or way is None:
            return None
        per_epoch = (way.training_dollars + way.encoder_dollars - offline.training_dollars) / self.epochs
        return first_cheaper_epoch(offline.encoder_dollars + offline.storage_dollars, per_epoch)


def encoding_ways(
    facts: Facts, images_per_sec: Number, num_gpus: int, encoder: PricedEncoder, price: Price, assumed: Assumptions, prices: Prices
) -> EncodingWays | None:
    """Return the ways of a recipe; None where nothing is to be encoded (synthetic data, an autoencoder's training), or of unknown numbers of images.

    Online is with the recipe's own encoders (`data.encoders`), else with as many as keep up. Where the rate or the price of an encoder is not known
    there is only the way in the step.

    Args:
        images_per_sec: of training as the recipe has it, if its encoders keep up.
        price: of a training GPU's hour.
    """
    if not isinstance(facts.recipe, Recipe) or facts.recipe.data.kind == 'synthetic' or facts.num_images is None or facts.epochs is None:
        return None
    counts = facts.counts.encoders
    if counts is None:
        stretch, stretch_source = ONLINE_FACTOR, 'published by MosaicML for SD2'
    else:
        stretch, stretch_source = in_step_stretch(facts.counts.flop, counts.text_flop, counts.vae_flop), "assumed, by the VAE's share of the FLOP"
    without_vae = images_per_sec * stretch if facts.encodes_images else images_per_sec
    num_samples, found = facts.phase.num_samples, list[Way]()

    def steps(rate: Number) -> tuple[Number, Number]:
        """Wall hours and dollars of the steps."""
        wall_hours = hours(num_samples, rate)
        return wall_hours, wall_hours * num_gpus * price.dollars

    in_step = images_per_sec if facts.encodes_images else images_per_sec / stretch
    found.append(Way(IN_STEP, None, in_step, *steps(in_step), steps_assumed=not facts.encodes_images))
    dollars = encoder.dollars_per_hour
    if encoder.rate is not None and dollars is not None:
        one = encoder.rate.images_per_sec
        online = facts.online
        num = num_that_keep_up(without_vae, one, assumed.online.headroom) if online is None else online.actors
        limited = rate_with(num, without_vae, one)
        wall_hours, training_dollars = steps(limited)
        guessed, waits = encoder.rate.how == 'assumed', median(limited) < median(without_vae)
        found.append(
            Way(
                ONLINE, num, limited, wall_hours, training_dollars, num * wall_hours, num * wall_hours * dollars,
                steps_assumed=facts.encodes_images or (guessed and waits), encoders_assumed=guessed,
            )
        )  # fmt: skip
        once_hours = hours(facts.num_images, one)
        stored_tb_months = facts.num_images * facts.latent_bytes / BYTES_PER_TB * assumed.storage.latent_months
        stored = stored_tb_months * prices[assumed.storage.price].dollars
        found.append(
            Way(
                OFFLINE, None, without_vae, *steps(without_vae), once_hours, once_hours * dollars, stored,
                steps_assumed=facts.encodes_images, encoders_assumed=guessed,
            )
        )  # fmt: skip
    return EncodingWays(facts.name, encoder, tuple(found), stretch, stretch_source, facts.epochs)


def ways_json(phases: Sequence[EncodingWays]) -> list[dict[str, Any]]:
    """The ways of all phases, unrounded; uncertain numbers as [p10, p50, p90]."""
    return [
        {
            'name': one.name,
            'encoder': {
                'gpu': one.encoder.gpu,
                'images_per_sec': None if one.encoder.rate is None else quantiles(one.encoder.rate.images_per_sec),
                'origin': None if one.encoder.rate is None else one.encoder.rate.how,
                'source': None if one.encoder.rate is None else one.encoder.rate.source,
                'dollars_per_hour': one.encoder.dollars_per_hour,
                'price': None if one.encoder.price is None else one.encoder.price.name,
            },
            'in_step_stretch': one.stretch,
            'ways': [
                {'name': way.name}
                | {key: value if value is None or isinstance(value, bool) else quantiles(value) for key, value in vars(way).items() if key != 'name'}
                | {'dollars': quantiles(way.dollars)}
                for way in one.ways
            ],
            'cheapest': one.cheapest.name,
            'offline_cheaper_than_online_from_epochs': one.offline_from(ONLINE),
            'offline_cheaper_than_in_step_from_epochs': one.offline_from(IN_STEP),
        }
        for one in phases
    ]
