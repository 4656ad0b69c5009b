"""Statistics of latents against draws, and the warning of a scale that does not fit."""

import pytest
import torch

from diffusion.evaluation.metrics.reconstructions import LatentStatistics, scale_warnings


def moments(count=6, channels=3, side=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(count, channels, side, side, generator=generator) * 3 + torch.tensor([1.0, -2.0, 5.0]).view(3, 1, 1)
    return torch.cat([mean, torch.randn(mean.shape, generator=generator)], dim=1)


def test_batches_add_up_to_the_mean_and_deviation_of_draws():
    whole = moments()
    statistics = LatentStatistics(3)
    for batch in whole.split(4):
        statistics.add(batch)
    found = statistics.record()
    mean, log_variance = whole.double().chunk(2, dim=1)
    draws = mean + (log_variance / 2).exp() * torch.randn(4000, *mean.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert found['mean'] == pytest.approx(float(draws.mean()), abs=5e-3)
    assert found['std'] == pytest.approx(float(draws.std()), rel=1e-3)  # 1 / Stable Diffusion's scaling_factor
    for number, channel in enumerate(found['channels']):
        assert channel['mean'] == pytest.approx(float(mean[:, number].mean()))
        assert channel['std'] == pytest.approx(float(draws[:, :, number].std()), rel=5e-3)
        assert channel['posterior_std'] == pytest.approx(float((draws - mean)[:, :, number].std()), rel=5e-3)


def test_a_scale_that_is_off_by_more_than_5_percent_is_warned_of():
    record = {'mean': 2.0, 'std': 4.0, 'channels': []}
    assert scale_warnings(record, 0.25, 2.0) == []
    assert scale_warnings(record, 0.25 * 1.049, 2.0 + 0.19) == []
    (scale,) = scale_warnings(record, 0.25 * 1.06, 2.0)
    assert 'deviation of 1.06' in scale
    assert '0.25 would give 1' in scale
    (shift,) = scale_warnings(record, 0.25, 0.0)
    assert 'mean of 0.5 standard units' in shift
    assert '2 would give 0' in shift
    assert len(scale_warnings(record, 1.0, 0.0)) == 2


def test_constant_latents_and_none_at_all():
    statistics = LatentStatistics(1)
    with pytest.raises(ValueError, match='no latents'):
        statistics.record()
    statistics.add(torch.cat([torch.ones(2, 1, 4, 4), torch.full((2, 1, 4, 4), -30.0)], dim=1))
    assert statistics.record()['std'] == pytest.approx(0, abs=1e-6)
    assert 'constant' in scale_warnings({'mean': 1.0, 'std': 0.0, 'channels': []}, 1.0, 0.0)[0]
