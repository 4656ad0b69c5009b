"""Figures of reconstructions: an image against the one that it was made from (PSNR, SSIM, LPIPS), all of them against all (rFID), and latents.

SSIM is torchmetrics'. LPIPS is ours (features/lpips.py): torchmetrics' takes its VGG16 from a download alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure

from diffusion.common.text import did_you_mean
from diffusion.contracts.errors import EncoderError, InputError
from diffusion.encoders.frozen import pixels_to_unit_range
from diffusion.evaluation.features.lpips import PERCEPTUAL, PerceptualDistance, find_perceptual
from diffusion.evaluation.features.networks import FeatureNetwork, in_batches, load_extractors, precise
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
SET_FIGURE = Figure(SET_MEANING, lower_is_better=True)


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
    options: dict[str, Any] = {'gaussian_kernel': True, 'sigma': 1.5, 'kernel_size': 11, 'data_range': LEVELS, 'reduction': 'none'}
    return torch.as_tensor(structural_similarity_index_measure(images.float(), originals.float(), **options))


@dataclass(frozen=True, eq=False)
class PairMetrics:
    """Figures of reconstructions by name, with the networks that they need: perceptual distances, and distances of two sets of features.

    Attributes:
        batch: images that a feature network gets at once.
    """

    names: Sequence[str]
    perceptual: Mapping[str, PerceptualDistance]
    sets: Mapping[str, tuple[Metric, FeatureNetwork]]
    batch: int

    @classmethod
    def load(
        cls, names: Sequence[str], weights: Path | None = None, device: torch.device | str = 'cpu', download: bool = False, batch: int = 16
    ) -> Self:
        """Find all networks; `weights` and `download` are as `load_extractors` has them.

        Raises:
            InputError: an unknown name.
            EncoderError: weights are missing, of all networks, or are others than published.
        """
        for name in names:
            if name not in PAIRS and name.partition('@')[0] not in SETS:
                known = (*PAIRS, *SETS)
                also = f'{", ".join(SETS)} also as METRIC@NETWORK'
                raise InputError(f'unknown metric {name}{did_you_mean(name, known)} Known: {", ".join(known)}; {also}')
        metrics = {name: find_metric(name) for name in names if name not in PAIRS}
        perceptual, networks, errors = dict[str, PerceptualDistance](), dict[str, FeatureNetwork](), list[str]()
        for name in names:
            try:
                if name in PERCEPTUAL:
                    perceptual[name] = find_perceptual(name, weights, download).to(device)
                elif name in metrics and metrics[name].extractor not in networks:
                    (networks[metrics[name].extractor],) = load_extractors([metrics[name].extractor], weights, device, download)
            except EncoderError as error:
                errors.append(str(error))
        if errors:
            missing = {name.partition('@')[0] for name in names} & {'lpips', *SETS}
            free = ','.join(f'{name}@random-conv' for name in sorted(missing))
            remedy = f'No weights are needed by --metrics psnr,ssim,{free}, which are no published figures'
            raise EncoderError('\n'.join([*dict.fromkeys(errors), remedy]))
        return cls(names, perceptual, {name: (metric, networks[metric.extractor]) for name, metric in metrics.items()}, batch)

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of the weights of each network: a figure depends on them."""
        perceptual = {name: network.sha256 for name, network in self.perceptual.items()}
        return perceptual | {network.name: network.sha256 for _, network in self.sets.values()}

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
        for network in {network.name: network for _, network in self.sets.values()}.values():
            found |= in_batches(network, images, self.batch)
        return found

    def figures(
        self, pairs: Mapping[str, Tensor], features: Mapping[str, Tensor], originals: Mapping[str, Tensor], seed: int = 0
    ) -> dict[str, dict[str, Any]]:
        """Return the figures by name, in the order in which they were asked for.

        Their `error` is the standard error of a mean; of rFID the deviation over resamples of pairs of an original and its reconstruction. Resampled
        one by one, as for drawn images, the chance that both share would be counted as difference.

        Args:
            pairs: (N,) by figure of all images, as `of_pairs` returns them.
            features: (N, D) by name, as `features` returns them of the reconstructions.
            originals: the same of the originals, in the same order.
            seed: of the resamples.
        """
        found = dict[str, dict[str, Any]]()
        for name in self.names:
            if name in PAIRS:
                mean = mean_of(pairs[name].double())
                found[name] = {'value': mean.value, 'error': mean.error, **asdict(PAIRS[name])}
                continue
            metric, network = self.sets[name]
            both = torch.cat([originals[metric.feature], features[metric.feature]], dim=1)
            error = bootstrap(_distance_of_halves, both, seed=seed, resamples=RESAMPLES)
            found[name] = {'value': _distance_of_halves(both), 'error': error, **asdict(SET_FIGURE), 'extractor': network.name}
        return found


def _distance_of_halves(rows: Tensor) -> float:
    """Return FID of (N, 2D) rows: features of originals next to those of their reconstructions."""
    real, drawn = rows.chunk(2, dim=1)
    return frechet(gaussian(real), gaussian(drawn))


TOLERANCE = 0.05  # of mean and deviation after scale and shift


class LatentStatistics:
    """Sums over the moments of latents with so many channels that arrive in batches, float64 on the CPU."""

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

    def record(self) -> dict[str, Any]:
        """Return a LatentRecord (job/results.py) of all draws, whose variance is E[var] + var[E] of the posteriors, without drawing.

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


def scale_warnings(record: Mapping[str, Any], scaling_factor: float, shift_factor: float) -> list[str]:
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
