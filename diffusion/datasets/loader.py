"""A recipe's data section to DataLoaders, and samples to a batch: captions become tokens, some captions become empty, here and nowhere else."""

import io
import logging
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from composer.utils import dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info

from diffusion.common.collective import on_first_rank
from diffusion.common.processes import shield_worker
from diffusion.common.storage import open_folder
from diffusion.contracts.batch import Batch, Sample, StoredImages
from diffusion.contracts.errors import ManifestError
from diffusion.contracts.manifest import EMPTY_CAPTIONS, LOSS_MAP
from diffusion.datasets.keyed_random import Draw, uniform
from diffusion.datasets.mds import BadSamples, CaptionedMDS, ImageCaptionMDS, LatentsCaptionMDS, RandomCropMDS
from diffusion.datasets.shards import HASH, pick
from diffusion.datasets.sources import StreamSource, epoch_of, is_prepared, located, read_sources, shares, store_text, summary, too_few, where
from diffusion.datasets.verified import VerifiedStream
from diffusion.datasets.watched import WatchedLoader
from diffusion.recipe.autoencoder import AnyRecipe, AutoencoderRecipe
from diffusion.recipe.schema import Stream

BAD_SAMPLES = 'bad_samples.jsonl'
SYNTHETIC_BLOCKS = 4  # along a side
ALIGNMENT = 64  # bytes: a cache line, and no number of ours is longer


class SyntheticLatents(Dataset):
    """Moments of the shape and scale that a VAE gives; sample i is always the same.

    Args:
        num_samples: length of an epoch.
        shape: (2 * latent channels, h, w) of the moments.
        std: of the unscaled latents, 1 / scaling factor.
        size_px: (height, width) of the images that they are said to be of, whole and not resized.
    """

    def __init__(self, num_samples: int, shape: tuple[int, int, int], std: float, size_px: tuple[int, int]):
        self.num_samples, self.shape, self.std, self.size_px = num_samples, shape, std, size_px

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        epoch, index = key
        return {'sample_key': (epoch, index, 0), **self.content(index, torch.Generator().manual_seed(index))}  # type: ignore[typeddict-item]

    def content(self, index: int, generator: torch.Generator) -> dict[str, Any]:
        """Everything of a sample but its key."""
        moments = torch.randn(self.shape, generator=generator)
        moments[: len(moments) // 2] *= self.std  # mean
        moments[len(moments) // 2 :] = -10.0  # log variance: a VAE is almost certain
        geometry = {'size': np.array(self.size_px, np.int32), 'crop': np.zeros(2, np.int32)}
        return {'moments': moments.half().numpy(), **geometry, 'captions': [(f'synthetic caption {index}', 1.0)]}

    def view(self, sample_id: int, occurrence: int, epoch: int | None = None) -> Sample:
        """The same sample, as CaptionedMDS gives it."""
        return self[0, sample_id]


class SyntheticImages(SyntheticLatents):
    """Squares of random blocks of colour, which something can be learned from; sample i is always the same."""

    def __init__(self, num_samples: int, side_px: int):
        super().__init__(num_samples, (3, side_px, side_px), 0.0, (side_px, side_px))

    def content(self, index: int, generator: torch.Generator) -> dict[str, Any]:
        blocks = torch.randint(0, 256, (3, SYNTHETIC_BLOCKS, SYNTHETIC_BLOCKS), dtype=torch.uint8, generator=generator)
        place = torch.arange(self.shape[-1]) * SYNTHETIC_BLOCKS // self.shape[-1]
        return {'images': blocks[:, place][:, :, place], 'captions': [('', 1.0)]}


class EpochSampler(DistributedSampler):
    """Indices with their epoch, which a map-style dataset cannot know by itself."""

    def __iter__(self) -> Iterator[tuple[int, int]]:  # type: ignore[override]
        return ((self.epoch, index) for index in super().__iter__())


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
    masked: bool = False
    """A stream has masks: each batch has a map of its loss, 1 everywhere for samples of other streams."""

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        sample_key = torch.from_numpy(np.array([sample['sample_key'] for sample in samples], np.int64))
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
            if self.masked:
                everywhere = np.ones(samples[0]['moments'].shape[1:], np.float16)
                batch['loss_map'] = stacked([sample.get('loss_map', everywhere) for sample in samples])
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
        return batch if get_worker_info() is None else in_one_storage(batch)

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


def in_one_storage(batch: Batch) -> Batch:
    """Return the batch with its tensors as views of one storage: a loader's process hands over each as a file, at 0.3 ms of CPU time."""
    found: dict[str, Any] = dict(batch)
    groups = [found, *(value for value in found.values() if isinstance(value, dict))]
    tensors = [(group, name, value) for group in groups for name, value in group.items() if isinstance(value, Tensor)]
    places = list(accumulate((-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for _, _, tensor in tensors), initial=0))
    storage = torch.empty(places[-1], dtype=torch.uint8)
    for (group, name, tensor), place in zip(tensors, places, strict=False):
        group[name] = storage[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return found  # type: ignore[return-value]


class LoaderEncoders(Protocol):
    """The frozen encoders (encoders/frozen.py, a room above)."""

    vae: Any
    text: Any


def train_loader(recipe: AnyRecipe, encoders: LoaderEncoders | None, geometry: bool = False) -> WatchedLoader:
    """This rank's share of the training data, shuffled, with caption dropout; incomplete last batches are left out.

    Args:
        encoders: None where images alone are trained on, without captions.
        geometry: the network's family reads size and crop of an image.

    Raises:
        ManifestError: a dataset has no manifest, or contradicts the recipe, or is smaller than one batch.
        DataError: its index.json is missing or damaged, or a shard that is the only copy is.
        StorageRefusal, StorageError: storage refuses, or does not answer.
    """
    loader = _loader(recipe, encoders, recipe.batch.global_size // dist.get_world_size(), geometry, training=True)
    if len(loader) == 0:
        raise ManifestError(too_few(recipe, getattr(loader.dataset, 'epoch_size', recipe.data.synthetic_samples)))
    return loader


def eval_loader(recipe: AnyRecipe, encoders: LoaderEncoders | None, batch_size: int, geometry: bool = False) -> WatchedLoader | None:
    """All of the evaluation data in a fixed order with every caption, or None if the recipe does not evaluate."""
    if recipe.eval.every is None:
        return None
    return _loader(recipe, encoders, batch_size, geometry, training=False)


def stores_text(loader: DataLoader) -> bool:
    """Whether the batches hold encoded text, so that training needs no text encoder."""
    return bool(getattr(loader.collate_fn, 'empty_captions', None))


def dataset_identities(loader: DataLoader) -> dict[str, str]:
    """The SHA-256 of each stream's dataset by name; a run that resumes must find the same. Synthetic data have none."""
    return dict(getattr(loader.dataset, 'identities', {}))


def _loader(recipe: AnyRecipe, encoders: LoaderEncoders | None, batch_size: int, geometry: bool, training: bool) -> WatchedLoader:
    data = recipe.data
    dataset: Any
    if data.kind == 'synthetic':
        dataset, sampler, empty_captions, masked = *_synthetic(recipe, encoders, batch_size, training), None, False
    else:
        section = 'data' if training else 'eval'
        streams, vae_sha256 = located(recipe, section), encoders.vae.sha256 if encoders else None
        sources = _read_on_first_rank(lambda: read_sources(recipe, f'{section}.streams', streams, vae_sha256, geometry))
        if data.aspect_buckets:
            sources = _whole_batches(sources, streams, batch_size * dist.get_world_size(), training)
        empty_captions = _empty_captions(sources, encoders) if encoders else None
        masked = any(LOSS_MAP in source.manifest.columns for source in sources.values())
        dataset, sampler = _streaming(recipe, sources, encoders, batch_size, training), None
    collate = Collate(
        encoders.text.tokenize if encoders else None,
        seed=recipe.seed,
        caption_dropout=data.caption_dropout if training else 0.0,
        flip=data.flip and training,
        vary_captions=training,
        empty_captions=empty_captions,
        downsampling=encoders.vae.downsampling if encoders and geometry else None,
        masked=masked,
    )
    return WatchedLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=collate,
        drop_last=training,
        num_workers=data.workers,
        persistent_workers=data.workers > 0,
        worker_init_fn=shield_worker,
        prefetch_factor=2 if data.workers else None,
        pin_memory=torch.cuda.is_available() and data.encoders is None,  # images that go elsewhere are copied anyway
        timeout=data.timeout_sec if data.workers else 0,  # without workers the waits have ends of their own
    )


def _synthetic(recipe: AnyRecipe, encoders: LoaderEncoders | None, batch_size: int, training: bool) -> tuple[Any, Any]:
    resolution = recipe.data.resolution
    count = recipe.data.synthetic_samples if training else batch_size * dist.get_world_size()
    if encoders is None:
        dataset: Any = SyntheticImages(count, resolution)
    else:
        side = resolution // encoders.vae.downsampling
        dataset = SyntheticLatents(count, (2 * encoders.vae.latent_channels, side, side), 1 / encoders.vae.scaling_factor, (resolution,) * 2)
    shuffle = recipe.data.shuffle and training
    return dataset, EpochSampler(
        dataset, num_replicas=dist.get_world_size(), rank=dist.get_global_rank(), shuffle=shuffle, seed=recipe.seed, drop_last=training
    )


def _whole_batches(sources: Mapping[str, StreamSource], streams: Mapping[str, Stream], global_size: int, training: bool) -> dict[str, StreamSource]:
    """The buckets that an epoch takes samples from; evaluation takes all, training says what it leaves out."""
    sizes = {name: {bucket: source.manifest.num_samples for bucket, source in sources.items() if source.dataset == name} for name in streams}
    taken = shares(sizes, streams, global_size, training)
    if training and dist.get_global_rank() == 0:
        print(summary(taken, global_size), file=sys.stderr, flush=True)
    return {bucket: replace(source, choose=taken[bucket].chosen) for bucket, source in sources.items() if taken[bucket].chosen}


def _streaming(
    recipe: AnyRecipe, sources: Mapping[str, StreamSource], encoders: LoaderEncoders | None, batch_size: int, training: bool
) -> CaptionedMDS:
    data, global_size, use = recipe.data, batch_size * dist.get_world_size(), 'train' if training else 'eval'
    # Streaming's own choice of a cache folder works once only: it refuses the folder that an earlier start left. So each dataset and each machine
    # has its own here.
    caches = Path(recipe.run_folder) / 'cache' / f'node{dist.get_node_rank()}'
    local = {name: source.stream.local or str(caches / f'{use}-{name.replace("/", "-")}-{source.identity[:12]}') for name, source in sources.items()}
    if dist.get_local_rank() == 0:
        for folder in caches.glob(f'{use}-*'):
            if str(folder) not in local.values():
                print(f'{folder}: the cache of data that are not used any more; removed', file=sys.stderr, flush=True)
                shutil.rmtree(folder, ignore_errors=True)
    streams = [
        VerifiedStream(
            name=name,
            index=source.index,
            verify=data.verify,
            patience_sec=data.timeout_sec / 3,  # once ahead of time and once when it is due, and then there is time left to say so
            remote=source.stream.remote,
            local=local[name],
            proportion=source.stream.proportion,
            choose=source.choose,
            validate_hash=HASH,
        )
        for name, source in sources.items()
    ]
    weights = [source.stream.loss_weight for source in sources.values()]
    arguments: dict[str, Any] = {
        'streams': streams,
        'identities': {name: source.identity for name, source in sources.items()},
        'bad_samples': BadSamples(Path(recipe.run_folder) / BAD_SAMPLES, data.max_bad_samples),
        'timeout_sec': data.timeout_sec,
        'loss_weights': weights if training and any(weight != 1 for weight in weights) else None,
        'whole_batches': training,
        'batch_size': batch_size,
        'shuffle': data.shuffle and training,
        'shuffle_algo': 'py1e',
        # Fixed in the recipe, so that the global batches stay the same on any number of GPUs and workers.
        'shuffle_seed': recipe.seed,
        'shuffle_block_size': data.shuffle_block_size,
        # A part that is no whole number of batches would be filled up with samples that the epoch has already.
        'num_canonical_nodes': math.gcd(data.canonical_nodes, global_size),
        'predownload': data.predownload,
        'cache_limit': data.cache_limit,
        'download_timeout': min(60, data.timeout_sec / 10),  # without a byte
    }
    if data.aspect_buckets:  # whole batches of one bucket each, `choose` being whole batches
        # Streaming takes padding, which evens out the loader's workers, for samples that it drops, and warns of it in each epoch.
        logging.getLogger('streaming.base.batching.per_stream').setLevel(logging.ERROR)
        chosen = [source.choose or 0 for source in sources.values()]
        arguments |= {
            'batching_method': 'per_stream',
            # Shared out among the buckets by size, and py1e fails on a share below 1.
            'shuffle_block_size': max(data.shuffle_block_size, math.ceil(1.01 * sum(chosen) / min(chosen))),
            # Which samples an epoch takes is drawn by a loop in Python, 256 at a time: by single ones LAION would take minutes.
            'sampling_granularity': 256,
        }
    elif training:
        num_samples = sum(source.manifest.num_samples for source in sources.values())
        epoch = epoch_of(num_samples, [source.stream for source in sources.values()], global_size)
        arguments['epoch_size'] = epoch if epoch > num_samples else None
    square = (data.resolution, data.resolution)
    sizes_px = [source.manifest.bucket_px or square if data.aspect_buckets else square for source in sources.values()]
    if data.kind == 'latents':
        assert encoders is not None  # whose VAE made them
        channels, downsampling = 2 * encoders.vae.latent_channels, encoders.vae.downsampling
        return LatentsCaptionMDS(shapes=[(channels, height // downsampling, width // downsampling) for width, height in sizes_px], **arguments)
    if isinstance(recipe, AutoencoderRecipe) and training and recipe.data.crop == 'random':
        return RandomCropMDS(seed=recipe.seed, sizes_px=sizes_px, **arguments)
    return ImageCaptionMDS(sizes_px=sizes_px, decode=data.encoders is None or data.encoders.ray.send == 'pixels', **arguments)


def _empty_captions(sources: Mapping[str, StreamSource], encoders: LoaderEncoders) -> dict[str, Tensor] | None:
    """Float16 encoding of the empty caption by column, if every stream stores embeddings.

    Raises:
        ManifestError: a stream's embeddings were made by another text encoder than the recipe's.
    """
    if not store_text(sources):
        return None
    ours = encoders.text.tokenizer_digests
    for name, source in sources.items():
        if source.manifest.text_encoder.get('tokenizers', ours) != ours:  # datasets of earlier versions do not say
            raise ManifestError(
                f'stream {name} ({where(source.stream)}): manifest text_encoder.tokenizers are not those of model.encoders; use the tokenizers '
                'of the dataset, or encode again with --text-embeddings'
            )
    if all(is_prepared(source.stream) for source in sources.values()):  # which compares the encoders' digests: none is read for it here
        first = next(iter(sources.values()))
        files = {column: file for column, file in EMPTY_CAPTIONS.items() if column in first.manifest.columns}
        return _read_on_first_rank(lambda: {column: _read_array(where(first.stream), file) for column, file in files.items()})
    return _read_on_first_rank(partial(_checked_empty_captions, sources, encoders))


def _checked_empty_captions(sources: Mapping[str, StreamSource], encoders: LoaderEncoders) -> dict[str, Tensor]:
    """The recipe's encoding, if the datasets' is the same; one rank looks, the others need no text encoder for it."""
    empty = encoders.text.encode(encoders.text.tokenize(['']))
    ours = {column: encoded[0].cpu() for column, encoded in empty.to_store().items()}
    everything = slice(None)
    # What is at padding is no caption's, where the network masks it.
    seen = {'text_embeddings': everything if empty.mask is None else empty.mask[0].cpu()}
    for name, source in sources.items():
        folder = where(source.stream)
        for column, encoded in ours.items():
            file = EMPTY_CAPTIONS[column]
            theirs = _read_array(folder, file) if column in source.manifest.columns else None
            tokens = seen.get(column, everything)
            if theirs is None or theirs.shape != encoded.shape or not _allclose(theirs[tokens], encoded[tokens]):
                raise ManifestError(
                    f'stream {name} ({folder}): manifest text_encoder is not that of the recipe: {file} differs from the '
                    'empty caption as model.encoders encodes it by more than the 5 % that precision may cost; use the encoders of the dataset, or '
                    'encode again with --text-embeddings --network NAME, the network of this recipe'
                )
    return ours


def _read_array(folder: str, file: str) -> Tensor:
    return torch.from_numpy(np.load(io.BytesIO(open_folder(folder).read(file)), allow_pickle=False))


def _allclose(theirs: Tensor, ours: Tensor) -> bool:
    return bool(torch.linalg.vector_norm((theirs - ours).float()) <= 0.05 * torch.linalg.vector_norm(ours.float()))


def _read_on_first_rank(read: Callable[[], Any]) -> Any:
    """Return what rank 0 reads, or raise its error on every rank, in words of the data."""
    try:
        return on_first_rank(read)
    except FileNotFoundError as error:
        raise ManifestError(str(error)) from error
