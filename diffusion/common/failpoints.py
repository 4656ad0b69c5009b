"""Failpoints: named places where a test can make the process die, stop, wait or fail. They do nothing unless the environment asks.

`DIFFUSION_FAILPOINT=save.renamed:kill` kills the process with SIGKILL when it first comes by; `save.renamed@3:kill` when it comes by
for the third time; several are separated by commas. Actions: `kill`, `stop` (SIGSTOP), `term` (SIGTERM to itself), `sleep` (for an hour),
`enospc` (OSError, the disk is full), `crash` (RuntimeError). `DIFFUSION_FAILPOINT_RANK` limits it to one global rank.
"""

import errno
import os
import signal
import time
from collections import Counter

_passed: Counter[str] = Counter()


def failpoint(name: str) -> None:
    """Perform the action that the environment names for this place, if any."""
    wanted = os.environ.get('DIFFUSION_FAILPOINT')
    if not wanted or os.environ.get('DIFFUSION_FAILPOINT_RANK', os.environ.get('RANK', '0')) != os.environ.get('RANK', '0'):
        return
    _passed[name] += 1
    for entry in wanted.split(','):
        place, _, action = entry.partition(':')
        place, _, count = place.partition('@')
        if place == name and _passed[name] == int(count or 1):
            _act(action, name)


def _act(action: str, name: str) -> None:
    if action == 'enospc':
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
    if action == 'crash':
        raise RuntimeError(f'failpoint {name}')
    if action == 'sleep':
        time.sleep(3600)
    else:
        os.kill(os.getpid(), {'kill': signal.SIGKILL, 'stop': signal.SIGSTOP, 'term': signal.SIGTERM}[action])
