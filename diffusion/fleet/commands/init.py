"""Create a fleet in an empty PostgreSQL database, and its first operator.

    FLEET_DATABASE_URL=postgresql://USER:PASSWORD@HOST/NAME python -m diffusion.fleet init [--operator NAME] [--database-file FILE]

Prints the operator's token, and the key that signs its notices, once. Everything else is done with it, through the service.
"""

import secrets
from collections.abc import Sequence
from pathlib import Path

from diffusion.common.arguments import CommandParser
from diffusion.contracts.errors import run_command


def main(arguments: Sequence[str]) -> int:
    parser = CommandParser('diffusion.fleet init', __doc__)
    parser.add_argument('--operator', default='operator', metavar='NAME', help='its name (default %(default)s)')
    parser.add_argument('--database-file', type=Path, metavar='FILE', help='that holds the URL of the database, in place of FLEET_DATABASE_URL')
    args = parser.parse_args(arguments)

    def work() -> None:
        from diffusion.fleet.queue.database import connected, create, database_url, new_token
        from diffusion.fleet.service.gate import digest

        url = database_url(args.database_file)
        create(url)
        token, notice_key = new_token('owner'), secrets.token_bytes(32)
        with connected(url) as connection:
            connection.execute(
                'insert into owner (name, token_hash, is_operator, notice_key) values (%s, %s, true, %s)',
                [args.operator, digest(token), notice_key],
            )
        print(f'token of {args.operator}, shown once: {token}')
        print(f'key of its notices, shown once: {notice_key.hex()}')

    return run_command(work)
