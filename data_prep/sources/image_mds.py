"""A dataset that `convert` wrote, to filter or shard it again; a part is some consecutive shards, so that shards can become larger."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from data_prep.mds.job import JOB_NAME
from data_prep.sources.base import Part, Row, Source, SourceOptions
from data_prep.sources.folder import REMEDY
from diffusion.common.storage import Folder, Stat
from diffusion.contracts.errors import DataError
from diffusion.contracts.manifest import MANIFEST_NAME, Manifest
from diffusion.datasets.captions import captions_of
from diffusion.datasets.shards import Shard, agreed_shards, read_shard

PART_BYTES = 1 << 29  # of input in a part: what a stop may cost


def find_images(where: str | Path, purpose: str) -> Manifest:
    """Read the manifest of a dataset of images that something is to be made from; imports no torch.

    Raises:
        DataError, ManifestError: there is none, it is of another kind, or has no samples.
    """
    manifest = Manifest.read(where)
    if manifest.kind != 'images':
        raise DataError(f'{where}: manifest kind is {manifest.kind}; {purpose} needs a dataset of images, as data_prep.convert writes it')
    if manifest.num_samples == 0:
        raise DataError(f'{where}: holds no samples (dropped: {manifest.dropped}); there is nothing to {purpose}')
    return manifest


class ImageMDS(Source):
    """Streams of buckets are read one after the other. Filters see all columns, and columns that had been kept are kept."""

    def __init__(self, folder: Folder, manifest: Manifest):
        self.folder, self.manifest = folder, manifest
        first = Manifest.read(f'{folder.url}/{manifest.streams[0]}') if manifest.streams else manifest
        self.several_captions = 'captions' in first.columns
        self.stored_columns = tuple(name for name, column in first.columns.items() if column['encoding'] == 'json' and name != 'captions')

    @classmethod
    def open(cls, folder: Folder, files: Mapping[str, Stat], asked: SourceOptions) -> ImageMDS | None:
        if MANIFEST_NAME not in files or not any(PurePosixPath(name).name == 'index.json' for name in files):
            if JOB_NAME in files:
                raise DataError(f'{folder.url}: is a dataset that was begun and is not finished; run the command that began it again')
            return None
        if files[MANIFEST_NAME].refused:
            raise DataError(f'{folder.url}/{MANIFEST_NAME}: is {files[MANIFEST_NAME].refused}; {REMEDY}')
        manifest = Manifest.read(folder.url)
        if manifest.kind != 'images':
            raise DataError(f'{folder.url}: manifest kind is {manifest.kind}; this reads a dataset of images')
        return cls(folder, manifest)

    def parts(self) -> list[Part]:
        groups: list[list[Shard]] = []
        for shard in agreed_shards(self.folder, self.manifest):
            if groups and sum(one.num_bytes for one in groups[-1]) + shard.num_bytes <= PART_BYTES:
                groups[-1].append(shard)
            else:
                groups.append([shard])
        return [Part(shards[0].name, {}, shards) for shards in groups]

    def fingerprint(self, part: Part) -> dict[str, Any]:
        return {'shards': [shard.fingerprint for shard in part.detail]}

    def rows(self, part: Part, scratch: Path) -> Iterator[Row]:
        for shard in part.detail:
            yield from self._rows(shard, scratch)

    def _rows(self, shard: Shard, scratch: Path) -> Iterator[Row]:
        for sample in read_shard(self.folder, shard, scratch):
            captions, weights = zip(*captions_of(sample), strict=True)
            columns = {name: value for name, value in sample.items() if name not in ('image', 'captions')}
            yield Row(
                sample['key'],
                sample['url'],
                list(captions),
                sample['image'],
                columns,
                caption_weights=list(weights),
                sha256=sample.get('sha256'),
                reencoded=sample.get('reencoded', ''),
            )
