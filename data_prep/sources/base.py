"""Rows, parts, and what all formats have in common: a format says which files are its own and what a row of them holds."""

import re
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Self

from diffusion.common.storage import Folder, Stat, fingerprint, scratch_for
from diffusion.common.text import one_line
from diffusion.contracts.errors import DataError

IMAGE_SUFFIXES = ('jpg', 'jpeg', 'png', 'webp')
MAX_IMAGE_BYTES = 64 << 20
TOO_LARGE = f'over {MAX_IMAGE_BYTES >> 20} MB'
OVERSIZED = b'oversized'  # in place of a content of more than MAX_IMAGE_BYTES that was not read
MAX_LIST_BYTES = 4 << 30  # captions of about four million images
NOT_TEXT = re.compile('[\ud800-\udfff]')  # what is left of bytes that are not UTF-8, and halves of characters in JSON
SPLITS = ('train', 'training', 'validation', 'valid', 'val', 'dev', 'test', 'testing', 'eval', 'evaluation')
LISTS = ('captions.jsonl', 'metadata.jsonl', 'metadata.csv', 'metadata.parquet')  # of captions for images that are files
CAPTION_NOT_TEXT, CAPTION_NOT_UTF8 = 'caption is not text', 'caption is not UTF-8'
CAPTION_COLUMNS = ('caption', 'text', 'captions', 'TEXT')
FILES_PER_PART = 1000  # of formats in which each image is a file


@dataclass
class Row:
    """One input row, whatever became of it so far."""

    key: str
    url: str
    captions: list[str | None] | None
    """Captions of the source; several describe the same image. None if it has no column of which it knows that; None in place
    of one of several that is not text."""
    image: bytes | None
    """Encoded image; None if an earlier step already lost it."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Other values of the row, by the source's own names; the same names in all rows of a part."""
    reason: str | None = None
    """Why the row cannot be used, if that is known already."""
    caption_weights: list[float] | None = None
    """How often each caption is to be used; equally often if None."""
    sha256: str | None = None
    """Digest of the image when it was first converted, if this is not the first time."""
    reencoded: str = ''
    """Change made to the image then."""

    def __post_init__(self) -> None:  # names of files need not be UTF-8
        self.key, self.url = (text.encode(errors='backslashreplace').decode() for text in (self.key, self.url))


@dataclass(frozen=True)
class Part:
    """A piece of the input that becomes one part of the output."""

    name: str  # file name of the part in DEST; the order of names is the order of the data
    files: Mapping[str, Stat]  # what it is read from
    detail: Any = None  # what else the source needs to read it; counts as input
    repeated: Any = None  # rows that repeat an earlier image (converting/duplicates.py), as bits of a NumPy array

    @property
    def path(self) -> str:
        """One of its files; '' if it has none."""
        return next(iter(self.files), '')

    def repeats(self, row: int) -> bool:
        """Whether the row repeats an earlier image."""
        return self.repeated is not None and bool(self.repeated[row >> 3] & (128 >> (row & 7)))


@dataclass(frozen=True)
class SourceOptions:
    """Options of the user about a source, where its files do not say."""

    split: str | None = None  # which split, if there are several
    columns: Mapping[str, str] = field(default_factory=dict)  # the source's names for `image`, `caption`, `key` and `url`
    caption: str | None = None  # of images that have none of their own


class Source(ABC):
    """A format of captioned images in a folder.

    A worker gets the source with each part, so what was listed stays behind: a part knows its own files.

    Args:
        files: those of the format, in the order of the data.
        caption: of images that have none of their own; of formats with `takes_caption`.
    """

    has_splits = False  # whether `open` looks at the split
    takes_columns = False  # whether `open` looks at the columns
    takes_caption = False  # whether it gives images without a caption the one of the options
    counts_links = False  # whether a link to a folder elsewhere is counted, as an image that is not read; in a format of shards it is an error
    several_captions = False  # whether rows have several captions
    stored_columns: tuple[str, ...] = ()  # columns that are kept without being asked for

    def __init__(self, folder: Folder, files: Mapping[str, Stat], caption: str | None = None):
        self.folder, self.files, self.caption = folder, files, caption

    @classmethod
    @abstractmethod
    def open(cls, folder: Folder, files: Mapping[str, Stat], asked: SourceOptions) -> Self | None:
        """A reader of this folder, or None if its files are not of this format."""

    def parts(self) -> list[Part]:
        """The input in parts, in a fixed order; one a file, where a format does not say otherwise."""
        return [Part(name.rpartition('.')[0].replace('/', '-'), {name: stat}) for name, stat in self.files.items()]

    @abstractmethod
    def rows(self, part: Part, scratch: Path) -> Iterator[Row]:
        """All rows of a part, a few at a time, also those that cannot be used; remote files are copied to `scratch`.

        Raises:
            DataError: the input is damaged or incomplete; it names the file and the remedy.
        """

    def row(
        self, key: str, url: Any, image: bytes | None, captions: Any, columns: Mapping[str, Any], reason: str | None = None, captioned: bool = True
    ) -> Row:
        """A row of what its file says. What is wrong with the image, by `reason` or its size, goes before what is wrong with the captions.

        Args:
            url: no URL if it is no text, such as the NaN that pandas puts where there is none.
            captions: a cell, which holds one or a list of them.
            captioned: whether there is a column of captions at all.
        """
        found, wrong = captions_of(captions)
        if self.caption is not None and not (reason or wrong) and not any(caption and caption.strip() for caption in found):
            found, captioned = [self.caption], True
        if image and (image is OVERSIZED or len(image) > MAX_IMAGE_BYTES):
            image, reason = None, reason or TOO_LARGE
        url = text(url) if isinstance(url, str | bytes) else None
        return Row(key, url or '', found if captioned else None, image or None, columns, reason or wrong)

    def fingerprint(self, part: Part) -> dict[str, Any]:
        """Values that change when the part's input changes."""
        with readable(self.folder.url, 'make it readable'):
            return fingerprint(self.folder, part.files, part.detail)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ('files', 'listed')}


@contextmanager
def readable(path: str | Path, remedy: str = 'download this file again') -> Iterator[None]:
    """Turn what a damaged file raises into a DataError that names it."""
    import pyarrow as pa  # here, as the filters of a command line need this module before anything is read

    try:
        yield
    except DataError:
        raise
    except (OSError, pa.ArrowException, tarfile.TarError, EOFError, ValueError, RecursionError) as error:  # ValueError: JSON, UTF-8, long numbers
        raise DataError(f'{path}: cannot be read: {one_line(error)}; {remedy}') from error


@contextmanager
def local_copy(folder: Folder, name: str, scratch: Path | None = None, remedy: str = 'download this file again') -> Iterator[Path]:
    """A file of a source to read here, copied to `scratch` (None: until the end of the block) if it is remote; it is `readable`."""
    with ExitStack() as stack, readable(f'{folder.url}/{name}', remedy):
        yield folder.fetch(name, scratch or stack.enter_context(scratch_for()))


def read_image(folder: Folder, name: str, stat: Stat, scratch: Path) -> tuple[bytes | None, str | None]:
    """(content, None) of an image file, or (None, reason)."""
    if stat.refused:
        return None, stat.refused
    if stat.num_bytes > MAX_IMAGE_BYTES:
        return None, TOO_LARGE
    try:
        path = folder.fetch(name, scratch)
        with path.open('rb') as file:
            content = file.read(MAX_IMAGE_BYTES + 1)  # it may have grown
    except OSError:
        return None, 'image cannot be read'
    if path.parent == scratch:
        path.unlink()
    if len(content) > MAX_IMAGE_BYTES:
        return None, TOO_LARGE
    return content or None, None if content else 'image is empty'


def refuse_large_list(where: str, num_bytes: int) -> None:
    """Raises DataError for a list that is read as a whole and would not fit into memory."""
    if num_bytes > MAX_LIST_BYTES:
        raise DataError(f'{where}: has {num_bytes / 1e9:,.1f} GB, and a list is read as a whole, up to {MAX_LIST_BYTES / 1e9:,.1f} GB; split it')


def text(value: Any) -> str | None:
    """A value of `parquet_rows` as text, with replacement characters where it is not UTF-8."""
    return value.decode(errors='replace') if isinstance(value, bytes) else None if value is None else str(value)


def captions_of(value: Any) -> tuple[list[str | None], str | None]:
    """(captions, None) of a cell, which holds one or a list of them, with None for each that is not text; or ([], reason) if all are not."""
    if value is OVERSIZED:
        return [], f'caption {TOO_LARGE}'
    found, reasons = list[str | None](), list[str]()
    for item in value if isinstance(value, list) else [value]:
        caption = item.decode(errors='surrogateescape') if isinstance(item, bytes) else item
        if not isinstance(caption, str):  # a number, a struct, NaN: never what Python prints of it
            reasons += [CAPTION_NOT_TEXT] * (caption is not None)
            caption = None
        elif NOT_TEXT.search(caption):
            reasons.append(CAPTION_NOT_UTF8)
            caption = None
        found.append(None if caption is None else caption.removeprefix('\ufeff'))
    if any(caption is not None for caption in found):
        return found, None
    return [], reasons[0] if reasons else None


def is_list(name: str) -> bool:
    """Whether a file is a list of captions for images that are files."""
    return PurePosixPath(name).name in LISTS


def in_pieces(units: Sequence[Any]) -> Iterator[tuple[str, Sequence[Any]]]:
    """(name of the part, its units) of images that are files."""
    for i, start in enumerate(range(0, len(units), FILES_PER_PART)):
        yield f'{i:05d}', units[start : start + FILES_PER_PART]


def split_of(name: str) -> str:
    """Split of a file, as Hugging Face finds it: `data/train-00000-of-00005.parquet`, `train/0000.parquet`; train if nothing says another."""
    sharded = re.match(r'(.+?)-\d+-of-\d+', PurePosixPath(name).stem)
    words = re.split(r'[^a-z]+', name.lower())
    return sharded[1] if sharded else next((word for word in reversed(words) if word in SPLITS), 'train')


def files_of_split(files: Mapping[str, Stat], wanted: str | None, where: str) -> dict[str, Stat]:
    """The files of the split to read. Raises DataError as `choose_split`."""
    splits = {name: split_of(name) for name in files}
    chosen = choose_split(set(splits.values()), wanted, where)
    return {name: stat for name, stat in files.items() if splits[name] == chosen}


def choose_split(splits: Collection[str], wanted: str | None, where: str) -> str:
    """The split to read: the one that is there, or the one asked for if there are several.

    Raises:
        DataError: several, and none was asked for, or another one.
    """
    if wanted is not None and wanted not in splits:
        raise DataError(f'{where}: has no split {wanted!r}; it has {", ".join(sorted(splits))}')
    if wanted is None and len(splits) > 1:
        raise DataError(f'{where}: holds several splits ({", ".join(sorted(splits))}); name one with --split, so that test data stays apart')
    return next(iter(splits)) if wanted is None else wanted
