"""Aspect buckets in training: whole batches of one bucket each, the same ones whatever the machines; what is left out is said."""

import io
import json
import math
import shutil
from contextlib import redirect_stderr

import pytest
import torch
from composer.core import Callback
from composer.utils import dist, get_device
from streaming.base.batching import generate_work
from streaming.base.world import World

from data_prep.converting.buckets import AspectBuckets
from diffusion.contracts.errors import DataError, ManifestError
from diffusion.contracts.manifest import Manifest
from diffusion.datasets.loader import eval_loader, train_loader
from diffusion.datasets.sources import BucketShare, buckets_of, shares, summary
from diffusion.encoders.frozen import FrozenEncoders
from diffusion.monitoring.report.run import read_log
from diffusion.recipe import load_recipe
from diffusion.recipe.manifest_rules import LEAST_BUCKET_AREA
from diffusion.recipe.schema import Stream
from diffusion.training.builder import build_trainer
from tests.conftest import ASPECT_IMAGES, ASPECT_SIDE, REPOSITORY
from tests.faults.children import ranks

BASE = REPOSITORY / 'yamls/sd2-base-256.yaml'
BATCH = 4
GUIDANCE = 'log.samples.guidance=1'  # without caption dropout there is none
BATCHES = sum(count // BATCH for count in ASPECT_IMAGES.values())


def bucketed(folder, overrides, *more):
    stream = ['data.aspect_buckets=true', f'data.resolution={ASPECT_SIDE}', f'data.streams.train.local={folder}', f'batch.global_size={BATCH}']
    return load_recipe(BASE, [*overrides, *stream, 'batch.micro_size=2', 'data.kind=latents', *more])


def ids(batches):
    return [batch['sample_key'][:, 1].tolist() for batch in batches]


def bucket_of(batch, encoders):
    """The bucket that a batch's shape and all of its captions name."""
    height, width = (side * 4 for side in batch['moments'].shape[-2:]) if 'moments' in batch else batch['images'].shape[-2:]
    expected = encoders.text.tokenize([f'{width}x{height} {i}' for i in range(max(ASPECT_IMAGES.values()))])['text_encoder'].tolist()
    assert all(row in expected for row in batch['tokens']['text_encoder'].tolist())
    original, target = batch['geometry'][:, :2], batch['geometry'][:, 4:]
    assert (target == torch.tensor([height, width])).all()
    assert (original[:, 0] - height == 2 * (original[:, 1] - width) + 1).all()  # as the fixture draws them
    return f'{width}x{height}'


@pytest.mark.parametrize('workers', [0, 2])
@pytest.mark.parametrize('kind', ['images', 'latents'])
def test_every_batch_is_of_one_bucket(kind, workers, aspect_images, aspect_latents, encoders, overrides, capsys):
    folder = {'images': aspect_images, 'latents': aspect_latents}[kind]
    recipe = bucketed(folder, overrides, f'data.kind={kind}', f'data.workers={workers}', 'data.caption_dropout=0', GUIDANCE)
    loader = train_loader(recipe, encoders, geometry=True)
    assert len(loader) == BATCHES == 4
    orders, seen = [], set()
    for epoch in range(3):
        batches = list(loader)
        assert len(batches) == BATCHES
        assert [len(batch['sample_key']) for batch in batches] == [BATCH] * BATCHES
        assert sorted(bucket_of(batch, encoders) for batch in batches) == ['128x128', '128x128', '192x64', '64x256']
        keys = torch.cat([batch['sample_key'] for batch in batches])
        assert (keys[:, 0] == epoch).all()
        assert len(keys[:, 1].unique()) == BATCHES * BATCH  # none twice
        orders.append(keys[:, 1].tolist())
        seen |= set(orders[-1])
    assert orders[0] != orders[1] != orders[2]
    assert len(seen) > BATCHES * BATCH  # others are left out in other epochs
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith('aspect buckets: an epoch is 4 batches of 4, each of one bucket; of 23 samples 7 (30.4%) fill no batch')
    table = [line.split() for line in said[2:-1]]
    assert table == [[f'train/{name}', str(n), str(n), str(n // BATCH), str(n % BATCH)] for name, n in sorted(ASPECT_IMAGES.items())]
    assert said[-1] == '  never used, because they do not fill a batch: train/64x192'


def global_batches(dataset, nodes, gpus, workers, epoch, done=0):
    """All global batches of an epoch in order, as Streaming shares them out to so many processes."""
    dataset.batch_size = BATCH // (nodes * gpus)
    work = generate_work(
        dataset.batching_method, dataset, World(num_nodes=nodes, ranks_per_node=gpus, workers_per_rank=workers, worker=0), epoch, done
    )
    full = (work >= 0).all(-1)  # (nodes, ranks, workers, batches)
    assert (full | (work < 0).all(-1)).all()  # no rank has part of a batch
    assert (full == full[:1, :1]).all()  # all ranks have the same number of them
    stream_of = dataset.stream_per_shard[[dataset.spanner[i][0] for i in range(dataset.num_samples)]]
    in_order = work.transpose(3, 2, 0, 1, 4).reshape(-1, BATCH)
    batches = [frozenset(batch.tolist()) for batch in in_order if batch.min() >= 0]
    assert all(len({int(stream_of[i]) for i in batch}) == 1 for batch in batches)
    return batches


def test_any_number_of_processes_gets_the_same_batches(aspect_latents, encoders, overrides):
    for canonical_nodes in (1, 2, 4):
        dataset = train_loader(bucketed(aspect_latents, overrides, f'data.canonical_nodes={canonical_nodes}'), encoders).dataset
        dataset.num_canonical_nodes = canonical_nodes
        for epoch in range(3):
            expected = global_batches(dataset, 1, 1, 1, epoch)
            assert len(expected) == BATCHES
            assert len(frozenset.union(*expected)) == BATCHES * BATCH
            for nodes, gpus in ((1, 2), (2, 1), (1, 4), (2, 2), (4, 1)):
                for workers in (1, 2, 3):
                    assert global_batches(dataset, nodes, gpus, workers, epoch) == expected
                    assert global_batches(dataset, nodes, gpus, workers, epoch, done=2 * BATCH) == expected[2:]


@pytest.mark.parametrize('workers', [0, 2])
def test_a_run_goes_on_in_the_middle_of_an_epoch(workers, aspect_latents, encoders, overrides):
    recipe = bucketed(aspect_latents, overrides, f'data.workers={workers}')
    loader = train_loader(recipe, encoders)
    whole = [*ids(loader), *ids(loader)]
    for done in (1, 3, BATCHES):
        loader = train_loader(recipe, encoders)
        iterator = iter(loader)
        first = [next(iterator) for _ in range(done)]
        state = loader.dataset.state_dict(done * BATCH, True)
        del iterator, loader
        loader = train_loader(recipe, encoders)
        loader.dataset.load_state_dict(state)
        rest = [] if done == BATCHES else ids(loader)  # after the last batch of an epoch comes the next epoch
        assert [*ids(first), *rest, *ids(loader)] == whole


def test_evaluation_takes_every_sample(aspect_latents, encoders, overrides):
    """Some are repeated to fill batches; the metric counts each id once."""
    recipe = bucketed(aspect_latents, overrides, 'eval.every=1ba', f'eval.streams.val.local={aspect_latents}', 'data.canonical_nodes=4')
    for _ in range(2):
        batches = list(eval_loader(recipe, encoders, 2, geometry=True))
        assert [len(batch['sample_key']) for batch in batches] == [2] * sum(-(-count // 2) for count in ASPECT_IMAGES.values())
        assert {i for batch in ids(batches) for i in batch} == set(range(sum(ASPECT_IMAGES.values())))
        assert all(bucket_of(batch, encoders) for batch in batches)


def test_buckets_too_small_for_any_batch_are_refused(aspect_latents, encoders, overrides):
    with pytest.raises(ManifestError, match=r'no aspect bucket of train fills a batch: the largest has 9 samples an epoch, batch.global_size is 16'):
        train_loader(bucketed(aspect_latents, overrides, 'batch.global_size=16'), encoders)


def test_a_data_set_that_does_not_fit_is_refused(aspect_images, aspect_latents, images, latents, encoders, overrides, tmp_path):
    def refused(folder, *more):
        with pytest.raises(ManifestError) as caught:
            train_loader(bucketed(folder, overrides, *more), encoders)
        return str(caught.value)

    assert 'manifest bucket is 128 x 128 px, as much as a square of 128, data.resolution is 256' in refused(aspect_latents, 'data.resolution=256')
    assert 'set data.resolution to the PX' in refused(aspect_images, 'data.resolution=64', 'data.kind=images')
    said = refused(images, 'data.resolution=64', 'data.kind=images')
    assert 'set data.resolution to a multiple of 128, which aspect buckets need, and convert again with --buckets aspect:PX, or' in said
    for folder, kind in ((images, 'images'), (latents, 'latents')):
        assert 'manifest bucket has no width_px' in refused(folder, f'data.kind={kind}')
    assert 'or train on all of these aspect-ratio buckets with data.aspect_buckets=true' in refused(aspect_latents, 'data.aspect_buckets=false')
    only = [f'data.streams.train.local={aspect_latents}/192x64', 'data.aspect_buckets=false']
    assert 'manifest bucket is 192 x 64 px, data.aspect_buckets is false; encode the images again with --resolution 128' in refused('', *only)
    shutil.copytree(aspect_latents, tmp_path / 'sides')
    manifest = json.loads((tmp_path / 'sides/manifest.json').read_text())
    (tmp_path / 'sides/manifest.json').write_text(json.dumps({**manifest, 'streams': ['../elsewhere']}))
    assert 'names the stream ../elsewhere, which is no aspect bucket' in refused(tmp_path / 'sides')
    (tmp_path / 'sides/manifest.json').write_text(json.dumps(manifest))
    bucket = json.loads((tmp_path / 'sides/192x64/manifest.json').read_text())
    (tmp_path / 'sides/192x64/manifest.json').write_text(json.dumps({**bucket, 'num_samples': 12}))
    with pytest.raises(DataError, match='num_samples is 12, the shards in index.json hold 6'):
        train_loader(bucketed(tmp_path / 'sides', overrides), encoders)


def test_the_square_of_the_buckets_and_one_bucket_alone_can_be_trained(aspect_images, aspect_latents, encoders, overrides):
    square = bucketed(f'{aspect_latents}/128x128', overrides, 'data.aspect_buckets=false')
    assert [batch['moments'].shape[2:] for batch in train_loader(square, encoders)] == [(32, 32)] * 2
    cropped = bucketed(f'{aspect_images}/192x64', overrides, 'data.aspect_buckets=false', 'data.kind=images', 'data.resolution=64')
    assert [batch['images'].shape[2:] for batch in train_loader(cropped, encoders)] == [(64, 64)]
    wide = bucketed(f'{aspect_latents}/192x64', overrides)
    assert [batch['moments'].shape[2:] for batch in train_loader(wide, encoders)] == [(16, 48)]


@pytest.mark.parametrize('side', [128, 256, 512, 768, 1024, 2048])
def test_what_convert_makes_is_accepted(side):
    areas = [math.prod(size) for size in AspectBuckets(side).sizes()]
    assert LEAST_BUCKET_AREA * side**2 <= min(areas)
    assert max(areas) == side**2


def test_shares_and_proportions():
    def streams(**proportions):
        return {name: Stream(None, '/data', proportion) for name, proportion in proportions.items()}

    num_samples = {'a': {'a/1': 100, 'a/2': 60, 'a/3': 0}, 'b': {'b/1': 40}}
    everything = shares(num_samples, streams(a=None, b=None), 16, training=True)
    assert everything == {'a/1': BucketShare(100, 100, 96), 'a/2': BucketShare(60, 60, 48), 'b/1': BucketShare(40, 40, 32)}
    assert 'of 200 samples 24 (12.0%) fill no batch' in summary(everything, 16)
    # Half of an epoch of 200 samples from each dataset, in it by size.
    assert shares(num_samples, streams(a=0.5, b=0.5), 16, training=True) == {
        'a/1': BucketShare(100, 62, 48),
        'a/2': BucketShare(60, 37, 32),
        'b/1': BucketShare(40, 100, 96),
    }
    assert shares(num_samples, streams(a=3, b=1), 16, training=False) == {
        'a/1': BucketShare(100, 93, 96),
        'a/2': BucketShare(60, 56, 64),
        'b/1': BucketShare(40, 50, 64),
    }
    with pytest.raises(ManifestError, match='the largest has 40 samples'):
        shares({'b': num_samples['b']}, streams(b=None), 64, training=True)


def test_where_buckets_lie():
    manifest = Manifest('latents', {}, 1, 1, {}, {}, [], '', streams=['64x128', '128x64'])
    remote = buckets_of('laion', Stream('s3://bucket/latents/', None, 0.5), manifest)
    assert remote == {'laion/64x128': Stream('s3://bucket/latents/64x128'), 'laion/128x64': Stream('s3://bucket/latents/128x64')}
    assert buckets_of('x', Stream(None, '/data'), manifest)['x/64x128'] == Stream(None, '/data/64x128')


def test_two_data_sets_by_proportion(aspect_latents, encoders, overrides, tmp_path):
    shutil.copytree(aspect_latents, tmp_path / 'other')
    more = [f'data.streams.other={{local: {tmp_path}/other, proportion: 0.75}}', 'data.streams.train.proportion=0.25']
    loader = train_loader(bucketed(aspect_latents, overrides, *more), encoders)
    batches = ids(loader)
    # An epoch of 46: 11.5 of the first, of which 4 of the 9 of 23 fill a batch; 34.5 of the second: 13, 9, 4, 7.
    assert len(batches) == len(loader) == 1 + 3 + 2 + 1 + 1
    assert sum(min(batch) >= 9 for batch in batches) == 3 + 2 + 1 + 1


def test_buckets_are_streamed_from_a_remote_folder(aspect_latents, encoders, overrides, tmp_path):
    recipe = bucketed(aspect_latents, overrides)
    expected = ids(train_loader(recipe, encoders))
    recipe.data.streams['train'] = Stream(remote=f'{aspect_latents}/')
    for _ in range(2):  # a second start finds the cache of the first
        assert ids(train_loader(recipe, encoders)) == expected
    cached = {path.name.removeprefix('train-train-').partition('-')[0] for path in (tmp_path / 'run/cache/node0').iterdir()}
    assert cached == {'128x128', '192x64', '64x256'}  # what is never used is not fetched


def test_a_small_share_of_a_large_epoch_is_shuffled(aspect_latents, encoders, overrides):
    """Streaming divides the shuffle block among the streams and fails where nothing is left of it."""
    loader = train_loader(bucketed(aspect_latents, overrides, 'data.shuffle_block_size=1'), encoders)
    assert len(ids(loader)) == BATCHES


def test_training_stops_and_goes_on(aspect_latents, encoders, overrides, tmp_path):
    """Four batches of three shapes; Composer's checkpoint after the third knows where in the epoch it is."""
    arguments = [*overrides, 'checkpoint.every=3ba', 'ema.half_life=null']
    expected = [(batch['moments'].shape, batch['sample_key'].tolist()) for batch in train_loader(bucketed(aspect_latents, arguments), encoders)]
    seen = []

    class Spy(Callback):
        def batch_end(self, state, logger):
            seen.append((state.batch['moments'].shape, state.batch['sample_key'].tolist()))

    for duration in ('3ba', '4ba'):
        trainer = build_trainer(bucketed(aspect_latents, arguments, f'train.duration={duration}'))
        trainer.state.callbacks.append(Spy())
        trainer.fit()
        trainer.close()
    assert seen == expected
    losses = [record['loss/train/total'] for record in read_log(tmp_path / 'run/log.jsonl') if 'loss/train/total' in record]
    assert len(losses) == len({shape for shape, _ in seen}) + 1 == 4
    assert all(map(math.isfinite, losses))


def two_epochs(overrides):
    """Shapes and keys of this rank's batches, and what it said."""
    recipe = load_recipe(BASE, overrides, num_gpus=2)
    dist.initialize_dist(get_device('cpu'), timeout=60)
    with redirect_stderr(io.StringIO()) as said:
        loader = train_loader(recipe, FrozenEncoders.load(recipe.model.encoders))
    return json.dumps([[(list(batch['moments'].shape), batch['sample_key'].tolist()) for _ in range(2) for batch in loader], said.getvalue()])


def test_two_ranks_have_halves_of_the_same_batches(aspect_latents, encoders, overrides, tmp_path):
    more = [
        'data.aspect_buckets=true', f'data.resolution={ASPECT_SIDE}', 'data.kind=latents', f'data.streams.train.local={aspect_latents}',
        f'batch.global_size={BATCH}', 'batch.micro_size=2', 'data.workers=2',
    ]  # fmt: skip
    (first, said), (second, silence) = map(json.loads, ranks(two_epochs, [[[*overrides, *more]]] * 2, tmp_path))
    assert 'aspect buckets: an epoch is' in said
    assert silence == ''
    assert len(first) == len(second) == 2 * BATCHES
    assert [shape for shape, _ in first] == [shape for shape, _ in second]
    assert {shape[0] for shape, _ in first} == {BATCH // 2}
    alone = train_loader(bucketed(aspect_latents, overrides), encoders)
    expected = [sorted(batch['sample_key'].tolist()) for _ in range(2) for batch in alone]
    assert [sorted(mine + other) for (_, mine), (_, other) in zip(first, second, strict=True)] == expected
