"""Jobs and how they do, or everything about one.

    python -m diffusion.fleet status [--state queued|leased|done|failed|cancelled] [--limit N]
    python -m diffusion.fleet status JOB

JOB is an id, a number or a name. --json prints what the service says.
"""

from collections.abc import Sequence
from typing import Any

from diffusion.common.arguments import CommandParser, positive_int
from diffusion.contracts.errors import run_command

BLOCKS = 40  # characters of a curve
STATES = ('queued', 'leased', 'done', 'failed', 'cancelled')


def main(arguments: Sequence[str]) -> int:
    from diffusion.fleet.client.http import add_server

    parser = CommandParser('diffusion.fleet status', __doc__)
    parser.add_argument('job', nargs='?', metavar='JOB')
    parser.add_argument('--state', choices=STATES, help='only those')
    parser.add_argument('--limit', type=positive_int, default=50, metavar='N', help='jobs that are printed, the latest (default %(default)s)')
    parser.add_argument('--json', action='store_true', help='for programs')
    add_server(parser)
    args = parser.parse_args(arguments)

    def work() -> None:
        import json

        from diffusion.common.text import markdown_table, print_page
        from diffusion.fleet.client.following import job_ids, listed, progress, title_of
        from diffusion.fleet.client.http import connect

        client = connect(args)
        if args.job is not None:
            job = client.get(f'/jobs/{job_ids(client, [args.job])[0]}')
            print_page(json.dumps(job, indent=2) if args.json else '\n'.join(job_lines(job)))
            return
        jobs = list(listed(client, args.state))
        shown = jobs[-args.limit :]
        if args.json:
            print_page('\n'.join(map(json.dumps, shown)))
            return
        lines = [progress(jobs) if jobs else 'no job' + (f' is {args.state}' if args.state else '')]
        if shown:
            head = ['job', 'number', 'owner:', 'state:', 'machine:', 'step', 'attempts', 'dollars', 'cause:']
            rows = [
                [
                    title_of(job), str(job['number']), job['owner'], job['state'], job['node'], _steps(job), str(job['epoch']),
                    f'{job["dollars"]:.4f}', _first(job['cause']),
                ]
                for job in shown
            ]  # fmt: skip
            lines += ['', markdown_table(head, rows)]
        if len(jobs) > len(shown):
            lines.append(f'{len(jobs) - len(shown):,} earlier ones left out; --limit N prints more')
        print_page('\n'.join(lines))

    return run_command(work)


def job_lines(job: dict[str, Any]) -> list[str]:
    """All about one job."""
    from diffusion.common.text import markdown_table
    from diffusion.fleet.client.following import title_of

    lines = [
        f'{title_of(job)} ({job["id"]}), number {job["number"]} of {job["owner"]}',
        f'{job["recipe"]}: {job["state"]}{" on " + job["node"] if job["node"] else ""}, step {_steps(job)}, ${job["dollars"]:.4f}',
    ]
    lines += [f'cause: {job["cause"]}'] if job['cause'] else []
    lines += [f'it waits: {job["waits"]}'] if job['waits'] else []
    lines += curve_lines(job['curve'])
    if job['attempts']:
        head = ['attempt', 'machine:', 'GPU:', 'minutes', 'steps', 'steps/s', 'dollars', 'ending:', 'exit code']
        rows = []
        for attempt in job['attempts']:
            sec = attempt['last_sign'] - attempt['started']
            rows.append([
                str(attempt['epoch']), attempt['node'], attempt['gpu'], f'{sec / 60:.1f}', f'{attempt["first_step"]} to {attempt["last_step"]}',
                None if attempt['steps_per_sec'] is None else f'{attempt["steps_per_sec"]:.3g}', f'{sec / 3600 * attempt["price_per_hour"]:.4f}',
                attempt['ending'] or 'running', None if attempt['exit_code'] is None else str(attempt['exit_code']),
            ])  # fmt: skip
        lines += ['', markdown_table(head, rows)]
        lines += [f'attempt {attempt["epoch"]}: {attempt["message"].strip()}' for attempt in job['attempts'][-3:] if attempt['message'].strip()]
    lines += [f'its images are drawn by {", ".join(job["children"])}'] if job['children'] else []
    return lines


def curve_lines(curve: list[list[float | None]]) -> list[str]:
    """A line for each of loss, learning rate and steps/s: its course over the steps in blocks, its first and its last value."""
    lines = []
    for place, what in enumerate(('loss', 'learning rate', 'steps/s'), 1):
        known = [(point[0], point[place]) for point in curve if point[place] is not None]
        if known:
            values = [value for _, value in known if value is not None]
            low, high = min(values), max(values)
            # Means, as the loss of one batch says little.
            parts = [
                values[len(values) * at // BLOCKS : max(len(values) * (at + 1) // BLOCKS, len(values) * at // BLOCKS + 1)] for at in range(BLOCKS)
            ]
            means = [sum(part) / len(part) for part in parts] if len(values) >= BLOCKS else values
            drawn = ''.join('▁▂▃▄▅▆▇█'[round(7 * (mean - low) / (high - low)) if high > low else 0] for mean in means)
            lines.append(f'{what:<13} {drawn} {values[0]:.4g} at step {known[0][0]:,.0f}, {values[-1]:.4g} at step {known[-1][0]:,.0f}')
    return ['', *lines] if lines else []


def _steps(job: dict[str, Any]) -> str:
    return f'{job["step"]:,} of {job["num_steps"]:,}' if job['num_steps'] else f'{job["step"]:,}'


def _first(text: str) -> str:
    line = (text.splitlines() or [''])[0]
    return line if len(line) <= 100 else f'{line[:99]}…'
