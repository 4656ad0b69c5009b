"""Perceptual distances of two images that gradients flow through: LPIPS, and one of random features that needs no weights.

LPIPS (arXiv 1801.03924, version 0.1, VGG16) is a figure of reconstructions and a loss of autoencoders. Its heads come with torchmetrics; the
weights of VGG16 are torchvision's. Both files are read as tensors, never unpickled.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusion.checkpoints.manifest import sha256_of
from diffusion.common.text import did_you_mean
from diffusion.contracts.errors import EncoderError, InputError
from diffusion.encoders.frozen_part import weights_sha256
from diffusion.evaluation.features.networks import CHANNELS, LEVELS, random_filters
from diffusion.evaluation.features.weights import WeightsSource, find_file, read_tensors

VGG16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))  # channels of the convolutions of each level
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)  # of pixels -1..1: torchvision's normalisation, as LPIPS rounds it
EPSILON = 1e-8  # below the root of a norm, as torchmetrics has it: its gradient is finite where all features are 0
MIN_SIDE_PX = 16  # 1 px at the last of five levels
# A tenth of what random features of white or black have: as they have no bias, colours of one hue differ by length alone.
RANDOM_EPSILON = CHANNELS / 10
VGG16_SOURCE = WeightsSource(('vgg16-397923af.pth',), url='https://download.pytorch.org/models/vgg16-397923af.pth', sha256='397923af', size='528 MB')
CONVERTED = 'vgg16.safetensors'  # below a folder of weights: the same tensors under the same names; read in place of the file above
HEADS = 'functional/image/lpips_models/vgg.pth'  # in torchmetrics: version 0.1 as its authors published it
PERCEPTUAL = ('lpips', 'lpips@random-conv')
HEADS_SHA256 = 'a78928a0af1e5f0fcb1f3b9e8f8c3a2a5a3de244d830ad5c1feddc79b8432868'


class PerceptualDistance(nn.Module):
    """Distance of two images: squared differences of their features, each scaled to length 1 over the channels, weighted by channel (`heads`),
    averaged over places and summed over levels, each of which takes the features of the one before (arXiv 1801.03924, equation 1).

    Everything in it is frozen. The weights are no part of what a run trains: hold it outside of the trained module's children.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, levels: Sequence[nn.Module], heads: Sequence[Tensor], shift: Sequence[float], scale: Sequence[float], epsilon: float):
        super().__init__()
        self.levels = nn.ModuleList(levels)
        self.heads = nn.ParameterList(head.clone() for head in heads)
        self.register_buffer('shift', torch.tensor(shift).view(3, 1, 1), persistent=False)
        self.register_buffer('scale', torch.tensor(scale).view(3, 1, 1), persistent=False)
        self.epsilon = epsilon
        self.requires_grad_(False)

    @property
    def sha256(self) -> str:
        return weights_sha256(self)

    def forward(self, images: Tensor, reference: Tensor) -> Tensor:
        """Return (B,) float32, 0 for equal images; gradients flow to `images` alone.

        Of `reference` one level is held at a time; the backward pass of LPIPS keeps 127 MB for an image of 256 px (float32). Under autocast the
        convolutions run in its precision, differences in float32 all the same; for figures, call it without autocast.

        Args:
            images, reference: (B, 3, H, W) floats in -1..1, of at least 16 px a side; others raise ValueError.
        """
        for given in (images, reference):
            if not given.is_floating_point() or given.ndim != 4 or given.shape[1] != 3 or min(given.shape[-2:]) < MIN_SIDE_PX:
                wanted = f'(B, 3, H, W) floats in -1..1 with sides of at least {MIN_SIDE_PX} px'
                raise ValueError(f'images are {given.dtype} {tuple(given.shape)}; a perceptual distance takes {wanted}')
        if images.shape != reference.shape:
            raise ValueError(f'images are {tuple(images.shape)}, their references {tuple(reference.shape)}; they have to be of one shape')
        with torch.no_grad():
            fixed = self._scaled(reference)
        x = self._scaled(images)
        distance = torch.zeros(len(images), device=images.device)
        for level, head in zip(self.levels, self.heads, strict=True):
            with torch.no_grad():
                fixed = level(fixed)
                target = self._unit(fixed)
            x = level(x)
            squares = (self._unit(x) - target).square()  # (B, C, h, w)
            distance = distance + (squares * head.view(-1, 1, 1)).sum(dim=1).mean(dim=(1, 2))
        return distance

    def _scaled(self, pixels: Tensor) -> Tensor:
        return (pixels.float() - self.shift) / self.scale

    def _unit(self, features: Tensor) -> Tensor:
        features = features.float()
        return features * (features.square().sum(dim=1, keepdim=True) + self.epsilon).rsqrt()


class Lpips(PerceptualDistance):
    """LPIPS 0.1 with VGG16, without its weights yet (`find_perceptual`). `channels` are of the convolutions of each level; smaller for tests."""

    def __init__(self, channels: Sequence[Sequence[int]] = VGG16):
        levels, before = list[nn.Module](), 3
        for level in channels:
            layers: list[nn.Module] = [nn.MaxPool2d(2)] if levels else []
            for after in level:
                layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(inplace=True)]
                before = after
            levels.append(nn.Sequential(*layers))
        super().__init__(levels, [torch.ones(level[-1]) for level in channels], SHIFT, SCALE, EPSILON)

    @classmethod
    def of_files(cls, vgg16: Path, heads: Path) -> Self:
        """Return it with the weights of a VGG16 in torchvision's names, of which the classifier is left out, and of LPIPS's heads."""
        with torch.random.fork_rng(devices=()):  # initialising what is then overwritten must not move the run's random numbers
            model = cls()
        tensors = {name: tensor for name, tensor in read_tensors(vgg16).items() if not name.startswith('classifier.')}
        _fill(vgg16, tensors, {f'features.{place}.{kind}': value for place, conv in model._convolutions() for kind, value in conv.named_parameters()})
        _fill(heads, read_tensors(heads), {f'lin{level}.model.1.weight': head.view(1, -1, 1, 1) for level, head in enumerate(model.heads)})
        return model

    def _convolutions(self) -> list[tuple[int, nn.Conv2d]]:
        """(position in torchvision's `features`, convolution): levels lie there one after the other, with their poolings and ReLUs."""
        layers = [layer for level in self.levels for layer in level.children()]
        return [(place, layer) for place, layer in enumerate(layers) if isinstance(layer, nn.Conv2d)]


class RandomConvDistance(PerceptualDistance):
    """A stand-in that needs no weights: the same distance of the filters of `random-conv`, without the resizing of that network.

    The mean over levels and places of about 1 - cosine of random features: 0 for equal images, rarely above 0.5. No LPIPS: it knows colours, edges
    and textures, not what people see, and compares with itself alone.
    """

    def __init__(self) -> None:
        filters = [random_filters(level) for level in range(LEVELS)]
        heads = [torch.full((CHANNELS,), 1 / (2 * LEVELS)) for _ in filters]
        super().__init__([_RandomLevel(level, weight) for level, weight in enumerate(filters)], heads, (0.0,) * 3, (1.0,) * 3, RANDOM_EPSILON)


class _RandomLevel(nn.Module):
    def __init__(self, level: int, weight: Tensor):
        super().__init__()
        self.level, self.weight = level, nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(x, 2) if self.level else x
        return F.conv2d(F.pad(x, (1, 1, 1, 1), mode='replicate'), self.weight).relu()


def find_perceptual(name: str, weights: Path | None = None, download: bool = False) -> PerceptualDistance:
    """Return a perceptual distance by its name in PERCEPTUAL, on the CPU.

    Args:
        weights: folder with `vgg16-397923af.pth` or `vgg16.safetensors`; without the first torch.hub's cache is looked at, too.

    Raises:
        InputError: an unknown name.
        EncoderError: weights are missing, are others than published, or do not fit.
    """
    if name not in PERCEPTUAL:
        raise InputError(f'unknown perceptual distance {name}{did_you_mean(name, PERCEPTUAL)} Known: {", ".join(PERCEPTUAL)}')
    if name == 'lpips@random-conv':
        return RandomConvDistance()
    converted = weights / CONVERTED if weights else None
    path = converted if converted and converted.is_file() else find_file('lpips', VGG16_SOURCE, weights, download)
    return Lpips.of_files(path, published_heads())


def published_heads() -> Path:
    """Raises EncoderError: torchmetrics does not have the file, or another one."""
    package = find_spec('torchmetrics')
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / HEADS
    found = sha256_of(path) if path.is_file() else 'none'
    if found != HEADS_SHA256:
        raise EncoderError(f"{path}: LPIPS's heads have the SHA-256 {found}, expected {HEADS_SHA256}; install torchmetrics again")
    return path


@torch.no_grad()
def _fill(path: Path, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Copy tensors of a file into those of a model, all of them or none; a missing, unexpected or misshapen one raises EncoderError."""
    wrong = {
        'missing': sorted(wanted.keys() - found.keys()),
        'unexpected': sorted(found.keys() - wanted.keys()),
        'of another shape': [name for name in wanted if name in found and found[name].shape != wanted[name].shape],
    }
    said = [f'{len(names)} {what} ({", ".join(names[:3])})' for what, names in wrong.items() if names]
    if said:
        raise EncoderError(f'{path}: not the weights that LPIPS needs: {"; ".join(said)}; get the file again')
    for name, tensor in wanted.items():
        tensor.copy_(found[name])
