"""A fleet: many small jobs on machines that may vanish.

    python -m diffusion.fleet COMMAND ...

`python -m diffusion.fleet COMMAND --help` explains one. docs/fleet.md leads from nothing to a running fleet.
"""

import sys
from importlib import import_module

from diffusion.common.text import did_you_mean, print_page
from diffusion.contracts.errors import BAD_INPUT

# Command: what it does. Each is a module of commands/ with `main(arguments) -> exit code`.
COMMANDS = {
    'init': 'creates a fleet in an empty database',
    'server': 'answers machines, owners and operators',
    'submit': 'submits jobs, with folders of photos',
    'status': 'lists jobs, or says all about one',
    'watch': 'reports jobs until all have ended',
    'fetch': 'downloads the results of a job',
    'cancel': 'cancels jobs',
    'retry': 'puts failed jobs back into the queue',
    'bill': 'says what machines cost',
    'nodes': 'lists machines',
    'drain': 'lets machines save, give their jobs back and leave',
    'ban': 'takes machines out at once',
    'readmit': 'lets machines take jobs again',
    'owners': 'lists, creates and changes owners of jobs',
    'pools': 'lists, creates and changes pools of machines',
    'scale': 'keeps as many machines as jobs want, with a command of yours',
    'worker': 'does the jobs of a queue on this machine',
    'run': 'does one job on this machine, without a queue',
}


def main() -> int:
    command = sys.argv[1] if len(sys.argv) > 1 else ''
    if command in ('', '-h', '--help'):
        width = max(map(len, COMMANDS), default=0)
        print_page('\n'.join([(__doc__ or '').strip(), '', *(f'    {name:<{width}}  {does}' for name, does in COMMANDS.items())]))
        return 0 if command else BAD_INPUT
    if command not in COMMANDS:
        print(f"diffusion.fleet: there is no command '{command[:80]}'{did_you_mean(command, COMMANDS)}", file=sys.stderr)
        return BAD_INPUT
    return import_module(f'diffusion.fleet.commands.{command}').main(sys.argv[2:])


if __name__ == '__main__':
    raise SystemExit(main())
