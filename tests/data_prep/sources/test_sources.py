"""Every source against datasets made here by hand, and what is odd in each of them."""

import csv
import datetime
import io
import json
import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from streaming import LocalDataset

from data_prep.converting.conversion import Options, convert
from data_prep.converting.filters import condition
from data_prep.sources.formats import find_source
from diffusion.contracts.errors import DataError
from tests.data_prep.test_convert import jpeg, write_parquet, write_webdataset

ROWS = [  # (name, caption, image)
    ('0.jpg', 'a château', jpeg(seed=1)),
    ('1.jpg', 'two, with a comma and a "quote"', jpeg(33, 77, seed=2)),
    ('2.jpg', 'gone', None),
    ('3.jpg', None, jpeg(seed=3)),
    ('4.jpg', 'cut short', jpeg(64, 64, seed=4)[:-600]),
    ('5.jpg', ' spaces ', jpeg(seed=5)),
    ('6.jpg', '', jpeg(seed=6)),
]


def put(folder, name, content):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def put_images(folder, rows=ROWS):
    for name, _, image in rows:
        if image is not None:
            put(folder, name, image)
    return folder


def img2dataset_rows():
    return [(f'{i:09d}', caption, image, 'success' if image else 'failed_to_download') for i, (_, caption, image) in enumerate(ROWS)]


def webdataset(folder):
    return write_webdataset(folder, img2dataset_rows(), per_shard=3)


def parquet(folder):
    return write_parquet(folder, img2dataset_rows(), per_shard=3)


def sidecars(folder):
    for name, caption, _ in ROWS:
        if caption is not None:
            put(folder, name.replace('.jpg', '.txt'), caption)
    return put_images(folder)


def captions_jsonl(folder):
    put(folder, 'captions.jsonl', '\n'.join(json.dumps({'file_name': f'./{name}', 'text': caption}) for name, caption, _ in ROWS))
    return put_images(folder)


def metadata_csv(folder):
    text = io.StringIO()
    csv.writer(text).writerows([('file_name', 'caption'), *((name, caption) for name, caption, _ in ROWS)])
    put(folder, 'metadata.csv', b'\xef\xbb\xbf' + text.getvalue().encode())  # as a spreadsheet saves it
    return put_images(folder)


def hugging_face(folder, as_struct=True):
    (folder / 'data').mkdir(parents=True)
    for i in range(2):
        part = ROWS[4 * i : 4 * i + 4]
        images = [{'bytes': image, 'path': name} if as_struct else image for name, _, image in part]
        table = pa.table({'image': images, 'caption': pa.array([caption for _, caption, _ in part], pa.string())})
        pq.write_table(table, folder / f'data/train-{i:05d}-of-00002.parquet')
    return folder


def hugging_face_bytes(folder):
    return hugging_face(folder, as_struct=False)


def coco(folder, split='val2017'):
    content = {
        'images': [{'id': 7 * i, 'file_name': name, 'license': i % 2} for i, (name, *_) in enumerate(ROWS)],
        'annotations': [{'id': i, 'image_id': 7 * i, 'caption': caption} for i, (_, caption, _) in enumerate(ROWS) if caption is not None],
    }
    put(folder, f'annotations/captions_{split}.json', json.dumps(content))
    return put_images(folder / split).parent


def image_mds(folder):
    convert(webdataset(folder.parent / 'first'), folder)
    return folder


def image_mds_in_buckets(folder):
    convert(coco(folder.parent / 'first'), folder, Options(buckets=BUCKETS))
    return folder


class TwoShapes:
    """Buckets for the small images of these tests."""

    def settings(self):
        return 'shapes'

    def streams(self):
        return {'wide': {}, 'tall': {}}

    def place(self, width_px, height_px):
        return ('wide' if width_px > height_px else 'tall'), None


BUCKETS = TwoShapes()
WRITERS = [webdataset, parquet, sidecars, captions_jsonl, metadata_csv, hugging_face, hugging_face_bytes, coco, image_mds, image_mds_in_buckets]


def samples(folder):
    return list(LocalDataset(local=str(folder)))


def files_in(folder):
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob('*')}


@pytest.mark.parametrize('write', WRITERS, ids=lambda write: write.__name__)
def test_every_source_gives_the_same_samples_and_is_not_touched(write, tmp_path):
    source = write(tmp_path / 'source')
    before = files_in(source)
    tally = convert(source, tmp_path / 'out')
    assert files_in(source) == before
    rows = 3 if 'mds' in write.__name__ else 7
    assert (tally.attempted, tally.kept, tally.dropped.total()) == (rows, 3, rows - 3)
    assert tally.dropped['not a readable JPEG, PNG or WebP'] == (rows == 7)
    found = {sample['caption']: (sample['image'], sample['reencoded']) for sample in samples(tmp_path / 'out')}
    assert found == {caption.strip(): (image, '') for name, caption, image in ROWS if name in ('0.jpg', '1.jpg', '5.jpg')}
    assert convert(source, tmp_path / 'out').attempted_now == 0  # the same again: the source is recognised


@pytest.mark.parametrize('write', [webdataset, captions_jsonl, hugging_face, coco, image_mds], ids=lambda write: write.__name__)
def test_what_goes_to_a_worker_does_not_grow_with_the_source(write, tmp_path):
    _, reader = find_source(str(write(tmp_path / 'source')))
    (part, *_) = reader.parts()
    copy = pickle.loads(pickle.dumps(reader))
    assert [row.captions for row in copy.rows(part, tmp_path)] == [row.captions for row in reader.rows(part, tmp_path)]
    assert copy.fingerprint(part) == reader.fingerprint(part)
    assert not {'files', 'listed'} & set(vars(copy))


def split_coco(folder):
    coco(folder, 'train2017')
    coco(folder, 'val2017')
    return 'train2017', 'val2017'


def split_sharded(folder):
    for name in ('data/train-00000-of-00002', 'data/train-00001-of-00002', 'data/test-00000-of-00001-abc'):
        put_table(folder / f'{name}.parquet')
    return 'test', 'train'


def split_folders(folder):
    for name in ('default/train/0000', 'default/train/0001', 'default/test/0000'):
        put_table(folder / f'{name}.parquet')
    return 'test', 'train'


def put_table(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = columns or {'text': [str(path)]}
    pq.write_table(pa.table({'image': [{'bytes': jpeg(), 'path': None}] * len(next(iter(columns.values()))), **columns}), path)


@pytest.mark.parametrize('write', [split_coco, split_sharded, split_folders], ids=lambda write: write.__name__)
def test_several_splits_have_to_be_named(write, tmp_path):
    splits = write(tmp_path / 's')
    with pytest.raises(DataError, match=f'holds several splits .{", ".join(splits)}.; name one with --split'):
        convert(tmp_path / 's', tmp_path / 'out')
    with pytest.raises(DataError, match="no split 'other'"):
        convert(tmp_path / 's', tmp_path / 'out', split='other')
    tally = convert(tmp_path / 's', tmp_path / 'out', split=splits[0])
    assert tally.attempted == (1 if splits[0] == 'test' else 7)


def test_files_without_a_split_in_their_names_are_one(tmp_path):
    for name in ('0000', '0001', 'part-3'):
        put_table(tmp_path / f's/{name}.parquet')
    assert convert(tmp_path / 's', tmp_path / 'out').kept == 3
    with pytest.raises(DataError, match='image folder has no splits'):
        convert(sidecars(tmp_path / 'f'), tmp_path / 'out2', split='train')


def not_utf8(values):
    """Bytes as an Arrow array that claims to be text."""
    return pa.Array.from_buffers(pa.string(), len(values), pa.array(values, pa.binary()).buffers())


def test_hugging_face_columns_and_text_that_is_not_utf8(tmp_path):
    path = tmp_path / 's/train.parquet'
    texts = not_utf8([b'one', b'two', b'caf\xe9', b'three'])
    put_table(
        path,
        image=pa.StructArray.from_arrays(
            [pa.array([jpeg(seed=1), jpeg(seed=2), None], pa.binary()), not_utf8([b'a', b'b\xff', b'c'])], ['bytes', 'path']
        ),
        captions=pa.ListArray.from_arrays(pa.array([0, 2, 3, 4], pa.int32()), texts),
        note=not_utf8([b'caf\xe9', b'', b'']),
        when=[datetime.datetime(2020, 1, 2), None, None],
        nested=[{'tags': ['x', 'y'], 'size': 3}, None, None],
    )
    tally = convert(tmp_path / 's', tmp_path / 'out', Options(keep_columns=('note', 'when', 'nested')))
    assert tally.dropped == {'caption is not UTF-8': 1, 'no image in the row': 1}
    (sample,) = samples(tmp_path / 'out')
    assert sample['captions'] == [['one', 0.5], ['two', 0.5]]
    assert (sample['note'], sample['when'], sample['nested']) == ('caf\ufffd', '2020-01-02 00:00:00', {'tags': ['x', 'y'], 'size': 3})


def test_a_column_that_is_there_twice_is_refused_by_name(tmp_path):
    image = pa.array([{'bytes': jpeg(seed=1), 'path': 'a.jpg'}])
    (tmp_path / 's').mkdir()
    pq.write_table(pa.table([image, ['a'], ['b']], names=['image', 'text', 'text']), tmp_path / 's/train.parquet')
    with pytest.raises(DataError, match='train.parquet: cannot be read: the column text is there 2 times'):
        convert(tmp_path / 's', tmp_path / 'out')


def test_captions_may_have_any_name_if_it_is_given(tmp_path):
    put_table(tmp_path / 's/train.parquet', prompt=['a'], other=['b'])
    with pytest.raises(DataError, match='no column caption or text .*--captions: the source has prompt, other'):
        convert(tmp_path / 's', tmp_path / 'out')
    convert(tmp_path / 's', tmp_path / 'out2', Options(captions={'prompt': 3.0, 'other': 1.0}))
    assert samples(tmp_path / 'out2')[0]['captions'] == [['a', 0.75], ['b', 0.25]]
    with pytest.raises(DataError, match='was begun with captions'):  # the first is the one in `caption`
        convert(tmp_path / 's', tmp_path / 'out2', Options(captions={'other': 1.0, 'prompt': 3.0}))


def test_a_coco_file_gives_columns(tmp_path):
    options = Options(conditions=(condition('license == 1'),), keep_columns=('id',))
    assert convert(coco(tmp_path / 's'), tmp_path / 'out', options).dropped['not license == 1'] == 3
    assert [(sample['key'], sample['id']) for sample in samples(tmp_path / 'out')] == [('1.jpg', 7), ('5.jpg', 35)]


NOT_TEXT = [float('nan'), 5, 2.5, True, {'en': 'a'}, [6, 5], [['nested']]]


def put_values(folder, form, values):
    """The values as captions of as many images, in a form that can hold them."""
    names = [f'{i}.jpg' for i in range(len(values))]
    if form == 'coco':
        texts = [(i, text) for i, value in enumerate(values) for text in (value if isinstance(value, list) else [value])]
        content = {
            'images': [{'id': i, 'file_name': name, 'coco_url': float('nan')} for i, name in enumerate(names)],
            'annotations': [{'image_id': i, 'caption': text} for i, text in texts],
        }
        put(folder, 'annotations/captions_x.json', json.dumps(content))
    else:
        rows = [{'file_name': name, 'caption': value, 'url': float('nan')} for name, value in zip(names, values, strict=True)]
        put(folder, 'metadata.jsonl', '\n'.join(map(json.dumps, rows)))
    return put_images(folder, [(name, '', jpeg(seed=i)) for i, name in enumerate(names)])


@pytest.mark.parametrize('form', ['coco', 'list'])
def test_captions_that_are_not_text_are_dropped_and_counted(form, tmp_path):
    tally = convert(put_values(tmp_path / 's', form, [*NOT_TEXT, 'good', None]), tmp_path / 'out')
    assert tally.dropped == {'caption is not text': len(NOT_TEXT), 'empty caption': 1}
    assert [(sample['caption'], sample['url']) for sample in samples(tmp_path / 'out')] == [('good', '')]


@pytest.mark.parametrize('form', ['coco', 'list', 'hugging face', 'sidecars'])
def test_of_several_captions_those_that_are_not_text_are_left_out_and_counted(form, tmp_path):
    folder, bad = tmp_path / 's', None
    if form == 'sidecars':
        for name, caption in (('0.txt', b'\xff'), ('0.caption', b'good'), ('1.txt', b'\xff'), ('1.caption', b'\xfe')):
            put(folder, name, caption)
        put_images(folder, [(f'{i}.jpg', '', jpeg(seed=i)) for i in range(2)])
        bad = 'caption is not UTF-8'
    elif form == 'hugging face':
        put_table(folder / 'train.parquet', caption=[[None, 'good'], [None]])
        bad = 'empty caption'
    else:
        put_values(folder, form, [[5, 'good'], [5, None]])
        bad = 'caption is not text'
    tally = convert(folder, tmp_path / 'out')
    assert (tally.dropped, tally.notes) == ({bad: 1}, {'captions that are not text left out, others used': 1})
    assert [sample['captions'] for sample in samples(tmp_path / 'out')] == [[['good', 1.0]]]


def test_captions_of_other_columns_are_used_where_one_is_not_text(tmp_path):
    put_table(tmp_path / 's/train.parquet', caption=[5, 5], recaption=['fine', None])
    tally = convert(tmp_path / 's', tmp_path / 'out', Options(captions={'caption': 1.0, 'recaption': 3.0}))
    assert (tally.dropped, sum(tally.notes.values())) == ({'caption is not text': 1}, 1)
    assert [sample['captions'] for sample in samples(tmp_path / 'out')] == [[['fine', 1.0]]]


def test_coco_annotations_of_no_image_are_counted(tmp_path):
    folder = put_values(tmp_path / 's', 'coco', ['good'])
    listed = folder / 'annotations/captions_x.json'
    content = json.loads(listed.read_text())
    content['annotations'] += [{'id': 1, 'image_id': 12345, 'caption': caption} for caption in 'ab']
    listed.write_text(json.dumps(content))
    tally = convert(folder, tmp_path / 'out')
    assert (tally.kept, tally.dropped) == (1, {'annotation of an image_id that no image has': 1})
    assert pq.read_table(tmp_path / 'out/failures.parquet')['key'].to_pylist() == ['image_id 12345']


@pytest.mark.parametrize('write', ['hugging face', 'img2dataset', 'other column'])
@pytest.mark.parametrize('values', [[float('nan')], [5], [True], [{'en': 'a'}], [[1, 2]], [datetime.datetime(2020, 1, 2)]], ids=str)
def test_parquet_captions_that_are_not_text_are_dropped_and_counted(write, values, tmp_path):
    options = Options()
    if write == 'img2dataset':
        (tmp_path / 's').mkdir()
        table = pa.table({'key': ['0'], 'status': ['success'], 'caption': values, 'jpg': [jpeg()], 'url': [float('nan')]})
        pq.write_table(table, tmp_path / 's/00000.parquet')
    elif write == 'hugging face':
        put_table(tmp_path / 's/train.parquet', caption=values)
    else:
        put_table(tmp_path / 's/train.parquet', caption=[None], recaption=values)
        options = Options(captions={'caption': 1.0, 'recaption': 1.0})
    assert convert(tmp_path / 's', tmp_path / 'out', options).dropped == {'caption is not text': 1}
