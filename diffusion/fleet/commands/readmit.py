"""Let machines that were banned, quarantined or drained take jobs again; their failures before now count no more.

    python -m diffusion.fleet readmit MACHINE ...

For operators.
"""

from collections.abc import Sequence

from diffusion.fleet.commands.node_actions import act


def main(arguments: Sequence[str]) -> int:
    return act('readmit', __doc__, arguments)
