"""Commands of operators: machines, owners, pools, and how many machines there are."""

import shlex
import subprocess
import time
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, PositiveFloat, PositiveInt, PrivateAttr

from diffusion.common.command_line import option, positional
from diffusion.common.text import markdown_table, print_message, print_page, redacted
from diffusion.contracts.errors import FINISHED, INCOMPLETE, IncompleteError, InputError
from fleet.commands.owner import Asking

if TYPE_CHECKING:  # it imports requests
    from fleet.client.http import FleetClient

COMMAND_SEC, AGAIN_SEC = 120, 600.0  # that the command of `scale` may take; after which it is run again for the same number
Dollars = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class NodesCommand(Asking):
    """List the machines of the fleet, those that are here first.

        python -m fleet nodes [--all]

    For operators.
    """

    all: bool = option(False, 'also those that are gone')

    def run(self) -> None:
        from fleet.client.tables import nodes_lines

        print_page('\n'.join(nodes_lines(self.client().get('/nodes'), self.all)))


class DrainCommand(Asking):
    """Let machines finish: each saves its job, gives it back and leaves.

        python -m fleet drain MACHINE ... [--reason TEXT]

    For operators. A machine that enrols again takes jobs again.
    """

    machines: list[str] = positional('MACHINE')
    reason: str = option('', 'which nodes and the page show', 'TEXT')

    def run(self) -> None:
        from fleet.client.http import quoted

        client, action = self.client(), self.name_of_command()
        for name in self.machines:
            answer = client.post(f'/nodes/{quoted(name)}/{action}', {'reason': self.reason})
            print(f'{name} is {answer["state"]}')


class BanCommand(DrainCommand):
    """Take machines out at once: their jobs go back to the queue, and what was not published is done again by another machine.

        python -m fleet ban MACHINE ... [--reason TEXT]

    For operators. A ban outlasts a restart of the machine; readmit ends it.
    """


class ReadmitCommand(DrainCommand):
    """Let machines that were drained, banned or quarantined take jobs again; what they failed until now counts no more.

        python -m fleet readmit MACHINE ...

    For operators.
    """


class AccountCommand(Asking):
    """Behaviour that owners and pools share: both are listed, made on request, changed, and lose or renew their tokens."""

    name: str | None = positional('NAME', default=None)
    create: bool = option(False, 'a new one; without it an unknown name is an error')
    new_token: bool = option(False, 'the old one is useless from now on')
    revoke: bool = option(False, 'its token is useless from now on; its jobs, or machines that are here, stay')

    def settings(self) -> dict[str, Any]:
        """Return what was said of it, by key of the service."""
        own = type(self).model_fields.keys() - AccountCommand.model_fields.keys()
        return {name: value for name in type(self).model_fields if name in own and (value := getattr(self, name)) is not None}

    def run(self) -> None:
        from fleet.client.http import quoted

        kind, settings, client = self.name_of_command().removesuffix('s'), self.settings(), self.client()
        if self.new_token and self.revoke:
            raise InputError('--new-token and --revoke: say one of them')
        if self.revoke:
            if self.name is None:
                raise InputError(f'--revoke: of which {kind}?')
            client.delete(f'/{kind}s/{quoted(self.name)}/token')
            print(f'the token of {self.name} opens nothing any more')
            return
        if not (self.create or self.new_token or settings):
            found = client.get(f'/{kind}s', name=self.name)[f'{kind}s']
            if self.name is not None and not found:
                raise InputError(f'there is no {kind} {self.name}; say --create to make one of that name')
            print_page(self.table(found))
            return
        said = {'name': self.name, 'new_token': self.new_token, 'create': self.create, **settings}
        answer = client.post(f'/{kind}s', said, may_repeat=False)
        print(f'{self.name}: {"created" if answer["created"] else "changed"}')
        if 'token' in answer:
            print(f'its {"enrolment " if kind == "pool" else ""}token, shown once: {answer["token"]}')
        if 'notice_key' in answer:
            print(f'the key of its notices, shown once: {answer["notice_key"]}')

    def table(self, found: list[dict[str, Any]]) -> str:
        """Return those that were found as a table."""
        raise NotImplementedError


class OwnersCommand(AccountCommand):
    """List owners of jobs, create one, change one.

        python -m fleet owners
        python -m fleet owners NAME
        python -m fleet owners NAME [--create] [--budget-dollars X] [--max-leased N] [--max-queued N] [--operator|--no-operator]
            [--new-token|--revoke]

    For operators. NAME becomes the name of a folder in the bucket. A new owner's token is shown once, and so is the key of its notices: whoever gets
    a notice verifies it with that key, as `X-Fleet-Signature` is `sha256=` and the HMAC-SHA256 of the body:

        openssl dgst -sha256 -mac HMAC -macopt hexkey:KEY BODY
    """

    budget_dollars: Dollars | None = option(None, 'for all its jobs; a new one has 10', 'X')
    max_leased: PositiveInt | None = option(None, 'its jobs on machines at a time; a new one has 20', 'N')
    max_queued: PositiveInt | None = option(None, 'its jobs that wait; a new one has 10,000', 'N')
    operator: bool | None = option(None, 'sees and does everything')

    def table(self, found: list[dict[str, Any]]) -> str:
        rows = [
            [
                row['name'], 'yes' if row['operator'] else '', str(row['queued']), str(row['leased']), str(row['max_leased']),
                f'{row["spent_dollars"]:,.4f}', f'{row["budget_dollars"]:,.4f}',
            ]
            for row in found
        ]  # fmt: skip
        return markdown_table(['owner', 'operator:', 'waiting', 'on machines', 'at most', 'dollars', 'budget'], rows)


class PoolsCommand(AccountCommand):
    """List pools of machines, which share an enrolment token, a price and whether they are trusted; create one, change one.

        python -m fleet pools
        python -m fleet pools NAME
        python -m fleet pools NAME [--create] [--price-per-hour X] [--trusted|--no-trusted] [--max-machines N] [--max-per-address N]
            [--one-use|--no-one-use] [--new-token|--revoke]
        python -m fleet pools NAME --tokens N

    For operators. A new pool's token is shown once; machines enrol with it. Who knows it can enrol machines of any name: give strangers' machines a
    token each (--one-use, then --tokens N, a line each), which lets in one machine, once. A changed price is that of machines which enrol later.
    """

    price_per_hour: Dollars | None = option(None, 'dollars for an hour of one of its machines; a new pool needs it', 'X')
    trusted: bool | None = option(None, 'its machines may see images of jobs with needs.trusted')
    max_machines: PositiveInt | None = option(None, 'that are here at a time; a new pool has 1,000', 'N')
    max_per_address: PositiveInt | None = option(
        None, 'of them from one network address, those in quarantine too; a new pool has 20; not asked of a trusted one', 'N'
    )
    one_use: bool | None = option(None, 'machines enrol with tokens of their own alone (--tokens)')
    tokens: PositiveInt | None = option(None, 'print N new enrolment tokens, of which each lets in one machine, once', 'N')

    def run(self) -> None:
        from fleet.client.http import quoted

        if self.tokens is None:
            return super().run()
        if self.name is None or self.create or self.new_token or self.revoke or self.settings() != {'tokens': self.tokens}:
            raise InputError('--tokens takes the name of a pool that is there, and no other option')
        print('\n'.join(self.client().post(f'/pools/{quoted(self.name)}/tokens', {'num': self.tokens}, may_repeat=False)['tokens']))
        return None

    def table(self, found: list[dict[str, Any]]) -> str:
        rows = [
            [
                row['name'], f'{row["price_per_hour"]:.4f}', 'yes' if row['trusted'] else '', str(row['nodes']), f'{row["max_machines"]:,}',
                '' if row['trusted'] else f'{row["max_per_address"]:,}', f'{row["tokens"]:,}' if row['one_use'] or row['tokens'] else '',
            ]
            for row in found
        ]  # fmt: skip
        return markdown_table(['pool', 'dollars/h', 'trusted:', 'machines', 'at most', 'an address', 'tokens for one'], rows)


class ScaleCommand(Asking):
    """Keep as many machines as the jobs want, with a command of your own.

        python -m fleet scale --command "kubectl scale deployment/workers --replicas={replicas}" --max 40
            [--wanted-hours 4] [--idle-sec 600] [--every-sec 60] [--once] [--dry-run]

    For operators. Machines are wanted for jobs on machines and those that could begin; with --wanted-hours no more than finish all jobs in that time.
    A machine that has been idle for --idle-sec leaves, down to none; one that works is never too many. The command is run without a shell, whenever
    the number has changed, and again after ten minutes or if it failed.
    """

    command: str = option(..., 'in which {replicas} is the number of machines', 'TEXT')
    max: PositiveInt = option(..., 'machines at most', 'N')
    wanted_hours: PositiveFloat | None = option(None, 'in which all jobs are to be done (default: as soon as possible)', 'H')
    idle_sec: PositiveFloat = option(600.0, 'that a machine may wait for a job')
    every_sec: PositiveFloat = option(60.0, 'between two looks')
    once: bool = option(False, 'one look, for cron')
    dry_run: bool = option(False, 'say what would be done, once')

    _last: tuple[int, float] | None = PrivateAttr(None)  # number that the command was given, and when

    def run(self) -> int:
        from fleet.client.http import sleep

        self.words()
        client = self.client()
        if self.once or self.dry_run:
            return FINISHED if self.look(client) else INCOMPLETE
        while True:
            try:
                self.look(client)
            except IncompleteError as error:  # a service that is away is asked again
                print_message(error)
            sleep(self.every_sec)

    def words(self) -> list[str]:
        """Split the command as a shell would.

        Raises:
            InputError: {replicas} is in none of its words, or quotes are not closed.
        """
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            raise InputError(f'--command: {error}') from error
        if not any('{replicas}' in word for word in words):
            raise InputError('--command: {replicas} is missing, in whose place the number of machines is put')
        return words

    def look(self, client: 'FleetClient') -> bool:
        """Do what is to be done now; False if the command failed, which is then run again with the next look."""
        from fleet.client.http import ServiceRefusal, quoted

        answer = client.get('/scale', max=self.max, wanted_hours=self.wanted_hours, idle_sec=self.idle_sec)
        replicas = int(answer['replicas'])
        if self._last is not None and self._last[0] == replicas and not answer['drain'] and time.monotonic() - self._last[1] < AGAIN_SEC:
            return True
        words = [word.replace('{replicas}', str(replicas)) for word in self.words()]
        drained = f'; these leave: {", ".join(answer["drain"])}' if answer['drain'] else ''
        print_page(f'{replicas} machines wanted ({answer["why"]}), {answer["live"]} here{drained}')
        if self.dry_run:
            print(f'would run: {" ".join(words)}', flush=True)
            return True
        for name in answer['drain']:  # before their number shrinks: none of them may take a job in between
            try:
                client.post(f'/nodes/{quoted(name)}/drain', {'reason': 'idle, and not needed'})
            except ServiceRefusal as error:  # it has left by itself
                print_message(error)
        self._last = (replicas, time.monotonic()) if _succeeds(words) else None
        return self._last is not None


def _succeeds(words: list[str]) -> bool:
    try:
        result = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_SEC, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        print_message(f'{words[0]}: {error}')
        return False
    if result.returncode:
        print_message(f'{words[0]} ended with {result.returncode}: {redacted(result.stderr.strip())[-500:]}')
    return result.returncode == 0
