"""Watch jobs until all have ended.

    python -m diffusion.fleet watch [JOB ...] [--every-sec 10]

Without JOB (ids, numbers or names): all that wait or run now. Exit code 0 if all are done, 3 if some have failed or were cancelled.
"""

from collections.abc import Sequence

from diffusion.common.arguments import CommandParser, positive_float
from diffusion.common.text import print_page
from diffusion.contracts.errors import run_command


def main(arguments: Sequence[str]) -> int:
    from diffusion.fleet.client.http import add_server

    parser = CommandParser('diffusion.fleet watch', __doc__)
    parser.add_argument('jobs', nargs='*', metavar='JOB')
    parser.add_argument('--every-sec', type=positive_float, default=10, help='between two looks (default %(default)s)')
    add_server(parser)
    args = parser.parse_args(arguments)

    def work() -> int:
        from diffusion.fleet.client.following import follow, job_ids
        from diffusion.fleet.client.http import connect

        client = connect(args)
        ids = set(job_ids(client, args.jobs)) if args.jobs else None
        return follow(client, ids, args.every_sec, print_page)

    return run_command(work)
