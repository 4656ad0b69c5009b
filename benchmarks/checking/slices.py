"""A slice of a GPU check: parts that have no result yet, each in a process of its own, until all are done or the time is over. No torch."""

import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.checking.cases import CheckPart, Setting, Values
from benchmarks.checking.part import CASE
from benchmarks.checking.rows import AGAIN, add_row, result, rows_of
from benchmarks.sweeping.launching import run
from diffusion.common.files import parse_json_object, write_text
from diffusion.contracts.errors import PREEMPTED, InputError

CACHE = 'compile-cache'
LOG_LINES = 3  # of a process that broke, in its row


class TooShort(InputError):
    """No slice of this length can measure what comes next."""


@dataclass
class Check:
    """One check on one machine.

    Args:
        environment: of the machine (benchmarks.measured.environment).
        reserve_sec: of a slice, to end a process and write the page.
        cache: folder of what is compiled; None: in the work folder.
    """

    parts: Sequence[CheckPart]
    setting: Setting
    out: Path
    environment: Mapping[str, Any]
    reserve_sec: float
    cache: Path | None = None

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
        add_row(self.out, self.environment, self.setting.tiny, part, name, status, sec, reason)

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
        folder, done = self.setting.folder, self.rows.keys()
        (folder / CASE).unlink(missing_ok=True)
        task = folder / 'task.json'
        content = {
            'parts': {part.name: part.cases for part in parts}, 'setting': asdict(self.setting), 'out': str(self.out),
            'machine': self.environment, 'end_time': time.time() + left_sec, 'slice_sec': slice_sec,
        }  # fmt: skip
        write_text(task, json.dumps(content))
        log = folder / 'logs' / f'{parts[0].name}.txt'
        log.parent.mkdir(parents=True, exist_ok=True)
        begins_at = log.stat().st_size if log.exists() else 0
        code = run([sys.executable, '-m', 'benchmarks.checking.part', str(task)], log, left_sec, self.variables(), self.show)
        self.show()
        if code is None:  # the slice is over; what was being measured is measured in the next one
            return False
        case = parse_json_object((folder / CASE).read_bytes()) if (folder / CASE).exists() else {}
        if code == PREEMPTED:
            if case['planned_sec'] > slice_sec - self.reserve_sec:
                raise TooShort(
                    f'{case["part"]}, {case["row"]} is planned with {case["planned_sec"]:.0f} s, and a slice of {slice_sec:.0f} s keeps '
                    f'{self.reserve_sec:.0f} s back; give --limit {case["planned_sec"] + self.reserve_sec + 30:.0f} or more'
                )
            return False
        rows = self.rows.keys()
        if rows == done or (code != 0 and case and (case['part'], case['row']) not in rows):
            self.explain(case or {'part': parts[0].name, 'row': '', 'time': time.time(), 'limit_sec': float('inf')}, code, log, begins_at)
        return True

    def explain(self, case: Mapping[str, Any], code: int, log: Path, begins_at: int) -> None:
        """Add the row that a process which broke could not write; what it printed begins in the log at this byte."""
        sec, limit_sec = time.time() - case['time'], case['limit_sec']
        lines = [line.strip() for line in log.read_text(errors='replace')[begins_at:].splitlines() if line.strip()]
        if sec >= limit_sec:
            status, reason = 'timed out', f'not done after {limit_sec:.0f} s; {log} says where it was'
        else:
            status, reason = 'crashed', f'exit code {code}: {" / ".join(lines[-LOG_LINES:])[:400] or "no output"}'
        self.add(case['part'], case['row'], status, sec, reason)
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
        network = {name: os.environ.get(name, 'lo') for name in ('GLOO_SOCKET_IFNAME', 'NCCL_SOCKET_IFNAME')}
        cache = self.cache or self.setting.folder / CACHE
        return {
            **network,
            'TORCHINDUCTOR_CACHE_DIR': str(cache / 'inductor'),
            'TRITON_CACHE_DIR': str(cache / 'triton'),
            'TORCHINDUCTOR_FX_GRAPH_CACHE': '1',
            'TORCHINDUCTOR_AUTOGRAD_CACHE': '1',
            'HF_HUB_OFFLINE': '1',
            'WANDB_MODE': 'offline',
            'PYTHONUNBUFFERED': '1',
            'OMP_NUM_THREADS': '1' if self.environment['gpu'] is None else str(min(8, self.environment['num_cores'])),
        }

    def clear(self) -> None:
        """Remove the models and data of a check that is finished; logs and the compile cache stay."""
        for path in self.setting.folder.iterdir():
            if path.is_dir() and path.name not in ('logs', CACHE):
                shutil.rmtree(path, ignore_errors=True)
