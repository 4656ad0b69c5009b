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

from data_prep.crawling.addresses import network
from data_prep.mds.command import add_sharing_options, parser, run_command
from diffusion.common.arguments import positive_int


def main() -> int:
    options = parser('data_prep.download', __doc__)
    options.add_argument('urls', metavar='URLS', help='parquet file, or folder of parquet files')
    options.add_argument('dest', metavar='DEST', help='folder for the shards, new or begun by this command')
    options.add_argument('--url-column', metavar='NAME', help='column with the URL (default: url, in any case)')
    options.add_argument('--caption-column', metavar='NAME', help='column with the caption (default: text or caption, in any case)')
    options.add_argument('--rows-per-shard', type=positive_int, default=10_000, metavar='N', help='rows of the list in a shard (default %(default)s)')
    again = 'ask again for what may succeed now: time-outs, failed connections, HTTP 429 and 5xx; not for 404, opt-outs ...'
    options.add_argument('--retry-failed', action='store_true', help=again)
    options.add_argument('--threads', type=positive_int, default=64, metavar='N', help='downloads at a time, in each process (default %(default)s)')
    options.add_argument('--timeout', type=positive_int, default=20, metavar='S', help='seconds for one image, in all (default %(default)s)')
    tries = 'further tries at once; --retry-failed has better odds (default %(default)s)'
    options.add_argument('--retries', type=int, choices=range(10), default=0, metavar='N', help=tries)
    options.add_argument('--max-mb', type=positive_int, default=64, metavar='MB', help='refuse larger files (default %(default)s)')
    options.add_argument('--user-agent', metavar='TOKEN', help='name of your crawler, for the User-Agent and for X-Robots-Tag rules that name it')
    own = 'also ask servers of this network, such as 10.0.0.0/8 or fd00::/8 of a company; repeatable. What was refused before is asked for again'
    options.add_argument('--allow-network', type=network, action='append', default=[], metavar='CIDR', help=own)
    options.add_argument('--work-folder', metavar='DIR', help='local disk for unfinished shards if DEST is in object storage (default: TMPDIR)')
    add_sharing_options(options, merge=False)
    args = options.parse_args()
    from data_prep.crawling.crawl import download  # what reads and writes is imported after the arguments are read
    from data_prep.crawling.fetch import Fetching

    fetching = Fetching(args.threads, args.timeout, args.retries, args.user_agent, args.max_mb << 20, tuple(args.allow_network))
    columns = args.url_column, args.caption_column
    how = args.rows_per_shard, args.retry_failed, args.processes, args.work_folder
    return run_command(args, lambda share: download(args.urls, args.dest, fetching, share, *columns, *how))


if __name__ == '__main__':
    raise SystemExit(main())
