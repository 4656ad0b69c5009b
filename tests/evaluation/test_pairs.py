"""PSNR, SSIM and rFID of reconstructions against their formulas in float64."""

from types import SimpleNamespace

import numpy as np
import pytest
import scipy.linalg
import torch

from diffusion.contracts.errors import EncoderError, InputError
from diffusion.evaluation.metrics.figures import find_metric
from diffusion.evaluation.metrics.reconstructions import PairMetrics, psnr, ssim
from diffusion.evaluation.pages.comparing import measure_of
from tests.evaluation.networks import images


def pairs(count=3, size_px=24):
    originals = images(count, size_px, seed=1)
    return (originals.int() + torch.randint(-20, 21, originals.shape, generator=torch.Generator().manual_seed(2))).clamp(0, 255).to(
        torch.uint8
    ), originals


def test_psnr_is_its_formula_and_finite_for_equal_images():
    changed, originals = pairs()
    errors = ((changed.double() - originals.double()) ** 2).mean(dim=(1, 2, 3)).numpy()
    np.testing.assert_allclose(psnr(changed, originals), 10 * np.log10(255**2 / errors), rtol=1e-6)
    one = originals.clone()
    one[0, 0, 0, 0] += 1
    assert psnr(originals, originals).tolist() == pytest.approx([float(psnr(one, originals)[0])] * 3)


def test_ssim_is_its_formula():
    """Wang et al. (2004), equation 13, at each place of images whose borders are mirrored."""
    changed, originals = pairs()
    line = np.exp(-((np.arange(11) - 5) ** 2) / (2 * 1.5**2))
    window = np.outer(line, line) / np.outer(line, line).sum()
    expected = []
    for x, y in zip(changed.double().numpy(), originals.double().numpy(), strict=True):
        a, b = (_windows(np.pad(part, ((0, 0), (5, 5), (5, 5)), mode='reflect')) for part in (x, y))
        mean_a, mean_b = ((part * window).sum(axis=(-1, -2)) for part in (a, b))
        var_a, var_b = ((part**2 * window).sum(axis=(-1, -2)) - mean**2 for part, mean in ((a, mean_a), (b, mean_b)))
        covariance = (a * b * window).sum(axis=(-1, -2)) - mean_a * mean_b
        c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
        expected.append(((2 * mean_a * mean_b + c1) * (2 * covariance + c2) / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))).mean())
    np.testing.assert_allclose(ssim(changed, originals), expected, rtol=1e-4)
    np.testing.assert_allclose(ssim(originals, originals), 1.0, rtol=1e-6)


def _windows(image):
    """(3, H - 10, W - 10, 11, 11)."""
    return np.lib.stride_tricks.sliding_window_view(image, (11, 11), axis=(1, 2))


def of_features(name='fid'):
    """Without a network: features are given."""
    metric = find_metric(name)
    return PairMetrics((name,), {}, {name: (metric, SimpleNamespace(name='inception', sha256='0'))}, 16), metric.feature


def features(seed, count=300, noise=0.3):
    generator = np.random.RandomState(seed)
    originals = generator.randn(count, 4)
    return torch.from_numpy(originals), torch.from_numpy(0.8 * originals + noise * generator.randn(count, 4))


def test_rfid_is_frechets_distance():
    metrics, feature = of_features()
    originals, changed = features(0)
    (value,) = metrics.figures({}, {feature: changed}, {feature: originals}).values()
    a, b = originals.numpy(), changed.numpy()
    root = scipy.linalg.sqrtm(np.cov(a.T) @ np.cov(b.T)).real
    expected = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(np.cov(a.T) + np.cov(b.T) - 2 * root)
    assert value['value'] == pytest.approx(expected, rel=1e-6)
    assert value['lower_is_better']
    assert metrics.figures({}, {feature: originals}, {feature: originals})['fid']['value'] == pytest.approx(0, abs=1e-9)


def test_the_error_of_rfid_is_the_spread_over_fresh_images():
    """Of pairs: resampled one by one the two sets would differ by chance that a reconstruction shares with its original."""
    metrics, feature = of_features()
    found = [
        metrics.figures({}, {feature: changed}, {feature: originals}, seed)['fid'] for seed in range(40) for originals, changed in [features(seed)]
    ]
    spread = np.std([value['value'] for value in found])
    assert np.mean([value['error'] for value in found]) == pytest.approx(spread, rel=0.35)


def test_figures_of_pairs_are_means_with_standard_errors():
    metrics = PairMetrics.load(('psnr', 'lpips@random-conv'))
    values = {'psnr': torch.tensor([20.0, 22.0, 27.0]), 'lpips@random-conv': torch.tensor([0.1, 0.2, 0.3])}
    found = metrics.figures(values, {}, {})
    assert list(found) == ['psnr', 'lpips@random-conv']
    assert found['psnr']['value'] == pytest.approx(23.0)
    assert found['psnr']['error'] == pytest.approx(np.std([20, 22, 27], ddof=1) / np.sqrt(3))
    assert not found['psnr']['lower_is_better']
    assert found['lpips@random-conv']['lower_is_better']


def test_all_networks_are_found_once_and_have_digests():
    metrics = PairMetrics.load(('psnr', 'ssim', 'lpips@random-conv', 'fid@random-conv'))
    assert set(metrics.digests) == {'lpips@random-conv', 'random-conv'}
    changed, originals = pairs()
    found = metrics.of_pairs(changed, originals)
    assert {name: value.shape for name, value in found.items()} == dict.fromkeys(('psnr', 'ssim', 'lpips@random-conv'), (3,))
    assert metrics.of_pairs(originals, originals)['lpips@random-conv'].tolist() == [0.0] * 3
    assert set(metrics.features(originals)) == {'random-conv'}


def test_missing_weights_are_named_together_with_figures_that_need_none(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, 'get_dir', lambda: str(tmp_path / 'hub'))
    with pytest.raises(EncoderError) as raised:
        PairMetrics.load(('psnr', 'ssim', 'lpips', 'fid'), tmp_path)
    for part in ('vgg16-397923af.pth', 'weights-inception-2015-12-05-6726825d.pth', '--metrics psnr,ssim,fid@random-conv,lpips@random-conv'):
        assert part in str(raised.value)


def test_unknown_names_are_refused():
    for name, said in {
        'pnsr': "did you mean 'psnr'",
        'kid': 'Known: psnr, ssim',
        'fid@nothing': 'unknown metric',
        'ssim@random-conv': 'unknown metric',
    }.items():
        with pytest.raises(InputError, match=said):
            PairMetrics.load((name,))


def test_titles():
    assert [measure_of(name, {}, of_reconstructions=True).title for name in ('psnr', 'lpips@random-conv', 'fid', 'fid_clean')] == [
        'PSNR (dB)',
        'LPIPS (random-conv)',
        'rFID',
        'rFID, clean resize',
    ]
