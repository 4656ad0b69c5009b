"""MDS shards: those that `convert` wrote, to filter or shard them again, and those that anybody wrote, whose columns the user names."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, Self

import numpy as np

from data_prep.mds.job import JOB_NAME
from data_prep.sources.base import Part, Row, Source, SourceOptions
from data_prep.sources.folder import REMEDY
from diffusion.common.storage import Folder, Stat
from diffusion.contracts.errors import DataError
from diffusion.contracts.manifest import INDEX_NAME, MANIFEST_NAME, Manifest
from diffusion.datasets.shards import Shard, agreed_shards, captions_of, list_shards, read_shard

PART_BYTES = 1 << 29  # of input in a part: what a stop may cost
FILES_OF_IMAGES = ('bytes', 'jpeg', 'png')
DECODED = ('jpeg', 'png', 'pil', 'jpeg_array', 'jpegarray', 'list[pil]', 'list[jpeg]', 'list[png]')  # by Streaming, without our limits


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
    """A dataset that `convert` wrote; a part is some consecutive shards, so that shards can become larger.

    Streams of buckets are read one after the other. Filters see all columns, and columns that had been kept are kept.
    """

    def __init__(self, folder: Folder, files: Mapping[str, Stat], manifest: Manifest):
        super().__init__(folder, files)
        self.manifest = manifest
        first = Manifest.read(f'{folder.url}/{manifest.streams[0]}') if manifest.streams else manifest
        self.several_captions = 'captions' in first.columns
        self.stored_columns = tuple(name for name, column in first.columns.items() if column['encoding'] == 'json' and name != 'captions')

    @classmethod
    def open(cls, folder: Folder, files: Mapping[str, Stat], asked: SourceOptions) -> Self | None:
        if MANIFEST_NAME not in files or not any(PurePosixPath(name).name == INDEX_NAME for name in files):
            if JOB_NAME in files:
                raise DataError(f'{folder.url}: is a dataset that was begun and is not finished; run the command that began it again')
            return None
        if files[MANIFEST_NAME].refused:
            raise DataError(f'{folder.url}/{MANIFEST_NAME}: is {files[MANIFEST_NAME].refused}; {REMEDY}')
        manifest = Manifest.read(folder.url)
        if manifest.kind != 'images':
            raise DataError(f'{folder.url}: manifest kind is {manifest.kind}; this reads a dataset of images')
        return cls(folder, files, manifest)

    def parts(self) -> list[Part]:
        groups: list[list[Shard]] = []
        for shard in agreed_shards(self.folder, self.manifest):
            if groups and sum(one.num_bytes for one in groups[-1]) + shard.num_bytes <= PART_BYTES:
                groups[-1].append(shard)
            else:
                groups.append([shard])
        return [Part(shards[0].name, {one.path: self.files[one.path] for one in shards if one.path in self.files}, shards) for shards in groups]

    def fingerprint(self, part: Part) -> dict[str, Any]:
        return {'shards': [shard.fingerprint for shard in part.detail]}

    def rows(self, part: Part, scratch: Path) -> Iterator[Row]:
        for sample in (sample for shard in part.detail for sample in read_shard(self.folder, shard, scratch)):
            captions, weights = zip(*captions_of(sample), strict=True)
            columns = {name: value for name, value in sample.items() if name not in ('image', 'captions')}
            made = {'sha256': sample.get('sha256'), 'reencoded': sample.get('reencoded', '')}
            yield Row(sample['key'], sample['url'], list(captions), sample['image'], columns, caption_weights=list(weights), **made)


class AnyMDS(Source):
    """All streams below the folder, one part a shard; `--columns image=jpg,caption=caption` says what its columns are.

    Such as mosaicml/diffusion's LAION. The key is the column `key`, or the place in the shard; filters see all columns. Where the shards have no
    hashes, a change of the input is noticed by the sizes and times of its files.
    """

    takes_columns = True

    def __init__(self, folder: Folder, files: Mapping[str, Stat], shards: list[Shard], columns: Mapping[str, str]):
        super().__init__(folder, files)
        self.listed, self.columns = shards, {'image': '', 'caption': '', 'key': 'key', 'url': 'url', **columns}
        encodings = _encodings(shards[0])
        wrong = [name for name in columns.values() if name not in encodings]
        if wrong or not {'image', 'caption'} <= columns.keys():
            what = f'has no column {" or ".join(wrong)}' if wrong else 'does not say what its columns mean, as a manifest would'
            raise DataError(
                f'{folder.url}: {what}; name them, as in --columns image=jpg,caption=caption: '
                f'it has {", ".join(f"{name} ({encoding})" for name, encoding in encodings.items())}'
            )
        encoding = encodings[columns['image']]
        if encoding not in FILES_OF_IMAGES:
            raise DataError(f'{folder.url}: column {columns["image"]} is stored as {encoding}; --columns image= takes {", ".join(FILES_OF_IMAGES)}')
        self.several_captions = encodings[columns['caption']] == 'json'

    @classmethod
    def open(cls, folder: Folder, files: Mapping[str, Stat], asked: SourceOptions) -> Self | None:
        streams = [str(PurePosixPath(name).parent).removeprefix('.') for name in files if PurePosixPath(name).name == INDEX_NAME]
        try:
            shards = list_shards(folder, streams)
        except DataError:
            if asked.columns:
                raise
            return None  # an index.json of something else
        return cls(folder, files, shards, asked.columns) if shards else None

    def parts(self) -> list[Part]:
        lost = next((shard for shard in self.listed if shard.path not in self.files), None)
        if lost is not None:
            remedy = ' (it is compressed: decompress the shards, or write them again without compression)' if lost.entry.get('zip_data') else ''
            raise DataError(f'{self.folder.url}/{lost.path}: no such file, but {INDEX_NAME} names it{remedy}')
        return [Part(shard.name, {shard.path: self.files[shard.path]}, shard) for shard in self.listed]

    def rows(self, part: Part, scratch: Path) -> Iterator[Row]:
        shard, columns = part.detail, self.columns
        lacking = sorted({columns['image'], columns['caption']} - _encodings(shard).keys())
        if lacking:
            raise DataError(f'{self.folder.url}/{shard.path}: has no column {" and ".join(lacking)}, unlike the first shard')
        # Files of images as bytes, which they are in the shard: Streaming would decode them however large they claim to be.
        undecoded = ['bytes' if encoding in DECODED else encoding for encoding in shard.entry['column_encodings']]
        for i, sample in enumerate(read_shard(self.folder, replace(shard, entry={**shard.entry, 'column_encodings': undecoded}), scratch)):
            values = {name: value.tolist() if isinstance(value, np.generic | np.ndarray) else value for name, value in sample.items()}
            image, key = values.pop(columns['image']), values.get(columns['key'])
            key = key if isinstance(key, str) and key else f'{part.name}-{i:06d}'
            yield self.row(key, values.get(columns['url']), image, values[columns['caption']], values)


def _encodings(shard: Shard) -> dict[str, str]:
    return dict(zip(shard.entry['column_names'], shard.entry['column_encodings'], strict=True))
