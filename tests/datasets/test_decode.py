"""Decoding against pixels known in advance, numpy's flips, and a full decode."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageCms

from diffusion.datasets.decode import ImageError, canonical, open_image, size_of
from diffusion.datasets.transforms import covered, square
from tests.datasets.test_transforms import encoded

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
UPRIGHT = {  # EXIF 2.32: which corner of the scene the first row and column are
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a, 1),
}


def chunk(kind, data):
    return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))


def png(width, depth, color, row, *chunks):
    """A PNG of one row, made by hand."""
    header = struct.pack('>IIBBBBB', width, 1, depth, color, 0, 0, 0)
    return b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', header) + b''.join(chunks) + chunk(b'IDAT', zlib.compress(b'\0' + row)) + chunk(b'IEND', b'')


def words(*values):
    return struct.pack(f'>{len(values)}H', *values)


def pixels(content):
    return np.asarray(open_image(content))


@pytest.mark.parametrize('orientation', range(1, 9))
@pytest.mark.parametrize(('kind', 'options'), [('PNG', {}), ('WEBP', {'lossless': True}), ('JPEG', {'quality': 100})])
def test_exif_orientations(kind, options, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(PIXELS)
    content = encoded(image, kind, exif=exif, **options)
    expected = UPRIGHT[orientation](pixels(encoded(image, kind, **options)))
    assert np.array_equal(pixels(content), expected)
    result = canonical(content)
    assert np.array_equal(result.image, expected)
    assert result.reencoded == ('' if orientation == 1 else 'EXIF orientation')
    assert (result.content == content) == (orientation == 1)
    plain = Image.open(io.BytesIO(result.content))  # as a decoder that knows nothing of orientations
    assert np.abs(np.asarray(plain).astype(int) - expected).mean() < (0.5 if kind == 'PNG' else 20)  # noise of 35 pixels, as JPEG
    assert orientation == 1 or 0x0112 not in plain.getexif()


@pytest.mark.parametrize('value', [0, 9, 65535])
def test_orientations_that_there_are_not(value):
    exif = Image.Exif()
    exif[0x0112] = value
    content = encoded(Image.fromarray(PIXELS), 'PNG', exif=exif)
    assert np.array_equal(pixels(content), PIXELS)
    assert canonical(content).content == content


GREY = b'\x00\x55\xaa\xff'
CASES = {  # name: (image, pixels or grey values of its row, what was changed)
    '8-bit grey': (png(4, 8, 0, GREY), GREY, ''),
    '1-bit': (png(8, 1, 0, b'\xa5'), [255, 0, 255, 0, 0, 255, 0, 255], 'palette'),
    '1-bit, black transparent': (png(8, 1, 0, b'\xa5', chunk(b'tRNS', words(0))), [255] * 8, 'palette, alpha'),
    '2-bit': (png(4, 2, 0, b'\x1b'), GREY, ''),
    '2-bit, grey 1 transparent': (png(4, 2, 0, b'\x1b', chunk(b'tRNS', words(1))), [0, 255, 170, 255], 'alpha'),
    '4-bit, grey 5 transparent': (png(4, 4, 0, b'\x05\xaf', chunk(b'tRNS', words(5))), [0, 255, 170, 255], 'alpha'),
    '8-bit, grey 85 transparent': (png(4, 8, 0, GREY, chunk(b'tRNS', words(85))), [0, 255, 170, 255], 'alpha'),
    '16-bit grey': (png(5, 16, 0, words(0, 255, 256, 40000, 65535)), [0, 0, 1, 156, 255], '16-bit'),
    '16-bit, one grey transparent': (png(4, 16, 0, words(0, 40000, 40001, 256), chunk(b'tRNS', words(40000))), [0, 255, 156, 1], '16-bit, alpha'),
    '16-bit RGB': (png(2, 16, 2, words(0, 40000, 256, 65535, 1, 512)), [(0, 156, 1), (255, 0, 2)], '16-bit'),
    '16-bit RGB, one transparent': (
        png(2, 16, 2, words(0, 40000, 256, 65535, 1, 512), chunk(b'tRNS', words(0, 40000, 256))),
        [(255, 255, 255), (255, 0, 2)],
        '16-bit, alpha',
    ),
    '16-bit RGBA': (png(2, 16, 6, words(0, 40000, 256, 65535, 0, 0, 0, 0)), [(0, 156, 1), (255, 255, 255)], '16-bit, alpha'),
    'RGB, one transparent': (png(2, 8, 2, bytes([9, 8, 7, 6, 5, 4]), chunk(b'tRNS', words(9, 8, 7))), [(255, 255, 255), (6, 5, 4)], 'alpha'),
    'grey and alpha': (png(4, 8, 4, bytes([80, 255, 80, 0, 0, 51, 255, 128])), [80, 255, 204, 255], 'alpha'),
    'RGBA': (png(3, 8, 6, bytes([255, 0, 0, 0, 0, 0, 255, 255, 0, 0, 255, 51])), [(255,) * 3, (0, 0, 255), (204, 204, 255)], 'alpha'),
    'palette': (png(2, 8, 3, b'\1\0', chunk(b'PLTE', bytes([1, 2, 3, 4, 5, 6]))), [(4, 5, 6), (1, 2, 3)], 'palette'),
    'palette with alpha': (
        png(3, 8, 3, b'\0\1\2', chunk(b'PLTE', bytes([1, 2, 3, 4, 5, 6, 0, 0, 0])), chunk(b'tRNS', b'\0\xff\x33')),
        [(255, 255, 255), (4, 5, 6), (204, 204, 204)],
        'palette, alpha',
    ),
}


@pytest.mark.parametrize('name', CASES)
def test_every_kind_of_png_to_the_byte(name):
    content, expected, reencoded = CASES[name]
    expected = np.array([[value] * 3 if isinstance(value, int) else value for value in expected], dtype=np.uint8)[None]
    assert np.array_equal(pixels(content), expected)
    result = canonical(content)
    assert result.reencoded == reencoded
    assert (result.content == content) == (reencoded == '')
    assert np.array_equal(Image.open(io.BytesIO(result.content)).convert('RGB'), expected)
    assert canonical(result.content).reencoded == ''  # once is enough


def test_cmyk():
    """Ink on white paper: cyan takes red away, and so on."""
    inks = np.zeros((16, 64, 4), np.uint8)
    for i in range(4):
        inks[:, 16 * i : 16 * i + 16, i] = 255
    content = encoded(Image.fromarray(inks, 'CMYK'), 'JPEG', quality=100)
    result = canonical(content)
    assert result.reencoded == 'CMYK'
    for found in (open_image(content), Image.open(io.BytesIO(result.content))):
        assert found.mode == 'RGB'
        shown = np.asarray(found)[8, 8::16].astype(int)
        assert np.abs(shown - [[0, 255, 255], [255, 0, 255], [255, 255, 0], [0, 0, 0]]).max() < 12


@pytest.mark.parametrize(('kind', 'options'), [('WEBP', {'lossless': True}), ('PNG', {})])
@pytest.mark.parametrize('mode', ['RGB', 'RGBA'])
def test_the_first_frame_of_an_animation(kind, options, mode):
    frames = [Image.new('RGB', (32, 24), color).convert(mode) for color in ('red', 'lime', 'blue')]
    content = encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=100, **options)
    assert Image.open(io.BytesIO(content)).n_frames == 3
    result = canonical(content)
    assert 'first frame' in result.reencoded
    assert getattr(Image.open(io.BytesIO(result.content)), 'n_frames', 1) == 1
    for found in (open_image(content), Image.open(io.BytesIO(result.content))):
        assert np.abs(np.asarray(found).astype(int) - [255, 0, 0]).max() < 3


def test_a_jpeg_that_needs_no_change_stays_as_it_is():
    image = Image.fromarray(np.kron(PIXELS, np.ones((8, 8, 1), np.uint8)))
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile('sRGB')).tobytes()
    variants = [
        {},
        {'progressive': True},
        {'quality': 30, 'subsampling': 2},
        {'icc_profile': profile},
        {'icc_profile': b'garbage'},
        {'comment': b'\xff'},
    ]
    contents = [encoded(image, 'JPEG', **options) for options in variants] + [encoded(image.convert('L'), 'JPEG')]
    contents += [encoded(image, 'JPEG') + b'trailing', encoded(image, 'MPO', save_all=True, append_images=[image])]
    for content in contents:
        result = canonical(content)
        assert result.content is content
        assert result.reencoded == ''
        assert np.array_equal(result.image.convert('RGB'), pixels(content))


def scene(width, height):
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / 150 + i) * np.cos(y / (100 + 30 * i)) for i in range(3)]
    return Image.fromarray((127 + 100 * np.stack(waves, -1)).astype(np.uint8))


@pytest.mark.parametrize('size', [(1600, 1200), (1201, 803), (403, 1999)])
@pytest.mark.parametrize('orientation', [1, 6])
def test_a_jpeg_scaled_while_it_is_decoded_is_large_enough_and_looks_the_same(size, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(scene(*size), 'JPEG', quality=95, exif=exif)
    full = open_image(content)
    assert full.size == (size if orientation == 1 else size[::-1])
    assert size_of(content) == size
    for side in (1, 25, 50, 51, 100, 101, 200, 201, 401, 402, 403, 5000):
        scaled = open_image(content, (side, side))
        assert min(scaled.size) >= min(2 * side, min(size))
        assert (min(scaled.size) < min(size)) == (4 * side <= min(size))  # it is done where it can be
        if 50 <= side <= min(size):
            difference = square(scaled, side).numpy().astype(int) - square(full, side).numpy()
            assert np.abs(difference).mean() < 3  # an edge is off by a pixel at most


@pytest.mark.parametrize('orientation', [1, 3, 6, 8])
@pytest.mark.parametrize('size', [(1600, 800), (800, 1600)])
def test_a_jpeg_is_scaled_as_far_as_a_rectangle_allows(size, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(scene(*size), 'JPEG', exif=exif)
    upright = open_image(content).size
    for divisor in (2, 4, 8):
        needed = upright[0] // divisor // 2, upright[1] // divisor // 2
        assert open_image(content, needed).size == (2 * needed[0], 2 * needed[1])  # wide or high alike, also turned
        assert open_image(content, (needed[0] + 1, needed[1])).size == (upright[0] * 2 // divisor, upright[1] * 2 // divisor)
        assert open_image(content, (needed[0], needed[1] + 1)).size == (upright[0] * 2 // divisor, upright[1] * 2 // divisor)
        assert covered(content, *needed)[0].shape == (3, *needed[::-1])


@pytest.mark.parametrize('name', ['PNG', 'WEBP'])
def test_only_jpeg_is_scaled(name):
    assert open_image(encoded(scene(400, 300), name), (50, 50)).size == (400, 300)


@pytest.mark.parametrize('content', [png(0, 8, 0, b''), b'', b'\0' * 100, b'\xff\xd8\xff', b'\x89PNG\r\n\x1a\n', b'RIFF\4\0\0\0WEBP'])
@pytest.mark.parametrize('function', [open_image, canonical, size_of])
def test_nothing_is_no_image(content, function):
    with pytest.raises(ImageError, match='not a readable JPEG, PNG or WebP'):
        function(content)
