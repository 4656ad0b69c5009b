import io
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from streaming import LocalDataset

from data_prep.auditing.dataset import audit_dataset
from data_prep.converting.buckets import MinSideBuckets
from data_prep.converting.conversion import Options, convert
from data_prep.encoding.dataset import encode
from data_prep.engines.engine import LocalEngine
from diffusion.common.ray_cluster import ClusterError, ClusterRefusal
from diffusion.common.storage import open_folder
from diffusion.contracts.errors import DataError, EncoderError, ManifestError
from diffusion.contracts.manifest import Manifest
from diffusion.datasets.decode import open_image
from diffusion.datasets.loader import train_loader
from diffusion.datasets.transforms import RECTANGLE, SQUARE, square
from diffusion.encoders.frozen import FrozenEncoders
from diffusion.encoders.random_encoders import write_stand_in
from diffusion.families.registry import build_network, family_of
from diffusion.recipe import load_recipe
from diffusion.recipe.schema import EncoderSource
from diffusion.training.model import TextToImage
from tests.conftest import ASPECT_IMAGES, NUM_IMAGES, REPOSITORY, RESOLUTION, run_here
from tests.data_prep.test_convert import KEPT, write_webdataset


def test_moments_are_the_vaes_own_unscaled(images, latents, encoders):
    stored = {row['key']: row for row in LocalDataset(local=str(images))}
    rows = list(LocalDataset(local=str(latents)))
    assert len(rows) == len(stored) == NUM_IMAGES
    for row in rows[:8]:
        pixels = square(open_image(stored[row['key']]['image']), RESOLUTION)[None].float() / 127.5 - 1
        with torch.no_grad():
            posterior = encoders.vae.module.encode(pixels).latent_dist
        expected = torch.cat([posterior.mean, posterior.logvar], dim=1)[0].numpy()
        np.testing.assert_allclose(row['moments'].astype(np.float32), expected, rtol=2e-3, atol=2e-3)
        assert row['moments'].dtype == np.float16
        assert row['caption'] == stored[row['key']]['caption']


def test_the_manifest_says_what_was_done(latents, encoders, encoders_folder):
    manifest = Manifest.read(latents)
    assert manifest.kind == 'latents'
    assert manifest.resolution == RESOLUTION
    assert manifest.encoder == {
        'source': str(encoders_folder),
        'revision': None,
        'vae_sha256': encoders.vae.sha256,
        'scaling_factor': encoders.vae.scaling_factor,
        'shift_factor': 0.0,
        'downsampling': 4,
        'dtype': 'float16',
        'computed_in': 'float32',
    }
    assert manifest.columns['moments']['encoding'] == 'ndarray:float16:8,8,8'


def test_small_images_are_left_out_and_counted(tmp_path, encoders_folder):
    convert(write_webdataset(tmp_path / 's'), tmp_path / 'images')
    tally = encode(tmp_path / 'images', tmp_path / 'latents', [32], EncoderSource(str(encoders_folder)))
    assert tally.attempted == 4
    assert dict(tally.dropped) == {'short side below 32 px': 3}
    assert [row['key'] for row in LocalDataset(local=str(tmp_path / 'latents'))] == [KEPT[1]]


def test_what_cannot_be_encoded_is_refused(images, latents, encoders_folder, tmp_path):
    location = EncoderSource(str(encoders_folder))
    with pytest.raises(DataError, match='manifest kind is latents'):
        encode(latents, tmp_path / 'out', [32], location)
    with pytest.raises(ManifestError, match='no such file'):
        encode(tmp_path, tmp_path / 'out', [32], location)
    with pytest.raises(DataError, match='--resolution 30 is not a multiple of the 4 pixels'):
        encode(images, tmp_path / 'out', [30], location)
    encode(images, tmp_path / 'out', [32], location)
    with pytest.raises(DataError, match=r'was begun with resolution=\[32\], now it is \[16\]'):
        encode(images, tmp_path / 'out', [16], location)
    with pytest.raises(DataError, match=r'was begun with batch_size=64, now it is 32; name another DEST'):
        encode(images, tmp_path / 'out', [32], location, batch_size=32)
    settings = json.loads((tmp_path / 'out/job.json').read_text())
    del settings['batch_size']  # as before it was kept
    (tmp_path / 'out/job.json').write_text(json.dumps(settings))
    with pytest.raises(DataError, match=r'was begun with no batch_size \(not given, or by a version that did not keep it\), now it is 64; name'):
        encode(images, tmp_path / 'out', [32], location)


class Refusing(LocalEngine):
    """Does the first parts by itself, and then ends as a cluster does."""

    def __init__(self, error, num_parts=0):
        super().__init__()
        self.error, self.num_parts = error, num_parts

    def map(self, work, items):
        yield from super().map(work, items[: self.num_parts])
        raise self.error


@pytest.mark.parametrize('error', [ClusterError('no cluster'), ClusterRefusal('no room'), EncoderError('others there'), KeyboardInterrupt()])
def test_a_run_that_is_refused_leaves_nothing(images, encoders_folder, tmp_path, error):
    """With text, whose empty caption is stored before any part."""
    out, location = tmp_path / 'new/out', EncoderSource(str(encoders_folder))

    def refused(num_parts=0):
        with pytest.raises(type(error)):
            encode(images, out, [32, 16], location, network='tiny', engine=Refusing(error, num_parts))

    refused()
    assert not (tmp_path / 'new').exists()
    out.mkdir(parents=True)
    refused()
    assert list(out.iterdir()) == []  # as it was
    refused(num_parts=1)
    begun = set(open_folder(out).files())
    assert {'job.json', '32/empty_caption.npy'} < begun
    refused()
    assert set(open_folder(out).files()) == begun


def test_the_command(images, encoders_folder, tmp_path):
    out = run_here('data_prep.encode', images, tmp_path / 'out', '--resolution', 32, '--encoders', encoders_folder).stdout
    assert f'kept {NUM_IMAGES} 100.0 %' in ' '.join(out.split())
    result = run_here('data_prep.encode', images, tmp_path / 'out2', '--resolution', 32, '--encoders', tmp_path, code=2)
    assert 'vae: cannot be loaded' in result.stderr


def test_damaged_shards_are_named(images, encoders_folder, tmp_path):
    location = EncoderSource(str(encoders_folder))
    for name, damage in (('flipped', lambda b: b[:200] + bytes([b[200] ^ 1]) + b[201:]), ('cut', lambda b: b[:-1])):
        shutil.copytree(images, tmp_path / name)
        shard = tmp_path / name / '00001/shard.00000.mds'
        shard.write_bytes(damage(shard.read_bytes()))
        with pytest.raises(DataError, match='00001/shard.00000.mds: SHA-256 is'):
            encode(tmp_path / name, tmp_path / f'{name}-latents', [32], location)
    shard.unlink()
    with pytest.raises(DataError, match='no such file, but index.json names it'):
        encode(tmp_path / 'cut', tmp_path / 'cut-latents', [32], location)


@pytest.mark.parametrize(
    ('damage', 'said'), [(lambda shards: shards.pop(), 'is not listed'), (lambda shards: shards.append(shards[0]), 'is listed 2')]
)
def test_a_source_that_contradicts_its_manifest_is_not_read(damage, said, images, encoders_folder, tmp_path):
    """A lost shard would be missing from what is made of it, without an error."""
    source = shutil.copytree(images, tmp_path / 'source')
    index = json.loads((source / 'index.json').read_text())
    damage(index['shards'])
    (source / 'index.json').write_text(json.dumps(index))
    with pytest.raises(DataError, match=said):
        encode(source, tmp_path / 'latents', [32], EncoderSource(str(encoders_folder)))
    with pytest.raises(DataError, match=said):
        convert(source, tmp_path / 'again')


def moments_of(folder):
    return {row['key']: row['moments'].astype(np.float32) for row in LocalDataset(local=str(folder))}


def test_the_batch_size_does_not_matter_beyond_rounding(images, latents, encoders_folder, tmp_path):
    """float16 has 11 bits: two results that differ in float32's last bits may round to neighbours, 2^-10 apart in relation; near zero, where terms
    of the size of 1 cancel, the difference is that of the terms."""
    encode(images, tmp_path / 'out', [32], EncoderSource(str(encoders_folder)), batch_size=1)
    one, many = moments_of(tmp_path / 'out'), moments_of(latents)
    assert one.keys() == many.keys()
    for key in one:
        np.testing.assert_allclose(one[key], many[key], rtol=2**-10, atol=5e-5)


def test_several_resolutions_are_streams_of_what_is_large_enough(tmp_path, encoders_folder, encoders):
    convert(write_webdataset(tmp_path / 's'), tmp_path / 'images')
    tally = encode(tmp_path / 'images', tmp_path / 'latents', [32, 16], EncoderSource(str(encoders_folder)))
    assert (tally.attempted, dict(tally.kept_in), dict(tally.dropped)) == (
        8,
        {'16': 3, '32': 1},
        {'short side below 32 px': 3, 'short side below 16 px': 1},
    )
    for resolution, keys in ((16, KEPT), (32, KEPT[1:2])):
        folder = tmp_path / f'latents/{resolution}'
        manifest = Manifest.read(folder)
        assert (manifest.resolution, manifest.num_samples, manifest.transform) == (resolution, len(keys), SQUARE)
        rows = list(LocalDataset(local=str(folder)))
        assert [row['key'] for row in rows] == keys
        assert all(row['moments'].shape == (8, resolution // 4, resolution // 4) for row in rows)
    assert Manifest.read(tmp_path / 'latents').streams == ['16', '32']


def test_buckets_are_encoded_at_their_size(aspect_images, aspect_latents, encoders):
    whole = Manifest.read(aspect_latents)
    assert whole.streams == Manifest.read(aspect_images).streams
    assert (whole.num_samples, whole.dropped) == (sum(ASPECT_IMAGES.values()), {})
    for stream in whole.streams:
        manifest, (width, height) = Manifest.read(aspect_latents / stream), map(int, stream.split('x'))
        assert (manifest.bucket, manifest.resolution) == ({'width_px': width, 'height_px': height}, None)
        assert (manifest.num_samples, manifest.transform) == (ASPECT_IMAGES.get(stream, 0), RECTANGLE)
        assert manifest.columns['moments']['encoding'] == f'ndarray:float16:8,{height // 4},{width // 4}'
        if not manifest.num_samples:
            continue
        stored = {row['key']: row['image'] for row in LocalDataset(local=str(aspect_images / stream))}
        for key, moments in list(moments_of(aspect_latents / stream).items())[-1:]:
            image = Image.open(io.BytesIO(stored.pop(key)))
            scale = max(width / image.width, height / image.height)
            image = image.resize((int(image.width * scale + 1e-9), int(image.height * scale + 1e-9)), Image.Resampling.BILINEAR)
            left, top = round((image.width - width) / 2), round((image.height - height) / 2)
            pixels = torch.from_numpy(np.array(image.crop((left, top, left + width, top + height)))).permute(2, 0, 1)
            expected = encoders.vae.encode(pixels[None])[0].numpy()
            np.testing.assert_allclose(moments, expected, rtol=2e-3, atol=2e-3)
    found = audit_dataset(aspect_latents).findings
    assert (found.problems, found.unsound) == ([], {})


def test_buckets_resume_after_a_stop(aspect_images, encoders_folder, tmp_path):
    location, out = EncoderSource(str(encoders_folder)), tmp_path / 'out'
    encode(aspect_images / '64x192', out, None, location)  # a bucket alone is a dataset, too
    assert Manifest.read(out).bucket == {'width_px': 64, 'height_px': 192}
    before = {path.name: path.read_bytes() for path in out.glob('*/*.mds')}
    marker = sorted(out.glob('parts/*.json'))[-1]
    marker.unlink()
    tally = encode(aspect_images / '64x192', out, None, location)
    assert (tally.kept, tally.attempted_now) == (3, json.loads(marker.read_text())['tally']['attempted'])
    assert {path.name: path.read_bytes() for path in out.glob('*/*.mds')} == before
    with pytest.raises(DataError, match=r'was begun with resolution=bucket, now it is \[64\]'):
        encode(aspect_images / '64x192', out, [64], location)


def test_what_is_no_bucket_cannot_be_encoded_as_one(images, encoders_folder, tmp_path):
    command = ['data_prep.encode', images, tmp_path / 'out', '--encoders', encoders_folder, '--resolution', 'bucket']
    assert 'needs streams of aspect buckets, and this dataset is none; convert the images with --buckets' in run_here(*command, code=2).stderr
    assert '--resolution bucket stands alone' in run_here(*command, 32, code=2).stderr


def test_latents_alone_need_no_text_encoder(images, latents, encoders_folder, tmp_path):
    """And no family: any VAE will do."""
    shutil.copytree(encoders_folder / 'vae', tmp_path / 'encoders/vae')
    encode(images, tmp_path / 'out', [RESOLUTION], EncoderSource(str(tmp_path / 'encoders')))
    one, other = moments_of(tmp_path / 'out'), moments_of(latents)
    assert all(np.array_equal(one[key], other[key]) for key in other)
    with pytest.raises(EncoderError, match='text_encoder'):
        encode(images, tmp_path / 'text', [RESOLUTION], EncoderSource(str(tmp_path / 'encoders')), network='tiny-prx')


def test_text_of_another_family_is_not_added(images, encoders_folder, tmp_path):
    """The encoders are the same, and the text is not: PRX's is encoded with a mask."""
    location = EncoderSource(str(encoders_folder))
    encode(images, tmp_path / 'out', [RESOLUTION], location, network='tiny-prx')
    before = (tmp_path / 'out/empty_caption.npy').read_bytes()
    with pytest.raises(DataError, match='text_family=prx, now it is sd2; name another DEST'):
        encode(images, tmp_path / 'out', [RESOLUTION], location, network='tiny')
    assert (tmp_path / 'out/empty_caption.npy').read_bytes() == before


def test_arguments_that_could_do_nothing_are_refused(tmp_path):
    misspelt = run_here('data_prep.encode', tmp_path, tmp_path / 'out', '--resolution', 32, '--encoders', 'encc', code=2).stderr
    assert "--encoders: there is no folder 'encc', and a Hub id has the form owner/name" in misspelt
    alone = run_here('data_prep.encode', tmp_path, tmp_path / 'out', '--resolution', 32, '--encoders', tmp_path, '--network', 'tiny', code=2).stderr
    assert '--network only says how --text-embeddings encodes captions' in alone
    said = run_here('data_prep.encode', tmp_path, tmp_path / 'out', '--resolution', 32, '--encoders', tmp_path, '--network', 'sd3', code=2).stderr
    assert '--network sd3: is not one of' in said
    assert 'tiny-prx' in said


@pytest.mark.parametrize('network', ['tiny', 'tiny-xl'])
def test_stored_text_embeddings_reach_the_model(network, images, encoders_folder, encoders_xl_folder, overrides, tmp_path):
    folder, family = {'tiny': encoders_folder, 'tiny-xl': encoders_xl_folder}[network], family_of(network)
    location = EncoderSource(str(folder))
    encoders = FrozenEncoders.load(location, family.find_text)
    encode(images, tmp_path / 'latents', [32], location, network=network)
    assert not audit_dataset(tmp_path / 'latents').findings.unsound
    stream = ['data.kind=latents', f'data.streams.train.local={tmp_path}/latents', 'data.caption_dropout=0.5', 'log.samples.guidance=2']
    recipe = load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', [*overrides, *stream, f'model.network={network}'])
    empty = encoders.text.encode(encoders.text.tokenize([''])).to_store()
    dropped = 0
    model = TextToImage(build_network(network), encoders, recipe.model, recipe.seed)
    for batch in train_loader(recipe, encoders, family.reads_geometry):
        expected = encoders.text.encode(batch['tokens']).to_store()  # the dropped ones are tokens of the empty caption
        for column, encoded in expected.items():
            torch.testing.assert_close(batch[column], encoded, rtol=2e-3, atol=2e-3)
            dropped += sum(torch.allclose(row, empty[column][0], atol=2e-3) for row in encoded)
        stored = model(batch).prediction
        plain = {name: value for name, value in batch.items() if name not in expected}
        torch.testing.assert_close(stored, model(plain).prediction, rtol=1e-2, atol=1e-3)
    assert 0 < dropped < NUM_IMAGES * len(expected)
    assert dropped % len(expected) == 0  # all columns of a caption or none
    write_stand_in(tmp_path / 'other', network, words=['other', 'words'])
    shutil.copytree(folder / 'vae', tmp_path / 'other/vae', dirs_exist_ok=True)
    other = FrozenEncoders.load(EncoderSource(str(tmp_path / 'other')), family.find_text)
    for parameter in list(other.text.parts.values())[-1].module.parameters():
        parameter.data.mul_(1.5)
    with pytest.raises(ManifestError, match=rf'{tmp_path}/latents\): manifest text_encoder.tokenizers are not those of model.encoders'):
        train_loader(recipe, other)
    manifest = json.loads((tmp_path / 'latents/manifest.json').read_text())
    assert manifest['text_encoder'].pop('tokenizers') == encoders.text.tokenizer_digests
    (tmp_path / 'latents/manifest.json').write_text(json.dumps(manifest))  # of an earlier version
    train_loader(recipe, encoders)
    with pytest.raises(ManifestError, match='manifest text_encoder is not that of the recipe'):
        train_loader(recipe, other)


def test_training_on_a_data_set_of_streams_names_them(images, crawl, encoders, overrides, tmp_path):
    convert(crawl, tmp_path / 'images', Options(buckets=MinSideBuckets((16, 32, 64))))
    root, side = ([f'data.streams.train.local={tmp_path}/images{stream}', 'data.kind=images'] for stream in ('', '/side-32'))
    with pytest.raises(
        ManifestError, match=rf'manifest names the streams side-16, side-32, side-64; .* data\.streams\.train\.local={tmp_path}/images/side-16,'
    ):
        train_loader(load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', [*overrides, *root]), encoders)
    batches = list(train_loader(load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', [*overrides, *side]), encoders))
    assert sum(len(batch['images']) for batch in batches) == NUM_IMAGES
