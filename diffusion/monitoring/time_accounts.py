"""Accounts of the wall time of a run, over all its processes, and how often it should save. No torch, no Composer.

Goodput is the share of the wall time, from the start of the first process to the last sign of life, that computed steps which are in the
weights now. A killed process says nothing of its end: its last line is its last sign of life.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

from diffusion.common.files import is_number, read_json_lines
from diffusion.common.text import counted
from diffusion.contracts.errors import RunError
from diffusion.cost.formulas import SEC_PER_HOUR, best_interval_sec, overhead
from diffusion.recipe import Duration

Steps = tuple[int, int, float]  # of one line: they led from the first batch to the last, and computed for seconds
EARLY = 'stopped early'  # how a run ends whose score no longer improves (`eval.samples.stop`)
LATEST_SEC = 1e11  # Unix time of an event, in the year 5138: later ones are no dates
CATEGORIES = {
    'compute': 'steps that are in the weights now',
    'recompute': 'steps that were lost, done again or still to be',
    'start': 'from the start of a process to its first step',
    'data wait': 'steps waited for their batch',
    'save': 'training stood still for a checkpoint',
    'upload': 'at the end, for uploads to come through',
    'evaluation': 'evaluations',
    'sampling': 'sample grids',
    'stopped': 'nobody ran: killed, waiting for a machine, or switched off',
    'other': 'everything else',
}


@dataclass
class Accounts:
    """Seconds of wall time by category, and the durations that determine the interval between saves."""

    sec: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0.0))
    wall_sec: float = 0.0
    gpu_hours: float = 0.0  # of running processes
    num_processes: int = 0
    num_steps: int = 0  # taken, by all processes
    num_lost_steps: int = 0  # of these, done again
    num_unsaved_steps: int = 0  # of these, in no checkpoint
    saves_sec: list[float] = field(default_factory=list)  # each save
    starts_sec: list[float] = field(default_factory=list)  # each start that came to a step
    num_gpus: int = 1  # of the latest process

    @property
    def goodput(self) -> float:
        return self.sec['compute'] / self.wall_sec if self.wall_sec else 0.0

    @property
    def running_sec(self) -> float:
        return self.wall_sec - self.sec['stopped']

    @property
    def step_sec(self) -> float | None:
        """Mean time of a step, without evaluations, saves and the like in between."""
        stepping = self.sec['compute'] + self.sec['recompute'] + self.sec['data wait']
        return stepping / self.num_steps if self.num_steps else None


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Read the lines of an events.jsonl.

    Raises:
        RunError: one is not a stopwatch's.
    """
    return read_json_lines(path, _is_event, RunError)


def _is_event(line: dict[str, Any]) -> bool:
    sec, event = line.get('sec'), line.get('event')
    numbers = [line.get('time'), *(line[name] for name in ('gpus', 'batch', 'steps', 'saved') if name in line)]
    named = isinstance(event, str) and isinstance(line.get('process'), str) and ('batch' not in line or 'steps' in line)
    if not (named and isinstance(sec, dict) and all(map(is_number, (*numbers, *sec.values())))):
        return False
    return 0 <= line['time'] < LATEST_SEC and (event != 'save' or 'save' in sec)


def account(lines: Iterable[dict[str, Any]]) -> Accounts:
    """Add up the lines of an events.jsonl (diffusion/common/stopwatch.py says what they hold).

    Seconds within a process are its own count. Between two processes they are the difference of two clocks, perhaps of two machines: a
    process that seems to begin before the one before it was last seen counts as beginning just then. A process that continues after another
    has taken over is not counted any more. What a line that is missing would have said is `other`. Steps that no checkpoint holds when a process
    says that it ends are lost, and stay `num_unsaved_steps` until they are done again.
    """
    accounts = Accounts()
    sec, lineage = accounts.sec, list[Steps]()
    process, seen_at = None, 0.0  # the last sign of life, by the clock of its process
    taken_over = set[str]()
    starting, stepped, saved = 0.0, False, math.inf
    for line in lines:
        counted = sum(line['sec'].values())
        if line['process'] != process:
            if line['process'] in taken_over:
                continue
            if process is not None:
                stopped_sec = max(0.0, line['time'] - counted - seen_at)
                sec['stopped'] += stopped_sec
                accounts.wall_sec += stopped_sec
            process, starting, stepped = line['process'], 0.0, False
            taken_over.add(process)
            accounts.num_processes += 1
            seen_at = line['time'] - counted
        accounts.num_gpus = line.get('gpus', accounts.num_gpus)
        passed_sec = max(line['time'] - seen_at, counted)
        seen_at = line['time']
        accounts.wall_sec += passed_sec
        accounts.gpu_hours += passed_sec / SEC_PER_HOUR * accounts.num_gpus
        for phase, phase_sec in line['sec'].items():
            sec[phase if phase in sec else 'other'] += phase_sec
        sec['other'] += passed_sec - counted
        starting += line['sec'].get('start', 0.0)
        if line['event'] == 'begin':
            accounts.starts_sec.append(starting)
        if line['event'] == 'save':
            accounts.saves_sec.append(line['sec']['save'])
        if 'batch' in line:
            first, compute_sec = line['batch'] - line['steps'], line['sec'].get('compute', 0.0)
            accounts.num_steps += line['steps']
            accounts.num_lost_steps += _lose(accounts, lineage, first)
            if line['steps']:
                lineage.append((first, line['batch'], compute_sec))
                stepped = True
            else:  # the end of a process in the middle of a step; in its first, which compiles, nothing was lost but a start
                sec['compute'] -= compute_sec
                sec['recompute' if stepped else 'start'] += compute_sec
            saved = line['saved'] if line['event'] == 'end' and 'saved' in line else math.inf
    accounts.num_unsaved_steps = _lose(accounts, lineage, saved)
    return accounts


def _lose(accounts: Accounts, lineage: list[Steps], after: float) -> int:
    """The run resumes from batch `after`: return the number of steps since then, which were wasted. A line that is cut in two gives up its share."""
    num_lost = 0
    while lineage and lineage[-1][1] > after:
        first, last, sec = lineage.pop()
        kept = max(0, int(after) - first)
        lost = last - first - kept
        lost_sec = sec * lost / (last - first)
        num_lost += lost
        accounts.sec['compute'] -= lost_sec
        accounts.sec['recompute'] += lost_sec
        if kept:
            lineage.append((first, int(after), sec - lost_sec))
    return num_lost


def propose(accounts: Accounts, every: Duration, gpu_hours_between_failures: float) -> str | None:
    """Propose the interval between saves that would cost least, from the mean duration of saves and starts and an assumed rate of failures.

    None before the first save, and for a run of less than an hour, of which a failure in thousands says nothing.

    Args:
        every: the recipe's `checkpoint.every`, in seconds or batches.
    """
    if accounts.wall_sec < SEC_PER_HOUR or not accounts.saves_sec or not accounts.starts_sec or accounts.step_sec is None:
        return None
    save_sec, restart_sec = fmean(accounts.saves_sec), fmean(accounts.starts_sec)
    between_hours = gpu_hours_between_failures / accounts.num_gpus
    costs = save_sec, between_hours * SEC_PER_HOUR, restart_sec
    interval_sec = every.value * (accounts.step_sec if every.unit == 'ba' else 1)
    best_sec = max(1.0, best_interval_sec(*costs))
    cost, best_cost = (overhead(seconds, *costs) for seconds in (interval_sec, best_sec))
    if cost - best_cost < 1e-4:
        verdict = f'it costs {_percent(cost)} of the time, as little as the best, {best_sec:.0f}sec'
    else:
        verdict = f'{best_sec:.0f}sec would cost the least: {_percent(best_cost)} of the time instead of {_percent(cost)}'
    return (
        f'checkpoint.every: {every}; with {save_sec:.3g} s a save, {restart_sec:.3g} s a start and, assumed, a failure every '
        f'{between_hours:,.{0 if between_hours >= 10 else 1}f} hours (faults.gpu_hours_between_failures), {verdict}'
    )


def rows(accounts: Accounts) -> list[tuple[str, str, str, str]]:
    """(category, time, share of the wall time, meaning), the sum last."""
    unsaved = f', {accounts.num_unsaved_steps:,} not saved' if accounts.num_unsaved_steps else ''
    processes = f'{accounts.num_processes:,} {"process" if accounts.num_processes == 1 else "processes"}'
    steps = f'{counted(accounts.num_steps, "step")}, {accounts.num_lost_steps:,} of them lost{unsaved}; {processes}'
    parts = [*((name, accounts.sec[name], meaning) for name, meaning in CATEGORIES.items()), ('wall time', accounts.wall_sec, steps)]
    return [(name, _clock(sec), f'{sec / accounts.wall_sec if accounts.wall_sec else 0:.1%}', meaning) for name, sec, meaning in parts]


def summary(accounts: Accounts, proposal: str | None) -> str:
    """Format the accounts as a table for a terminal, without categories that took no time."""
    shown = [f'  {name:<10} {time:>16} {share:>7}  {meaning}' for name, time, share, meaning in rows(accounts) if share != '0.0%']
    return '\n'.join([f'where the time went: {accounts.goodput:.1%} goodput', *shown, *([proposal] if proposal else [])])


def _clock(sec: float) -> str:
    """`0:00:07.3` below a minute, whole seconds above."""
    return f'0:00:{sec:04.1f}' if sec < 59.95 else str(timedelta(seconds=round(sec)))


def _percent(share: float) -> str:
    """Format a share with two significant digits."""
    return f'{100 * share:.2g} %'
