"""What other projects leave: Hugging Face's imagefolder, two kinds of caption files, MDS and parquet whose columns have names of their own."""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from streaming import MDSWriter

from data_prep.converting.conversion import Options, convert
from data_prep.converting.filters import condition
from diffusion.contracts.errors import DataError
from tests.conftest import run_here
from tests.data_prep.sources.test_sources import put, put_table, samples
from tests.data_prep.test_convert import jpeg

FORMS = ['csv', 'jsonl', 'parquet']


def put_list(folder, form, rows, caption='text'):
    """`metadata.FORM` with a line for each (file_name, caption)."""
    if form == 'csv':
        put(folder, 'metadata.csv', '\n'.join([f'file_name,{caption}', *(f'{name},{text}' for name, text in rows)]))
    elif form == 'jsonl':
        put(folder, 'metadata.jsonl', '\n'.join(json.dumps({'file_name': name, caption: text}) for name, text in rows))
    else:
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({'file_name': [name for name, _ in rows], caption: [text for _, text in rows]}), folder / 'metadata.parquet')


def put_split(folder, form, names, caption='text'):
    for i, name in enumerate(names):
        put(folder, name, jpeg(seed=i))
    put_list(folder, form, [(name, f'caption of {name}') for name in names], caption)


def found(folder):
    return {sample['key']: sample['caption'] for sample in samples(folder)}


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('caption', ['text', 'caption'])
def test_an_imagefolder_with_its_list_in_train(form, caption, tmp_path):
    """As load_dataset('imagefolder') reads it: names are relative to the list."""
    put_split(tmp_path / 's/train', form, ['0.jpg', 'deep/1.jpg'], caption)
    put(tmp_path / 's', 'README.md', 'not an image')
    tally = convert(tmp_path / 's', tmp_path / 'out')
    assert found(tmp_path / 'out') == {'train/0.jpg': 'caption of 0.jpg', 'train/deep/1.jpg': 'caption of deep/1.jpg'}
    assert (tally.attempted, tally.kept) == (2, 2)
    assert convert(tmp_path / 's', tmp_path / 'out', split='train').attempted_now == 0  # the only one


@pytest.mark.parametrize('form', FORMS)
def test_splits_of_an_imagefolder_have_to_be_named(form, tmp_path):
    put_split(tmp_path / 's/train', form, ['0.jpg', '1.jpg'])
    put_split(tmp_path / 's/test', form, ['0.jpg'])
    with pytest.raises(DataError, match=r'holds several splits .test, train.; name one with --split'):
        convert(tmp_path / 's', tmp_path / 'out')
    assert convert(tmp_path / 's', tmp_path / 'out', split='test').attempted == 1
    assert list(found(tmp_path / 'out')) == ['test/0.jpg']


def test_the_nearest_list_counts_and_caption_files_where_there_is_none(tmp_path):
    put_split(tmp_path / 's/a', 'csv', ['0.jpg'])
    put(tmp_path / 's/a', 'unlisted.jpg', jpeg())
    put(tmp_path / 's/a', 'unlisted.txt', 'not looked at')
    put_split(tmp_path / 's/a/b', 'jsonl', ['0.jpg'], caption='caption')
    put(tmp_path / 's/c', '0.jpg', jpeg())
    put(tmp_path / 's/c', '0.caption', 'a caption file')
    put(tmp_path / 's', 'alone.jpg', jpeg())
    put_list(tmp_path / 's/d', 'csv', [('gone.jpg', 'gone'), ('../../../etc/passwd', 'outside')])
    tally = convert(tmp_path / 's', tmp_path / 'out')
    assert found(tmp_path / 'out') == {'a/0.jpg': 'caption of 0.jpg', 'a/b/0.jpg': 'caption of 0.jpg', 'c/0.jpg': 'a caption file'}
    assert tally.dropped == {'not in metadata.csv': 1, 'no caption file': 1, 'no such image': 2}


def test_caption_files_of_both_kinds(tmp_path):
    for i, sidecars in enumerate(
        [{'txt': 'tags'}, {'caption': 'a sentence'}, {'txt': 'tags', 'caption': 'a sentence'}, {'txt': '', 'caption': 'only'}]
    ):
        put(tmp_path / 's', f'{i}.jpg', jpeg(seed=i))
        for suffix, content in sidecars.items():
            put(tmp_path / 's', f'{i}.{suffix}', content)
    put(tmp_path / 's', 'lonely.caption', 'no image')
    assert convert(tmp_path / 's', tmp_path / 'out').dropped == {'no such image': 1}
    assert [sample['captions'] for sample in samples(tmp_path / 'out')] == [
        [['tags', 1.0]],
        [['a sentence', 1.0]],
        [['tags', 0.5], ['a sentence', 0.5]],
        [['only', 1.0]],
    ]


LAION = {  # the columns of mosaicml/diffusion's scripts/laion_cloudwriter.py
    'punsafe': 'float64',
    'pwatermark': 'float64',
    'similarity': 'float64',
    'caption': 'str',
    'url': 'str',
    'key': 'str',
    'status': 'str',
    'error_message': 'str',
    'width': 'int32',
    'height': 'int32',
    'original_width': 'int32',
    'original_height': 'int32',
    'exif': 'str',
    'jpg': 'bytes',
    'hash': 'int64',
    'aesthetic_score': 'float64',
}


def laion_row(i, **values):
    zero = {'str': '', 'bytes': b''}
    row = {name: zero.get(encoding, 0) for name, encoding in LAION.items()}
    named = {'key': f'{i:09d}', 'url': f'http://x/{i}', 'caption': f'caption {i}', 'jpg': jpeg(seed=i), 'punsafe': i / 10}
    return {**row, 'status': 'success', **named, **values}


def write_mds(folder, columns, rows, **options):
    with MDSWriter(out=str(folder), columns=columns, **options) as writer:
        for row in rows:
            writer.write(row)
    return folder


NAMED = {'image': 'jpg', 'caption': 'caption'}


def test_laion_shards_of_mosaicml_diffusion(tmp_path):
    rows = [laion_row(i) for i in range(5)]
    rows[3]['jpg'] = b'<html>'
    rows[4]['caption'] = ''
    for name in ('256-512', '512-768'):  # its buckets
        write_mds(tmp_path / f's/{name}', LAION, rows, size_limit=4000)
    with pytest.raises(DataError, match=r'does not say what its columns mean.*--columns image=jpg,caption=caption: it has .*jpg \(bytes\)'):
        convert(tmp_path / 's', tmp_path / 'out')
    arguments = [tmp_path / 's', tmp_path / 'out', '--columns', 'image=jpg,caption=caption', '--max-punsafe', '0.15', '--keep-columns', 'hash,exif']
    assert 'kept 4 40.0 %' in ' '.join(run_here('data_prep.convert', *arguments, '--processes', 1).stdout.split())
    first, *_, last = samples(tmp_path / 'out')
    assert (first['key'], first['url'], first['caption'], first['hash'], first['exif']) == ('000000000', 'http://x/0', 'caption 0', 0, '')
    assert (first['image'], first['width'], last['key']) == (rows[0]['jpg'], 40, '000000001')
    options = Options(max_caption_chars=100)
    tally = convert(tmp_path / 's', tmp_path / 'all', options, columns=NAMED)
    assert (tally.kept, tally.dropped) == (6, {'not a readable JPEG, PNG or WebP': 2, 'empty caption': 2})
    assert convert(tmp_path / 's', tmp_path / 'all', options, columns=NAMED).attempted_now == 0
    with pytest.raises(DataError, match='was begun with columns='):
        convert(tmp_path / 's', tmp_path / 'all', options, columns={**NAMED, 'caption': 'url'})
    shard = next((tmp_path / 's').rglob('shard.00000.mds'))
    shard.write_bytes(shard.read_bytes())  # without hashes its time is what tells
    with pytest.raises(DataError, match='was written with input'):
        convert(tmp_path / 's', tmp_path / 'all', options, columns=NAMED)


def test_other_encodings_of_an_mds(tmp_path, monkeypatch):
    """Streaming would decode images itself, whatever size they claim; here nothing but the checked decoder sees them."""
    image = Image.open(io.BytesIO(jpeg()))
    columns = {'photo': 'jpeg', 'thumbnail': 'pil', 'prompts': 'json', 'scores': 'ndarray:float32:2'}
    row = {'photo': image, 'thumbnail': image, 'prompts': ['one', 'two'], 'scores': np.array([0.5, 1.5], np.float32)}
    write_mds(tmp_path / 's', columns, [row, {**row, 'prompts': [6, 5]}], hashes=['sha256'])
    monkeypatch.setattr('streaming.base.format.mds.encodings.JPEG.decode', None)
    monkeypatch.setattr('streaming.base.format.mds.encodings.PIL.decode', None)
    options = Options(keep_columns=('scores',))
    assert convert(tmp_path / 's', tmp_path / 'out', options, columns={'image': 'photo', 'caption': 'prompts'}).dropped == {'caption is not text': 1}
    (sample,) = samples(tmp_path / 'out')
    assert (sample['key'], sample['captions'], sample['scores']) == ('shard.00000-000000', [['one', 0.5], ['two', 0.5]], [0.5, 1.5])
    with pytest.raises(DataError, match='column thumbnail is stored as pil; --columns image= takes bytes, jpeg, png'):
        convert(tmp_path / 's', tmp_path / 'out2', columns={'image': 'thumbnail', 'caption': 'prompts'})
    with pytest.raises(DataError, match=r'has no column image; name them, .* it has photo \(jpeg\)'):
        convert(tmp_path / 's', tmp_path / 'out2', columns={'image': 'image', 'caption': 'prompts'})


@pytest.mark.parametrize(
    ('columns', 'options', 'message'), [({'x': 'pkl'}, {}, 'can run code'), ({}, {'compression': 'zstd'}, 'is compressed: decompress')]
)
def test_an_mds_that_cannot_be_read_says_so(columns, options, message, tmp_path):
    write_mds(tmp_path / 's', {**LAION, **columns}, [laion_row(0, x=1) if columns else laion_row(0)], **options)
    with pytest.raises(DataError, match=message):
        convert(tmp_path / 's', tmp_path / 'out', columns=NAMED)


def test_columns_of_parquet_have_any_name(tmp_path):
    put_table(tmp_path / 's/train.parquet', img=[jpeg(seed=3)], prompt=['a prompt'], id=[7], link=['http://x'])
    columns = {'image': 'img', 'caption': 'prompt', 'key': 'id', 'url': 'link'}
    convert(tmp_path / 's', tmp_path / 'out', columns=columns)
    (sample,) = samples(tmp_path / 'out')
    assert (sample['key'], sample['url'], sample['caption'], sample['image']) == ('7', 'http://x', 'a prompt', jpeg(seed=3))
    with pytest.raises(DataError, match='has no column pic, as --columns says; it has image, img, prompt'):
        convert(tmp_path / 's', tmp_path / 'out2', columns={'image': 'pic'})


def test_columns_for_a_format_that_has_none(tmp_path):
    put(tmp_path / 's', '0.jpg', jpeg())
    put(tmp_path / 's', '0.txt', 'caption')
    with pytest.raises(
        DataError, match=r'none of the formats that can be read with --columns \(MDS of named columns, Hugging Face parquet\) is here'
    ):
        convert(tmp_path / 's', tmp_path / 'out', columns=NAMED)
    for wrong in ('picture=jpg', 'image=', 'image', 'image=a,image=b'):
        assert 'is not image=COLUMN,caption=COLUMN' in run_here('data_prep.convert', 's', 'd', '--columns', wrong, code=2).stderr


def test_conditions_see_the_numbers_of_an_mds(tmp_path):
    write_mds(tmp_path / 's', LAION, [laion_row(i, width=i) for i in range(4)])
    tally = convert(tmp_path / 's', tmp_path / 'out', Options(conditions=(condition('width >= 2'),)), columns=NAMED)
    assert tally.dropped == {'not width >= 2': 2}
