"""Pools of machines, which share an enrolment token, a price and whether they are trusted: list them, create one, change one.

    python -m diffusion.fleet pools
    python -m diffusion.fleet pools NAME
    python -m diffusion.fleet pools NAME [--create] [--price-per-hour X] [--trusted|--no-trusted] [--max-machines N] [--max-per-address N]
        [--one-use|--no-one-use] [--new-token|--revoke|--tokens N]

For operators. A new pool's token is shown once; machines enrol with it. Who knows it can enrol machines of any name: give strangers' machines a token
each (--one-use, then --tokens N, a line each), which lets in one machine, once. A changed price is that of machines which enrol from now on.
"""

import argparse
from collections.abc import Sequence

from diffusion.common.arguments import CommandParser, non_negative_float, positive_int
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
    parser.add_argument('--max-machines', type=positive_int, metavar='N', help='that are here at a time; a new pool has 1,000')
    parser.add_argument(
        '--max-per-address', type=positive_int, metavar='N',
        help='of them from one network address, those in quarantine too; a new pool has 20; not asked of a trusted one',
    )  # fmt: skip
    parser.add_argument('--one-use', action=argparse.BooleanOptionalAction, help='machines enrol with tokens of their own alone (--tokens)')
    parser.add_argument('--tokens', type=positive_int, metavar='N', help='print N new enrolment tokens, of which each lets in one machine, once')
    add_token_options(parser, 'nobody enrols with the old one from now on', 'nobody enrols from now on; machines that are here stay')
    add_server(parser)
    args = parser.parse_args(arguments)

    def work() -> None:
        from diffusion.common.text import markdown_table, print_page
        from diffusion.fleet.client.http import connect, quoted

        client = connect(args)
        settings = {name: getattr(args, name) for name in ('price_per_hour', 'trusted', 'max_machines', 'max_per_address', 'one_use')}
        if args.tokens is not None:
            if args.name is None or args.create or args.new_token or args.revoke or any(value is not None for value in settings.values()):
                parser.error('--tokens takes the name of a pool that is there, and no other option')
            print('\n'.join(client.post(f'/pools/{quoted(args.name)}/tokens', {'num': args.tokens}, may_repeat=False)['tokens']))
            return
        pools = shown(client, 'pool', args, settings)
        if pools is not None:
            rows = [
                [
                    row['name'], f'{row["price_per_hour"]:.4f}', 'yes' if row['trusted'] else '', str(row['nodes']), f'{row["max_machines"]:,}',
                    '' if row['trusted'] else f'{row["max_per_address"]:,}', f'{row["tokens"]:,}' if row['one_use'] or row['tokens'] else '',
                ]
                for row in pools
            ]  # fmt: skip
            print_page(markdown_table(['pool', 'dollars/h', 'trusted:', 'machines', 'at most', 'an address', 'tokens for one'], rows))
            return
        answer = change(client, 'pool', args, settings)
        if 'token' in answer:
            print(f'its enrolment token, shown once: {answer["token"]}')

    return run_command(work)
