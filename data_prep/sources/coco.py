"""COCO captions: `annotations/captions_SPLIT.json` and the images of SPLIT, five captions each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from data_prep.sources.base import Part, Row, Source, SourceOptions, captions_of, choose_split, read_image, readable, refuse_large_list, url_of
from diffusion.common.files import parse_json
from diffusion.common.storage import Folder, Stat, scratch_for
from diffusion.contracts.errors import DataError

IMAGES_PER_PART = 1000
NO_SUCH_ID = 'annotation of an image_id that no image has'


class CocoCaptions(Source):
    """Images are looked for in `SPLIT/`, `images/SPLIT/`, `images/` and the folder itself; the order is that of the file.

    What the file says of an image, such as `license`, are its columns. An `image_id` that annotations name and no image has is a row that
    cannot be used.
    """

    has_splits = True
    counts_links = True
    several_captions = True

    no_image = 'no such image'

    def __init__(self, folder: Folder, files: Mapping[str, Stat], annotations: str):
        self.folder, self.files, self.annotations = folder, files, annotations

    @classmethod
    def open(cls, folder: Folder, files: Mapping[str, Stat], asked: SourceOptions) -> CocoCaptions | None:
        names = {_split(name): name for name in files if PurePosixPath(name).match('captions_*.json')}
        return cls(folder, files, names[choose_split(names, asked.split, folder.url)[0]]) if names else None

    def parts(self) -> list[Part]:
        where, split = f'{self.folder.url}/{self.annotations}', _split(self.annotations)
        refuse_large_list(where, self.files[self.annotations].num_bytes)
        with scratch_for() as scratch, readable(where):
            content = parse_json(self.folder.fetch(self.annotations, scratch).read_bytes())
        try:
            captions: dict[Any, list[Any]] = {image['id']: [] for image in content['images']}
            for annotation in content['annotations']:
                captions.setdefault(annotation['image_id'], []).append(annotation['caption'])
            columns = dict.fromkeys(column for image in content['images'] for column in image)
            listed = [(str(image['file_name']), {**columns, **image}, captions[image['id']]) for image in content['images']]
            unknown = captions.keys() - {image['id'] for image in content['images']}
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f'{where}: is not a COCO captions file: {type(error).__name__} {error}') from error
        places = [f'{split}/', f'images/{split}/', 'images/', '']
        self.no_image = next((self.files[place[:-1]].refused for place in places if place[:-1] in self.files), self.no_image)
        units = [
            (next((f'{place}{name}' for place in places if f'{place}{name}' in self.files), None), name, image, texts)
            for name, image, texts in listed
        ]
        units += [(None, f'image_id {number}', dict.fromkeys(columns), texts) for number, texts in captions.items() if number in unknown]
        return [self._part(i, units[start : start + IMAGES_PER_PART]) for i, start in enumerate(range(0, len(units), IMAGES_PER_PART))]

    def _part(self, i: int, units: list[tuple[str | None, str, dict[str, Any], list[Any]]]) -> Part:
        return Part(f'{i:05d}', {path: self.files[path] for path, *_ in units if path is not None}, units)

    def rows(self, part: Part, scratch: Path) -> Iterator[Row]:
        for path, name, columns, texts in part.detail:
            captions, not_text = captions_of(texts)
            if path is not None:
                image, reason = read_image(self.folder, path, part.files[path], scratch)
            else:
                image, reason = None, self.no_image if columns.get('file_name') else NO_SUCH_ID
            yield Row(name, url_of(columns.get('coco_url')), captions, image, columns, reason or not_text)


def _split(name: str) -> str:
    return PurePosixPath(name).stem.removeprefix('captions_')
