"""Measure how fast the training datasets read, against StreamingDataset alone and a plain reader of parquet.

    python -m benchmarks.loading [--samples 20000] [--out loading.jsonl]

Writes latents of 256 px (16 kB a sample) and JPEGs of about 512 x 384 to local MDS shards, and iterates over them in one process: Streaming's
own dataset, ours, and ours in batches with captions tokenized, as training takes them. The same batches are made of a parquet file that is read in
the order in which it was written, without hashes, keys or shuffling, by pyarrow and the tokenizer's own call. For images the floor is decoding:
Pillow alone on the same bytes, with and without its scaled decoding (`draft`) for a square half the size. Seconds are of this process's CPU
time; best of several rounds, interleaved.
"""

from __future__ import annotations

import io
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from benchmarks.convert import draw_jpeg
from benchmarks.measured import command, print_table, record
from diffusion.common.arguments import positive_int
from diffusion.contracts.manifest import INDEX_NAME

if TYPE_CHECKING:  # imported by the functions that use it: --help answers at once
    from diffusion.datasets.loader import Collate

RESOLUTION = 192  # half the images' shorter side: JPEGs are scaled while they are decoded
BATCH = 64
MOMENTS = (8, 32, 32)  # of 256 px
STREAMING: dict[str, Any] = {'batch_size': BATCH, 'num_canonical_nodes': 1}


def write_latents(folder: Path, count: int) -> None:
    """Moments as encode stores them for 256 px."""
    from streaming import MDSWriter

    moments = np.random.default_rng(0).standard_normal((64, *MOMENTS)).astype(np.float16)
    columns = {'key': 'str', 'caption': 'str', 'moments': f'ndarray:float16:{",".join(map(str, MOMENTS))}'}
    with MDSWriter(out=str(folder), columns=columns, hashes=['sha256'], progress_bar=False) as writer:
        for i in range(count):
            writer.write({'key': f'{i:09d}', 'caption': f'a large red circle at the left, number {i}', 'moments': moments[i % 64]})


def write_images(folder: Path, count: int) -> list[bytes]:
    """Images as convert stores them."""
    from streaming import MDSWriter

    jpegs = [draw_jpeg(seed) for seed in range(min(count, 200))]
    with MDSWriter(out=str(folder), columns={'key': 'str', 'caption': 'str', 'image': 'bytes'}, hashes=['sha256'], progress_bar=False) as writer:
        for i in range(count):
            writer.write({'key': f'{i:09d}', 'caption': f'a large red circle at the left, number {i}', 'image': jpegs[i % len(jpegs)]})
    return [jpegs[i % len(jpegs)] for i in range(count)]


def write_parquet(path: Path, latents: Path) -> None:
    """The same rows, uncompressed, in groups of 1,000."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from streaming import LocalDataset

    dataset = LocalDataset(local=str(latents))
    rows = [{**row, 'moments': row['moments'].tobytes()} for row in (dataset[i] for i in range(len(dataset)))]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=1000, compression='none')


def parquet_batches(path: Path, tokenizer: Any, length: int) -> Iterable[Any]:
    """Yield tokens and moments, as a short script would make them."""
    import pyarrow.parquet as pq

    from diffusion.datasets.loader import stacked

    for batch in pq.ParquetFile(path).iter_batches(BATCH):
        captions, moments = batch['caption'].to_pylist(), batch['moments'].to_pylist()
        tokens = tokenizer(captions, padding='max_length', truncation=True, max_length=length, return_tensors='pt')['input_ids']
        yield tokens, stacked([np.frombuffer(content, np.float16).reshape(MOMENTS) for content in moments])


def strict(folder: Path) -> dict[str, Any]:
    """Return what our datasets take beyond their content, as loader.py gives it to them."""
    from diffusion.datasets.mds import BadSamples
    from diffusion.datasets.verified import VerifiedStream

    index = (folder / INDEX_NAME).read_bytes()
    stream = VerifiedStream(name=folder.name, index=index, verify='hash', patience_sec=60, local=str(folder), validate_hash='sha256')
    bad_samples = BadSamples(folder.parent / 'bad.jsonl', most=0)
    return {'streams': [stream], 'identities': {}, 'bad_samples': bad_samples, 'timeout_sec': 60, 'whole_batches': False, **STREAMING}


def seconds_of(work: Callable[[], Iterable[Any]]) -> float:
    """CPU seconds to go through all of it."""
    start = time.process_time()
    for _ in work():
        pass
    return time.process_time() - start


def batches(dataset: Iterable[Any], collate: Collate) -> Iterable[Any]:
    """Yield batches as a loader's worker makes them."""
    samples: list[Any] = []
    for sample in dataset:
        samples.append(sample)
        if len(samples) == BATCH:
            yield collate(samples)
            samples = []


def decoded(jpegs: list[bytes], draft: bool) -> Iterable[Any]:
    """Squares by Pillow alone."""
    from diffusion.datasets.transforms import square

    for content in jpegs:
        image = Image.open(io.BytesIO(content), formats=('JPEG',))
        if draft:
            image.draft('RGB', (RESOLUTION, RESOLUTION))
        image.load()
        yield square(image, RESOLUTION)


def main() -> None:
    parser = command('loading', __doc__)
    parser.add_argument('--samples', type=positive_int, default=20_000, help='latents; a tenth as many images (default %(default)s)')
    parser.add_argument('--rounds', type=positive_int, default=3, help='of which the fastest counts (default %(default)s)')
    args = parser.parse_args()
    from streaming import StreamingDataset

    from data_prep.shapes import vocabulary
    from diffusion.datasets.loader import Collate
    from diffusion.datasets.mds import ImageCaptionMDS, LatentsCaptionMDS
    from diffusion.encoders.frozen import FrozenEncoders
    from diffusion.encoders.random_encoders import write_stand_in
    from diffusion.recipe.schema import EncoderSource

    num_images = max(BATCH, args.samples // 10)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_stand_in(folder / 'encoders', 'tiny', words=vocabulary())
        tokenize = FrozenEncoders.load(EncoderSource(str(folder / 'encoders'))).text.tokenize
        collate = Collate(tokenize, seed=0, caption_dropout=0.1)
        (tokenizer,), (length,) = tokenize.tokenizers.values(), tokenize.lengths
        write_latents(folder / 'latents', args.samples)
        write_parquet(folder / 'latents.parquet', folder / 'latents')
        jpegs = write_images(folder / 'images', num_images)

        bare_latents, bare_images = (StreamingDataset(local=str(folder / name), **STREAMING) for name in ('latents', 'images'))
        latents = LatentsCaptionMDS(shapes=[MOMENTS], **strict(folder / 'latents'))
        images = ImageCaptionMDS(sizes_px=[(RESOLUTION, RESOLUTION)], **strict(folder / 'images'))
        ways: dict[str, tuple[int, str, Callable[[], Iterable[Any]]]] = {
            'latents: StreamingDataset': (args.samples, '', lambda: bare_latents),
            'latents: ours': (args.samples, 'latents: StreamingDataset', lambda: latents),
            'latents: parquet in order, in batches with tokens': (
                args.samples,
                '',
                lambda: parquet_batches(folder / 'latents.parquet', tokenizer, length),
            ),
            'latents: ours, in batches with tokens': (
                args.samples,
                'latents: parquet in order, in batches with tokens',
                lambda: batches(latents, collate),
            ),
            'images: StreamingDataset, not decoded': (num_images, '', lambda: bare_images),
            'images: Pillow alone': (num_images, '', lambda: decoded(jpegs, draft=False)),
            'images: Pillow alone, draft': (num_images, '', lambda: decoded(jpegs, draft=True)),
            'images: ours': (num_images, 'images: Pillow alone, draft', lambda: images),
        }
        seconds = dict.fromkeys(ways, float('inf'))
        for _ in tqdm(range(args.rounds), desc='rounds'):
            for way, (_, _, work) in ways.items():
                seconds[way] = min(seconds[way], seconds_of(work))
    rates = {way: count / seconds[way] for way, (count, _, _) in ways.items()}
    ratios = {way: rates[way] / rates[base] if base else None for way, (_, base, _) in ways.items()}
    rows = [
        {'benchmark': 'loading', 'way': way, 'samples_per_cpu_sec': rates[way], 'base': ways[way][1] or None, 'ratio': ratios[way]} for way in ways
    ]
    print_table(['', 'samples a CPU second', 'ratio', 'to'], [[way, rates[way], ratios[way] or '', ways[way][1]] for way in ways])
    record(args.out, rows)


if __name__ == '__main__':
    main()
