"""Keep as many machines as the jobs want, with a command of your own.

    python -m diffusion.fleet scale --command "kubectl scale deployment/workers --replicas={replicas}" --max 40
        [--wanted-hours 4] [--idle-sec 600] [--every-sec 60] [--once] [--dry-run]

For operators. Machines are wanted for jobs on machines and those that could begin; with --wanted-hours no more than finish all jobs in that time. A
machine that has been idle for --idle-sec leaves, down to none; one that works is never too many. The command is run without a shell, whenever the
number has changed, and again after ten minutes or if it failed.
"""

from collections.abc import Callable, Sequence

from diffusion.common.arguments import CommandParser, positive_float, positive_int
from diffusion.common.text import print_message
from diffusion.contracts.errors import InputError, run_command


def main(arguments: Sequence[str]) -> int:
    from diffusion.fleet.client.http import add_server

    parser = CommandParser('diffusion.fleet scale', __doc__)
    parser.add_argument('--command', required=True, metavar='TEXT', help='in which {replicas} is the number of machines')
    parser.add_argument('--max', type=positive_int, required=True, metavar='N', help='machines at most')
    parser.add_argument('--wanted-hours', type=positive_float, metavar='H', help='in which all jobs are to be done (default: as soon as possible)')
    parser.add_argument('--idle-sec', type=positive_float, default=600, help='that a machine may wait for a job (default %(default)s)')
    parser.add_argument('--every-sec', type=positive_float, default=60, help='between two looks (default %(default)s)')
    parser.add_argument('--once', action='store_true', help='one look, for cron')
    parser.add_argument('--dry-run', action='store_true', help='say what would be done, once')
    add_server(parser)
    args = parser.parse_args(arguments)

    def work() -> int:
        from diffusion.fleet.client.http import connect, sleep
        from diffusion.fleet.client.scaling import Scaler

        words = command_words(args.command)
        query = {'max': args.max, 'wanted_hours': args.wanted_hours, 'idle_sec': args.idle_sec}
        scaler = Scaler(connect(args), query, words, args.dry_run)
        if args.once or args.dry_run:
            return 0 if scaler.look() else 3
        repeat(scaler.look, args.every_sec, sleep)
        return 0

    return run_command(work)


def repeat(look: Callable[[], bool], every_sec: float, wait: Callable[[float], None]) -> None:
    """Look without end: a service that is away is asked again."""

    from diffusion.contracts.errors import IncompleteError

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
    import shlex

    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InputError(f'--command: {error}') from error
    if not any('{replicas}' in word for word in words):
        raise InputError('--command: {replicas} is missing, in whose place the number of machines is put')
    return words
