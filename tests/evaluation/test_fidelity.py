"""Subject and prompt fidelity by definition."""

import math

import pytest
import torch

from diffusion.evaluation.metrics.distances import clip_score, photo_fidelity, prompt_fidelity, subject_fidelity


def rows(count, seed):
    return torch.randn(count, 7, generator=torch.Generator().manual_seed(seed))


def cosine(x, y):
    return float(torch.nn.functional.cosine_similarity(x.double(), y.double(), dim=0))


def test_fidelity_is_the_mean_over_all_pairs():
    drawn, photos = rows(5, 1), rows(3, 2)
    found = subject_fidelity(drawn, photos)
    per_image = [sum(cosine(x, y) for y in photos) / 3 for x in drawn]
    assert found.value == pytest.approx(sum(per_image) / 5)
    assert found.error == pytest.approx(torch.tensor(per_image).std().item() / math.sqrt(5))
    pairs = [cosine(photos[i], photos[j]) for i in range(3) for j in range(3) if i != j]
    assert photo_fidelity(photos).value == pytest.approx(sum(pairs) / 6)
    assert math.isnan(photo_fidelity(photos[:1]).value)


def test_prompt_fidelity_is_a_cosine_that_may_be_negative():
    drawn, prompts = rows(4, 1), rows(4, 2)
    assert prompt_fidelity(drawn, prompts).value == pytest.approx(sum(cosine(x, y) for x, y in zip(drawn, prompts, strict=True)) / 4)
    assert prompt_fidelity(drawn, -drawn).value == pytest.approx(-1)
    assert clip_score(drawn, -drawn).value == 0
