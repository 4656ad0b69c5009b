"""Each filter, its reason and its boundary; what is missing or senseless is an error, not a pass."""

import csv
import hashlib
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.converting.conversion import Options, convert
from data_prep.converting.filters import ColumnError, Condition, condition, laion_condition, read_skip_list, with_captions
from data_prep.sources.base import Row
from diffusion.contracts.errors import DataError
from tests.data_prep.sources.test_sources import put, put_table, samples
from tests.data_prep.test_convert import jpeg


def row(**columns):
    return Row('key', 'http://x', ['a caption'], b'', columns)


@pytest.mark.parametrize(
    ('filters', 'passing', 'failing', 'reason'),
    [
        (Options(min_side_px=40), [(40, 40), (40, 900), (900, 40)], [(39, 900), (900, 39)], 'short side below 40 px'),
        (Options(max_aspect_ratio=1.15), [(115, 100), (100, 115), (1150, 1000), (7, 7)], [(116, 100), (1000, 1151)], 'aspect ratio above 1.15'),
        (Options(max_aspect_ratio=1.1), [(110, 100), (11, 10)], [(1101, 1000)], 'aspect ratio above 1.1'),
    ],
)
def test_sizes(filters, passing, failing, reason):
    assert [filters.place(*size)[1] for size in passing] == [None] * len(passing)
    assert [filters.place(*size)[1] for size in failing] == [reason] * len(failing)


@pytest.mark.parametrize(
    ('captions', 'weights', 'usable', 'reason'),
    [
        (['abc'], None, [('abc', 1)], None),
        (['abcde'], None, [('abcde', 1)], None),
        (['  abc \n'], None, [('abc', 1)], None),  # the spaces around do not count
        (['ab'], None, [], 'caption below 3 characters'),
        (['abcdef'], None, [], 'caption above 5 characters'),
        (['ab', 'abcdef'], None, [], 'caption above 5 characters'),
        (['', ' \t\n'], None, [], 'empty caption'),
        ([], None, [], 'empty caption'),
        (['', 'a'], None, [], 'caption below 3 characters'),
        (['abc', 'x', 'déf'], None, [('abc', 0.5), ('déf', 0.5)], None),
        (['abc', 'x', 'def'], [0.6, 0.2, 0.2], [('abc', 0.75), ('def', 0.25)], None),
    ],
)
def test_captions(captions, weights, usable, reason):
    found, why = Options(min_caption_chars=3, max_caption_chars=5).usable_captions(Row('', '', captions, b'', caption_weights=weights))
    assert [(caption, pytest.approx(weight)) for caption, weight in usable] == found
    assert why == reason


@pytest.mark.parametrize(
    ('given', 'passing', 'failing'),
    [
        ('x < 0.5', [0.49, '0.25', b'-1', -3, 0], [0.5, 1, '0.5', b'7']),
        ('x <= 0.5', [0.5, '0.5'], [0.51]),
        ('x >= 5.5', [5.5, 6, '1e3'], [5.49]),
        ('x>1e-3', [0.01], [0.001, 0]),
        ('x == 1', [1, 1.0, True, '1', '1.0'], [0, False, 2]),
        ('x != 1', [0, 2, '3'], [1, True]),
        ('x == cc-by', ['cc-by', b'cc-by'], ['CC-BY', 'cc-by-nc']),
        ("x != 'two words'", ['one'], ['two words', b'two words']),
        ('x == "1"', ['1', b'1'], ['1.0']),
        ('x == true', [True, 'true'], [False]),
        ('x == False', [False], [True, 'true']),
        ('x == nan', ['nan'], ['other']),  # a text, as any other
    ],
)
def test_conditions(given, passing, failing):
    checked = condition(given)
    assert [checked.reason(row(x=value)) for value in passing] == [None] * len(passing)
    assert {checked.reason(row(x=value)) for value in failing} == {f'not {checked}'}


@pytest.mark.parametrize('given', ['x < 0.5', 'x != 0.5', 'x != text'])
@pytest.mark.parametrize('value', [None, float('nan'), '', b''])
def test_what_is_not_known_does_not_pass(given, value):
    assert condition(given).reason(row(x=value)) == 'x unknown'
    assert condition('x != 0.5').reason(row(x='NaN')) == 'x unknown'


@pytest.mark.parametrize(('given', 'value'), [('x < 1', 'high'), ('x < 1', [1]), ('x == high', 3.0), ('x != high', [1]), ('x < 1', {'a': 1})])
def test_what_cannot_be_compared_is_an_error(given, value):
    with pytest.raises(ColumnError, match=r'compares with a .* that of key is'):
        condition(given).reason(row(x=value))


@pytest.mark.parametrize(
    'given',
    [
        '',
        'x',
        'x <',
        '< 1',
        'x = 1',
        'x === 1',
        'x <> 1',
        'x =< 1',
        '0 < x < 1',
        'x < high',
        "x < 'high'",
        'x < nan',
        'x < inf',
        'x == a b',
        "x == 'a",
        'x == 1 and y == 2',
    ],
)
def test_what_is_no_condition_is_refused(given):
    with pytest.raises(ValueError, match='is not|can be compared'):
        condition(given)


def test_a_condition_is_written_as_exactly_as_it_was_given():
    """The dataset's record compares what is written."""
    texts = ['a < 0.12345671', 'a < 0.12345672', 'a < 1000000', 'a < 1000000.4', 'a == 5', "a == '5'", 'a b == 5', 'a >= 1e-07']
    assert len({str(condition(text)) for text in texts}) == len(texts)
    assert [condition(str(condition(text))) for text in texts] == [condition(text) for text in texts]


@pytest.mark.parametrize('name', ['pwatermark', 'PWATERMARK', 'p_watermark'])
def test_laions_scores_have_several_names(name):
    checked = laion_condition('pwatermark', '<=', 0.8)
    assert [checked.reason(row(**{name: value})) for value in (0.8, 0.81, None)] == [None, 'not pwatermark <= 0.8', 'pwatermark unknown']
    with pytest.raises(ColumnError, match='no column pwatermark or PWATERMARK or p_watermark; the source has punsafe, width'):
        checked.reason(row(punsafe=0.1, width=3))


def test_a_missing_column_is_an_error_whatever_else_is_wrong_with_the_row():
    filters = Options(conditions=(condition('x < 1'), condition('y < 1')))
    with pytest.raises(ColumnError, match='no column y; the source has x'):
        filters.usable_captions(Row('', '', [], None, {'x': 2}, 'failed to download'))
    with pytest.raises(ColumnError, match='the source has no columns'):
        filters.usable_captions(Row('', '', [], b''))


def test_numbers_of_a_csv_and_the_error_of_a_missing_column(tmp_path):
    rows = [
        (f'{i}.jpg', f'caption {i}', score, lic)
        for i, (score, lic) in enumerate([('0.4', 'by'), ('0.5', 'by'), ('', 'by'), ('nan', 'by'), ('0.1', 'nc')])
    ]
    for name, *_ in rows:
        put(tmp_path / 's', name, jpeg())
    with (tmp_path / 's/metadata.csv').open('w') as file:
        csv.writer(file).writerows([('file_name', 'caption', 'punsafe', 'license'), *rows])
    conditions = (laion_condition('punsafe', '<=', 0.45), condition('license == by'))
    tally = convert(tmp_path / 's', tmp_path / 'out', Options(conditions=conditions))
    assert tally.dropped == {'not punsafe <= 0.45': 1, 'punsafe unknown': 2, "not license == 'by'": 1}
    assert [sample['key'] for sample in samples(tmp_path / 'out')] == ['0.jpg']
    with pytest.raises(DataError, match=r'part 00000: there is no column similarity .*; the source has file_name, caption, punsafe, license'):
        convert(tmp_path / 's', tmp_path / 'out2', Options(conditions=(laion_condition('similarity', '>=', 0.3),)))
    assert not (tmp_path / 'out2/manifest.json').exists()


IMAGES = [jpeg(seed=seed) for seed in range(6)]
DIGESTS = [hashlib.sha256(image).hexdigest() for image in IMAGES]


@pytest.mark.parametrize(
    ('name', 'content'),
    [
        ('list.txt', f'# opt-outs\n\n0.jpg\n  http://x/1  \n{DIGESTS[2]}\r\n{DIGESTS[3].upper()}\nnobody.jpg\n'),
        ('bom.txt', f'\ufeff0.jpg\nhttp://x/1\n{DIGESTS[2]}\n{DIGESTS[3]}'),
        ('list.parquet', {'key': ['0.jpg', None], 'url': ['http://x/1', ''], 'sha256': DIGESTS[2:4], 'punsafe': [0.5, 0.1]}),
    ],
)
def test_the_skip_list_knows_keys_urls_and_digests(name, content, tmp_path):
    for i, image in enumerate(IMAGES):
        put(tmp_path / 's', f'{i}.jpg', image)
    put(tmp_path / 's', 'captions.jsonl', '\n'.join(json.dumps({'file_name': f'{i}.jpg', 'text': 'a', 'url': f'http://x/{i}'}) for i in range(6)))
    path = tmp_path / name
    if isinstance(content, dict):
        pq.write_table(pa.table(content), path)
    else:
        path.write_text(content)
    tally = convert(tmp_path / 's', tmp_path / 'out', Options(skip_list=str(path)))
    assert tally.dropped == {'on the skip-list': 4}
    assert [sample['key'] for sample in samples(tmp_path / 'out')] == ['4.jpg', '5.jpg']
    path.rename(tmp_path / f'moved-{name}')  # the same list elsewhere
    assert convert(tmp_path / 's', tmp_path / 'out', Options(skip_list=str(tmp_path / f'moved-{name}'))).attempted_now == 0
    put(tmp_path, 'other.txt', '5.jpg')
    with pytest.raises(DataError, match='was begun with skip_list'):
        convert(tmp_path / 's', tmp_path / 'out', Options(skip_list=str(tmp_path / 'other.txt')))


@pytest.mark.parametrize(
    ('name', 'content'), [('gone.txt', None), ('latin.txt', b'caf\xe9'), ('bad.parquet', b'PAR1'), ('numbers.parquet', {'key': [1, 2]})]
)
def test_a_skip_list_that_cannot_be_read_is_an_error(name, content, tmp_path):
    if isinstance(content, dict):
        pq.write_table(pa.table(content), tmp_path / name)
    elif content is not None:
        put(tmp_path, name, content)
    with pytest.raises(DataError, match=f'--skip-list .*{name}'):
        read_skip_list(str(tmp_path / name))


def test_weights_are_shared_by_the_captions_of_a_column():
    found = with_captions(row(a=['one', ' ', None, 'two'], b='three', c=None), {'a': 0.5, 'b': 0.25, 'c': 5})
    assert found.captions == ['one', 'two', None, 'three']
    assert found.caption_weights == [0.25, 0.25, 0, 0.25]
    assert with_captions(row(a=b'caf\xe9'), {'a': 1}).reason == 'caption is not UTF-8'
    with pytest.raises(ColumnError, match='no column b; the source has a'):
        with_captions(row(a='one'), {'b': 1})


def test_weights_reach_the_samples(tmp_path):
    put_table(tmp_path / 's/train.parquet', caption=['alt text'], recaption=[['synthetic', 'another']])
    convert(tmp_path / 's', tmp_path / 'out', Options(captions={'recaption': 3, 'caption': 1}))
    (sample,) = samples(tmp_path / 'out')
    assert sample['caption'] == 'synthetic'
    assert sample['captions'] == [['synthetic', 0.375], ['another', 0.375], ['alt text', 0.25]]


def test_conditions_have_the_same_reason_in_every_row():
    assert Condition(('punsafe', 'PUNSAFE'), '<', 0.5).reason(row(PUNSAFE=1.0)) == 'not punsafe < 0.5'
