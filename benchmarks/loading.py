"""Measure how fast the training datasets read, against StreamingDataset alone.

    python -m benchmarks.loading [--samples 20000] [--out loading.jsonl]

Writes latents of 256 px (16 kB a sample) and JPEGs of about 512 x 384 to local MDS shards, and iterates over them in one process: Streaming's
own dataset, ours, and ours in batches with captions tokenized, as training takes them. For images the floor is decoding: Pillow
alone on the same bytes, with and without its scaled decoding (`draft`) for a square half the size. Best of several rounds, interleaved.
"""

from __future__ import annotations

from benchmarks.measured import command
from diffusion.common.arguments import positive_int


def main() -> None:
    parser = command('loading', __doc__)
    parser.add_argument('--samples', type=positive_int, default=20_000, help='latents; a tenth as many images (default %(default)s)')
    parser.add_argument('--rounds', type=positive_int, default=3, help='of which the fastest counts (default %(default)s)')
    args = parser.parse_args()
    from benchmarks.measuring.loading import run  # imports torch, so after the arguments are read

    run(args)


if __name__ == '__main__':
    main()
