"""The whole path in object storage: convert, encode, audit and train against an S3 server that is not always well."""

import threading
import zlib

import pytest

from data_prep.converting.conversion import convert
from data_prep.encoding.dataset import encode
from data_prep.engines.engine import LocalEngine
from data_prep.mds.job import Share
from diffusion.common import object_storage
from diffusion.common.storage import StorageError, open_folder
from diffusion.contracts.errors import DataError, IncompleteError
from diffusion.contracts.manifest import Manifest
from diffusion.datasets.loader import train_loader
from diffusion.recipe import load_recipe
from diffusion.recipe.schema import EncoderSource
from tests.conftest import NUM_IMAGES, REPOSITORY, RESOLUTION, run_python


def upload(folder, url):
    for path in folder.iterdir():
        copy = path.with_name(f'.copy-{path.name}')
        copy.write_bytes(path.read_bytes())
        open_folder(url).put(copy, path.name)


def samples(url, recipe_overrides, encoders, kind):
    recipe = load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', [*recipe_overrides, f'data.kind={kind}', f'data.streams.train.remote={url}'])
    batches = list(train_loader(recipe, encoders))
    return {int(sample_id) for batch in batches for sample_id in batch['sample_key'][:, 1]}


def failing_now_and_then():
    """Requests for one object in twelve fail three times before they work."""
    lock, seen = threading.Lock(), {}

    def fails(method, path):
        with lock:
            number = seen[method, path] = seen.get((method, path), 0) + 1
        return number <= 3 and zlib.crc32(path.encode()) % 12 == 0

    return fails


def test_from_a_crawl_in_a_bucket_to_a_trained_model(s3, crawl, encoders_folder, encoders, overrides, tmp_path):
    upload(crawl, 's3://bucket/crawl')
    s3.proxy.fails = failing_now_and_then()
    assert convert('s3://bucket/crawl', 's3://bucket/images').kept == NUM_IMAGES
    assert (
        encode('s3://bucket/images', 's3://bucket/latents', [RESOLUTION], EncoderSource(str(encoders_folder)), engine=LocalEngine(2)).kept
        == NUM_IMAGES
    )
    assert s3.proxy.num_failures >= 6
    s3.proxy.fails = lambda method, path: False
    assert run_python('-m', 'data_prep.audit', 's3://bucket/latents', '--report', tmp_path / 'report.html', '--processes', 1)
    assert (tmp_path / 'report.html').exists()
    assert samples('s3://bucket/images', overrides, encoders, 'images') == set(range(NUM_IMAGES))
    stream = ['data.kind=latents', 'data.streams.train.remote=s3://bucket/latents']
    run_python('train.py', 'yamls/sd2-base-256.yaml', *overrides, *stream)
    assert (tmp_path / 'run/checkpoints').exists()
    assert convert('s3://bucket/crawl', 's3://bucket/images').attempted_now == 0  # all of it is there


def test_the_bucket_holds_what_a_disk_would(s3, crawl, tmp_path):
    convert(crawl, tmp_path / 'images')
    convert(crawl, 's3://bucket/images')
    remote = open_folder('s3://bucket/images')
    for name in open_folder(tmp_path / 'images').files():
        assert remote.read(name) == (tmp_path / 'images' / name).read_bytes(), name


def test_a_stop_in_the_middle_of_an_upload(s3, crawl, tmp_path):
    def fails(method, path):
        return method == 'PUT' and '00001/shard' in path and 'broken'

    attempts, object_storage.ATTEMPTS = object_storage.ATTEMPTS, 2
    object_storage.client_of.cache_clear()
    try:
        s3.proxy.fails = fails
        with pytest.raises(StorageError, match='s3://bucket/images/00001/shard.00000.mds: could not be written'):
            convert(crawl, 's3://bucket/images')
        assert not any(key.endswith('manifest.json') for key in s3.object_names())
    finally:
        object_storage.ATTEMPTS = attempts
        object_storage.client_of.cache_clear()
    s3.proxy.fails = lambda method, path: False
    tally = convert(crawl, 's3://bucket/images')
    assert (tally.kept, tally.attempted_now) == (NUM_IMAGES, NUM_IMAGES // 2)


def test_a_remote_input_that_changed_is_noticed(s3, crawl):
    upload(crawl, 's3://bucket/crawl')
    convert('s3://bucket/crawl', 's3://bucket/images')
    open_folder('s3://bucket/images').delete('parts/00001.json')
    s3.client().put_object(Bucket='bucket', Key='crawl/00000.parquet', Body=(crawl / '00001.parquet').read_bytes())
    with pytest.raises(DataError, match='part 00000 was written with input'):
        convert('s3://bucket/crawl', 's3://bucket/images')


def test_a_bucket_with_something_else_in_it_is_left_alone(s3, crawl):
    s3.client().put_object(Bucket='bucket', Key='theirs/thesis.txt', Body=b'mine')
    with pytest.raises(DataError, match='holds something else already'):
        convert(crawl, 's3://bucket/theirs')
    assert s3.object_names() == ['theirs/thesis.txt']


@pytest.mark.parametrize('where', ['local', 's3'])
def test_hosts_share_the_work_and_the_last_one_merges(where, request, crawl, encoders_folder, tmp_path):
    root = tmp_path
    if where == 's3':
        request.getfixturevalue('s3')
        root = 's3://bucket'
    first = convert(crawl, f'{root}/images', share=Share(0, 2))
    assert (first.attempted, first.kept) == (NUM_IMAGES // 2,) * 2
    assert 'the last one to finish merges' in first.remarks[0]
    assert 'manifest.json' not in open_folder(f'{root}/images').files()
    with pytest.raises(IncompleteError, match='1 of 2 parts are not written, 00001 for one'):
        convert(crawl, f'{root}/images', share=Share(merge_only=True))
    assert convert(crawl, f'{root}/images', share=Share(1, 2)).kept == NUM_IMAGES
    assert Manifest.read(f'{root}/images').num_samples == NUM_IMAGES
    location = EncoderSource(str(encoders_folder))
    assert encode(f'{root}/images', f'{root}/latents', [RESOLUTION], location, share=Share(1, 2)).kept == NUM_IMAGES // 2
    assert encode(f'{root}/images', f'{root}/latents', [RESOLUTION], location, share=Share(0, 2)).kept == NUM_IMAGES
    with pytest.raises(DataError, match='--rank 2 is not one of 0 to 1'):
        Share(2, 2)
