"""What is particular to shards: img2dataset's, and those of an image MDS that is filtered and sharded anew."""

import hashlib
import io
import json
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data_prep.converting.buckets import Buckets
from data_prep.converting.conversion import Options, convert
from data_prep.converting.filters import condition
from data_prep.sources.parquet import parquet_rows
from diffusion.contracts.errors import DataError
from diffusion.contracts.manifest import Manifest
from tests.data_prep.sources.test_sources import TwoShapes, put, put_table, samples, sidecars, webdataset
from tests.data_prep.test_convert import jpeg, write_webdataset


def test_img2dataset_shards_in_folders_of_their_own(tmp_path):
    for name in ('a', 'b'):
        (tmp_path / 's').mkdir(exist_ok=True)
        webdataset(tmp_path / f's/{name}')
    tally = convert(tmp_path / 's', tmp_path / 'out')
    assert (tally.attempted, tally.kept) == (14, 6)
    keys = [sample['key'] for sample in samples(tmp_path / 'out')]
    assert keys == [f'{folder}/00000000{i}' for folder in 'ab' for i in (0, 1, 5)]


def test_parts_that_would_have_the_same_name_are_refused(tmp_path):
    for name in ('a/b-0', 'a-b/0'):
        put_table(tmp_path / f's/{name}.parquet')
    with pytest.raises(DataError, match='a-b/0.parquet and a/b-0.parquet would both become the part a-b-0'):
        convert(tmp_path / 's', tmp_path / 'out')


def test_a_tar_with_files_that_are_too_large_or_of_macos(tmp_path, monkeypatch):
    monkeypatch.setattr('data_prep.sources.webdataset.MAX_IMAGE_BYTES', 5000)
    rows = [(f'{i:09d}', 'caption', jpeg(seed=i), 'success') for i in range(3)]
    rows[1] = (rows[1][0], 'c' * 6000, rows[1][2], 'success')
    rows[2] = (*rows[2][:2], jpeg(300, 300), 'success')
    source = write_webdataset(tmp_path / 's', rows)
    with tarfile.open(source / '00000.tar', 'a') as tar:
        tar.addfile(tarfile.TarInfo('._000000000.jpg'), io.BytesIO())
    tally = convert(source, tmp_path / 'out')
    assert tally.kept == 1
    assert sorted(tally.dropped) == ['caption over 64 MB', 'over 64 MB']


def test_a_damaged_part_in_the_middle_stops_what_its_repair_finishes(tmp_path):
    rows = [(f'{i:09d}', f'caption {i}', jpeg(seed=i), 'success') for i in range(9)]
    source = write_webdataset(tmp_path / 's', rows, per_shard=3)
    whole = (source / '00001.tar').read_bytes()
    for damaged in (whole[:5000], whole[:1024], b'', bytes(len(whole))):
        (source / '00001.tar').write_bytes(damaged)
        with pytest.raises(DataError, match='00001.tar'):
            convert(source, tmp_path / 'out')
        assert not (tmp_path / 'out/index.json').exists()
    (source / '00001.tar').write_bytes(whole)
    tally = convert(source, tmp_path / 'out')
    assert (tally.attempted, tally.attempted_now) == (9, 6)  # the first part was there
    assert [sample['key'] for sample in samples(tmp_path / 'out')] == [key for key, *_ in rows]


@pytest.mark.parametrize('buckets', [Buckets(), TwoShapes()], ids=['one stream', 'buckets'])
def test_an_mds_filtered_and_sharded_again_keeps_what_it_knows(buckets, tmp_path):
    put_table(
        tmp_path / 's/train.parquet',
        image=[{'bytes': content, 'path': None} for content in (gif_like_png(), jpeg(80, 60, seed=1), jpeg(30, 40, seed=2))],
        caption=['short', 'a', 'b'],
        long=['a longer one', 'c', 'd'],
        score=[0.25, 0.5, 0.75],
    )
    convert(tmp_path / 's', tmp_path / 'first', Options(buckets=buckets, captions={'caption': 0.9, 'long': 0.1}, keep_columns=('score',)))
    again = Options(conditions=(condition('score < 0.7'),), max_caption_chars=10, keep_columns=('score',), shard_bytes=5000)
    tally = convert(tmp_path / 'first', tmp_path / 'second', again)
    assert (tally.attempted, tally.kept, tally.dropped) == (3, 2, {'not score < 0.7': 1})
    streams = Manifest.read(tmp_path / 'first').streams or ['']
    before = {sample['key']: sample for stream in streams for sample in samples(tmp_path / 'first' / stream)}
    after = {sample['key']: sample for sample in samples(tmp_path / 'second')}
    assert {sample['reencoded'] for sample in after.values()} == {'palette', ''}
    for key, sample in after.items():
        captions = [['short', 1.0]] if sample['caption'] == 'short' else before[key]['captions']
        assert sample == {**before[key], 'captions': captions}
    assert len(json.loads((tmp_path / 'second/index.json').read_text())['shards']) == 2  # one each
    with pytest.raises(DataError, match='no column punsafe'):
        convert(tmp_path / 'first', tmp_path / 'third', Options(conditions=(condition('punsafe < 1'),)))


def gif_like_png():
    buffer = io.BytesIO()
    Image.open(io.BytesIO(jpeg())).convert('P').save(buffer, 'PNG')
    return buffer.getvalue()


def test_dest_in_the_source_and_columns_that_are_there_already(tmp_path):
    source = sidecars(tmp_path / 's')
    with pytest.raises(DataError, match='is inside the source'):
        convert(source, source / 'out')
    with pytest.raises(DataError, match='--keep-columns caption,width: is there'):
        convert(source, tmp_path / 'out', Options(keep_columns=('width', 'caption')))
    assert not (source / 'out').exists()
    assert not (tmp_path / 'out').exists()


def test_a_parquet_file_is_never_in_memory_as_a_whole(tmp_path):
    put_table(tmp_path / 'train.parquet', image=[{'bytes': bytes(250_000), 'path': ''}] * 160, caption=['a'] * 160)  # 40 MB
    pq.write_table(pq.read_table(tmp_path / 'train.parquet'), tmp_path / 'train.parquet', row_group_size=8, compression='none', use_dictionary=False)
    before = pa.total_allocated_bytes()
    with pq.ParquetFile(tmp_path / 'train.parquet') as file:
        held = [pa.total_allocated_bytes() - before for _ in parquet_rows(file, ['image', 'caption'])]
    assert len(held) == 160
    assert max(held) < 20e6


def test_a_crawl_that_is_not_finished_is_no_smaller_crawl(tmp_path):
    (tmp_path / 's').mkdir()
    source = webdataset(tmp_path / 's/a')
    put(tmp_path / 's', 'lists.json', '["a", "b"]')
    for name in ('a/download.json', 'b/download.json'):
        with pytest.raises(DataError, match='the download is not finished'):
            convert(tmp_path / 's', tmp_path / 'out')
        put(tmp_path / 's', name, '{}')
        put(tmp_path / 's', name.replace('download.json', 'failures.parquet'), '')
    convert(tmp_path / 's', tmp_path / 'out')
    put(source, '00000_stats.json', '{}')
    with pytest.raises(DataError, match='00001.tar: has no _stats.json next to it'):
        convert(tmp_path / 's', tmp_path / 'out2')


def test_images_of_our_crawl_must_have_their_sha256(tmp_path):
    source = webdataset(tmp_path / 's')
    for name in ('download.json', 'failures.parquet'):
        put(source, name, '{}')
    for path in source.glob('0*.parquet'):
        table = pq.read_table(path)
        digests = []
        with tarfile.open(path.with_suffix('.tar')) as tar:
            images = {member.name: tar.extractfile(member).read() for member in tar if member.name.endswith('.jpg')}
        for key in table['key'].to_pylist():
            digests.append(hashlib.sha256(images.get(f'{key}.jpg', b'')).hexdigest())
        if path.stem == '00000':
            digests[0] = 'f' * 64  # what a flipped bit in the tar looks like
        pq.write_table(table.append_column('sha256', pa.array(digests)), path)
    tally = convert(source, tmp_path / 'out')
    assert tally.dropped['SHA-256 is not that of the download'] == 1
    assert tally.kept == 2


def test_shards_become_larger_and_kept_columns_stay(tmp_path):
    put_table(tmp_path / 's/train.parquet', image=[{'bytes': jpeg(seed=i), 'path': None} for i in range(40)], caption=['c'] * 40, score=[0.5] * 40)
    convert(tmp_path / 's', tmp_path / 'small', Options(keep_columns=('score',), shard_bytes=1 << 13))
    convert(tmp_path / 'small', tmp_path / 'large')
    convert(tmp_path / 'large', tmp_path / 'again', Options(conditions=(condition('score < 1'),)))
    shards = [len(list((tmp_path / name).rglob('*.mds'))) for name in ('small', 'large')]
    assert shards[0] > 5
    assert shards[1] == 1
    assert samples(tmp_path / 'small') == samples(tmp_path / 'large') == samples(tmp_path / 'again')


def test_what_was_fetched_and_not_kept_has_the_reason_that_img2dataset_gave(tmp_path):
    messages = ['not a JPEG, PNG or WebP', 'Image decoding error', 'image too small', 'something else', None]
    put_table(
        tmp_path / 's/00000.parquet',
        image=['no column of images'] * 5,
        jpg=pa.array([None] * 5, pa.binary()),
        key=list('01234'),
        caption=['caption'] * 5,
        status=['failed_to_resize'] * 5,
        error_message=messages,
    )
    assert convert(tmp_path / 's', tmp_path / 'out').dropped == {
        'not a JPEG, PNG or WebP': 1,
        'not decoded by img2dataset': 1,
        'too small for img2dataset': 1,
        'not kept by img2dataset': 2,
    }
