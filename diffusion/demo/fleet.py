"""Twelve adapters by machines of which one is killed, with every command that an operator types: `make fleet-demo`.

    python -m diffusion.demo.fleet [--out runs/fleet-demo] [--base runs/shapes/export] [--jobs 12] [--machines 4] [--steps 60]

A service, PostgreSQL and an S3 server on this machine; workers that really train. In the middle one of them is killed, and one job has photos that no
machine can read, which two of them have to say. Ends with an adapter's images and the bill. The base is the model of `make demo` where that was made,
else a random one.
"""

import json
import logging
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, PositiveInt

from diffusion.common import belongings
from diffusion.common.command_line import Arguments, option
from diffusion.common.files import write_text
from diffusion.common.processes import end_with_parent, signals_as_exceptions
from diffusion.common.text import counted
from diffusion.contracts.errors import FINISHED, INCOMPLETE, InputError, run_command
from diffusion.demo.lora import named, write_photos
from diffusion.demo.postgres import LocalPostgres
from diffusion.demo.stages import PYTHON, REPOSITORY, stage
from fleet.client.http import SERVER_VARIABLE, FleetClient

COLOURS = {
    'orange': (240, 140, 30), 'pink': (250, 150, 190), 'brown': (120, 70, 30), 'purple': (110, 40, 150), 'teal': (0, 120, 120),
    'grey': (128, 128, 128), 'lime': (170, 240, 60), 'navy': (20, 30, 100), 'maroon': (120, 20, 40), 'olive': (120, 120, 30),
    'peach': (250, 190, 150), 'sky': (130, 190, 250),
}  # fmt: skip
POISON, RECIPE, MARK = 'poison', 'shapes-adapter.yaml', '.fleet-demo'
PROMPTED = (('center', 'black'), ('right', 'blue'), ('top', 'yellow'))  # places and backgrounds together on no photo
PRICE_PER_HOUR, SIDE_PX, LONGEST_SEC, ENDING_SEC = 0.10, 32, 1800.0, 20.0
TIMES = ['--lease-sec', 15, '--renew-sec', 3, '--poll-sec', 1, '--grace-sec', 5]  # for jobs of a minute; real machines take the defaults
COMMAND, LOOPBACK, BUCKET = 'python -m fleet', '127.0.0.1', 'fleet'
SECRET = re.compile(r'(shown once: )(\S+)')


def prepare_jobs(out: Path, base: Path, num_jobs: int, num_steps: int) -> None:
    """Photos, the operator's recipe, the jobs."""
    if out.exists() and any(out.iterdir()) and not (out / MARK).exists():
        raise InputError(f'{out}: holds something else than this demo; name another folder with --out')
    shutil.rmtree(out, ignore_errors=True)
    for name in ('recipes', 'photos', 'logs'):
        (out / name).mkdir(parents=True)
    (out / 'tokens').mkdir(mode=0o700)
    (out / MARK).touch()
    is_trained = (base / 'model_index.json').exists()
    if is_trained:
        (out / 'base').symlink_to(base.resolve())
    else:
        print(f'\n{base} is not there: the adapters are those of a random model, and their images mean nothing. `make demo` makes a real one.')
        stage('A random base model', [*PYTHON, 'diffusion.stand_in', out / 'base', '--like', 'shapes', '--pipeline'])
    every = max(num_steps // 4, 1)
    recipe = {  # yamls/shapes-lora.yaml, shorter: an operator's own recipe, which owners name in their jobs
        'base': str(REPOSITORY / 'yamls/shapes-lora.yaml'),
        'name': 'shapes-adapter',
        # The random base is one of epsilon, as it says itself.
        'model': {} if is_trained else {'diffusion': {'prediction': 'epsilon', 'schedule': {'zero_terminal_snr': False}}},
        'data': {'streams': {'subject': {'photos': {'folder': 'photos', 'caption': None}}}},  # without the images of its class
        'batch': {'global_size': 6, 'micro_size': 6},
        'ema': {'half_life': f'{max(num_steps // 6, 1)}ba', 'start': f'{num_steps // 6}ba'},
        'train': {'duration': f'{num_steps}ba', 'cpu_threads': 1},
        'checkpoint': {'every': f'{every}ba'},
        'log': {'every': min(5, every)},
    }
    write_text(out / 'recipes' / RECIPE, yaml.safe_dump(recipe, sort_keys=False))
    colours = dict(list(COLOURS.items())[:num_jobs])
    for name, rgb in {**colours, POISON: COLOURS['grey']}.items():
        write_photos(out / 'photos' / name, SIDE_PX, name, rgb)
    for path in (out / 'photos' / POISON).glob('*.png'):
        path.write_bytes(b'not a photo')
    with tarfile.open(out / 'photos' / f'{POISON}.tar', 'w') as tar:  # submit would look at the photos of a folder
        tar.add(out / 'photos' / POISON, arcname=POISON)
    jobs = [
        {
            'name': name,
            'recipe': RECIPE,
            'inputs': {'base': 'base', 'subject': f'photos/{name}{".tar" if name == POISON else ""}'},
            'overrides': {'seed': seed},
            'limits': {'dollars': 0.10},
            'validation': {'prompts': [named(*scene) for scene in PROMPTED], 'steps': 10},
        }
        for seed, name in enumerate([POISON, *colours])
    ]
    write_text(out / 'jobs.jsonl', ''.join(json.dumps(job) + '\n' for job in jobs))


def run_demo(out: Path, base: Path, num_jobs: int, num_machines: int, num_steps: int) -> bool:
    """Run the whole demo; True if everything went as it should."""
    start = time.monotonic()
    prepare_jobs(out, base, num_jobs, num_steps)
    tokens, machines = out / 'tokens', dict[str, subprocess.Popen[bytes]]()
    operator, owner = ['--token-file', tokens / 'operator'], ['--token-file', tokens / 'studio']

    def start_machine() -> str:
        name = f'machine-{len(list((out / "logs").glob("machine-*"))) + 1}'
        words = ['worker', '--token-file', tokens / 'pool', '--machine', name, '--work', out / 'machines' / name, '--recipes', out / 'recipes']
        words += ['--server', os.environ[SERVER_VARIABLE], '--gpu', 'cpu', '--gpu-gb', 0]
        machines[name] = _start(words, out / 'logs' / f'{name}.log', {'OMP_NUM_THREADS': '1'})
        return name

    with signals_as_exceptions(), ExitStack() as stack:
        stack.callback(belongings.remove_dead)
        print('\n== Storage and database on this machine (for real ones: an S3 bucket and a PostgreSQL)', flush=True)
        storage = stack.enter_context(s3_server())
        postgres = LocalPostgres()
        stack.callback(postgres.stop)
        write_text(tokens / 'database-url', postgres.url)
        print(f'   S3 at {storage["S3_ENDPOINT_URL"]}, PostgreSQL at {postgres.socket}')
        database = ['--database-file', tokens / 'database-url']
        operate('A fleet and its operator', 'init', *database, token=tokens / 'operator')
        words = ['server', '--bucket', f's3://{BUCKET}', '--port', 0, '--recipes', out / 'recipes', *database, *TIMES]
        print(f'\n== The service\n   $ {_typed(words)}', flush=True)
        service = _start(words, out / 'logs/service.log', storage)
        stack.callback(_end, [service])
        log = out / 'logs/service.log'
        listening = wait_for(lambda: re.search(r'listens at (\S+)', log.read_text()) or service.poll() is not None, 60)
        if not isinstance(listening, re.Match):
            raise InputError(f'the service does not start: {log.read_text()[-800:]}')
        server = os.environ[SERVER_VARIABLE] = listening[1]
        print(f'   $ export {SERVER_VARIABLE}={server}')
        client = FleetClient(server, (tokens / 'operator').read_text())

        def jobs() -> list[dict[str, Any]]:
            return client.get('/jobs')['jobs']

        operate('An owner of jobs', 'owners', 'studio', '--create', '--budget-dollars', 1, *operator, token=tokens / 'studio')
        operate('A pool of machines', 'pools', 'spot', '--create', '--price-per-hour', PRICE_PER_HOUR, *operator, token=tokens / 'pool')
        operate('Jobs', 'submit', out / 'jobs.jsonl', *owner)
        print(f'\n== Machines: on each of {num_machines}\n   $ {_typed(["worker", "--token-file", tokens / "pool", "--work", "DIR"])}', flush=True)
        stack.callback(lambda: _end(machines.values()))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a second Ctrl-C would leave processes and folders behind
            stack.callback(signal.signal, number, signal.SIG_IGN)
        for _ in range(num_machines):
            start_machine()
        victim = wait_for(lambda: in_training(jobs()))
        machines[victim['node']].kill()  # as a power cut
        print(f'   {victim["node"]} is killed (kill -9) while it trains {victim["name"]}, whose last checkpoint is of step {victim["step"]}')
        print(f'   {start_machine()} takes its place', flush=True)
        while any(job['state'] in ('queued', 'leased') for job in jobs()):  # jobs that draw come when others are trained
            operate('Progress', 'watch', '--every-sec', 3, *operator, codes=(FINISHED, INCOMPLETE))
        operate('What one of them draws', 'fetch', f'{next(iter(COLOURS))}-images', out / 'images', *owner)
        operate('The machines', 'nodes', '--all', *operator)
        operate('The bill', 'bill', '--jobs', 100, *operator)
        line, as_expected = summary(client, jobs())
    print(f'\n{line}\nDone in {(time.monotonic() - start) / 60:.1f} minutes. The images: {(out / "images").resolve()}')
    if not as_expected:
        print(f'That is not what was to happen; {out / "logs"} says why', file=sys.stderr)
    return as_expected


def in_training(jobs: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return a job that has trained some of its steps, if there is one; raise InputError once none can come."""
    if not any(job['state'] in ('queued', 'leased') for job in jobs):
        raise InputError(f'all jobs ended before a machine could be killed under one: {jobs[-1]["cause"]}; the folder logs says more')
    return next((job for job in jobs if job['state'] == 'leased' and 0 < job['step'] < job['num_steps']), None)


def summary(client: FleetClient, jobs: Sequence[dict[str, Any]]) -> tuple[str, bool]:
    """The last line, and whether everything went as it should."""
    training = [job for job in jobs if job['kind'] == 'train' and job['name'] != POISON]
    num_done = sum(job['state'] == 'done' for job in training)
    num_drawn = sum(job['kind'] == 'sample' and job['state'] == 'done' for job in jobs)
    poisoned = next(client.get(f'/jobs/{job["id"]}') for job in jobs if job['name'] == POISON)
    attempts = counted(len(poisoned['attempts']), 'attempt')
    dollars = client.get('/bill')['total']['dollars']
    line = f'{num_done} of {len(training)} done, 1 machine killed, the poison job {poisoned["state"]} after {attempts}, ${dollars:.3f}'
    as_expected = num_done == num_drawn == len(training) and poisoned['state'] == 'failed' and len(poisoned['attempts']) >= 2
    return f'{line}\n{POISON}: {poisoned["cause"]}', as_expected


def operate(title: str, *words: object, token: Path | None = None, codes: Sequence[int] = (FINISHED,)) -> None:
    """Type a command of `python -m fleet`.

    Args:
        token: gets the token that the command shows once, which is not printed.

    Raises:
        InputError: it ended with another code than these.
    """
    print(f'\n== {title}\n   $ {_typed(words)}', flush=True)
    shown = subprocess.PIPE if token else None
    try:
        ended = subprocess.run(_fleet(words), stdin=subprocess.DEVNULL, stdout=shown, text=True, timeout=LONGEST_SEC, check=False)
    except subprocess.TimeoutExpired as error:
        raise InputError(f'{COMMAND} {words[0]} has not ended after {LONGEST_SEC / 60:.0f} minutes; the folder logs says why') from error
    if ended.returncode not in codes:
        raise InputError(f'{COMMAND} {words[0]} ended with code {ended.returncode}')
    if token:
        token.touch(mode=0o600)
        token.write_text(SECRET.findall(ended.stdout)[0][1])
        print(SECRET.sub(r'\1...', ended.stdout).rstrip(), f'\n   (kept in {token})', flush=True)


def wait_for(condition: Callable[[], Any], limit_sec: float = LONGEST_SEC) -> Any:
    """Return what the condition says as soon as it is true."""
    end = time.monotonic() + limit_sec
    while not (found := condition()):
        if time.monotonic() > end:
            raise InputError(f'nothing has happened for {limit_sec / 60:.0f} minutes; the folder logs says what the machines do')
        time.sleep(0.5)
    return found


def _typed(words: Sequence[object]) -> str:
    return f'{COMMAND} {shlex.join(map(str, words))}'


def _fleet(words: Sequence[object]) -> list[str]:
    return [*PYTHON, 'fleet', *map(str, words)]


def _start(words: Sequence[object], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process that ends with this one, whatever ends that; Ctrl-C reaches this one alone."""
    ends_with_us = partial(end_with_parent, signal.SIGKILL)
    with log.open('wb') as file:
        return subprocess.Popen(
            _fleet(words), env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=file, stderr=file, process_group=0,
            preexec_fn=ends_with_us,  # noqa: PLW1509 - of the main thread
        )  # fmt: skip


def _end(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Ask them to leave, and wait for that."""
    processes = list(processes)
    for process in processes:
        process.terminate()
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_SEC)
        process.kill()
        process.wait()


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """An S3 server in threads of this process, with one bucket; yields the variables of its clients."""
    import boto3

    try:
        from moto.server import ThreadedMotoServer
    except ImportError as error:
        raise InputError("this needs an S3 server: uv pip install -e '.[dev]' brings moto") from error
    logging.getLogger('werkzeug').setLevel(logging.ERROR)  # it prints a line a request otherwise
    moto = ThreadedMotoServer(ip_address=LOOPBACK, port=0, verbose=False)
    moto.start()
    address, key = f'http://{LOOPBACK}:{moto.get_host_and_port()[1]}', secrets.token_hex(20)
    s3 = boto3.client('s3', endpoint_url=address, aws_access_key_id='demo', aws_secret_access_key=key, region_name='us-east-1')
    s3.create_bucket(Bucket=BUCKET)
    try:
        yield {'S3_ENDPOINT_URL': address, 'AWS_ACCESS_KEY_ID': 'demo', 'AWS_SECRET_ACCESS_KEY': key, 'AWS_DEFAULT_REGION': 'us-east-1'}
    finally:
        moto.stop()


class FleetDemoRequest(Arguments):
    """Size of the demo, and where it works."""

    out: Path = option(Path('runs/fleet-demo'), 'made from scratch', 'FOLDER')
    base: Path = option(Path('runs/shapes/export'), 'what the adapters are of', 'FOLDER')
    jobs: Annotated[int, Field(ge=1, le=len(COLOURS))] = option(len(COLOURS), f'adapters (default and at most {len(COLOURS)})')
    machines: PositiveInt = option(4, 'that work')
    steps: PositiveInt = option(60, 'of each adapter')


def main() -> int:
    args = FleetDemoRequest.parse('diffusion.demo.fleet', __doc__)
    os.chdir(REPOSITORY)  # where train.py and yamls/ are

    def work() -> int:
        try:
            return 0 if run_demo(args.out, args.base, args.jobs, args.machines, args.steps) else 1
        except KeyboardInterrupt:
            print('\nstopped; all processes of the demo have ended', file=sys.stderr)
            return 130

    return run_command(work, out=args.out)


if __name__ == '__main__':
    raise SystemExit(main())
