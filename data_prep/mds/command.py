"""Options, exit codes and the closing table that the commands of data_prep share."""

import argparse
import errno
import os
import time
from collections.abc import Callable

from data_prep.mds.job import Share
from data_prep.mds.tally import Tally
from diffusion.common.arguments import CommandParser, positive_int
from diffusion.common.processes import SHARED_MEMORY_FULL, shared_memory_is_full
from diffusion.common.text import counted, print_message, print_page
from diffusion.contracts import errors
from diffusion.contracts.errors import BAD_INPUT, INCOMPLETE, INTERRUPTED

EXIT_CODES = """exit codes: 0 all rows (of this rank) are accounted for; 2 input or options are wrong and the message says how, or nothing was kept;
3 not finished, for a reason outside (storage, network, a killed worker), 130 stopped by Ctrl-C: run the same command again to resume"""


def parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """An argument parser whose help is the module's docstring and the exit codes."""
    return CommandParser(module, description, epilog=EXIT_CODES)


def add_processes(options: argparse.ArgumentParser) -> None:
    """--processes."""
    options.add_argument(
        '--processes', type=positive_int, default=default_processes(), metavar='N', help='worker processes on this host (default: its cores)'
    )


def default_processes() -> int:
    """The cores of this host; several ranks on it share them."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, int(os.environ.get('LOCAL_WORLD_SIZE') or 1)))


def add_sharing_options(options: argparse.ArgumentParser, merge: bool = True) -> None:
    """How the work is shared among processes and hosts (`share_of`)."""
    add_processes(options)
    given = [os.environ.get(name, '') for name in ('RANK', 'WORLD_SIZE')]  # as launchers set them, both
    rank, world_size = map(int, given) if all(value.isdigit() for value in given) else (0, 1)
    options.add_argument('--rank', type=int, default=rank, metavar='I', help='this host of several that share the work (default %(default)s)')
    options.add_argument('--world-size', type=positive_int, default=world_size, metavar='N', help='number of those hosts (default %(default)s)')
    if merge:
        options.add_argument('--merge', action='store_true', help='only merge what all hosts have written; the last one to finish does so anyway')


def add_shard_size(options: argparse._ActionsContainer) -> None:
    """--shard-mb."""
    options.add_argument('--shard-mb', type=_shard_mb, default=64, metavar='MB', help='size of a shard (default %(default)s)')


def _shard_mb(text: str) -> int:
    """An argparse type: megabytes of an MDS shard, whose offsets have 32 bits."""
    value = positive_int(text)
    if value > 4095:
        raise argparse.ArgumentTypeError(f'{value} MB is above the 4095 MB that a shard can have')
    return value


def run_command(args: argparse.Namespace, work: Callable[[Share], Tally]) -> int:
    """Run `work` on this host's share and print the closing table; returns the exit code."""
    start = time.monotonic()

    def table() -> int:
        tally = work(Share(args.rank, args.world_size))
        print_page(closing_table(args.dest, tally, time.monotonic() - start))
        if tally.attempted and not tally.kept:
            print_message(f'{args.dest}: nothing was kept; the table says why')
            return BAD_INPUT
        return 0

    return exit_code(args.dest, table)


def exit_code(where: str, work: Callable[[], int]) -> int:
    """Return what `work` returns; print an error that the user can fix, and return its code."""
    try:
        return errors.run_command(work)
    except OSError as error:
        full = error.errno == errno.ENOSPC and error.filename is None and shared_memory_is_full()
        print_message(SHARED_MEMORY_FULL if full else f'{where}: {error}; free space or fix the permissions, and run the same command again')
        return INCOMPLETE
    except KeyboardInterrupt:
        print_message(f'{where}: stopped; nothing is lost, run the same command again to resume')
        return INTERRUPTED


def closing_table(dest: str, tally: Tally, seconds: float) -> str:
    """Rows attempted, kept, dropped by reason; what was changed; bytes and speed."""
    share = 100 / max(1, tally.attempted)
    lines = [('attempted', tally.attempted, ''), ('kept', tally.kept, f'{tally.kept * share:.1f} %')]
    lines += [(f'  in {stream}', count, f'{count * share:.1f} %') for stream, count in sorted(tally.kept_in.items()) if stream]
    lines += [(f'  {note}', count, f'{count * share:.1f} %') for note, count in tally.notes.most_common()]
    lines += [(f'dropped: {reason}', count, f'{count * share:.1f} %') for reason, count in tally.dropped.most_common()]
    width = max(len(label) for label, *_ in lines)
    table = [f'  {label:<{width}}  {count:>13,}  {note:>7}'.rstrip() for label, count, note in lines]
    now = f'{counted(tally.attempted_now, "row")} now, {tally.attempted - tally.attempted_now:,} before or by others'
    speed = f'{seconds:.1f} s, {tally.attempted_now / seconds:,.0f} images/s'
    return '\n'.join([dest, *table, f'  {tally.num_bytes / 1e6:,.1f} MB written; {now}; {speed}', *tally.remarks])
