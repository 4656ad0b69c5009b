"""The process of one part, or of several small ones: measures the cases that have no row yet, and writes each row at once.

    python -m benchmarks.checking.part TASK.json

Started by benchmarks.gpu_check. Exit codes: 0 every case has a row; 75 the next case, which `waiting.json` next to TASK.json names, does not fit into
what is left of the slice; anything else: the process broke, and `running.json` names the case that was being measured.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.checking.cases import Case, NotHere, Setting, Values
from benchmarks.measured import record
from diffusion.common.arguments import CommandParser
from diffusion.common.files import parse_json_object, replacing
from diffusion.common.text import one_line
from diffusion.contracts.exit_codes import CRASH, PREEMPTED

RUNNING, WAITING = 'running.json', 'waiting.json'
REASON_LETTERS = 400


@dataclass(frozen=True)
class CheckTask:
    """The task of a process.

    Args:
        parts: (name, `module:function` of its cases, names of the cases that have a row) of each.
        out: file of the rows.
        machine: what every row says of it (benchmarks.measured.environment).
        end_time: of the slice, in seconds since the epoch.
        slice_sec: length of a whole slice.
    """

    parts: Sequence[tuple[str, str, Sequence[str]]]
    setting: Setting
    out: str
    machine: dict[str, Any]
    end_time: float
    slice_sec: float

    def write(self, path: Path) -> None:
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> CheckTask:
        content = parse_json_object(path.read_bytes())
        return cls(**{**content, 'setting': Setting(**content['setting'])})


def row_of(part: str, name: str, tiny: bool, status: str, sec: float, reason: str | None = None, **values: Any) -> Values:
    """A row without the machine, which benchmarks.measured.record adds. `name` is '' for what is said of the part as a whole."""
    return {'benchmark': 'gpu_check', 'part': part, 'row': name, 'tiny': tiny, 'status': status, 'reason': reason, 'sec': round(sec, 2), **values}


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
    for part, cases, done in task.parts:
        start = time.monotonic()
        code = run_part(task, folder, part, cases, done)
        if code:
            return code
        add(task, part, '', 'finished', time.monotonic() - start)
    return 0


def run_part(task: CheckTask, folder: Path, part: str, cases: str, done: Sequence[str]) -> int:
    note(folder, RUNNING, part=part, row='', time=time.time(), limit_sec=task.slice_sec)  # of the imports, and of what cases share
    module, _, function = cases.partition(':')
    measuring = importlib.import_module(module)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Composer's handler raises SystemExit, which gets lost where Python ignores exceptions
    found: list[Case] = getattr(measuring, function)(task.setting)
    for case in found:
        if case.name in done:
            continue
        if time.time() + case.planned_sec > task.end_time:
            note(folder, WAITING, part=part, row=case.name, planned_sec=case.planned_sec)
            return PREEMPTED
        limit_sec = case.limit_sec(task.slice_sec)
        note(folder, RUNNING, part=part, row=case.name, time=time.time(), limit_sec=limit_sec)
        print(f'== {part}: {case.name}', flush=True)
        # A thread of C, which ends the process even where Python is stuck in a kernel, after a traceback.
        faulthandler.dump_traceback_later(limit_sec, exit=True)
        begun = time.monotonic()
        status, reason, values = measured(case)
        faulthandler.cancel_dump_traceback_later()
        add(task, part, case.name, status, time.monotonic() - begun, reason, **values)
        if reason is not None and 'CUDA error' in reason:
            return CRASH  # the device's context is lost; what is left needs a new process
    return 0


def add(task: CheckTask, part: str, name: str, status: str, sec: float, reason: str | None = None, **values: Any) -> None:
    record(Path(task.out), [row_of(part, name, task.setting.tiny, status, sec, reason, **values)], task.machine)


def note(folder: Path, name: str, **content: Any) -> None:
    with replacing(folder / name) as temporary:
        temporary.write_text(json.dumps(content))


def main(path: Path) -> int:
    faulthandler.enable()
    return run(CheckTask.read(path), path.parent)


if __name__ == '__main__':
    parser = CommandParser('benchmarks.checking.part', __doc__)
    parser.add_argument('task', type=Path, metavar='TASK.json')
    raise SystemExit(main(parser.parse_args().task))
