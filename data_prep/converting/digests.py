"""Digests that tell whether two images are the same, exactly or to the eye."""

import hashlib
from collections.abc import Callable

import numpy as np

from data_prep.sources.base import Row
from diffusion.contracts.errors import DataError
from diffusion.datasets.decode import ImageError, open_image

THUMBNAIL_PX = 64  # perceptual hashes look at 32 x 32 pixels


def sha256_digest(row: Row) -> bytes:
    """Equal for equal bytes: the first half of their SHA-256."""
    assert row.image is not None
    return bytes.fromhex(row.sha256)[:16] if row.sha256 else hashlib.sha256(row.image).digest()[:16]


def perceptual_digest(row: Row) -> bytes:
    """Equal for most images that look alike: ImageHash's phash of 64 bits, which sees no colour, and the colours that prevail.

    It finds about four in five copies of another size or quality.

    One that cannot be decoded is like none but its copies.
    """
    import imagehash

    assert row.image is not None
    try:
        image = open_image(row.image, (THUMBNAIL_PX, THUMBNAIL_PX))
        bits = np.concatenate([imagehash.phash(image).hash.ravel(), imagehash.colorhash(image, binbits=1).hash.ravel()])
        return np.packbits(bits).tobytes().ljust(16, b'\0')
    except ImageError:
        return sha256_digest(row)


KINDS: dict[str, tuple[Callable[[Row], bytes], str]] = {
    'exact': (sha256_digest, 'duplicate of an earlier image'),
    'near': (perceptual_digest, 'near duplicate of an earlier image'),
}


def check_kind(kind: str) -> None:
    """Raises DataError where the library for it is not installed."""
    if kind == 'near':
        try:
            import imagehash  # noqa: F401
        except ImportError:
            raise DataError("--duplicates near needs ImageHash: uv pip install -e '.[near-duplicates]'") from None
