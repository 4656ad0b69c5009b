"""Plain WebDataset: tar files of samples, as most image datasets on the Hub are; img2dataset's, which come with a list of their rows, are not."""

import tarfile
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, Self

from data_prep.sources.base import (
    CAPTION_COLUMNS,
    IMAGE_SUFFIXES,
    MAX_IMAGE_BYTES,
    OVERSIZED,
    Part,
    Row,
    Source,
    SourceOptions,
    captions_of,
    files_of_split,
    local_copy,
)
from diffusion.common.files import parse_json_object
from diffusion.common.storage import Folder, Stat
from diffusion.contracts.errors import DataError

REMEDY = 'download this shard again'
NUM_SEEN = 100  # samples that tell whether there are several captions each


class WebDataset(Source):
    """`NNNNN.tar` of samples: members that lie next to each other and share their path up to the first dot of the name; one part a tar.

    The image is `.jpg`, `.jpeg`, `.png` or `.webp`, the first of them that is there. The caption is `.txt`; or in `.json` the field `caption`, `text`
    or `captions`, text or a list of texts; or `.cls` unless that is a number. The columns are the fields of `.json`, and `cls`.
    """

    has_splits = takes_caption = True

    def __init__(self, folder: Folder, files: Mapping[str, Stat], caption: str | None):
        super().__init__(folder, files, caption)
        with local_copy(folder, next(iter(files)), remedy=REMEDY) as first:
            seen = islice(samples_of(first, ('txt', 'json', 'cls')), NUM_SEEN)
            numbers = [len(captions_of(_captions(sample, _fields(sample)))[0]) for _, sample in seen]
        self.has_captions, self.several_captions = any(numbers), max(numbers, default=0) > 1

    @classmethod
    def open(cls, folder: Folder, files: Mapping[str, Stat], asked: SourceOptions) -> Self | None:
        ours = {name: stat for name, stat in files.items() if name.endswith('.tar')}
        return cls(folder, files_of_split(ours, asked.split, folder.url), asked.caption) if ours else None

    def rows(self, part: Part, scratch: Path) -> Iterator[Row]:
        (name,) = part.files
        keys = set[str]()
        with local_copy(self.folder, name, scratch, REMEDY) as path:
            fields = dict.fromkeys(field for _, sample in samples_of(path, ('json',)) for field in _fields(sample))
            for key, sample in samples_of(path, (*IMAGE_SUFFIXES, 'txt', 'json', 'cls')):
                columns = {**fields, **_fields(sample)}
                image = image_in(sample)
                reason = None if image else 'no .jpg, .jpeg, .png or .webp in the sample' if image is None else 'image is empty'
                if key in keys:
                    reason = 'key is in this tar already'
                keys.add(key)
                captions = _captions(sample, columns)
                yield self.row(f'{name.removesuffix(".tar")}/{key}', columns.get('url'), image, captions, columns, reason, self.has_captions)
        if not keys:
            raise DataError(f'{self.folder.url}/{name}: holds no samples, files named KEY.SUFFIX; leave it out of SOURCE')


def samples_of(path: Path, suffixes: tuple[str, ...]) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield (key, content by suffix) of each sample of a tar; nothing is unpacked to a disk.

    Args:
        suffixes: in lower case, of the members to read; others are empty, and OVERSIZED ones are not read.

    Raises:
        tarfile.ReadError: the tar is damaged or was cut short.
    """
    key, files = '', dict[str, bytes]()
    with path.open('rb') as file, tarfile.open(fileobj=file, mode='r:') as tar:
        while (member := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # or the memory would hold them all
            name = PurePosixPath(member.name)
            stem, dot, suffix = name.name.partition('.')
            if not member.isfile() or not stem or not dot:
                continue  # a folder, a link, what macOS puts next to a file, a README
            its_key, suffix = str(name.with_name(stem)), suffix.lower()
            if files and (its_key != key or suffix in files):
                yield key, files
                files = {}
            key, files[suffix] = its_key, b''
            if suffix in suffixes:
                content = tar.extractfile(member) if member.size <= MAX_IMAGE_BYTES else None
                files[suffix] = content.read() if content else OVERSIZED
        file.seek(tar.offset)
        end = file.read(tarfile.BLOCKSIZE)
        if end.strip(b'\0') or len(end) < tarfile.BLOCKSIZE:  # tarfile takes a damaged header, or none, for the end
            raise tarfile.ReadError('damaged or cut short: there is no end mark after the last whole member')
    if files:
        yield key, files


def image_in(sample: Mapping[str, bytes]) -> bytes | None:
    """The image of a sample, None if it has none."""
    return next((sample[suffix] for suffix in IMAGE_SUFFIXES if suffix in sample), None)


def _fields(sample: Mapping[str, bytes]) -> dict[str, Any]:
    """Fields of a sample's .json, none if that is no object; and `cls`."""
    try:
        fields = parse_json_object(sample['json']) if 'json' in sample else {}
    except ValueError:
        fields = {}
    return {**fields, 'cls': sample['cls'].decode(errors='replace').strip()} if 'cls' in sample else fields


def _captions(sample: Mapping[str, bytes], fields: Mapping[str, Any]) -> Any:
    """The cell of a sample's captions."""
    if any(sample.get(suffix) is OVERSIZED for suffix in ('txt', 'json')):
        return OVERSIZED
    label = sample.get('cls', b'').strip()
    stated = next((fields[name] for name in CAPTION_COLUMNS if fields.get(name) is not None), None if label.isdigit() else label or None)
    return sample.get('txt', stated)
