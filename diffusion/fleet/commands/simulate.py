"""Simulate a fleet on a virtual clock, under the very policies that the service has: how long, how many dollars, how many jobs on one machine.

    python -m diffusion.fleet simulate                              # the post's run: 1,000 jobs on 40 machines
    python -m diffusion.fleet simulate --interruptions-times 10     # what if they were ten times as frequent: next to the run as it is
    python -m diffusion.fleet simulate --checkpoint-steps 20 --price 0.25
    python -m diffusion.fleet simulate --table                      # what each policy is worth

What differs from the defaults is shown next to them. Minutes are billed ones; dollars are those of attempts, without machines that start or idle.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from diffusion.common.arguments import CommandParser, non_negative_float, positive_float, positive_int
from diffusion.common.text import markdown_table, print_page
from diffusion.contracts.errors import FINISHED

if TYPE_CHECKING:
    from diffusion.fleet.simulation.runs import FleetOutcome, FleetSettings

POLICIES = ('bans', 'quarantine', 'slow', 'blame')
POST = ('published (SaladCloud)', '1000', '', '90.1 / 9.0 / 0.9', '62.0', '53.8', '738', '', '335', '0.335', '')
HEADER = (
    'fleet:',
    'done (worst run)',
    'failed',
    'on 1 / 2 / 3+ machines, %',
    'mean min',
    'median',
    'max',
    'hours',
    'dollars',
    'per job done',
    'lost work',
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(arguments)
    # After the arguments: --help does not wait for the recipe's schema.
    from diffusion.fleet.simulation.runs import FleetSettings
    from diffusion.fleet.simulation.simulation import scenarios, simulate_seeds

    size = FleetSettings(num_jobs=args.jobs, num_nodes=args.nodes)
    base = replace(size, bad_nodes=min(size.bad_nodes, args.nodes))
    asked = _asked(args, base)
    if asked.bad_nodes > args.nodes:
        parser.error(f'--bad-nodes {asked.bad_nodes:g}: more than --nodes {args.nodes}; give at most {args.nodes}')
    if asked.num_poison > args.jobs:
        parser.error(f'--poison {asked.num_poison}: more than --jobs {args.jobs}; give at most {args.jobs}')
    if args.table:
        shown = scenarios(asked)
    else:
        shown = {'default': base} if asked == base else {'default': base, 'asked': asked}
    rows, notes = [], [f'Means of {args.seeds} runs of {args.jobs:,} jobs on up to {args.nodes} machines.']
    try:
        for name, settings in shown.items():
            rows.append(_row(name, simulate_seeds(settings, range(args.seeds))))
    except RuntimeError as error:
        print_page(f'{error}: with these interruptions and checkpoints a job never gets to its end.')
        return 1
    if base == FleetSettings():
        rows.append(list(POST))
        notes.append('The published fleet did not move the jobs of slow machines: compare it with --without slow.')
    if changed := _differences(base, asked):
        notes.append(f'{"All rows" if args.table else "Asked"}: {", ".join(changed)}.')
    print_page('\n'.join([markdown_table(HEADER, rows), '', *notes]))
    return FINISHED


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser('diffusion.fleet simulate', __doc__)
    parser.add_argument('--jobs', type=positive_int, default=1000, help='default: %(default)s')
    parser.add_argument('--nodes', type=positive_int, default=40, help='machines at the same time, at most; default: %(default)s')
    parser.add_argument('--seeds', type=positive_int, default=20, help='runs to take the mean of; default: %(default)s')
    parser.add_argument('--interruptions-per-hour', type=non_negative_float, metavar='RATE', help='of each machine; default: 0.101')
    parser.add_argument('--interruptions-times', type=non_negative_float, metavar='TIMES', default=1.0, help='so many times as frequent')
    parser.add_argument('--steps', type=positive_int, help='of a job; the time of a job stays; default: 1400')
    parser.add_argument('--checkpoint-steps', type=positive_int, metavar='STEPS', help='between checkpoints; default: 100')
    parser.add_argument('--price', type=positive_float, metavar='DOLLARS', help='of the machine-hour; default: 0.324')
    parser.add_argument('--bad-nodes', type=non_negative_float, metavar='NUMBER', help='of --nodes that fail every job after a minute; default: 1')
    parser.add_argument('--poison', type=_count, metavar='JOBS', help='of --jobs that fail on every machine; default: 0')
    parser.add_argument('--flood', type=_count, metavar='JOBS', help='poison jobs of another owner, submitted before all others; default: 0')
    parser.add_argument('--lease-min', type=positive_float, metavar='MIN', help='a silent machine loses its job after this time; default: 2')
    parser.add_argument(
        '--cold-start-min', type=non_negative_float, metavar='MIN', help='mean, from the request of a machine to its first job; default: 10'
    )
    parser.add_argument('--attempts', type=positive_int, help='limits.attempts of the jobs; default: 3')
    parser.add_argument('--losses', type=positive_int, help='limits.losses of the jobs; default: 20')
    parser.add_argument('--without', choices=POLICIES, action='append', default=[], help='switch off a policy; repeatable')
    parser.add_argument('--table', action='store_true', help='what each policy is worth, and the same with ten times the interruptions')
    return parser


def _asked(args: argparse.Namespace, base: FleetSettings) -> FleetSettings:
    given = {
        'interruptions_per_hour': args.interruptions_per_hour, 'num_steps': args.steps, 'checkpoint_steps': args.checkpoint_steps,
        'price_per_hour': args.price, 'bad_nodes': args.bad_nodes, 'num_poison': args.poison, 'num_flood': args.flood, 'lease_min': args.lease_min,
        'cold_start_min': args.cold_start_min, 'max_attempts': args.attempts, 'max_losses': args.losses,
    }  # fmt: skip
    asked = replace(base, **{name: value for name, value in given.items() if value is not None}, **{f'has_{name}': False for name in args.without})
    return replace(asked, interruptions_per_hour=asked.interruptions_per_hour * args.interruptions_times)


def _row(name: str, of: FleetOutcome) -> list[str]:
    shares = ' / '.join(f'{100 * share:.1f}' for share in of.on_nodes)
    each = f'{of.dollars_per_done:.3f}' if of.done else 'none done'
    minutes = [f'{of.mean_min:.1f}', f'{of.median_min:.1f}', f'{of.max_min:.0f}'] if of.done else [''] * 3
    lost_share = of.lost_share if of.done else 1.0
    return [
        name, f'{of.done:.1f} ({of.worst_done:.0f})', f'{of.failed:.1f}', shares, *minutes, f'{of.hours:.1f}',
        f'{of.dollars:.0f}', each, f'{100 * lost_share:.1f} %',
    ]  # fmt: skip


def _differences(base: FleetSettings, asked: FleetSettings) -> list[str]:
    names = [name for name in base.__dataclass_fields__ if getattr(base, name) != getattr(asked, name)]
    return [f'{name} {_said(getattr(asked, name))} (default {_said(getattr(base, name))})' for name in names]


def _said(value: float | bool) -> str:
    return ('yes' if value else 'no') if isinstance(value, bool) else f'{value:g}'


def _count(text: str) -> int:
    """Argparse type: a whole number of at least 0."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 0")
    return int(text)
