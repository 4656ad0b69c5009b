"""Lists of URLs, each downloaded to a folder of shards.

    DEST/lists.json                                  names of the lists, if they are a folder; each has a folder below DEST
    DEST/download.json                               the job: the list's SHA-256 and what else the shards depend on; written first
    DEST/00000.tar, 00000.parquet, 00000_stats.json  a shard; the stats last, and only of files that were checked
    DEST/failures.parquet                            key, url, reason of every row without an image

Workers write shards in a scratch folder, this process puts them into DEST. After a stop, whole shards stay; the stats know how large
the other two files are, so a shard of which only some files got through is noticed, and repaired.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_prep.crawling.crawled_shard import FAILED, SUCCESS, SUFFIXES, CrawlTask, ShardWriter, may_pass, reasons, shard_name, too_large, write_rows
from data_prep.crawling.fetch import PRIVATE, Fetching
from data_prep.engines.engine import WORKER_KILLED, WorkerKilled, in_processes, progress_bar
from data_prep.mds.dataset import FAILURES_SCHEMA
from data_prep.mds.job import Job, Share, Tally
from data_prep.sources.base import readable
from data_prep.sources.img2dataset import DONE_NAME, LISTS_NAME, RECORD_NAME
from data_prep.sources.parquet import each_once
from diffusion.common.files import parse_json_object, try_lock
from diffusion.common.storage import NUM_REQUESTS, Folder, LocalFolder, Stat, open_folder, scratch_for, write
from diffusion.common.text import counted
from diffusion.contracts.errors import DataError, IncompleteError

URL_COLUMNS = ('url',)
CAPTION_COLUMNS = ('text', 'caption')
# Shards have columns of their own by these names.
RESERVED = {
    *('key', 'url', 'caption', 'status', 'error_message', 'width', 'height', 'original_width', 'original_height', 'exif'),
    *('md5', 'sha256', 'sha512'),
}
ATTEMPTS = 2  # at a shard before the command gives up
STATS = SUFFIXES[-1]
# What to say of rows that failed: the first line that applies to their reason.
ADVICE: tuple[tuple[Callable[[str], object], str], ...] = (
    (may_pass, 'may succeed another time (servers and networks that failed): run again with --retry-failed'),
    (
        f'{FAILED}{PRIVATE}'.__eq__,
        'refused, since the address is not of the public internet; if these are your own servers, run again with --allow-network NETWORK, such as '
        '10.0.0.0/8',
    ),
    (too_large, 'refused for the size; run again with a larger --max-mb to have them'),
    (lambda reason: reason.startswith(FAILED), 'failed for good (HTTP 404, opted out ...) and will not be asked for again'),
)


@dataclass
class UrlList:
    """A list of images to download, as LAION and img2dataset publish them: a parquet file with a URL and a caption a row."""

    path: Path
    where: str  # what messages call it
    num_rows: int
    names: dict[str, str]  # what is read of it: name in the shards by column of the list
    schema: pa.Schema  # of the rows as they are in the shards
    remarks: list[str] = field(default_factory=list)  # what became of columns that cannot stay as they are

    @classmethod
    def open(cls, path: Path, where: str, url_column: str | None = None, caption_column: str | None = None) -> Self:
        """Read which columns the list has.

        Raises:
            DataError: it cannot be read, is empty, or it is not clear which columns have the URL and the caption.
        """
        with readable(where), pq.ParquetFile(path) as file:
            schema, num_rows = file.schema_arrow, file.metadata.num_rows
            each_once(schema.names)
        if not num_rows:
            raise DataError(f'{where}: has no rows')
        url = _choose(where, schema.names, url_column, URL_COLUMNS, '--url-column')
        caption = _choose(where, schema.names, caption_column, CAPTION_COLUMNS, '--caption-column')
        types, names, remarks = [pa.string(), pa.string()], {url: 'url', caption: 'caption'}, []
        for column in schema:
            if column.name in names:
                continue
            kept_as = _storable(column.type)
            if kept_as is None:
                remarks.append(f'column {column.name} is left out: JSON cannot hold {column.type}')
                continue
            name = column.name
            while name in RESERVED or name in names.values():
                name = f'source_{name}'
            if name != column.name:
                remarks.append(f'column {column.name} is kept as {name}: a shard has a column of its own by that name')
            types.append(kept_as)
            names[column.name] = name
        return cls(path, where, num_rows, names, pa.schema(zip(names.values(), types, strict=True)), remarks)

    def shards(self, rows_per_shard: int, wanted: Collection[int]) -> Iterator[tuple[int, pa.Table]]:
        """(number, rows) of the wanted pieces of `rows_per_shard` rows, the last one shorter, with the columns' names in the shards."""
        rest, number = self.schema.empty_table(), 0
        with readable(self.where), pq.ParquetFile(self.path) as file:
            for batch in file.iter_batches(batch_size=min(rows_per_shard, 10_000), columns=list(self.names)):
                columns = [_as(batch.column(name), kind) for name, kind in zip(self.names, self.schema.types, strict=True)]
                rest = pa.concat_tables([rest, pa.Table.from_arrays(columns, schema=self.schema)])
                while rest.num_rows >= rows_per_shard:
                    if number in wanted:
                        yield number, rest.slice(0, rows_per_shard)
                    rest, number = rest.slice(rows_per_shard), number + 1
        if rest.num_rows and number in wanted:
            yield number, rest


def download(
    urls: str,
    dest: str,
    fetching: Fetching,
    share: Share,
    url_column: str | None = None,
    caption_column: str | None = None,
    rows_per_shard: int = 10_000,
    retry_failed: bool = False,
    processes: int = 1,
    work_folder: str | None = None,
) -> Tally:
    """Download the lists of this share; returns what became of their rows.

    Raises:
        DataError: a list, DEST or an option is wrong.
        IncompleteError: some shards could not be written; all others were.
    """
    if Path(dest).is_file():
        raise DataError(f'{dest}: is a file; name a folder')
    source, names, is_folder = find_lists(urls)
    if not is_folder and share.world_size > 1:
        raise DataError(f'{urls}: is one file, which --world-size {share.world_size} hosts cannot share; split it into a folder of files')
    if is_folder:
        write(open_folder(dest), LISTS_NAME, json.dumps([PurePosixPath(name).stem for name in names]).encode())
    total, problems = Tally(), []
    for name in share.of(names):
        folder = open_folder(f'{dest.rstrip("/")}/{PurePosixPath(name).stem}' if is_folder else dest)
        with scratch_for(open_folder(work_folder) if work_folder and not isinstance(folder, LocalFolder) else folder) as work:
            try:
                listed = UrlList.open(source.fetch(name, work), f'{source.url}/{name}', url_column, caption_column)
                tally = Crawl(listed, folder, work, rows_per_shard, processes, fetching, retry_failed).run()
            except FileNotFoundError as error:
                raise DataError(str(error)) from error
            except IncompleteError as error:  # the other lists need not wait
                problems.append(str(error))
                continue
        total.add(tally)
        total.remarks += [remark for remark in tally.remarks if remark not in total.remarks]
    if problems:
        raise IncompleteError('\n'.join(problems))
    return total


def find_lists(urls: str) -> tuple[Folder, list[str], bool]:
    """The folder of the lists, their names in it, and whether the whole folder was meant. Raises DataError: there are none."""
    if '://' not in urls and not Path(urls).exists():
        raise DataError(f'{urls}: no such file or folder')
    if urls.endswith('.parquet') if '://' in urls else Path(urls).is_file():
        parent, _, name = (urls if '://' in urls else str(Path(urls).absolute())).rpartition('/')
        return open_folder(parent), [name], False
    folder = open_folder(urls)
    names = [name for name in folder.files() if name.endswith('.parquet') and '/' not in name]
    if not names:
        raise DataError(f'{urls}: has no parquet file; URLS is a parquet file, or a folder of them')
    return folder, names, True


@dataclass
class Crawl:
    """Downloads one list."""

    urls: UrlList
    dest: Folder
    work: Path  # an empty local folder, on DEST's disk if that is local
    rows_per_shard: int  # rows of the list in a shard
    processes: int
    fetching: Fetching
    retry_failed: bool  # whether to ask again for what may succeed another time

    def run(self) -> Tally:
        """Download what is not there yet; returns what became of all rows.

        Raises:
            DataError: DEST holds something else, or was begun with another list or other settings.
            IncompleteError: some shards could not be written.
        """
        self.problems: list[str] = []
        self.num_tried = 0
        self.num_shards = -(-self.urls.num_rows // self.rows_per_shard)
        self.writer = ShardWriter(self.dest, self.work, self.fetching, self.retry_failed)
        with _alone(self.dest):
            with self.urls.path.open('rb') as file:
                digest = hashlib.file_digest(file, 'sha256').hexdigest()
            settings = {'command': 'download', 'list sha256': digest, 'rows per shard': self.rows_per_shard, 'columns': self.urls.names}
            Job(self.dest, settings, RECORD_NAME).begin()
            self.shards, torn = self._find_shards()
            done = sum(stats['count'] for stats in self.shards.values())
            with progress_bar(desc=self.urls.path.stem, unit='rows', total=self.urls.num_rows, initial=done) as self.progress:
                self._download(torn)
            if self.problems:
                raise IncompleteError(
                    f'{self.dest.url}: {len(self.shards)} of {self.num_shards} shards are there; {self.problems[0]}; '
                    'nothing is lost, run the same command again'
                )
            self._write_failures()
        return self._tally()

    def _find_shards(self) -> tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]]]:
        """The stats of the shards that are there, and of those whose files do not fit together.

        Raises:
            DataError: stats that this command cannot have written.
        """
        files = self.dest.files()

        def read(number: int) -> dict[str, Any]:
            name = f'{shard_name(number)}{STATS}'
            try:
                return parse_json_object(self.dest.read(name))
            except ValueError as error:
                raise DataError(f'{self.dest.url}/{name}: cannot be read: {error}; restore it, or download into another DEST') from error

        there = [number for number in range(self.num_shards) if f'{shard_name(number)}{STATS}' in files]
        whole, torn = dict[int, dict[str, Any]](), dict[int, dict[str, Any]]()
        with ThreadPoolExecutor(NUM_REQUESTS) as threads:
            for number, stats in zip(there, threads.map(read, there), strict=True):
                sizes = {suffix: files.get(f'{shard_name(number)}{suffix}', Stat(-1, '')).num_bytes for suffix in stats['bytes']}
                (whole if sizes == stats['bytes'] else torn)[number] = stats
        return whole, torn

    def _download(self, torn: Mapping[int, dict[str, Any]]) -> None:
        self._work_on(CrawlTask(number, networks=stats['networks']) for number, stats in torn.items())
        for number in torn.keys() - self.shards.keys():
            self.dest.delete(f'{shard_name(number)}{STATS}')  # or they could be taken for those of the next files
        before = dict(self.shards)
        for _ in range(ATTEMPTS):
            missing = set(range(self.num_shards)) - set(self.shards)
            if missing:
                self.problems = []
                pieces = self.urls.shards(self.rows_per_shard, missing)
                self._work_on(CrawlTask(number, write_rows(number, rows, self.rows_per_shard, self.work)) for number, rows in pieces)
        if not self.problems:  # what was fetched just now need not be asked for again
            again = [CrawlTask(number, networks=stats['networks'], asks_again=True) for number, stats in before.items()]
            self._work_on(task for task in again if any(self.writer.is_due(reason, task.networks) for reason in before[task.number]['status_dict']))

    def _work_on(self, tasks: Iterable[CrawlTask]) -> None:
        """Put the shards to their places as they come; an error of one is among the problems."""
        try:
            with closing(in_processes(self.writer, tasks, self.processes, preload=[ShardWriter.__module__])) as outcomes:
                for outcome in outcomes:
                    if outcome.problem:
                        self.problems.append(outcome.problem)
                        continue
                    for suffix in SUFFIXES:
                        name = f'{shard_name(outcome.number)}{suffix}'
                        self.dest.put(self.work / name, name)
                    if outcome.number not in self.shards:
                        self.progress.update(outcome.stats['count'])
                    self.shards[outcome.number] = outcome.stats
                    self.num_tried += outcome.num_tried
        except WorkerKilled:
            self.problems.append(WORKER_KILLED)

    def _write_failures(self) -> None:
        path = self.work / DONE_NAME
        with pq.ParquetWriter(path, FAILURES_SCHEMA) as writer:
            for number in range(self.num_shards):
                with (
                    TemporaryDirectory(dir=self.work) as scratch,
                    pq.ParquetFile(self.dest.fetch(f'{shard_name(number)}.parquet', Path(scratch))) as file,
                ):
                    rows = file.read(columns=['key', 'url', 'status', 'error_message']).sort_by('key')
                columns = [rows['key'], pc.fill_null(rows['url'], ''), pa.array(reasons(rows), pa.string())]
                table = pa.Table.from_arrays(columns, schema=FAILURES_SCHEMA)
                writer.write_table(table.filter(pc.not_equal(table['reason'], SUCCESS)))
        self.dest.put(path, DONE_NAME)

    def _tally(self) -> Tally:
        tally = Tally(attempted_now=self.num_tried, remarks=list(self.urls.remarks))
        for _, stats in sorted(self.shards.items()):
            tally.kept_in[''] += stats['successes']
            tally.dropped.update({reason: count for reason, count in stats['status_dict'].items() if reason != SUCCESS})
            tally.num_bytes += sum(stats['bytes'].values())
        failed = Counter[str]()
        for reason, count in tally.dropped.items():
            failed[next((advice for applies, advice in ADVICE if applies(reason)), '')] += count
        tally.remarks += [f'{self.dest.url}: {counted(failed[advice], "row")} {advice}' for _, advice in ADVICE if failed[advice]]
        return tally


@contextmanager
def _alone(dest: Folder) -> Iterator[None]:
    """Hold a local DEST for this process; the lock goes with the process, however it ends."""
    if not isinstance(dest, LocalFolder):
        yield
        return
    with (Path(dest.url) / '.lock').open('w') as file:
        if not try_lock(file):
            raise DataError(f'{dest.url}: another process is downloading here; wait for it or stop it')
        yield


def _choose(where: str, present: list[str], asked_for: str | None, known: tuple[str, ...], option: str) -> str:
    found = [name for name in present if name == asked_for] if asked_for else [name for name in present if name.lower() in known]
    if len(found) != 1:
        what = f'no column {asked_for or " or ".join(known)}' if not found else f'several columns that could be meant, {", ".join(found)}'
        raise DataError(f'{where}: has {what}; it has {", ".join(present)}; name one with {option}')
    return found[0]


def _as(values: pa.Array, kind: pa.DataType) -> pa.Array:
    if not pa.types.is_string(values.type):
        return values.cast(kind)
    try:
        return values.cast(pa.binary()).cast(pa.string())  # parquet files promise UTF-8, and nobody has checked
    except pa.ArrowInvalid:
        texts = values.cast(pa.binary()).to_pylist()
        return pa.array([None if text is None else text.decode(errors='replace') for text in texts], pa.string())


def _storable(kind: pa.DataType) -> pa.DataType | None:
    """The type that a column gets in the JSON files of a shard: numbers and text, and lists of them; dates and the like become text."""
    types = pa.types
    if types.is_list(kind):
        of = _storable(kind.value_type)
        return None if of is None else pa.list_(of)
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_float32(kind) or types.is_float64(kind) or types.is_null(kind):
        return kind
    is_text = types.is_string(kind) or types.is_large_string(kind) or types.is_temporal(kind) or types.is_decimal(kind) or types.is_dictionary(kind)
    return pa.string() if is_text else None
