"""MDS shards that anybody wrote, such as mosaicml/diffusion's LAION, whose columns the user names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

import numpy as np

from data_prep.sources.base import MAX_IMAGE_BYTES, TOO_LARGE, Part, Row, Source, SourceOptions, captions_of, url_of
from diffusion.common.storage import Folder, Stat
from diffusion.contracts.errors import DataError
from diffusion.contracts.manifest import INDEX_NAME
from diffusion.datasets.shards import Shard, list_shards, read_shard

FILES_OF_IMAGES = ('bytes', 'jpeg', 'png')
DECODED = ('jpeg', 'png', 'pil', 'jpeg_array', 'jpegarray', 'list[pil]', 'list[jpeg]', 'list[png]')  # by Streaming, without our limits


class AnyMDS(Source):
    """All streams below the folder, one part a shard; `--columns image=jpg,caption=caption` says what its columns are.

    The key is the column `key`, or the place in the shard; filters see all columns. Where the shards have no hashes, a change
    of the input is noticed by the sizes and times of its files.
    """

    takes_columns = True

    def __init__(self, folder: Folder, shards: list[Shard], files: Mapping[str, Stat], columns: Mapping[str, str]):
        self.folder, self.listed, self.files = folder, shards, files
        self.columns = {'image': '', 'caption': '', 'key': 'key', 'url': 'url', **columns}
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
    def open(cls, folder: Folder, files: Mapping[str, Stat], asked: SourceOptions) -> AnyMDS | None:
        streams = [str(PurePosixPath(name).parent).removeprefix('.') for name in files if PurePosixPath(name).name == INDEX_NAME]
        try:
            shards = list_shards(folder, streams)
        except DataError:
            if asked.columns:
                raise
            return None  # an index.json of something else
        return cls(folder, shards, files, asked.columns) if shards else None

    def parts(self) -> list[Part]:
        for shard in self.listed:
            if shard.path not in self.files:
                compressed = (
                    ' (it is compressed: decompress the shards, or write them again without compression)' if shard.entry.get('zip_data') else ''
                )
                raise DataError(f'{self.folder.url}/{shard.path}: no such file, but {INDEX_NAME} names it{compressed}')
        return [Part(shard.name, {shard.path: self.files[shard.path]}, shard) for shard in self.listed]

    def rows(self, part: Part, scratch: Path) -> Iterator[Row]:
        lacking = sorted({self.columns['image'], self.columns['caption']} - _encodings(part.detail).keys())
        if lacking:
            raise DataError(f'{self.folder.url}/{part.detail.path}: has no column {" and ".join(lacking)}, unlike the first shard')
        for i, sample in enumerate(read_shard(self.folder, _undecoded(part.detail), scratch)):
            values = {name: value.tolist() if isinstance(value, np.generic | np.ndarray) else value for name, value in sample.items()}
            image = values.pop(self.columns['image'])
            captions, reason = captions_of(values[self.columns['caption']])
            if len(image) > MAX_IMAGE_BYTES:
                image, reason = None, TOO_LARGE
            key = values.get(self.columns['key'])
            key = key if isinstance(key, str) and key else f'{part.name}-{i:06d}'
            yield Row(key, url_of(values.get(self.columns['url'])), captions, image or None, values, reason)


def _encodings(shard: Shard) -> dict[str, str]:
    return dict(zip(shard.entry['column_names'], shard.entry['column_encodings'], strict=True))


def _undecoded(shard: Shard) -> Shard:
    """The shard with files of images as bytes, which they are in it: Streaming would decode them however large they claim to be."""
    encodings = ['bytes' if encoding in DECODED else encoding for encoding in shard.entry['column_encodings']]
    return replace(shard, entry={**shard.entry, 'column_encodings': encodings})
