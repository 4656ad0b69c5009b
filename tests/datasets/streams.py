"""A small MDS dataset in several shards, ways to damage it, and its epoch through our classes and through Streaming's own."""

import atexit
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from streaming import MDSWriter, Stream, StreamingDataset
from streaming.base.constant import BARRIER_FILELOCK, CACHE_FILELOCK
from torch.utils.data import DataLoader

from diffusion.contracts.manifest import INDEX_NAME
from diffusion.datasets.strict import StrictStreamingDataset
from diffusion.datasets.verified import VerifiedStream
from diffusion.datasets.watched import WatchedLoader

NUM_SAMPLES, PER_SHARD, BATCH = 64, 8, 4


def write_data(folder: Path, hashes: list[str] = ['sha256'], seed: int = 0) -> Path:  # noqa: B006
    """NUM_SAMPLES of their number and 400 random bytes, in shards of PER_SHARD."""
    rng = np.random.default_rng(seed)
    with MDSWriter(out=str(folder), columns={'number': 'int', 'noise': 'bytes'}, hashes=hashes, size_limit=3700) as writer:
        for number in range(NUM_SAMPLES):
            writer.write({'number': number, 'noise': rng.bytes(400)})
    assert len(list(folder.glob('*.mds'))) == NUM_SAMPLES // PER_SHARD
    return folder


def flip(path: Path) -> None:
    """One bit of the last sample."""
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes(bytes(content))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def shard(folder: Path, number: int = 3) -> Path:
    return folder / f'shard.{number:05}.mds'


def edit_index(folder: Path, change) -> None:
    content = json.loads((folder / INDEX_NAME).read_text())
    change(content)
    (folder / INDEX_NAME).write_text(json.dumps(content))


def ours(remote: Path | str | None, local: Path, *, workers: int = 0, verify: str = 'hash', timeout_sec: float = 6, **more) -> WatchedLoader:
    """A loader of StrictStreamingDataset; the index is read as loader.py reads it, but of a folder only."""
    index = more.pop('index', None) or (Path(remote or local) / INDEX_NAME).read_bytes()
    stream = VerifiedStream(
        name='numbers', index=index, verify=verify, patience_sec=timeout_sec / 3, remote=None if remote is None else str(remote), local=str(local),
        validate_hash='sha256', download_timeout=1,
    )  # fmt: skip
    arguments = {'shuffle': True, 'shuffle_seed': 1, 'num_canonical_nodes': 2, 'predownload': 16} | more
    dataset = StrictStreamingDataset(streams=[stream], timeout_sec=timeout_sec, whole_batches=True, batch_size=BATCH, **arguments)
    timeout = timeout_sec if workers else 0
    return WatchedLoader(dataset, **common(workers), persistent_workers=workers > 0, timeout=timeout)


def stock(remote: Path | str | None, local: Path, *, workers: int = 0) -> DataLoader:
    """The same of Streaming's own classes, with hashes compared as it compares them."""
    streams = [Stream(remote=None if remote is None else str(remote), local=str(local), validate_hash='sha256', download_retry=2)]
    dataset = StreamingDataset(streams=streams, shuffle=True, shuffle_seed=1, num_canonical_nodes=2, batch_size=BATCH, predownload=16)
    _remove_locks_at_exit(dataset)
    return DataLoader(dataset, **common(workers))


def _remove_locks_at_exit(dataset: StreamingDataset) -> None:
    for name in (BARRIER_FILELOCK, CACHE_FILELOCK):
        atexit.register(Path(tempfile.gettempdir(), f'{dataset._shm_prefix_int:06}_{name}').unlink, missing_ok=True)


def common(workers: int) -> dict[str, Any]:
    context = 'fork' if workers else None  # also in a child of `forkserver`, as in training
    return {'batch_size': BATCH, 'num_workers': workers, 'collate_fn': list, 'multiprocessing_context': context}


def rows(loader: DataLoader) -> Iterator[dict]:
    return (row for batch in loader for row in batch)


def contents(loader: DataLoader) -> list[tuple[int, bytes]]:
    """An epoch's samples in the order of their numbers."""
    return sorted((row['number'], row['noise']) for row in rows(loader))


def use_tmpdir(folder: Path) -> None:
    """Where Streaming leaves lock files."""
    tempfile.tempdir = str(folder)


if __name__ == '__main__':  # ours|stock REMOTE LOCAL WORKERS: how many samples came, and when
    make = {'ours': ours, 'stock': stock}[sys.argv[1]]
    try:
        print('samples:', len(contents(make(sys.argv[2], Path(sys.argv[3]), workers=int(sys.argv[4])))))
    finally:
        print('over:', time.monotonic())
