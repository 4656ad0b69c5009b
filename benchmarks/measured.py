"""Shared by the benchmarks: options, the record and table of a measurement, child processes whose memory is watched."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from diffusion.common.arguments import CommandParser, positive_int
from diffusion.common.environment import environment as environment_record
from diffusion.common.json_lines import open_to_append
from diffusion.common.tables import markdown_table, print_page
from diffusion.encoders.sizes import KINDS


def command(name: str, doc: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m benchmarks.NAME`, described by the module's docstring."""
    parser = CommandParser(f'benchmarks.{name}', doc)
    parser.add_argument('--out', type=Path, metavar='JSONL', help='append the rows to this file, with hardware, versions, commit and date')
    return parser


def add_by_device(parser: argparse.ArgumentParser, defaults: Mapping[str, Mapping[str, Any]], option: str, what: str, **more: Any) -> None:
    """An option whose default, of `defaults['cuda']` or `['cpu']`, depends on the device, which is looked at after parsing (`timing.fill_in`)."""
    on_gpu, on_cpu = (defaults[device][option.removeprefix('--').replace('-', '_')] for device in ('cuda', 'cpu'))
    parser.add_argument(option, help=f'{what} (default {on_gpu} on a GPU, {on_cpu} on a CPU)', **more)


def add_setting(parser: argparse.ArgumentParser, defaults: Mapping[str, Mapping[str, Any]]) -> None:
    """The options that say what a step is of."""
    add_by_device(parser, defaults, '--unet', 'configuration of the U-Net', choices=sorted(KINDS))
    add_by_device(parser, defaults, '--resolution', 'px', type=positive_int)
    add_by_device(parser, defaults, '--micro-batch', 'images of a step', type=positive_int)


def environment() -> dict[str, Any]:
    """Return the date and the environment record, without which a number means nothing."""
    record = environment_record()
    return {'date': now(), **record, 'commit': record['commit'] or 'unknown'}


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec='seconds')


def environment_apart(without_gpu: bool = False) -> dict[str, Any]:
    """Return `environment()` of a process of its own: CUDA's context would take memory of the first GPU from what is measured.

    Args:
        without_gpu: as if there were none.
    """
    asking = 'import json; from benchmarks.measured import environment; print(json.dumps(environment()))'
    hidden = {**os.environ, 'CUDA_VISIBLE_DEVICES': ''} if without_gpu else None
    answer = subprocess.run([sys.executable, '-c', asking], capture_output=True, text=True, check=True, env=hidden)
    return json.loads(answer.stdout.splitlines()[-1])


def record(path: Path | None, rows: Sequence[dict[str, Any]], machine: Mapping[str, Any] | None = None) -> None:
    """Append rows to a JSONL file, each with the environment.

    Args:
        machine: an environment that was asked for earlier, of which the date alone is renewed; looking at the GPU takes memory of it.
    """
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        where = environment() if machine is None else {**machine, 'date': now()}
        with open_to_append(path, shared=True) as file:  # after a line that a kill has cut short
            file.writelines(json.dumps({**row, **where}).encode() + b'\n' for row in rows)


def print_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Left-aligned names, right-aligned numbers, in Markdown; None stays empty."""
    print_page(markdown_table(header, rows))


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
