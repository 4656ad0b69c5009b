"""Schema of an autoencoder's recipe (`python -m diffusion.autoencoder`), and what must hold between its keys.

A file is one of these if it has the section `autoencoder`, which stands in place of `model`. Everything else is shared (schema.py).
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from diffusion.recipe.keys import MISSING, Duration, fields_after, key
from diffusion.recipe.schema import LARGEST_COUNT, CommonData, CommonLog, CommonRecipe, OnlineEncoders, Recipe, streams_of

NETWORKS = Path(__file__).parents[1] / 'autoencoding' / 'networks'
PERCEPTUAL_MIN_PX = 16  # of a side: LPIPS halves it four times
DISCRIMINATOR_MIN_SIDE = 4  # of what the strided convolutions of the discriminator leave, for the two that follow


@dataclass
class Perceptual:
    weight: float = key(1.0, "Factor of the distance; 1 is latent diffusion's (arXiv 2112.10752).", low=0, high=1e6)
    network: Literal['lpips', 'lpips@random-conv'] = key('lpips')
    """`lpips`: LPIPS 0.1 with VGG16 (arXiv 1801.03924); `lpips@random-conv`: the same of random convolutions, which needs no weights."""
    weights: str | None = key(None, may_change=True)
    """Folder with `vgg16-397923af.pth` or `vgg16.safetensors`; null: the local cache of torch.hub. Nothing is downloaded."""


@dataclass
class Adversarial:
    weight: float = key(0.1, low=0, high=1e3)
    """Factor next to the adaptive weight (arXiv 2012.09841, equation 7), which makes the decoder's two gradients equally long."""
    start: float = key(0.3, low=0, high=0.95)
    """Share of the run after which the discriminator and its loss begin, 0.2 to 0.5: before that its gradient is noise."""
    filters: int = key(64, 'Channels of its first convolution; each further one has twice as many, at most eight times.', low=1, high=1024)
    layers: int = key(3, 'Its strided convolutions: 3 judge patches of 70 pixels (arXiv 1611.07004).', low=1, high=6)


@dataclass
class AutoencoderSettings:
    network: str = key(MISSING, 'Name of a configuration in `diffusion/autoencoding/networks/`: the arguments of diffusers.AutoencoderKL.')
    l1: float = key(1.0, 'Weight of the mean absolute error of pixels in -1..1.', low=0, high=1e6)
    l2: float = key(0.0, 'Weight of their mean squared error.', low=0, high=1e6)
    kl: float = key(1e-6, low=0, high=1e3)
    """Weight of the divergence from a standard normal, summed over an image's latents and divided by its pixel values (3 x H x W). This is the
    convention of latent diffusion, whose 1e-6 may be copied. A weight of the mean over latents is this times latents / pixel values."""
    perceptual: Perceptual | None = key(None, 'The perceptual loss; null has none.')
    adversarial: Adversarial | None = key(None, 'The discriminator and its loss; null has none.')
    ease_start: bool = key(False)
    """Begin with residual branches of zero and a posterior almost certain: a short run from random weights learns several times faster."""
    num_measured: int = key(10000, low=1, high=LARGEST_COUNT)
    """Training crops (or all, if there are fewer) whose latents give scale and shift when the run has ended."""


@fields_after()
@dataclass
class AutoencoderData(CommonData):
    kind: Literal['images', 'synthetic'] = key('images')
    """The MDS dataset holds `images` (its manifest must agree); `synthetic` makes random ones and needs no data."""
    resolution: int = key(MISSING, 'Side of the square crops, in pixels.', low=8, high=4096)
    crop: Literal['center', 'random'] = key('random')
    """`random`: the short side is scaled to a length between `resolution` and its own, then a square is cut anywhere, drawn again each epoch;
    `center`: scaled to `resolution`, the middle cut, as latents are made. Evaluation always does that."""
    # What text-to-image recipes may choose.
    aspect_buckets: ClassVar[bool] = False
    encoders: ClassVar[OnlineEncoders | None] = None
    caption_dropout: ClassVar[float] = 0.0


@dataclass
class ReconstructionSamples:
    every: Duration | None = key(None, 'Interval of grids of originals above their reconstructions; null draws none.', units=('ba',), low=1)
    count: int = key(8, 'Images of a grid, evenly spaced in `eval.streams`.', low=1, high=256)


@dataclass
class AutoencoderLog(CommonLog):
    samples: ReconstructionSamples = key(ReconstructionSamples)


@fields_after('load_path')
@dataclass
class AutoencoderRecipe(CommonRecipe):
    """Trains an autoencoder, the VAE of text-to-image networks."""

    autoencoder: AutoencoderSettings = key(AutoencoderSettings)
    data: AutoencoderData = key(AutoencoderData)
    log: AutoencoderLog = key(AutoencoderLog, may_change=True)
    adapter: ClassVar[None] = None

    @property
    def trained_network(self) -> str:
        """Name of the configuration of what is trained."""
        return self.autoencoder.network


AnyRecipe = Recipe | AutoencoderRecipe


def autoencoder_names() -> list[str]:
    """Return the values of `autoencoder.network`."""
    return sorted(path.stem for path in NETWORKS.glob('*.json'))


def autoencoder_config(name: str) -> dict[str, Any]:
    """The arguments of AutoencoderKL for a known network."""
    return json.loads((NETWORKS / f'{name}.json').read_text())


def pixels_per_latent(name: str) -> int:
    """Along a side: every level after the first halves it."""
    return 2 ** (len(autoencoder_config(name)['block_out_channels']) - 1)


def autoencoder_exists(recipe: AutoencoderRecipe, _: int) -> list[str]:
    name, known = recipe.autoencoder.network, autoencoder_names()
    if name not in known:
        return [f"autoencoder.network: no configuration '{name}'; known: {', '.join(known)}"]
    side, unit = recipe.data.resolution, pixels_per_latent(name)
    if side % unit == 0:
        return []
    below = side // unit * unit
    nearest = f'{below} or {below + unit}' if below else str(unit)
    return [f'data.resolution: {side} is not a multiple of {unit}, the pixels of a latent along a side; nearest: {nearest}']


def losses_fit_the_images(recipe: AutoencoderRecipe, _: int) -> list[str]:
    losses, side, errors = recipe.autoencoder, recipe.data.resolution, []
    if losses.perceptual is not None and side < PERCEPTUAL_MIN_PX:
        errors.append(f'autoencoder.perceptual: needs images of {PERCEPTUAL_MIN_PX} px, data.resolution is {side}; set autoencoder.perceptual=null')
    if losses.adversarial is not None and side // 2**losses.adversarial.layers < DISCRIMINATOR_MIN_SIDE:
        least = DISCRIMINATOR_MIN_SIDE * 2**losses.adversarial.layers
        errors.append(
            f'autoencoder.adversarial.layers: {losses.adversarial.layers} need images of {least} px, data.resolution is {side}; set fewer layers '
            '(or autoencoder.adversarial=null)'
        )
    return errors


def images_are_stored(recipe: AutoencoderRecipe, _: int) -> list[str]:
    errors = []
    for name, stream in streams_of(recipe).items():
        if stream.photos is not None or stream.drawn is not None:
            errors.append(f'{name}: photos and drawn images become latents, an autoencoder trains on images; convert them and name local or remote')
        if stream.loss_weight != 1:
            errors.append(f'{name}.loss_weight: {stream.loss_weight} has no effect on an autoencoder; set it to 1 (a proportion does)')
    return errors


AUTOENCODER_RULES: list[Callable[[AutoencoderRecipe, int], list[str]]] = [autoencoder_exists, losses_fit_the_images, images_are_stored]
