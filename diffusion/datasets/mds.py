"""Streaming datasets: an MDS sample becomes a Sample of the batch contract.

MDS columns (written by data_prep): `caption` str or also `captions` JSON, and `image` bytes with `original_height` and `original_width` int32 (kind
images) or `moments` float16 with `size` and `crop` int32 (kind latents), perhaps with `text_embeddings`, `pooled_embeddings`
and `loss_map` float16.
"""

import os
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diffusion.common.files import append_json_line, open_to_append, read_json_lines
from diffusion.common.processes import failpoint
from diffusion.common.text import print_message
from diffusion.contracts.batch import Sample
from diffusion.contracts.errors import DataError, DataUnavailable
from diffusion.contracts.manifest import EMPTY_CAPTIONS, LOSS_MAP
from diffusion.datasets.keyed_random import Draw, uniform
from diffusion.datasets.shards import captions_of
from diffusion.datasets.strict import StrictStreamingDataset
from diffusion.datasets.transforms import covered, crop_of, random_square


class BadSamples:
    """A list in the run folder that all ranks and loader processes share, restarts included.

    Args:
        path: of the list, a JSON object a line.
        most: different samples that it may hold.
    """

    def __init__(self, path: Path, most: int):
        self.path, self.most = path, most

    def add(self, stream: str, shard: str, sample: int, cause: str) -> None:
        """Note a sample, once however often it is met; raise DataError if there are more than `most`."""
        with open_to_append(self.path, shared=True) as file:
            known = list(read_json_lines(self.path))
            entry = {'stream': stream, 'shard': shard, 'sample': sample, 'cause': cause}
            if entry not in known:
                append_json_line(file, entry)
                os.fsync(file.fileno())
                known.append(entry)
        if len(known) > self.most:
            raise DataError(
                f'stream {stream}: sample {sample} of shard {shard} cannot be used: {cause}. It is one of {len(known)} such samples in {self.path}, '
                f'data.max_bad_samples is {self.most}; make the dataset again without it, or raise data.max_bad_samples to replace them by others'
            )


SampleKey = tuple[int, int, int]  # epoch, global id, occurrence in the epoch


class CaptionedMDS(StrictStreamingDataset):
    """Adds to each sample its key: the epoch, the sample's id, global over all streams, and its occurrence in the epoch.

    Args:
        bad_samples: where a sample that cannot be decoded is noted; the next one of its shard takes its place, under its key.
        identities: of the dataset of each stream, by its name.
        loss_weights: of the streams in their order; None where all are 1.
        streaming: what StrictStreamingDataset takes.
    """

    def __init__(self, *, bad_samples: BadSamples, identities: dict[str, str], loss_weights: Sequence[float] | None = None, **streaming: Any):
        super().__init__(**streaming)
        self.bad_samples, self.identities, self.loss_weights = bad_samples, identities, loss_weights

    def get_item(self, sample_id: int, retry: int = 7) -> Sample:
        return self.view(int(sample_id), 0)

    def view(self, sample_id: int, occurrence: int, epoch: int | None = None) -> Sample:
        failpoint('data.sample')
        if epoch is None:
            epoch = max(0, self.next_epoch - 1)  # `__iter__` has already moved next_epoch on
        shard_id, position = self.spanner[sample_id]
        weight = {} if self.loss_weights is None else {'loss_weight': self.loss_weights[self.stream_per_shard[shard_id]]}
        key = epoch, sample_id, occurrence
        return {'sample_key': key, **weight, **self._readable(shard_id, position, key)}  # type: ignore[typeddict-item]

    def _readable(self, shard_id: int, first: int, key: SampleKey) -> dict[str, Any]:
        """The sample or, if it is bad in a shard that is right, the next one that is not."""
        num_samples = len(self.shards[shard_id])
        for step in range(num_samples):
            position = (first + step) % num_samples
            try:
                return self._mended(shard_id, position, key)
            except (DataError, DataUnavailable, MemoryError):
                raise
            except OSError as error:
                raise DataUnavailable(
                    f'{self.called(shard_id)}: cannot be read: {error}; look at this disk, and run the same command again'
                ) from error
            except Exception as error:  # decoders raise what they like
                self.refuse(int(self.sample_offset_per_shard[shard_id]) + position, f'{type(error).__name__}: {error}')
                print_message(f'{self.called(shard_id)}: sample {position} is replaced by the next: {error}')
        raise DataError(f'{self.called(shard_id)}: none of its {num_samples} samples can be decoded; make the dataset again')

    def _mended(self, shard_id: int, position: int, key: SampleKey) -> dict[str, Any]:
        """The sample, read again if it was its shard that had gone bad since it was compared."""
        try:
            return self._decoded(shard_id, position, key)
        except (DataError, DataUnavailable, MemoryError):
            raise
        except Exception:
            self.doubt(shard_id)
            self.prepare_shard(shard_id)
            return self._decoded(shard_id, position, key)

    def _decoded(self, shard_id: int, position: int, key: SampleKey) -> dict[str, Any]:
        row = self.row(shard_id, position)
        return {'captions': captions_of(row), **self.content(int(self.stream_per_shard[shard_id]), row, key)}

    @abstractmethod
    def content(self, stream: int, row: dict[str, Any], key: SampleKey) -> dict[str, Any]:
        """The `images` or the `moments` of an MDS row.

        Args:
            stream: its number.
            key: of the sample whose place this one takes, on which all that is random depends.
        """

    def refuse(self, sample_id: int, cause: str) -> None:
        """Note a sample that cannot be decoded, here or elsewhere; raise DataError with its stream, shard and number if there are too many."""
        shard_id, position = self.spanner[sample_id]
        stream, shard = self.streams[self.stream_per_shard[shard_id]].name, self.shards[shard_id].raw_data.basename
        self.bad_samples.add(stream, shard, int(position), cause)


class ImageCaptionMDS(CaptionedMDS):
    """Images, decoded and brought to (width, height) `sizes_px` of their stream in the loader's workers; or, not to `decode`, as they are stored."""

    def __init__(self, *, sizes_px: Sequence[tuple[int, int]], decode: bool = True, **streaming: Any):
        super().__init__(**streaming)
        self.sizes_px, self.decode = sizes_px, decode

    def content(self, stream: int, row: dict[str, Any], key: SampleKey) -> dict[str, Any]:
        target = self.sizes_px[stream]
        if self.decode:
            pixels, crop = covered(row['image'], *target)
            images: dict[str, Any] = {'images': pixels}
        else:
            images, crop = {'stored': row['image'], 'target_px': target}, crop_of(row['image'], *target)
        size = {'size': np.array((row['original_height'], row['original_width']), np.int32)} if 'original_height' in row else {}
        return {**images, 'crop': np.array(crop, np.int32), **size}


class RandomCropMDS(ImageCaptionMDS):
    """Images without captions, each scaled to between the target and its own size and cut anywhere, drawn again each epoch by `seed`."""

    def __init__(self, *, seed: int, **streaming: Any):
        super().__init__(**streaming)
        self.seed = seed

    def content(self, stream: int, row: dict[str, Any], key: SampleKey) -> dict[str, Any]:
        (side, _) = self.sizes_px[stream]
        draws = uniform(self.seed, torch.tensor([key]), Draw.CROP, 3)[0].tolist()
        return {'images': random_square(row['image'], side, *draws)}


class LatentsCaptionMDS(CaptionedMDS):
    """VAE moments of the `shapes` of their stream, and perhaps text embeddings; the image itself is not there, so nothing is decoded."""

    def __init__(self, *, shapes: Sequence[tuple[int, int, int]], **streaming: Any):
        super().__init__(**streaming)
        self.shapes = shapes

    def content(self, stream: int, row: dict[str, Any], key: SampleKey) -> dict[str, Any]:
        expected = self.shapes[stream]
        if row['moments'].shape != expected:
            raise ValueError(f'moments have the shape {row["moments"].shape}, the manifest says {expected}')
        return {name: row[name] for name in ('moments', *EMPTY_CAPTIONS, 'size', 'crop', LOSS_MAP) if name in row}
