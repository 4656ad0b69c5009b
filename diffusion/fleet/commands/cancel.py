"""Cancel jobs. One on a machine is stopped with the machine's next sign of life; one that has ended stays unchanged.

    python -m diffusion.fleet cancel JOB ...
    python -m diffusion.fleet cancel --queued

JOB is an id, a number or a name.
"""

from collections.abc import Sequence

from diffusion.common.arguments import CommandParser
from diffusion.contracts.errors import run_command


def main(arguments: Sequence[str]) -> int:
    from diffusion.fleet.client.http import add_server

    parser = CommandParser('diffusion.fleet cancel', __doc__)
    parser.add_argument('jobs', nargs='*', metavar='JOB')
    parser.add_argument('--queued', action='store_true', help='all that wait; an operator: of all owners')
    add_server(parser)
    args = parser.parse_args(arguments)
    if bool(args.jobs) == args.queued:
        parser.error('name jobs, or say --queued')

    def work() -> None:
        from collections import Counter

        from diffusion.common.text import counted
        from diffusion.fleet.client.following import job_ids, listed
        from diffusion.fleet.client.http import connect, quoted

        client = connect(args)
        ids = [job['id'] for job in listed(client, 'queued')] if args.queued else job_ids(client, args.jobs)
        states = Counter(client.delete(f'/jobs/{quoted(job)}')['state'] for job in ids)
        others = [f'{counted(num, "job")} had ended: {state}' for state, num in states.items() if state != 'cancelled']
        print('; '.join([f'{counted(states["cancelled"], "job")} cancelled', *others]))

    return run_command(work)
