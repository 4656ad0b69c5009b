"""The process of one part, or of several small ones: measures the cases that have no row yet, and writes each row at once.

    python -m benchmarks.checking.part TASK.json

Started by benchmarks.gpu_check. Exit codes: 0 every case has a row; 75 the case that `case.json` next to TASK.json names does not fit into what is
left of the slice; anything else: the process broke while it measured the case that `case.json` names.
"""

import faulthandler
import importlib
import json
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.checking.cases import Case, NotHere, Setting, Values
from benchmarks.checking.rows import add_row, rows_of
from diffusion.common.command_line import CommandParser
from diffusion.common.files import parse_json_object, write_text
from diffusion.common.processes import quick_imports
from diffusion.common.text import one_line
from diffusion.contracts.errors import CRASH, PREEMPTED

CASE = 'case.json'  # the case that is being measured, or does not fit into the slice
REASON_LETTERS = 400


@dataclass(frozen=True)
class CheckTask:
    """The task of a process, as its file has it.

    Args:
        parts: (name, `module:function` of its cases) of each.
        setting: that of all cases.
        out: file of the rows.
        machine: what every row says of it (benchmarks.measured.environment).
        end_time: of the slice, in seconds since the epoch.
        slice_sec: length of a whole slice.
    """

    parts: Sequence[tuple[str, str]]
    setting: dict[str, Any]
    out: str
    machine: dict[str, Any]
    end_time: float
    slice_sec: float


def measured(case: Case) -> tuple[str, str | None, Values]:
    """Status, reason and values of a case; no exception of it ends the part."""
    try:
        return 'measured', None, case.measure()
    except NotHere as error:
        return 'skipped', str(error), {}
    except Exception as error:
        reason = f'{type(error).__name__}: {one_line(error)}'[:REASON_LETTERS]
        if case.may_run_out:
            from diffusion.training.micro_batch import out_of_memory  # imports torch, as such a case has done

            if out_of_memory(error):
                return 'out of memory', reason, {}
        traceback.print_exc()
        return 'failed', reason, {}


def run(task: CheckTask, folder: Path) -> int:
    """Measure what has no row; returns the exit code."""
    setting = Setting(**task.setting)
    done = rows_of(Path(task.out), task.machine, setting.tiny)

    def add(*row: Any, **values: Any) -> None:
        add_row(Path(task.out), task.machine, setting.tiny, *row, **values)

    def note(part: str, row: str, planned_sec: float, limit_sec: float) -> None:
        content = {'part': part, 'row': row, 'planned_sec': planned_sec, 'time': time.time(), 'limit_sec': limit_sec}
        write_text(folder / CASE, json.dumps(content))

    for part, cases in task.parts:
        start = time.monotonic()
        note(part, '', 0.0, task.slice_sec)  # of the imports, and of what cases share
        module, _, function = cases.partition(':')
        with quick_imports():
            measuring = importlib.import_module(module)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Composer's handler raises SystemExit, which gets lost where Python ignores exceptions
        found: list[Case] = getattr(measuring, function)(setting)
        for case in found:
            if (part, case.name) in done:
                continue
            limit_sec = case.limit_sec(task.slice_sec)
            note(part, case.name, case.planned_sec, limit_sec)
            if time.time() + case.planned_sec > task.end_time:
                return PREEMPTED
            print(f'== {part}: {case.name}', flush=True)
            # A thread of C, which ends the process even where Python is stuck in a kernel, after a traceback.
            faulthandler.dump_traceback_later(limit_sec, exit=True)
            begun = time.monotonic()
            status, reason, values = measured(case)
            faulthandler.cancel_dump_traceback_later()
            add(part, case.name, status, time.monotonic() - begun, reason, **values)
            if reason is not None and 'CUDA error' in reason:
                return CRASH  # the device's context is lost; what is left needs a new process
        add(part, '', 'finished', time.monotonic() - start)
    return 0


if __name__ == '__main__':
    parser = CommandParser('benchmarks.checking.part', __doc__)
    parser.add_argument('task', type=Path, metavar='TASK.json')
    path: Path = parser.parse_args().task
    faulthandler.enable()
    raise SystemExit(run(CheckTask(**parse_json_object(path.read_bytes())), path.parent))
