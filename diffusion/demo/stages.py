"""A stage of a demo: a command that you could type yourself, printed as such."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from diffusion.common.processes import end_with_parent


def stage(title: str, command: list[object]) -> None:
    """Run the command to its end.

    Raises:
        SystemExit: it failed.
    """
    words = [str(word) for word in command]
    print(f'\n== {title}\n   $ {shlex.join([Path(words[0]).name, *words[1:]])}', flush=True)
    start = time.monotonic()
    with subprocess.Popen(words, preexec_fn=partial(end_with_parent, signal.SIGTERM)) as process:  # noqa: PLW1509 - no threads
        try:
            code = process.wait()
        except KeyboardInterrupt:  # which the command got too; training saves first
            code = process.wait()
    if code:
        print(f'{title}: the command above ended with code {code}; run the demo again to resume', file=sys.stderr)
        raise SystemExit(code if code > 0 else 1)
    print(f'   {time.monotonic() - start:.0f} s', flush=True)
