"""Submit jobs: all that a file names, each once, however often the command is run.

    python -m diffusion.fleet submit JOBS.jsonl|JOB.yaml ... [--wait] [--key TEXT] [--grid KEY=A,B,C KEY=D,E]
    python -m diffusion.fleet submit JOBS.jsonl|JOB.yaml ... --check [--recipes FOLDER]
    python -m diffusion.fleet submit --keys

A .yaml file holds one job, a .jsonl file one a line. An input may be a folder of photos or an archive on this machine, by its path (from the
folder of the file): `inputs: {subject: photos/timber}`. A folder is packed, without hidden files, and uploaded once, by its digest.

--grid makes of each job one for every combination of these values of its overrides, as a group; a page of the service compares a group's jobs.

Prints the id of each job, in order. The same jobs again are the same jobs: --key TEXT makes them others. Exit code 2 if one is refused (with all
mistakes); with --wait 3 if one has failed.
"""

from collections.abc import Sequence
from pathlib import Path

from diffusion.common.arguments import CommandParser, positive_float
from diffusion.common.text import print_message, print_page
from diffusion.contracts.errors import run_command


def main(arguments: Sequence[str]) -> int:
    from diffusion.fleet.client.http import add_server

    parser = CommandParser('diffusion.fleet submit', __doc__)
    parser.add_argument('files', nargs='*', type=Path, metavar='FILE')
    parser.add_argument('--keys', action='store_true', help='print the keys of a job with their meanings')
    parser.add_argument('--check', action='store_true', help='report every mistake, by the recipes of this machine; ask no service')
    parser.add_argument('--recipes', type=Path, metavar='FOLDER', help='for --check (default: yamls of this installation)')
    parser.add_argument('--key', default='', metavar='TEXT', help='submit jobs that were submitted before once more, under another key')
    parser.add_argument(
        '--grid', nargs='+', default=[], metavar='KEY=A,B', help='values of overrides, such as optimizer.lr=1e-4,5e-5 adapter.rank=4,16'
    )
    parser.add_argument('--wait', action='store_true', help='until all have ended')
    parser.add_argument('--every-sec', type=positive_float, default=10, help='between two looks of --wait (default %(default)s)')
    add_server(parser)
    args = parser.parse_args(arguments)
    if not args.keys and not args.files:
        parser.error('name files with jobs; --keys prints what is in them')

    def work() -> int:
        from tempfile import TemporaryDirectory

        from diffusion.common.processes import signals_as_exceptions
        from diffusion.common.text import counted
        from diffusion.fleet.client.following import follow
        from diffusion.fleet.client.http import connect
        from diffusion.fleet.client.submission import check_drafts, combined, completed, input_errors, read_drafts, submit_jobs, upload_folders
        from diffusion.fleet.jobs.checking import RECIPES

        if args.keys:
            print_page('\n'.join(keys_text()))
            return 0
        drafts, errors = read_drafts(args.files)
        drafts = combined(drafts, args.grid)
        if args.check:
            check_drafts(drafts, args.recipes or RECIPES, [*errors, *input_errors(drafts)])
            print(f'{counted(len(drafts), "job")}, and no mistake in them')
            return 0
        client = connect(args)
        if errors := [*errors, *input_errors(drafts)]:
            check_drafts(drafts, args.recipes or RECIPES, errors)
        with signals_as_exceptions(), TemporaryDirectory(prefix='fleet-') as scratch:
            inputs = upload_folders(client, drafts, Path(scratch), print_message)
        jobs = [completed(draft, {name: inputs[path] for name, path in draft.folders.items()}) for draft in drafts]
        ids = submit_jobs(client, jobs, args.key, print_message)
        print_page('\n'.join(ids))
        for group in sorted({job['group'] for job in jobs if job.get('group')}) if args.grid else []:
            print_message(f'compare them at {client.server}/groups/{group}/page')
        return follow(client, ids, args.every_sec, print_message) if args.wait else 0

    return run_command(work)


def keys_text() -> list[str]:
    """One line a key of a job: `key: default  # meaning`."""
    from dataclasses import fields, is_dataclass

    from diffusion.fleet.jobs.spec import JobInput, JobSpec
    from diffusion.recipe.keys import MISSING, default_of, meanings

    column = 34

    def described(section: type, indent: int) -> list[str]:
        lines = []
        texts = meanings(section)
        for item in fields(section):
            pad, name = '  ' * indent, item.name
            default = default_of(item)
            if is_dataclass(default):
                lines += [f'{pad}{name}:', *described(type(default), indent + 1)]
                continue
            shown = (
                '...' if default == MISSING else 'null' if default is None else str(default).lower() if isinstance(default, bool) else str(default)
            )
            lines.append(f'{f"{pad}{name}: {shown}":<{column}}  # {texts[name]}')
            if (section, name) == (JobSpec, 'inputs'):
                lines += [
                    f'{f"{pad}  NAME: path":<{column}}  # From the folder of the job file: submit uploads it, run takes it; or:',
                    f'{pad}  NAME:',
                ]
                lines += described(JobInput, indent + 2)
        return lines

    return described(JobSpec, 0)
