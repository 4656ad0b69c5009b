"""A fleet: many small jobs on machines that may vanish.

    python -m fleet COMMAND ...

`python -m fleet COMMAND --help` explains one. docs/fleet.md leads from nothing to a running fleet.
"""

import inspect
import sys

from diffusion.common.text import did_you_mean, print_page
from diffusion.contracts.errors import BAD_INPUT
from fleet.commands import machine, operator, owner

# In the order in which a new fleet needs them.
COMMANDS = {
    command.name_of_command(): command
    for command in (
        machine.InitCommand, machine.ServerCommand, owner.SubmitCommand, owner.StatusCommand, owner.WatchCommand, owner.FetchCommand,
        owner.CancelCommand, owner.RetryCommand, owner.BillCommand, operator.NodesCommand, operator.DrainCommand, operator.BanCommand,
        operator.ReadmitCommand, operator.OwnersCommand, operator.PoolsCommand, operator.ScaleCommand, machine.WorkerCommand, machine.RunCommand,
    )
}  # fmt: skip


def main() -> int:
    command = sys.argv[1] if len(sys.argv) > 1 else ''
    if command in ('', '-h', '--help'):
        does = [f'    {name:<8}  {(kind.__doc__ or "").splitlines()[0]}' for name, kind in COMMANDS.items()]
        print_page('\n'.join([(__doc__ or '').strip(), '', *does]))
        return 0 if command else BAD_INPUT
    if command not in COMMANDS:
        print(f"fleet: there is no command '{command[:80]}'{did_you_mean(command, COMMANDS)}", file=sys.stderr)
        return BAD_INPUT
    kind = COMMANDS[command]
    return kind.parse(f'fleet {command}', inspect.getdoc(kind), words=sys.argv[2:]).end()


if __name__ == '__main__':
    raise SystemExit(main())
