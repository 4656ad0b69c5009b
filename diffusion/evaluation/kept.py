"""All drawn images as an MDS dataset, which data_prep reads: a shard for each chunk, written whole, and an index of them at the end."""

import io
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from diffusion import __version__
from diffusion.common.files import parse_json, replacing_folder, write_text
from diffusion.common.images import to_pil
from diffusion.contracts.manifest import INDEX_NAME, MANIFEST_NAME, Manifest
from diffusion.datasets.shards import HASH
from diffusion.evaluation.prompts import Prompt

COLUMNS = {
    'key': ('str', 'id of the prompt'),
    'url': ('str', 'empty: the image was drawn'),
    'caption': ('str', 'the prompt'),
    'image': ('bytes', 'PNG'),
    'width': ('int32', 'pixels'),
    'height': ('int32', 'pixels'),
}


def keep_chunk(folder: Path, number: int, chunk: Sequence[Prompt], images: Tensor) -> dict[str, Any]:
    """Write the images (B, 3, H, W) uint8 of a chunk as one shard; returns its entry in index.json."""
    from streaming import MDSWriter  # takes a second, and most evaluations keep no images

    place = folder / f'{number:05d}'
    place.parent.mkdir(parents=True, exist_ok=True)
    with replacing_folder(place) as temporary, tempfile.TemporaryDirectory(dir=folder, prefix='.write-') as scratch:
        out = Path(scratch, 'shard')
        encodings = {name: encoding for name, (encoding, _) in COLUMNS.items()}
        with MDSWriter(out=str(out), columns=encodings, hashes=[HASH], size_limit=None, progress_bar=False) as writer:
            for prompt, image in zip(chunk, images, strict=False):  # the padding is left out by the caller
                content = io.BytesIO()
                to_pil(image).save(content, 'png')
                height, width = image.shape[1:]
                writer.write(
                    {'key': str(prompt.id), 'url': '', 'caption': prompt.text, 'image': content.getvalue(), 'width': width, 'height': height}
                )
        (entry,) = parse_json((out / INDEX_NAME).read_text())['shards']
        (out / entry['raw_data']['basename']).rename(temporary / entry['raw_data']['basename'])
    entry['raw_data']['basename'] = f'{place.name}/{entry["raw_data"]["basename"]}'
    return entry


def finish_kept(folder: Path, entries: Sequence[dict[str, Any]], source: dict[str, Any], side_px: int) -> None:
    """Write index and manifest, the manifest last: what data_prep takes for complete."""
    count = sum(entry['samples'] for entry in entries)
    manifest = Manifest(
        kind='images',
        columns={name: {'encoding': encoding, 'meaning': meaning} for name, (encoding, meaning) in COLUMNS.items()},
        num_samples=count,
        attempted=count,
        dropped={},
        source=source,
        hashes=[HASH],
        code_version=__version__,
        min_side_px=side_px,
    )
    write_text(folder / INDEX_NAME, json.dumps({'version': 2, 'shards': list(entries)}))
    write_text(folder / MANIFEST_NAME, manifest.to_json())
