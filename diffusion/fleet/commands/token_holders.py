"""What owners and pools share: both are listed, made on request, changed, and lose or renew their tokens."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from diffusion.contracts.errors import InputError

if TYPE_CHECKING:  # it imports requests
    from diffusion.fleet.client.http import FleetClient


def add_token_options(parser: argparse.ArgumentParser, new_token: str, revoke: str) -> None:
    """Add --create, --new-token and --revoke; the last two with these helps."""
    parser.add_argument('--create', action='store_true', help='a new one; without it an unknown name is an error')
    token = parser.add_mutually_exclusive_group()
    token.add_argument('--new-token', action='store_true', help=new_token)
    token.add_argument('--revoke', action='store_true', help=revoke)


def shown(client: FleetClient, kind: str, args: argparse.Namespace, settings: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Those that the command is to list; None if it is to change one.

    Args:
        kind: `owner` or `pool`.
        settings: by key of the service, None for what was not said.

    Raises:
        InputError: there is none of this name.
    """
    if args.create or args.new_token or args.revoke or any(value is not None for value in settings.values()):
        return None
    found = client.get(f'/{kind}s', name=args.name)[f'{kind}s']
    if args.name is not None and not found:
        raise InputError(f'there is no {kind} {args.name}; say --create to make one of that name')
    return found


def change(client: FleetClient, kind: str, args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """Revoke its token, or make or change it; says so, and returns the answer with what is shown once."""
    from diffusion.fleet.client.http import quoted

    if args.revoke:
        client.delete(f'/{kind}s/{quoted(args.name)}/token')
        print(f'the token of {args.name} opens nothing any more')
        return {}
    said = {key: value for key, value in settings.items() if value is not None}
    answer = client.post(f'/{kind}s', {'name': args.name, 'new_token': args.new_token, 'create': args.create, **said}, may_repeat=False)
    print(f'{args.name}: {"created" if answer["created"] else "changed"}')
    return answer
