"""Input that was made or broken to do harm: an image or a reason, soon, and in little memory."""

import io
import json
import random
import struct
import zlib
from functools import cache

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data_prep.converting.conversion import Options, convert
from diffusion.datasets.decode import ImageError, canonical, open_image
from tests.conftest import run_python
from tests.data_prep.sources.test_sources import files_in, not_utf8, put, put_table, samples
from tests.data_prep.test_convert import jpeg
from tests.datasets.test_decode import chunk, png
from tests.datasets.test_transforms import bomb, encoded

UNREADABLE = 'not a readable JPEG, PNG or WebP'
TOO_LARGE = 'over 64 Mpx'


def small(kind, **options):
    return encoded(Image.open(io.BytesIO(jpeg(24, 18, seed=1))), kind, **options)


SMALL = {
    'jpg': small('JPEG'),
    'progressive.jpg': small('JPEG', progressive=True),
    'png': small('PNG'),
    'webp': small('WEBP'),
    'lossless.webp': small('WEBP', lossless=True),
    'animated.webp': small('WEBP', save_all=True, append_images=[Image.new('RGB', (24, 18), 'red')]),
    'animated.png': small('PNG', save_all=True, append_images=[Image.new('RGB', (24, 18), 'red')]),
}


def outcome(content):
    """'an image', or the reason; any other exception is the test's failure."""
    try:
        decoded = canonical(content)
        again = canonical(decoded.content)
        assert again.reencoded == ''
        assert again.image.size == decoded.image.size == open_image(content).size
        return 'an image'
    except ImageError as error:
        return str(error)


@pytest.mark.parametrize('kind', SMALL)
def test_every_truncation_gives_an_image_or_a_reason(kind):
    content = SMALL[kind]
    assert outcome(content) == 'an image'
    lengths = {len(content) * i // 100 for i in range(100)} | set(range(max(0, len(content) - 14), len(content)))
    found = {outcome(content[:length]) for length in lengths}
    assert found <= {'an image', UNREADABLE}
    assert {outcome(content[:length]) for length in (0, 1, 10, len(content) // 2)} <= ({UNREADABLE} if 'animated' not in kind else found)


@pytest.mark.parametrize('kind', SMALL)
def test_random_damage_gives_an_image_or_a_reason(kind):
    rng = random.Random(kind)
    for _ in range(150):
        content = bytearray(SMALL[kind])
        for _ in range(rng.choice([1, 1, 5, 50])):
            content[rng.randrange(len(content))] = rng.randrange(256)
        assert outcome(bytes(content)) in ('an image', UNREADABLE, TOO_LARGE)


def claiming(content, where, size):
    """The image with another size in its header."""
    return content[:where] + size + content[where + len(size) :]


def jpeg_bomb(width, height):
    where = SMALL['jpg'].index(b'\xff\xc0') + 5
    return claiming(SMALL['jpg'], where, struct.pack('>HH', height, width))


def webp_bomb(side):
    size = (side - 1).to_bytes(3, 'little')
    return claiming(SMALL['animated.webp'], 24, size + size)


EXIF = {
    name: b'Exif\0\0' + content
    for name, content in {'cut': b'II*\0\x08\0\0\0', 'endless': b'II*\0\x08\0\0\0\xff\xff' + bytes(range(256)) * 20, 'none': b''}.items()
}


@cache
def hostile():
    """By name: the content, and what comes of it. Not made while tests are collected: 200 MB take seconds to compress."""
    zeros = zlib.compress(bytes(200 << 20), 9)
    return {
        '144 Mpx.png': (bomb(12_000), TOO_LARGE),
        '400 Mpx.png': (bomb(20_000), TOO_LARGE),
        '144 Mpx.webp': (webp_bomb(12_000), TOO_LARGE),
        '268 Mpx.webp': (webp_bomb(16_384), TOO_LARGE),
        '144 Mpx.jpg': (jpeg_bomb(12_000, 12_000), TOO_LARGE),
        '4225 Mpx.jpg': (jpeg_bomb(65_000, 65_000), TOO_LARGE),
        'text of 200 MB.png': (png(1, 8, 0, b'a', chunk(b'zTXt', b'a\0\0' + zeros)), UNREADABLE),
        'profile of 200 MB.png': (png(1, 8, 0, b'a', chunk(b'iCCP', b'a\0\0' + zeros)), UNREADABLE),
        'pixels that never end.png': (png(1, 8, 0, bytes(200 << 20)), 'an image'),
        'profile.png': (png(1, 8, 0, b'a', chunk(b'iCCP', b'a\0\0garbage')), 'an image'),
        'profile.jpg': (small('JPEG', icc_profile=b'garbage' * 20_000), 'an image'),
        **{f'EXIF {name}.{kind}': (small(kind, exif=exif), 'an image') for name, exif in EXIF.items() for kind in ('JPEG', 'PNG', 'WEBP')},
        'zero.jpg': (b'', UNREADABLE),
        'zeros.jpg': (bytes(100_000), UNREADABLE),
        'web page.jpg': (b'<!doctype html><title>403</title>', UNREADABLE),
        'svg.png': (b'<svg xmlns="http://www.w3.org/2000/svg"/>', UNREADABLE),
        'png.jpg': (SMALL['png'], 'an image'),
        'webp.png': (SMALL['webp'], 'an image'),
        **{f'{kind}.jpg': (small(kind), UNREADABLE) for kind in ('GIF', 'BMP', 'TIFF', 'ICO', 'PPM', 'TGA', 'PDF', 'EPS')},
    }  # fmt: skip


WATCH = """
import json, sys, time
from pathlib import Path
from diffusion.datasets.decode import ImageError, canonical, open_image
peak_mb = lambda: int(Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0]) / 1024  # ru_maxrss begins with the parent's
folder = Path(sys.argv[1])
canonical((folder / 'good').read_bytes())
for path in sorted(folder.iterdir()):
    content = path.read_bytes()
    for work in (canonical, lambda content: open_image(content, (64, 64))):
        before, start = peak_mb(), time.perf_counter()
        try:
            work(content)
            found = 'an image'
        except ImageError as error:
            found = str(error)
        print(json.dumps([path.name, found, time.perf_counter() - start, peak_mb() - before]))
"""


def test_the_corpus_takes_neither_time_nor_memory(tmp_path):
    for name, (content, _) in {**hostile(), 'good': (SMALL['jpg'], ''), 'zz honest': (bomb(4000), '')}.items():
        put(tmp_path, name, content)
    found = [json.loads(line) for line in run_python('-c', WATCH, tmp_path).stdout.splitlines()]
    *found, (_, _, _, honest_mb), _ = found
    assert honest_mb > 50  # 16 Mpx in RGB: this is how growth would look
    assert len(found) == 2 * (len(hostile()) + 1)
    for name, what, seconds, growth_mb in found:
        assert what == hostile().get(name, (b'', 'an image'))[1], name
        assert seconds < 1, name
        assert growth_mb < 50, name


def test_the_corpus_goes_through_convert(tmp_path):
    for name, (content, _) in hostile().items():
        put(tmp_path / 's', name, content)
        put(tmp_path / 's', f'{name.rpartition(".")[0]}.txt', 'a caption')
    kept = {name for name, (_, what) in hostile().items() if what == 'an image'}
    before = files_in(tmp_path / 's')
    tally = convert(tmp_path / 's', tmp_path / 'out')
    assert files_in(tmp_path / 's') == before
    assert tally.attempted == tally.kept + tally.dropped.total()
    assert tally.dropped[TOO_LARGE] == 6
    assert {sample['key'] for sample in samples(tmp_path / 'out')} == kept


CAPTIONS = [b'good', b'caf\xe9', b'\xff\xfe\0\0', b'\xed\xa0\x80', b'x' * 10**6, b'\0', 'שָׁלוֹם 🐈‍⬛'.encode(), b' ', b'', b'a\r\n']
EXPECTED = {'caption is not UTF-8': 3, 'caption above 10000 characters': 1, 'empty caption': 2}
KEPT = ['good', '\0', 'שָׁלוֹם 🐈‍⬛', 'a']


def captions_next_to(folder):
    for i, caption in enumerate(CAPTIONS):
        put(folder, f'{i}.jpg', jpeg(seed=i))
        put(folder, f'{i}.txt', caption)


def captions_in_parquet(folder):
    put_table(folder / 'train.parquet', image=[{'bytes': jpeg(seed=i), 'path': ''} for i in range(len(CAPTIONS))], caption=not_utf8(CAPTIONS))


def captions_of_img2dataset(folder):
    folder.mkdir()
    rows = {
        'key': [f'{i:09d}' for i in range(len(CAPTIONS))],
        'status': ['success'] * len(CAPTIONS),
        'jpg': [jpeg(seed=i) for i in range(len(CAPTIONS))],
    }
    pq.write_table(pa.table({**rows, 'caption': not_utf8(CAPTIONS), 'url': not_utf8(CAPTIONS)}), folder / '00000.parquet')


def captions_in_csv(folder):
    lines = [f'{i}.jpg,'.encode() + (b'"a\r\n"' if caption == b'a\r\n' else caption) for i, caption in enumerate(CAPTIONS)]
    for i in range(len(CAPTIONS)):
        put(folder, f'{i}.jpg', jpeg(seed=i))
    put(folder, 'metadata.csv', b'\n'.join([b'file_name,caption', *lines]))


@pytest.mark.parametrize('write', [captions_next_to, captions_in_parquet, captions_of_img2dataset, captions_in_csv], ids=lambda write: write.__name__)
@pytest.mark.parametrize('options', [Options(), Options(duplicates='exact')], ids=['', 'duplicates'])
def test_hostile_captions(write, options, tmp_path):
    write(tmp_path / 's')
    tally = convert(tmp_path / 's', tmp_path / 'out', options)
    assert tally.dropped == EXPECTED
    assert [sample['caption'] for sample in samples(tmp_path / 'out')] == KEPT


def test_a_caption_of_a_megabyte_is_kept_if_it_is_wanted(tmp_path):
    captions_in_csv(tmp_path / 's')
    convert(tmp_path / 's', tmp_path / 'out', Options(max_caption_chars=10**6))
    assert max(len(sample['caption']) for sample in samples(tmp_path / 'out')) == 10**6
