"""Turn the benchmark's own data into what training and diffusion.evaluate read.

    python -m benchmarks.mlperf.data moments SOURCE DEST --encoders WHERE [--revision COMMIT]
    python -m benchmarks.mlperf.data prompts val2014_30k.tsv prompts.txt

SOURCE is a folder or URL of the reference's tars `00000.tar` .. `00831.tar`: of each sample the VAE's moments (`.npy`, float32 (1, 8, 64, 64)) and
the caption (`.txt`). DEST becomes an MDS dataset of latents. The moments are stored as float16, which the reference makes of them in training;
nothing is encoded or scaled. --encoders is where the recipe's VAE is: its digest goes into the manifest, by which training knows that data and
VAE belong together. That the moments are of this VAE is MLCommons' word and is not checked. Run the same command again after a stop to resume.

`prompts` writes the captions of the validation set, one a line in the order of the file, for diffusion.evaluate --prompts.
"""

import argparse
import csv
import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from benchmarks.mlperf.log import EVAL_SAMPLES
from data_prep.mds.command import EXIT_CODES, DatasetRequest, exit_code, run_command
from data_prep.mds.job import Tally
from diffusion.common.command_line import CommandParser
from diffusion.common.files import write_text
from diffusion.common.processes import quick_imports
from diffusion.contracts.errors import InputError
from diffusion.recipe.keys import neither_folder_nor_hub_id
from diffusion.recipe.schema import EncoderSource

COLUMNS = {'image_id', 'id', 'caption'}  # of the reference's list of validation prompts


def main() -> int:
    parser = CommandParser('benchmarks.mlperf.data', __doc__, epilog=EXIT_CODES)
    kinds = parser.add_subparsers(dest='kind', required=True, metavar='moments|prompts', parser_class=argparse.ArgumentParser)
    moments = kinds.add_parser('moments', help="the reference's moments and captions to an MDS dataset of latents", allow_abbrev=False)
    moments.add_argument('source', metavar='SOURCE', help='folder or URL of the tars')
    moments.add_argument('dest', metavar='DEST', help='folder or URL for the latents MDS, new or begun by this command')
    moments.add_argument(
        '--encoders', required=True, metavar='WHERE', help='where the VAE of the moments is: a folder in the diffusers layout, or a Hub id'
    )
    moments.add_argument('--revision', metavar='COMMIT', help='commit of the Hub id')
    for name in ('shard-mb', 'processes', 'rank', 'world-size'):
        moments.add_argument(f'--{name}', type=int, metavar='N', help='as of data_prep.convert')
    moments.add_argument('--merge', action='store_true', help='only merge what all hosts have written; the last one to finish does so anyway')
    prompts = kinds.add_parser('prompts', help='the list of validation captions to a file of prompts', allow_abbrev=False)
    prompts.add_argument('source', type=Path, metavar='TSV', help='val2014_30k.tsv')
    prompts.add_argument('dest', type=Path, metavar='TXT', help='file for the prompts')
    args = parser.parse_args()
    if args.kind == 'prompts':
        return exit_code(str(args.dest), lambda: write_prompts(args.source, args.dest))
    if wrong := neither_folder_nor_hub_id(args.encoders):
        moments.error(f'--encoders: {wrong}')

    given = {name: getattr(args, name) for name in ('shard_mb', 'processes', 'rank', 'world_size', 'merge')}
    try:
        shared = DatasetRequest(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        moments.error(str(error))

    def convert() -> Tally:
        with quick_imports():  # of torch, so after the arguments are read
            from benchmarks.mlperf.moments import convert_moments

        encoders = EncoderSource(args.encoders, args.revision)
        return convert_moments(args.source, args.dest, encoders, shared.num_processes, shared.shard_mb << 20, shared.own_share())

    return run_command(args.dest, convert)


def write_prompts(source: Path, dest: Path) -> int:
    """Write the captions of the reference's tab-separated list, one a line.

    Raises:
        InputError: it cannot be read, or is another list.
    """
    captions = read_captions(source)
    if dest.exists() and os.path.samefile(source, dest):
        raise InputError(f'{dest}: is the list itself; name another file for the prompts')
    write_text(dest, ''.join(f'{caption}\n' for caption in captions))
    other = '' if len(captions) == EVAL_SAMPLES else f'; the benchmark has {EVAL_SAMPLES:,}'
    print(f'{dest}: {len(captions):,} prompts{other}')
    return 0


def read_captions(path: Path) -> Sequence[str]:
    """Captions in the order of the file.

    Raises:
        InputError: it cannot be read, has other columns, or a caption is empty or of several lines: the number of a line keys its noise.
    """
    try:
        with path.open(newline='', encoding='utf-8') as file:
            rows = list(csv.DictReader(file, delimiter='\t'))
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f'{path}: cannot be read: {error}; download val2014_30k.tsv again') from error
    if not rows or not rows[0].keys() >= COLUMNS:
        found = ', '.join(rows[0]) if rows else 'no row'
        raise InputError(f'{path}: has {found}; val2014_30k.tsv has the columns {", ".join(sorted(COLUMNS))}, separated by tabs')
    captions = [(row['caption'] or '').strip() for row in rows]
    wrong = [row['id'] for row, caption in zip(rows, captions, strict=True) if len(caption.splitlines()) != 1]
    if wrong:
        raise InputError(f'{path}: {len(wrong)} captions are empty or of several lines, that of id {wrong[0]} for one; download the file again')
    return captions


if __name__ == '__main__':
    raise SystemExit(main())
