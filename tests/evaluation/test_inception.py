"""Inception with random weights: the same features as torch-fidelity's, the same figures, and images that cannot be misread."""

import numpy as np
import pytest
import torch
import torch_fidelity
from PIL import Image
from torch.utils.data import Dataset
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

from diffusion.contracts.errors import EncoderError
from diffusion.evaluation.features import networks
from diffusion.evaluation.features.networks import clean, clean_square, load_extractors, read_inception
from diffusion.evaluation.metrics.distances import frechet, gaussian, kid, precision_recall
from tests.evaluation.networks import images, without_digest

COUNT = 8  # of each set; an image takes 0.2 s in each network
KID = {'subsets': 5, 'size': 6}


class Images(Dataset):
    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i]


@pytest.fixture(scope='module')
def sets():
    return images(COUNT, 48, seed=1), images(COUNT, 48, seed=2, noise=200)


@pytest.fixture(scope='module')
def inception(inception_file):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(networks.EXTRACTORS, 'inception', without_digest('inception'))
        return load_extractors(['inception'], inception_file.parent)[0]


@pytest.fixture(scope='module')
def features(inception, sets):
    found = [inception.images(part) for part in sets]
    assert all(
        {name: tensor.shape for name, tensor in part.items()} == {name: (COUNT, d) for name, d in inception.features.items()} for part in found
    )
    return found


@pytest.fixture(scope='module')
def theirs(inception_file, sets):
    real, drawn = sets
    return torch_fidelity.calculate_metrics(
        input1=Images(drawn), input2=Images(real), cuda=False, cache=False, verbose=False, fid=True, kid=True, prc=True, batch_size=COUNT,
        feature_extractor='inception-v3-compat', feature_extractor_weights_path=str(inception_file), kid_subsets=KID['subsets'], kid_subset_size=KID['size'],
    )  # fmt: skip


def test_figures_are_torch_fidelitys(features, theirs):
    real, drawn = (part['inception'] for part in features)
    assert frechet(gaussian(real), gaussian(drawn)) == pytest.approx(theirs['frechet_inception_distance'], rel=1e-3)
    ours = kid(real, drawn, seed=2020, **KID)
    assert ours.value == pytest.approx(theirs['kernel_inception_distance_mean'], rel=1e-3)
    assert ours.error == pytest.approx(theirs['kernel_inception_distance_std'], rel=1e-3)
    assert precision_recall(real, drawn) == (pytest.approx(theirs['precision'], rel=1e-3), pytest.approx(theirs['recall'], rel=1e-3))


def test_features_are_torch_fidelitys_to_the_bit(inception, sets, inception_file):
    network = FeatureExtractorInceptionV3('theirs', ['2048'], feature_extractor_weights_path=str(inception_file))
    assert torch.equal(network(sets[0][:2])[0], inception.images(sets[0][:2])['inception'])


def test_the_two_resizings_are_two_features(features):
    bilinear, clean_ones = features[1]['inception'], features[1]['inception-clean']
    assert (bilinear - clean_ones).norm() > 0.01 * bilinear.norm()


@pytest.mark.parametrize('size_px', [512, 300, 299, 64])
def test_the_clean_resizing_is_pillows(size_px):
    image = images(1, size_px, seed=3, noise=200)
    channels = [Image.fromarray(channel.float().numpy(), mode='F').resize((299, 299), Image.Resampling.BICUBIC) for channel in image[0]]
    expected = np.clip(np.stack([np.asarray(channel) for channel in channels]), 0, 255)
    difference = np.abs(clean(image, 299, 299)[0].numpy() - expected)
    assert np.sqrt((difference**2).mean()) < 2e-3  # levels; rounded to levels, as Pillow does it in RGB, it would be 0.3
    assert difference.max() < 0.05


def test_the_centre_of_a_rectangle():
    wide = torch.zeros(1, 3, 40, 100, dtype=torch.uint8)
    wide[..., 30:70] = 200
    square = clean_square(wide, 20, 20)
    assert square.shape == (1, 3, 20, 20)
    assert (square[..., 1:-1] > 199).all()
    assert clean_square(wide.transpose(2, 3), 24, 20).shape == (1, 3, 20, 20)


def test_floats_are_refused():
    """torchmetrics scales floats and takes uint8 for floats if told so: then it sees the negative."""
    (network,) = load_extractors(['random-conv'])
    for wrong in (
        torch.rand(1, 3, 8, 8),
        torch.rand(1, 3, 8, 8) * 255,
        torch.zeros(3, 8, 8, dtype=torch.uint8),
        torch.zeros(1, 1, 8, 8, dtype=torch.uint8),
    ):
        with pytest.raises(ValueError, match=r'feature networks take torch.uint8 \(B, 3, H, W\)'):
            network.images(wrong)


def test_other_weights_are_refused(inception_file, tmp_path):
    with pytest.raises(EncoderError, match=r'expected 6726825d\.\.\.: another network'):
        load_extractors(['inception'], inception_file.parent)
    torch.save({'fc.weight': torch.zeros(1)}, tmp_path / 'other.pth')
    with pytest.raises(EncoderError, match='not the weights of Inception'):
        read_inception(tmp_path / 'other.pth')


class Attack:
    def __reduce__(self):
        return (open, ('attacked', 'w'))


def test_a_pickle_that_runs_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({'fc.weight': Attack()}, tmp_path / 'inception.pth')
    with pytest.raises(EncoderError, match='cannot be read as a file of weights'):
        read_inception(tmp_path / 'inception.pth')
    assert not (tmp_path / 'attacked').exists()
