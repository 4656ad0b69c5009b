"""Put jobs that have failed or were cancelled back into the queue; what they did until then counts against them no more.

    python -m diffusion.fleet retry JOB ...
    python -m diffusion.fleet retry --failed

JOB is an id, a number or a name.
"""

from collections.abc import Sequence

from diffusion.common.arguments import CommandParser
from diffusion.contracts.errors import run_command


def main(arguments: Sequence[str]) -> int:
    from diffusion.fleet.client.http import add_server

    parser = CommandParser('diffusion.fleet retry', __doc__)
    parser.add_argument('jobs', nargs='*', metavar='JOB')
    parser.add_argument('--failed', action='store_true', help='all that have failed')
    add_server(parser)
    args = parser.parse_args(arguments)
    if bool(args.jobs) == args.failed:
        parser.error('name jobs, or say --failed')

    def work() -> None:
        from diffusion.common.text import counted
        from diffusion.fleet.client.following import job_ids, listed
        from diffusion.fleet.client.http import connect, quoted

        client = connect(args)
        ids = [job['id'] for job in listed(client, 'failed')] if args.failed else job_ids(client, args.jobs)
        for job in ids:
            client.post(f'/jobs/{quoted(job)}/retry', may_repeat=False)
        print(f'{counted(len(ids), "job")} back in the queue')

    return run_command(work)
