"""Measure how many images a second training reaches, over a grid of settings.

    python -m benchmarks.throughput benchmarks/sweeps/quick-cpu.yaml [--out RESULTS.jsonl] [--again STATUS] [--list] [key=value ...]

Each point of the sweep is a run of `train.py`, started by the sweep's `launcher`, and becomes a row of RESULTS (default:
runs/sweeps/NAME/results.jsonl), read from what the run logs: images/s over whole windows of steps between synchronizations with the GPU, after the
warm-up, loader and logging included, evaluation and checkpoints not; MFU of the network's FLOP alone. When its rate is steady the run is stopped.

Out of memory, a crash, a time-out and a refusal are rows too. A point that has a row is not run again: run the same command again to resume after a
stop. `--again crashed` measures the crashed points again, and of several rows of a point the last one counts. `--list` prints which points have a row
and which would be run. `key=value` changes the sweep itself (time_limit_sec=60, grid.num_gpus=[4,8]) or else the recipe of every point
(data.kind=latents), and is refused where the grid or a point would overrule it.

Exit codes: 0 every point has a row, whatever its status; 2 the sweep is wrong, and nothing was run, or RESULTS cannot be written;
130 stopped: run the same command again to resume.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.measured import command, environment_apart, now, print_table
from benchmarks.sweeping.launching import fill, missing_program, run
from benchmarks.sweeping.loading import load_sweep
from benchmarks.sweeping.measuring import numbers, rate, windows_in
from benchmarks.sweeping.rows import CRASHED, STATUSES, RowsFile, row_of, rows_in, verdict
from benchmarks.sweeping.sweep import ON_CPU, Point, Sweep, ends_of_epochs, label, unknown_hardware
from diffusion.common import belongings
from diffusion.common.files import keep_private, parse_json_object, replacing_folder
from diffusion.common.text import counted, print_page
from diffusion.contracts.errors import BAD_INPUT, INTERRUPTED, InputError
from diffusion.cost.results import RATED
from diffusion.recipe import RecipeError

TRAIN = str(Path(__file__).parents[1] / 'train.py')
OF_THE_RUN = ('attention', 'device', 'encoders', 'micro_batch', 'num_gpus', 'price')  # in environment.json; all else there is of the machine


def sweep_points(sweep: Sweep, points: Sequence[Point], results: RowsFile, again: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Measure the points that have no row, or one whose status is in `again`; returns the rows of all points, in their order.

    Raises:
        RecipeError: the launcher is not on this machine, or there are no stand-in encoders for a network.
    """
    hardware = hardware_of(sweep)
    identities = [point.identity(sweep, hardware) for point in points]
    due = [(point, identity) for point, identity in zip(points, identities, strict=True) if is_due(results.rows.get(identity), again)]
    folder = results.path.with_suffix('.points')
    if due:
        program = missing_program(sweep.launcher)
        if program is not None:
            raise RecipeError(sweep.name, [f"launcher: there is no program '{program}' on this machine; start the sweep where it is"])
        if sweep.stand_in_encoders:
            for network in sorted({point.recipe.model.network for point, _ in due}):
                stand_in_encoders(network, folder)
    with tqdm(total=len(points), initial=len(points) - len(due), desc='points', unit='point') as bar:
        for point, identity in due:
            bar.set_postfix_str(point.label)
            for left in reversed(range(sweep.attempts)):
                row = measure_point(sweep, point, identity, folder / identity)
                if row['status'] != CRASHED or not left:
                    break
                bar.write(f'{point.label}: {outcome(row)}; once more (attempts: {sweep.attempts})', file=sys.stderr)
            results.add(row)
            bar.update()
            bar.write(f'{point.label}: {outcome(row)}', file=sys.stderr)
    if folder.exists() and all(path.name.startswith('encoders-') for path in folder.iterdir()):
        shutil.rmtree(folder)  # no point failed whose log may be read
    return [results.rows[identity] for identity in identities]


def is_due(row: dict[str, Any] | None, again: Sequence[str]) -> bool:
    """Return whether a point with such a row, or none, is to be run."""
    return row is None or row['status'] in again


def measure_point(sweep: Sweep, point: Point, identity: str, folder: Path) -> dict[str, Any]:
    """Run one point and return its row; its folder is removed unless it failed."""
    shutil.rmtree(folder, ignore_errors=True)
    run_folder, log = folder / 'run', folder / 'log.txt'
    run_folder.mkdir(parents=True)
    recipe = point.recipe
    encoders = stand_in_encoders(recipe.model.network, folder.parent) if sweep.stand_in_encoders else None
    arguments = point.command(sweep, run_folder, encoders)
    start = time.monotonic()

    def measured() -> dict[str, Any] | None:
        return rate(windows_in(run_folder), sweep, recipe.batch.global_size)

    words = fill(sweep.launcher, asdict(point.place), [TRAIN, *arguments])  # composer, torchrun and python itself understand the last
    code = run(words, log, sweep.time_limit_sec, meanwhile=measured)
    belongings.remove_dead()  # shared memory of processes that were stopped
    environment = _read(run_folder / 'environment.json')
    result = measured()
    found = result or verdict(code, log.read_text(errors='replace'), sweep.time_limit_sec)
    if result:
        found |= numbers(point, result['images_per_sec'], environment, run_folder)
    machine = {key: value for key, value in environment.items() if key not in OF_THE_RUN} or environment_apart(sweep.hardware == ON_CPU)
    found |= {'wall_sec': round(time.monotonic() - start, 3), 'log': None if result else str(log)}
    row = row_of(sweep, point, identity, found, {**machine, 'date': now()})
    if result:
        shutil.rmtree(folder, ignore_errors=True)
    return row


def stand_in_encoders(network: str, folder: Path) -> Path:
    """Return the folder of a network's stand-in encoders; another process writes them if they are not there: this one leaves the GPU alone."""
    encoders = folder / f'encoders-{network}'
    if not encoders.exists():
        with replacing_folder(encoders) as temporary:
            arguments = [sys.executable, '-m', 'diffusion.stand_in', str(temporary), '--like', network]
            made = subprocess.run(arguments, capture_output=True, text=True, check=False)
            if made.returncode:
                raise RecipeError('stand_in_encoders', [f'model.network: {network} has none: {(made.stderr.strip() or "killed").splitlines()[-1]}'])
    return encoders


def hardware_of(sweep: Sweep) -> str:
    """Return the hardware that the sweep names, or the GPU of this machine, or else its CPU; for `cpu` its CPU in any case."""
    if sweep.hardware not in (None, ON_CPU):
        return sweep.hardware
    here = environment_apart(sweep.hardware == ON_CPU)
    return here['gpu'] or here['cpu']


def outcome(row: dict[str, Any]) -> str:
    """Return a line about a row."""
    text = row['status']
    if row['status'] in RATED:
        text += f', {row["images_per_sec"]:,.1f} images/s'
    if row['reason']:
        text += f': {row["reason"]}'
    return text + (f' (log: {row["log"]})' if row['log'] else '')


def table(rows: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """Return the lines of the printed table."""

    def percent(value: float | None) -> str | None:
        return None if value is None else f'{value:.1%}'

    return [
        [
            label(row['settings']),
            row['status'],
            row['images_per_sec'],
            row['images_per_sec_per_gpu'],
            percent(row['images_per_sec_spread']),
            percent(row['mfu']),
            None if row['peak_allocated_bytes'] is None else row['peak_allocated_bytes'] / 1e9,
            percent(row['data_wait_share']),
        ]
        for row in rows
    ]


def measured_before(rows: Sequence[dict[str, Any]], num_points: int) -> str:
    """Return a line about the rows of earlier commands, with their commits; nothing if there are none. An old number must not pass for a new one."""
    if not rows:
        return ''
    with_what = Counter(f'commit {row.get("commit")}, torch {row.get("torch")}, {str(row.get("date"))[:10]}' for row in rows)
    parts = [what if len(with_what) == 1 else f'{what}: {number}' for what, number in with_what.items()]
    again = ' '.join(
        f'--again {json.dumps(status) if " " in status else status}' for status in STATUSES if any(row['status'] == status for row in rows)
    )
    were = 'was' if len(rows) == 1 else 'were'
    return f'{len(rows)} of {counted(num_points, "point")} {were} measured before ({"; ".join(parts)}); {again} measures again.\n'


def _read(path: Path) -> dict[str, Any]:
    return parse_json_object(path.read_bytes()) if path.exists() else {}


def stopped(results: RowsFile | None) -> str:
    """Return a line about an interruption, with the rows that are kept if there are any."""
    if results is None:
        return 'stopped; nothing was run'
    if not results.rows:
        return 'stopped; no point was done: run the same command again to start with the first'
    return f'stopped; {results.path} keeps its {counted(len(results.rows), "row")}: run the same command again to resume'


def _list(sweep: Sweep, points: Sequence[Point], out: Path, again: Sequence[str]) -> None:
    """Print the points, each with its row if it has one; the file is only read, and may be that of a sweep at work."""
    rows = rows_in(out)
    hardware = hardware_of(sweep) if rows else ''  # takes seconds
    found = [rows.get(point.identity(sweep, hardware)) for point in points]
    due = [is_due(row, again) for row in found]
    limit = timedelta(seconds=round(sum(due) * sweep.time_limit_sec))
    lines = [f'{sweep.name}: {counted(len(points), "point")}, {sum(due)} to run in at most {limit} (h:mm:ss), results in {out}']
    for point, row, again_too in zip(points, found, due, strict=True):
        state = 'to run' if row is None else outcome(row) + ('; to run again' if again_too else '')
        lines.append(f'  {point.label}  ({point.place.num_nodes} x {point.place.gpus_per_node}): {state}')
    print_page('\n'.join(lines))


def parse() -> argparse.Namespace:
    parser = command('throughput', __doc__)
    parser.add_argument('sweep', type=Path, metavar='SWEEP.yaml')
    parser.add_argument(
        '--again',
        action='append',
        choices=STATUSES,
        default=[],
        metavar='STATUS',
        help=f'run the points with this status again: {", ".join(STATUSES)}',
    )
    parser.add_argument('--list', action='store_true', help='check the sweep, print its points and their rows, and run nothing')
    parser.add_argument('overrides', nargs='*', metavar='key=value', help='changes to the sweep, or to the recipe of every point')
    return parser.parse_intermixed_args()


def main() -> int:
    args = parse()
    keep_private()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the same as Ctrl-C
    results: RowsFile | None = None
    try:
        sweep, points = load_sweep(args.sweep, args.overrides)
        for warning in [*unknown_hardware(sweep), *ends_of_epochs(points, sweep.max_steps)]:
            print(f'warning: {warning}', file=sys.stderr)
        out: Path = (args.out or Path('runs/sweeps') / sweep.name / 'results.jsonl').resolve()
        if args.list:
            _list(sweep, points, out, args.again)
            return 0
        results = RowsFile(out)
        old = dict(results.rows)
        rows = sweep_points(sweep, points, results, args.again)
    except InputError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    except OSError as error:
        print(f'{error}; rows in the file are kept: free space, fix the permissions or name another file with --out', file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print(f'\n{stopped(results)}', file=sys.stderr)
        return INTERRUPTED
    print_table(['', 'status', 'images/s', 'per GPU', 'spread', 'MFU', 'peak GB', 'waiting'], table(rows))
    counts = Counter(row['status'] for row in rows)
    print(f'{counted(len(rows), "point")}: {", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])}. Rows: {out}')
    print(measured_before([row for row in rows if row is old.get(row['point'])], len(rows)), end='')
    return 0


if __name__ == '__main__':
    raise SystemExit(main())
