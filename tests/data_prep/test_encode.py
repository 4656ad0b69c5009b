import shutil

import numpy as np
import pytest
import torch
from streaming import LocalDataset

from data_prep.convert import convert
from data_prep.encode import encode
from data_prep.errors import DataError
from diffusion.datasets.decode import open_image
from diffusion.datasets.manifest import Manifest, ManifestError
from diffusion.datasets.transforms import square
from diffusion.recipe.schema import Encoders
from tests.conftest import NUM_PICTURES, RESOLUTION, run_python
from tests.data_prep.test_convert import KEPT, write_webdataset


def test_moments_are_the_vaes_own_unscaled(images, latents, encoders):
    pictures = {row['key']: row for row in LocalDataset(local=str(images))}
    rows = list(LocalDataset(local=str(latents)))
    assert len(rows) == len(pictures) == NUM_PICTURES
    for row in rows[:8]:
        pixels = square(open_image(pictures[row['key']]['image']), RESOLUTION)[None].float() / 127.5 - 1
        with torch.no_grad():
            posterior = encoders.vae.encode(pixels).latent_dist
        expected = torch.cat([posterior.mean, posterior.logvar], dim=1)[0].numpy()
        np.testing.assert_allclose(row['moments'].astype(np.float32), expected, rtol=2e-3, atol=2e-3)
        assert row['moments'].dtype == np.float16
        assert row['caption'] == pictures[row['key']]['caption']


def test_the_manifest_says_what_was_done(latents, encoders, encoders_folder):
    manifest = Manifest.read(latents)
    assert manifest.kind == 'latents'
    assert manifest.resolution == RESOLUTION
    assert manifest.encoder == {
        'source': str(encoders_folder),
        'revision': None,
        'vae_sha256': encoders.vae_sha256,
        'scaling_factor': encoders.scaling_factor,
        'downsampling': 4,
        'dtype': 'float16',
        'computed_in': 'float32',
    }
    assert manifest.columns['moments']['encoding'] == 'ndarray:float16:8,8,8'


def test_small_pictures_are_left_out_and_counted(tmp_path, encoders_folder):
    convert(write_webdataset(tmp_path / 's'), tmp_path / 'images')
    tally = encode(tmp_path / 'images', tmp_path / 'latents', [32], Encoders(str(encoders_folder)))
    assert tally.attempted == 4
    assert dict(tally.dropped) == {'short side below 32 px': 3}
    assert [row['key'] for row in LocalDataset(local=str(tmp_path / 'latents'))] == [KEPT[1]]


def test_what_cannot_be_encoded_is_refused(images, latents, encoders_folder, tmp_path):
    location = Encoders(str(encoders_folder))
    with pytest.raises(DataError, match='manifest kind is latents'):
        encode(latents, tmp_path / 'out', [32], location)
    with pytest.raises(ManifestError, match='no such file'):
        encode(tmp_path, tmp_path / 'out', [32], location)
    with pytest.raises(DataError, match='--resolution 30 is not a multiple of the 4 pixels'):
        encode(images, tmp_path / 'out', [30], location)
    encode(images, tmp_path / 'out', [32], location)
    with pytest.raises(DataError, match=r'was begun with resolution=\[32\], now it is \[16\]'):
        encode(images, tmp_path / 'out', [16], location)


def test_the_command(images, encoders_folder, tmp_path):
    out = run_python('-m', 'data_prep.encode', images, tmp_path / 'out', '--resolution', 32, '--encoders', encoders_folder).stdout
    assert f'kept {NUM_PICTURES} 100.0 %' in ' '.join(out.split())
    result = run_python('-m', 'data_prep.encode', images, tmp_path / 'out2', '--resolution', 32, '--encoders', tmp_path, code=2)
    assert 'cannot load vae' in result.stderr


def test_damaged_shards_are_named(images, encoders_folder, tmp_path):
    location = Encoders(str(encoders_folder))
    for name, damage in (('flipped', lambda b: b[:200] + bytes([b[200] ^ 1]) + b[201:]), ('cut', lambda b: b[:-1])):
        shutil.copytree(images, tmp_path / name)
        shard = tmp_path / name / '00001/shard.00000.mds'
        shard.write_bytes(damage(shard.read_bytes()))
        with pytest.raises(DataError, match='00001/shard.00000.mds: SHA-256 is'):
            encode(tmp_path / name, tmp_path / f'{name}-latents', [32], location)
    shard.unlink()
    with pytest.raises(DataError, match='no such file, but index.json names it'):
        encode(tmp_path / 'cut', tmp_path / 'cut-latents', [32], location)
