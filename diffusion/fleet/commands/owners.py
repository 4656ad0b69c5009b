"""Owners of jobs: list them, create one, change one.

    python -m diffusion.fleet owners
    python -m diffusion.fleet owners NAME
    python -m diffusion.fleet owners NAME [--create] [--budget-dollars X] [--max-leased N] [--max-queued N] [--operator|--no-operator]
        [--new-token|--revoke]

For operators. A new owner's token is shown once, and so is the key of its notices: whoever gets a notice verifies it with that key, as
`X-Fleet-Signature` is `sha256=` and the HMAC-SHA256 of the body:

    openssl dgst -sha256 -mac HMAC -macopt hexkey:KEY BODY
"""

import argparse
from collections.abc import Sequence

from diffusion.common.arguments import CommandParser, non_negative_float, positive_int
from diffusion.contracts.errors import run_command
from diffusion.fleet.commands.token_holders import add_token_options, change, shown


def main(arguments: Sequence[str]) -> int:
    from diffusion.fleet.client.http import add_server

    parser = CommandParser('diffusion.fleet owners', __doc__)
    parser.add_argument('name', nargs='?', metavar='NAME', help='becomes the name of a folder in the bucket')
    parser.add_argument('--budget-dollars', type=non_negative_float, metavar='X', help='for all its jobs; a new one has 10')
    parser.add_argument('--max-leased', type=positive_int, metavar='N', help='its jobs on machines at a time; a new one has 20')
    parser.add_argument('--max-queued', type=positive_int, metavar='N', help='its jobs that wait; a new one has 10,000')
    parser.add_argument('--operator', action=argparse.BooleanOptionalAction, help='sees and does everything')
    add_token_options(parser, 'the old one is useless from now on', 'its token is useless from now on; its jobs stay')
    add_server(parser)
    args = parser.parse_args(arguments)

    def work() -> None:
        from diffusion.common.text import markdown_table, print_page
        from diffusion.fleet.client.http import connect

        client = connect(args)
        settings = {name: getattr(args, name) for name in ('budget_dollars', 'max_leased', 'max_queued', 'operator')}
        owners = shown(client, 'owner', args, settings)
        if owners is not None:
            head = ['owner', 'operator:', 'waiting', 'on machines', 'at most', 'dollars', 'budget']
            rows = [
                [
                    row['name'], 'yes' if row['operator'] else '', str(row['queued']), str(row['leased']), str(row['max_leased']),
                    f'{row["spent_dollars"]:,.4f}', f'{row["budget_dollars"]:,.4f}',
                ]
                for row in owners
            ]  # fmt: skip
            print_page(markdown_table(head, rows))
            return
        answer = change(client, 'owner', args, settings)
        if 'token' in answer:
            print(f'its token, shown once: {answer["token"]}')
        if 'notice_key' in answer:
            print(f'the key of its notices, shown once: {answer["notice_key"]}')

    return run_command(work)
