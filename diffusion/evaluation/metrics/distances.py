"""Distances between two sets of features, in float64: pure functions of tensors, without files and networks.

Features (N, D) may be float32, as networks return them: only blocks of BLOCK rows at a time become float64. Everything is computed
on the device of the features; random choices are made by NumPy on the CPU, so that a seed means the same on any device.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from diffusion.common.text import counted

BLOCK = 2000  # rows; two blocks of 2,048 dimensions and their kernel take 100 MB
INFINITY_SIZES = 8  # of samples, from a quarter to all, through which FID at infinity is extrapolated
KID_SUBSETS, KID_SUBSET_SIZE = 100, 1000  # as torch-fidelity takes them
CMMD_SCALE, CMMD_SIGMA = 1000.0, 10.0  # as arXiv 2401.09603 reports it
Kernel = Callable[[Tensor, Tensor], Tensor]  # (N, D), (M, D) -> (N, M)


@dataclass(frozen=True)
class Estimate:
    """A value and its error: a standard deviation in the value's unit; each function says of what."""

    value: float
    error: float


@dataclass(frozen=True, eq=False)
class Gaussian:
    """Mean (D,) and covariance (D, D), divided by `count` - 1, of features in float64: all that FID knows of a set of images."""

    mean: Tensor
    covariance: Tensor
    count: int

    @cached_property
    def root(self) -> Tensor:
        """(D, D) symmetric square root of the covariance; computed once for all sets that this one is compared with."""
        values, vectors = torch.linalg.eigh(self.covariance)
        return (vectors * values.clamp(min=0).sqrt()) @ vectors.T


def gaussian(features: Tensor) -> Gaussian:
    """Return mean and covariance of (N, D) features; blocks are merged as in Chan et al. (1979), without cancellation.

    Raises:
        ValueError: fewer than two rows.
    """
    if len(features) < 2:
        has = 'has' if len(features) == 1 else 'have'
        raise ValueError(f'{counted(len(features), "image")} {has} no covariance; at least 2 are needed, and thousands for a FID')
    count = 0
    for rows in _blocks(features):
        mean = rows.mean(dim=0)
        centred = rows - mean
        if not count:
            merged, scatter = torch.zeros_like(mean), torch.zeros_like(centred.T @ centred)
        difference, total = mean - merged, count + len(rows)
        scatter += centred.T @ centred + torch.outer(difference, difference) * (count * len(rows) / total)
        merged += difference * (len(rows) / total)
        count = total
    return Gaussian(merged, scatter / (count - 1), count)


def frechet(real: Gaussian, drawn: Gaussian) -> float:
    """Return the squared Frechet distance of two Gaussians (arXiv 1706.08500), FID if the features are Inception's.

    The trace of the root of the covariances' product is that of a symmetric matrix: real eigenvalues, also where covariances are singular.
    """
    product = real.root @ drawn.covariance @ real.root
    trace = torch.linalg.eigvalsh((product + product.T) / 2).clamp(min=0).sqrt().sum()
    distance = (real.mean - drawn.mean).square().sum() + real.covariance.trace() + drawn.covariance.trace() - 2 * trace
    return float(distance)


def frechet_at_infinity(real: Gaussian, drawn: Tensor, seed: int) -> float:
    """Extrapolate FID to infinitely many drawn images (arXiv 1911.07023): FID of random parts of `drawn` is a line over 1 / size.

    FID of N images is too large by about a constant / N: only this value compares between different N. It is rough with fewer images than
    dimensions.
    """
    generator = np.random.RandomState(seed)
    sizes = np.unique(np.linspace(max(2, len(drawn) // 4), len(drawn), INFINITY_SIZES).astype(int))
    values = [frechet(real, gaussian(_rows(drawn, generator.choice(len(drawn), size, replace=False)))) for size in sizes]
    if len(sizes) < 2:
        raise ValueError(f'{counted(len(drawn), "image")}: too few to extrapolate')
    return float(np.polyfit(1 / sizes, values, deg=1)[1])


def cubic(x: Tensor, y: Tensor) -> Tensor:
    """Return KID's kernel (x.y / D + 1)^3 of all pairs of rows."""
    return (x @ y.T / x.shape[1] + 1) ** 3


def radial(x: Tensor, y: Tensor) -> Tensor:
    """Return CMMD's kernel exp(-|x - y|^2 / (2 * 10^2)) of all pairs of rows, which have length 1."""
    return torch.exp((x @ y.T - 1) / CMMD_SIGMA**2)


def squared_mmd(real: Tensor, drawn: Tensor, kernel: Kernel, biased: bool, weights: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Return the squared maximum mean discrepancy (R,) of two sets, one value for each row of weights, in blocks.

    Args:
        biased: count each row paired with itself, too (V-statistic). Otherwise (U-statistic) no pair of a row with itself counts, not even of two
            copies of it in a resample: the mean is over the N^2 - sum of counts^2 pairs that remain.
        weights: how often each row of `real` (R, N) and of `drawn` (R, M) counts; rows add up to N and M. None: once, R = 1.

    Raises:
        ValueError: the unbiased form of fewer than two rows.
    """
    if not biased and min(len(real), len(drawn)) < 2:
        raise ValueError(f'{len(real)} real and {len(drawn)} drawn images; the unbiased distance needs 2 of each')
    for_real, for_drawn = weights or (torch.ones(1, len(real)), torch.ones(1, len(drawn)))
    for_real, for_drawn = (counts.to(real.device, torch.float64) for counts in (for_real, for_drawn))

    def within(features: Tensor, counts: Tensor) -> Tensor:
        """(R,): mean kernel of the pairs of one set's rows; of different rows if not biased."""
        total = torch.zeros(len(counts), dtype=torch.float64, device=features.device)
        for i, x in enumerate(_blocks(features)):
            for j, y in enumerate(_blocks(features[: (i + 1) * BLOCK])):
                values = kernel(x, y)
                if i == j and not biased:
                    values.fill_diagonal_(0)
                total += _weighted_sum(values, counts[:, _span(i)], counts[:, _span(j)]) * (1 if i == j else 2)
        return total / (len(features) ** 2 - (0 if biased else counts.square().sum(dim=1)))

    between = torch.zeros(len(for_real), dtype=torch.float64, device=real.device)
    for i, x in enumerate(_blocks(real)):
        for j, y in enumerate(_blocks(drawn)):
            between += _weighted_sum(kernel(x, y), for_real[:, _span(i)], for_drawn[:, _span(j)])
    return within(real, for_real) + within(drawn, for_drawn) - 2 * between / (len(real) * len(drawn))


def _weighted_sum(values: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """(R,): sum over i and j of left[r, i] values[i, j] right[r, j]."""
    return (left @ values * right).sum(dim=1)


def kid(real: Tensor, drawn: Tensor, seed: int, subsets: int = KID_SUBSETS, size: int = KID_SUBSET_SIZE) -> Estimate:
    """Return the mean squared MMD (cubic kernel, unbiased) of random subsets (arXiv 1801.01401); it may be negative.

    Subsets are those of torch-fidelity for the same seed. With fewer than `size` images a subset is as large as the smaller set. The error is the
    standard deviation over subsets, as papers print it: not that of the mean, which `kid_error` estimates.
    """
    size, generator = min(size, len(real), len(drawn)), np.random.RandomState(seed)
    values = []
    for _ in range(subsets if size < max(len(real), len(drawn)) else 1):  # all subsets are equal if they hold everything
        of_drawn, of_real = (_rows(features, generator.choice(len(features), size, replace=False)) for features in (drawn, real))
        values.append(float(squared_mmd(of_real, of_drawn, cubic, biased=False)))
    return Estimate(float(np.mean(values)), float(np.std(values)))


def cmmd(real: Tensor, drawn: Tensor, biased: bool = True) -> float:
    """Return 1000 times the squared MMD of unit vectors with a Gaussian kernel of width 10 (arXiv 2401.09603).

    Biased, as published, it is too large by 0.008 at 1,000 images and 0.0026 at 3,000; unbiased, for fewer images than that, it may be negative.
    """
    return CMMD_SCALE * float(squared_mmd(unit(real), unit(drawn), radial, biased))


def mmd_error(real: Tensor, drawn: Tensor, kernel: Kernel, biased: bool, seed: int, resamples: int = 20) -> float:
    """Return the standard deviation of the squared MMD over bootstrap resamples of both sets, from one pass over the kernel.

    The bootstrap of U- and V-statistics (Arcones and Gine, Annals of Statistics 20, 1992): each resample draws N of the N real rows and M of the M
    drawn ones with replacement, and the same statistic is computed of it. If row i occurs c_i times, the mean kernel within a set is

        biased:    sum_ij   c_i c_j k(x_i, x_j) / N^2
        unbiased:  sum_i!=j c_i c_j k(x_i, x_j) / (N^2 - sum_i c_i^2)

    The divisor of the unbiased form is the number of pairs that it sums, which differs between resamples. Divided by N (N - 1) it would vary with the
    number of repeated rows by k / N^1.5: more than CMMD itself, whose kernel is 1 to within 2 %. Counting rows instead of copying them makes all
    resamples cost what one distance of the full sets costs. With a handful of rows the unbiased form of a resample may have no pair: NaN.

    Where both sets have one law the statistic is degenerate, and the bootstrap's deviation is up to sqrt(3) times the true one: with D the difference
    of the means in the kernel's space and C the covariance of its estimate, the variance is 4 D'CD + 2 tr C^2, and the resamples take D from the
    sample, which adds 4 tr C^2. Errors of distances near zero are thus on the safe side.
    """
    generator = np.random.RandomState(seed)
    weights = [
        torch.from_numpy(generator.multinomial(len(features), np.full(len(features), 1 / len(features)), resamples)) for features in (real, drawn)
    ]
    return float(squared_mmd(real, drawn, kernel, biased, weights=(weights[0], weights[1])).std())


def kid_error(real: Tensor, drawn: Tensor, estimate: Estimate, seed: int, resamples: int = 20, subsets: int = KID_SUBSETS) -> float:
    """Return the standard error of the mean over subsets: of the `estimate` that `kid` returned for that number of subsets.

    Given the images, subsets are independent and each one's expectation is the unbiased squared MMD of all images. So the variance of their mean is
    that of this MMD plus the variance over subsets divided by their number; the second part is the larger one for tens of thousands of images.
    """
    of_choice = estimate.error / math.sqrt(subsets - 1)  # not `subsets`: its deviation is divided by their number
    return math.hypot(mmd_error(real, drawn, cubic, False, seed, resamples), of_choice)


def clip_score(images: Tensor, texts: Tensor) -> Estimate:
    """Return the mean of 100 max(cos, 0) over pairs of image and text embeddings (arXiv 2104.08718), and its standard error over pairs."""
    return mean_of(100 * (unit(images) * unit(texts)).sum(dim=1).clamp(min=0))


def scaled_cosine(images: Tensor, texts: Tensor) -> Estimate:
    """Return the mean cosine of pairs of image and text embeddings times the length of the text's, and its standard error over pairs."""
    return mean_of((unit(images) * texts.double()).sum(dim=1))


def mean_of(values: Tensor) -> Estimate:
    """Return the mean of (N,) values and its standard error, NaN for a single one."""
    return Estimate(float(values.mean()), float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else math.nan)


def share_of(right: Tensor) -> Estimate:
    """Return the share of (N,) zeros and ones, and half of Wilson's interval of one deviation (JASA 22, 1927): not 0 where all are equal."""
    share, count = float(right.double().mean()), len(right)
    return Estimate(share, math.sqrt(share * (1 - share) / count + 1 / (4 * count**2)) / (1 + 1 / count))


def precision_recall(real: Tensor, drawn: Tensor, neighbours: int = 3) -> tuple[float, float]:
    """Return improved precision and recall (arXiv 1904.06991), shares from 0 to 1.

    Precision: how many drawn images lie within the ball of some real image, which reaches to its `neighbours`-th nearest other real image.
    Recall: the same with the sets exchanged. Both depend on the number of images: compare equal ones.

    Raises:
        ValueError: a set has no more than `neighbours` images.
    """
    if min(len(real), len(drawn)) <= neighbours:
        raise ValueError(f'{len(real)} real and {len(drawn)} drawn images; {neighbours} neighbours need more of each')

    def share_inside(points: Tensor, centres: Tensor) -> float:
        inside = torch.zeros(len(points), dtype=torch.bool, device=points.device)
        for x in _blocks(centres):
            shortest = x.new_empty(len(x), 0)
            for y in _blocks(centres):
                shortest = torch.cat([shortest, torch.cdist(x, y)], dim=1)
                shortest = shortest.topk(min(neighbours + 1, shortest.shape[1]), dim=1, largest=False).values  # one of them is the centre itself
            radius = shortest.amax(dim=1)
            for j, y in enumerate(_blocks(points)):
                inside[_span(j)] |= (torch.cdist(y, x) <= radius).any(dim=1)
        return float(inside.double().mean())

    return share_inside(drawn, real), share_inside(real, drawn)


def nearest(drawn: Tensor, known: Tensor, count: int = 1) -> tuple[Tensor, Tensor]:
    """Return for each drawn image cosine (N, count) and index (N, count) of the nearest known ones, nearest first."""
    found = []
    for x in _blocks(unit(drawn)):
        similar, index = x.new_empty(len(x), 0), torch.empty(len(x), 0, dtype=torch.int64, device=x.device)
        for j, y in enumerate(_blocks(known)):
            cosines = torch.cat([similar, x @ unit(y).T], dim=1)
            places = torch.arange(j * BLOCK, j * BLOCK + len(y), device=x.device).expand(len(x), -1)
            similar, best = cosines.topk(min(count, cosines.shape[1]), dim=1)
            index = torch.cat([index, places], dim=1).gather(1, best)
        found.append((similar, index))
    return torch.cat([similar for similar, _ in found]), torch.cat([index for _, index in found])


def halves(features: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return two random parts of `features` without a common row, of `count` rows or half of what there is: their distance shows what zero means."""
    order, count = np.random.RandomState(seed).permutation(len(features)), min(count, len(features) // 2)
    return _rows(features, order[:count]), _rows(features, order[count : 2 * count])


def bootstrap(score: Callable[..., float], *arrays: Tensor, seed: int, resamples: int = 20) -> float:
    """Return the standard deviation of `score` over resamples with replacement of each array's rows: an error bar.

    The resamples' mean is biased (for FID by more than its error), so that they give no interval.
    """
    generator = np.random.RandomState(seed)
    values = [score(*(_rows(array, generator.randint(len(array), size=len(array))) for array in arrays)) for _ in range(resamples)]
    return float(np.std(values, ddof=1))


def unit(features: Tensor) -> Tensor:
    """Return rows in float64, scaled to length 1."""
    return torch.nn.functional.normalize(features.double(), dim=1)


def _blocks(features: Tensor) -> Iterator[Tensor]:
    for rows in features.split(BLOCK):
        yield rows.double()


def _span(block: int) -> slice:
    return slice(block * BLOCK, (block + 1) * BLOCK)


def _rows(features: Tensor, index: np.ndarray) -> Tensor:
    return features[torch.from_numpy(index).to(features.device)]


# CLIP-I, DINO and CLIP-T of DreamBooth (arXiv 2208.12242), of embeddings: is it the subject, and does it do what the prompt says?


def subject_fidelity(drawn: Tensor, photos: Tensor) -> Estimate:
    """Return the mean cosine of all pairs of a drawn image (N, D) and a photo (M, D), and its standard error over drawn images, for these photos."""
    return mean_of((unit(drawn) @ unit(photos).T).mean(dim=1))


def photo_fidelity(photos: Tensor) -> Estimate:
    """Return the mean cosine of all pairs of two different photos (M, D): what a perfect model could reach. NaN for a single photo."""
    count = len(photos)
    if count < 2:
        return Estimate(math.nan, math.nan)
    cosines = unit(photos) @ unit(photos).T
    return mean_of((cosines.sum(dim=1) - cosines.diagonal()) / (count - 1))


def prompt_fidelity(drawn: Tensor, prompts: Tensor) -> Estimate:
    """Return the mean cosine of images (N, D) and their own prompts (N, D): CLIP-T, which unlike the CLIP score is neither clamped nor times 100."""
    return scaled_cosine(drawn, unit(prompts))
