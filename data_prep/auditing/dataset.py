"""The content of a dataset and its problems: the whole of an audit, of which samples.py does a shard; and its words for the terminal."""

import random
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, islice
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.auditing.samples import DAMAGED, NUM_NAMED, SCALES, Audit, Findings, Problem, ShardTask, key_hash, max_tokens
from data_prep.engines.local import map_parts
from data_prep.mds.job import JOB_NAME
from data_prep.mds.oddities import IDENTICAL, ODDITIES, REPEATED, Repeats, warn
from data_prep.mds.parts import PARTS
from diffusion.common.files import parse_json_object
from diffusion.common.storage import Folder, Stat, open_folder, scratch_for
from diffusion.common.text import counted
from diffusion.contracts.errors import DataError, ManifestError
from diffusion.contracts.manifest import EMPTY_CAPTIONS, MANIFEST_NAME, Manifest
from diffusion.datasets.shards import Disagreement, Shard, disagreements, disagreements_of_streams, in_stream, list_shards, read_shard

COUNTS = 'the books do not agree'
LOST = 'lost shard'
NUM_SHOWN = 24
# A VAE's scaling factor is 1 / the standard deviation of its latents, to which noise schedules are made (arXiv 2112.10752, section G). Over all
# values of large datasets it comes out below 1: 0.91 for Stable Diffusion's VAE on ImageNet and 0.90 for SDXL's on the images of Playground v2.5, by
# the means and deviations of channels that EDM2 (training/encoders.py) and Playground (vae/config.json) publish. A wrong factor has to be outside:
# SDXL's for Stable Diffusion's latents gives 0.65, the reverse 1.26, scaling twice 0.17, none 5.
LOWEST_STD, HIGHEST_STD = 0.8, 1.25
MAX_NAMED = 5  # examples of a problem on the terminal; the report has more


@dataclass
class DatasetMetadata:
    """The statements of a dataset about itself: manifests, index.json, failures.parquet."""

    manifest: Manifest  # of the whole
    streams: dict[str, Manifest] = field(default_factory=dict)  # the manifest of each; a dataset that is one stream has the name ''
    shards: list[Shard] = field(default_factory=list)  # of all streams that have an index
    problems: list[Problem] = field(default_factory=list)  # what does not agree

    def wrong(self, where: str, detail: str) -> None:
        self.problems.append(Problem(COUNTS, where, detail))

    def add(self, stream: str, found: Sequence[Disagreement]) -> None:
        for one in found:
            self.wrong(in_stream(stream, one.where), one.detail)

    @property
    def num_samples(self) -> int:
        return sum(shard.num_samples for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)


@dataclass(frozen=True)
class AuditResult:
    """The result of an audit; for the terminal and the report."""

    where: str
    metadata: DatasetMetadata  # what it says about itself, all of whose problems are among those of the findings
    findings: Findings
    num_read: int  # shards that were read
    remedies: list[str]  # what to do about the problems

    @property
    def problems(self) -> list[tuple[str, list[Problem]]]:
        """Problems by kind, in the order of the shards."""
        found: dict[str, list[Problem]] = {}
        for problem in self.findings.problems:
            found.setdefault(problem.what, []).append(problem)
        return sorted(found.items())

    def definition(self, oddity: str) -> str:
        """How an oddity is counted in this dataset."""
        return ODDITIES[oddity].definition.format(tokens=max_tokens(next(iter(self.metadata.streams.values()), self.metadata.manifest)))

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
    metadata = read_metadata(folder, files)
    lost = dict(lost_shards(folder, files, metadata.shards))
    findings, tasks = Findings(problems=metadata.problems), []
    for task in plan(metadata.shards, sample):
        if task.number in lost:
            findings.checked += len(task.samples)
            findings.reject(task.shard, LOST, lost.pop(task.number), len(task.samples))
        else:
            tasks.append(task)
    findings.problems += [Problem(LOST, metadata.shards[number].path, detail) for number, detail in lost.items()]  # in which no sample was chosen
    for found in map_parts(Audit(folder, metadata.streams), tasks, processes, 'audit'):
        findings.add(found)
    for numbers in _groups(metadata, findings.hashes).values():
        note_repeats(folder, metadata, np.concatenate([findings.hashes[number] for number in numbers]), findings)
    findings.problems += repeated_keys(folder, metadata, findings.keys)
    order = {shard.path: number for number, shard in enumerate(metadata.shards)}
    findings.problems.sort(key=lambda problem: (order.get(problem.where, -1), problem.where))  # workers end in any order
    findings.thumbnails.sort(key=lambda thumbnail: thumbnail.position)
    to_do = list(remedies(findings.problems, metadata.shards, folder, files, metadata.manifest.kind))
    return AuditResult(str(where), metadata, findings, len(tasks), to_do)


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


def note_repeats(folder: Folder, metadata: DatasetMetadata, hashes: np.ndarray, findings: Findings) -> None:
    """Add the repeats among samples to the findings, with keys of those that are there most often.

    Args:
        hashes: (samples, 3) position, and `content_hashes`, in ascending order.
    """
    ends = list(accumulate(shard.num_samples for shard in metadata.shards))
    for column, oddity in ((1, IDENTICAL), (2, REPEATED)):
        seen = Repeats()
        seen.add(hashes[:, column], hashes[:, 0])
        count, examples = seen.count(NUM_NAMED)
        findings.odd[oddity] += count
        for positions in examples:
            found = []
            for position in positions:
                number = bisect_right(ends, position)
                shard = metadata.shards[number]
                with scratch_for() as scratch:
                    rows = read_shard(folder, shard, scratch)
                    found.append(next(islice(rows, position - ends[number] + shard.num_samples, None))['key'])
            findings.odd_keys.setdefault(oddity, []).append((positions[0], ' and '.join(found)))


def repeated_keys(folder: Folder, metadata: DatasetMetadata, keys: Mapping[int, np.ndarray]) -> Iterator[Problem]:
    """Keys that are there more than once."""
    for numbers in _groups(metadata, keys).values():
        hashes = np.concatenate([keys[number] for number in numbers])
        ordered = np.sort(hashes)
        repeats = ordered[1:][ordered[1:] == ordered[:-1]]
        if not len(repeats):
            continue
        ends = np.cumsum([len(keys[number]) for number in numbers])
        first, second = np.searchsorted(ends, np.flatnonzero(hashes == repeats[0])[:2], side='right')
        one, other = metadata.shards[numbers[first]], metadata.shards[numbers[second]]
        with scratch_for() as scratch:
            key = next(row['key'] for row in read_shard(folder, other, scratch) if key_hash(row) == repeats[0].tobytes())
        detail = f'key {key!r} is in {one.path} already'
        yield Problem('repeated key', other.path, detail, len(repeats))


def _groups(metadata: DatasetMetadata, read: Iterable[int]) -> dict[str, list[int]]:
    """Numbers of the shards in which samples are compared with one another: the same image has one latent in each stream."""
    groups: dict[str, list[int]] = {}
    numbers_of = {metadata.shards[number].path: number for number in sorted(read, reverse=True)}  # one that is listed twice counts once
    for number in sorted(numbers_of.values()):
        groups.setdefault(metadata.shards[number].stream if metadata.manifest.kind == 'latents' else '', []).append(number)
    return groups


def remedies(problems: Sequence[Problem], shards: Sequence[Shard], folder: Folder, files: Mapping[str, Any], kind: str) -> Iterator[str]:
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


def read_metadata(folder: Folder, files: Mapping[str, Stat]) -> DatasetMetadata:
    """Read and compare them; no shard is read.

    Args:
        files: that are in the folder.

    Raises:
        ManifestError: there is no manifest of the whole.
        StorageError: something could not be read.
    """
    metadata = DatasetMetadata(Manifest.read(folder.url))
    for stream in metadata.manifest.streams or ['']:
        try:
            manifest = Manifest.read(f'{folder.url}/{stream}') if stream else metadata.manifest
            shards = list_shards(folder, [stream])
            metadata.streams[stream] = manifest
            metadata.shards += shards
            here = open_folder(f'{folder.url}/{stream}') if stream else folder
            metadata.add(stream, disagreements(manifest, shards, here))
            if manifest.kind == 'latents':
                _check_latents(folder, stream, manifest, metadata)
        except (DataError, ManifestError) as error:
            metadata.wrong(in_stream(stream, 'index.json'), str(error))
    if metadata.manifest.streams:
        metadata.add('', disagreements_of_streams(metadata.manifest, metadata.num_samples))
    _check_failures(folder, files, metadata)
    return metadata


def _check_latents(folder: Folder, stream: str, manifest: Manifest, metadata: DatasetMetadata) -> None:
    where, encoding = in_stream(stream, MANIFEST_NAME), manifest.columns['moments']['encoding'] if 'moments' in manifest.columns else ''
    width_px, height_px = manifest.encoded_px or (0, 0)
    width, height = (side // manifest.encoder.get('downsampling', 1) for side in (width_px, height_px))
    if not encoding.endswith(f',{height},{width}'):
        metadata.wrong(where, f'moments are {encoding or "not there"}, resolution {width_px} x {height_px} makes them {width} x {height}')
    for column in EMPTY_CAPTIONS.keys() & manifest.columns.keys():
        name = in_stream(stream, EMPTY_CAPTIONS[column])
        try:
            with scratch_for() as scratch:
                empty = np.load(folder.fetch(name, scratch))
        except FileNotFoundError:
            metadata.wrong(name, f'no such file; {column} need that of the empty caption')
        except ValueError as error:
            metadata.wrong(name, f'is not a NumPy array: {error}')
        else:
            shape = ','.join(map(str, empty.shape))
            if not manifest.columns[column]['encoding'].endswith(f':{shape}') or not np.isfinite(empty).all():
                metadata.wrong(name, f'is not finite, or its shape {shape} is not that of {column}')


def _check_failures(folder: Folder, files: Mapping[str, Stat], metadata: DatasetMetadata) -> None:
    """failures.parquet names every row that was dropped; read in pieces, since crawls lose rows by the million."""
    name, dropped = 'failures.parquet', Counter(metadata.manifest.dropped)
    if name not in files:
        if dropped.total():
            metadata.wrong(name, f'no such file; the manifest counts {counted(dropped.total(), "row")} as dropped')
        return
    found: Counter[str] = Counter()
    try:
        with scratch_for() as scratch, pq.ParquetFile(folder.fetch(name, scratch)) as table:
            for batch in table.iter_batches(columns=['reason']):
                found.update({entry['values']: entry['counts'] for entry in batch.column(0).value_counts().to_pylist()})
    except (pa.ArrowException, OSError, KeyError, IndexError) as error:
        metadata.wrong(name, f'cannot be read: {error}')
        return
    for reason in sorted(found.keys() | dropped.keys(), key=str):
        if found[reason] != dropped[reason]:
            metadata.wrong(name, f'has {counted(found[reason], "row")} with reason {reason!r}, the manifest counts {dropped[reason]}')


def lost_shards(folder: Folder, files: Mapping[str, Stat], shards: Sequence[Shard]) -> Iterator[tuple[int, str]]:
    """Number of each shard that is missing or has another size than index.json says, and which of the two."""
    for number, shard in enumerate(shards):
        stat = files.get(shard.path)
        if stat is None:
            yield number, f'{folder.url}/{shard.path}: no such file, but index.json names it'
        elif stat.num_bytes != shard.num_bytes:
            yield number, f'{folder.url}/{shard.path}: has {stat.num_bytes:,} bytes, index.json says {shard.num_bytes:,}'


def summary(found: AuditResult, seconds: float) -> str:
    """Describe what was found in a few lines."""
    metadata, findings = found.metadata, found.findings
    streams = f' of {counted(len(metadata.streams), "stream")}' if metadata.manifest.streams else ''
    share = 100 / max(1, findings.checked)
    lines = [
        ('samples', metadata.num_samples, f'in {counted(len(metadata.shards), "shard")}{streams}, {metadata.num_bytes / 1e6:,.1f} MB'),
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
    verdict = 'is NOT sound' if findings.problems else 'is sound' if findings.checked == metadata.num_samples else 'is sound as far as was looked'
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
