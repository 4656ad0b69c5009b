"""A slice of a GPU check: parts that have no result yet, each in a process of its own, until all are done or the time is over. No torch."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from benchmarks.checking import compile_cache
from benchmarks.checking.cases import CheckPart, Setting, Values
from benchmarks.checking.part import RUNNING, WAITING, CheckTask, row_of
from benchmarks.checking.rows import AGAIN, result, rows_of
from benchmarks.measured import record
from benchmarks.sweeping.launching import Ending, run
from diffusion.common.files import parse_json_object
from diffusion.common.json_lines import open_to_append
from diffusion.common.locks import try_lock
from diffusion.contracts.exit_codes import PREEMPTED

CACHE = 'compile-cache'
LOG_LINES = 3  # of a process that broke, in its row


class TooShort(ValueError):
    """No slice of this length can measure what comes next."""


class CheckHeld(RuntimeError):
    """Another check runs in this folder."""


def hold(path: Path) -> BinaryIO:
    """Hold a file, which is made if it is not there, for as long as what is returned is open.

    Raises:
        Held: another process has it.
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open_to_append(path)
    if not try_lock(file):
        file.close()
        raise CheckHeld(f'{path}: another check writes there; let it end: two at once would disturb each other')
    return file


@dataclass
class Check:
    """One check on one machine.

    Args:
        environment: of the machine (benchmarks.measured.environment).
        reserve_sec: of a slice, to end a process, write the page and pack the cache.
    """

    parts: Sequence[CheckPart]
    setting: Setting
    out: Path
    environment: Mapping[str, Any]
    reserve_sec: float

    def __post_init__(self) -> None:
        self.shown = set(self.rows)

    @property
    def rows(self) -> dict[tuple[str, str], Values]:
        return rows_of(self.out, self.environment, self.setting.tiny)

    def remaining(self) -> list[CheckPart]:
        """Parts without a result, in their order."""
        done = self.rows
        return [part for part in self.parts if (part.name, '') not in done]

    def forget(self, names: Sequence[str]) -> None:
        """Let what was measured of these parts no longer count."""
        for name in names:
            self.add(name, '', AGAIN, 0.0)
        self.shown = set(self.rows)

    def add(self, part: str, name: str, status: str, sec: float, reason: str | None = None) -> None:
        record(self.out, [row_of(part, name, self.setting.tiny, status, sec, reason)], self.environment)

    def run_slice(self, slice_sec: float) -> None:
        """Measure what remains, for at most `slice_sec`.

        Raises:
            TooShort: the next case is planned with more, or nothing at all was measured.
        """
        end_sec, before = time.monotonic() + slice_sec - self.reserve_sec, len(self.rows)
        while (remaining := self.remaining()) and (left_sec := end_sec - time.monotonic()) > 0:
            # The small form is mostly imports: its parts share a process, which after a crash is started again for those that are left.
            group = remaining if self.setting.tiny else remaining[:1]
            print(f'-- {", ".join(part.name for part in group)} ({left_sec:.0f} s left of this slice)', flush=True)
            if not self.run_parts(group, left_sec, slice_sec):
                break
        if self.remaining() and len(self.rows) == before:
            raise TooShort(f'nothing was measured in so short a time; give --limit {2 * slice_sec + self.reserve_sec:.0f} or more')

    def run_parts(self, parts: Sequence[CheckPart], left_sec: float, slice_sec: float) -> bool:
        """Start a process for these parts; returns whether there may be time for more. Each call adds a row, or ends the slice."""
        folder, done = self.setting.folder, self.rows
        todo = [(part.name, part.cases, [name for (of, name) in done if of == part.name and name]) for part in parts]
        for note in (RUNNING, WAITING):
            (folder / note).unlink(missing_ok=True)
        task = folder / 'task.json'
        CheckTask(todo, self.setting, str(self.out), dict(self.environment), time.time() + left_sec, slice_sec).write(task)
        log = folder / 'logs' / f'{parts[0].name}.txt'
        log.parent.mkdir(parents=True, exist_ok=True)
        begins_at = log.stat().st_size if log.exists() else 0
        words = [sys.executable, '-m', 'benchmarks.checking.part', str(task)]
        ending = run(words, log, left_sec, self.variables(), self.show)
        self.show()
        if ending.code == PREEMPTED:
            waiting = _read(folder / WAITING)
            if waiting and waiting['planned_sec'] > slice_sec - self.reserve_sec:
                raise TooShort(
                    f'{waiting["part"]}, {waiting["row"]} is planned with {waiting["planned_sec"]:.0f} s, and a slice of {slice_sec:.0f} s keeps '
                    f'{self.reserve_sec:.0f} s back; give --limit {waiting["planned_sec"] + self.reserve_sec + 30:.0f} or more'
                )
            return False
        if ending.code is None:  # the slice is over; what was being measured is measured in the next one
            return False
        added = self.rows.keys() - done.keys()
        running = _read(folder / RUNNING)
        if not added or (ending.code != 0 and running and (running['part'], running['row']) not in self.rows):
            self.explain(parts[0].name, ending, log, log.read_text(errors='replace')[begins_at:])
        return True

    def explain(self, part: str, ending: Ending, log: Path, said: str) -> None:
        """Add the row that a process which broke could not write."""
        running = _read(self.setting.folder / RUNNING) or {'part': part, 'row': '', 'time': time.time(), 'limit_sec': float('inf')}
        sec = time.time() - running['time']
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        if sec >= running['limit_sec']:
            status, reason = 'timed out', f'not done after {running["limit_sec"]:.0f} s; {log} says where it was'
        else:
            status, reason = 'crashed', f'exit code {ending.code}: {" / ".join(lines[-LOG_LINES:])[:400] or "no output"}'
        self.add(running['part'], running['row'], status, sec, reason)
        self.show()

    def show(self) -> None:
        """Print the rows that are new."""
        for (part, name), row in self.rows.items():
            if (part, name) not in self.shown:
                self.shown.add((part, name))
                what = name or 'the whole part'
                print(f'   {part:12} {what:48} {result(row)} ({row["sec"]:.0f} s)', flush=True)

    def variables(self) -> dict[str, str]:
        """Environment of the processes: nothing is downloaded, and one process alone asks no network for its own name."""
        ours = {
            **compile_cache.variables(self.setting.folder / CACHE),
            'HF_HUB_OFFLINE': '1',
            'WANDB_MODE': 'offline',
            'PYTHONUNBUFFERED': '1',
            'OMP_NUM_THREADS': '1' if self.environment['gpu'] is None else str(min(8, self.environment['num_cores'])),
        }
        network = {name: os.environ.get(name, 'lo') for name in ('GLOO_SOCKET_IFNAME', 'NCCL_SOCKET_IFNAME')}
        return {**ours, **network}

    def clear(self) -> None:
        """Remove the models and data of a check that is finished; logs and the compile cache stay."""
        for path in self.setting.folder.iterdir():
            if path.is_dir() and path.name not in ('logs', CACHE):
                shutil.rmtree(path, ignore_errors=True)


def _read(path: Path) -> dict[str, Any]:
    with suppress(FileNotFoundError):
        return parse_json_object(path.read_bytes())
    return {}
