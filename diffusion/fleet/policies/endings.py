"""Which ending a process's exit code means, and which endings are failures."""

from collections.abc import Iterable

from diffusion.contracts.errors import BAD_DATA, BAD_RECIPE, FINISHED, NON_FINITE, PREEMPTED, STALLED, SUPERSEDED
from diffusion.fleet.policies.rows import AttemptRow, Ending

# 143 and 129 are a SIGTERM and a SIGHUP that came before train.py could act on them.
ENDINGS = {
    FINISHED: Ending.DONE,
    BAD_RECIPE: Ending.RECIPE,
    BAD_DATA: Ending.DATA,
    SUPERSEDED: Ending.LOST,
    PREEMPTED: Ending.STOPPED,
    STALLED: Ending.STALLED,
    NON_FINITE: Ending.NON_FINITE,
    143: Ending.STOPPED,
    129: Ending.STOPPED,
}

COUNTED = frozenset({Ending.CRASHED, Ending.STALLED})  # against the job or the machine: blame.py and quarantine.py say which
HOPELESS = frozenset({Ending.RECIPE, Ending.DATA})  # the same on every machine
FAILURES = COUNTED | HOPELESS | {Ending.NON_FINITE, Ending.NODE_FAULT}  # the machine was there to the end, and the job did not get through


def ending_of(exit_code: int) -> Ending:
    """The ending that an exit code of train.py means; signals (negative, or 128 + signal) and all other codes are crashes."""
    return ENDINGS.get(exit_code, Ending.CRASHED)


def repeated_losses(attempts: Iterable[AttemptRow]) -> set[tuple[str, int]]:
    """(job, epoch) of attempts that were lost where the same machine had lost the same job before, and no checkpoint had come of it.

    Once is a machine that vanished. Twice is one that came back and vanished again: its container is killed whole, such as by its memory limit, or it
    claims and forgets. Nobody is there to report a failure, so this is one.
    """
    seen, found = set(), set()
    for attempt in sorted(attempts, key=lambda attempt: attempt.epoch):
        if attempt.ending is Ending.LOST:
            loss = attempt.job, attempt.node, attempt.first_step
            if loss in seen:
                found.add((attempt.job, attempt.epoch))
            seen.add(loss)
    return found


def describe(attempt: AttemptRow) -> str:
    """`attempt 2 on gpu-7: crashed, exit code 70, after step 300: MESSAGE`."""
    ending = str(attempt.ending or 'running').replace('_', ' ')
    code = '' if attempt.exit_code is None else f', exit code {attempt.exit_code}'
    return (
        f'attempt {attempt.epoch} on {attempt.node}: {ending}{code}, after step {attempt.last_step}{": " if attempt.message else ""}{attempt.message}'
    )
