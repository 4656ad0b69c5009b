"""The process between a worker and what it starts: leader of a process group, which ends with the worker.

Signals that ask for a stop are ignored here and, because ignoring is inherited, by Composer's launcher and by ranks of train.py until they have
handlers: a request that comes too early is lost, not answered by dying. (SIGTERM is an exception: the launcher installs a handler that kills.)
"""

import os
import signal
import subprocess
import sys
import threading

from diffusion.common.processes import STOP_SIGNALS


def main() -> int:
    """Run the command in sys.argv until it ends or the other end of stdin is closed; return its exit code, 128 + N after signal N."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_worker, daemon=True).start()
    code = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL).wait()
    return code if code >= 0 else 128 - code


def _end_with_the_worker() -> None:
    """Also after `kill -9` of the worker: Linux closes its end of the pipe."""
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)
