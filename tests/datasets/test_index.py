"""A dataset whose index.json and manifest.json disagree is refused at every start, and the shard is named."""

import json
import shutil

import pytest

from diffusion.common import object_storage
from diffusion.common.storage import StorageError
from diffusion.contracts.errors import BAD_DATA, BAD_RECIPE, STALLED, DataError, ManifestError, train_code
from diffusion.contracts.manifest import Manifest
from diffusion.datasets.loader import eval_loader, train_loader
from diffusion.datasets.shards import HASH
from diffusion.recipe import load_recipe
from tests.common.s3_server import BUCKET
from tests.conftest import NUM_IMAGES, REPOSITORY
from tests.datasets.streams import edit_index

HALF = NUM_IMAGES // 2  # samples in each of the two shards
SHARDS = '00000-00000/shard.00000.mds', '00001-00000/shard.00000.mds'


def recipe_for(folder, overrides, *more, where='local'):
    data = ['data.kind=latents', f'data.streams.train.{where}={folder}', *more]
    return load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', [*overrides, *data])


def refused(recipe, encoders, make=train_loader, *arguments):
    with pytest.raises(DataError) as caught:
        make(recipe, encoders, *arguments)
    assert train_code(caught.value) == BAD_DATA
    return str(caught.value)


def edit_manifest(folder, **changes):
    content = json.loads((folder / 'manifest.json').read_text())
    (folder / 'manifest.json').write_text(json.dumps({**content, **changes}))


def lose(index):
    index['shards'].pop()


def double(index):
    index['shards'].append(index['shards'][0])


def shorten(index):
    index['shards'][1]['samples'] -= 5


def unhash(index):
    index['shards'][1]['hashes'] = []
    index['shards'][1]['raw_data']['hashes'] = {}


def empty_hash(index):
    index['shards'][1]['raw_data']['hashes'] = {HASH: ''}


def widen(index):
    index['shards'][1]['column_encodings'][0] = 'bytes'


DAMAGE = [
    (lose, f'manifest.json: num_samples is 48, the shards in index.json hold 24: {SHARDS[1]} is not listed'),
    (double, f'{SHARDS[0]}: is listed 2 times'),
    (shorten, f'num_samples is 48, the shards in index.json hold 43: {SHARDS[1]} holds 24 samples, index.json says 19'),
    (unhash, f'{SHARDS[1]}: index.json has no SHA-256 of it'),
    (empty_hash, f'{SHARDS[1]}: index.json has no SHA-256 of it'),
    (widen, f'{SHARDS[1]}: has the columns'),
    (lambda index: index.pop('shards'), 'index.json is not an MDS index'),
    (lambda index: index['shards'][1].update(samples='24'), 'index.json is not an MDS index'),
    (lambda index: index['shards'][1]['raw_data'].update(basename='../x.mds'), "index.json: names '../x.mds', a file outside the dataset"),
]


@pytest.mark.parametrize(('damage', 'message'), DAMAGE, ids=[damage.__name__ for damage, _ in DAMAGE])
def test_an_index_that_contradicts_the_manifest_is_refused(damage, message, latents, encoders, overrides, tmp_path):
    data = shutil.copytree(latents, tmp_path / 'data')
    edit_index(data, damage)
    for where in ('local', 'remote'):
        said = refused(recipe_for(data, overrides, where=where), encoders)
        assert f'stream train: {data}/{message}' in said or f'stream train: {data}/manifest.json: {message}' in said


def test_a_lost_shard_of_object_storage_is_named(latents, encoders, overrides, s3, tmp_path):
    data = shutil.copytree(latents, tmp_path / 'data')
    edit_index(data, lose)
    for path in data.rglob('*'):
        if path.is_file():
            s3.client().upload_file(str(path), BUCKET, f'latents/{path.relative_to(data)}')
    said = refused(recipe_for(f's3://{BUCKET}/latents', overrides, where='remote'), encoders)
    assert f'stream train: s3://{BUCKET}/latents/manifest.json: num_samples is 48' in said
    assert f'{SHARDS[1]} is not listed' in said


@pytest.mark.parametrize(('status', 'code'), [(403, BAD_RECIPE), (503, STALLED)])
def test_storage_that_refuses_is_not_storage_that_does_not_answer(encoders, overrides, s3, monkeypatch, status, code):
    monkeypatch.setattr(object_storage, 'ATTEMPTS', 1)
    object_storage.client_of.cache_clear()
    s3.proxy.fails = lambda method, path: status
    with pytest.raises(StorageError, match=f's3://{BUCKET}/latents/manifest.json: could not be read') as caught:
        train_loader(recipe_for(f's3://{BUCKET}/latents', overrides, where='remote'), encoders)
    object_storage.client_of.cache_clear()
    assert train_code(caught.value) == code


def test_evaluation_data_are_compared_as_well(latents, encoders, overrides, tmp_path):
    data = shutil.copytree(latents, tmp_path / 'data')
    edit_index(data, double)
    recipe = recipe_for(latents, overrides, 'eval.every=1ba', f'eval.streams.held_out.local={data}')
    train_loader(recipe, encoders)
    assert f'stream held_out: {data}/{SHARDS[0]}: is listed 2 times' in refused(recipe, encoders, eval_loader, 4)


def test_a_manifest_that_names_no_hash_does_not_switch_verification_off(latents, encoders, overrides, tmp_path):
    data = shutil.copytree(latents, tmp_path / 'data')
    edit_manifest(data, hashes=[])
    assert f'manifest.json: hashes is [], without the {HASH}' in refused(recipe_for(data, overrides), encoders)


def test_a_gap_in_the_numbers_is_named_where_the_file_is_gone_too(latents, encoders, overrides, tmp_path):
    data = shutil.copytree(latents, tmp_path / 'data')

    def renumber(index):
        for entry, name in zip(index['shards'], ('shard.00000.mds', 'shard.00002.mds'), strict=True):
            (data / entry['raw_data']['basename']).rename(data / name)
            entry['raw_data']['basename'] = name

    edit_index(data, renumber)
    train_loader(recipe_for(data, overrides), encoders)  # the counts agree, so nothing is lost
    edit_manifest(data, num_samples=72, attempted=72)
    assert 'hold 48: shard.00001.mds is not listed' in refused(recipe_for(data, overrides), encoders)


@pytest.mark.parametrize('where', ['local', 'remote'])
def test_counts_that_are_exchanged_are_found_in_the_shard(where, latents, encoders, overrides, tmp_path):
    """Their sum is right, and so are all hashes."""
    data = shutil.copytree(latents, tmp_path / 'data')

    def exchange(index):
        index['shards'][0]['samples'], index['shards'][1]['samples'] = HALF + 1, HALF - 1

    edit_index(data, exchange)
    with pytest.raises(DataError, match=r'shard.00000.mds: holds 24 samples, index.json says (23|25)'):
        list(train_loader(recipe_for(data, overrides, where=where), encoders))


def bucketed(folder, overrides):
    return recipe_for(folder, overrides, 'data.aspect_buckets=true', 'data.resolution=128', 'batch.global_size=4')


def test_buckets_are_compared_one_by_one_and_together(aspect_latents, encoders, overrides, tmp_path):
    data = shutil.copytree(aspect_latents, tmp_path / 'data')
    train_loader(bucketed(data, overrides), encoders)
    whole = json.loads((data / 'manifest.json').read_text())
    edit_manifest(data, streams=[name for name in whole['streams'] if name != '192x64'])
    assert f'{data}/manifest.json: num_samples is 23, its 4 streams hold 17' in refused(bucketed(data, overrides), encoders)
    edit_manifest(data, streams=whole['streams'])
    edit_index(data / '192x64', lose)
    said = refused(bucketed(data, overrides), encoders)
    assert f'stream train/192x64: {data}/192x64/manifest.json: num_samples is 6, the shards in index.json hold' in said
    assert 'is not listed' in said


@pytest.mark.parametrize('change', [{'num_samples': '48'}, {'dropped': []}, {'hashes': None}, {'columns': {'caption': 'str'}}, {'streams': [1]}])
def test_a_manifest_of_other_types_is_no_manifest(change, latents, encoders, overrides, tmp_path):
    data = shutil.copytree(latents, tmp_path / 'data')
    edit_manifest(data, **change)
    with pytest.raises(ManifestError, match='not a manifest'):
        Manifest.read(data)
    (data / 'manifest.json').write_text('[' * 100_000)
    with pytest.raises(ManifestError, match='not a manifest'):
        Manifest.read(data)
