"""Download the pictures of a URL list, every row accounted for, in img2dataset's `webdataset` layout for data_prep.convert.

    python -m data_prep.download URLS DEST [--retry-failed] [--processes N] [--rank I --world-size N]

URLS is a parquet file with the columns URL (or url) and TEXT (or text, caption), or a folder of such files; DEST is a folder. Both may
be on a disk or in object storage (s3://, gs://, oci://). Install what it needs with pip install 'diffusion[download]'.

A file goes to DEST/00000.tar, 00000.parquet ...; each file of a folder to a folder in DEST. The tar of a shard has the pictures as the
servers sent them (all are named .jpg, convert looks at the content), its parquet file has a line for every URL, with all the other
columns of the list. failures.parquet names key, url and reason of each row without a picture. Run the same command again after a
stop: it goes on. Several hosts that share a folder of lists: the same command on each, with --rank and --world-size.

Servers that opt out with X-Robots-Tag (noai, noimageai, noindex, noimageindex) are respected. Only http and https addresses of the
public internet are asked, also after a redirect. Use Re-LAION-5B or a list of your own, not the first LAION-5B, LAION-2B and LAION-400M
lists: LAION has withdrawn them, since some of their links lead to child abuse material.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from data_prep.command import add_sharing_options, parser, run_command
from data_prep.crawling.crawl import Crawl
from data_prep.crawling.crawled_shard import Fetching
from data_prep.crawling.safe_fetch import Limits
from data_prep.crawling.url_list import UrlList
from data_prep.errors import DataError, IncompleteError
from data_prep.mds.dataset import Share
from data_prep.mds.tally import Tally
from data_prep.sources.img2dataset import LISTS_NAME
from diffusion.arguments import positive_int
from diffusion.storage import Folder, LocalFolder, open_folder, scratch_for, write


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
    if find_spec('img2dataset') is None:
        raise DataError("img2dataset is not installed: pip install 'diffusion[download]'")
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


def main() -> int:
    options = parser('data_prep.download', __doc__)
    options.add_argument('urls', metavar='URLS', help='parquet file, or folder of parquet files')
    options.add_argument('dest', metavar='DEST', help='folder for the shards, new or begun by this command')
    options.add_argument('--url-column', metavar='NAME', help='column with the URL (default: url, in any case)')
    options.add_argument('--caption-column', metavar='NAME', help='column with the caption (default: text or caption, in any case)')
    options.add_argument('--rows-per-shard', type=positive_int, default=10_000, metavar='N', help='rows of the list in a shard (default %(default)s)')
    options.add_argument('--retry-failed', action='store_true', help='ask again for what failed before, except what was opted out or refused')
    options.add_argument('--threads', type=positive_int, default=64, metavar='N', help='downloads at a time, in each process (default %(default)s)')
    options.add_argument('--timeout', type=positive_int, default=20, metavar='S', help='seconds for one picture, in all (default %(default)s)')
    options.add_argument(
        '--retries',
        type=int,
        choices=range(10),
        default=0,
        metavar='N',
        help='further tries at once; --retry-failed has better odds (default %(default)s)',
    )
    options.add_argument('--max-mb', type=positive_int, default=64, metavar='MB', help='refuse larger files (default %(default)s)')
    options.add_argument('--user-agent', metavar='TOKEN', help='name of your crawler, for the User-Agent and for X-Robots-Tag rules that name it')
    options.add_argument('--allow-loopback', action='store_true', help='also ask servers on this host, such as in a test')
    options.add_argument('--work-folder', metavar='DIR', help='local disk for unfinished shards if DEST is in object storage (default: TMPDIR)')
    add_sharing_options(options, merge=False)
    args = options.parse_args()
    fetching = Fetching(args.threads, args.timeout, args.retries, args.user_agent, Limits(args.max_mb << 20, args.allow_loopback))
    return run_command(
        args.dest,
        lambda: download(
            args.urls,
            args.dest,
            fetching,
            Share(args.rank, args.world_size),
            args.url_column,
            args.caption_column,
            args.rows_per_shard,
            args.retry_failed,
            args.processes,
            args.work_folder,
        ),
    )


if __name__ == '__main__':
    raise SystemExit(main())
