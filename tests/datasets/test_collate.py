import math

import numpy as np
import pytest
import torch

from diffusion.datasets.loader import Collate


def tokenize(captions):
    return {'text_encoder': torch.tensor([[len(caption)] for caption in captions])}


def samples(count, epoch=0, **extra):
    return [
        {'moments': np.zeros((8, 2, 2), np.float16), 'captions': [('a caption', 1.0)], 'sample_key': (epoch, i, 0), **extra} for i in range(count)
    ]


def dropped(epoch=0, seed=17, p=0.1, count=10_000):
    return Collate(tokenize, seed, p)(samples(count, epoch))['tokens']['text_encoder'][:, 0] == 0


@pytest.mark.parametrize('p', [0.1, 0.5])
def test_captions_are_dropped_at_the_rate_asked_for(p):
    rate = dropped(p=p).float().mean()
    assert abs(rate - p) < 3 * math.sqrt(p * (1 - p) / 10_000)
    assert not dropped(p=0.0).any()
    assert dropped(p=1.0).all()


def test_other_captions_are_dropped_in_other_epochs_and_seeds():
    first = dropped()
    assert torch.equal(first, dropped())  # the same sample in the same epoch, whenever it is asked for
    for other in (dropped(epoch=1), dropped(seed=18)):
        both = (first & other).float().mean()
        assert abs(both - 0.01) < 4 * math.sqrt(0.01 * 0.99 / 10_000)  # independent: 0.1 x 0.1


def test_the_batch_keeps_its_contract():
    batch = Collate(tokenize, 0, 0.0)(samples(3))
    assert set(batch) == {'moments', 'tokens', 'sample_key'}
    assert batch['sample_key'].tolist() == [[0, 0, 0], [0, 1, 0], [0, 2, 0]]
    assert batch['moments'].shape == (3, 8, 2, 2)
    images = [{'images': torch.zeros(3, 2, 2, dtype=torch.uint8), 'captions': [('', 1.0)], 'sample_key': (0, 0, 0)}]
    assert set(Collate(tokenize, 0, 0.0)(images)) == {'images', 'tokens', 'sample_key'}


def test_half_of_the_images_are_mirrored():
    image = torch.tensor([[[0, 255]]], dtype=torch.uint8).expand(3, 1, 2)
    rows = [{'images': image, 'captions': [('', 1.0)], 'sample_key': (0, i, 0)} for i in range(4000)]
    mirrored = Collate(tokenize, 0, 0.0, flip=True)(rows)['images'][:, 0, 0, 0] == 255
    assert abs(mirrored.float().mean() - 0.5) < 3 * 0.5 / math.sqrt(4000)
    assert not (Collate(tokenize, 0, 0.0)(rows)['images'][:, 0, 0, 0] == 255).any()
