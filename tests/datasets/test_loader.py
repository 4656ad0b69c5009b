import json
import shutil

import pytest
import torch

from diffusion.contracts.errors import ManifestError
from diffusion.contracts.manifest import Manifest
from diffusion.datasets.loader import eval_loader, train_loader
from diffusion.recipe import load_recipe
from diffusion.recipe.manifest_rules import manifest_errors
from tests.conftest import NUM_IMAGES, REPOSITORY, RESOLUTION


def recipe_for(folder, kind, overrides, *more):
    return load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', [*overrides, f'data.kind={kind}', f'data.streams.train.local={folder}', *more])


@pytest.mark.parametrize('workers', [0, 2])
@pytest.mark.parametrize('kind', ['images', 'latents'])
def test_an_epoch_holds_each_sample_once_and_the_next_is_keyed_anew(kind, workers, images, latents, encoders, overrides):
    folder = {'images': images, 'latents': latents}[kind]
    recipe = recipe_for(folder, kind, overrides, f'data.workers={workers}')
    loader = train_loader(recipe, encoders)
    orders = []
    for epoch in range(2):
        batches = list(loader)
        keys = torch.cat([batch['sample_key'] for batch in batches])
        assert sorted(keys[:, 1].tolist()) == list(range(NUM_IMAGES))
        assert (keys[:, 0] == epoch).all()
        orders.append(keys[:, 1].tolist())
    assert orders[0] != orders[1] != sorted(orders[1])
    batch = batches[0]
    if kind == 'images':
        assert batch['images'].shape == (8, 3, RESOLUTION, RESOLUTION)
        assert batch['images'].dtype == torch.uint8
        assert 'moments' not in batch
    else:
        assert batch['moments'].shape == (8, 8, RESOLUTION // 4, RESOLUTION // 4)
        assert batch['moments'].dtype == torch.float16
        assert 'images' not in batch
    assert batch['tokens']['text_encoder'].shape == (8, encoders.text.length)


def test_a_loaders_process_hands_over_the_same_batch_in_one_storage(latents, encoders, overrides):
    def batches(workers):
        more = ['data.caption_dropout=0', 'log.samples.guidance=1', f'data.workers={workers}']
        return list(train_loader(recipe_for(latents, 'latents', overrides, *more), encoders, geometry=True))

    for ours, theirs in zip(batches(0), batches(1), strict=True):
        tensors = [*(value for name, value in theirs.items() if name != 'tokens'), *theirs['tokens'].values()]
        assert len(tensors) == 4
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
        assert ours.keys() == theirs.keys()
        for name in ('moments', 'sample_key', 'geometry'):
            assert ours[name].dtype == theirs[name].dtype
            assert torch.equal(ours[name], theirs[name])
        assert torch.equal(ours['tokens']['text_encoder'], theirs['tokens']['text_encoder'])


def test_latents_are_the_encoded_images(images, latents, encoders, overrides):
    """The same sample through both paths: precomputed moments equal those of the image, to float16."""
    by_id = {}
    for kind, folder in (('images', images), ('latents', latents)):
        for batch in train_loader(recipe_for(folder, kind, overrides, 'data.caption_dropout=0', 'log.samples.guidance=1'), encoders):
            for i, (_, sample_id, _) in enumerate(batch['sample_key'].tolist()):
                by_id.setdefault(sample_id, []).append((batch.get('images', batch.get('moments'))[i], batch['tokens']['text_encoder'][i]))
    assert len(by_id) == NUM_IMAGES
    for (pixels, words), (moments, same_words) in by_id.values():
        torch.testing.assert_close(encoders.vae.encode(pixels[None])[0].half(), moments, rtol=2e-3, atol=2e-3)
        assert torch.equal(words, same_words)


def test_evaluation_takes_everything_in_order_with_every_caption(latents, encoders, overrides):
    recipe = recipe_for(latents, 'latents', overrides, 'eval.every=1ba', f'eval.streams.val.local={latents}', 'data.caption_dropout=0.9')
    keys = torch.cat([batch['sample_key'] for batch in eval_loader(recipe, encoders, 4)])
    assert keys[:, 1].tolist() == list(range(NUM_IMAGES))
    empty = encoders.text.tokenize([''])['text_encoder'][0]
    assert not any(torch.equal(row, empty) for batch in eval_loader(recipe, encoders, 4) for row in batch['tokens']['text_encoder'])
    assert eval_loader(recipe_for(latents, 'latents', overrides), encoders, 4) is None


def test_synthetic_samples_are_fixed_and_scaled(encoders, recipe):
    loader = train_loader(recipe, encoders)
    loader.sampler.set_epoch(3)
    batches = list(loader)
    keys = torch.cat([batch['sample_key'] for batch in batches])
    assert sorted(keys[:, 1].tolist()) == list(range(64))
    assert (keys[:, 0] == 3).all()
    moments = torch.cat([batch['moments'] for batch in batches])
    assert float(moments[:, :4].float().std()) * encoders.vae.scaling_factor == pytest.approx(1, rel=0.02)


def test_a_data_set_that_contradicts_the_recipe_is_refused_by_field(images, latents, encoders, overrides, tmp_path):
    def refused(folder, kind, *more):
        with pytest.raises(ManifestError) as caught:
            train_loader(recipe_for(folder, kind, overrides, *more), encoders)
        return str(caught.value)

    assert 'manifest kind is images, data.kind is latents' in refused(images, 'latents')
    assert 'manifest resolution is 32, data.resolution is 64' in refused(latents, 'latents', 'data.resolution=64')
    assert 'manifest min_side_px is 32, data.resolution is 64' in refused(images, 'images', 'data.resolution=64')
    assert 'lower it' in refused(latents, 'latents', 'batch.global_size=64')
    shutil.copytree(latents, tmp_path / 'other')
    manifest = json.loads((tmp_path / 'other/manifest.json').read_text())
    manifest['encoder']['vae_sha256'] = 'f' * 64
    (tmp_path / 'other/manifest.json').write_text(json.dumps(manifest))
    assert 'manifest encoder.vae_sha256 is ffffffffffff' in refused(tmp_path / 'other', 'latents')
    (tmp_path / 'other/manifest.json').write_text('{"version": 0}')
    assert 'version 0, this code reads 1' in refused(tmp_path / 'other', 'latents')
    (tmp_path / 'other/manifest.json').unlink()
    assert 'no such file' in refused(tmp_path / 'other', 'latents')


@pytest.mark.parametrize(('more', 'held'), [([], NUM_IMAGES), (['data.kind=synthetic', 'data.synthetic_samples=9'], 9)])
def test_data_that_fill_no_batch_are_counted(more, held, latents, encoders, overrides):
    recipe = recipe_for(latents, 'latents', overrides, 'batch.global_size=64', *more)
    with pytest.raises(ManifestError, match=f'holds {held} samples an epoch, fewer than batch.global_size 64; lower it'):
        train_loader(recipe, encoders)


def test_a_remote_data_set_is_streamed_and_its_hashes_checked(latents, encoders, overrides, tmp_path):
    """`file://` stands for object storage here: the same download path, without a server."""
    recipe = load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', [*overrides, 'data.kind=latents', f'data.streams.train.remote={latents}'])
    for _ in range(2):  # a second start finds the cache of the first
        loader = train_loader(recipe, encoders)
        assert loader.dataset.streams[0].validate_hash == 'sha256'
        assert sum(len(batch['sample_key']) for batch in loader) == NUM_IMAGES
        assert len(list((tmp_path / 'run/cache/node0').glob('train-train-*/*/*.mds'))) == 2
        del loader


@pytest.mark.parametrize('content', ['[' * 100_000, '{"version":' * 100_000, '1' * 5_000, '[]', 'null', '\udcff'], ids=range(6))
def test_a_hostile_manifest_is_no_manifest(tmp_path, content):
    (tmp_path / 'manifest.json').write_bytes(content.encode(errors='surrogateescape'))
    with pytest.raises(ManifestError, match=f'{tmp_path}/manifest.json: not a manifest'):
        Manifest.read(tmp_path)


def test_manifest_round_trip(latents, recipe):
    manifest = Manifest.read(latents)
    assert Manifest(**json.loads(manifest.to_json())) == manifest
    assert manifest.attempted == manifest.num_samples + sum(manifest.dropped.values())
    assert manifest_errors(manifest, recipe, 'data.streams.train.local=x') == [
        'manifest kind is latents, data.kind is synthetic; set data.kind=latents or convert the data'
    ]
