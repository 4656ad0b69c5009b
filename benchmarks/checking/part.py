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


def measured(case: Case) -> tuple[str, str | None, Values]:
    """Status, reason and values of a case; no exception of it ends the part."""
    try:
        return 'measured', None, case.measure()
    except NotHere as error:
        return 'skipped', str(error), {}
    except Exception as error:
        reason = f'{type(error).__name__}: {one_line(error)}'[:REASON_LETTERS]
        traceback.print_exc()
        return 'failed', reason, {}


def run(task: dict[str, Any], folder: Path) -> int:
    """Measure what has no row; returns the exit code.

    Args:
        task: `parts` with `module:function` of the cases of each, `setting` of all cases, file `out` of the rows, `machine` as every row has it
            (benchmarks.measured.environment), `end_time` of the slice in seconds since the epoch, `slice_sec` of a whole one.
        folder: for `case.json`.
    """
    setting, out, slice_sec = Setting(**task['setting']), Path(task['out']), task['slice_sec']
    done = rows_of(out, task['machine'], setting.tiny)

    def note(part: str, row: str, planned_sec: float, limit_sec: float) -> None:
        content = {'part': part, 'row': row, 'planned_sec': planned_sec, 'time': time.time(), 'limit_sec': limit_sec}
        write_text(folder / CASE, json.dumps(content))

    for part, cases in task['parts'].items():
        start = time.monotonic()
        note(part, '', 0.0, slice_sec)  # of the imports, and of what cases share
        module, _, function = cases.partition(':')
        with quick_imports():
            measuring = importlib.import_module(module)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Composer's handler raises SystemExit, which gets lost where Python ignores exceptions
        found: list[Case] = getattr(measuring, function)(setting)
        for case in found:
            if (part, case.name) in done:
                continue
            limit_sec = case.limit_sec(slice_sec)
            note(part, case.name, case.planned_sec, limit_sec)
            if time.time() + case.planned_sec > task['end_time']:
                return PREEMPTED
            print(f'== {part}: {case.name}', flush=True)
            # A thread of C, which ends the process even where Python is stuck in a kernel, after a traceback.
            faulthandler.dump_traceback_later(limit_sec, exit=True)
            begun = time.monotonic()
            status, reason, values = measured(case)
            faulthandler.cancel_dump_traceback_later()
            add_row(out, task['machine'], setting.tiny, part, case.name, status, time.monotonic() - begun, reason, **values)
            if reason is not None and 'CUDA error' in reason:
                return CRASH  # the device's context is lost; what is left needs a new process
        add_row(out, task['machine'], setting.tiny, part, '', 'finished', time.monotonic() - start)
    return 0


if __name__ == '__main__':
    parser = CommandParser('benchmarks.checking.part', __doc__)
    parser.add_argument('task', type=Path, metavar='TASK.json')
    path: Path = parser.parse_args().task
    faulthandler.enable()
    raise SystemExit(run(parse_json_object(path.read_bytes()), path.parent))
