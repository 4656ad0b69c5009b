"""Jobs as they run, for a terminal, and their results on this machine, each file whole or not at all."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from diffusion.checkpoints.manifest import Content, sha256_of
from diffusion.common.text import counted
from diffusion.contracts.errors import FINISHED, INCOMPLETE, IncompleteError, InputError
from fleet.attempts.backend import BackendUnavailable
from fleet.attempts.transfers import WrongContent, download
from fleet.client.http import PAUSES_SEC, FleetClient, quoted, sleep
from fleet.policies.rows import JobState

ENDED = (JobState.DONE, JobState.FAILED, JobState.CANCELLED)
SHOWN = {JobState.QUEUED: 'waiting', JobState.LEASED: 'on machines'}
REPEAT_SEC = 60.0  # between two lines that say the same but for the time left
MAX_NAMED = 10  # jobs of one name in a message
PAGE = 1000  # jobs that the service lists at a time


def listed(client: FleetClient, state: str | None = None, after: int = 0) -> Iterator[dict[str, Any]]:
    """The jobs of this owner in the order of their submission."""
    while True:
        jobs = client.get('/jobs', state=state, after=after)['jobs']
        yield from jobs
        if len(jobs) < PAGE:
            return
        after = jobs[-1]['number']


def job_ids(client: FleetClient, given: Collection[str]) -> list[str]:
    """Ids of jobs that are given by id or number, or by name where it is one job's.

    Raises:
        InputError: one of them is none.
    """
    found, others = list[str](), list[str]()
    for text in given:
        (found if len(text) == 36 and text.count('-') == 4 else others).append(text)
    if others:
        known = list(listed(client))
        for text in others:
            own = [job['id'] for job in known if text in (job['name'], str(job['number']))]
            if len(own) != 1:
                numbers = ', '.join(str(job['number']) for job in known if job['id'] in own[:MAX_NAMED])
                remedy = f'give the number: {numbers}{", ..." if len(own) > MAX_NAMED else ""}' if own else 'status lists them with their numbers'
                raise InputError(f'{text[:80]}: {counted(len(own), "job")} of that name or number; {remedy}')
            found += own
    return found


def follow(
    client: FleetClient, ids: Collection[str] | None, every_sec: float, say: Callable[[str], None], wait: Callable[[float], None] = sleep
) -> int:
    """Report jobs until all have ended; returns 0 if all are done, 3 if some are not.

    Args:
        ids: None: all that have not ended yet.
    """
    if ids is None:
        ids = {job['id'] for state in (JobState.QUEUED, JobState.LEASED) for job in listed(client, state)}
    wanted = set(ids)
    if not wanted:
        say('no job waits or runs')
        return FINISHED
    first = min(client.get(f'/jobs/{quoted(job)}')['number'] for job in _some(ids))
    told, begin, done_at_first, last, said_at = set[str](), time.monotonic(), None, '', 0.0
    while True:
        jobs = [job for job in listed(client, after=first - 1) if job['id'] in wanted]
        for job in jobs:
            if job['state'] in (JobState.FAILED, JobState.CANCELLED) and job['id'] not in told:
                told.add(job['id'])
                say(f'{title_of(job)} {job["state"]}: {job["cause"] or "no cause is known"}')
        ended = sum(job['state'] in ENDED for job in jobs)
        done_at_first = ended if done_at_first is None else done_at_first
        line, now = progress(jobs), time.monotonic()
        if line != last or now >= said_at + REPEAT_SEC:  # the time left alone, which changes at each look, is no news
            left = _span((now - begin) / (ended - done_at_first) * (len(jobs) - ended)) if done_at_first < ended < len(jobs) else ''
            say(f'{line}, about {left} left' if left else line)
            last, said_at = line, now
        if ended == len(jobs):
            return FINISHED if all(job['state'] == JobState.DONE for job in jobs) else INCOMPLETE
        wait(every_sec)


def _some(ids: Collection[str]) -> list[str]:
    """Enough of them to find the lowest number: they were submitted in order, unless a person has chosen them."""
    return list(ids) if len(ids) <= 100 or isinstance(ids, set) else list(ids)[:1]


def progress(jobs: Collection[dict[str, Any]]) -> str:
    """`12 of 1,000 jobs done, 40 on machines, 948 waiting, $3.91`."""
    states = Counter(JobState(job['state']) for job in jobs)
    parts = [f'{states[JobState.DONE]:,} of {counted(len(jobs), "job")} done']
    parts += [f'{states[state]:,} {SHOWN.get(state, state.value)}' for state in JobState if state != JobState.DONE and states[state]]
    return ', '.join([*parts, f'${sum(job["dollars"] for job in jobs):,.2f}'])


def title_of(job: dict[str, Any]) -> str:
    return job['name'] or f'job {job["number"]}'


def _span(sec: float) -> str:
    if sec < 100:
        return f'{sec:.0f} s'
    return f'{sec / 60:.0f} min' if sec < 6000 else f'{sec / 3600:.1f} h'


# Results of a job on this machine, each file whole or not at all.


def fetch_results(client: FleetClient, job: str, out: Path, say: Callable[[str], None]) -> None:
    """Download all files of a finished job.

    Raises:
        InputError: it has no results, or the folder holds something else than an earlier fetch of this job.
        IncompleteError: the storage does not answer, or a file arrives damaged; the same command resumes.
    """
    files = client.get(f'/jobs/{quoted(job)}/results')['files']
    others = sorted(
        path for path in out.rglob('*') if path.is_file() and not path.name.startswith('.') and path.relative_to(out).as_posix() not in files
    )
    if others:
        raise InputError(
            f'{out}: holds {counted(len(others), "file")} of something else, such as {others[0].name}; name an empty folder or a new one'
        )
    for number, name in enumerate(sorted(files), 1):
        path = out / name
        if not path.resolve().is_relative_to(out.resolve()):
            raise InputError(f'{name[:80]}: the name leads out of {out}')
        if path.exists():
            if sha256_of(path) != files[name]['sha256']:
                raise InputError(f'{path}: another file is there; name another folder')
            continue
        _download(client, job, name, path)
        say(f'{name}: {files[name]["bytes"]:,} bytes, {number} of {counted(len(files), "file")}')


def _download(client: FleetClient, job: str, name: str, path: Path) -> None:
    """Fetch a file beside its place, under a hidden name by which an interrupted fetch resumes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    reason = ''
    for pause in (*PAUSES_SEC, None):
        content: dict[str, Any] = client.get(f'/jobs/{quoted(job)}/results')['files'][name]  # signed again: a URL lives for a quarter of an hour
        arrived = path.with_name(f'.{path.name}')
        try:
            download(content['url'], arrived, Content(content['sha256'], content['bytes']), lambda: False)
            arrived.replace(path)
            return
        except (BackendUnavailable, WrongContent) as error:
            reason = str(error)
        if pause is not None:
            sleep(pause)
    raise IncompleteError(f'{name}: {reason}; run the same command again')
