"""Oddities of samples that can be used: images of one colour, repeated images and captions, captions that no encoder reads to their end.

`convert` and `audit` count the same ones, by these thresholds.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from diffusion.common.text import counted

SMALL_PX, BLANK_LEVELS = 32, 8
CLIP_TOKENS = 77
MAX_HASHES = 1 << 24
# CLIP's tokenizer splits so, and then further: into at least 0.8 times the tokens of English prose (797 paragraphs), fewer in other scripts.
TOKEN = re.compile(r"'(?:[stmd]|re|ve|ll)|[a-z]+|[^\W_]|(?:[^\w\s]|_)+", re.IGNORECASE)

BLANK, IDENTICAL = 'of (almost) one colour', 'identical to an earlier one'
REPEATED, LONG = 'with the caption of an earlier one', 'with a caption that is too long'


@dataclass(frozen=True)
class Oddity:
    """Definition of an oddity, the share of samples above which it is worth a warning, and what to do about it."""

    definition: str
    share: float
    remedy: str


ODDITIES = {
    BLANK: Oddity(
        f'averaged down to {SMALL_PX} px, no channel spans more than {BLANK_LEVELS} of 255 levels',
        0,
        'data_prep.convert --drop-blank leaves them out',
    ),
    IDENTICAL: Oddity('byte for byte', 0, 'data_prep.convert --duplicates exact keeps the first of each'),
    REPEATED: Oddity('letter for letter', 0.05, 'captions that do not tell images apart teach little; data_prep.recaption writes new ones'),
    LONG: Oddity(
        "over the text encoder's {tokens} tokens, estimated from words, digits and punctuation: at least so many",
        0.05,
        'the end of each is not read: shorten them, or train with an encoder that reads more',
    ),
}


def warn(oddity: str, count: int, total: int, definition: str) -> str:
    """Return a warning of an oddity that `count` of `total` samples have; '' if those are few."""
    about, share = ODDITIES[oddity], count / max(1, total)
    limit = f', above {about.share:.0%}' if about.share else ''
    return f'{counted(count, "sample")} {oddity} ({definition}): {share:.1%}{limit}; {about.remedy}' if share > about.share else ''


def is_blank(image: Image.Image) -> bool:
    """Return whether a grey or RGB image has (almost) one colour."""
    small = image.reduce(max(1, min(image.size) // SMALL_PX))  # or the noise of a camera would hide it
    return int(np.ptp(np.asarray(small), axis=(0, 1)).max()) <= BLANK_LEVELS


def least_tokens(caption: str) -> int:
    """Return how many tokens CLIP's tokenizer makes of a caption at least, with the two at its ends; no vocabulary is needed."""
    return 2 + len(TOKEN.findall(caption))


def content_hashes(content: bytes, captions: Sequence[tuple[str, float]]) -> bytes:
    """Return 8 bytes of the hash of an image or latent, and 8 of its captions."""
    return b''.join(hashlib.blake2b(part, digest_size=8).digest() for part in (content, repr([caption for caption, _ in captions]).encode()))


class Repeats:
    """Hashes of samples, of which those are counted that were there before.

    Memory holds 2^24 of them: beyond that a half, a quarter ... of the space of hashes is looked at, and the count is multiplied.
    """

    def __init__(self) -> None:
        self.every, self.size = 1, 0
        self.chunks: list[np.ndarray] = []

    def add(self, hashes: np.ndarray, positions: np.ndarray) -> None:
        """Add samples: uint64 hashes, and where each is, in ascending order."""
        self.chunks.append(np.stack([positions, hashes], axis=1)[hashes % self.every == 0])
        self.size += len(self.chunks[-1])
        while self.size > MAX_HASHES:
            self.every *= 2
            self.chunks = [chunk[chunk[:, 1] % self.every == 0] for chunk in self.chunks]
            self.size = sum(map(len, self.chunks))

    def count(self, num_examples: int = 0) -> tuple[int, list[list[int]]]:
        """Return the number of repeats, and of the hashes that occur most often the positions of the first two samples."""
        positions, hashes = np.concatenate([np.empty((0, 2), np.uint64), *self.chunks]).T
        values, counts = np.unique(hashes, return_counts=True)
        most = [i for i in np.argsort(-counts, kind='stable')[:num_examples] if counts[i] > 1]
        return self.every * (len(hashes) - len(values)), [positions[hashes == values[i]][:2].tolist() for i in most]
