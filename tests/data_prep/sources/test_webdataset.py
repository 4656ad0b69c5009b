"""Plain WebDataset, in the dialects that its writers make, against what was put into the tars."""

import io
import json
import tarfile

import pytest

from data_prep.converting.conversion import Options, convert
from data_prep.converting.filters import condition
from data_prep.sources.formats import find_source
from diffusion.contracts.errors import DataError
from diffusion.contracts.manifest import Manifest
from tests.data_prep.sources.test_sources import samples
from tests.data_prep.test_convert import jpeg

IMAGES = [jpeg(seed=i) for i in range(8)]


def write_tar(path, members, format=tarfile.PAX_FORMAT):
    """A tar of (name, content or kind of a member without one)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, 'w', format=format) as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                member.type, member.linkname = content, '/etc/passwd'
                tar.addfile(member)
                continue
            content = content.getvalue()
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def file(content):
    return io.BytesIO(content.encode() if isinstance(content, str) else content)


def pairs(number, start=0, name='{:06d}'):
    return [
        (name.format(i) + suffix, file(content)) for i in range(start, number) for suffix, content in (('.jpg', IMAGES[i]), ('.txt', f'number {i}'))
    ]


def kept(folder):
    return {sample['key']: (sample['caption'], sample['image']) for sample in samples(folder)}


@pytest.mark.parametrize('format', [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_shards_of_images_and_captions(format, tmp_path):
    long = '/'.join(['a folder with a name of some length'] * 2) + '/{:06d}'
    write_tar(tmp_path / 's/data/00000.tar', [('./', tarfile.DIRTYPE), ('README', file('x')), *pairs(2, name='./{:06d}')], format)
    write_tar(tmp_path / 's/data/00001.tar', pairs(4, start=2, name=long), format)
    (tmp_path / 's/README.md').write_text('a dataset card')
    kind, source = find_source(str(tmp_path / 's'))
    assert (kind, len(source.parts())) == ('WebDataset', 2)
    tally = convert(tmp_path / 's', tmp_path / 'out')
    assert (tally.attempted, tally.kept) == (4, 4)
    keys = ['data/00000/000000', 'data/00000/000001', *(f'data/00001/{long.format(i)}' for i in (2, 3))]
    assert kept(tmp_path / 'out') == {key: (f'number {i}', IMAGES[i]) for i, key in enumerate(keys)}


def test_every_sample_is_kept_or_counted(tmp_path):
    fields = {'caption': 'from json', 'url': 'http://x/y', 'punsafe': 0.1, 'original_width': 80, 'original_height': 60}
    members = [
        ('a.jpg', file(IMAGES[0])), ('a.json', file(json.dumps(fields))), ('a.seg.png', file(b'a mask')), ('a.cls', file('7')),
        ('b/c.d.jpg', file(IMAGES[1])), ('b/c.txt', file('an image by another name')),
        ('b/d.JPEG', file(IMAGES[2])), ('b/d.txt', file('of two images the first')), ('b/d.png', file(IMAGES[3])),
        ('e.jpg', file(IMAGES[4])), ('e.json', file('{')), ('e.txt', file('with broken json')),
        ('f.jpg', file(IMAGES[5])),
        ('g.txt', file('without an image')),
        ('h.jpg', tarfile.SYMTYPE), ('h.txt', file('a symbolic link')),
        ('i.jpg', file(b'')), ('i.txt', file('nothing')),
        ('j.jpg', file(IMAGES[6])), ('j.txt', file(b'\xff\xfe')),
        ('a.jpg', file(IMAGES[7])), ('a.txt', file('a key that is there already')),
        ('._k.jpg', file(b'macOS')),
    ]  # fmt: skip
    write_tar(tmp_path / 's/00000.tar', members)
    tally = convert(tmp_path / 's', tmp_path / 'out', Options(keep_columns=('cls', 'punsafe')))
    assert kept(tmp_path / 'out') == {
        '00000/a': ('from json', IMAGES[0]),
        '00000/b/d': ('of two images the first', IMAGES[2]),
        '00000/e': ('with broken json', IMAGES[4]),
    }
    lacking = 'no .jpg, .jpeg, .png or .webp in the sample'
    assert tally.dropped == {lacking: 3, 'empty caption': 1, 'image is empty': 1, 'caption is not UTF-8': 1, 'key is in this tar already': 1}
    first, *_ = samples(tmp_path / 'out')
    assert (first['url'], first['cls'], first['punsafe'], first['original_width'], first['width']) == ('http://x/y', '7', 0.1, 80, 40)
    assert Manifest.read(tmp_path / 'out').source['format'] == 'WebDataset'
    filtered = convert(tmp_path / 's', tmp_path / 'filtered', Options(conditions=(condition('punsafe < 0.5'),)))
    assert (filtered.kept, filtered.dropped['punsafe unknown']) == (1, 3)


def test_several_captions_in_json(tmp_path):
    members = [
        (f'{i}{suffix}', file(content))
        for i in range(2)
        for suffix, content in (('.jpg', IMAGES[i]), ('.json', json.dumps({'captions': ['x', f'y{i}']})))
    ]
    write_tar(tmp_path / 's/00000.tar', members)
    convert(tmp_path / 's', tmp_path / 'out')
    assert [sample['captions'] for sample in samples(tmp_path / 'out')] == [[['x', 0.5], [f'y{i}', 0.5]] for i in range(2)]


def test_classes_are_captions_only_by_name(tmp_path):
    for folder, labels in (('names', ('cat', 'dog')), ('numbers', ('3', '7'))):
        write_tar(
            tmp_path / folder / '0.tar', [(f'{i}{suffix}', file(x)) for i in range(2) for suffix, x in (('.jpg', IMAGES[i]), ('.cls', labels[i]))]
        )
    convert(tmp_path / 'names', tmp_path / 'out')
    assert [caption for caption, _ in kept(tmp_path / 'out').values()] == ['cat', 'dog']
    with pytest.raises(DataError, match='name the captions with --captions: the source has cls'):
        convert(tmp_path / 'numbers', tmp_path / 'other')
    assert convert(tmp_path / 'numbers', tmp_path / 'chosen', Options(captions={'cls': 1.0})).kept == 2
    assert convert(tmp_path / 'numbers', tmp_path / 'given', caption='a photo').kept == 2


def test_splits_are_not_mixed(tmp_path):
    for number, split in enumerate(('train', 'val')):
        write_tar(tmp_path / f's/{split}-00000.tar', pairs(number + 1, start=number))
    with pytest.raises(DataError, match='several splits'):
        convert(tmp_path / 's', tmp_path / 'out')
    assert convert(tmp_path / 's', tmp_path / 'out', split='val').kept == 1


def test_a_tar_that_was_cut_anywhere_is_an_error_that_loses_nothing(tmp_path):
    for number in range(2):
        write_tar(tmp_path / f's/0000{number}.tar', pairs(2))
    path = tmp_path / 's/00001.tar'
    whole = path.read_bytes()
    with tarfile.open(path) as tar:
        ends = [member.offset_data + -(-member.size // 512) * 512 for member in tar]
    flipped = whole[: ends[0] + 3] + b'\xff' + whole[ends[0] + 4 :]
    for damaged in (
        *(whole[:end] for end in ends),
        *(whole[: end - 700] for end in ends),
        whole[: ends[1] + 100],
        flipped,
        b'',
        b'<html></html>',
        bytes(10_240),
    ):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match='00001.tar'):
            convert(tmp_path / 's', tmp_path / 'out')
        assert not (tmp_path / 'out/index.json').exists()
    path.write_bytes(whole)
    tally = convert(tmp_path / 's', tmp_path / 'out')
    assert (tally.kept, tally.attempted_now) == (4, 2)


def test_hostile_names_and_sizes_write_nowhere(tmp_path, monkeypatch):
    monkeypatch.setattr('data_prep.sources.webdataset.MAX_IMAGE_BYTES', 50_000)
    names = ['../../../evil', '/etc/evil', '..', 'a/../../b', 'x\n\x1b[31m', 'y' * 300, '.', '/']
    members = [(f'{name}{suffix}', file(content)) for name in names for suffix, content in (('.jpg', IMAGES[0]), ('.txt', 'a caption'))]
    members += [('large.jpg', file(bytes(60_000))), ('large.txt', file('x')), ('long.jpg', file(IMAGES[1])), ('long.txt', file(bytes(60_000)))]
    write_tar(tmp_path / 'in/s/00000.tar', members)
    tally = convert(tmp_path / 'in/s', tmp_path / 'in/out')
    assert {'over 64 MB', 'caption over 64 MB'} <= tally.dropped.keys()
    assert tally.kept == 5
    written = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob('*')}
    assert written == {'in'}
    assert {path.name for path in (tmp_path / 'in').iterdir()} == {'s', 'out'}
    assert {path.suffix for path in (tmp_path / 'in/out').rglob('*') if path.is_file()} == {'.mds', '.json', '.parquet'}


def test_from_object_storage(s3, tmp_path):
    path = write_tar(tmp_path / '00000.tar', pairs(3))
    s3.client().upload_file(str(path), 'bucket', 'wds/00000.tar')
    assert convert('s3://bucket/wds', tmp_path / 'out').kept == 3
