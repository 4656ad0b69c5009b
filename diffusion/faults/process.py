"""Beginning and end of a process that trains: what it does before it imports torch, its message for people, its exit code for the launcher."""

import faulthandler
import os
import re
import signal
import sys
import threading
import traceback
from typing import NoReturn

from diffusion.common import stopwatch
from diffusion.common.belongings import use_own_temporary_folder
from diffusion.common.files import keep_private
from diffusion.common.processes import command, end_with_parent, leave_no_children
from diffusion.common.text import first_line, print_message
from diffusion.contracts.errors import CRASH, PREEMPTED, STALLED, train_code
from diffusion.faults import preemption, terminal
from diffusion.faults.peers import announce, announced, leave, lost
from diffusion.faults.preemption import Preempted, ignore_requests, stopped


def before_imports() -> None:
    """Heed signals, outlive the terminal, keep files private, and set what libraries read when they are imported."""
    keep_private()
    preemption.listen(preemption.IMPORTING)
    terminal.survive_its_end()
    use_own_temporary_folder()
    if 'LOCAL_RANK' in os.environ:  # under a launcher
        command()  # while the launcher lives
        end_with_parent(signal.SIGTERM)  # a launcher that is killed, or whose terminal closes, costs no steps
        # Pages of C++ frames for every connection that a lost rank leaves behind; what matters of it arrives as an exception.
        os.environ.setdefault('TORCH_CPP_LOG_LEVEL', 'ERROR')
    faulthandler.enable()  # a crash in native code, CUDA's included, otherwise leaves a number and nothing else


PATIENCE_SEC = 12  # for loggers to write the last lines, and again for Python to end; a launcher kills after 30

LOST_PEER = re.compile(r'Connection (closed|reset) by (remote )?peer|remote process exited|NCCL.*(unhandled system error|remote)', re.DOTALL)


def explain(error: BaseException) -> int:
    """Print what went wrong, with a traceback if it is a crash, and return the exit code.

    If another rank has announced its end, a crash here is a consequence and takes its code: a launcher reports the first rank's.
    """
    ignore_requests(but_ctrl_c=True)
    error = stopped() or error
    code = PREEMPTED if isinstance(error, Preempted) else train_code(error)
    announced_code = announced() if code == CRASH else None
    if announced_code is not None:
        leave()
        stopwatch.end('PeerLost')
        print_message(f'this rank ends because another one did (exit code {announced_code}): {first_line(error)}')
        return announced_code
    if code == CRASH and _lost_a_peer(error):  # a rank that was killed, or whose machine is gone, has announced nothing
        leave()
        stopwatch.end('PeerLost')
        print_message(
            f'{first_line(error)}\nthis rank ends because {lost()} is gone without a message: killed (out of memory?), or its machine was lost; '
            f'resume with: {command()}\n(exit code {STALLED}, docs/reliability.md)'
        )
        return STALLED
    announce(code)
    stopwatch.end(type(error).__name__)
    if code == CRASH:
        print_message(''.join(traceback.format_exception(error)).rstrip())
    elif code != PREEMPTED or os.environ.get('LOCAL_RANK', '0') == '0':  # all ranks agree on that, and one says so
        print_message(f'{error}\n(exit code {code}, docs/reliability.md)')
    return code


def _lost_a_peer(error: BaseException) -> bool:
    """Whether a collective failed because a rank is gone."""
    torch = sys.modules.get('torch')
    return torch is not None and isinstance(error, torch.distributed.DistError | RuntimeError) and bool(LOST_PEER.search(str(error)))


def end(code: int, trainer: object = None) -> int:
    """Return `code`, and end the process by force if it has not ended soon: a clean end may wait for other ranks or for threads that hang."""
    ignore_requests()
    engine = getattr(trainer, 'engine', None)
    if engine is not None:
        closing = threading.Thread(target=engine.close, daemon=True)
        closing.start()
        closing.join(PATIENCE_SEC)
    at_the_latest = threading.Timer(PATIENCE_SEC, end_now, (code,))
    at_the_latest.daemon = True
    at_the_latest.start()
    return code


def end_now(code: int) -> NoReturn:
    """End at once, with the loader's processes."""
    leave_no_children()
    terminal.give_back()
    os._exit(code)
