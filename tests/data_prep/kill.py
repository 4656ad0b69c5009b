"""Run a job of data_prep, killing it with SIGKILL at random moments first: `python -m tests.data_prep.kill NUM_KILLS SEED JOB...`.

JOB is `convert SOURCE DEST PROCESSES`, `encode SOURCE DEST PROCESSES ENCODERS` or `recaption SOURCE DEST PROCESSES MODEL`. Each try is forked from this process, which has
imported everything, so that the moments fall into the work and not into imports. A try that ends
before its moment does not count, and the job begins from scratch. Prints how many parts the kills left.
"""

import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import streaming  # noqa: F401  # the workers would each import it

from data_prep.converting.conversion import convert
from data_prep.encoding.dataset import encode
from data_prep.engines import engine as local
from data_prep.recaptioning.dataset import recaption
from diffusion.recipe.schema import EncoderSource

local.CONTEXT = multiprocessing.get_context('fork')  # no server to start: it would import everything again


def job(kind: str, source: str, dest: str, processes: str, *more: str) -> None:
    if kind == 'convert':
        convert(source, dest, engine=local.LocalEngine(int(processes)))
    elif kind == 'recaption':
        from tests.data_prep.test_recaption import DRAWN

        recaption(source, dest, EncoderSource(more[0]), DRAWN, batch_size=5, engine=local.LocalEngine(int(processes) - 1))
    else:
        encode(source, dest, [16, 32], EncoderSource(more[0]), batch_size=8, engine=local.LocalEngine(int(processes) - 1))


def start(arguments: list[str]) -> int:
    pid = os.fork()
    if pid == 0:
        os.setsid()
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # progress bars
            job(*arguments)
            code = 0
        except BaseException as error:
            print(repr(error), flush=True)
        finally:
            os._exit(code)
    return pid


def main() -> None:
    num_kills, seed, *arguments = sys.argv[1:]
    rng = random.Random(int(seed))
    rehearsal = [*arguments[:2], arguments[2] + '-rehearsal', *arguments[3:]]
    seconds = 0.0
    if int(num_kills):
        begin = time.monotonic()
        assert os.waitpid(start(rehearsal), 0)[1] == 0
        seconds = time.monotonic() - begin
        shutil.rmtree(rehearsal[2])
    hits, survived = 0, set()
    while hits < int(num_kills):
        pid = start(arguments)
        time.sleep(rng.uniform(0.1, 0.7) * seconds)
        finished, _ = os.waitpid(pid, os.WNOHANG)
        if finished:
            shutil.rmtree(arguments[2])  # nothing left to interrupt: from the start again
            continue
        hits += 1
        os.kill(pid, signal.SIGKILL)  # the process alone: its workers must end by themselves
        os.waitpid(pid, 0)
        survived.add(len(list(Path(arguments[2]).glob('parts/*.json'))))
    assert os.waitpid(start(arguments), 0)[1] == 0
    print(f'{hits} kills left {sorted(survived)} parts')


if __name__ == '__main__':
    main()
