"""Train the runs of a study: real processes of train.py, several at a time, each resumable."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tqdm import tqdm

from benchmarks.ablations.study import AblationRun
from benchmarks.sweeping.launching import noted
from diffusion.common.processes import end_with_parent
from diffusion.monitoring.report.run import read_log

REPOSITORY = Path(__file__).parents[2]
LOG = 'train.log'
POLL_SEC = 0.3


def train(runs: Sequence[AblationRun], jobs: int) -> list[AblationRun]:
    """Train what is not finished, in this order, `jobs` at a time; returns the runs that failed. For the main thread alone.

    Raises:
        KeyboardInterrupt: SIGTERM or SIGINT came; the runs have saved and resume when the command is run again.
        RecipeError: a recipe is wrong.
    """
    for run in runs:
        run.folder.mkdir(parents=True, exist_ok=True)  # recipes name their data by way of it
    waiting = [run for run in runs if not run.finished()]
    if len(waiting) < len(runs):
        print(f'{len(runs) - len(waiting)} of {len(runs)} runs are finished already')
    lengths = {run: run.recipe().train.duration.value for run in waiting}
    done = {run: _batches(run) for run in waiting}
    failed: list[AblationRun] = []
    running: dict[AblationRun, subprocess.Popen] = {}
    total, initial = sum(lengths.values()), sum(done.values())
    with noted(signal.SIGTERM, signal.SIGINT) as came, tqdm(total=total, initial=initial, unit='ba', smoothing=0, mininterval=5) as bar:
        try:
            while running or (waiting and not came):
                while waiting and len(running) < jobs and not came:
                    run = waiting.pop(0)
                    running[run] = _start(run)
                for run, process in list(running.items()):
                    done[run] = _batches(run)
                    if process.poll() is None:
                        continue
                    del running[run]
                    done[run] = lengths[run]  # of one that failed nothing is left to wait for
                    if process.returncode and not came:
                        failed.append(run)
                        bar.write(f'{run.variant}, seed {run.seed}: ended with code {process.returncode}; see {run.folder / LOG}')
                bar.set_postfix_str(', '.join(f'{run.variant}-{run.seed}' for run in running), refresh=False)
                bar.update(sum(done.values()) - bar.n)
                if came:
                    for process in running.values():
                        process.send_signal(signal.SIGTERM)  # it saves, and ends
                    for process in running.values():
                        process.wait()
                    raise KeyboardInterrupt
                time.sleep(POLL_SEC)
        finally:
            for process in running.values():  # after an error of this process
                process.kill()
                process.wait()
    return failed


def _start(run: AblationRun) -> subprocess.Popen:
    words = [sys.executable, str(REPOSITORY / 'train.py'), *run.arguments]
    with (run.folder / LOG).open('ab') as log:
        log.write(f'$ {shlex.join(words)}\n'.encode())
        log.flush()
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, 'PYTHONPATH': os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get('PYTHONPATH')])])},
            start_new_session=True,  # Ctrl-C reaches this process alone, which tells them once
            preexec_fn=partial(end_with_parent, signal.SIGTERM),  # noqa: PLW1509 - this process has no threads that hold locks
        )


def _batches(run: AblationRun) -> int:
    log = read_log(run.folder / 'log.jsonl')
    return int(log[-1]['batch']) if log else 0
