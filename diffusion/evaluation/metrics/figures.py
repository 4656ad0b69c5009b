"""The figures of an evaluation by name: which network's features each needs, what it means, and how it is computed with its error.

`kid@random-conv` is KID with the features of another network than the one that the literature takes; its name says so wherever it is shown.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from diffusion.common.text import counted
from diffusion.contracts.compositions import CATEGORIES
from diffusion.contracts.errors import InputError
from diffusion.evaluation.features import drawn_compositions
from diffusion.evaluation.features.drawn_shapes import WORDS, agreement, scenes_of
from diffusion.evaluation.features.networks import EMBEDDING
from diffusion.evaluation.metrics import distances
from diffusion.evaluation.metrics.distances import Estimate, Gaussian, bootstrap, cmmd, frechet, gaussian, halves, kid, unit

RESAMPLES = 20
Real = Tensor | Gaussian  # features (N, D), or saved statistics, which FID alone can take
Values = dict[str, float]


@dataclass(frozen=True)
class Figure:
    """A number that is reported: its direction and, in a line, its meaning."""

    meaning: str
    lower_is_better: bool


@dataclass(frozen=True)
class Metric:
    """Figures that are computed together."""

    extractor: str  # name in EXTRACTORS of the network
    feature: str  # which of its features
    figures: Mapping[str, Figure]  # what `score` returns, by name
    score: Callable[..., dict[str, Values]]  # see `__call__`
    needs_captions: bool = False  # `score` needs embeddings of the drawn images' captions, in the same order
    needs_real: bool = True  # `score` needs real images
    check_captions: Callable[[Sequence[str]], object] | None = None  # raises DataError for captions that the metric is not for

    def __call__(self, real: Real | None, drawn: Tensor, texts: Tensor | None, seed: int, resamples: int = RESAMPLES) -> dict[str, Values]:
        """Compute the figures.

        Args:
            real: features (N, D) of real images, or their Gaussian if the metric is FID.
            drawn: features (M, D) of drawn images.
            texts: (M, D) embeddings of their captions.
            seed: of subsets and resamples.
            resamples: of the bootstrap, for the errors; 0: no errors and no further values, for scores during training.

        Returns:
            By figure: `value`; with resamples `error` (standard deviation over bootstrap resamples, or the standard error of a mean), and where
            they make sense `at_infinity` (extrapolated to infinitely many images), `null` (the value between two parts of the real images,
            `null_count` each) and `unbiased`.

        Raises:
            ValueError: too few images, or statistics where features are needed.
        """
        if self.needs_real and not isinstance(real, Tensor) and not (isinstance(real, Gaussian) and self.score is _fid):
            raise ValueError(f'{", ".join(self.figures)}: needs features of real images, not their statistics alone')
        if self.needs_captions and (texts is None or len(texts) != len(drawn)):
            raise ValueError(f'{", ".join(self.figures)}: {counted(len(drawn), "image")} and captions of {0 if texts is None else len(texts)}')
        return self.score(real, drawn, texts, seed, resamples)


def _fid(real: Real, drawn: Tensor, _texts: None, seed: int, resamples: int) -> dict[str, Values]:
    reference = real if isinstance(real, Gaussian) else gaussian(real)
    values = {'value': frechet(reference, gaussian(drawn))}
    if resamples:
        values['at_infinity'] = distances.frechet_at_infinity(reference, drawn, seed)
        if isinstance(real, Gaussian):
            values['error'] = bootstrap(lambda rows: frechet(reference, gaussian(rows)), drawn, seed=seed, resamples=resamples)
        else:
            values['error'] = bootstrap(_frechet_of, real, drawn, seed=seed, resamples=resamples)
            values |= _null(_frechet_of, real, len(drawn), seed)
    return {'fid': values}


def _kid(real: Tensor, drawn: Tensor, _texts: None, seed: int, resamples: int) -> dict[str, Values]:
    estimate = kid(real, drawn, seed)
    values = {'value': estimate.value}
    if resamples:
        values |= {'error': distances.kid_error(real, drawn, estimate, seed, resamples), 'subsets_deviation': estimate.error}
        values |= _null(lambda first, second: kid(first, second, seed).value, real, len(drawn), seed)
    return {'kid': values}


def _cmmd(real: Tensor, drawn: Tensor, _texts: None, seed: int, resamples: int) -> dict[str, Values]:
    values = {'value': cmmd(real, drawn), 'unbiased': cmmd(real, drawn, biased=False)}
    if resamples:
        values['error'] = distances.CMMD_SCALE * distances.mmd_error(unit(real), unit(drawn), distances.radial, True, seed, resamples)
        values |= _null(cmmd, real, len(drawn), seed)
    return {'cmmd': values}


def _clip(_real: None, drawn: Tensor, texts: Tensor, _seed: int, _resamples: int) -> dict[str, Values]:
    return {'clip': _values(distances.clip_score(drawn, texts))}


def _preference(_real: None, drawn: Tensor, texts: Tensor, _seed: int, _resamples: int) -> dict[str, Values]:
    return {'preference': _values(distances.scaled_cosine(drawn, texts))}


def _precision_recall(real: Tensor, drawn: Tensor, _texts: None, seed: int, resamples: int) -> dict[str, Values]:
    values: dict[str, Values] = {
        name: {'value': value} for name, value in zip(('precision', 'recall'), distances.precision_recall(real, drawn), strict=True)
    }
    if resamples:
        first, second = halves(real, len(drawn), seed)
        for name, null in zip(values, distances.precision_recall(first, second), strict=True):
            values[name] |= {'null': null, 'null_count': len(first)}
    return values


def _shapes(_real: None, drawn: Tensor, texts: Tensor, _seed: int, _resamples: int) -> dict[str, Values]:
    return {f'right_{field}': _values(distances.share_of(right)) for field, right in agreement(drawn, texts).items()}


def _composition(_real: None, drawn: Tensor, texts: Tensor, _seed: int, _resamples: int) -> dict[str, Values]:
    shares = {name: distances.share_of(right) for name, right in drawn_compositions.agreement(drawn, texts).items()}
    count = len(shares)
    overall = Estimate(sum(one.value for one in shares.values()) / count, math.hypot(*(one.error for one in shares.values())) / count)
    return {'composition': _values(overall), **{f'composition_{name}': _values(one) for name, one in shares.items()}}


def _values(estimate: Estimate) -> Values:
    return {'value': estimate.value, 'error': estimate.error}


def _frechet_of(real: Tensor, drawn: Tensor) -> float:
    return frechet(gaussian(real), gaussian(drawn))


def _null(score: Callable[[Tensor, Tensor], float], real: Tensor, count: int, seed: int) -> Values:
    first, second = halves(real, count, seed)
    return {'null': score(first, second), 'null_count': len(first)}


_FID = {'fid': Figure('distance of the Gaussians of real and drawn features; compare equal numbers of images only', lower_is_better=True)}
_KID_MEANING = 'squared MMD of features, cubic kernel, unbiased, mean of 100 subsets of 1,000 images (of all if fewer); may be negative'
_KID = {'kid': Figure(_KID_MEANING, lower_is_better=True)}
_CMMD = {'cmmd': Figure('1000 x squared MMD of unit CLIP embeddings, biased as published', lower_is_better=True)}
_CLIP = {'clip': Figure('100 x cosine of image and caption, negative ones as 0', lower_is_better=False)}
_PICKSCORE = {'preference': Figure("cosine of image and caption by PickScore, times its weights' own scale (about 100)", lower_is_better=False)}
_HPS = {'preference': Figure('100 x cosine of image and caption by HPSv2.1', lower_is_better=False)}
_PRECISION_RECALL = {
    'precision': Figure('share of drawn images within the manifold of real ones (3 neighbours)', lower_is_better=False),
    'recall': Figure('share of real images within the manifold of drawn ones (3 neighbours)', lower_is_better=False),
}
_SHAPES = {
    **{f'right_{field}': Figure(f'share of images of drawn shapes with the {field} of their captions', lower_is_better=False) for field in WORDS},
    'right_everything': Figure('share of images of drawn shapes that are right in all of this', lower_is_better=False),
}
_COMPOSITION = {
    'composition': Figure("share of drawn scenes that show what their captions say: mean of the categories' shares", lower_is_better=False),
    **{f'composition_{name}': Figure(f'the same of the category {name}', lower_is_better=False) for name in CATEGORIES},
}
METRICS: dict[str, Metric] = {
    'fid': Metric('inception', 'inception', _FID, _fid),
    'fid_clean': Metric('inception', 'inception-clean', _FID, _fid),
    'kid': Metric('inception', 'inception', _KID, _kid),
    'kid_clean': Metric('inception', 'inception-clean', _KID, _kid),
    'fd_dinov2': Metric('dinov2-vitl14', 'dinov2-vitl14', _FID, _fid),
    'mmd_dinov2': Metric('dinov2-vitl14', 'dinov2-vitl14', _KID, _kid),
    'cmmd': Metric('clip-vit-l14-336', 'clip-vit-l14-336', _CMMD, _cmmd),
    'clip': Metric('clip-vit-l14', 'clip-vit-l14', _CLIP, _clip, needs_captions=True, needs_real=False),
    'pickscore': Metric('pickscore', 'pickscore', _PICKSCORE, _preference, needs_captions=True, needs_real=False),
    'hpsv2': Metric('hpsv2', 'hpsv2', _HPS, _preference, needs_captions=True, needs_real=False),
    'precision_recall': Metric('inception', 'inception', _PRECISION_RECALL, _precision_recall),
    'shapes': Metric('shapes-look', 'shapes-look', _SHAPES, _shapes, needs_captions=True, needs_real=False, check_captions=scenes_of),
    'composition': Metric(
        'compositions-look',
        'compositions-look',
        _COMPOSITION,
        _composition,
        needs_captions=True,
        needs_real=False,
        check_captions=drawn_compositions.compositions_of,
    ),
}


def find_metric(name: str) -> Metric:
    """Return the metric `fid`, or `fid@random-conv` with the first feature of another network.

    Raises:
        InputError: an unknown metric or network, or one that cannot embed captions where they are needed.
    """
    kind, separator, network = name.partition('@')
    if kind not in METRICS or (separator and network not in EMBEDDING):
        others = ', '.join(known for known, metric in METRICS.items() if metric.extractor in EMBEDDING)
        raise InputError(f'unknown metric {name}; known: {", ".join(METRICS)}; {others} also as METRIC@NETWORK with one of {", ".join(EMBEDDING)}')
    metric = METRICS[kind]
    if not separator:
        return metric
    if metric.extractor not in EMBEDDING:
        raise InputError(f'{name}: {kind} takes no other network; leave out @{network}')
    if metric.needs_captions and not EMBEDDING[network].texts:
        raise InputError(f'{name}: {network} embeds no captions; those that do: {", ".join(n for n, known in EMBEDDING.items() if known.texts)}')
    return replace(metric, extractor=network, feature=EMBEDDING[network].features[0])


def name_of(name: str, metric: Metric, figure: str) -> str:
    """Name of a figure in results: the metric's as asked for, or the figure's own where a metric has several (`precision@random-conv`)."""
    if len(metric.figures) == 1:
        return name
    _, separator, network = name.partition('@')
    return f'{figure}{separator}{network}'
