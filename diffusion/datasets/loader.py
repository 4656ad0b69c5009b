"""A recipe's data section to DataLoaders."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from composer.utils import dist
from streaming import Stream as MDSStream
from torch import Tensor
from torch.utils.data import DataLoader

from diffusion.datasets.collate import Collate
from diffusion.datasets.manifest import EMPTY_CAPTION_NAME, Manifest, ManifestError, contradictions
from diffusion.datasets.mds import ImageCaptionMDS, LatentsCaptionMDS
from diffusion.datasets.synthetic import EpochSampler, SyntheticLatents
from diffusion.models.encoders import FrozenEncoders
from diffusion.recipe.schema import Recipe, Stream
from diffusion.storage import StorageError, open_folder


def train_loader(recipe: Recipe, encoders: FrozenEncoders) -> DataLoader:
    """This rank's share of the training data, shuffled, with caption dropout; incomplete last batches are left out.

    Raises:
        ManifestError: a data set has no manifest, or contradicts the recipe, or is smaller than one batch.
    """
    data = recipe.data
    loader = _loader(recipe, encoders, data.streams, batch_size=recipe.batch.global_size // dist.get_world_size(), training=True)
    if len(loader) == 0:
        raise ManifestError(f'the training data holds fewer samples than batch.global_size {recipe.batch.global_size}; lower it')
    return loader


def eval_loader(recipe: Recipe, encoders: FrozenEncoders, batch_size: int) -> DataLoader | None:
    """All of the evaluation data in a fixed order with every caption, or None if the recipe does not evaluate."""
    if recipe.eval.every is None:
        return None
    return _loader(recipe, encoders, recipe.eval.streams, batch_size, training=False)


def _loader(recipe: Recipe, encoders: FrozenEncoders, streams: Mapping[str, Stream | None], batch_size: int, training: bool) -> DataLoader:
    data = recipe.data
    if data.kind == 'synthetic':
        dataset, sampler, empty_embedding = *_synthetic(recipe, encoders, batch_size, training), None
    else:
        named = {name: stream for name, stream in streams.items() if stream is not None}
        manifests = {name: _checked(name, stream, recipe, encoders) for name, stream in named.items()}
        empty_embedding = _empty_embedding(named, manifests, encoders)
        dataset, sampler = _streaming(recipe, named, manifests, batch_size, training), None
    collate = Collate(
        encoders.tokenize,
        seed=recipe.seed,
        caption_dropout=data.caption_dropout if training else 0.0,
        flip=data.flip and training,
        vary_captions=training,
        empty_embedding=empty_embedding,
    )
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=collate,
        drop_last=training,
        num_workers=data.workers,
        persistent_workers=data.workers > 0,
        prefetch_factor=2 if data.workers else None,
        pin_memory=encoders.device.type == 'cuda',
    )


def _synthetic(recipe: Recipe, encoders: FrozenEncoders, batch_size: int, training: bool) -> tuple[Any, Any]:
    side = recipe.data.resolution // encoders.downsampling
    count = recipe.data.synthetic_samples if training else batch_size * dist.get_world_size()
    dataset = SyntheticLatents(count, (2 * encoders.latent_channels, side, side), std=1 / encoders.scaling_factor)
    shuffle = recipe.data.shuffle and training
    return dataset, EpochSampler(
        dataset, num_replicas=dist.get_world_size(), rank=dist.get_global_rank(), shuffle=shuffle, seed=recipe.seed, drop_last=training
    )


def _streaming(recipe: Recipe, streams: Mapping[str, Stream], manifests: Mapping[str, Manifest], batch_size: int, training: bool) -> Any:
    data = recipe.data
    arguments: dict[str, Any] = {
        'streams': [_stream(name, stream, manifests[name], recipe, training) for name, stream in streams.items()],
        'batch_size': batch_size,
        'shuffle': data.shuffle and training,
        'shuffle_algo': 'py1e',
        # Fixed in the recipe, so that the global batches stay the same on any number of GPUs and workers.
        'shuffle_seed': recipe.seed,
        'shuffle_block_size': data.shuffle_block_size,
        'num_canonical_nodes': data.canonical_nodes,
        'predownload': data.predownload,
        'cache_limit': data.cache_limit,
        'download_retry': 8,  # the default 2 loses an epoch to a short storm of 503s
        'download_timeout': 300,
    }
    if data.kind == 'images':
        return ImageCaptionMDS(resolution=data.resolution, **arguments)
    return LatentsCaptionMDS(**arguments)


def _checked(name: str, stream: Stream, recipe: Recipe, encoders: FrozenEncoders) -> Manifest:
    manifest: Manifest = _once(lambda: Manifest.read(stream.remote or stream.local or ''))
    errors = contradictions(manifest, recipe, encoders.vae_sha256)
    if errors:
        raise ManifestError('\n'.join(f'stream {name} ({stream.remote or stream.local}): {error}' for error in errors))
    return manifest


def _stream(name: str, stream: Stream, manifest: Manifest, recipe: Recipe, training: bool) -> MDSStream:
    # Streaming's own choice of a cache folder works once only: it refuses the folder that an earlier start left. It also trusts
    # whatever it finds in a cache, so each data set and each machine has its own.
    identity = hashlib.sha256(f'{stream.remote} {manifest}'.encode()).hexdigest()[:12]
    cache = f'{recipe.run_folder}/cache/node{dist.get_node_rank()}/{"train" if training else "eval"}-{name}-{identity}'
    return MDSStream(
        remote=stream.remote,
        local=stream.local or cache,
        proportion=stream.proportion,
        validate_hash=manifest.hashes[0] if manifest.hashes else None,
    )


def _empty_embedding(streams: Mapping[str, Stream], manifests: Mapping[str, Manifest], encoders: FrozenEncoders) -> Tensor | None:
    """The embedding that a dropped caption gets, if every stream stores embeddings; (L, width) float16.

    Raises:
        ManifestError: a stream's embeddings were made by another text encoder than the recipe's.
    """
    without = [name for name, manifest in manifests.items() if not manifest.text_encoder]
    if len(without) == len(manifests):
        return None
    if without:
        raise ManifestError(f'streams {", ".join(without)} store no text embeddings and the others do; encode all of them alike')
    ours = encoders.encode_text(encoders.tokenize(['']))[0].half().cpu()
    for name, stream in streams.items():
        where = stream.remote or stream.local or ''
        content = _once(partial(open_folder(where).read, EMPTY_CAPTION_NAME))
        theirs = torch.from_numpy(np.load(io.BytesIO(content), allow_pickle=False))
        if theirs.shape != ours.shape or torch.linalg.vector_norm((theirs - ours).float()) > 0.05 * torch.linalg.vector_norm(ours.float()):
            raise ManifestError(
                f'stream {name} ({where}): manifest text_encoder is not that of the recipe: {EMPTY_CAPTION_NAME} differs from the '
                'empty caption as model.encoders encodes it by more than the 5 % that precision may cost; use the encoders of the data set'
            )
    return ours


def _once(read: Callable[[], Any]) -> Any:
    """What rank 0 reads, or its error on every rank: no rank may go on alone."""
    answer: list[Any] = [None]
    if dist.get_global_rank() == 0:
        try:
            answer = [read()]
        except (ManifestError, StorageError, FileNotFoundError) as error:
            answer = [ManifestError(str(error))]
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], ManifestError):
        raise answer[0]
    return answer[0]
