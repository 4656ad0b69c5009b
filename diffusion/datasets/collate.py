"""Samples to a batch: captions become tokens, some captions become empty. Caption dropout happens here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from diffusion.contracts.batch import Batch, Sample
from diffusion.datasets.captions import pick
from diffusion.datasets.keyed_random import Draw, uniform


class Collate:
    """Args:
    tokenize: captions -> token ids (B, L) int64 by text encoder, and masks.
    seed: keys the draws, with each sample's key.
    caption_dropout: share of captions replaced by the empty one; 0 for evaluation.
    flip: mirror half of the images.
    vary_captions: pick one of several captions by its weight; otherwise the first, as evaluation does.
    empty_embedding: (L, width) float16 of the empty caption, for datasets that store text embeddings.
    """

    def __init__(
        self,
        tokenize: Callable[[Sequence[str]], dict[str, Tensor]],
        seed: int,
        caption_dropout: float,
        flip: bool = False,
        vary_captions: bool = False,
        empty_embedding: Tensor | None = None,
    ):
        self.tokenize = tokenize
        self.seed = seed
        self.caption_dropout = caption_dropout
        self.flip = flip
        self.vary_captions = vary_captions
        self.empty_embedding = empty_embedding

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        sample_key = torch.tensor([sample['sample_key'] for sample in samples], dtype=torch.int64)
        # One draw a sample: with several text encoders all of them would drop the caption together.
        dropped = uniform(self.seed, sample_key, Draw.CAPTION_DROPOUT, 1)[:, 0] <= self.caption_dropout
        kept = self._captions(samples, sample_key)
        captions = ['' if drop else caption for caption, drop in zip(kept, dropped.tolist(), strict=True)]
        batch: Batch = {'tokens': self.tokenize(captions), 'sample_key': sample_key}
        if 'moments' in samples[0]:
            batch['moments'] = stacked([sample['moments'] for sample in samples])
            if self.empty_embedding is not None:
                embeddings = stacked([sample['text_embeddings'] for sample in samples])
                batch['text_embeddings'] = torch.where(dropped.view(-1, 1, 1), self.empty_embedding, embeddings)
        else:
            images = torch.stack([sample['images'] for sample in samples])
            if self.flip:
                mirrored = uniform(self.seed, sample_key, Draw.FLIP, 1)[:, 0] <= 0.5
                images = torch.where(mirrored.view(-1, 1, 1, 1), images.flip(-1), images)
            batch['images'] = images
        return batch

    def _captions(self, samples: Sequence[Sample], sample_key: Tensor) -> list[str]:
        if not self.vary_captions or all(len(sample['captions']) == 1 for sample in samples):
            return [sample['captions'][0][0] for sample in samples]
        draws = uniform(self.seed, sample_key, Draw.CAPTION, 1)[:, 0].tolist()
        return [pick(sample['captions'], draw) for sample, draw in zip(samples, draws, strict=True)]


def stacked(arrays: Sequence[np.ndarray]) -> Tensor:
    """(B, ...) float16 of B equal shapes. By way of bytes: an MDS row begins its arrays anywhere, and NumPy copies unaligned numbers one by one."""
    return torch.frombuffer(bytearray().join(array.data for array in arrays), dtype=torch.float16).view(len(arrays), *arrays[0].shape)
