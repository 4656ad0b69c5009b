"""A data set that `convert` wrote, to filter or shard it anew; one part a shard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from data_prep.errors import DataError
from data_prep.mds.dataset import JOB_NAME
from data_prep.mds.shards import Shard, list_shards, read_shard
from data_prep.sources.base import Part, Row, distinct
from diffusion.datasets.captions import captions_of
from diffusion.datasets.manifest import MANIFEST_NAME, Manifest
from diffusion.storage import Folder, Stat


class ImageMDS:
    """Streams of buckets are read one after the other. Filters see all columns; --keep-columns keeps them once more."""

    has_splits = False

    def __init__(self, folder: Folder, manifest: Manifest):
        self.folder, self.manifest = folder, manifest
        first = Manifest.read(f'{folder.url}/{manifest.streams[0]}') if manifest.streams else manifest
        self.several_captions = 'captions' in first.columns

    @classmethod
    def open(cls, folder: Folder, files: Mapping[str, Stat], split: str | None) -> ImageMDS | None:
        if MANIFEST_NAME not in files or not any(PurePosixPath(name).name == 'index.json' for name in files):
            if JOB_NAME in files:
                raise DataError(f'{folder.url}: is a data set that was begun and is not finished; run the command that began it again')
            return None
        manifest = Manifest.read(folder.url)
        if manifest.kind != 'images':
            raise DataError(f'{folder.url}: manifest kind is {manifest.kind}; this reads a data set of images')
        return cls(folder, manifest)

    def parts(self) -> list[Part]:
        return distinct((Part(shard.name, {}, shard) for shard in list_shards(self.folder, self.manifest)), self.folder.url)

    def fingerprint(self, part: Part) -> dict[str, Any]:
        return part.detail.fingerprint

    def rows(self, part: Part, scratch: Path) -> Iterator[Row]:
        shard: Shard = part.detail
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
