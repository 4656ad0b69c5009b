"""Colour profiles made by hand, against the arithmetic of colour spaces; and how sharp an image is, whatever the size of its file."""

import io
import struct

import numpy as np
import pytest
from PIL import Image, ImageCms

from data_prep.converting.conversion import convert
from diffusion.datasets.decode import MAX_PROFILE_BYTES, PROFILE_NOTE, canonical, open_image
from diffusion.datasets.transforms import covered
from tests.data_prep.sources.test_sources import put, samples
from tests.datasets.sharpness import fine_energy, jpeg, low_pass, scene
from tests.datasets.test_transforms import encoded

D50 = (0.9642, 1.0, 0.8249)
# Columns are the XYZ of red, green and blue, adapted to D50 (Bradford): brucelindbloom.com, and Apple's Display P3.
SRGB = np.array([[0.4360747, 0.3850649, 0.1430804], [0.2225045, 0.7168786, 0.0606169], [0.0139322, 0.0971045, 0.7141733]])
ADOBE = np.array([[0.6097559, 0.2052401, 0.1492240], [0.3111242, 0.6256560, 0.0632197], [0.0194811, 0.0608902, 0.7448387]])
P3 = np.array([[0.5151, 0.2919, 0.1572], [0.2412, 0.6922, 0.0666], [-0.0011, 0.0419, 0.7841]])
COLOURS = np.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype=np.uint8)


def fixed(*values):
    return struct.pack(f'>{len(values)}i', *(round(value * 65536) for value in values))


def curve(gamma):
    return b'curv\0\0\0\0' + struct.pack('>IH', 1, round(gamma * 256)) + b'\0\0'


def profile(space, tags):
    """An ICC profile, version 2: header, table of tags, tags (ICC.1:2001-04)."""
    tags = {'desc': b'desc' + bytes(4) + struct.pack('>I', 2) + b'x\0' + bytes(78 + 2), 'wtpt': b'XYZ ' + bytes(4) + fixed(*D50), **tags}
    table, content, at = b'', b'', 128 + 4 + 12 * len(tags)
    for name, tag in tags.items():
        tag += bytes(-len(tag) % 4)
        table += name.encode() + struct.pack('>II', at + len(content), len(tag))
        content += tag
    pcs = b'Lab ' if 'A2B0' in tags else b'XYZ '
    head = struct.pack('>I4sI4s4s4s12x4s', 0, bytes(4), 0x02400000, b'prtr' if 'A2B0' in tags else b'mntr', space, pcs, b'acsp')
    head = head.ljust(68, b'\0') + fixed(*D50)
    whole = head.ljust(128, b'\0') + struct.pack('>I', len(tags)) + table + content
    return struct.pack('>I', len(whole)) + whole[4:]


def rgb_profile(matrix, gamma):
    axes = {f'{name}XYZ': b'XYZ ' + bytes(4) + fixed(*matrix[:, i]) for i, name in enumerate('rgb')}
    return profile(b'RGB ', {**axes, **{f'{name}TRC': curve(gamma) for name in 'rgb'}})


def grey_profile(gamma):
    return profile(b'GRAY', {'kTRC': curve(gamma)})


def press_profile():
    """CMYK to Lab by a table of 2^4 corners: white paper, and black wherever there is any full ink."""
    corners = b''.join(bytes([255 if ink == (0, 0, 0, 0) else 0, 128, 128]) for ink in np.ndindex(2, 2, 2, 2))
    steps = bytes(range(256))
    return profile(b'CMYK', {'A2B0': b'mft1' + bytes(4) + bytes([4, 3, 2, 0]) + fixed(1, 0, 0, 0, 1, 0, 0, 0, 1) + 4 * steps + corners + 3 * steps})


def to_srgb(values, matrix, gamma):
    """(..., 3) of 0 to 255 in the space of a profile, as sRGB (IEC 61966-2-1), clipped to what that can show."""
    linear = ((values / 255) ** gamma) @ (np.linalg.inv(SRGB) @ matrix).T
    linear = linear.clip(0, 1)
    return 255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


def with_profile(pixels, icc_profile, kind='PNG', **options):
    return encoded(Image.fromarray(pixels) if isinstance(pixels, np.ndarray) else pixels, kind, icc_profile=icc_profile, **options)


@pytest.mark.parametrize(('matrix', 'gamma'), [(ADOBE, 563 / 256), (P3, 2.2), (SRGB, 1.0)], ids=['Adobe RGB', 'P3', 'linear'])
def test_an_rgb_profile_becomes_srgb(matrix, gamma):
    content = with_profile(COLOURS, rgb_profile(matrix, gamma))
    expected = to_srgb(COLOURS, matrix, gamma)
    result = canonical(content)
    assert result.reencoded == 'colour profile'
    assert np.abs(np.asarray(result.image) - expected).max() < 3
    assert np.abs(expected - COLOURS).max() > 20  # there was something to do
    again = canonical(result.content)
    assert (again.reencoded, again.image.info.get('icc_profile')) == ('', None)
    for image in (Image.open(io.BytesIO(result.content)), open_image(content)):
        assert np.array_equal(image, result.image)


def test_alpha_is_laid_over_white_in_srgb():
    alpha = np.full((8, 12, 1), 255, np.uint8)
    alpha[:4] = 0
    result = canonical(with_profile(np.concatenate([COLOURS, alpha], axis=-1), rgb_profile(ADOBE, 563 / 256)))
    assert result.reencoded == 'alpha, colour profile'
    assert np.asarray(result.image)[:4].min() == 255
    assert np.abs(np.asarray(result.image)[4:] - to_srgb(COLOURS, ADOBE, 563 / 256)[4:]).max() < 3


def test_a_grey_profile():
    grey = np.arange(256, dtype=np.uint8).reshape(8, 32)
    result = canonical(with_profile(grey, grey_profile(1.8)))
    assert result.reencoded == 'colour profile'
    expected = to_srgb(np.repeat(grey[..., None], 3, axis=-1), SRGB, 1.8)
    assert np.abs(np.asarray(result.image) - expected).max() < 4
    sixteen = Image.fromarray(grey.astype(np.uint16) * 257)
    assert np.abs(np.asarray(open_image(with_profile(sixteen, grey_profile(1.8)))) - expected).max() < 4


def test_a_press_profile():
    inks = Image.new('CMYK', (16, 16), (0, 0, 0, 0))
    inks.paste((0, 255, 0, 0), (8, 0, 16, 16))
    result = canonical(with_profile(inks, press_profile(), 'JPEG', quality=95))
    assert result.reencoded == 'CMYK, colour profile'
    shown = np.asarray(result.image).astype(int)
    assert shown[:, :7].min() > 245
    assert shown[:, 9:].max() < 15  # without the profile it would be magenta


@pytest.mark.parametrize('kind', ['PNG', 'JPEG', 'WEBP'])
def test_what_a_profile_shows_as_srgb_stays_byte_for_byte(kind):
    littlecms = ImageCms.ImageCmsProfile(ImageCms.createProfile('sRGB')).tobytes()
    for icc_profile in (littlecms, None):
        content = with_profile(COLOURS, icc_profile, kind)
        assert (canonical(content).content == content, canonical(content).note) == (True, '')


BROKEN = {
    'garbage': b'garbage' * 1000,
    'cut': rgb_profile(P3, 2.2)[:200],
    'of presses': press_profile(),
    'without curves': profile(b'RGB ', {}),
}


@pytest.mark.parametrize('name', BROKEN)
def test_a_profile_that_cannot_be_used_is_passed_over_and_counted(name, tmp_path):
    content = with_profile(COLOURS, BROKEN[name])
    result = canonical(content)
    assert (result.content == content, result.reencoded, result.note) == (True, '', PROFILE_NOTE)
    assert np.array_equal(open_image(content), COLOURS)


def test_a_profile_of_any_size_is_not_read():
    result = canonical(with_profile(COLOURS, rgb_profile(P3, 2.2) + bytes(MAX_PROFILE_BYTES), 'JPEG'))
    assert (result.reencoded, result.note) == ('', PROFILE_NOTE)


def test_convert_counts_them(tmp_path):
    for i, icc_profile in enumerate([None, rgb_profile(P3, 2.2), rgb_profile(ADOBE, 563 / 256), BROKEN['garbage']]):
        put(tmp_path / 's', f'{i}.png', with_profile(COLOURS, icc_profile))
        put(tmp_path / 's', f'{i}.txt', f'caption {i}')
    assert convert(tmp_path / 's', tmp_path / 'out').notes == {'re-encoded: colour profile': 2, PROFILE_NOTE: 1}
    assert [sample['reencoded'] for sample in samples(tmp_path / 'out')] == ['', 'colour profile', 'colour profile', '']


def test_damaged_profiles_do_no_harm():
    rng, whole = np.random.default_rng(0), [rgb_profile(P3, 2.2), grey_profile(1.8), press_profile()]
    for i in range(30):
        damaged = bytearray(whole[i % 3])
        for where in rng.integers(128, len(damaged), rng.integers(1, 30)):
            damaged[where] = rng.integers(256)
        image = (Image.fromarray(COLOURS), Image.fromarray(COLOURS[..., 0]), Image.new('CMYK', (4, 4)))[i % 3]
        assert canonical(with_profile(image, bytes(damaged), 'JPEG')).image.mode in ('RGB', 'L')


@pytest.mark.parametrize('factor', [1.9, 2, 3, 4, 8])
def test_the_size_of_a_file_does_not_decide_how_sharp_it_is(factor):
    """Against a decoder that never scales: the decoder's own scaling kept 0.82 of the fine detail of a file of twice the size, not 0.33."""
    content = jpeg(low_pass(scene(512), round(64 * factor)))
    ours = covered(content, 64, 64)[0].permute(1, 2, 0).numpy().astype(float)
    whole = np.asarray(Image.open(io.BytesIO(content)).resize((64, 64), Image.Resampling.BILINEAR), float)
    assert 0.75 < fine_energy(ours) / fine_energy(whole) < 1.25
    assert np.mean((ours - whole) ** 2) < 255**2 / 10**4.2  # 42 dB
