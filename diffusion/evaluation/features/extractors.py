"""Feature networks by name: what turns images and captions into the features whose distances are reported.

A network is part of a number's meaning: its name, its resizing and its digest are in the protocol of every evaluation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from diffusion.contracts.errors import EncoderError, InputError
from diffusion.evaluation.features.drawn_shapes import ShapesLook
from diffusion.evaluation.features.networks import CLEAN, TF1, ClipEmbedder, Dino, Inception, OpenClip, RandomConv
from diffusion.evaluation.features.weights import WeightsSource


class Extractor(Protocol):
    """A frozen network: its name in EXTRACTORS, the digest of its weights, and the dimensions of its features by name."""

    name: str
    sha256: str
    features: Mapping[str, int]

    def images(self, images: Tensor) -> dict[str, Tensor]:
        """Return (B, D) float32 features of (B, 3, H, W) uint8 images, by the names in `features`.

        Raises:
            ValueError: images of another type or shape.
        """


@runtime_checkable
class TextExtractor(Extractor, Protocol):
    """An extractor that embeds captions in the space of its images."""

    def texts(self, captions: Sequence[str]) -> Tensor:
        """Return (B, D) float32 embeddings; a caption is cut to the tokens that the network reads."""


@dataclass(frozen=True)
class KnownExtractor:
    """A feature network that can be named.

    Attributes:
        features: names of what it returns.
        resize: what happens to an image of any size before it, for people.
        meaning: a line for people.
        network: class with `find` if `source` is not None, and without arguments otherwise.
        source: of its weights; None: it needs none.
        texts: whether it embeds captions.
        embeds: whether likeness of its features is likeness of images, so that any metric may take them.
    """

    features: tuple[str, ...]
    resize: str
    meaning: str
    network: Any
    source: WeightsSource | None = None
    texts: bool = False
    embeds: bool = True


def _openai(name: str, repository: str, size_px: int, size: str, meaning: str) -> KnownExtractor:
    """One of OpenAI's CLIP models, in the layout of transformers."""
    source = WeightsSource((repository,), hub=f'openai/{repository}', size=size)
    return KnownExtractor((name,), f'short side {size_px} px, {CLEAN}, centre cropped', meaning, ClipEmbedder, source, texts=True)


EXTRACTORS: dict[str, KnownExtractor] = {
    'inception': KnownExtractor(
        ('inception', 'inception-clean'),
        f'299 px: inception {TF1}; inception-clean {CLEAN}',
        "FID's network, pooled features, torch-fidelity's port of TensorFlow's of 2015",
        Inception,
        WeightsSource(
            ('weights-inception-2015-12-05-6726825d.pth', 'inception-2015-12-05.pth'),
            url='https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth',
            sha256='6726825d',
            size='95.7 MB',
        ),
    ),
    'clip-vit-l14': _openai('clip-vit-l14', 'clip-vit-large-patch14', 224, '1.7 GB', "OpenAI's CLIP ViT-L/14: CLIP score as NeMo's"),
    'clip-vit-l14-336': _openai('clip-vit-l14-336', 'clip-vit-large-patch14-336', 336, '1.7 GB', "OpenAI's CLIP ViT-L/14 at 336 px: CMMD's"),
    'clip-vit-b16': _openai('clip-vit-b16', 'clip-vit-base-patch16', 224, '0.6 GB', "OpenAI's CLIP ViT-B/16: mosaicml/diffusion's CLIP score"),
    'clip-vit-b32': _openai('clip-vit-b32', 'clip-vit-base-patch32', 224, '0.6 GB', "OpenAI's CLIP ViT-B/32"),
    'openclip-vit-h14': KnownExtractor(
        ('openclip-vit-h14',),
        f'short side 224 px, {CLEAN}, centre cropped',
        "LAION's CLIP ViT-H/14: MLPerf's, and the text encoder of Stable Diffusion 2, which it therefore favours",
        OpenClip,
        WeightsSource(
            ('CLIP-ViT-H-14-laion2B-s32B-b79K/open_clip_pytorch_model.bin', 'CLIP-ViT-H-14-laion2B-s32B-b79K/open_clip_model.safetensors'),
            hub='laion/CLIP-ViT-H-14-laion2B-s32B-b79K',
            size='3.9 GB',
        ),
        texts=True,
    ),
    'dino-vits16': KnownExtractor(
        ('dino-vits16',),
        f'short side 256 px, {CLEAN}, centre of 224 px',
        "DINO ViT-S/16: DreamBooth's measure of a subject",
        Dino,
        WeightsSource(('dino-vits16',), hub='facebook/dino-vits16', size='87 MB'),
    ),
    'random-conv': KnownExtractor(
        ('random-conv',), f'64 px, {CLEAN}', 'random convolutions made here: no published network, no FID of papers', RandomConv
    ),
    'shapes-look': KnownExtractor(
        ('shapes-look',),
        'none',
        'an analytic look at the shapes that data_prep.shapes draws: no network',
        ShapesLook,
        texts=True,
        embeds=False,
    ),
}
EMBEDDING = {name: known for name, known in EXTRACTORS.items() if known.embeds}
"""Networks that METRIC@NETWORK may name, and by which neighbours are looked for."""


def load_extractors(names: Sequence[str], weights: Path | None = None, device: torch.device | str = 'cpu', download: bool = False) -> list[Extractor]:
    """Return the networks of these names, in this order, on `device`.

    Args:
        weights: folder with files and folders of weights; what is not there is looked up in the caches of torch.hub and the Hub.
        download: get what is missing from the network, which never happens otherwise.

    Raises:
        InputError: unknown names.
        EncoderError: weights are missing (of all networks, with the commands to get them), are others than their digest says, or do not fit.
    """
    unknown = [name for name in names if name not in EXTRACTORS]
    if unknown:
        raise InputError(f'unknown feature networks {", ".join(unknown)}; known: {", ".join(EXTRACTORS)}')
    found, errors = list[Extractor](), list[str]()
    for name in names:
        try:
            known = EXTRACTORS[name]
            network = known.network.find(name, known.source, weights, download) if known.source else known.network()
            found.append(network.to(device))
        except EncoderError as error:
            errors.append(str(error))
    if errors:
        raise EncoderError('\n'.join(errors))
    return found


def in_batches(extractor: Extractor, images: Tensor, size: int) -> dict[str, Tensor]:
    """Compute features of (B, 3, H, W) uint8 `size` at a time, the last batch padded by its last image: the same whoever computes them."""
    found: list[dict[str, Tensor]] = []
    for batch in images.split(size):
        padded = torch.cat([batch, batch[-1:].expand(size - len(batch), -1, -1, -1)])
        found.append({name: value[: len(batch)].float().cpu() for name, value in extractor.images(padded).items()})
    return {name: torch.cat([one[name] for one in found]) for name in found[0]}
