"""Train a baseline and one method at a time with several seeds, and compare them at equal FLOP and at equal time.

    python -m benchmarks.ablations STUDY [--seeds 0,1,2] [--only NAME,...] [--jobs N] [--rounds N] [--source CRAWL] [--out OUT] [key=value ...]
    python -m benchmarks.ablations STUDY --table [--docs docs]

STUDY is shapes, shapes-unet or emoji: a folder of recipes in benchmarks/ablations. Each run is a process of train.py; run the command again to
resume. Then the first batches of each recipe are timed, in turn, --rounds times; only in these minutes must the machine do nothing else. At the end,
and with --table at once, it prints the table of the finished runs and writes it to OUT/STUDY/ with a figure of the curves; --docs also puts both
into docs/ablations.md. docs/ablations.md says how to read them and how to add a method.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.ablations.study import PAGE, STUDIES, in_turn, timed
from diffusion.common.arguments import CommandParser, positive_int
from diffusion.contracts.errors import INTERRUPTED, InputError, RunError, run_command


def seeds(text: str) -> list[int]:
    """Argparse type: numbers, such as 0,1,2."""
    words = text.split(',')
    if not all(word.isdigit() for word in words) or len(set(words)) < len(words):
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of different seeds, such as 0,1,2")
    return [int(word) for word in words]


def main() -> int:
    parser = CommandParser('benchmarks.ablations', __doc__)
    parser.add_argument('study', choices=STUDIES, metavar='STUDY', help=', '.join(STUDIES))
    parser.add_argument('--seeds', type=seeds, default=[0, 1, 2], help='of each recipe (default 0,1,2)')
    parser.add_argument('--only', type=lambda text: text.split(','), metavar='NAME,...', help='of these methods, and of the baseline')
    parser.add_argument('--jobs', type=positive_int, default=1, help='runs at a time, each with the threads of its recipe (default %(default)s)')
    parser.add_argument('--rounds', type=int, default=3, metavar='N', help='of timing; 0: no table of equal time (default %(default)s)')
    parser.add_argument('--source', metavar='CRAWL', help='emoji: the crawl that its data are made from, once; what data_prep.convert reads')
    parser.add_argument('--out', type=Path, default=Path('runs/ablations'), help='folder of data, runs and tables (default %(default)s)')
    parser.add_argument('--table', action='store_true', help='train nothing')
    parser.add_argument('--docs', type=Path, metavar='FOLDER', help='also put table and figure into FOLDER/ablations.md')
    parser.add_argument('changes', nargs='*', metavar='key=value', help='changes to all recipes')
    args = parser.parse_intermixed_args()  # changes may follow options
    try:
        return run_command(lambda: run(args))
    except KeyboardInterrupt:
        print('\nstopped, and saved: run the same command again to resume', file=sys.stderr)
        return INTERRUPTED


def run(args: argparse.Namespace) -> None:
    study = STUDIES[args.study]
    variants = study.variants(args.only)
    runs = list(in_turn(study, variants, args.seeds, args.out, args.changes))
    failed = []
    if args.docs is not None and not (args.docs / PAGE).is_file():
        raise InputError(f'--docs: there is no {args.docs / PAGE}; name the folder of the page, docs')
    if not args.table:
        for run in runs:
            run.check()  # a mistake must not wait for the data
        from benchmarks.ablations.data import prepare
        from benchmarks.ablations.training import train

        prepare(study.data, args.out / 'data' / study.data, args.source, study.reads_features(variants))
        failed = train(runs, args.jobs)
        failed += train(timed(runs, args.rounds), args.jobs)
    from benchmarks.ablations.report import write_report

    print(write_report(study, runs, args.rounds, args.docs))
    if failed:
        raise RunError(f'{len(failed)} of {len(runs)} runs failed; their train.log says why. Run the command again to resume them')


if __name__ == '__main__':
    raise SystemExit(main())
