"""Requests, exit codes and the closing table that the commands of data_prep share."""

import errno
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from data_prep.mds.job import Share, Tally
from diffusion.common.command_line import Arguments, option
from diffusion.common.processes import SHARED_MEMORY_FULL, end_with_parent, shared_memory_is_full
from diffusion.common.text import counted, print_message, print_page
from diffusion.contracts import errors
from diffusion.contracts.errors import BAD_INPUT, INCOMPLETE, INTERRUPTED

EXIT_CODES = """exit codes: 0 all rows (of this rank) are accounted for; 2 input or options are wrong and the message says how, or nothing was kept;
3 not finished, for a reason outside (storage, network, a killed worker), 130 stopped by Ctrl-C: run the same command again to resume"""
MAX_SHARD_MB = 4095  # offsets in an MDS shard have 32 bits


def host_processes() -> int:
    """Return the number of this host's cores; several ranks on it share them."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, int(os.environ.get('LOCAL_WORLD_SIZE') or 1)))


class SharedRequest(Arguments):
    """Work that processes and hosts share."""

    processes: PositiveInt | None = option(None, 'worker processes on this host (default: its cores)', 'N', group='hosts')
    rank: NonNegativeInt | None = option(None, 'this host of several that share the work (default: that of a launcher, or 0)', 'I', group='hosts')
    world_size: PositiveInt | None = option(None, 'number of those hosts (default: that of a launcher, or 1)', 'N', group='hosts')

    @property
    def num_processes(self) -> int:
        return self.processes or host_processes()

    @property
    def ranks(self) -> tuple[int, int]:
        """Rank of this host and number of all."""
        given = [os.environ.get(name, '') for name in ('RANK', 'WORLD_SIZE')]  # as launchers set them, both
        rank, world_size = map(int, given) if all(value.isdigit() for value in given) else (0, 1)
        return rank if self.rank is None else self.rank, self.world_size or world_size

    def own_share(self) -> Share:
        """Return this host's share of the work. Raises DataError: there is no such rank."""
        return Share(*self.ranks)


class DatasetRequest(SharedRequest):
    """Dataset that several hosts write and one of them merges."""

    shard_mb: Annotated[int, Field(ge=1, le=MAX_SHARD_MB)] = option(64, 'size of a shard', 'MB')
    merge: bool = option(False, 'only merge what all hosts have written; the last one to finish does so anyway', group='hosts')

    def own_share(self) -> Share:
        return Share(*self.ranks, merge_only=self.merge)

    def share_of_device(self) -> Share:
        """Return the share of a process that a launcher may have started, next to others, for each device."""
        launched = self.ranks[1] > 1 and 'LOCAL_RANK' in os.environ
        if launched:
            end_with_parent()  # a killed launcher must not leave this rank behind, writing next to the next run
        return replace(self.own_share(), launched=launched)


def run_command(dest: str, work: Callable[[], Tally]) -> int:
    """Do the work on this host's share and print the closing table; returns the exit code."""
    start = time.monotonic()

    def work_and_report() -> int:
        tally = work()
        seconds, share = time.monotonic() - start, 100 / max(1, tally.attempted)
        lines = [('attempted', tally.attempted, ''), ('kept', tally.kept, f'{tally.kept * share:.1f} %')]
        counts = [(f'  in {stream}', count) for stream, count in sorted(tally.kept_in.items()) if stream]
        counts += [(f'  {note}', count) for note, count in tally.notes.most_common()]
        counts += [(f'dropped: {reason}', count) for reason, count in tally.dropped.most_common()]
        lines += [(label, count, f'{count * share:.1f} %') for label, count in counts]
        width = max(len(label) for label, *_ in lines)
        table = [f'  {label:<{width}}  {count:>13,}  {note:>7}'.rstrip() for label, count, note in lines]
        now = f'{counted(tally.attempted_now, "row")} now, {tally.attempted - tally.attempted_now:,} before or by others'
        speed = f'{seconds:.1f} s, {tally.attempted_now / seconds:,.0f} images/s'
        print_page('\n'.join([dest, *table, f'  {tally.num_bytes / 1e6:,.1f} MB written; {now}; {speed}', *tally.remarks]))
        if tally.attempted and not tally.kept:
            print_message(f'{dest}: nothing was kept; the table says why')
            return BAD_INPUT
        return 0

    return exit_code(dest, work_and_report)


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
