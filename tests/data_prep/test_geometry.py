"""Latents carry the original size and the crop of their images, as SDXL's conditioning wants them: (height, width) and (top, left)."""

import io
import json
import re
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from streaming import LocalDataset, MDSWriter

from data_prep.auditing.dataset import audit_dataset
from data_prep.converting.conversion import convert
from data_prep.encoding.dataset import encode
from diffusion.check import data_errors
from diffusion.contracts.errors import ManifestError
from diffusion.contracts.manifest import Manifest
from diffusion.datasets.loader import train_loader
from diffusion.recipe import load_recipe
from diffusion.recipe.schema import EncoderSource
from tests.conftest import ASPECT_IMAGES, REPOSITORY, read_json
from tests.data_prep.test_convert import jpeg, write_webdataset

SIZES = [(64, 64), (100, 50), (50, 75), (67, 33), (33, 67), (200, 100), (331, 65)]  # (width, height); those twice as large are scaled while decoded


def rows_of(folder):
    return {row['key']: row for row in LocalDataset(local=str(folder))}


def geometry_of(folder):
    """{key: (size, crop)}"""
    return {key: (tuple(row['size'].tolist()), tuple(row['crop'].tolist())) for key, row in rows_of(folder).items()}


def crop_of(resized, size):
    """(top, left) of the centre of the (width, height) that was resized."""
    return tuple(round((outer - inner) / 2) for outer, inner in zip(resized[::-1], size[::-1], strict=True))


@pytest.fixture(scope='module')
def encoded(tmp_path_factory, encoders_folder):
    """Images of SIZES, and their latents of 32 and 16 px."""
    folder = tmp_path_factory.mktemp('geometry')
    rows = [(f'{i:09d}', f'caption {i}', jpeg(*size, seed=i), 'success') for i, size in enumerate(SIZES)]
    convert(write_webdataset(folder / 'source', rows), folder / 'images')
    encode(folder / 'images', folder / 'latents', [32, 16], EncoderSource(str(encoders_folder)))
    return folder


@pytest.mark.parametrize('side', [32, 16])
def test_squares(encoded, side, encoders):
    found, images, latents = geometry_of(encoded / f'latents/{side}'), rows_of(encoded / 'images'), rows_of(encoded / f'latents/{side}')
    assert len(found) == len(SIZES)
    for key, (size, crop) in found.items():
        image = Image.open(io.BytesIO(images[key]['image']))
        assert size == (image.height, image.width) == SIZES[int(key)][::-1]
        image.draft(None, (2 * side, 2 * side))
        short = min(image.size)
        resized = image.width * side // short, image.height * side // short
        assert crop == crop_of(resized, (side, side))
        top, left = crop
        pixels = np.array(image.resize(resized, Image.Resampling.BILINEAR))[top : top + side, left : left + side]
        with torch.no_grad():
            posterior = encoders.vae.module.encode(torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 127.5 - 1).latent_dist
        expected = torch.cat([posterior.mean, posterior.logvar], dim=1)[0].numpy()
        np.testing.assert_allclose(latents[key]['moments'].astype(np.float32), expected, rtol=2e-3, atol=2e-3)  # it is this crop
    assert {crop for _, crop in found.values()} > {(0, 0)}


def test_aspect_buckets(aspect_images, aspect_latents):
    for stream in ASPECT_IMAGES:
        width, height = map(int, stream.split('x'))
        images, found = rows_of(aspect_images / stream), geometry_of(aspect_latents / stream)
        assert found.keys() == images.keys()
        for key, (size, crop) in found.items():
            image = Image.open(io.BytesIO(images[key]['image']))
            scale = max(width / image.width, height / image.height)
            assert size == (image.height, image.width)
            assert crop == crop_of((int(image.width * scale + 1e-9), int(image.height * scale + 1e-9)), (width, height))


def test_they_take_16_bytes_and_the_manifest_says_what_they_mean(encoded):
    manifest = Manifest.read(encoded / 'latents/32')
    meanings = [manifest.columns[name] for name in ('size', 'crop')]
    assert [column['encoding'] for column in meanings] == ['ndarray:int32:2'] * 2
    assert meanings[0]['meaning'].startswith('height and width of the original image')
    assert meanings[1]['meaning'].startswith('top and left')
    entry = read_json(encoded / 'latents/32/index.json')['shards'][0]
    sizes = dict(zip(entry['column_names'], entry['column_sizes'], strict=True))
    assert (sizes['size'], sizes['crop']) == (8, 8)
    assert audit_dataset(encoded / 'latents').problems == []


def turned(width, height):
    """A JPEG whose pixels lie on their side: `width` x `height` in the file, upright the other way round."""
    buffer, image = io.BytesIO(), Image.open(io.BytesIO(jpeg(width, height)))
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(buffer, 'JPEG', exif=exif)
    return buffer.getvalue()


RESIZED = [  # image, what img2dataset says the original's (width, height) was, (height, width) to be stored
    (jpeg(80, 40), (800, 400), (400, 800)),
    (jpeg(40, 40), (90, 60), (60, 90)),  # img2dataset's center_crop
    (turned(80, 40), (800, 400), (800, 400)),  # which looks at no EXIF orientation
    (turned(80, 40), (None, None), (80, 40)),
    (jpeg(80, 40), (None, None), (40, 80)),
    (jpeg(80, 40), (0, -3), (40, 80)),
]


def test_what_img2dataset_resized_keeps_its_original_size(tmp_path, encoders_folder):
    rows = [(f'{i:09d}', f'caption {i}', image, 'success') for i, (image, *_) in enumerate(RESIZED)]
    source = write_webdataset(tmp_path / 'source', rows, per_shard=len(rows))
    table = pq.read_table(source / '00000.parquet')
    for at, name in enumerate(('original_width', 'original_height')):
        table = table.drop_columns([name] * (name in table.column_names)).append_column(name, pa.array([row[1][at] for row in RESIZED], pa.int32()))
    pq.write_table(table, source / '00000.parquet')
    convert(source, tmp_path / 'images')
    convert(tmp_path / 'images', tmp_path / 'again')  # and through a second conversion
    encode(tmp_path / 'again', tmp_path / 'latents', [32], EncoderSource(str(encoders_folder)))
    found = geometry_of(tmp_path / 'latents')
    assert [found[key][0] for key in sorted(found)] == [expected for *_, expected in RESIZED]
    assert found['000000000'][1] == (0, 16)


def recipe_for(folder, overrides):
    return load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', [*overrides, 'data.kind=latents', f'data.streams.train.local={folder}'])


def test_training_has_them_and_does_without(latents, encoders, overrides, tmp_path):
    plain = tmp_path / 'plain'
    manifest = read_json(latents / 'manifest.json')
    columns = {name: column for name, column in manifest['columns'].items() if name not in ('size', 'crop')}
    with MDSWriter(out=str(plain), columns={name: column['encoding'] for name, column in columns.items()}, hashes=['sha256']) as writer:
        for row in LocalDataset(local=str(latents)):
            writer.write({name: row[name] for name in columns})
    (plain / 'manifest.json').write_text(json.dumps({**manifest, 'columns': columns}))
    with_geometry, without = (train_loader(recipe_for(folder, overrides), encoders) for folder in (latents, plain))
    sample = with_geometry.dataset[3]
    assert (sample['size'].tolist(), sample['crop'].tolist()) == ([32, 32], [0, 0])
    assert 'size' not in without.dataset[3]
    one, other = ({tuple(key): moments for batch in loader for key, moments in zip(batch['sample_key'].tolist(), batch['moments'], strict=True)}
                  for loader in (with_geometry, without))  # fmt: skip
    common = one.keys() & other.keys()
    assert common
    assert all(torch.equal(one[key], other[key]) for key in common)
    refusal = r'manifest columns has no size and crop, which model.network=\S+ is trained with; encode the images again'
    with pytest.raises(ManifestError, match=refusal):
        train_loader(recipe_for(plain, overrides), encoders, geometry=True)
    (error,) = data_errors(recipe_for(plain, overrides), geometry=True)
    assert re.search(refusal, error)
    assert data_errors(recipe_for(plain, overrides)) == data_errors(recipe_for(latents, overrides), geometry=True) == []


def test_images_and_latents_say_the_same(encoded, encoders, overrides):
    """Of squares cut out of rectangles, which loader and encode cut alike; a mirrored image's crop is still in the middle."""
    found = {}
    for kind, folder in (('images', 'images'), ('latents', 'latents/32')):
        changes = [*overrides, f'data.kind={kind}', f'data.streams.train.local={encoded}/{folder}', f'data.flip={str(kind == "images").lower()}']
        recipe = load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', [*changes, 'batch.global_size=1', 'batch.micro_size=1'])
        for batch in train_loader(recipe, encoders, geometry=True):
            assert batch['geometry'].dtype == torch.int32
            found.setdefault(kind, []).extend(batch['geometry'].tolist())
    assert sorted(found['images']) == sorted(found['latents'])
    assert all(row[4:] == [32, 32] for row in found['images'])
    assert {(row[2] > 0, row[3] > 0) for row in found['images']} == {(False, False), (True, False), (False, True)}


def test_an_impossible_crop_is_unsound(encoded, tmp_path):
    data = shutil.copytree(encoded / 'latents/32', tmp_path / 'data')
    manifest = Manifest.read(data)
    with MDSWriter(
        out=str(tmp_path / 'bad'), columns={name: column['encoding'] for name, column in manifest.columns.items()}, hashes=['sha256']
    ) as w:
        for i, row in enumerate(LocalDataset(local=str(data))):
            w.write({**row, 'crop': np.array([0, -1], np.int32)} if i == 2 else row)
    (tmp_path / 'bad/manifest.json').write_text(manifest.to_json())
    found = audit_dataset(tmp_path / 'bad')
    assert found.findings.unsound == {'size or crop is not that of an image': 1}
