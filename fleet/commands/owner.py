"""Commands of owners of jobs: submit, status, watch, fetch, cancel, retry, bill."""

import json
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from diffusion.common.command_line import option, positional
from diffusion.common.text import counted, print_message, print_page
from diffusion.contracts.errors import InputError, run_command
from fleet.commands import Command

if TYPE_CHECKING:  # it imports requests
    from fleet.client.http import FleetClient


class Asking(Command):
    """A command that asks the service."""

    server: str | None = option(None, 'the service (default: the variable FLEET_SERVER)', 'URL')
    token_file: Path | None = option(None, 'that holds your token (default: the variable FLEET_TOKEN)', 'FILE')

    def client(self) -> 'FleetClient':
        """Raises InputError: server or token are not said."""
        from fleet.client.http import connect

        return connect(self.server, self.token_file)


class SubmitCommand(Asking):
    """Submit jobs: all that a file names, each once, however often the command is run.

        python -m fleet submit JOBS.jsonl|JOB.yaml ... [--wait] [--key TEXT] [--grid KEY=A,B,C KEY=D,E]
        python -m fleet submit JOBS.jsonl|JOB.yaml ... --check [--recipes FOLDER]
        python -m fleet submit --keys

    A .yaml file holds one job, a .jsonl file one a line. An input may be a folder of photos or an archive on this machine, by its path (from the
    folder of the file): `inputs: {subject: photos/timber}`. A folder is packed, without hidden files, and uploaded once, by its digest.

    --grid makes of each job one for every combination of these values of its overrides, as a group; a page of the service compares a group's jobs.

    Prints the id of each job, in order. The same jobs again are the same jobs: --key TEXT makes them others. Exit code 2 if one is refused (with all
    mistakes); with --wait 3 if one has failed.
    """

    files: list[Path] = positional('FILE', default=[])
    keys: bool = option(False, 'print the keys of a job with their meanings')
    check: bool = option(False, 'report every mistake, by the recipes of this machine; ask no service')
    recipes: Path | None = option(None, 'for --check (default: yamls of this installation)', 'FOLDER')
    key: str = option('', 'submit jobs that were submitted before once more, under another key', 'TEXT')
    grid: list[str] = option([], 'values of overrides, such as optimizer.lr=1e-4,5e-5 adapter.rank=4,16', 'KEY=A,B', several=True)
    wait: bool = option(False, 'until all have ended')
    every_sec: PositiveFloat = option(10.0, 'between two looks of --wait')

    def run(self) -> int | None:
        from diffusion.common.processes import signals_as_exceptions
        from fleet.client.following import follow
        from fleet.client.submission import check_drafts, combined, completed, input_errors, read_drafts, submit_jobs, upload_folders
        from fleet.client.tables import keys_text
        from fleet.jobs.checking import RECIPES

        if self.keys:
            print_page('\n'.join(keys_text()))
            return None
        if not self.files:
            raise InputError('name files with jobs; --keys prints what is in them')
        drafts, errors = read_drafts(self.files)
        drafts = combined(drafts, self.grid)
        if self.check:
            check_drafts(drafts, self.recipes or RECIPES, [*errors, *input_errors(drafts)])
            print(f'{counted(len(drafts), "job")}, and no mistake in them')
            return None
        client = self.client()
        if errors := [*errors, *input_errors(drafts)]:
            check_drafts(drafts, self.recipes or RECIPES, errors)
        with signals_as_exceptions(), TemporaryDirectory(prefix='fleet-') as scratch:
            inputs = upload_folders(client, drafts, Path(scratch), print_message)
        jobs = [completed(draft, {name: inputs[path] for name, path in draft.folders.items()}) for draft in drafts]
        ids = submit_jobs(client, jobs, self.key, print_message)
        print_page('\n'.join(ids))
        for group in sorted({job['group'] for job in jobs}) if self.grid else []:
            print_message(f'compare them at {client.server}/groups/{group}/page')
        return follow(client, ids, self.every_sec, print_message) if self.wait else None


class StatusCommand(Asking):
    """List jobs and how they do, or say everything about one, with its loss.

        python -m fleet status [--state queued|leased|done|failed|cancelled] [--limit N]
        python -m fleet status JOB

    JOB is an id, a number or a name. --json prints what the service says.
    """

    job: str | None = positional('JOB', default=None)
    state: Literal['queued', 'leased', 'done', 'failed', 'cancelled'] | None = option(None, 'only those')
    limit: PositiveInt = option(50, 'jobs that are printed, the latest', 'N')
    json_: bool = option(False, 'for programs')

    def run(self) -> None:
        from fleet.client.following import job_ids, listed
        from fleet.client.tables import job_lines, jobs_lines

        client = self.client()
        if self.job is not None:
            job = client.get(f'/jobs/{job_ids(client, [self.job])[0]}')
            print_page(json.dumps(job, indent=2) if self.json_ else '\n'.join(job_lines(job)))
            return
        jobs = list(listed(client, self.state))
        print_page('\n'.join(map(json.dumps, jobs[-self.limit :]) if self.json_ else jobs_lines(jobs, self.limit, self.state)))


class WatchCommand(Asking):
    """Watch jobs until all have ended.

        python -m fleet watch [JOB ...] [--every-sec 10]

    Without JOB (ids, numbers or names): all that wait or run now. Exit code 0 if all are done, 3 if some have failed or were cancelled.
    """

    jobs: list[str] = positional('JOB', default=[])
    every_sec: PositiveFloat = option(10.0, 'between two looks')

    def run(self) -> int:
        from fleet.client.following import follow, job_ids

        client = self.client()
        return follow(client, set(job_ids(client, self.jobs)) if self.jobs else None, self.every_sec, print_page)


class FetchCommand(Asking):
    """Download the results of a job; every file's digest is checked, and what is there already is left.

        python -m fleet fetch JOB OUT

    JOB is an id, a number or a name. OUT is a folder, made if it is missing.
    """

    job: str = positional('JOB')
    out: Path = positional('OUT')

    def run(self) -> None:
        from fleet.client.following import fetch_results, job_ids

        client = self.client()
        fetch_results(client, job_ids(client, [self.job])[0], self.out, print_message)
        print(self.out)

    def end(self) -> int:
        return run_command(self.run, out=self.out)


class CancelCommand(Asking):
    """Cancel jobs. One on a machine is stopped with the machine's next sign of life; one that has ended stays unchanged.

        python -m fleet cancel JOB ...
        python -m fleet cancel --queued

    JOB is an id, a number or a name.
    """

    jobs: list[str] = positional('JOB', default=[])
    queued: bool = option(False, 'all that wait; an operator: of all owners')

    def run(self) -> None:
        from fleet.client.following import job_ids, listed
        from fleet.client.http import quoted

        if bool(self.jobs) == self.queued:
            raise InputError('name jobs, or say --queued')
        client = self.client()
        ids = [job['id'] for job in listed(client, 'queued')] if self.queued else job_ids(client, self.jobs)
        states = Counter(client.delete(f'/jobs/{quoted(job)}')['state'] for job in ids)
        others = [f'{counted(num, "job")} had ended: {state}' for state, num in states.items() if state != 'cancelled']
        print('; '.join([f'{counted(states["cancelled"], "job")} cancelled', *others]))


class RetryCommand(Asking):
    """Put jobs that have failed or were cancelled back into the queue; what they did until then counts against them no more.

        python -m fleet retry JOB ...
        python -m fleet retry --failed

    JOB is an id, a number or a name.
    """

    jobs: list[str] = positional('JOB', default=[])
    failed: bool = option(False, 'all that have failed')

    def run(self) -> None:
        from fleet.client.following import job_ids, listed
        from fleet.client.http import quoted

        if bool(self.jobs) == self.failed:
            raise InputError('name jobs, or say --failed')
        client = self.client()
        ids = [job['id'] for job in listed(client, 'failed')] if self.failed else job_ids(client, self.jobs)
        for job in ids:
            client.post(f'/jobs/{quoted(job)}/retry', may_repeat=False)
        print(f'{counted(len(ids), "job")} back in the queue')


class BillCommand(Asking):
    """Say what machines cost: in all, by owner, by pool and by job.

        python -m fleet bill [--since 2026-01-01] [--until 2026-02-01] [--jobs N] [--json]

    An owner sees its own jobs. An operator sees everything, and also the hours of machines that no attempt covers: attempts and idle time add up to
    what a provider bills from the start of each machine's worker to its last sign of life. `starts` is the part of attempts before their first step.
    """

    since: str | None = option(None, 'in ISO 8601, of UTC', 'TIME')
    until: str | None = option(None, 'likewise; not included', 'TIME')
    jobs: NonNegativeInt = option(20, 'that are listed, the dearest', 'N')
    json_: bool = option(False, 'for programs')

    def run(self) -> None:
        from fleet.client.tables import bill_lines

        answer = self.client().get('/bill', since=self.since, until=self.until, limit=self.jobs)
        print_page(json.dumps(answer, indent=2) if self.json_ else '\n'.join(bill_lines(answer)))
