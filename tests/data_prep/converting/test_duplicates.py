"""Duplicates against a search that compares every pair of rows."""

import hashlib
import io
import random

import numpy as np
import pytest
from PIL import Image

from data_prep.converting import duplicates
from data_prep.converting.buckets import MinSideBuckets
from data_prep.converting.conversion import Options, convert
from data_prep.converting.filters import condition
from data_prep.engines.engine import LocalEngine
from data_prep.mds.job import Share
from data_prep.sources.base import Row
from diffusion.contracts.errors import DataError
from diffusion.datasets.decode import open_image
from tests.data_prep.sources.test_sources import put, put_images, put_table, samples
from tests.data_prep.test_convert import jpeg, write_parquet

EXACT = Options(duplicates='exact')
REASON = 'duplicate of an earlier image'
POOL = [jpeg(seed=seed) for seed in range(12)]


def random_rows(seed, count=60):
    """Images of a small pool, some without a caption, some that are not images, some missing."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        image = rng.choice([*POOL, *POOL, b'no image', None])
        rows.append((f'{i:09d}', rng.choice(['a', 'b', '']), image, 'success' if image else 'failed_to_download'))
    return rows


def brute_force(rows):
    kept, seen = [], set()
    for key, caption, image, _ in rows:
        if image in POOL and caption and image not in seen:
            kept.append(key)
            seen.add(image)
    return kept


def write(folder, rows, per_shard):
    return write_parquet(folder, rows, per_shard)


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob('*')) if path.is_file() and not path.name.startswith('.')}


def keys(folder):
    return [sample['key'] for sample in samples(folder)]


@pytest.mark.parametrize('rows_per_slice', [1, 7, 1 << 24])
@pytest.mark.parametrize('per_shard', [4, 60])
def test_exact_duplicates_are_those_of_a_search_by_pairs(per_shard, rows_per_slice, tmp_path, monkeypatch):
    monkeypatch.setattr(duplicates, 'ROWS_PER_SLICE', rows_per_slice)
    rows = random_rows(seed=per_shard)
    tally = convert(write(tmp_path / 's', rows, per_shard), tmp_path / 'out', EXACT)
    assert keys(tmp_path / 'out') == brute_force(rows)
    assert tally.attempted == 60 == tally.kept + tally.dropped.total()
    usable = sum(bool(caption) and image is not None for _, caption, image, _ in rows)
    images = sum(bool(caption) and image in POOL for _, caption, image, _ in rows)
    assert tally.dropped[REASON] >= images - len(brute_force(rows)) > 0
    assert tally.dropped[REASON] + tally.dropped['not a readable JPEG, PNG or WebP'] + tally.kept == usable


def test_the_same_from_any_number_of_processes_and_hosts(tmp_path):
    rows = random_rows(seed=0)
    source = write(tmp_path / 's', rows, per_shard=8)
    convert(source, tmp_path / 'alone', EXACT)
    convert(source, tmp_path / 'processes', EXACT, engine=LocalEngine(2))
    for rank in (1, 0):
        convert(source, tmp_path / 'hosts', EXACT, share=Share(rank, 2))
    assert keys(tmp_path / 'alone') == brute_force(rows)
    assert contents(tmp_path / 'alone') == contents(tmp_path / 'processes') == contents(tmp_path / 'hosts')


@pytest.mark.parametrize(
    'stop_at',
    [
        'data_prep.converting.conversion.find_duplicates',
        'data_prep.converting.conversion.Conversion.here',
        'data_prep.converting.duplicates.DigestWriter.__call__',
    ],
)
def test_stopped_and_run_again(stop_at, tmp_path, monkeypatch):
    rows = random_rows(seed=1)
    source = write(tmp_path / 's', rows, per_shard=8)
    calls = []
    real = duplicates.DigestWriter.__call__

    def stop(*arguments, **_):
        calls.append(arguments)
        if 'DigestWriter' in stop_at and len(calls) < 4:
            return real(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(stop_at, stop)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / 'out', EXACT)
    monkeypatch.undo()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / 'out/digests').glob('*/*')}
    assert len(before) == (3 if 'DigestWriter' in stop_at else 8)
    convert(source, tmp_path / 'out', EXACT)
    assert keys(tmp_path / 'out') == brute_force(rows)
    assert {path: path.stat().st_mtime_ns for path in before} == before  # what was there was used


def test_an_input_that_changes_after_the_digests_is_noticed(tmp_path, monkeypatch):
    source = write(tmp_path / 's', random_rows(seed=2), per_shard=20)
    monkeypatch.setattr('data_prep.converting.conversion.find_duplicates', None)
    with pytest.raises(TypeError):
        convert(source, tmp_path / 'out', EXACT)
    monkeypatch.undo()
    write(source, random_rows(seed=3), per_shard=20)
    with pytest.raises(DataError, match='/00000.parquet: was written with input bytes='):
        convert(source, tmp_path / 'out', EXACT)


def test_an_input_that_changes_while_digests_are_written_is_noticed(tmp_path, monkeypatch):
    source = put_images(tmp_path / 's', [('0.jpg', '', POOL[0])])
    put(source, '0.txt', 'caption')
    monkeypatch.setitem(duplicates.DIGEST_OF, 'exact', lambda _: put(source, '0.jpg', POOL[1]) and bytes(16))
    with pytest.raises(DataError, match='was written with input bytes='):
        convert(source, tmp_path / 'out', EXACT)


def test_an_image_on_the_skip_list_goes_with_all_its_copies(tmp_path):
    images = [{'bytes': POOL[i], 'path': None} for i in (0, 1, 0, 0)]
    put_table(tmp_path / 's/train.parquet', image=images, caption=['first', 'other', 'asked to be left out', 'late'])
    put(tmp_path, 'skip.txt', 'train-000002')
    tally = convert(tmp_path / 's', tmp_path / 'out', Options(skip_list=str(tmp_path / 'skip.txt'), duplicates='exact'))
    assert [sample['caption'] for sample in samples(tmp_path / 'out')] == ['other']
    assert tally.dropped == {'on the skip-list': 1, REASON: 2}


def test_the_filters_decide_which_is_the_first_that_is_usable(tmp_path):
    same = {'bytes': POOL[0], 'path': None}
    put_table(tmp_path / 's/train.parquet', image=[same] * 4, caption=['', 'bad', 'good', 'late'], score=[1.0, 0.0, 1.0, 1.0])
    tally = convert(tmp_path / 's', tmp_path / 'out', Options(conditions=(condition('score > 0.5'),), duplicates='exact'))
    assert [sample['caption'] for sample in samples(tmp_path / 'out')] == ['good']
    assert tally.dropped == {'empty caption': 1, 'not score > 0.5': 1, REASON: 1}
    with pytest.raises(DataError, match='no column other'):
        convert(tmp_path / 's', tmp_path / 'out2', Options(conditions=(condition('other > 0.5'),), duplicates='exact'))


def test_captions_of_other_columns_decide_as_well(tmp_path):
    same = {'bytes': POOL[0], 'path': None}
    put_table(tmp_path / 's/train.parquet', image=[same] * 3, caption=['a', '', ''], recaption=['', 'good', 'late'])
    convert(tmp_path / 's', tmp_path / 'out', Options(captions={'recaption': 1.0}, duplicates='exact'))
    assert [sample['caption'] for sample in samples(tmp_path / 'out')] == ['good']


def test_an_image_mds_knows_the_digests_of_what_it_was_made_from(tmp_path):
    rows = random_rows(seed=4)
    convert(write(tmp_path / 's', rows, per_shard=20), tmp_path / 'first')
    convert(tmp_path / 'first', tmp_path / 'second', EXACT)
    assert keys(tmp_path / 'second') == brute_force(rows)


def test_nothing_usable_is_fine(tmp_path):
    tally = convert(write(tmp_path / 's', [('0', '', POOL[0], 'success'), ('1', 'a', None, 'gone')], 1), tmp_path / 'out', EXACT)
    assert (tally.attempted, tally.kept) == (2, 0)
    put(tmp_path / 'c', 'captions_x.json', '{"images": [], "annotations": []}')
    assert convert(tmp_path / 'c', tmp_path / 'out2', EXACT).attempted == 0


def scene(seed, size=(640, 480)):
    """An image with the spectrum of a photograph."""
    rng = np.random.default_rng(seed)
    width, height = size
    radius = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width)) + 1e-3
    waves = np.fft.ifft2((rng.normal(size=(3, height, width)) + 1j * rng.normal(size=(3, height, width))) / radius**1.5).real
    low, high = waves.min(), waves.max()
    return Image.fromarray(((waves - low) / (high - low) * 255).astype(np.uint8).transpose(1, 2, 0))


def encoded(image, kind='JPEG', **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def near_digest(content):
    return duplicates.perceptual_digest(Row('', '', [], content))


def test_near_duplicates_are_found_and_different_images_are_not():
    originals = [encoded(scene(seed), quality=95) for seed in range(20)]
    digests = [near_digest(content) for content in originals]
    assert len(set(digests)) == 20
    half = [encoded(open_image(content).resize((320, 240), Image.Resampling.LANCZOS), quality=90) for content in originals]
    webp = [encoded(open_image(content), 'WEBP', quality=80) for content in originals]
    for copies in (half, webp):
        assert sum(near_digest(copy) == digest for copy, digest in zip(copies, digests, strict=True)) >= 14  # of 20


@pytest.mark.parametrize(
    ('stream', 'options'),
    [('', Options(min_side_px=200, duplicates='near')), ('side-200', Options(buckets=MinSideBuckets((200,)), duplicates='near'))],
)
def test_a_small_copy_that_is_left_out_does_not_take_the_large_one_with_it(stream, options, tmp_path):
    large = next(image for image in map(scene, range(20)) if near_digest(encoded(image.resize((160, 120)))) == near_digest(encoded(image)))
    rows = [(str(i), 'a', encoded(large.resize(size)), 'success') for i, size in enumerate([(160, 120), (640, 480), (640, 480)])]
    tally = convert(write(tmp_path / 's', rows, 2), tmp_path / 'out', options)
    assert keys(tmp_path / 'out' / stream) == ['1']
    assert tally.dropped == {'short side below 200 px': 1, 'near duplicate of an earlier image': 1}


def test_digests_are_what_they_are_said_to_be():
    assert duplicates.sha256_digest(Row('', '', [], b'abc')) == hashlib.sha256(b'abc').digest()[:16]
    assert duplicates.sha256_digest(Row('', '', [], b'', sha256=hashlib.sha256(b'abc').hexdigest())) == hashlib.sha256(b'abc').digest()[:16]
    assert near_digest(b'not an image') == hashlib.sha256(b'not an image').digest()[:16]
    imagehash = pytest.importorskip('imagehash')
    content = encoded(scene(0, (64, 64)), 'PNG')
    assert near_digest(content)[:8].hex() == str(imagehash.phash(open_image(content)))
