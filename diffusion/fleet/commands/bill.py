"""What machines cost: in all, by owner, by pool and by job.

    python -m diffusion.fleet bill [--since 2026-01-01] [--until 2026-02-01] [--jobs N] [--json]

An owner sees its own jobs. An operator sees everything, and also the hours of machines that no attempt covers: attempts and idle time add up to
what a provider bills from the start of each machine's worker to its last sign of life. `starts` is the part of attempts before their first step.
"""

from collections.abc import Sequence
from typing import Any

from diffusion.common.arguments import CommandParser
from diffusion.contracts.errors import run_command


def main(arguments: Sequence[str]) -> int:
    from diffusion.fleet.client.http import add_server

    parser = CommandParser('diffusion.fleet bill', __doc__)
    parser.add_argument('--since', metavar='TIME', help='in ISO 8601, of UTC')
    parser.add_argument('--until', metavar='TIME', help='likewise; not included')
    parser.add_argument('--jobs', type=int, default=20, metavar='N', help='that are listed, the dearest (default %(default)s)')
    parser.add_argument('--json', action='store_true', help='for programs')
    add_server(parser)
    args = parser.parse_args(arguments)

    def work() -> None:
        import json

        from diffusion.common.text import print_page
        from diffusion.fleet.client.http import connect

        answer = connect(args).get('/bill', since=args.since, until=args.until, limit=args.jobs)
        print_page(json.dumps(answer, indent=2) if args.json else '\n'.join(bill_lines(answer)))

    return run_command(work)


def bill_lines(bill: dict[str, Any]) -> list[str]:
    """The bill as text."""
    from diffusion.common.text import counted, markdown_table

    total = bill['total']
    what = f'{counted(total["attempts"], "attempt")} at {counted(total["jobs"], "job")}'
    lines = [f'${total["dollars"]:,.4f} for {what}, {total["hours"]:,.2f} h on machines']
    lines += [f'of which starts: ${total["start_dollars"]:,.4f}, {total["start_hours"]:,.2f} h']
    if 'session_dollars' in total:
        lines += [f'idle machines: ${total["idle_dollars"]:,.4f}, {total["idle_hours"]:,.2f} h']
        lines += [f'in all, as a provider bills: ${total["session_dollars"]:,.4f}, {total["session_hours"]:,.2f} h']
    if len(bill['owners']) > 1:
        rows = [[row['owner'], f'{row["jobs"]:,}', f'{row["attempts"]:,}', row['hours'], f'{row["dollars"]:,.4f}'] for row in bill['owners']]
        lines += ['', markdown_table(['owner', 'jobs', 'attempts', 'hours', 'dollars'], rows)]
    if bill['pools']:
        rows = [
            [row['pool'], f'{row["attempts"]:,}', row['hours'], f'{row["dollars"]:,.4f}', f'{row["start_dollars"]:,.4f}']
            + ([f'{row.get("idle_dollars", 0):,.4f}', f'{row.get("session_dollars", 0):,.4f}'] if 'session_dollars' in total else [])
            for row in bill['pools']
        ]
        head = ['pool', 'attempts', 'hours', 'dollars', 'starts', *(['idle', 'in all'] if 'session_dollars' in total else [])]
        lines += ['', markdown_table(head, rows)]
    if bill['jobs']:
        rows = [
            [row['name'] or f'job {row["number"]}', str(row['number']), row['owner'], row['state'], str(row['attempts']), row['hours'],
             f'{row["dollars"]:,.4f}', None if row['dollars_per_step'] is None else f'{row["dollars_per_step"]:.8f}', f'{row["lost_steps"]:,}']
            for row in bill['jobs']
        ]  # fmt: skip
        lines += ['', markdown_table(['job', 'number', 'owner:', 'state:', 'attempts', 'hours', 'dollars', 'dollars/step', 'steps twice'], rows)]
    if bill['jobs_left_out']:
        lines.append(f'{counted(bill["jobs_left_out"], "job")} left out; they are in the sums')
    return lines
