"""What drawn images are compared with while training: captions and real images of the evaluation data, always the same ones."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from diffusion.common.files import replacing
from diffusion.contracts.batch import Sample
from diffusion.datasets.collate import stacked
from diffusion.encoders.frozen import FrozenEncoders
from diffusion.evaluation.features.extractors import Extractor

TOGETHER = 16  # real images that go through a feature network at once


class EvaluationDataset(Protocol):
    """The evaluation data (datasets/mds.py, datasets/synthetic.py)."""

    num_samples: int

    def view(self, sample_id: int, occurrence: int) -> Sample: ...


class HeldOut:
    """`count` evenly spaced samples of the evaluation data. Only the first rank reads them.

    Args:
        dataset: of the evaluation loader.
        encoders: their VAE goes there and back with all real images. What it loses is then in real and drawn images alike, and in no score; and runs
            on images are compared with the same as runs on their latents.
        folder: features of real images are kept here.
    """

    def __init__(self, dataset: EvaluationDataset, count: int, encoders: FrozenEncoders, folder: Path):
        self.dataset, self.encoders, self.folder = dataset, encoders, folder
        self.ids = [i * dataset.num_samples // count for i in range(count)]

    def captions(self) -> list[str]:
        """The first caption of each sample, as the evaluation loss takes it."""
        return [self.dataset.view(i, 0)['captions'][0][0] for i in self.ids]

    def images(self) -> Iterator[Tensor]:
        """(B, 3, H, W) uint8, on the device of the encoders."""
        for start in range(0, len(self.ids), TOGETHER):
            samples = [self.dataset.view(i, 0) for i in self.ids[start : start + TOGETHER]]
            if 'images' in samples[0]:
                images = torch.stack([sample['images'] for sample in samples]).to(self.encoders.device)
                moments = self.encoders.encode_images(images).half()  # as data_prep.encode stores them
            else:
                moments = stacked([sample['moments'] for sample in samples]).to(self.encoders.device)
            yield self.encoders.vae.decode_middle(moments)

    def features(self, extractor: Extractor) -> dict[str, Tensor]:
        """Features (N, D) float32 of the real images on the CPU, by name; computed once for a run."""
        path = self.folder / f'real-{extractor.name}-{self._digest(extractor)}.safetensors'
        if path.exists():
            return load_file(path)
        parts = [extractor.images(images) for images in self.images()]
        features = {name: torch.cat([part[name] for part in parts]).float().cpu().clone() for name in extractor.features}
        with replacing(path) as temporary:
            save_file(features, temporary)
        return features

    def _digest(self, extractor: Extractor) -> str:
        """Of all that the features depend on. Synthetic data, which have no identity, are a function of their number."""
        sample = self.dataset.view(self.ids[0], 0)
        shape = *sample['images' if 'images' in sample else 'moments'].shape, self.encoders.vae_sha256
        identities: Any = getattr(self.dataset, 'identities', None)
        return hashlib.sha256(json.dumps([extractor.sha256, identities, self.ids, shape]).encode()).hexdigest()[:16]


def repeated(prompts: Sequence[str], count: int) -> list[str]:
    """`count` prompts, which are each there as often as the others or once more."""
    return [prompts[i % len(prompts)] for i in range(count)]
