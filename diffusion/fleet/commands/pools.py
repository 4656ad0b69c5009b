"""Pools of machines, which share an enrolment token, a price and whether they are trusted: list them, create one, change one.

    python -m diffusion.fleet pools
    python -m diffusion.fleet pools NAME
    python -m diffusion.fleet pools NAME [--create] [--price-per-hour X] [--trusted|--no-trusted] [--new-token|--revoke]

For operators. A new pool's token is shown once; machines enrol with it. A changed price is that of machines which enrol from now on.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from diffusion.common.arguments import CommandParser, non_negative_float
from diffusion.contracts.endings import run_command
from diffusion.contracts.errors import InputError


def main(arguments: Sequence[str]) -> int:
    from diffusion.fleet.client.http import add_server

    parser = CommandParser('diffusion.fleet pools', __doc__)
    parser.add_argument('name', nargs='?', metavar='NAME')
    parser.add_argument(
        '--price-per-hour', type=non_negative_float, metavar='X', help='dollars for an hour of one of its machines; a new pool needs it'
    )
    parser.add_argument('--trusted', action=argparse.BooleanOptionalAction, help='its machines may see images of jobs with needs.trusted')
    parser.add_argument('--create', action='store_true', help='a new one; without it an unknown name is an error')
    token = parser.add_mutually_exclusive_group()
    token.add_argument('--new-token', action='store_true', help='nobody enrols with the old one from now on')
    token.add_argument('--revoke', action='store_true', help='nobody enrols from now on; machines that are here stay')
    add_server(parser)
    args = parser.parse_args(arguments)

    def work() -> None:
        from diffusion.common.tables import markdown_table, print_page
        from diffusion.fleet.client.http import connect, quoted

        client = connect(args)
        settings = {name: getattr(args, name) for name in ('price_per_hour', 'trusted')}
        is_shown = not (args.create or args.new_token or args.revoke) and all(value is None for value in settings.values())
        if is_shown:
            pools = client.get('/pools', name=args.name)['pools']
            if args.name is not None and not pools:
                raise InputError(f'there is no pool {args.name}; say --create to make one of that name')
            rows = [[row['name'], f'{row["price_per_hour"]:.4f}', 'yes' if row['trusted'] else '', str(row['nodes'])] for row in pools]
            print_page(markdown_table(['pool', 'dollars/h', 'trusted:', 'machines'], rows))
            return
        if args.revoke:
            client.delete(f'/pools/{quoted(args.name)}/token')
            print(f'the token of {args.name} opens nothing any more')
            return
        content = {
            'name': args.name,
            'new_token': args.new_token,
            'create': args.create,
            **{key: value for key, value in settings.items() if value is not None},
        }
        answer = client.post('/pools', content, may_repeat=False)
        print(f'{args.name}: {"created" if answer["created"] else "changed"}')
        if 'token' in answer:
            print(f'its enrolment token, shown once: {answer["token"]}')

    return run_command(work)
