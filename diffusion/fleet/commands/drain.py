"""Let machines finish: each saves its job, gives it back and leaves.

    python -m diffusion.fleet drain MACHINE ... [--reason TEXT]

For operators. A machine that enrols again takes jobs again.
"""

from collections.abc import Sequence

from diffusion.fleet.commands.node_actions import act


def main(arguments: Sequence[str]) -> int:
    return act('drain', __doc__, arguments)
