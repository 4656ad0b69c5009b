"""Lists of URLs, each crawled to a folder of shards: the whole of a download."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath

from data_prep.crawling.crawl import Crawl
from data_prep.crawling.fetch import Fetching
from data_prep.crawling.url_list import UrlList
from data_prep.mds.job import Share
from data_prep.mds.tally import Tally
from data_prep.sources.img2dataset import LISTS_NAME
from diffusion.common.storage import Folder, LocalFolder, open_folder, scratch_for, write
from diffusion.contracts.errors import DataError, IncompleteError


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
    for name in names[share.rank :: share.world_size]:
        folder = open_folder(f'{dest.rstrip("/")}/{PurePosixPath(name).stem}' if is_folder else dest)
        with scratch_for(open_folder(work_folder) if work_folder and not isinstance(folder, LocalFolder) else folder) as work:
            try:
                listed = UrlList.open(source.fetch(name, work), f'{source.url}/{name}', url_column, caption_column)
                tally = Crawl(listed, folder, work, rows_per_shard, processes, fetching).run(retry_failed)
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
    """The folder of the lists, their names in it, and whether the whole folder was meant.

    Raises:
        DataError: there are none.
    """
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
