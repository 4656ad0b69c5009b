"""Download the results of a job; every file's digest is checked, and what is there already is left.

    python -m diffusion.fleet fetch JOB OUT

JOB is an id, a number or a name. OUT is a folder, made if it is missing.
"""

from collections.abc import Sequence
from pathlib import Path

from diffusion.common.arguments import CommandParser
from diffusion.common.text import print_message
from diffusion.contracts.errors import run_command


def main(arguments: Sequence[str]) -> int:
    from diffusion.fleet.client.http import add_server

    parser = CommandParser('diffusion.fleet fetch', __doc__)
    parser.add_argument('job', metavar='JOB')
    parser.add_argument('out', type=Path, metavar='OUT')
    add_server(parser)
    args = parser.parse_args(arguments)

    def work() -> None:
        from diffusion.fleet.client.following import fetch_results, job_ids
        from diffusion.fleet.client.http import connect

        client = connect(args)
        fetch_results(client, job_ids(client, [args.job])[0], args.out, print_message)
        print(args.out)

    return run_command(work, out=args.out)
