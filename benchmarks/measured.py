"""Shared by the benchmarks: options, the record and table of a measurement."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from diffusion.common.command_line import CommandParser
from diffusion.common.environment import environment as environment_record
from diffusion.common.files import open_to_append, try_lock
from diffusion.common.text import markdown_table, print_page
from diffusion.contracts.errors import InputError


def command(name: str, doc: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m benchmarks.NAME`, described by the module's docstring."""
    parser = CommandParser(f'benchmarks.{name}', doc)
    parser.add_argument('--out', type=Path, metavar='JSONL', help='append the rows to this file, with hardware, versions, commit and date')
    return parser


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


def hold(path: Path, otherwise: str) -> BinaryIO:
    """Open a file, which is made if it is not there, to append to it, and hold it for as long as it is open.

    Args:
        otherwise: what to say if another process holds it.

    Raises:
        InputError: another process does.
        OSError: it cannot be written.
    """
    file = open_to_append(path)
    if not try_lock(file):
        file.close()
        raise InputError(f'{path}: {otherwise}')
    return file


def print_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Left-aligned names, right-aligned numbers, in Markdown; None stays empty."""
    print_page(markdown_table(header, rows))
