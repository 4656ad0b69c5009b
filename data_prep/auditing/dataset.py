"""The content of a dataset and its problems: the whole of an audit, of which samples.py does a shard; and its words for the terminal."""

import random
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path, PurePosixPath

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.auditing.samples import DAMAGED, NUM_NAMED, SCALES, Audit, Findings, Problem, ShardTask, key_hash, max_tokens
from data_prep.engines.engine import map_parts
from data_prep.mds.dataset import PARTS
from data_prep.mds.job import JOB_NAME
from data_prep.mds.oddities import IDENTICAL, ODDITIES, REPEATED, Repeats, warn
from diffusion.common.files import parse_json_object
from diffusion.common.storage import Folder, Stat, open_folder, scratch_for
from diffusion.common.text import counted
from diffusion.contracts.errors import DataError, ManifestError
from diffusion.contracts.manifest import EMPTY_CAPTIONS, MANIFEST_NAME, Manifest
from diffusion.datasets.shards import Shard, disagreements, disagreements_of_streams, in_stream, list_shards, read_shard

COUNTS = 'the books do not agree'
LOST = 'lost shard'
NUM_SHOWN = 24
# A VAE's scaling factor is 1 / the standard deviation of its latents, to which noise schedules are made (arXiv 2112.10752, section G). Over all
# values of large datasets it comes out below 1: 0.91 for Stable Diffusion's VAE on ImageNet and 0.90 for SDXL's on the images of Playground v2.5, by
# the means and deviations of channels that EDM2 (training/encoders.py) and Playground (vae/config.json) publish. A wrong factor has to be outside:
# SDXL's for Stable Diffusion's latents gives 0.65, the reverse 1.26, scaling twice 0.17, none 5.
LOWEST_STD, HIGHEST_STD = 0.8, 1.25
MAX_NAMED = 5  # examples of a problem on the terminal; the report has more


@dataclass(frozen=True)
class AuditResult:
    """The result of an audit; for the terminal and the report."""

    where: str
    manifest: Manifest  # of the whole
    streams: Mapping[str, Manifest]  # the manifest of each; a dataset that is one stream has the name ''
    shards: Sequence[Shard]  # of all streams that have an index
    findings: Findings
    num_read: int  # shards that were read
    remedies: Sequence[str]  # what to do about the problems

    @property
    def num_samples(self) -> int:
        return sum(shard.num_samples for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)

    @property
    def problems(self) -> list[tuple[str, list[Problem]]]:
        """Problems by kind, in the order of the shards."""
        found: dict[str, list[Problem]] = {}
        for problem in self.findings.problems:
            found.setdefault(problem.what, []).append(problem)
        return sorted(found.items())

    def definition(self, oddity: str) -> str:
        """How an oddity is counted in this dataset."""
        return ODDITIES[oddity].definition.format(tokens=max_tokens(next(iter(self.streams.values()), self.manifest)))

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
    manifest = Manifest.read(folder.url)
    streams, shards, findings = dict[str, Manifest](), list[Shard](), Findings()
    findings.problems += [Problem(COUNTS, name, detail) for name, detail in check_metadata(folder, files, manifest, streams, shards)]
    lost = dict[int, str]()
    for number, shard in enumerate(shards):
        stat = files.get(shard.path)
        if stat is None or stat.num_bytes != shard.num_bytes:
            what = 'no such file, but index.json names it' if stat is None else f'has {stat.num_bytes:,} bytes, index.json says {shard.num_bytes:,}'
            lost[number] = f'{folder.url}/{shard.path}: {what}'
    tasks = []
    for task in plan(shards, sample):
        if task.number in lost:
            findings.checked += len(task.samples)
            findings.reject(task.shard, LOST, lost.pop(task.number), len(task.samples))
        else:
            tasks.append(task)
    findings.problems += [Problem(LOST, shards[number].path, detail) for number, detail in lost.items()]  # in which no sample was chosen
    for found in map_parts(Audit(folder, streams), tasks, processes, 'audit'):
        findings.add(found)
    by_stream = manifest.kind == 'latents'
    for numbers in _groups(shards, findings.hashes, by_stream):
        note_repeats(folder, shards, np.concatenate([findings.hashes[number] for number in numbers]), findings)
    for numbers in _groups(shards, findings.keys, by_stream):
        findings.problems += repeated_keys(folder, [shards[number] for number in numbers], [findings.keys[number] for number in numbers])
    order = {shard.path: number for number, shard in enumerate(shards)}
    findings.problems.sort(key=lambda problem: (order.get(problem.where, -1), problem.where))  # workers end in any order
    findings.thumbnails.sort(key=lambda thumbnail: thumbnail.position)
    to_do = list(remedies(findings.problems, shards, folder, files, manifest.kind))
    return AuditResult(str(where), manifest, streams, shards, findings, len(tasks), to_do)


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
    """Return the ascending numbers that are in start ... end - 1, counted from start."""
    return [number - start for number in numbers[bisect_left(numbers, start) : bisect_left(numbers, end)]]


def _groups(shards: Sequence[Shard], read: Iterable[int], by_stream: bool) -> Iterable[list[int]]:
    """Numbers of the shards in which samples are compared with one another: the same image has one latent in each stream."""
    groups: dict[str, list[int]] = {}
    numbers_of = {shards[number].path: number for number in sorted(read, reverse=True)}  # one that is listed twice counts once
    for number in sorted(numbers_of.values()):
        groups.setdefault(shards[number].stream if by_stream else '', []).append(number)
    return groups.values()


def note_repeats(folder: Folder, shards: Sequence[Shard], hashes: np.ndarray, findings: Findings) -> None:
    """Add the repeats among samples to the findings, with keys of those that are there most often.

    Args:
        hashes: (samples, 3) position, and `content_hashes`, in ascending order.
    """
    ends = list(accumulate(shard.num_samples for shard in shards))
    for column, oddity in ((1, IDENTICAL), (2, REPEATED)):
        seen = Repeats()
        seen.add(hashes[:, column], hashes[:, 0])
        count, examples = seen.count(NUM_NAMED)
        findings.odd[oddity] += count
        for positions in examples:
            found = []
            for position in positions:
                number = bisect_right(ends, position)
                with scratch_for() as scratch:
                    rows = read_shard(folder, shards[number], scratch)
                    found.append(next(islice(rows, position - ends[number] + shards[number].num_samples, None))['key'])
            findings.odd_keys.setdefault(oddity, []).append((positions[0], ' and '.join(found)))


def repeated_keys(folder: Folder, shards: Sequence[Shard], keys: Sequence[np.ndarray]) -> Iterator[Problem]:
    """Keys of some shards that are there more than once."""
    hashes = np.concatenate(keys)
    ordered = np.sort(hashes)
    repeats = ordered[1:][ordered[1:] == ordered[:-1]]
    if not len(repeats):
        return
    first, second = np.searchsorted(np.cumsum([len(its) for its in keys]), np.flatnonzero(hashes == repeats[0])[:2], side='right')
    with scratch_for() as scratch:
        key = next(row['key'] for row in read_shard(folder, shards[second], scratch) if key_hash(row) == repeats[0].tobytes())
    yield Problem('repeated key', shards[second].path, f'key {key!r} is in {shards[first].path} already', len(repeats))


def remedies(problems: Sequence[Problem], shards: Sequence[Shard], folder: Folder, files: Mapping[str, Stat], kind: str) -> Iterator[str]:
    """A line for each kind of thing to do, and the files to delete for it; they follow from what `Dataset` does when its command is run again."""
    kinds = {problem.what for problem in problems}
    whole = f'copy {folder.url} again from where it came, or make it again from its source in a new DEST'
    command = None  # `convert` or `encode`, where the dataset still has what these need to resume
    if JOB_NAME in files:
        with suppress(ValueError, KeyError):
            command = parse_json_object(folder.read(JOB_NAME))['command']
    if kinds & {LOST, DAMAGED, COUNTS} and command is None:
        yield f'{whole}: it has no {JOB_NAME}, so no command can repair it in place.'
    elif kinds & {LOST, DAMAGED, COUNTS}:
        basenames = {shard.path: shard.basename for shard in shards}
        damaged = [basenames[problem.where] for problem in problems if problem.what == DAMAGED]
        markers = sorted({f'{PARTS}/{PurePosixPath(basename).parent}.json' for basename in damaged})
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


def check_metadata(
    folder: Folder, files: Mapping[str, Stat], manifest: Manifest, streams: dict[str, Manifest], shards: list[Shard]
) -> Iterator[tuple[str, str]]:
    """Compare what a dataset says about itself (manifests, index.json, failures.parquet); no shard is read.

    Args:
        files: that are in the folder.
        streams, shards: get the manifest of each stream and the shards that its index names.

    Yields:
        (file, what is wrong with it).
    """
    for stream in manifest.streams or ['']:
        try:
            own = Manifest.read(f'{folder.url}/{stream}') if stream else manifest
            listed = list_shards(folder, [stream])
            streams[stream] = own
            shards += listed
            here = open_folder(f'{folder.url}/{stream}') if stream else folder
            for one in disagreements(own, listed, here):
                yield in_stream(stream, one.where), one.detail
            if own.kind == 'latents':
                yield from ((in_stream(stream, name), detail) for name, detail in _check_latents(here, own))
        except (DataError, ManifestError) as error:
            yield in_stream(stream, 'index.json'), str(error)
    if manifest.streams:
        yield from ((one.where, one.detail) for one in disagreements_of_streams(manifest, sum(shard.num_samples for shard in shards)))
    for detail in _check_failures(folder, files, Counter(manifest.dropped)):
        yield 'failures.parquet', detail


def _check_latents(stream: Folder, manifest: Manifest) -> Iterator[tuple[str, str]]:
    encoding = manifest.columns['moments']['encoding'] if 'moments' in manifest.columns else ''
    width_px, height_px = manifest.encoded_px or (0, 0)
    width, height = (side // manifest.encoder.get('downsampling', 1) for side in (width_px, height_px))
    if not encoding.endswith(f',{height},{width}'):
        yield MANIFEST_NAME, f'moments are {encoding or "not there"}, resolution {width_px} x {height_px} makes them {width} x {height}'
    for column in EMPTY_CAPTIONS.keys() & manifest.columns.keys():
        name = EMPTY_CAPTIONS[column]
        try:
            with scratch_for() as scratch:
                empty = np.load(stream.fetch(name, scratch))
        except FileNotFoundError:
            yield name, f'no such file; {column} need that of the empty caption'
        except ValueError as error:
            yield name, f'is not a NumPy array: {error}'
        else:
            shape = ','.join(map(str, empty.shape))
            if not manifest.columns[column]['encoding'].endswith(f':{shape}') or not np.isfinite(empty).all():
                yield name, f'is not finite, or its shape {shape} is not that of {column}'


def _check_failures(folder: Folder, files: Mapping[str, Stat], dropped: Counter[str]) -> Iterator[str]:
    """failures.parquet names every row that was dropped; read in pieces, since crawls lose rows by the million."""
    if 'failures.parquet' not in files:
        if dropped.total():
            yield f'no such file; the manifest counts {counted(dropped.total(), "row")} as dropped'
        return
    found: Counter[str] = Counter()
    try:
        with scratch_for() as scratch, pq.ParquetFile(folder.fetch('failures.parquet', scratch)) as table:
            for batch in table.iter_batches(columns=['reason']):
                found.update({entry['values']: entry['counts'] for entry in batch.column(0).value_counts().to_pylist()})
    except (pa.ArrowException, OSError, KeyError, IndexError) as error:
        yield f'cannot be read: {error}'
        return
    for reason in sorted(found.keys() | dropped.keys(), key=str):
        if found[reason] != dropped[reason]:
            yield f'has {counted(found[reason], "row")} with reason {reason!r}, the manifest counts {dropped[reason]}'


def summary(found: AuditResult, seconds: float) -> str:
    """Describe what was found in a few lines."""
    findings = found.findings
    streams = f' of {counted(len(found.streams), "stream")}' if found.manifest.streams else ''
    share = 100 / max(1, findings.checked)
    speed = f'{seconds:.1f} s, {findings.checked / seconds:,.0f} samples/s'
    lines = [
        ('samples', found.num_samples, f'in {counted(len(found.shards), "shard")}{streams}, {found.num_bytes / 1e6:,.1f} MB'),
        ('checked', findings.checked, f'in {counted(found.num_read, "shard")} read; {speed}'),
        ('sound', findings.sound, f'{findings.sound * share:.1f} %'),
        *((f'  {oddity}', count, f'{count * share:.1f} %') for oddity, count in findings.odd.most_common() if count),
        *((f'unsound: {what}', count, f'{count * share:.1f} %') for what, count in findings.unsound.most_common()),
    ]
    width = max(len(label) for label, *_ in lines)
    table = [f'  {label:<{width}}  {count:>13,}  {note}'.rstrip() for label, count, note in lines]
    table += [f'  warning: {warning}' for warning in found.warnings]
    verdict = 'is NOT sound' if findings.problems else 'is sound' if findings.checked == found.num_samples else 'is sound as far as was looked'
    warned = f', with {counted(len(found.warnings), "warning")}' if found.warnings else ''
    return '\n'.join([f'{found.where}: {verdict}{warned}', *table])


def complaint(found: AuditResult) -> str:
    """The problems, an example or a few of each, and what to do."""
    lines = []
    for what, problems in found.problems:
        lines += [f'{what}:', *(f'  {problem}' for problem in problems[:MAX_NAMED])]
        if len(problems) > MAX_NAMED:
            lines.append(f'  and {counted(len(problems) - MAX_NAMED, "more file")}; the report names them')
    return '\n'.join([*lines, 'what to do:', *(f'  {remedy}' for remedy in found.remedies)])
