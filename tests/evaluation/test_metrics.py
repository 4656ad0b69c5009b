"""Metrics by name: what they need, what they return, and that they rank what is worse as worse."""

import math
import random

import numpy as np
import pytest
import torch

from diffusion.contracts.compositions import CATEGORIES, random_composition
from diffusion.contracts.errors import InputError
from diffusion.contracts.scenes import random_scene
from diffusion.evaluation.features.drawn_compositions import embedded_caption
from diffusion.evaluation.features.drawn_shapes import embedded
from diffusion.evaluation.features.networks import EXTRACTORS
from diffusion.evaluation.metrics.distances import gaussian, share_of
from diffusion.evaluation.metrics.figures import METRICS, find_metric, name_of
from diffusion.evaluation.pages.figures import DISTANCES
from tests.evaluation import examples

REAL, NEAR, FAR = (
    torch.randn(90, 12, generator=torch.Generator().manual_seed(seed)) * scale + shift
    for seed, shift, scale in ((1, 0, 1), (2, 0.05, 1), (3, 2, 0.7))
)

SCENES = torch.stack([embedded(random_scene(random.Random(number))) for number in range(90)])
COMPOSITIONS = torch.stack([embedded_caption(random_composition(CATEGORIES[number % 7], random.Random(number))) for number in range(90)])


@pytest.mark.parametrize('name', METRICS)
def test_each_metric_names_a_feature_of_a_network_and_its_figures(name):
    metric = METRICS[name]
    assert metric.feature in EXTRACTORS[metric.extractor].features
    assert EXTRACTORS[metric.extractor].texts or not metric.needs_captions
    # These have no embeddings, but a one for each word that applies.
    texts = {'shapes-look': SCENES, 'compositions-look': COMPOSITIONS}.get(metric.extractor, REAL)
    drawn = NEAR if texts is REAL else texts.flip(0)
    found = metric(REAL if metric.needs_real else None, drawn, texts if metric.needs_captions else None, seed=0, resamples=3)
    assert found.keys() == metric.figures.keys()
    for values in found.values():
        assert isinstance(values['value'], float)
    assert metric(REAL, drawn, texts, seed=0, resamples=3) == found  # the seed decides everything


def test_the_report_which_imports_no_torch_knows_what_is_a_distance():
    lower = {name_of(name, metric, figure) for name, metric in METRICS.items() for figure, one in metric.figures.items() if one.lower_is_better}
    assert set(DISTANCES) == lower


@pytest.mark.parametrize('name', [name for name, metric in METRICS.items() if not metric.needs_captions])
def test_what_is_farther_scores_worse(name):
    metric = METRICS[name]
    near, far = (metric(REAL, drawn, None, seed=0, resamples=0) for drawn in (NEAR, FAR))
    for figure, about in metric.figures.items():
        assert (far[figure]['value'] > near[figure]['value']) == about.lower_is_better, figure


def test_errors_and_the_null_give_the_scale():
    for name in ('fid', 'kid', 'cmmd'):
        values = METRICS[name](REAL, FAR, None, seed=0, resamples=8)[name]
        assert values['value'] - values['null'] > 3 * values['error'] > 0
        assert values['null_count'] == 45
    assert METRICS['cmmd'](REAL, NEAR, None, 0, 0)['cmmd']['unbiased'] < METRICS['cmmd'](REAL, NEAR, None, 0, 0)['cmmd']['value']
    assert METRICS['kid'](REAL, NEAR, None, 0, 0)['kid'].keys() == {'value'}


def test_fid_takes_saved_statistics_and_others_do_not():
    statistics = gaussian(REAL)
    of_statistics, of_features = (METRICS['fid'](real, FAR, None, seed=0, resamples=3)['fid'] for real in (statistics, REAL))
    assert of_statistics['value'] == of_features['value']
    assert of_statistics['at_infinity'] == of_features['at_infinity']
    assert of_statistics['error'] > 0
    assert 'null' not in of_statistics
    for name in ('kid', 'cmmd', 'precision_recall'):
        with pytest.raises(ValueError, match='needs features of real images'):
            METRICS[name](statistics, FAR, None, seed=0)


def test_captions_are_as_many_as_images():
    with pytest.raises(ValueError, match='clip: 90 images and captions of 4'):
        METRICS['clip'](None, NEAR, REAL[:4], seed=0)


def test_a_metric_with_another_network_says_so():
    metric = find_metric('kid@random-conv')
    assert (metric.extractor, metric.feature) == ('random-conv', 'random-conv')
    assert find_metric('clip@openclip-vit-h14').feature == 'openclip-vit-h14'
    assert find_metric('fid') is METRICS['fid']
    with pytest.raises(InputError, match='clip@inception: inception embeds no captions; those that do: clip-vit-l14'):
        find_metric('clip@inception')
    with pytest.raises(InputError, match='shapes@clip-vit-l14: shapes takes no other network; leave out @clip-vit-l14'):
        find_metric('shapes@clip-vit-l14')
    for unknown in ('is', 'kid@vgg', 'kid@shapes-look', 'kid@'):
        with pytest.raises(InputError, match=f'unknown metric {unknown}; known: fid, ') as refused:
            find_metric(unknown)
        assert 'shapes-look' not in str(refused.value).partition(';')[2]


def test_a_share_of_none_or_all_has_an_error():
    """Wilson's interval of one deviation is where |found - share| is the binomial's deviation of that share."""
    for right in (0, 1, 30, 64):
        found = share_of(torch.tensor([1.0] * right + [0.0] * (64 - right)))
        ends = [p for p in np.linspace(0, 1, 200_001) if abs(right / 64 - p) <= math.sqrt(p * (1 - p) / 64) + 1e-12]
        assert found.value == right / 64
        assert found.error == pytest.approx((ends[-1] - ends[0]) / 2, abs=1e-5)


def test_the_made_up_results_of_other_tests_hold_what_metrics_return():
    made_up = examples.metrics(position=0)
    for asked in examples.protocol().metrics:
        metric = find_metric(asked)
        found = metric(REAL if metric.needs_real else None, NEAR, REAL if metric.needs_captions else None, seed=0, resamples=3)
        for figure, values in found.items():
            name = name_of(asked, metric, figure)
            assert {*values, 'meaning', 'lower_is_better', 'extractor'} == made_up[name].keys(), name
