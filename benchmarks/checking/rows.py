"""The rows of a GPU check: JSON lines in one file, of which those of this commit on this machine count. No torch."""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.checking.cases import Values
from benchmarks.measured import record
from diffusion.common.files import read_json_lines

AGAIN = 'again'  # status of a line after which a part's earlier rows no longer count
SAME = ('commit', 'torch', 'gpu', 'cpu')  # what rows of one check have in common


def hardware(environment: Mapping[str, Any]) -> str:
    return environment['gpu'] or environment['cpu']


def default_out(environment: Mapping[str, Any], tiny: bool, folders: tuple[Path, Path]) -> Path:
    """DEVICE-DATE.jsonl of today, or of an earlier day whose rows are of the same commit: a check may be resumed after midnight.

    Args:
        folders: for numbers worth keeping, and for those of the tiny form.
    """
    folder = folders[1] if tiny else folders[0]
    device = re.sub(r'[^a-z0-9]+', '-', hardware(environment).lower()).strip('-')
    for path in sorted(folder.glob(f'{device}-*.jsonl'), reverse=True):
        if rows_of(path, environment, tiny):
            return path
    return folder / f'{device}-{datetime.now(UTC):%Y-%m-%d}.jsonl'


def rows_of(path: Path, environment: Mapping[str, Any], tiny: bool) -> dict[tuple[str, str], Values]:
    """The last row of each (part, case) of this commit, PyTorch, machine and form; (part, '') says that the part is finished, or failed."""
    rows: dict[tuple[str, str], Values] = {}
    for row in read_json_lines(path):
        if row.get('benchmark') != 'gpu_check' or row.get('tiny') != tiny or any(row.get(key) != environment[key] for key in SAME):
            continue
        if row['status'] == AGAIN:
            rows = {key: value for key, value in rows.items() if key[0] != row['part']}
        else:
            rows[row['part'], row['row']] = row
    return rows


def add_row(
    path: Path, environment: Mapping[str, Any], tiny: bool, part: str, name: str, status: str, sec: float, reason: str | None = None, **values: Any
) -> None:
    """Append a row; `name` is '' for what is said of the part as a whole."""
    row = {'benchmark': 'gpu_check', 'part': part, 'row': name, 'tiny': tiny, 'status': status, 'reason': reason, 'sec': round(sec, 2), **values}
    record(path, [row], environment)


def number(value: float) -> str:
    """Three significant digits, or all those before the point."""
    size = abs(value)
    return f'{value:,.0f}' if size >= 100 or value == 0 else f'{value:.3g}' if size >= 1e-3 else f'{value:.1e}'


# key: how its value is said. The first that a row has is what it is about.
MAIN: dict[str, str] = {
    'images_per_sec': 'images/s', 'tflop_per_sec': 'TFLOP/s', 'gb_per_sec': 'GB/s', 'wall_ms': 'ms a step',
    'predicted_bytes': 'bytes predicted',
    'micro_batch': 'images a step',
}  # fmt: skip


def result(row: Values) -> str:
    """A row in a few words."""
    if row['status'] != 'measured':
        return row['status'] + (f': {row["reason"]}' if row['reason'] else '')
    found = [f'{number(row[key])} {unit}' for key, unit in MAIN.items() if row.get(key) is not None][:1]
    checks: Mapping[str, Sequence[float]] = row.get('checks', {})
    if checks:
        wrong = [what for what, (value, limit) in checks.items() if not value <= limit]
        found.append(f'WRONG: {", ".join(wrong)}' if wrong else 'right')
    return ', '.join(found) or 'measured'
