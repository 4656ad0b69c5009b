"""Check a data set and show what is in it, on one page for a browser.

    python -m data_prep.inspect DATASET [--sample N] [--report FILE]

DATASET is a folder or URL (s3://, gs://, oci://) that data_prep.convert or data_prep.encode has written; all its streams are looked at.
Every shard is compared with its SHA-256 in index.json, and every sample is decoded and compared with its columns and the manifest:
pictures, their sizes and digests, captions and their weights, latents, which have to be finite. The counts of manifest.json, index.json
and failures.parquet have to agree, and no key may be there twice. Nothing is changed; what is wrong is listed with what to do about it.
"""

from __future__ import annotations

import os
import random
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from data_prep.command import exit_code, parser
from data_prep.errors import DataError, IncompleteError
from data_prep.inspecting.bookkeeping import LOST, Books, lost_shards, read_books
from data_prep.inspecting.inspection import Findings, Inspection, Problem, Task, key_hash
from data_prep.inspecting.remedies import remedies
from data_prep.mds.shards import Shard, read_shard
from data_prep.mds.workers import map_parts
from diffusion.arguments import positive_int
from diffusion.faults.exit_codes import BAD_INPUT
from diffusion.storage import Folder, open_folder, scratch_for

NUM_SHOWN = 24
MAX_NAMED = 5  # examples of a problem on the terminal; the report has more
EXIT_CODES = """exit codes: 0 the data set is sound; 2 it is not, or is no data set, or an option is wrong;
3 storage could not be read, or a worker was killed: the same command may succeed later"""


@dataclass(frozen=True)
class Inspected:
    """What an inspection has found; for the terminal and the report.

    Attributes:
        where: the data set.
        books: what it says about itself, all of whose problems are among those of the findings.
        num_read: shards that were read.
        remedies: what to do about the problems.
    """

    where: str
    books: Books
    findings: Findings
    num_read: int
    remedies: list[str]

    @property
    def problems(self) -> list[tuple[str, list[Problem]]]:
        """By kind, in the order of the shards."""
        found: dict[str, list[Problem]] = {}
        for problem in self.findings.problems:
            found.setdefault(problem.what, []).append(problem)
        return sorted(found.items())


def inspect_dataset(where: str | Path, sample: int | None = None, processes: int = 1) -> Inspected:
    """Look at a data set.

    Args:
        sample: how many samples to check, spread over the data set, the same each time; None: all.
        processes: workers on this host.

    Raises:
        DataError, ManifestError: there is no data set.
        IncompleteError, StorageError: something outside failed.
    """
    folder = open_folder(where)
    files = folder.files()
    books = read_books(folder, files)
    lost = dict(lost_shards(folder, files, books.shards))
    findings, tasks = Findings(problems=books.problems), []
    for task in plan(books.shards, sample):
        if task.number in lost:
            findings.checked += len(task.samples)
            findings.reject(task.shard, LOST, lost.pop(task.number), len(task.samples))
        else:
            tasks.append(task)
    findings.problems += [Problem(LOST, books.shards[number].path, detail) for number, detail in lost.items()]  # in which no sample was chosen
    for found in map_parts(Inspection(folder, books.streams), tasks, processes, 'inspect'):
        findings.add(found)
    findings.problems += repeated_keys(folder, books, findings.keys)
    order = {shard.path: number for number, shard in enumerate(books.shards)}
    findings.problems.sort(key=lambda problem: (order.get(problem.where, -1), problem.where))  # workers end in any order
    findings.thumbnails.sort(key=lambda thumbnail: thumbnail.position)
    return Inspected(str(where), books, findings, len(tasks), remedies(findings.problems, books.shards, folder, files))


def plan(shards: Sequence[Shard], sample: int | None) -> Iterator[Task]:
    """What to look at in each shard; shards without any of the samples are left out."""
    total = sum(shard.num_samples for shard in shards)
    chosen = range(total) if sample is None else spread(range(total), sample)
    shown = spread(chosen, NUM_SHOWN)
    for number, (shard, end) in enumerate(zip(shards, accumulate(shard.num_samples for shard in shards), strict=True)):
        start = end - shard.num_samples
        mine = range(shard.num_samples) if sample is None else frozenset(_between(chosen, start, end))
        if mine or sample is None:
            yield Task(number, shard, start, mine, frozenset(_between(shown, start, end)))


def spread(items: Sequence[int], number: int) -> Sequence[int]:
    """`number` of the items: one at random from each of as many equal stretches, the same each time."""
    if number >= len(items):
        return items
    rng = random.Random(0)
    return [items[rng.randrange(i * len(items) // number, (i + 1) * len(items) // number)] for i in range(number)]


def _between(numbers: Sequence[int], start: int, end: int) -> list[int]:
    """Those of the ascending numbers that are in start ... end - 1, counted from start."""
    return [number - start for number in numbers[bisect_left(numbers, start) : bisect_left(numbers, end)]]


def repeated_keys(folder: Folder, books: Books, keys: Mapping[int, np.ndarray]) -> Iterator[Problem]:
    """Keys that are there more than once; the same picture has one latent in each stream."""
    groups: dict[str, list[int]] = {}
    for number in sorted(keys):
        groups.setdefault(books.shards[number].stream if books.manifest.kind == 'latents' else '', []).append(number)
    for numbers in groups.values():
        hashes = np.concatenate([keys[number] for number in numbers])
        ordered = np.sort(hashes)
        repeats = ordered[1:][ordered[1:] == ordered[:-1]]
        if not len(repeats):
            continue
        ends = np.cumsum([len(keys[number]) for number in numbers])
        first, second = np.searchsorted(ends, np.flatnonzero(hashes == repeats[0])[:2], side='right')
        one, other = books.shards[numbers[first]], books.shards[numbers[second]]
        detail = f'key {_key_with(folder, other, repeats[0])!r} is in {one.path} already'
        yield Problem('repeated key', other.path, detail, len(repeats))


def _key_with(folder: Folder, shard: Shard, digest: np.uint64) -> str:
    with scratch_for() as scratch:
        return next(row['key'] for row in read_shard(folder, shard, scratch) if key_hash(row) == digest.tobytes())


def summary(found: Inspected, seconds: float) -> str:
    """What was found, in a few lines."""
    books, findings = found.books, found.findings
    streams = f' of {len(books.streams)} streams' if books.manifest.streams else ''
    share = 100 / max(1, findings.checked)
    lines = [
        ('samples', books.num_samples, f'in {len(books.shards):,} shards{streams}, {books.num_bytes / 1e6:,.1f} MB'),
        ('checked', findings.checked, f'in {found.num_read:,} shards that were read; {seconds:.1f} s, {findings.checked / seconds:,.0f} samples/s'),
        ('sound', findings.sound, f'{findings.sound * share:.1f} %'),
        *((f'unsound: {what}', count, f'{count * share:.1f} %') for what, count in findings.unsound.most_common()),
    ]
    width = max(len(label) for label, *_ in lines)
    table = [f'  {label:<{width}}  {count:>13,}  {note}'.rstrip() for label, count, note in lines]
    verdict = 'is NOT sound' if findings.problems else 'is sound' if findings.checked == books.num_samples else 'is sound as far as was looked'
    return '\n'.join([f'{found.where}: {verdict}', *table])


def complaint(found: Inspected) -> str:
    """The problems, an example or a few of each, and what to do."""
    lines = []
    for what, problems in found.problems:
        lines.append(f'{what}:')
        for problem in problems[:MAX_NAMED]:
            lines.append(f'  {described(problem)}')
        if len(problems) > MAX_NAMED:
            lines.append(f'  and {len(problems) - MAX_NAMED:,} more files; the report names them')
    return '\n'.join([*lines, 'what to do:', *(f'  {remedy}' for remedy in found.remedies)])


def described(problem: Problem) -> str:
    """A problem on one line."""
    where = '' if problem.where in problem.detail else f'{problem.where}: '  # what read_shard says names the file
    more = f' ({problem.num_samples:,} samples)' if problem.num_samples > 1 else ''
    return f'{where}{problem.detail}{more}'


def report_path(where: str, chosen: Path | None) -> Path:
    """Where the report goes.

    Raises:
        DataError: it cannot be written there.
    """
    remote = '://' in where
    path = chosen or (Path(f'inspect-{where.rstrip("/").rpartition("/")[2]}.html') if remote else Path(where) / 'report.html')
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise DataError(f'{path}: no file can be written there; name another place for the report with --report FILE')
    return path


def main() -> int:
    options = parser('data_prep.inspect', __doc__)
    options.epilog = EXIT_CODES
    options.add_argument('dataset', metavar='DATASET', help='folder or URL of an MDS data set of images or latents')
    options.add_argument(
        '--sample',
        type=positive_int,
        metavar='N',
        help='check N samples spread evenly over the data set instead of all, and read and hash only the shards that hold them; '
        'of the other shards only presence and size are checked',
    )
    options.add_argument('--report', type=Path, metavar='FILE', help='the page (default: DATASET/report.html, or ./inspect-NAME.html for a URL)')
    options.add_argument(
        '--processes', type=positive_int, default=len(os.sched_getaffinity(0)), metavar='N', help='worker processes on this host (default: its cores)'
    )
    args = options.parse_args()
    return exit_code(args.dataset, lambda: inspect_and_report(args.dataset, args.report, args.sample, args.processes))


def inspect_and_report(dataset: str, report: Path | None, sample: int | None, processes: int) -> int:
    """Check the data set, say what was found, write the page; returns the exit code."""
    start = time.monotonic()
    if '://' not in dataset and not Path(dataset).is_dir():
        raise DataError(f'{dataset}: no such folder; name the folder or URL of a data set')
    path = report_path(dataset, report)  # before hours of reading
    found = inspect_dataset(dataset, sample, processes)
    print(summary(found, time.monotonic() - start))
    if found.findings.problems:
        print(complaint(found), file=sys.stderr)
    from data_prep.inspecting.page import write_report  # draws with matplotlib, which the workers need not import

    try:
        write_report(found, path)
    except OSError as error:
        raise IncompleteError(f'{path}: the report could not be written: {error}; name another place with --report FILE') from error
    print(f'  report: {path}')
    return BAD_INPUT if found.findings.problems else 0


if __name__ == '__main__':
    raise SystemExit(main())
