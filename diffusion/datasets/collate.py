"""Samples to a batch: captions become tokens, some captions become empty. Caption dropout happens here and nowhere else."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from diffusion.contracts.batch import Batch, Sample, StoredImages
from diffusion.datasets.keyed_random import Draw, uniform
from diffusion.datasets.shards import pick


@dataclass
class Collate:
    """A batch of samples; everything random is keyed by `seed` and each sample's key."""

    tokenize: Callable[[Sequence[str]], dict[str, Tensor]] | None
    """Captions -> token ids (B, L) int64 by text encoder, and masks; None leaves the captions out."""
    seed: int
    caption_dropout: float
    """Share of captions replaced by the empty one; 0 for evaluation."""
    flip: bool = False
    """Mirror half of the images."""
    vary_captions: bool = False
    """Pick one of several captions by its weight; otherwise the first, as evaluation does."""
    empty_captions: Mapping[str, Tensor] | None = None
    """Float16 encoding of the empty caption by its column, for datasets that store text embeddings."""
    downsampling: int | None = None
    """Pixels per latent along a side, of families that read the geometry of an image; None leaves it out."""

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        sample_key = torch.tensor([sample['sample_key'] for sample in samples], dtype=torch.int64)
        batch: Batch = {'sample_key': sample_key}
        # One draw a sample: with several text encoders all of them would drop the caption together.
        dropped = uniform(self.seed, sample_key, Draw.CAPTION_DROPOUT, 1)[:, 0] <= self.caption_dropout
        if self.tokenize is not None:
            kept = self._captions(samples, sample_key)
            batch['tokens'] = self.tokenize(['' if drop else caption for caption, drop in zip(kept, dropped.tolist(), strict=True)])
        if 'loss_weight' in samples[0]:
            batch['loss_weight'] = torch.tensor([sample['loss_weight'] for sample in samples], dtype=torch.float32)
        if 'moments' in samples[0]:
            batch['moments'] = stacked([sample['moments'] for sample in samples])
            for column, empty in (self.empty_captions or {}).items():
                stored = stacked([sample[column] for sample in samples])  # type: ignore[literal-required]
                batch[column] = torch.where(dropped.view(-1, *[1] * empty.ndim), empty, stored)  # type: ignore[literal-required]
        elif 'stored' in samples[0]:
            flips = self._mirrored(sample_key).tolist() if self.flip else [False] * len(samples)
            batch['stored'] = StoredImages([sample['stored'] for sample in samples], flips, *samples[0]['target_px'])
        else:
            images = torch.stack([sample['images'] for sample in samples])
            if self.flip:
                mirrored = self._mirrored(sample_key)
                images = torch.where(mirrored.view(-1, 1, 1, 1), images.flip(-1), images)
            batch['images'] = images
        if self.downsampling is not None:
            batch['geometry'] = self._geometry(samples, self.downsampling)
        return batch

    def _mirrored(self, sample_key: Tensor) -> Tensor:
        return uniform(self.seed, sample_key, Draw.FLIP, 1)[:, 0] <= 0.5

    def _geometry(self, samples: Sequence[Sample], downsampling: int) -> Tensor:
        """(B, 6) int32. A mirrored image keeps the left of its crop: crops are in the middle."""
        if 'moments' in samples[0]:
            target = [downsampling * side for side in samples[0]['moments'].shape[-2:]]
        elif 'stored' in samples[0]:
            target = list(samples[0]['target_px'][::-1])
        else:
            target = list(samples[0]['images'].shape[-2:])
        return torch.from_numpy(np.array([[*sample['size'], *sample['crop'], *target] for sample in samples], np.int32))

    def _captions(self, samples: Sequence[Sample], sample_key: Tensor) -> list[str]:
        if not self.vary_captions or all(len(sample['captions']) == 1 for sample in samples):
            return [sample['captions'][0][0] for sample in samples]
        draws = uniform(self.seed, sample_key, Draw.CAPTION, 1)[:, 0].tolist()
        return [pick(sample['captions'], draw) for sample, draw in zip(samples, draws, strict=True)]


def stacked(arrays: Sequence[np.ndarray]) -> Tensor:
    """(B, ...) float16 of B equal shapes. By way of bytes: an MDS row begins its arrays anywhere, and NumPy copies unaligned numbers one by one."""
    return torch.frombuffer(bytearray().join(array.data for array in arrays), dtype=torch.float16).view(len(arrays), *arrays[0].shape)
