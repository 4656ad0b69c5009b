"""The number of nodes, GPUs and loader processes may be another at each start: the global batches stay the same sets of samples."""

from contextlib import suppress
from itertools import product

import numpy as np
import pytest
from streaming.base.batching import generate_work
from streaming.base.partition import get_partitions
from streaming.base.world import World

from diffusion.checkpoints.reading import find_checkpoint, read_checkpoint, training_weights
from tests.conftest import TINY
from tests.datasets.streams import NUM_SAMPLES, ours, rows, stock, write_data
from tests.faults.driver import launch, train, upstream_mended_it

GLOBAL_BATCH = 24
WORLDS = [(1, 1), (1, 2), (2, 2), (1, 3), (3, 1), (1, 4), (2, 3), (3, 4)]  # nodes, GPUs a node


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp('data') / 'data')


def global_batches(dataset, nodes: int, gpus: int, workers: int, epoch: int, samples_done: int = 0) -> list[frozenset]:
    """What a world trains on in an epoch, or in what is left of it."""
    dataset.batch_size = GLOBAL_BATCH // (nodes * gpus)
    work = generate_work(dataset.batching_method, dataset, World(nodes, gpus, workers, 0), epoch, samples_done)
    in_order = work.transpose(3, 2, 0, 1, 4).reshape(-1, GLOBAL_BATCH)
    return [frozenset(batch.tolist()) for batch in in_order[: (NUM_SAMPLES - samples_done) // GLOBAL_BATCH]]


@pytest.mark.parametrize('canonical_nodes', [1, 2, 64])
def test_any_world_has_the_same_global_batches(data, canonical_nodes):
    """Also where the nodes neither divide data.canonical_nodes nor the other way round, at the first start too."""
    dataset = ours(None, data, num_canonical_nodes=canonical_nodes).dataset
    dataset._set_shuffle_block_size(World(1, 1, 1, 0))
    for epoch in range(2):
        expected = global_batches(dataset, 1, 1, 1, epoch)
        assert len(frozenset.union(*expected) - {-1}) == NUM_SAMPLES // GLOBAL_BATCH * GLOBAL_BATCH
        for (nodes, gpus), workers in product(WORLDS, (1, 2, 3)):
            assert global_batches(dataset, nodes, gpus, workers, epoch) == expected


def test_any_world_goes_on_where_another_stopped(data):
    dataset = ours(None, data, num_canonical_nodes=2).dataset
    dataset._set_shuffle_block_size(World(1, 1, 1, 0))
    expected = global_batches(dataset, 1, 1, 1, epoch=3)
    state = {'epoch': 3, 'sample_in_epoch': GLOBAL_BATCH, 'num_canonical_nodes': 2, 'shuffle_seed': 1}
    for initial_nodes in (None, 1, 2, 4):  # as stock Streaming would have saved it
        dataset.load_state_dict({**state, 'initial_physical_nodes': initial_nodes})
        assert dataset._resume(World(1, 1, 1, 0), 0) == (3, GLOBAL_BATCH)
        for (nodes, gpus), workers in product(WORLDS, (1, 2)):
            assert global_batches(dataset, nodes, gpus, workers, 3, GLOBAL_BATCH) == expected[1:]
    assert dataset.state_dict(GLOBAL_BATCH, True)['initial_physical_nodes'] == 1


def test_twin_streaming_refuses_three_nodes(data, tmp_path):
    dataset = stock(None, data).dataset
    dataset._set_shuffle_block_size(World(1, 1, 1, 0))
    with suppress(ValueError):  # 'Either canonical or physical nodes must be evenly divisible by the other'
        global_batches(dataset, 3, 1, 1, 0)
        upstream_mended_it()


def test_no_rank_has_fewer_batches_than_the_loader_says():
    """Or DataError would be raised at the end of a sound epoch."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        nodes, gpus, workers, batch = (int(rng.integers(1, 5)) for _ in range(4))
        num_samples, canonical = int(rng.integers(1, 500)), int(rng.integers(1, 9))
        work = get_partitions('relaxed', num_samples, canonical, nodes, gpus, workers, batch, 0, 1)
        promised = num_samples // (nodes * gpus * batch)
        for node, gpu in product(range(nodes), range(gpus)):
            whole = int((work[node, gpu] != -1).all(-1).sum())
            assert whole >= promised, (nodes, gpus, workers, batch, num_samples, canonical)


@pytest.mark.parametrize('workers', [0, 2])
def test_a_loader_goes_on_in_the_middle_of_an_epoch(data, workers):
    expected = [row['number'] for row in rows(ours(None, data))]
    again = ours(None, data, workers=workers)
    again.dataset.load_state_dict({'epoch': 0, 'sample_in_epoch': 20, 'num_canonical_nodes': 2, 'shuffle_seed': 1, 'initial_physical_nodes': 1})
    assert [row['number'] for row in rows(again)] == expected[20:]


@pytest.mark.long
def test_one_process_goes_on_as_two(latents, encoders_folder, tmp_path):
    """Mid-epoch, with loader processes: the weights agree with those of a run that was not disturbed, to the order of summation."""
    common = [
        *TINY, f'model.encoders.source={encoders_folder}', 'data.kind=latents', f'data.streams.train.local={latents}', 'data.workers=1',
        'optimizer.lr=1e-3', 'checkpoint.every=1ba',
    ]  # fmt: skip
    with train([*common, f'run_folder={tmp_path}/whole', 'train.duration=8ba']) as process:
        process.wait()
    with train([*common, f'run_folder={tmp_path}/parts', 'train.duration=3ba']) as process:
        process.wait()
    with launch(2, [*common, f'run_folder={tmp_path}/parts', 'train.duration=8ba']) as process:
        process.wait()
    whole, parts = (training_weights(read_checkpoint(find_checkpoint(tmp_path / name))) for name in ('whole', 'parts'))
    for name, weight in whole.items():
        assert (parts[name] - weight).abs().max() < 2e-4, name
