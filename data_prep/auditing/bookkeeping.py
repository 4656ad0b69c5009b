"""Whether what a dataset says about itself agrees: manifests, index.json, failures.parquet, and the files that are there."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.auditing.samples import Problem
from diffusion.common.storage import Folder, Stat, open_folder, scratch_for
from diffusion.common.text import counted
from diffusion.contracts.errors import DataError, ManifestError
from diffusion.contracts.manifest import EMPTY_CAPTIONS, MANIFEST_NAME, Manifest
from diffusion.datasets.index import Disagreement, disagreements, disagreements_of_streams
from diffusion.datasets.shards import Shard, in_stream, list_shards

COUNTS = 'the books do not agree'
LOST = 'lost shard'


@dataclass
class Books:
    """The statements of a dataset about itself.

    Attributes:
        manifest: of the whole.
        streams: the manifest of each stream; a dataset that is one stream has the name ''.
        shards: of all streams that have an index.
        problems: what does not agree.
    """

    manifest: Manifest
    streams: dict[str, Manifest] = field(default_factory=dict)
    shards: list[Shard] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def wrong(self, where: str, detail: str) -> None:
        self.problems.append(Problem(COUNTS, where, detail))

    def add(self, stream: str, found: Sequence[Disagreement]) -> None:
        for one in found:
            self.wrong(in_stream(stream, one.where), one.detail)

    @property
    def num_samples(self) -> int:
        return sum(shard.num_samples for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)


def read_books(folder: Folder, files: Mapping[str, Stat]) -> Books:
    """Read and compare them; no shard is read.

    Args:
        files: that are in the folder.

    Raises:
        ManifestError: there is no manifest of the whole.
        StorageError: something could not be read.
    """
    books = Books(Manifest.read(folder.url))
    for stream in books.manifest.streams or ['']:
        try:
            _read_stream(folder, stream, books)
        except (DataError, ManifestError) as error:
            books.wrong(in_stream(stream, 'index.json'), str(error))
    if books.manifest.streams:
        books.add('', disagreements_of_streams(books.manifest, books.num_samples))
    _check_failures(folder, files, books)
    return books


def _read_stream(folder: Folder, stream: str, books: Books) -> None:
    manifest = Manifest.read(f'{folder.url}/{stream}') if stream else books.manifest
    shards = list_shards(folder, [stream])
    books.streams[stream] = manifest
    books.shards += shards
    here = open_folder(f'{folder.url}/{stream}') if stream else folder
    books.add(stream, disagreements(manifest, [shard.entry for shard in shards], here))
    if manifest.kind == 'latents':
        _check_latents(folder, stream, manifest, books)


def _check_latents(folder: Folder, stream: str, manifest: Manifest, books: Books) -> None:
    where, encoding = in_stream(stream, MANIFEST_NAME), manifest.columns['moments']['encoding'] if 'moments' in manifest.columns else ''
    width_px, height_px = manifest.encoded_px or (0, 0)
    width, height = (side // manifest.encoder.get('downsampling', 1) for side in (width_px, height_px))
    if not encoding.endswith(f',{height},{width}'):
        books.wrong(where, f'moments are {encoding or "not there"}, resolution {width_px} x {height_px} makes them {width} x {height}')
    for column in EMPTY_CAPTIONS.keys() & manifest.columns.keys():
        name = in_stream(stream, EMPTY_CAPTIONS[column])
        try:
            with scratch_for() as scratch:
                empty = np.load(folder.fetch(name, scratch))
        except FileNotFoundError:
            books.wrong(name, f'no such file; {column} need that of the empty caption')
        except ValueError as error:
            books.wrong(name, f'is not a NumPy array: {error}')
        else:
            shape = ','.join(map(str, empty.shape))
            if not manifest.columns[column]['encoding'].endswith(f':{shape}') or not np.isfinite(empty).all():
                books.wrong(name, f'is not finite, or its shape {shape} is not that of {column}')


def _check_failures(folder: Folder, files: Mapping[str, Stat], books: Books) -> None:
    """failures.parquet names every row that was dropped; read in pieces, since crawls lose rows by the million."""
    name, dropped = 'failures.parquet', Counter(books.manifest.dropped)
    if name not in files:
        if dropped.total():
            books.wrong(name, f'no such file; the manifest counts {counted(dropped.total(), "row")} as dropped')
        return
    found: Counter[str] = Counter()
    try:
        with scratch_for() as scratch, pq.ParquetFile(folder.fetch(name, scratch)) as table:
            for batch in table.iter_batches(columns=['reason']):
                found.update({entry['values']: entry['counts'] for entry in batch.column(0).value_counts().to_pylist()})
    except (pa.ArrowException, OSError, KeyError, IndexError) as error:
        books.wrong(name, f'cannot be read: {error}')
        return
    for reason in sorted(found.keys() | dropped.keys(), key=str):
        if found[reason] != dropped[reason]:
            books.wrong(name, f'has {counted(found[reason], "row")} with reason {reason!r}, the manifest counts {dropped[reason]}')


def lost_shards(folder: Folder, files: Mapping[str, Stat], shards: Sequence[Shard]) -> Iterator[tuple[int, str]]:
    """Number of each shard that is missing or has another size than index.json says, and which of the two."""
    for number, shard in enumerate(shards):
        stat = files.get(shard.path)
        if stat is None:
            yield number, f'{folder.url}/{shard.path}: no such file, but index.json names it'
        elif stat.num_bytes != shard.num_bytes:
            yield number, f'{folder.url}/{shard.path}: has {stat.num_bytes:,} bytes, index.json says {shard.num_bytes:,}'
