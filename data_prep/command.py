"""What the commands of data_prep share: the way they end, and the closing table."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from data_prep.parts import DataError, Tally
from diffusion.datasets.manifest import ManifestError
from diffusion.errors import EncoderError
from diffusion.recipe import EXIT_BAD_RECIPE


def run_command(dest: Path, work: Callable[[], Tally]) -> int:
    """Run `work`, print the closing table; what the user can mend becomes a message and exit code 2."""
    start = time.monotonic()
    try:
        tally = work()
    except (DataError, ManifestError, EncoderError) as error:
        print(error, file=sys.stderr)
        return EXIT_BAD_RECIPE
    print(closing_table(dest, tally, time.monotonic() - start))
    return 0


def closing_table(dest: Path, tally: Tally, seconds: float) -> str:
    """Rows attempted, kept, dropped by reason; bytes and speed."""
    share = 100 / max(1, tally.attempted)
    lines = [('attempted', tally.attempted, ''), ('kept', tally.kept, f'{tally.kept * share:.1f} %')]
    lines += [(f'dropped: {reason}', count, f'{count * share:.1f} %') for reason, count in tally.dropped.most_common()]
    width = max(len(label) for label, *_ in lines)
    table = [f'  {label:<{width}}  {count:>12,}  {note:>7}'.rstrip() for label, count, note in lines]
    num_bytes = sum(path.stat().st_size for path in dest.rglob('*.mds'))
    now = f'{tally.attempted_now:,} rows now, {tally.attempted - tally.attempted_now:,} before'
    speed = f'{seconds:.1f} s, {tally.attempted_now / seconds:,.0f} rows/s'
    return '\n'.join([str(dest), *table, f'  {num_bytes / 1e6:,.1f} MB of shards; {now}; {speed}'])
