"""A fleet: many small jobs on machines that may vanish.

    python -m diffusion.fleet COMMAND ...

`python -m diffusion.fleet COMMAND --help` explains one. docs/fleet.md leads from nothing to a running fleet.
"""

import inspect
import sys

from diffusion.common.text import did_you_mean, print_page
from diffusion.contracts.errors import BAD_INPUT
from diffusion.fleet.commands.machine import Init, Run, Server, Worker
from diffusion.fleet.commands.operator import Ban, Drain, Nodes, Owners, Pools, Readmit, Scale
from diffusion.fleet.commands.owner import Bill, Cancel, Fetch, Retry, Status, Submit, Watch

ALL = (Init, Server, Submit, Status, Watch, Fetch, Cancel, Retry, Bill, Nodes, Drain, Ban, Readmit, Owners, Pools, Scale, Worker, Run)
COMMANDS = {command.__name__.lower(): command for command in ALL}


def main() -> int:
    command = sys.argv[1] if len(sys.argv) > 1 else ''
    if command in ('', '-h', '--help'):
        does = [f'    {name:<8}  {(kind.__doc__ or "").splitlines()[0]}' for name, kind in COMMANDS.items()]
        print_page('\n'.join([(__doc__ or '').strip(), '', *does]))
        return 0 if command else BAD_INPUT
    if command not in COMMANDS:
        print(f"diffusion.fleet: there is no command '{command[:80]}'{did_you_mean(command, COMMANDS)}", file=sys.stderr)
        return BAD_INPUT
    kind = COMMANDS[command]
    return kind.parse(f'diffusion.fleet {command}', inspect.getdoc(kind), words=sys.argv[2:]).end()


if __name__ == '__main__':
    raise SystemExit(main())
