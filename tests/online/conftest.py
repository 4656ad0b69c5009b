"""A small Ray cluster, which all tests of this folder join and leave."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from diffusion.common.ray_cluster import _keep_authentication
from tests.online.online import NUM_BATCHES, base_overrides, of_images, trained


@pytest.fixture(scope='package')
def cluster() -> Iterator[str]:
    """Its address; one machine, with room for four encoders."""
    _keep_authentication('tests')
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={'num_cpus': 4, 'object_store_memory': 100 << 20, 'include_dashboard': False})
    yield cluster.address
    cluster.shutdown()


@pytest.fixture
def run(images: Path, encoders_folder: Path, tmp_path: Path) -> list[str]:
    """A tiny run on images; whether other machines encode them is for the test to say."""
    return of_images(base_overrides(encoders_folder, tmp_path), images)


@pytest.fixture(scope='session')
def in_step(images: Path, encoders_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of what `run` trains where it encodes the images itself."""
    overrides = of_images(base_overrides(encoders_folder, tmp_path_factory.mktemp('in-step')), images)
    assert f'train.duration={NUM_BATCHES}ba' in overrides
    return trained(overrides)
