"""Distances against closed forms, double loops, torch-fidelity and torchmetrics; in blocks as in one piece."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
from torch_fidelity.metric_kid import kid_features_to_metric
from torch_fidelity.metric_prc import prc_features_to_metric
from torchmetrics.image.fid import _compute_fid

from diffusion.evaluation.metrics import distances
from diffusion.evaluation.metrics.distances import (
    Estimate,
    Gaussian,
    bootstrap,
    clip_score,
    cmmd,
    cubic,
    frechet,
    frechet_at_infinity,
    gaussian,
    halves,
    kid,
    kid_error,
    mmd_error,
    nearest,
    precision_recall,
    radial,
    squared_mmd,
    unit,
)


def features(count: int, dimension: int, seed: int = 0, shift: float | Tensor = 0.0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(count, dimension, generator=torch.Generator().manual_seed(seed)) + shift


def exact(count: int, mean: Tensor, deviation: Tensor, seed: int) -> Tensor:
    """Rows whose mean is `mean` and whose covariance is diagonal with `deviation` squared, to rounding."""
    rows = features(count, len(mean), seed).double()
    rows -= rows.mean(dim=0)
    root = torch.linalg.cholesky(rows.T @ rows / (count - 1))
    return torch.linalg.solve_triangular(root, rows.T, upper=False).T * deviation + mean


def test_frechet_of_diagonal_gaussians_is_the_closed_form():
    means, deviations = (
        (torch.linspace(0, 1, 16).double(), torch.linspace(-1, 2, 16).double()),
        (torch.linspace(0.5, 2, 16), torch.linspace(3, 0.1, 16)),
    )
    drawn, real = (gaussian(exact(500, mean, deviation.double(), seed)) for seed, (mean, deviation) in enumerate(zip(means, deviations, strict=True)))
    expected = (means[0] - means[1]).square().sum() + (deviations[0].double() - deviations[1].double()).square().sum()
    assert frechet(real, drawn) == pytest.approx(float(expected), rel=1e-9)
    assert frechet(real, real) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(('count', 'dimension'), [(600, 48), (60, 96)], ids=['full rank', 'singular'])
def test_frechet_is_that_of_torch_fidelity_and_torchmetrics(count, dimension):
    mixing = torch.randn(dimension, dimension, generator=torch.Generator().manual_seed(7)) / math.sqrt(dimension)
    real, drawn = features(count, dimension, 1), features(count, dimension, 2, shift=0.2) @ mixing
    ours = frechet(gaussian(real), gaussian(drawn))
    theirs = fid_statistics_to_metric(fid_features_to_statistics(real.double()), fid_features_to_statistics(drawn.double()), verbose=False)
    assert ours == pytest.approx(theirs['frechet_inception_distance'], rel=1e-5)
    of_real, of_drawn = gaussian(real), gaussian(drawn)
    torchmetrics = _compute_fid(of_real.mean, of_real.covariance, of_drawn.mean, of_drawn.covariance)
    assert ours == pytest.approx(float(torchmetrics), rel=1e-5)


def test_moments_of_blocks_are_those_of_all_rows(monkeypatch):
    monkeypatch.setattr(distances, 'BLOCK', 170)
    rows = features(1000, 12, shift=1e4)  # a mean this far off would cancel digits of E[x^2] - E[x]^2
    found = gaussian(rows)
    assert found.count == 1000
    np.testing.assert_allclose(found.mean, rows.double().mean(dim=0), rtol=1e-12)
    np.testing.assert_allclose(found.covariance, np.cov(rows.double().numpy(), rowvar=False), rtol=1e-9, atol=1e-12)


def test_one_image_has_no_covariance():
    with pytest.raises(ValueError, match='1 image has no covariance'):
        gaussian(features(1, 4))


def test_fid_at_infinity_takes_away_most_of_the_bias():
    """Of two laws whose distance is known: FID of 2,000 images is too large by a third, the extrapolated one nearly right."""
    dimension, shift = 64, 0.2
    truth = dimension * shift**2
    real = Gaussian(torch.zeros(dimension).double(), torch.eye(dimension).double(), 10**9)
    drawn = features(2000, dimension, shift=shift)
    biased, extrapolated = frechet(real, gaussian(drawn)), frechet_at_infinity(real, drawn, seed=0)
    assert biased - truth > 0.2
    assert abs(extrapolated - truth) < 0.1 * truth
    assert frechet_at_infinity(real, drawn, seed=0) == extrapolated


def test_kid_is_torch_fidelitys_for_the_same_seed():
    real, drawn = features(150, 32, 1).double(), features(120, 32, 2, shift=0.1).double()
    theirs = kid_features_to_metric(drawn, real, kid_subsets=7, kid_subset_size=50, rng_seed=2020, verbose=False)
    ours = kid(real, drawn, seed=2020, subsets=7, size=50)
    assert ours.value == pytest.approx(theirs['kernel_inception_distance_mean'], rel=1e-9)
    assert ours.error == pytest.approx(theirs['kernel_inception_distance_std'], rel=1e-9)


def test_kid_of_few_images_takes_all_of_them_once():
    real, drawn = features(40, 8, 1), features(40, 8, 2)
    assert kid(real, drawn, seed=0).value == pytest.approx(kid(real, drawn, seed=1).value, rel=1e-12)
    assert kid(real, drawn, seed=0).error == 0
    assert kid(real, drawn, seed=0).value == pytest.approx(by_loops(real, drawn, biased=False, radially=False), rel=1e-9)


@pytest.mark.parametrize('biased', [True, False])
def test_mmd_is_the_double_loop(biased):
    real, drawn = features(21, 6, 1), features(17, 6, 2, shift=0.3)
    assert float(squared_mmd(real, drawn, cubic, biased)) == pytest.approx(by_loops(real, drawn, biased, radially=False), rel=1e-9)
    assert cmmd(real, drawn, biased) == pytest.approx(1000 * by_loops(real, drawn, biased, radially=True), rel=1e-9)


def by_loops(real: Tensor, drawn: Tensor, biased: bool, radially: bool) -> float:
    """The definition of squared MMD, pair by pair, with KID's kernel or, of unit vectors, CMMD's."""

    def kernel(x: np.ndarray, y: np.ndarray) -> float:
        return math.exp(-((x - y) ** 2).sum() / 200) if radially else (float(x @ y) / len(x) + 1) ** 3

    def mean(left: np.ndarray, right: np.ndarray, same: bool) -> float:
        pairs = [kernel(x, y) for i, x in enumerate(left) for j, y in enumerate(right) if biased or not same or i != j]
        return sum(pairs) / len(pairs)

    x, y = (rows.double().numpy() for rows in (real, drawn))
    if radially:
        x, y = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (x, y))
    return mean(x, x, True) + mean(y, y, True) - 2 * mean(x, y, False)


def test_cmmd_sees_the_difference_of_means():
    """Its kernel is so wide that it is 10 times the squared distance of the mean unit vectors; equal sets are at 0, biased or not."""
    real, drawn = features(300, 16, 1, shift=0.5), features(300, 16, 2, shift=-0.2)
    means = (unit(real).mean(dim=0) - unit(drawn).mean(dim=0)).square().sum()
    assert cmmd(real, drawn) == pytest.approx(10 * float(means), rel=0.02)
    assert cmmd(real, real) == pytest.approx(0, abs=1e-9)
    assert cmmd(features(1, 4, 1), features(1, 4, 1)) == 0


def test_the_biased_cmmd_of_equal_laws_is_above_zero_and_the_unbiased_around_it():
    pairs = [(features(100, 32, seed), features(100, 32, 50 + seed)) for seed in range(8)]
    biased, unbiased = (np.array([cmmd(*pair, form) for pair in pairs]) for form in (True, False))
    assert biased.mean() > 0.1
    assert abs(unbiased.mean()) < 3 * unbiased.std() / math.sqrt(8)


def test_clip_score_clamps_pairs_and_not_their_mean():
    images, texts = torch.eye(2), torch.tensor([[2.0, 0], [0, -3.0]])  # cosines 1 and -1
    assert clip_score(images, texts).value == pytest.approx(50)
    scores = np.array([100.0, 0.0])
    assert clip_score(images, texts).error == pytest.approx(scores.std(ddof=1) / math.sqrt(2))


def test_precision_and_recall_are_torch_fidelitys():
    real, drawn = features(140, 8, 1).double(), features(110, 8, 2, scale=0.7).double()
    theirs = prc_features_to_metric(drawn, real, prc_neighborhood=3, prc_batch_size=10000, verbose=False)
    precision, recall = precision_recall(real, drawn)
    assert (precision, recall) == (pytest.approx(theirs['precision']), pytest.approx(theirs['recall']))
    assert precision > recall + 0.1  # narrower than the real ones: good images, too alike
    assert precision_recall(drawn, real) == (recall, precision)


def test_precision_and_recall_need_more_images_than_neighbours():
    with pytest.raises(ValueError, match='3 neighbours need more of each'):
        precision_recall(features(3, 4), features(9, 4))


def test_nearest_finds_planted_neighbours():
    known = features(500, 16, 1)
    drawn = known[[411, 7, 250]] * torch.tensor([[2.0], [0.1], [5.0]])  # cosine does not see length
    cosine, index = nearest(drawn, known, count=2)
    assert index[:, 0].tolist() == [411, 7, 250]
    np.testing.assert_allclose(cosine[:, 0], 1, rtol=1e-6)
    every = unit(drawn) @ unit(known).T
    np.testing.assert_allclose(cosine, every.topk(2, dim=1).values)
    assert nearest(drawn, known[:1], count=3)[0].shape == (3, 1)


def test_blocks_change_nothing(monkeypatch):
    real, drawn = features(130, 9, 1), features(95, 9, 2, shift=0.2)

    def everything() -> list[float]:
        found = frechet(gaussian(real), gaussian(drawn)), kid(real, drawn, 0, subsets=3, size=90).value, *precision_recall(real, drawn)
        errors = mmd_error(real, drawn, cubic, False, seed=0, resamples=4), mmd_error(unit(real), unit(drawn), radial, True, seed=0, resamples=4)
        return [*found, *errors, cmmd(real, drawn), cmmd(real, drawn, biased=False), *nearest(drawn, real, 3)[1].flatten().tolist()]

    whole = everything()
    monkeypatch.setattr(distances, 'BLOCK', 16)
    np.testing.assert_allclose(everything(), whole, rtol=1e-8)


@pytest.mark.parametrize('biased', [True, False])
@pytest.mark.parametrize('radially', [True, False])
def test_the_error_of_mmd_is_that_of_a_bootstrap_that_copies_rows(biased, radially):
    """Row by row and pair by pair: a copy of a row is no other image, so that the unbiased form leaves out pairs of copies."""
    count = {'real': 13, 'drawn': 11}
    rows = {'real': features(13, 5, 1, shift=1.0).double().numpy(), 'drawn': features(11, 5, 2, shift=1.3).double().numpy()}
    if radially:
        rows = {name: x / np.sqrt((x**2).sum(axis=1, keepdims=True)) for name, x in rows.items()}

    def kernel(x: np.ndarray, y: np.ndarray) -> float:
        return math.exp(-((x - y) ** 2).sum() / 200) if radially else (float(x @ y) / len(x) + 1) ** 3

    def of_copies(chosen: dict[str, list[int]]) -> float:
        def mean(first: str, second: str) -> float:
            pairs = [(i, j) for i in chosen[first] for j in chosen[second] if biased or first != second or i != j]
            return sum(kernel(rows[first][i], rows[second][j]) for i, j in pairs) / len(pairs)

        return mean('real', 'real') + mean('drawn', 'drawn') - 2 * mean('real', 'drawn')

    generator = np.random.RandomState(5)  # as mmd_error draws: all resamples of the real rows, then of the drawn ones
    counts = {name: generator.multinomial(n, [1 / n] * n, size=9) for name, n in count.items()}
    values = [of_copies({name: [i for i, times in enumerate(counts[name][r]) for _ in range(times)] for name in rows}) for r in range(9)]
    real, drawn = (torch.from_numpy(rows[name]) for name in ('real', 'drawn'))
    found = mmd_error(real, drawn, radial if radially else cubic, biased, seed=5, resamples=9)
    assert found == pytest.approx(np.std(values, ddof=1), rel=1e-7)


def spread_and_error(value, error, shift: float | Tensor, count: int = 400) -> float:
    """Error bars of six pairs of sets of two Gaussians (mean 1, as far from zero as features of networks), in standard deviations over 80 pairs."""
    pairs = [(features(count, 16, seed, shift=1.0), features(count, 16, 1000 + seed, shift=1.0 + shift)) for seed in range(80)]
    return np.mean([error(*pair, seed) for seed, pair in enumerate(pairs[:6])]) / np.std([value(*pair) for pair in pairs], ddof=1)


def test_errors_of_distances_are_their_spread_over_new_sets():
    """Between laws that differ the error is the standard deviation over fresh draws, to a quarter."""

    def fid(real: Tensor, drawn: Tensor) -> float:
        return frechet(gaussian(real), gaussian(drawn))

    def cmmd_error(real: Tensor, drawn: Tensor, seed: int) -> float:
        return 1000 * mmd_error(unit(real), unit(drawn), radial, True, seed, resamples=100)

    def full_kid(real: Tensor, drawn: Tensor) -> float:
        return float(squared_mmd(real, drawn, cubic, biased=False))

    def full_kid_error(real: Tensor, drawn: Tensor, seed: int) -> float:
        return mmd_error(real, drawn, cubic, False, seed, resamples=100)

    shift = 0.7 * torch.linspace(-1, 1, 16)  # in another direction, too: CMMD sees no length
    assert spread_and_error(fid, lambda *pair: bootstrap(fid, *pair[:2], seed=pair[2]), shift) == pytest.approx(1, rel=0.3)
    assert spread_and_error(full_kid, full_kid_error, shift) == pytest.approx(1, rel=0.25)
    assert spread_and_error(cmmd, cmmd_error, shift) == pytest.approx(1, rel=0.25)
    # Of one law with itself: too wide by at most sqrt(3), as the bootstrap of a degenerate statistic is.
    assert 1 < spread_and_error(full_kid, full_kid_error, 0.0) < 2.1
    assert 1 < spread_and_error(cmmd, cmmd_error, 0.0) < 2.1


def test_the_error_of_kid_has_the_choice_of_its_subsets_in_it():
    """Few small subsets of many images: nearly all of the spread is due to which images are in a subset."""

    def few(real: Tensor, drawn: Tensor) -> Estimate:
        return kid(real, drawn, seed=int(1e6 * abs(float(real[0, 0]))), subsets=5, size=30)

    shift = 0.7 * torch.linspace(-1, 1, 16)
    found = spread_and_error(lambda *pair: few(*pair).value, lambda real, drawn, seed: kid_error(real, drawn, few(real, drawn), seed, 40, 5), shift)
    assert found == pytest.approx(1, rel=0.3)


def test_halves_share_no_row():
    rows = torch.arange(101)[:, None]
    first, second = halves(rows, 1000, seed=3)
    assert len(first) == len(second) == 50
    assert not set(first.flatten().tolist()) & set(second.flatten().tolist())
    assert [len(half) for half in halves(rows, 20, seed=3)] == [20, 20]


def test_memory_is_that_of_blocks(monkeypatch):
    """Nothing of the size of all pairs is made: 3,000 x 3,000 float64 would be 72 MB."""
    monkeypatch.setattr(distances, 'BLOCK', 500)
    largest = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            largest.extend(tensor.numel() * tensor.element_size() for tensor in torch.utils._pytree.tree_leaves(result) if isinstance(tensor, Tensor))
            return result

    real, drawn = features(3000, 8, 1), features(3000, 8, 2)
    with Sizes():
        cmmd(real, drawn)
        mmd_error(real, drawn, cubic, False, seed=0, resamples=3)
        precision_recall(real, drawn)
        nearest(drawn, real, count=2)
    assert max(largest) < 10e6
