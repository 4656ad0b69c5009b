"""Figures of reconstructions: an image against the one that it was made from (PSNR, SSIM, LPIPS), all of them against all (rFID), and latents.

SSIM is torchmetrics'. LPIPS is ours (features/lpips.py): torchmetrics' takes its VGG16 from a download alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypedDict, cast

import torch
from torch import Tensor
from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure

from diffusion.common.text import did_you_mean
from diffusion.contracts.errors import EncoderError, InputError
from diffusion.encoders.frozen import pixels_to_unit_range
from diffusion.evaluation.features.extractors import Extractor, in_batches, load_extractors
from diffusion.evaluation.features.lpips import PERCEPTUAL, PerceptualDistance, find_perceptual
from diffusion.evaluation.features.networks import precise
from diffusion.evaluation.metrics.distances import bootstrap, frechet, gaussian, mean_of
from diffusion.evaluation.metrics.figures import RESAMPLES, Figure, Metric, find_metric

LEVELS = 255.0
PAIRS = {
    'psnr': Figure('peak signal-to-noise ratio in dB of 8-bit images, mean over images: pixels alone', lower_is_better=False),
    'ssim': Figure(
        'structural similarity in Gaussian windows of 11 px (deviation 1.5), mean over channels, places and images', lower_is_better=False
    ),
    'lpips': Figure('LPIPS 0.1 with VGG16, mean over images: distance of features that agree with what people see', lower_is_better=True),
    'lpips@random-conv': Figure(
        'the distance of LPIPS with random convolutions made here: no LPIPS of papers, compares with itself alone', lower_is_better=True
    ),
}
SETS = ('fid', 'fid_clean')  # of diffusion.evaluate; also @NETWORK
SET_MEANING = 'FID of the reconstructions against the originals (rFID), 0 for a perfect autoencoder; compare equal numbers of images only'


def psnr(images: Tensor, originals: Tensor) -> Tensor:
    """Return (B,) dB of (B, 3, H, W) uint8 images: 10 log10(255^2 / mean squared error).

    Equal images, whose ratio is infinite, count as if a single value of them were off by one level.
    """
    values = peak_signal_noise_ratio(images.float(), originals.float(), data_range=LEVELS, reduction='none', dim=(1, 2, 3))
    return torch.as_tensor(values).clamp(max=10 * math.log10(LEVELS**2 * images[0].numel()))


def ssim(images: Tensor, originals: Tensor) -> Tensor:
    """Return (B,) structural similarity (Wang et al., IEEE TIP 13, 2004) of (B, 3, H, W) uint8 images, each channel by itself.

    In torchmetrics' form: windows at the border see the image mirrored, where others leave these places out. Float32 is good to 0.0001:
    equal images with flat areas have 0.99994. Float64 takes 14 times as long on a CPU.
    """
    values = structural_similarity_index_measure(
        images.float(), originals.float(), gaussian_kernel=True, sigma=1.5, kernel_size=11, data_range=LEVELS, reduction='none'
    )
    return cast(Tensor, values)


@dataclass(frozen=True, eq=False)
class PairMetrics:
    """Figures of reconstructions by name, with the networks that they need: perceptual distances, and distances of two sets of features.

    Attributes:
        batch: images that a feature network gets at once.
    """

    names: tuple[str, ...]
    perceptual: Mapping[str, PerceptualDistance]
    sets: Mapping[str, tuple[Metric, Extractor]]
    batch: int

    @classmethod
    def load(
        cls, names: Sequence[str], weights: Path | None = None, device: torch.device | str = 'cpu', download: bool = False, batch: int = 16
    ) -> Self:
        """Find all networks.

        Args:
            weights, download: as `load_extractors` has them.

        Raises:
            InputError: an unknown name.
            EncoderError: weights are missing, of all networks, or are others than published.
        """
        metrics = {name: _find_set(name) for name in names if name not in PAIRS}
        perceptual, extractors, errors = dict[str, PerceptualDistance](), dict[str, Extractor](), list[str]()
        for name in names:
            try:
                if name in PERCEPTUAL:
                    perceptual[name] = find_perceptual(name, weights, download).to(device)
                elif name in metrics and metrics[name].extractor not in extractors:
                    (extractors[metrics[name].extractor],) = load_extractors([metrics[name].extractor], weights, device, download)
            except EncoderError as error:
                errors.append(str(error))
        if errors:
            missing = {name.partition('@')[0] for name in names} & {'lpips', *SETS}
            free = ','.join(f'{name}@random-conv' for name in sorted(missing))
            raise EncoderError(
                '\n'.join([*dict.fromkeys(errors), f'No weights are needed by --metrics psnr,ssim,{free}, which are no published figures'])
            )
        return cls(tuple(names), perceptual, {name: (metric, extractors[metric.extractor]) for name, metric in metrics.items()}, batch)

    @property
    def extractors(self) -> dict[str, Extractor]:
        """Feature networks by name, each once."""
        return {extractor.name: extractor for _, extractor in self.sets.values()}

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of the weights of each network: a figure depends on them."""
        networks: dict[str, Any] = {**self.perceptual, **self.extractors}
        return {name: network.sha256 for name, network in networks.items()}

    @precise()
    def of_pairs(self, images: Tensor, originals: Tensor) -> dict[str, Tensor]:
        """Return (B,) float32 on the CPU for each figure of pairs of (B, 3, H, W) uint8 images on the device."""
        found = {}
        for name in self.names:
            if name in self.perceptual:
                found[name] = self.perceptual[name](pixels_to_unit_range(images), pixels_to_unit_range(originals)).cpu()
            elif name in PAIRS:
                found[name] = (psnr if name == 'psnr' else ssim)(images, originals).cpu()
        return found

    def features(self, images: Tensor) -> dict[str, Tensor]:
        """Return (B, D) float32 on the CPU by name of the feature, of (B, 3, H, W) uint8."""
        found: dict[str, Tensor] = {}
        for extractor in self.extractors.values():
            found |= in_batches(extractor, images, self.batch)
        return found

    def figures(
        self, pairs: Mapping[str, Tensor], features: Mapping[str, Tensor], originals: Mapping[str, Tensor], seed: int = 0
    ) -> dict[str, dict[str, Any]]:
        """Return the figures by name, in the order in which they were asked for.

        Args:
            pairs: what `of_pairs` returned, (N,) of all images.
            features: what `features` returned of the reconstructions, (N, D).
            originals: the same of the originals, in the same order.
            seed: of the resamples.

        Returns:
            `error` is the standard error of a mean; of rFID the deviation over resamples of pairs of an original and its reconstruction.
            Resampled one by one, as for drawn images, the chance that both share would be counted as difference.
        """
        found = dict[str, dict[str, Any]]()
        for name in self.names:
            if name in PAIRS:
                described, mean = PAIRS[name], mean_of(pairs[name].double())
                found[name] = {'value': mean.value, 'error': mean.error, 'meaning': described.meaning, 'lower_is_better': described.lower_is_better}
                continue
            metric, extractor = self.sets[name]
            real, drawn = originals[metric.feature], features[metric.feature]
            distance = partial(_distance_of_pairs, dimension=real.shape[1])
            both = torch.cat([real, drawn], dim=1)
            error = bootstrap(distance, both, seed=seed, resamples=RESAMPLES)
            found[name] = {'value': distance(both), 'error': error, 'meaning': SET_MEANING, 'lower_is_better': True, 'extractor': extractor.name}
        return found


def _find_set(name: str) -> Metric:
    kind = name.partition('@')[0]
    if kind not in SETS:
        known = (*PAIRS, *SETS)
        raise InputError(f'unknown metric {name}{did_you_mean(name, known)} Known: {", ".join(known)}; {", ".join(SETS)} also as METRIC@NETWORK')
    return find_metric(name)


def _distance_of_pairs(rows: Tensor, dimension: int) -> float:
    """Return FID of (N, 2D) rows: features of originals next to those of their reconstructions."""
    return frechet(gaussian(rows[:, :dimension]), gaussian(rows[:, dimension:]))


TOLERANCE = 0.05  # of mean and deviation after scale and shift


class LatentRecord(TypedDict):
    """Latents of a set of images, unscaled, as draws from their posteriors: what training sees."""

    mean: float  # over all channels: what `shift_factor` should be
    std: float  # about that mean: 1 / what `scaling_factor` should be
    channels: list[dict[str, float]]  # mean, std, posterior_std: root mean square of the posterior's own deviation, the part of `std` that is noise


class LatentStatistics:
    """Sums over the moments that arrive in batches, float64 on the CPU.

    Args:
        channels: of the latents.
    """

    def __init__(self, channels: int):
        self.count = 0  # values of each channel
        self._sum, self._squares, self._variances = torch.zeros(3, channels, dtype=torch.float64).unbind()

    def add(self, moments: Tensor) -> None:
        """Add (B, 2C, h, w) moments, mean and log variance, unscaled."""
        mean, log_variance = moments.double().cpu().chunk(2, dim=1)
        over = (0, 2, 3)
        self.count += mean[:, 0].numel()
        self._sum += mean.sum(dim=over)
        self._squares += mean.square().sum(dim=over)
        self._variances += log_variance.clamp(-30, 20).exp().sum(dim=over)

    def record(self) -> LatentRecord:
        """Return mean and deviation of all draws: E[var] + var[E] of the posteriors, without drawing.

        Raises:
            ValueError: nothing was added.
        """
        if not self.count:
            raise ValueError('no latents were added')
        mean, noise = self._sum / self.count, self._variances / self.count
        second = self._squares / self.count + noise  # (C,) second moments of draws
        std = (second - mean.square()).clamp(min=0).sqrt()
        rows = zip(mean.tolist(), std.tolist(), noise.sqrt().tolist(), strict=True)
        return {
            'mean': float(mean.mean()),
            'std': math.sqrt(max(0.0, float(second.mean() - mean.mean().square()))),
            'channels': [{'mean': a, 'std': b, 'posterior_std': c} for a, b, c in rows],
        }


def scale_warnings(record: LatentRecord, scaling_factor: float, shift_factor: float) -> list[str]:
    """Return sentences about what the configured factors leave of mean 0 and deviation 1; none if both are within TOLERANCE."""
    if not record['std']:
        return ['The latents are constant: the autoencoder encodes nothing.']
    found = []
    std, mean = record['std'] * scaling_factor, (record['mean'] - shift_factor) * scaling_factor
    if abs(std - 1) > TOLERANCE:
        found.append(
            f'scaling_factor {scaling_factor:g} leaves latents of these images a standard deviation of {std:.3g} (1 expected, to 5 %); '
            f'{1 / record["std"]:.4g} would give 1.'
        )
    if abs(mean) > TOLERANCE:
        found.append(
            f'shift_factor {shift_factor:g} leaves latents of these images a mean of {mean:.3g} standard units (0 expected, to 0.05); '
            f'{record["mean"]:.4g} would give 0.'
        )
    return found
