"""What a process that trains does before it imports torch, whatever it trains."""

import faulthandler
import os
import signal

from diffusion.common.belongings import use_own_temporary_folder
from diffusion.common.files import keep_private
from diffusion.common.processes import command, end_with_parent
from diffusion.faults import preemption, terminal


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
