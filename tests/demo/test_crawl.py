"""From a crawl to training data with a held-out part."""

import pytest
from streaming import LocalDataset

from data_prep.shapes import vocabulary
from diffusion.contracts.manifest import Manifest
from diffusion.datasets.shards import words_of
from diffusion.demo.crawl import prepare_crawl, split
from tests.conftest import NUM_IMAGES, read_json


def digests(folder):
    dataset = LocalDataset(local=str(folder))
    return {dataset[i]['sha256'] for i in range(len(dataset))}


def test_an_image_is_in_one_part_by_its_content(images):
    left_out = split(images, 0.25)
    parts = {part: digests(images) - set(others) for part, others in left_out.items()}
    assert parts['train'] | parts['held-out'] == digests(images)
    assert not parts['train'] & parts['held-out']
    assert 0 < len(parts['held-out']) < NUM_IMAGES / 2  # a quarter expected
    assert set(split(images, 0.1)['train']) < set(left_out['train'])  # a smaller share is a part of a larger one
    assert all(int(digest[:8], 16) / 16**8 < 0.25 for digest in parts['held-out'])


def test_words_are_those_of_the_captions(images):
    words = words_of(images)
    assert set(words) <= set(vocabulary())
    assert {'circle', 'small', 'background'} <= set(words)
    assert words == sorted(words)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_crawl_becomes_latents_and_again_nothing_is_done(crawl, tmp_path, capfd):
    prepare_crawl(str(crawl), tmp_path, 32, 0.25, 1)
    manifests = {part: Manifest.read(str(tmp_path / part / 'latents')) for part in ('train', 'held-out')}
    kept = read_json(tmp_path / 'images/manifest.json')['num_samples']
    assert kept <= NUM_IMAGES
    assert sum(manifest.num_samples for manifest in manifests.values()) == kept
    assert not digests(tmp_path / 'train/images') & digests(tmp_path / 'held-out/images')
    assert manifests['train'].encoder == manifests['held-out'].encoder
    assert '== ' in capfd.readouterr().out
    prepare_crawl(str(crawl), tmp_path, 32, 0.25, 1)
    assert '== ' not in capfd.readouterr().out
