"""Answers of the service as text for a terminal: jobs, one job with its curves, machines, bills; and the keys of a job."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from diffusion.common.text import counted, markdown_table
from diffusion.recipe.keys import MISSING, default_of, meanings
from fleet.client.following import progress, title_of
from fleet.jobs.spec import JobInput, JobSpec

BLOCKS = 40  # characters of a curve


def jobs_lines(jobs: Sequence[dict[str, Any]], limit: int, state: str | None) -> list[str]:
    """The latest jobs, a row each, below how far all of them are."""
    shown = jobs[-limit:]
    lines = [progress(jobs) if jobs else 'no job' + (f' is {state}' if state else '')]
    if shown:
        head = ['job', 'number', 'owner:', 'state:', 'machine:', 'step', 'attempts', 'dollars', 'cause:']
        rows = [
            [
                title_of(job), str(job['number']), job['owner'], job['state'], job['node'], _steps(job), str(job['epoch']), f'{job["dollars"]:.4f}',
                _first(job['cause']),
            ]
            for job in shown
        ]  # fmt: skip
        lines += ['', markdown_table(head, rows)]
    if len(jobs) > len(shown):
        lines.append(f'{len(jobs) - len(shown):,} earlier ones left out; --limit N prints more')
    return lines


def job_lines(job: dict[str, Any]) -> list[str]:
    """All about one job."""
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


def nodes_lines(answer: dict[str, Any], is_all: bool) -> list[str]:
    """Machines, a row each, below how many there are; those that are gone if `is_all`."""
    states = Counter(node['state'] for node in answer['nodes'])
    shown = [node for node in answer['nodes'] if is_all or node['state'] != 'gone']
    lines = [', '.join(f'{num:,} {state}' for state, num in states.items()) or 'no machine has enrolled yet']
    if shown:
        head = ['machine', 'pool:', 'state:', 'GPU:', 'GB', '$/h', 'job:', 'step', 'steps/s', 'last sign', 'done', 'attempts', 'reason:']
        rows = [
            [
                node['name'], node['pool'], node['state'], node['gpu'], f'{node["gpu_gb"]:g}',
                None if node['price_per_hour'] is None else f'{node["price_per_hour"]:.3f}',
                node['job_name'] or node['job'], None if node['job'] is None else f'{node["step"] or 0:,}',
                None if node['steps_per_sec'] is None else f'{node["steps_per_sec"]:.3g}', f'{node["silent_sec"]:.0f} s ago',
                str(node['done']), str(node['attempts']),
                '; '.join([*(line.strip() for line in node['reason'].splitlines()[:2]), *_other_recipes(node)]),
            ]
            for node in shown
        ]  # fmt: skip
        lines += ['', markdown_table(head, rows)]
    return [*lines, f'{answer["left_out"]:,} more'] if answer['left_out'] else lines


def _other_recipes(node: dict[str, Any]) -> list[str]:
    other = node['other_recipes']
    if not other or node['state'] == 'gone':
        return []
    more = f' and {len(other) - 1:,} more' if len(other) > 1 else ''
    return [f'gets no job of {other[0]}{more}: other than here, or missing (its version: {node["version"] or "not said"})']


def bill_lines(bill: dict[str, Any]) -> list[str]:
    """The bill as text."""
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


def keys_text() -> list[str]:
    """One line a key of a job: `key: default  # meaning`."""
    column = 34

    def described(section: type, indent: int) -> list[str]:
        lines = []
        texts = meanings(section)
        for item in fields(section):
            pad, name = '  ' * indent, item.name
            default = default_of(item)
            if is_dataclass(default):
                lines += [f'{pad}{name}:', *described(type(default), indent + 1)]
                continue
            shown = (
                '...' if default == MISSING else 'null' if default is None else str(default).lower() if isinstance(default, bool) else str(default)
            )
            lines.append(f'{f"{pad}{name}: {shown}":<{column}}  # {texts[name]}')
            if (section, name) == (JobSpec, 'inputs'):
                lines += [
                    f'{f"{pad}  NAME: path":<{column}}  # From the folder of the job file: submit uploads it, run takes it; or:',
                    f'{pad}  NAME:',
                ]
                lines += described(JobInput, indent + 2)
        return lines

    return described(JobSpec, 0)
