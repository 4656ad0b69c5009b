"""What runs in an encoder's process: the trainer's own moments, or a reason."""

import dataclasses
import io
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from diffusion.common.environment import code_identity
from diffusion.common.ray_cluster import ClusterRefusal
from diffusion.contracts.batch import StoredImages
from diffusion.contracts.errors import EncoderError
from diffusion.datasets.transforms import covered, crop_of
from diffusion.online.encoder import BadImage, ImageEncoder, Settings


@pytest.fixture
def settings(encoders, encoders_folder) -> Settings:
    return Settings(
        str(encoders_folder),
        None,
        encoders.vae.sha256,
        code_identity(),
        in_bf16=False,
        backend=None,
        benchmark=False,
        on_gpu=False,
        threads=torch.get_num_threads(),
        dtype='float32',
        shapes=(),
    )


def drawn(width: int, height: int, kind: str = 'JPEG', **options) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)).save(buffer, kind, **options)
    return buffer.getvalue()


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def test_moments_are_those_of_the_trainer(settings, encoders):
    images = torch.randint(0, 256, (4, 3, 32, 48), dtype=torch.uint8, generator=torch.manual_seed(0))
    expected = encoders.vae.encode(images)
    read_only = images.numpy().copy()
    read_only.setflags(write=False)  # as Ray's are
    assert torch.equal(torch.from_numpy(ImageEncoder(settings).encode(read_only, True)), expected)
    half = ImageEncoder(dataclasses.replace(settings, dtype='float16')).encode(read_only, False)
    assert half.dtype == np.float16
    assert torch.equal(torch.from_numpy(half), expected.half())


def test_stored_images_become_those_of_the_loader(settings, encoders):
    contents = [drawn(200, 160), drawn(40, 90, 'PNG'), drawn(33, 32)]
    pixels = torch.stack([covered(content, 32, 48)[0] for content in contents])
    pixels[1] = pixels[1].flip(-1)
    given = ImageEncoder(settings).encode(StoredImages(contents, [False, True, False], 32, 48), True)
    assert torch.equal(torch.from_numpy(given), encoders.vae.encode(pixels))


def test_an_image_that_cannot_be_decoded_is_named(settings):
    error = ImageEncoder(settings).encode(StoredImages([drawn(40, 40), drawn(40, 40)[:300]], [False, False], 32, 32), True)
    assert isinstance(error, BadImage)
    assert (error.position, error.cause) == (1, 'ImageError: not a readable JPEG, PNG or WebP')


@pytest.mark.parametrize('size', [(32, 32), (33, 47), (64, 64), (127, 300), (128, 128), (131, 129), (600, 400)])
@pytest.mark.parametrize('kind', [partial(drawn), partial(drawn, kind='PNG'), *(partial(drawn, exif=turned(way)) for way in (3, 6, 8))])
def test_the_crop_is_known_without_decoding(size, kind):
    """A JPEG is scaled while it is decoded, which rounds its size and moves the crop."""
    content = kind(*size)
    assert crop_of(content, 24, 32) == covered(content, 24, 32)[1]


def test_what_differs_from_the_trainer_does_not_serve(settings, tmp_path):
    other_code = ImageEncoder(dataclasses.replace(settings, identity={**settings.identity, 'torch': '1.0'}))
    for answer in (other_code.ready(), other_code.encode(np.zeros((1, 3, 32, 32), np.uint8), True)):
        assert isinstance(answer, ClusterRefusal)
        assert f'torch {torch.__version__.partition("+")[0]}' in str(answer)
        assert '(the trainer has 1.0); install the same version' in str(answer)
        assert 'code ' not in str(answer)  # which is the same
    other_vae = ImageEncoder(dataclasses.replace(settings, vae_sha256='f' * 64)).ready()
    assert isinstance(other_vae, EncoderError)
    assert f"the trainer's {'f' * 12}; give all machines the same folder" in str(other_vae)
    nowhere = ImageEncoder(dataclasses.replace(settings, source=str(tmp_path / 'none'))).ready()
    assert isinstance(nowhere, EncoderError)
    assert str(nowhere).startswith('model.encoders.source, read by the encoder on ')


def test_no_room_on_the_gpu_is_said_with_sizes(settings, monkeypatch):
    encoder = ImageEncoder(settings)
    monkeypatch.setattr(encoder.vae, 'encode', lambda _: (_ for _ in ()).throw(torch.cuda.OutOfMemoryError('CUDA out of memory')))
    error = encoder.encode(np.zeros((2, 3, 32, 48), np.uint8), True)
    assert isinstance(error, ClusterRefusal)
    assert 'no room for a micro-batch of 2 images of 48 x 32 px; lower batch.micro_size' in str(error)


def test_it_says_for_how_long_it_has_computed(settings, monkeypatch):
    encoder, seen = ImageEncoder(settings), []
    encode = encoder.vae.encode
    monkeypatch.setattr(encoder.vae, 'encode', lambda images: seen.append(encoder.busy_sec()) or encode(images))
    assert encoder.busy_sec() == 0
    encoder.encode(np.zeros((1, 3, 32, 32), np.uint8), True)
    assert seen[0] > 0
    assert encoder.busy_sec() == 0
