"""Download the images of a URL list, every row accounted for, in img2dataset's `webdataset` layout for data_prep.convert.

    python -m data_prep.download URLS DEST [--retry-failed] [--processes N] [--rank I --world-size N]

URLS is a parquet file with the columns URL (or url) and TEXT (or text, caption), or a folder of such files; DEST is a folder. Both may
be on a disk or in object storage (s3://, gs://, oci://).

A file goes to DEST/00000.tar, 00000.parquet ...; each file of a folder to a folder in DEST. The tar of a shard has the images as the
servers sent them (all are named .jpg, convert looks at the content), its parquet file has a line for every URL, with all the other
columns of the list. failures.parquet names key, url and reason of each row without an image. Run the same command again after a
stop to resume. Several hosts that share a folder of lists: the same command on each, with --rank and --world-size.

Servers that opt out with X-Robots-Tag (noai, noimageai, noindex, noimageindex) are respected. Only http and https addresses of the
public internet are asked, also after a redirect, and those of --allow-network; with another network or a larger --max-mb, the next run asks
for what it refused before. Use Re-LAION-5B or a list of your own, not the first LAION-5B, LAION-2B and LAION-400M
lists: LAION has withdrawn them, since some of their links lead to child abuse material.
"""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PositiveInt

from data_prep.crawling.addresses import network
from data_prep.engines.command import EXIT_CODES, SharedRequest, run_command
from data_prep.mds.job import Tally
from diffusion.common.command_line import option, positional


class DownloadRequest(SharedRequest):
    """Lists to download, and how."""

    urls: str = positional('URLS', 'parquet file, or folder of parquet files')
    dest: str = positional('DEST', 'folder for the shards, new or begun by this command')
    url_column: str | None = option(None, 'column with the URL (default: url, in any case)', 'NAME')
    caption_column: str | None = option(None, 'column with the caption (default: text or caption, in any case)', 'NAME')
    rows_per_shard: PositiveInt = option(10_000, 'rows of the list in a shard', 'N')
    retry_failed: bool = option(
        False, 'ask again for what may succeed now: time-outs, failed connections, HTTP 429 and 5xx; not for 404, opt-outs ...'
    )
    threads: PositiveInt = option(64, 'downloads at a time, in each process', 'N')
    timeout: PositiveInt = option(20, 'seconds for one image, in all', 'S')
    retries: Annotated[int, Field(ge=0, le=9)] = option(0, 'further tries at once; --retry-failed has better odds', 'N')
    max_mb: PositiveInt = option(64, 'refuse larger files', 'MB')
    user_agent: str | None = option(None, 'name of your crawler, for the User-Agent and for X-Robots-Tag rules that name it', 'TOKEN')
    allow_network: list[Annotated[Any, BeforeValidator(network)]] = option(
        [],
        'also ask servers of this network, such as 10.0.0.0/8 or fd00::/8 of a company; repeatable. What was refused before is asked for again',
        'CIDR',
    )
    work_folder: str | None = option(None, 'local disk for unfinished shards if DEST is in object storage (default: TMPDIR)', 'DIR')


def main() -> int:
    args = DownloadRequest.parse('data_prep.download', __doc__, EXIT_CODES)
    from data_prep.crawling.crawl import download  # what reads and writes is imported after the arguments are read
    from data_prep.crawling.fetch import Fetching

    fetching = Fetching(args.threads, args.timeout, args.retries, args.user_agent, args.max_mb << 20, tuple(args.allow_network))
    columns = args.url_column, args.caption_column

    def work() -> Tally:
        share, processes = args.own_share(), args.num_processes
        return download(args.urls, args.dest, fetching, share, *columns, args.rows_per_shard, args.retry_failed, processes, args.work_folder)

    return run_command(args.dest, work)


if __name__ == '__main__':
    raise SystemExit(main())
