"""`fleet run`: a whole attempt with storage of its own, for engines that have a queue already (Kubernetes, Slurm, SkyPilot)."""

import os
from dataclasses import dataclass
from pathlib import Path

from diffusion.checkpoints.manifest import Content
from diffusion.common.storage import open_folder
from diffusion.contracts.errors import FINISHED, PREEMPTED, STALLED, SUPERSEDED, DataError, InputError
from diffusion.fleet.attempts.attempt import Attempt, Programs, Workplace, write_log
from diffusion.fleet.attempts.desk import Assignment, Fenced, InputFault
from diffusion.fleet.attempts.direct import DirectDesk, held_checkpoint, is_done, take_job
from diffusion.fleet.attempts.places import attempt_folder, open_work
from diffusion.fleet.attempts.stopping import StopRequest
from diffusion.fleet.jobs.checking import RECIPES, check_job
from diffusion.fleet.jobs.spec import NAME, load_spec


@dataclass(frozen=True)
class RunOptions:
    """Of `fleet run`.

    Attributes:
        job: file of the job.
        outputs: where jobs have their folders; None takes that of the job.
        epoch: number of the attempt, as an engine counts it; None takes the next one.
        keep_gb: base models beyond it are deleted, the least recently used first.
    """

    job: Path
    work: Path
    outputs: str | None = None
    epoch: int | None = None
    recipes: Path = RECIPES
    keep_gb: float = 50.0


def run_job(options: RunOptions, programs: Programs, stop: StopRequest) -> int:
    """Do the job, or what an earlier attempt has left of it; return an exit code of train.py.

    Raises:
        InputError, DataError, StorageError, OSError: before training; diffusion/contracts/errors.py has their exit codes.
    """
    spec = load_spec(options.job)
    checked = check_job(spec, str(options.job), options.recipes)
    name, folder = spec.name or options.job.stem, options.outputs or spec.outputs.prefix
    if not NAME.fullmatch(name):
        raise InputError(f'{options.job}: its name {name[:80]!r} may have letters, digits and . _ - alone; set `name` in it')
    if folder is None:
        raise InputError(f'{options.job}: says not where results go; set outputs.prefix in it, or --outputs')
    out = open_folder(f'{folder.rstrip("/") or "/"}/{name}')
    if is_done(out, spec):
        write_log(f'{name}: is done already: {out.url}/result.json')
        return FINISHED
    work = options.work.absolute()  # children run in folders of their own
    warm = open_work(work, options.keep_gb)
    try:
        latest = take_job(out, spec, options.epoch)
        held = held_checkpoint(out, latest)
        assignment = Assignment(
            job=name,
            name=name,
            epoch=latest.epoch,
            recipe=spec.recipe,
            overrides=spec.overrides,
            inputs={key: Content(given.sha256, given.bytes) for key, given in spec.inputs.items()},
            checkpoint=held,
            validation=spec.validation,
            draws=True,
        )
        steps = f' of {checked.num_steps:,} steps' if checked.num_steps else ''
        write_log(f'{name}: attempt {latest.epoch}{steps}, results to {out.url}')
        with attempt_folder(work, f'{name}-e{latest.epoch}-{os.getpid()}') as place:
            outcome = Attempt(
                assignment, DirectDesk(out, latest, spec, held), Workplace(place, warm, programs, options.recipes), stop, write_log
            ).run()
    except Fenced as error:
        write_log(f'{name}: {error}: this one writes nothing more')
        return SUPERSEDED
    except InputFault as error:
        raise DataError(str(error)) from error
    code = outcome.exit_code if outcome.exit_code is not None else STALLED
    ended = 'done' if code == FINISHED else 'stopped, run it again to resume' if code == PREEMPTED else outcome.message.strip() or 'failed'
    write_log(f'{name}: ended with exit code {code} at step {outcome.step:,}: {ended}')
    return code
