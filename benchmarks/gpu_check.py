"""Does this GPU do what this repository says of it? Ceilings, correctness, speed, memory, training, and what disagrees with its prediction.

    python -m benchmarks.gpu_check [--limit 540] [--only PART ...] [--cache FOLDER] [--out ROWS.jsonl]

Measures for at most --limit seconds, writes every row as soon as it has it, and says what remains; the same command resumes there, also on
another machine of the same kind if ROWS.jsonl comes along. Each part runs in a process of its own: one that crashes, hangs or runs out of memory
is a row, and the others follow. Weights and data are random and nothing is downloaded; `demo` trains a model to look at.

Without a GPU, or with --tiny, everything runs in a small form (under 6 minutes on two cores): what is checked for being right is checked, and
numbers say nothing about speed. Rows go to benchmarks/results/DEVICE-DATE.jsonl, of the small form to runs/gpu-check/, and the page lies next to
them (.html). A prediction is a line of benchmarks/checking/predictions.yaml, written before it was measured.

Exit codes: 0 all is measured, right, and within 15 % of its prediction; 1 something failed, is wrong or disagrees, and is listed; 2 the input is
wrong; 75 some parts remain: run the same command again; 130 stopped: the same command resumes.
"""

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.checking.cases import PARTS, CheckPart, Setting
from benchmarks.checking.judging import PREDICTIONS, Predictions, load_predictions, problems
from benchmarks.checking.rows import default_out, hardware
from benchmarks.checking.slices import Check, TooShort
from benchmarks.measured import environment_apart, hold
from diffusion.common.arguments import CommandParser, positive_float
from diffusion.common.files import open_to_append
from diffusion.common.text import counted
from diffusion.contracts.errors import BAD_INPUT, FINISHED, INTERRUPTED, PREEMPTED, InputError
from diffusion.cost.hardware import refuse_gpu_apart

DISAGREES = 1
PAGE = '.html'
REPOSITORY = Path(__file__).parents[1]
RESULTS, SMALL_RESULTS = REPOSITORY / 'benchmarks/results', REPOSITORY / 'runs/gpu-check'
LIMIT_SEC = 540.0
RESERVE_SEC = {False: 25.0, True: 5.0}  # by whether the form is tiny: to end a process, which may take 20 s, and to write the page


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser('benchmarks.gpu_check', __doc__)
    names = [part.name for part in PARTS]
    parser.add_argument('--limit', type=positive_float, default=LIMIT_SEC, metavar='SEC', help='length of this slice (default %(default).0f)')
    parser.add_argument('--only', nargs='+', choices=names, default=names, metavar='PART', help=f'these parts: {", ".join(names)}')
    parser.add_argument('--again', nargs='+', choices=names, default=[], metavar='PART', help='measure these again, from scratch')
    parser.add_argument('--tiny', action='store_true', help='the small form, which a machine without a GPU always takes')
    parser.add_argument('--cache', type=Path, metavar='FOLDER', help='compiled code, to take to the next machine (default: in --work)')
    parser.add_argument('--predictions', type=Path, default=PREDICTIONS, metavar='YAML', help='in place of benchmarks/checking/predictions.yaml')
    parser.add_argument('--out', type=Path, metavar='JSONL', help='the rows; the page is put next to it')
    parser.add_argument(
        '--work',
        type=Path,
        default=SMALL_RESULTS / 'work',
        metavar='FOLDER',
        help='logs and models (default: runs/gpu-check/work, here)',
    )
    parser.add_argument('--list', action='store_true', help='print the parts and what they take on an H200, and measure nothing')
    return parser.parse_args(arguments)


def listed(parts: Sequence[CheckPart]) -> str:
    lines = [f'{part.name:12} {part.planned_sec:5.0f} s  {part.about}' for part in parts]
    return '\n'.join([*lines, f'{"together":12} {sum(part.planned_sec for part in parts):5.0f} s, planned, with nothing compiled before'])


def command_to_resume(arguments: Sequence[str]) -> str:
    """Return the same command without --again, which is done."""
    kept: list[str] = []
    forgetting = False
    for word in arguments:
        forgetting = word == '--again' or (forgetting and not word.startswith('-'))
        if not forgetting:
            kept.append(word)
    return shlex.join(['python', '-m', 'benchmarks.gpu_check', *kept])


def summary(check: Check, predictions: Predictions, page: Path) -> int:
    """Print what is wrong and what remains; returns the exit code."""
    wrong, remaining = problems(check.rows, predictions), check.remaining()
    print(f'\nRows: {check.out}\nPage: {page}')
    if wrong:
        print(f'{counted(len(wrong), "problem")}:', *(f'  {line}' for line in wrong), sep='\n')
    if remaining:
        print(f'{len(remaining)} of {counted(len(check.parts), "part")} to do: {", ".join(part.name for part in remaining)}. Resume with')
        print(f'  {command_to_resume(sys.argv[1:])}')
        return PREEMPTED
    if not wrong:
        print('All parts are measured, and nothing disagrees with its prediction.')
    return DISAGREES if wrong else FINISHED


def main() -> int:
    args = parse()
    parts = [part for part in PARTS if part.name in args.only]
    if args.list:
        print(listed(parts))
        return FINISHED
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the same as Ctrl-C
    with ExitStack() as held:
        try:
            check, predictions = prepare(args, parts, held)
        except InputError as error:
            print(error, file=sys.stderr)
            return BAD_INPUT
        except OSError as error:
            print(f'{error.filename}: {error.strerror or error}; name other places with --out and --work', file=sys.stderr)
            return BAD_INPUT
        return run(args, check, predictions)


def prepare(args: argparse.Namespace, parts: Sequence[CheckPart], held: ExitStack) -> tuple[Check, Predictions]:
    """Return the check that the options ask for, its files held by `held`; nothing is measured yet.

    Raises:
        InputError: an option contradicts another or names no folder, the predictions are wrong, another check writes there, or the installed PyTorch
            has no kernels for the GPU.
        OSError: a file cannot be written.
    """
    beyond = [name for name in args.again if name not in args.only]
    if beyond:
        raise InputError(f'--again {" ".join(beyond)}: not one of --only {" ".join(args.only)}, and would not be measured; name it in both')
    predictions = load_predictions(args.predictions)
    environment = environment_apart()
    if environment['gpu'] is not None:
        refuse_gpu_apart()
    tiny = args.tiny or environment['gpu'] is None
    out: Path = (args.out or default_out(environment, tiny, (RESULTS, SMALL_RESULTS))).resolve()
    if out.suffix == PAGE:
        raise InputError(f'--out {out}: that is where the page would go; name a file of rows, such as {out.with_suffix(".jsonl")}')
    work: Path = args.work.resolve()
    for lock in (work / 'lock', out.with_suffix('.lock')):  # not the rows themselves: who adds one locks them for a moment
        held.enter_context(hold(lock, 'another check writes there; let it end: two at once would disturb each other'))
    open_to_append(out).close()
    setting = Setting(tiny, str(work), str(out.with_suffix('')))
    return Check(parts, setting, out, environment, RESERVE_SEC[tiny], args.cache and args.cache.resolve()), predictions


def run(args: argparse.Namespace, check: Check, predictions: Predictions) -> int:
    """One slice, its page and its summary; returns the exit code."""
    environment = check.environment
    small = ', small form' if check.setting.tiny else ''
    print(f'{hardware(environment)}, commit {environment["commit"]}, torch {environment["torch"]}{small}: {check.out}')
    page = check.out.with_suffix(PAGE)
    code = FINISHED
    try:
        check.forget(args.again)
        check.run_slice(args.limit)
    except TooShort as error:
        print(f'--limit {args.limit:.0f}: {error}', file=sys.stderr)
        code = BAD_INPUT
    except KeyboardInterrupt:
        print(f'\nstopped; {check.out} keeps its rows: run the same command again to resume', file=sys.stderr)
        code = INTERRUPTED
    from benchmarks.checking.page import write  # draws with Matplotlib

    write(page, check, predictions)
    said = summary(check, predictions, page)
    if not check.remaining():
        check.clear()
    return code or said


if __name__ == '__main__':
    raise SystemExit(main())
