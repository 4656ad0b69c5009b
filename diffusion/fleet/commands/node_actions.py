"""What ban, drain and readmit share."""

from collections.abc import Sequence

from diffusion.common.arguments import CommandParser
from diffusion.contracts.errors import run_command


def act(action: str, doc: str | None, arguments: Sequence[str]) -> int:
    """Run one of the three commands."""
    from diffusion.fleet.client.http import add_server

    parser = CommandParser(f'diffusion.fleet {action}', doc)
    parser.add_argument('machines', nargs='+', metavar='MACHINE')
    if action != 'readmit':
        parser.add_argument('--reason', default='', metavar='TEXT', help='which nodes and the page show')
    add_server(parser)
    args = parser.parse_args(arguments)

    def work() -> None:
        from diffusion.fleet.client.http import connect, quoted

        client = connect(args)
        for name in args.machines:
            answer = client.post(f'/nodes/{quoted(name)}/{action}', {'reason': getattr(args, 'reason', '')})
            print(f'{name} is {answer["state"]}')

    return run_command(work)
