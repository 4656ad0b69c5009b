"""What the benchmarks share: the environment of a measurement, its record, child processes whose memory is watched."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any


def environment() -> dict[str, Any]:
    """Hardware, versions, commit and date: what a number means nothing without."""
    commit = subprocess.run(['git', 'rev-parse', '--short', 'HEAD'], capture_output=True, text=True, check=False, cwd=Path(__file__).parent)  # noqa: S607
    return {
        'date': datetime.now(UTC).isoformat(timespec='seconds'),
        'commit': commit.stdout.strip() or 'unknown',
        'cpu': _cpu(),
        'num_cores': len(os.sched_getaffinity(0)),
        'python': platform.python_version(),
        **{name: version(name) for name in ('pillow', 'mosaicml-streaming', 'torch')},
    }


def record(path: Path | None, rows: Sequence[dict[str, Any]]) -> None:
    """Append rows to a JSONL file, each with the environment."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        where = environment()
        with path.open('a') as file:
            file.writelines(json.dumps({**row, **where}) + '\n' for row in rows)


def print_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Left-aligned names, right-aligned numbers."""
    cells = [[f'{cell:,.2f}' if isinstance(cell, float) else str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    for row in cells:
        print('  '.join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))))


def run_watched(arguments: Sequence[object], poll_sec: float = 0.1) -> tuple[float, float]:
    """Run `python ARGUMENTS` and return its seconds and the peak memory in MB of it and all its descendants together.

    Memory is the proportional set size: what several processes share counts once.

    Raises:
        SystemExit: it failed.
    """
    start, peak_kb = time.perf_counter(), 0
    environment = {**os.environ, 'OMP_NUM_THREADS': '1'}
    with subprocess.Popen(
        [sys.executable, *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        while True:
            try:
                _, errors = process.communicate(timeout=poll_sec)
                break
            except subprocess.TimeoutExpired:
                peak_kb = max(peak_kb, sum(_pss_kb(pid) for pid in _descendants(process.pid)))
    if process.returncode:
        raise SystemExit(f'{" ".join(map(str, arguments))} failed:\n{errors[-3000:]}')
    return time.perf_counter() - start, peak_kb / 1000


def _descendants(root: int) -> list[int]:
    parents = {}
    for stat in Path('/proc').glob('[0-9]*/stat'):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(')')[2].split()[1])
        except OSError:
            continue
    family, found = [root], {root}
    for pid in family:
        children = [child for child, parent in parents.items() if parent == pid and child not in found]
        found.update(children)
        family.extend(children)
    return family


def _pss_kb(pid: int) -> int:
    try:
        for line in Path(f'/proc/{pid}/smaps_rollup').read_text().splitlines():
            if line.startswith('Pss:'):
                return int(line.split()[1])
    except OSError:  # it has ended
        pass
    return 0


def _cpu() -> str:
    for line in Path('/proc/cpuinfo').read_text().splitlines():
        if line.startswith('model name'):
            return line.partition(':')[2].strip()
    return platform.processor()
