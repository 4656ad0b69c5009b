"""Pools of machines, which share an enrolment token, a price and whether they are trusted: list them, create one, change one.

    python -m diffusion.fleet pools
    python -m diffusion.fleet pools NAME
    python -m diffusion.fleet pools NAME [--create] [--price-per-hour X] [--trusted|--no-trusted] [--new-token|--revoke]

For operators. A new pool's token is shown once; machines enrol with it. A changed price is that of machines which enrol from now on.
"""

import argparse
from collections.abc import Sequence

from diffusion.common.arguments import CommandParser, non_negative_float
from diffusion.contracts.errors import run_command
from diffusion.fleet.commands.token_holders import add_token_options, change, shown


def main(arguments: Sequence[str]) -> int:
    from diffusion.fleet.client.http import add_server

    parser = CommandParser('diffusion.fleet pools', __doc__)
    parser.add_argument('name', nargs='?', metavar='NAME')
    parser.add_argument(
        '--price-per-hour', type=non_negative_float, metavar='X', help='dollars for an hour of one of its machines; a new pool needs it'
    )
    parser.add_argument('--trusted', action=argparse.BooleanOptionalAction, help='its machines may see images of jobs with needs.trusted')
    add_token_options(parser, 'nobody enrols with the old one from now on', 'nobody enrols from now on; machines that are here stay')
    add_server(parser)
    args = parser.parse_args(arguments)

    def work() -> None:
        from diffusion.common.text import markdown_table, print_page
        from diffusion.fleet.client.http import connect

        client = connect(args)
        settings = {name: getattr(args, name) for name in ('price_per_hour', 'trusted')}
        pools = shown(client, 'pool', args, settings)
        if pools is not None:
            rows = [[row['name'], f'{row["price_per_hour"]:.4f}', 'yes' if row['trusted'] else '', str(row['nodes'])] for row in pools]
            print_page(markdown_table(['pool', 'dollars/h', 'trusted:', 'machines'], rows))
            return
        answer = change(client, 'pool', args, settings)
        if 'token' in answer:
            print(f'its enrolment token, shown once: {answer["token"]}')

    return run_command(work)
