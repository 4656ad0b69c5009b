"""The content of a dataset and its problems: the whole of an audit, of which samples.py does a shard; and its words for the terminal."""

import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from data_prep.auditing.bookkeeping import COUNTS, LOST, Books, lost_shards, read_books
from data_prep.auditing.samples import DAMAGED, NUM_NAMED, SCALES, Audit, Findings, Problem, ShardTask, key_hash, max_tokens
from data_prep.engines.local import map_parts
from data_prep.mds.job import JOB_NAME
from data_prep.mds.oddities import IDENTICAL, ODDITIES, REPEATED, Repeats, warn
from data_prep.mds.parts import PARTS
from diffusion.common.files import parse_json_object
from diffusion.common.storage import Folder, open_folder, scratch_for
from diffusion.common.text import counted
from diffusion.datasets.shards import Shard, read_shard

NUM_SHOWN = 24
# A VAE's scaling factor is 1 / the standard deviation of its latents, to which noise schedules are made (arXiv 2112.10752, section G). Over all
# values of large datasets it comes out below 1: 0.91 for Stable Diffusion's VAE on ImageNet and 0.90 for SDXL's on the images of Playground v2.5, by
# the means and deviations of channels that EDM2 (training/encoders.py) and Playground (vae/config.json) publish. A wrong factor has to be outside:
# SDXL's for Stable Diffusion's latents gives 0.65, the reverse 1.26, scaling twice 0.17, none 5.
LOWEST_STD, HIGHEST_STD = 0.8, 1.25
MAX_NAMED = 5  # examples of a problem on the terminal; the report has more


@dataclass(frozen=True)
class AuditResult:
    """The result of an audit; for the terminal and the report.

    Attributes:
        where: the dataset.
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

    def definition(self, oddity: str) -> str:
        """How an oddity is counted in this dataset."""
        return ODDITIES[oddity].definition.format(tokens=max_tokens(next(iter(self.books.streams.values()), self.books.manifest)))

    def examples(self, oddity: str) -> str:
        """Keys of a few samples with an oddity."""
        return ', '.join(key for _, key in self.findings.odd_keys.get(oddity, [])[:NUM_NAMED])

    @property
    def warnings(self) -> list[str]:
        """Warnings about samples that can all be used."""
        found = self.findings
        odd = [
            f'{warning}; such as {self.examples(oddity)}'
            for oddity in ODDITIES
            if (warning := warn(oddity, found.odd[oddity], found.sound, self.definition(oddity)))
        ]
        std = scaled_std(found.histograms)
        if std is None or LOWEST_STD <= std <= HIGHEST_STD:
            return odd
        return [
            *odd,
            f'the scaled latents have standard deviation {std:.3g}, where noise schedules expect about 1 ({LOWEST_STD:g} to {HIGHEST_STD:g}). '
            "Was the VAE's scaling_factor applied when they were written, or is it of another VAE? Then encode the images again with "
            'data_prep.encode. Images that are all of one kind, such as drawings on white, can be outside without a fault',
        ]


def scaled_std(histograms: Mapping[str, np.ndarray]) -> float | None:
    """Standard deviation over all values of all scaled latents, None without any: the mean variance within a latent plus that of their means."""
    if 'std' not in histograms:
        return None
    of_means, of_stds = histograms['mean'], histograms['std']
    means, stds = SCALES['mean'].middles(), SCALES['std'].middles()
    between = np.average(means**2, weights=of_means) - np.average(means, weights=of_means) ** 2
    return float(np.sqrt(np.average(stds**2, weights=of_stds) + between))


def audit_dataset(where: str | Path, sample: int | None = None, processes: int = 1) -> AuditResult:
    """Look at a dataset.

    Args:
        sample: how many samples to check, spread over the dataset, the same each time; None: all.
        processes: workers on this host.

    Raises:
        DataError, ManifestError: there is no dataset.
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
    for found in map_parts(Audit(folder, books.streams), tasks, processes, 'audit'):
        findings.add(found)
    for numbers in _groups(books, findings.hashes).values():
        note_repeats(folder, books, np.concatenate([findings.hashes[number] for number in numbers]), findings)
    findings.problems += repeated_keys(folder, books, findings.keys)
    order = {shard.path: number for number, shard in enumerate(books.shards)}
    findings.problems.sort(key=lambda problem: (order.get(problem.where, -1), problem.where))  # workers end in any order
    findings.thumbnails.sort(key=lambda thumbnail: thumbnail.position)
    to_do = list(remedies(findings.problems, books.shards, folder, files, books.manifest.kind))
    return AuditResult(str(where), books, findings, len(tasks), to_do)


def plan(shards: Sequence[Shard], sample: int | None) -> Iterator[ShardTask]:
    """Yield what to look at in each shard; shards without any of the samples are left out."""
    total = sum(shard.num_samples for shard in shards)
    chosen = range(total) if sample is None else spread(range(total), sample)
    shown = spread(chosen, NUM_SHOWN)
    for number, (shard, end) in enumerate(zip(shards, accumulate(shard.num_samples for shard in shards), strict=True)):
        start = end - shard.num_samples
        mine = range(shard.num_samples) if sample is None else frozenset(_between(chosen, start, end))
        if mine or sample is None:
            yield ShardTask(number, shard, start, mine, frozenset(_between(shown, start, end)))


def spread(items: Sequence[int], number: int) -> Sequence[int]:
    """`number` of the items: one at random from each of as many equal stretches, the same each time."""
    if number >= len(items):
        return items
    rng = random.Random(0)
    return [items[rng.randrange(i * len(items) // number, (i + 1) * len(items) // number)] for i in range(number)]


def _between(numbers: Sequence[int], start: int, end: int) -> list[int]:
    """Those of the ascending numbers that are in start ... end - 1, counted from start."""
    return [number - start for number in numbers[bisect_left(numbers, start) : bisect_left(numbers, end)]]


def note_repeats(folder: Folder, books: Books, hashes: np.ndarray, findings: Findings) -> None:
    """Add the repeats among samples to the findings, with keys of those that are there most often.

    Args:
        hashes: (samples, 3) position, and `content_hashes`, in ascending order.
    """
    ends = list(accumulate(shard.num_samples for shard in books.shards))
    for column, oddity in ((1, IDENTICAL), (2, REPEATED)):
        seen = Repeats()
        seen.add(hashes[:, column], hashes[:, 0])
        count, examples = seen.count(NUM_NAMED)
        findings.odd[oddity] += count
        for positions in examples:
            found = []
            for position in positions:
                number = bisect_right(ends, position)
                shard = books.shards[number]
                with scratch_for() as scratch:
                    rows = read_shard(folder, shard, scratch)
                    found.append(next(islice(rows, position - ends[number] + shard.num_samples, None))['key'])
            findings.odd_keys.setdefault(oddity, []).append((positions[0], ' and '.join(found)))


def repeated_keys(folder: Folder, books: Books, keys: Mapping[int, np.ndarray]) -> Iterator[Problem]:
    """Keys that are there more than once."""
    for numbers in _groups(books, keys).values():
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


def _groups(books: Books, read: Iterable[int]) -> dict[str, list[int]]:
    """Numbers of the shards in which samples are compared with one another: the same image has one latent in each stream."""
    groups: dict[str, list[int]] = {}
    numbers_of = {books.shards[number].path: number for number in sorted(read, reverse=True)}  # one that is listed twice counts once
    for number in sorted(numbers_of.values()):
        groups.setdefault(books.shards[number].stream if books.manifest.kind == 'latents' else '', []).append(number)
    return groups


def _key_with(folder: Folder, shard: Shard, digest: np.uint64) -> str:
    with scratch_for() as scratch:
        return next(row['key'] for row in read_shard(folder, shard, scratch) if key_hash(row) == digest.tobytes())


def remedies(problems: Sequence[Problem], shards: Sequence[Shard], folder: Folder, files: Mapping[str, Any], kind: str) -> Iterator[str]:
    """A line for each kind of thing to do, and the files to delete for it; they follow from what `Dataset` does when its command is run again."""
    kinds = {problem.what for problem in problems}
    whole = f'copy {folder.url} again from where it came, or make it again from its source in a new DEST'
    command = _command(folder, files)
    if kinds & {LOST, DAMAGED, COUNTS} and command is None:
        yield f'{whole}: it has no {JOB_NAME}, so no command can repair it in place.'
    elif kinds & {LOST, DAMAGED, COUNTS}:
        markers = _markers([problem.where for problem in problems if problem.what == DAMAGED], shards)
        if markers:
            yield (
                f'delete the markers of the damaged parts: {" ".join(f"{folder.url}/{name}" for name in markers)} '
                '(a damaged shard of the right size is not noticed otherwise)'
            )
        what = ['write what is lost or has no marker again'] * bool(kinds & {LOST, DAMAGED})
        what += ['merge manifest.json, index.json and failures.parquet again'] * (COUNTS in kinds)
        yield f'run the same data_prep.{command} with the same DEST again: it will {" and ".join(what)}, and leave all other parts as they are'
    if kinds - {LOST, DAMAGED, COUNTS}:
        yield (
            'the samples named lie in shards that are just as they were written, so the same source would give the same again: '
            f'fix or filter the source and run data_prep.{"encode" if kind == "latents" else "convert"} on it with a new DEST'
        )


def _command(folder: Folder, files: Mapping[str, Any]) -> str | None:
    """`convert` or `encode`, where the dataset still has what these need to resume."""
    if JOB_NAME in files:
        with suppress(ValueError, KeyError):
            return parse_json_object(folder.read(JOB_NAME))['command']
    return None


def _markers(paths: Sequence[str], shards: Sequence[Shard]) -> list[str]:
    """The markers of the parts that these shards belong to."""
    basenames = {shard.path: shard.basename for shard in shards}
    return sorted({f'{PARTS}/{PurePosixPath(basenames[path]).parent}.json' for path in paths})


def summary(found: AuditResult, seconds: float) -> str:
    """Describe what was found in a few lines."""
    books, findings = found.books, found.findings
    streams = f' of {counted(len(books.streams), "stream")}' if books.manifest.streams else ''
    share = 100 / max(1, findings.checked)
    lines = [
        ('samples', books.num_samples, f'in {counted(len(books.shards), "shard")}{streams}, {books.num_bytes / 1e6:,.1f} MB'),
        (
            'checked',
            findings.checked,
            f'in {counted(found.num_read, "shard")} read; {seconds:.1f} s, {findings.checked / seconds:,.0f} samples/s',
        ),
        ('sound', findings.sound, f'{findings.sound * share:.1f} %'),
        *((f'  {oddity}', count, f'{count * share:.1f} %') for oddity, count in findings.odd.most_common() if count),
        *((f'unsound: {what}', count, f'{count * share:.1f} %') for what, count in findings.unsound.most_common()),
    ]
    width = max(len(label) for label, *_ in lines)
    table = [f'  {label:<{width}}  {count:>13,}  {note}'.rstrip() for label, count, note in lines]
    table += [f'  warning: {warning}' for warning in found.warnings]
    verdict = 'is NOT sound' if findings.problems else 'is sound' if findings.checked == books.num_samples else 'is sound as far as was looked'
    warned = f', with {counted(len(found.warnings), "warning")}' if found.warnings else ''
    return '\n'.join([f'{found.where}: {verdict}{warned}', *table])


def complaint(found: AuditResult) -> str:
    """The problems, an example or a few of each, and what to do."""
    lines = []
    for what, problems in found.problems:
        lines.append(f'{what}:')
        for problem in problems[:MAX_NAMED]:
            lines.append(f'  {described(problem)}')
        if len(problems) > MAX_NAMED:
            lines.append(f'  and {counted(len(problems) - MAX_NAMED, "more file")}; the report names them')
    return '\n'.join([*lines, 'what to do:', *(f'  {remedy}' for remedy in found.remedies)])


def described(problem: Problem) -> str:
    """A problem on one line."""
    where = '' if problem.where in problem.detail else f'{problem.where}: '  # what read_shard says names the file
    more = f' ({counted(problem.num_samples, "sample")})' if problem.num_samples > 1 else ''
    return f'{where}{problem.detail}{more}'
