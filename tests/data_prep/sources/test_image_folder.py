"""Folders of images: captions next to them, or in a list."""

import json
import os

import pytest

from data_prep.converting.conversion import Options, convert
from data_prep.converting.filters import condition
from diffusion.contracts.errors import DataError
from tests.data_prep.sources.test_sources import ROWS, put, put_images, samples
from tests.data_prep.test_convert import jpeg


def test_lists_and_the_images_they_do_not_name(tmp_path):
    folder = put_images(tmp_path / 's', ROWS[:2])
    put(folder, 'deep/er/x.PNG', jpeg(seed=8))  # content decides
    put(folder, 'photo.jfif', jpeg(seed=9))
    put(folder, 'moving.gif', b'GIF89a')
    put(folder, 'README.md', 'not an image')
    lines = [
        {'file_name': '0.jpg', 'caption': ['one', '', 'another'], 'score': 0.25, 'url': 'http://x/0'},
        {'file_name': 'deep/er/x.PNG', 'caption': 'deep', 'score': 0.75},
        {'file_name': 'photo.jfif', 'caption': 'jfif', 'score': None},
        {'file_name': '../../../../etc/passwd', 'caption': 'outside', 'score': 1},
        {'file_name': '/etc/passwd', 'caption': 'outside', 'score': 1},
        {'file_name': 'half.jpg', 'caption': 'half of a character \ud83d', 'score': 1},
    ]
    put(folder, 'half.jpg', jpeg())
    put(folder, 'captions.jsonl', '\n'.join(map(json.dumps, lines)) + '\n\n')
    tally = convert(folder, tmp_path / 'out', Options(keep_columns=('score',)))
    assert tally.dropped == {
        'no such image': 2,
        'not in captions.jsonl': 2,
        'caption is not UTF-8': 1,
    }
    found = {sample['key']: sample for sample in samples(tmp_path / 'out')}
    assert {key: sample['score'] for key, sample in found.items()} == {'0.jpg': 0.25, 'deep/er/x.PNG': 0.75, 'photo.jfif': None}
    assert found['0.jpg']['captions'] == [['one', 0.5], ['another', 0.5]]
    assert found['0.jpg']['url'] == 'http://x/0'
    filtered = Options(conditions=(condition('score >= 0.5'),))
    assert [sample['key'] for sample in (convert(folder, tmp_path / 'out2', filtered), samples(tmp_path / 'out2'))[1]] == ['deep/er/x.PNG']


def test_sidecars_of_images_that_are_not_read_are_counted(tmp_path):
    for name in ('a.gif', 'b.tiff', 'c.bmp', 'd.jpg'):
        put(tmp_path / 's', name, b'GIF89a')
        put(tmp_path / 's', f'{name[0]}.txt', 'caption')
    put(tmp_path / 's', 'e.txt', 'no image')
    put(tmp_path / 's', 'f.jpg', jpeg())
    put(tmp_path / 's', 'f.txt', b'\xef\xbb\xbfwritten on Windows\r\n')
    os.symlink(tmp_path / 's/f.jpg', tmp_path / 's/g.jpg')
    put(tmp_path / 's', 'g.txt', 'a link')
    put(tmp_path / 's', os.fsdecode(b'\xff.jpg'), jpeg())  # a name that is not UTF-8
    put(tmp_path / 's', os.fsdecode(b'\xff.txt'), 'odd name')
    tally = convert(tmp_path / 's', tmp_path / 'out')
    assert tally.dropped == {'not a readable JPEG, PNG or WebP': 4, 'no such image': 1}
    assert {sample['key']: sample['caption'] for sample in samples(tmp_path / 'out')} == {
        'f.jpg': 'written on Windows',
        'g.jpg': 'a link',
        '\\udcff.jpg': 'odd name',
    }


@pytest.mark.parametrize(
    ('name', 'content', 'message'),
    [
        ('captions.jsonl', '{"file_name": "0.jpg", "caption": ', 'captions.jsonl: .*line 1: '),
        (
            'captions.jsonl',
            '{"file_name": "0.jpg", "caption": "a"}\n\n{oops',
            r'captions.jsonl: cannot be read: line 3: [^:]* at column 2; fix the line',
        ),
        ('captions.jsonl', '["0.jpg", "a"]', 'line 1 is not a JSON object'),
        ('captions.jsonl', '[' * 100_000, 'captions.jsonl'),
        ('captions.jsonl', '{"caption": "nameless"}', 'needs a column named one of file_name'),
        ('captions.jsonl', '{"file_name": "0.jpg", "caption": "a"}\n{"caption": "nameless"}', 'line 2 names no image: its file_name is empty'),
        (
            'captions.jsonl',
            '{"file_name": "0.jpg", "caption": "a"}\n{"file_name": "./0.jpg", "caption": "b"}',
            'lines 1 and 2 both name 0.jpg; leave',
        ),
        (
            'metadata.csv',
            'file_name,caption\n' + '0.jpg,"a\nb"\n1.jpg,a\n' * 2,
            'lines 3 and 6 both name 0.jpg, lines 4 and 7 both name 1.jpg; leave',
        ),
        ('metadata.csv', 'file_name,caption\n0.jpg,a\n,b\n', 'line 3 names no image'),
        ('captions.jsonl', '{"file_name": "0.jpg", "prompt": "a"}', 'no column caption .*--captions: the source has file_name, prompt'),
        ('metadata.csv', 'file_name,caption\n0.jpg,one,two\n', 'line 2 has more cells'),
        ('metadata.csv', 'file_name,caption,caption\n0.jpg,one,two\n', "the column 'caption' more than once; rename"),
        ('metadata.csv', 'file_name,caption\n0.jpg,"one\n1.jpg,two\n', 'metadata.csv: cannot be read'),
        ('metadata.csv', '', 'needs a column named one of file_name'),
        ('annotations/captions_x.json', '[]', 'captions_x.json: is not a COCO'),
        ('annotations/captions_x.json', '{"images": [7], "annotations": []}', 'captions_x.json: is not a COCO'),
        ('annotations/captions_x.json', '[' * 100_000, 'captions_x.json: cannot be read: JSON nested too deeply'),
        ('data.parquet', b'PAR1 and nothing', 'data.parquet: cannot be read'),
        ('job.json', '{}', 'was begun and is not finished'),
    ],
)
def test_a_list_that_cannot_be_read_is_an_error_that_says_so(name, content, message, tmp_path):
    put(put_images(tmp_path / 's'), name, content)
    with pytest.raises(DataError, match=message):
        convert(tmp_path / 's', tmp_path / 'out')


def test_a_csv_with_a_caption_of_a_megabyte_and_one_that_is_not_utf8(tmp_path):
    rows = [(f'{i}.jpg', '', jpeg(seed=i)) for i in range(3)]
    put_images(tmp_path / 's', rows)
    put(tmp_path / 's', 'metadata.csv', b'file_name,caption\n0.jpg,' + b'a' * 10**6 + b'\n1.jpg,caf\xe9\n2.jpg,good\n')
    tally = convert(tmp_path / 's', tmp_path / 'out')
    assert tally.dropped == {'caption above 10000 characters': 1, 'caption is not UTF-8': 1}
