"""Asks the service how many machines are wanted, lets idle ones leave, and runs the command that changes their number."""

import shlex
import subprocess
import time
from collections.abc import Callable
from typing import Any

from diffusion.common.text import print_message, print_page, redacted
from diffusion.contracts.errors import IncompleteError, InputError
from fleet.client.http import FleetClient, ServiceRefusal, quoted

COMMAND_SEC = 120
AGAIN_SEC = 600.0


class Scaler:
    """One look at a time.

    Args:
        query: of GET /scale: max, wanted_hours, idle_sec.
        words: of the command; `{replicas}` in them becomes the number.
        clock: in seconds.
    """

    def __init__(
        self, client: FleetClient, query: dict[str, Any], words: list[str], dry_run: bool = False, clock: Callable[[], float] = time.monotonic
    ):
        self.client, self.query, self.words, self.dry_run, self.clock = client, query, words, dry_run, clock
        self.last: tuple[int, float] | None = None  # number that the command was given, and when

    def look(self) -> bool:
        """Do what is to be done now; False if the command failed, which is then run again with the next look."""
        answer = self.client.get('/scale', **self.query)
        replicas = int(answer['replicas'])
        if self.last is not None and self.last[0] == replicas and not answer['drain'] and self.clock() - self.last[1] < AGAIN_SEC:
            return True
        words = [word.replace('{replicas}', str(replicas)) for word in self.words]
        drained = f'; these leave: {", ".join(answer["drain"])}' if answer['drain'] else ''
        print_page(f'{replicas} machines wanted ({answer["why"]}), {answer["live"]} here{drained}')
        if self.dry_run:
            print(f'would run: {" ".join(words)}', flush=True)
            return True
        for name in answer['drain']:  # before their number shrinks: none of them may take a job in between
            try:
                self.client.post(f'/nodes/{quoted(name)}/drain', {'reason': 'idle, and not needed'})
            except ServiceRefusal as error:  # it has left by itself
                print_message(error)
        if not self._run(words):
            self.last = None
            return False
        self.last = (replicas, self.clock())
        return True

    def _run(self, words: list[str]) -> bool:
        try:
            result = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_SEC, check=False, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.TimeoutExpired) as error:
            print_message(f'{words[0]}: {error}')
            return False
        if result.returncode:
            print_message(f'{words[0]} ended with {result.returncode}: {redacted(result.stderr.strip())[-500:]}')
        return result.returncode == 0


def repeat(look: Callable[[], bool], every_sec: float, wait: Callable[[float], None]) -> None:
    """Look without end: a service that is away is asked again."""

    while True:
        try:
            look()
        except IncompleteError as error:
            print_message(error)
        wait(every_sec)


def command_words(text: str) -> list[str]:
    """The words of a command, of which one has {replicas} in it.

    Raises:
        InputError: none has, or quotes are not closed.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InputError(f'--command: {error}') from error
    if not any('{replicas}' in word for word in words):
        raise InputError('--command: {replicas} is missing, in whose place the number of machines is put')
    return words
