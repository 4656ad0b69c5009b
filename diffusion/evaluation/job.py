"""One evaluation on the disk: what it depends on, the parts that its processes share, and which of them are there.

OUT/evaluating.json              protocol and model, written first; another start with others is refused
OUT/drawn/3.0/00000.safetensors  features of the images of a chunk at guidance 3
OUT/images/3.0/00000/            the images themselves with --keep-images, an MDS shard
OUT/samples/3.0/000017.png       the first images, for the page
OUT/evaluation.json              the result, when all parts are there
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffusion.common.files import read_json
from diffusion.common.storage import LocalFolder
from diffusion.common.text import brief, differences
from diffusion.contracts.errors import InputError
from diffusion.evaluation.drawing import chunks_of
from diffusion.evaluation.features import FeatureParts
from diffusion.evaluation.models import ASKED, EXPORTED, DrawingModel
from diffusion.evaluation.prompts import Prompt
from diffusion.evaluation.protocol import Protocol

BEGUN = 'evaluating.json'
NUM_SHOWN = 64  # images of each guidance scale that are kept for the page
FLOOR = 'base'  # folder in OUT: of a subject, the same of the model before fine-tuning
BEFORE_BEGUN = (ASKED, EXPORTED, FLOOR)  # may be in OUT before the protocol is known


@dataclass(frozen=True)
class DrawingJob:
    """What all processes of an evaluation have to agree on.

    Args:
        out: folder on a disk that all of them share.
        model: what draws.
        prompts: what is drawn, at each guidance scale.
        keep_images: all images become an MDS dataset.
    """

    out: Path
    protocol: Protocol
    model: DrawingModel
    prompts: Sequence[Prompt]
    keep_images: bool = False
    chunks: list[list[Prompt]] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, 'chunks', chunks_of(self.prompts, self.protocol.chunk))

    def begin(self) -> None:
        """Take OUT, or find that it was begun with the same protocol and model.

        Raises:
            InputError: it was begun with others; the message names what differs.
        """
        content = json.dumps(self.settings, indent=1).encode()
        if LocalFolder(str(self.out)).swap(BEGUN, None, content):
            return
        then = read_json(self.out / BEGUN, dict[str, Any], InputError, 'name another OUT')
        rows = differences({'then': then, 'now': json.loads(content)})
        differing = '; '.join(f'{field.removeprefix("protocol.")} {brief(old)}, now {brief(new)}' for field, old, new in rows)
        raise InputError(f'{self.out}: was begun with {differing}; name another OUT, or repeat the earlier options')

    @property
    def settings(self) -> dict[str, Any]:
        protocol = {name: value for name, value in self.protocol.to_json().items() if name != 'preset'}
        return {'protocol': protocol, 'model': self.model.sha256, 'keep_images': self.keep_images}

    def drawn(self, guidance: float) -> FeatureParts:
        """Features of the images of one guidance scale."""
        return FeatureParts(self.out / 'drawn' / str(guidance), range(len(self.chunks)))

    def images(self, guidance: float) -> Path:
        """The dataset of the images of one guidance scale."""
        return self.out / 'images' / str(guidance)

    def samples(self, guidance: float) -> Path:
        """The images for the page."""
        return self.out / 'samples' / str(guidance)

    def chunk_size(self, number: int) -> int:
        """Images in a chunk without its padding."""
        return min(self.protocol.chunk, len(self.prompts) - number * self.protocol.chunk)

    def work(self) -> list[tuple[float, int]]:
        """(guidance, chunk) of all parts, in the order in which they are drawn."""
        return [(guidance, number) for guidance in self.protocol.guidance for number in range(len(self.chunks))]

    def missing(self) -> list[tuple[float, int]]:
        """Those of them that are not there."""
        return [(guidance, number) for guidance in self.protocol.guidance for number in self.drawn(guidance).missing()]


def refuse_foreign(out: Path) -> None:
    """Raises InputError: OUT holds something else than an evaluation."""
    if (out / BEGUN).exists() or not out.exists():
        return
    foreign = [name for name in LocalFolder(str(out)).files() if name.split('/')[0] not in BEFORE_BEGUN] if out.is_dir() else [out.name]
    if foreign and not (out / BEGUN).exists():  # asked again: another process may have begun just now
        raise InputError(f'{out}: holds something else already ({", ".join(foreign[:3])}); name a new or empty folder')


def sample_name(prompt: Prompt) -> str:
    """The file of an image for the page."""
    return f'{prompt.id:06d}.png'
