"""Buckets against SDXL's published table and closed forms."""

import math

import pytest

from data_prep.convert import main
from data_prep.converting.buckets import AspectBuckets, Buckets, MinSideBuckets, buckets
from data_prep.converting.conversion import Options, convert
from diffusion.contracts.manifest import Manifest
from tests.data_prep.sources.test_sources import samples
from tests.data_prep.test_convert import jpeg, write_webdataset

# (width, height) of arXiv:2307.01952, appendix I, up to the square; the wide ones are the same turned by 90 degrees.
SDXL_TALL = """
512x2048 512x1984 512x1920 512x1856 576x1792 576x1728 576x1664 640x1600 640x1536 704x1472 704x1408 704x1344 768x1344 768x1280
832x1216 832x1152 896x1152 896x1088 960x1088 960x1024 1024x1024
"""


def test_aspect_1024_is_sdxls_table():
    tall = [tuple(map(int, size.split('x'))) for size in SDXL_TALL.split()]
    assert set(AspectBuckets(1024).sizes()) == {*tall, *((height, width) for width, height in tall)}


@pytest.mark.parametrize('side', [128, 256, 512, 768, 1024, 2048])
def test_aspect_buckets_keep_their_promises(side):
    kind = AspectBuckets(side)
    sizes = kind.sizes()
    ratios = [width / height for width, height in sizes]
    assert ratios == sorted(set(ratios))
    assert (side, side) in sizes
    assert {(height, width) for width, height in sizes} == set(sizes)
    assert {size % 64 for pair in sizes for size in pair} == {0}
    assert all(width * height <= side**2 and side // 2 <= min(width, height) for width, height in sizes)
    assert list(kind.streams()) == [f'{width}x{height}' for width, height in sizes]
    for width, height in sizes:
        assert kind.place(width, height) == (f'{width}x{height}', None)
        assert kind.place(3 * width, 3 * height) == (f'{width}x{height}', None)
        assert kind.place(width - 1, height - 1) == (None, 'smaller than its aspect bucket')


def test_the_nearest_ratio_is_nearest_by_factor():
    kind = AspectBuckets(512)
    for width, height in ((3000, 2000), (2000, 3000), (4032, 3024), (1920, 1080), (1080, 1920), (9000, 700), (1000, 990)):
        stream, _ = kind.place(width, height)
        factors = {f'{w}x{h}': max(width * h / (height * w), height * w / (width * h)) for w, h in kind.sizes()}
        assert factors[stream] == min(factors.values())


@pytest.mark.parametrize(
    ('size', 'stream'),
    [
        ((256, 256), 'side-256'),
        ((511, 9999), 'side-256'),
        ((9999, 512), 'side-512'),
        ((1024, 1024), 'side-1024'),
        ((8000, 5000), 'side-1024'),
        ((255, 9999), None),
    ],
)
def test_minimum_sides(size, stream):
    kind = MinSideBuckets((256, 512, 1024))
    assert kind.place(*size) == ((stream, None) if stream else (None, 'short side below 256 px'))
    assert kind.streams()['side-512'] == {'bucket': {'min_side_px': 512, 'below_px': 1024}}
    assert kind.streams()['side-1024'] == {'bucket': {'min_side_px': 1024, 'below_px': None}}


@pytest.mark.parametrize('given', ['min-side:256', 'min-side:256,512,1024', 'aspect:512', 'aspect:1024'])
def test_the_command_line_is_read_and_written_the_same(given):
    assert buckets(given).settings() == given


@pytest.mark.parametrize(
    'given',
    [
        '',
        'none',
        'min-side',
        'min-side:',
        'min-side:512,256',
        'min-side:0',
        'min-side:256,256',
        'min-side:-1',
        'aspect:100',
        'aspect:512,256',
        'aspect:64',
        'aspect:0',
        'aspect:x',
        'side:256',
    ],
)
def test_what_is_no_bucket_is_refused(given):
    with pytest.raises(ValueError, match='min-side:256,512,1024'):
        buckets(given)


def test_help_says_which_sizes_buckets_have(monkeypatch, capsys):
    monkeypatch.setattr('sys.argv', ['convert', '--help'])
    with pytest.raises(SystemExit):
        main()
    assert 'a multiple of 128' in ' '.join(capsys.readouterr().out.split())


@pytest.mark.parametrize('kind', [Buckets(), MinSideBuckets((20, 40, 400)), AspectBuckets(128)], ids=lambda kind: kind.settings())
def test_streams_of_a_dataset(kind, tmp_path):
    """Each is a dataset of its own; the whole adds up."""
    sizes = [(10, 30), (25, 30), (39, 90), (40, 40), (128, 128), (300, 130), (130, 300), (256, 128), (64, 256)]
    rows = [(f'{i:09d}', 'a', jpeg(*size, seed=i), 'success') for i, size in enumerate(sizes)]
    tally = convert(write_webdataset(tmp_path / 's', rows), tmp_path / 'out', Options(min_side_px=15, buckets=kind))
    whole = Manifest.read(tmp_path / 'out')
    assert (whole.attempted, whole.num_samples) == (tally.attempted, tally.kept) == (9, 9 - tally.dropped.total())
    assert whole.dropped == dict(tally.dropped)
    assert whole.streams == (sorted(kind.streams()) if kind.streams() != {'': {}} else [])
    found = {}
    for stream in kind.streams():
        manifest, rows_here = Manifest.read(tmp_path / 'out' / stream), samples(tmp_path / 'out' / stream) if tally.kept_in[stream] else []
        assert manifest.num_samples == len(rows_here) == tally.kept_in[stream]
        assert manifest.bucket == kind.streams()[stream].get('bucket', {})
        assert manifest.min_side_px == min((min(row['width'], row['height']) for row in rows_here), default=None)
        assert {'caption', 'image', 'width', 'sha256', 'reencoded'} <= set(manifest.columns)
        found |= {row['key']: stream for row in rows_here}
    assert found == {
        key: place for (key, *_), size in zip(rows, sizes, strict=True) if min(size) >= 15 and (place := kind.place(*size)[0]) is not None
    }


def test_squares_of_every_size_share_one_ratio():
    assert math.isclose(min(abs(math.log(width / height)) for width, height in AspectBuckets(2048).sizes()), 0)
    assert AspectBuckets(2048).place(2000, 2000) == (None, 'smaller than its aspect bucket')
