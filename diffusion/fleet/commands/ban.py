"""Take machines out at once: their jobs go back to the queue, and what was not published is done again by another machine.

    python -m diffusion.fleet ban MACHINE ... [--reason TEXT]

For operators. A ban outlasts a restart of the machine; readmit ends it.
"""

from collections.abc import Sequence

from diffusion.fleet.commands.node_actions import act


def main(arguments: Sequence[str]) -> int:
    return act('ban', __doc__, arguments)
