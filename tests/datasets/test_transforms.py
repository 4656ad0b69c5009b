import io
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from diffusion.datasets.decode import MAX_PIXELS, ImageError, open_image
from diffusion.datasets.transforms import cover, random_square, square


def encoded(image, kind='PNG', **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def test_square_is_resized_and_centred():
    wide = np.zeros((100, 300, 3), dtype=np.uint8)
    wide[:, 100:200] = 255  # exactly the centre square is white
    tensor = square(Image.fromarray(wide), 50)
    assert tensor.shape == (3, 50, 50)
    assert tensor.dtype == torch.uint8
    assert (tensor[:, :, 2:-2] == 255).all()
    assert torch.equal(
        square(Image.fromarray(wide).transpose(Image.Transpose.ROTATE_90), 50)[:, 2:-2], torch.full((3, 46, 50), 255, dtype=torch.uint8)
    )


def test_square_equals_torchvisions_resize_and_crop():
    from torchvision.transforms.v2.functional import center_crop, pil_to_tensor, resize

    rng = np.random.default_rng(0)
    for height, width, resolution in ((90, 140, 64), (141, 97, 64), (65, 64, 64), (500, 33, 32), (40, 90, 64)):
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        assert torch.equal(square(image, resolution), center_crop(pil_to_tensor(resize(image, resolution)), resolution))


@pytest.mark.parametrize('size', [(64, 192), (192, 64), (100, 140), (96, 96)])
def test_cover_equals_torchvisions_resize_and_crop(size):
    """torchvision resizes the shorter side; that is the one that must fit if the image is longer than its bucket, and else a side is given."""
    from torchvision.transforms.v2.functional import center_crop, pil_to_tensor, resize

    width, height = size
    rng = np.random.default_rng(0)
    for image_width, image_height in ((200, 300), (333, 222), (150, 207), (64, 193), (193, 64), (1000, 333)):
        image = Image.fromarray(rng.integers(0, 256, (image_height, image_width, 3), dtype=np.uint8))
        by_width = round(image_height * width / image_width - 0.5 + 1e-9), width
        by_height = height, round(image_width * height / image_height - 0.5 + 1e-9)
        covering = [candidate for candidate in (by_width, by_height) if candidate[0] >= height and candidate[1] >= width]
        expected = center_crop(pil_to_tensor(resize(image, list(min(covering)))), [height, width])
        found = cover(image, width, height)
        assert found.shape == (3, height, width)
        assert torch.equal(found, expected)


def test_what_covers_is_as_small_as_can_be():
    image = Image.new('RGB', (400, 300))
    for width in range(16, 200, 7):
        for height in range(16, 200, 11):
            assert cover(image, width, height).shape == (3, height, width)


def test_an_image_of_the_right_size_is_not_touched():
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    assert np.array_equal(square(Image.fromarray(pixels), 32).permute(1, 2, 0).numpy(), pixels)


def test_modes_become_rgb_as_a_person_sees_them():
    red = Image.new('RGB', (8, 8), (255, 0, 0))
    assert open_image(encoded(red)).getpixel((0, 0)) == (255, 0, 0)
    assert open_image(encoded(red.convert('P'))).getpixel((0, 0)) == (255, 0, 0)
    assert open_image(encoded(Image.new('L', (8, 8), 77))).getpixel((0, 0)) == (77, 77, 77)
    hidden = Image.new('RGBA', (8, 8), (255, 0, 0, 0))
    assert open_image(encoded(hidden)).getpixel((0, 0)) == (255, 255, 255)  # transparent is white, not hidden red
    sixteen = Image.fromarray(np.full((8, 8), 40000, dtype=np.uint16))
    assert open_image(encoded(sixteen)).getpixel((0, 0)) == (156, 156, 156)  # 40000 / 256, not clipped at 255
    cmyk = open_image(encoded(Image.new('CMYK', (8, 8), (0, 255, 255, 0)), 'JPEG')).getpixel((0, 0))
    assert cmyk[0] > 200
    assert max(cmyk[1:]) < 60


def test_exif_orientation_is_applied():
    image = Image.new('RGB', (20, 10), 'blue')
    exif = Image.Exif()
    exif[0x0112] = 6
    assert open_image(encoded(image, 'JPEG', exif=exif)).size == (10, 20)


def test_exif_that_cannot_be_parsed_does_not_cost_the_image():
    red = Image.new('RGB', (8, 8), (255, 0, 0))
    for kind in ('PNG', 'WEBP', 'JPEG'):
        opened = open_image(encoded(red, kind, exif=b'Exif\0\0garbage that is no TIFF header'))
        assert opened.size == (8, 8)
        assert opened.getpixel((0, 0))[0] > 200


def bomb(side):
    """A PNG of side x side black pixels in a few kilobytes."""

    def chunk(kind, data):
        return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))

    header = struct.pack('>IIBBBBB', side, side, 1, 0, 0, 0, 0)
    rows = zlib.compress(b'\0' * ((side // 8 + 1) * side), 9)
    return b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', header) + chunk(b'IDAT', rows) + chunk(b'IEND', b'')


@pytest.mark.parametrize(
    ('content', 'reason'),
    [
        (b'', 'not a readable'),
        (b'<html>gone</html>', 'not a readable'),
        (encoded(Image.new('RGB', (64, 64)), 'JPEG')[:-200], 'not a readable'),
        (encoded(Image.new('RGB', (8, 8)), 'GIF'), 'not a readable'),
        (encoded(Image.new('RGB', (8, 8)), 'BMP'), 'not a readable'),
        (bomb(9000), f'over {MAX_PIXELS // 10**6} Mpx'),
        (bomb(20000), f'over {MAX_PIXELS // 10**6} Mpx'),
    ],
)
def test_what_is_not_an_image_is_refused_with_a_reason(content, reason):
    with pytest.raises(ImageError, match=reason):
        open_image(content)


def png(width, height):
    """Each pixel says where it is."""
    y, x = np.mgrid[:height, :width]
    pixels = np.stack([x, y, np.full_like(x, 7)], axis=-1).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, 'PNG')
    return buffer.getvalue(), torch.from_numpy(pixels).permute(2, 0, 1)


@pytest.mark.parametrize(('top', 'left'), [(0.0, 0.0), (1.0, 1.0), (0.5, 0.25)])
def test_a_random_square_at_full_scale_is_cut_out_of_the_image(top, left):
    content, pixels = png(100, 60)
    y, x = round(top * 28), round(left * 68)
    assert torch.equal(random_square(content, 32, 1.0, top, left), pixels[:, y : y + 32, x : x + 32])


def test_a_random_square_at_the_smallest_scale_has_the_whole_short_side():
    content, _ = png(100, 60)
    with Image.open(io.BytesIO(content)) as image:
        assert torch.equal(random_square(content, 30, 0.0, 0.7, 0.4), cover(image, 50, 30)[:, :, 8:38])  # 100 x 60 becomes 50 x 30
    small, _ = png(20, 24)
    assert random_square(small, 32, 0.5, 0.5, 0.5).shape == (3, 32, 32)  # enlarged
