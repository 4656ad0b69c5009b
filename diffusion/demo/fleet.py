"""Twelve adapters by machines that fail, with every command that an operator types: `make fleet-demo`.

    python -m diffusion.demo.fleet [--out runs/fleet-demo] [--base runs/shapes/export] [--jobs 12] [--machines 4] [--steps 60]

A service, PostgreSQL and an S3 server on this machine; workers that really train. While they do, one is killed, one stands still for longer than its
lease, one has too little memory to train at all, and one job has photos that no machine can read. Ends with a page: what happened, each adapter's
images, the bill, and the status page of the service. The base is the model of `make demo` where that was made, else a random one.
"""

import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import requests
import yaml
from PIL import Image

from data_prep.shapes import draw
from diffusion.common.arguments import CommandParser, positive_int
from diffusion.common.files import write_text
from diffusion.common.images import grid
from diffusion.common.pages import data_uri, write_page
from diffusion.common.text import counted
from diffusion.contracts.errors import FINISHED, INCOMPLETE, InputError, run_command
from diffusion.contracts.scenes import PALETTE, Scene
from diffusion.demo.__main__ import REPOSITORY
from diffusion.demo.local_fleet import COMMAND, LEASE_SEC, LocalFleet
from diffusion.demo.lora import PHOTOS, named
from diffusion.demo.stages import stage

COLOURS = {
    'orange': (240, 140, 30), 'pink': (250, 150, 190), 'brown': (120, 70, 30), 'purple': (110, 40, 150), 'teal': (0, 120, 120),
    'grey': (128, 128, 128), 'lime': (170, 240, 60), 'navy': (20, 30, 100), 'maroon': (120, 20, 40), 'olive': (120, 120, 30),
    'peach': (250, 190, 150), 'sky': (130, 190, 250),
}  # fmt: skip
POISON = 'poison'
RECIPE = 'shapes-adapter.yaml'
PROMPTED = (('center', 'black'), ('right', 'blue'), ('top', 'yellow'))  # places and backgrounds together on no photo
PRICE_PER_HOUR = 0.10
TOO_LITTLE = 'ulimit -v 1500000'  # KiB of address space: enough for a worker, and PyTorch does not load in it
SIDE_PX, SCALE = 32, 3
MARK = '.fleet-demo'
LONGEST_SEC = 1800.0


@dataclasses.dataclass
class Story:
    """What happened, for the page.

    Attributes:
        events: seconds since the first machine, and a sentence.
    """

    began: float = dataclasses.field(default_factory=time.monotonic)
    events: list[tuple[float, str]] = dataclasses.field(default_factory=list)
    killed: str = ''
    frozen: str = ''
    broken: str = ''

    def tell(self, text: str) -> None:
        seconds = time.monotonic() - self.began
        self.events.append((seconds, text))
        print(f'{int(seconds) // 60}:{int(seconds) % 60:02d}  {text}', flush=True)


def prepare(out: Path, base: Path, num_jobs: int, num_steps: int) -> bool:
    """Photos, a recipe, jobs; returns whether the base has been trained."""
    if out.exists() and any(out.iterdir()) and not (out / MARK).exists():
        raise InputError(f'{out}: holds something else than this demo; name another folder with --out')
    shutil.rmtree(out, ignore_errors=True)
    (out / 'recipes').mkdir(parents=True)
    (out / MARK).touch()
    is_trained = (base / 'model_index.json').exists()
    if is_trained:
        (out / 'base').symlink_to(base.resolve())
    else:
        print(f'\n{base} is not there: the adapters are those of a random model, and their images mean nothing. `make demo` makes a real one.')
        stage('A random base model', [sys.executable, '-m', 'diffusion.stand_in', out / 'base', '--like', 'shapes', '--pipeline'])
    write_text(out / 'recipes' / RECIPE, yaml.safe_dump(recipe_of(num_steps, is_trained), sort_keys=False))
    for name, colour in list(COLOURS.items())[:num_jobs]:
        write_photos(out / 'photos' / name, name, colour)
    write_photos(out / 'photos' / POISON, 'grey', COLOURS['grey'])
    for path in (out / 'photos' / POISON).glob('*.png'):
        path.write_bytes(b'not a photo')
    with tarfile.open(out / 'photos' / f'{POISON}.tar', 'w') as tar:  # submit would look at the photos of a folder
        tar.add(out / 'photos' / POISON, arcname=POISON)
    jobs = [job_of(name, seed) for seed, name in enumerate([*list(COLOURS)[:2], POISON, *list(COLOURS)[2:num_jobs]], start=1)]
    write_text(out / 'jobs.jsonl', ''.join(json.dumps(job) + '\n' for job in jobs))
    return is_trained


def recipe_of(num_steps: int, is_trained: bool) -> dict[str, Any]:
    """yamls/shapes-lora.yaml, shorter: an operator's own recipe, which owners name in their jobs."""
    every = max(num_steps // 4, 1)
    return {
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


def job_of(name: str, seed: int) -> dict[str, Any]:
    prompts = [f'a large sks at the {place} on a {background} background' for place, background in PROMPTED]
    return {
        'name': name,
        'recipe': RECIPE,
        'inputs': {'base': 'base', 'subject': f'photos/{name}{".tar" if name == POISON else ""}'},
        'overrides': {'seed': seed},
        'limits': {'dollars': 0.10},
        'validation': {'prompts': prompts, 'steps': 10},
    }


def write_photos(folder: Path, name: str, colour: tuple[int, int, int]) -> None:
    folder.mkdir(parents=True)
    for number, (place, background) in enumerate(PHOTOS):
        scene = Scene('large', name, 'circle', place, background)
        draw(scene, SIDE_PX, random.Random(number), {**PALETTE, name: colour}).save(folder / f'{number}.png')
        (folder / f'{number}.txt').write_text(named(scene))


def train(fleet: LocalFleet, num_machines: int) -> Story:
    """Start machines, and let happen to them what happens to machines, until every job has ended."""
    worker = ['worker', '--server', '$FLEET_SERVER', '--token-file', fleet.tokens / 'pool', '--work', 'DIR']
    print(f'\n== Machines: on each of {num_machines}\n   $ {COMMAND} {" ".join(map(str, worker))}')
    for _ in range(num_machines):
        fleet.start_machine()
    story = Story()
    story.tell(f'{counted(num_machines, "machine")} start')
    watch = fleet.watch()
    accidents: list[Accident] = [Breakdown(), Kill(), Freeze(), Quarantine(), Poison()]
    while True:
        jobs = fleet.client.get('/jobs')['jobs']
        for accident in accidents[:]:
            if accident.happen(fleet, jobs, story):
                accidents.remove(accident)
        if watch.poll() is not None:
            if watch.returncode not in (FINISHED, INCOMPLETE):
                raise InputError(f'`watch` ended with code {watch.returncode}')
            if not any(job['state'] in ('queued', 'leased') for job in fleet.client.get('/jobs')['jobs']):
                return story
            watch = fleet.watch()  # those that draw were not there yet
        if time.monotonic() - story.began > LONGEST_SEC:
            raise InputError(f'the jobs have not ended after {LONGEST_SEC / 60:.0f} minutes; {fleet.folder / "logs"} says what the machines do')
        with suppress(subprocess.TimeoutExpired):
            watch.wait(0.5)


class Accident(Protocol):
    """Something that happens once."""

    def happen(self, fleet: LocalFleet, jobs: Sequence[dict[str, Any]], story: Story) -> bool:
        """Do it, or see it, if it is time; returns whether it is over. Called twice a second."""


class Breakdown:
    """A machine that cannot train comes when all others have a job, so that the poison job is not its."""

    def happen(self, fleet: LocalFleet, jobs: Sequence[dict[str, Any]], story: Story) -> bool:
        if not any(job['name'] == POISON and job['epoch'] for job in jobs):
            return False
        story.broken = fleet.start_machine(TOO_LITTLE)
        story.tell(f'{story.broken} comes, with too little memory to train ({TOO_LITTLE})')
        return True


class Kill:
    """kill -9 of a worker that has handed over a checkpoint; another machine takes its place."""

    def happen(self, fleet: LocalFleet, jobs: Sequence[dict[str, Any]], story: Story) -> bool:
        victim = _training(fleet, jobs, story)
        if victim is None:
            return False
        story.killed = victim['node']
        fleet.kill(story.killed)
        story.tell(f'{story.killed} is killed (kill -9) while it trains {victim["name"]}, whose last checkpoint is of step {victim["step"]}')
        story.tell(f'{fleet.start_machine()} takes its place')
        return True


class Freeze:
    """SIGSTOP of a worker until its job is not its any more, then SIGCONT."""

    def __init__(self) -> None:
        self.job: dict[str, Any] | None = None

    def happen(self, fleet: LocalFleet, jobs: Sequence[dict[str, Any]], story: Story) -> bool:
        if self.job is None:
            self.job = _training(fleet, jobs, story) if story.killed else None
            if self.job is not None:
                story.frozen = self.job['node']
                self.frozen_at = time.monotonic()
                fleet.freeze(story.frozen)
                story.tell(f'{story.frozen} stands still (SIGSTOP) while it trains {self.job["name"]}; its lease ends in {LEASE_SEC} s at the latest')
            return False
        now = next(job for job in jobs if job['id'] == self.job['id'])
        is_lost = (now['node'], now['epoch']) != (story.frozen, self.job['epoch'])
        if not is_lost and time.monotonic() < self.frozen_at + 2.5 * LEASE_SEC:
            return False
        fleet.thaw(story.frozen)
        dropped = f': {self.job["name"]} is not its any more, so it drops it and asks for another' if is_lost else ''
        story.tell(f'{story.frozen} wakes up (SIGCONT){dropped}')
        return True


class Quarantine:
    """The service takes the broken machine out by itself."""

    def happen(self, fleet: LocalFleet, jobs: Sequence[dict[str, Any]], story: Story) -> bool:
        if not any(node['state'] == 'quarantined' for node in fleet.client.get('/nodes')['nodes']):
            return False
        story.tell(f'{story.broken} is quarantined: three jobs in a row have failed on it, which counts against none of them')
        return True


class Poison:
    """The job that no machine can do ends at once."""

    def happen(self, fleet: LocalFleet, jobs: Sequence[dict[str, Any]], story: Story) -> bool:
        if not any(job['name'] == POISON and job['state'] == 'failed' for job in jobs):
            return False
        story.tell(f'{POISON} ends as failed: its photos cannot be decoded, on whichever machine')
        return True


def _training(fleet: LocalFleet, jobs: Sequence[dict[str, Any]], story: Story) -> dict[str, Any] | None:
    """A job in the middle of its training, on a machine that nothing has happened to."""
    spared = {story.killed, story.frozen, story.broken}
    return next(
        (
            job
            for job in jobs
            if job['kind'] == 'train' and job['state'] == 'leased' and 0 < job['step'] < job['num_steps'] and job['node'] not in spared
        ),
        None,
    )


@dataclasses.dataclass(frozen=True)
class DemoAdapter:
    """One job's result, for the page.

    Attributes:
        tile: the first photo and the images, together.
        how: on which machines.
    """

    name: str
    tile: Image.Image
    how: str


def adapters_of(fleet: LocalFleet, jobs: Sequence[dict[str, Any]], out: Path) -> list[DemoAdapter]:
    """Download every job's images and put them together."""
    found = []
    names = [job['name'] for job in jobs if job['kind'] == 'train' and job['state'] == 'done']
    print(f'\n== The images\n   $ for job in {" ".join(names)}; do {COMMAND} fetch $job-images {out}/images/$job; done', flush=True)
    from diffusion.fleet.client.downloads import fetch_results

    drawn = {job['parent']: job for job in jobs if job['parent'] and job['state'] == 'done'}
    for job in jobs:
        if job['kind'] != 'train' or job['id'] not in drawn:
            continue
        folder = out / 'images' / job['name']
        fetch_results(fleet.client, drawn[job['id']]['id'], folder, lambda _: None)
        images = [
            Image.open(path, formats=('PNG',)).convert('RGB') for path in [out / 'photos' / job['name'] / '0.png', *sorted(folder.glob('[0-9]*.png'))]
        ]
        tile = grid(images, 2)
        attempts = fleet.client.get(f'/jobs/{job["id"]}')['attempts']
        found.append(DemoAdapter(job['name'], tile.resize((tile.width * SCALE, tile.height * SCALE), Image.Resampling.NEAREST), _how(attempts)))
    return found


def _how(attempts: Sequence[dict[str, Any]]) -> str:
    parts = []
    for attempt in attempts:
        ending = {'done': '', 'lost': ', lost'}.get(attempt['ending'], f', {attempt["ending"]}')
        begin = f' from step {attempt["first_step"]}' if attempt['first_step'] else ''
        parts.append(f'{attempt["node"]}{begin}{ending}')
    return '; '.join(parts)


def summary(jobs: Sequence[dict[str, Any]], poisoned: dict[str, Any], quarantined: int, story: Story, dollars: float) -> tuple[str, bool]:
    """The last line, and whether everything went as it should."""
    training = [job for job in jobs if job['kind'] == 'train' and job['name'] != POISON]
    drawing = [job for job in jobs if job['kind'] == 'sample']
    done = sum(job['state'] == 'done' for job in training)
    attempts = len(poisoned['attempts'])
    parts = [
        f'{done} of {len(training)} done',
        f'{int(bool(story.killed))} machine killed',
        f'{int(bool(story.frozen))} stopped beyond its lease',
        f'{quarantined} quarantined',
        f'1 poison job ended after {"one attempt" if attempts == 1 else counted(attempts, "attempt")}',
        f'${dollars:.3f}',
    ]
    as_expected = done == len(training) == sum(job['state'] == 'done' for job in drawing) and bool(story.killed and story.frozen)
    return ', '.join(parts), as_expected and quarantined == 1 and attempts == 1 and poisoned['state'] == 'failed'


def run_demo(out: Path, base: Path, num_jobs: int, num_machines: int, num_steps: int) -> bool:
    """All of it; returns whether everything went as it should."""
    start = time.monotonic()
    is_trained = prepare(out, base, num_jobs, num_steps)
    with LocalFleet(out, out / 'recipes', {'OMP_NUM_THREADS': '1'}) as fleet:
        operator = fleet.as_user('operator')
        fleet.ask('An owner of jobs', 'owners', 'studio', '--create', '--budget-dollars', '1', *operator, token='studio')  # noqa: S106
        fleet.ask('A pool of machines', 'pools', 'spot', '--create', '--price-per-hour', PRICE_PER_HOUR, *operator, token='pool')  # noqa: S106
        fleet.ask('Jobs', 'submit', out / 'jobs.jsonl', *fleet.as_user('studio'))
        story = train(fleet, num_machines)
        fleet.stop_machines()
        jobs = fleet.client.get('/jobs')['jobs']
        adapters = adapters_of(fleet, jobs, out)
        fleet.ask('The machines', 'nodes', '--all', *operator)
        write_text(out / 'bill.txt', fleet.ask('The bill', 'bill', '--jobs', '100', *operator))
        bill = fleet.client.get('/bill')
        nodes = fleet.client.get('/nodes')['nodes']
        poisoned = next(fleet.client.get(f'/jobs/{job["id"]}') for job in jobs if job['name'] == POISON)
        status = requests.get(fleet.server, headers={'Authorization': f'Bearer {(fleet.tokens / "operator").read_text()}'}, timeout=30).text
        write_text(out / 'status.html', status)
    quarantined = [node for node in nodes if node['state'] == 'quarantined']
    line, as_expected = summary(jobs, poisoned, len(quarantined), story, bill['total']['dollars'])
    sheet = _write_page(out, line, is_trained, num_steps, story, adapters, bill, status, quarantined, poisoned)
    print(f'\n{line}\nDone in {(time.monotonic() - start) / 60:.1f} minutes. The adapters: {sheet.resolve()}\nOpen {(out / "fleet.html").resolve()}')
    if not as_expected:
        print(f'That is not what was to happen; {out / "logs"} says why', file=sys.stderr)
    return as_expected


def _write_page(
    out: Path, line: str, is_trained: bool, num_steps: int, story: Story, adapters: Sequence[DemoAdapter], bill: dict[str, Any], status: str,
    quarantined: Sequence[dict[str, Any]], poisoned: dict[str, Any],
) -> Path:  # fmt: skip
    sheet = out / 'adapters.png'
    if adapters:
        grid([adapter.tile for adapter in adapters], min(len(adapters), 6), gap_px=12).save(sheet)
    tiles = []
    for adapter in adapters:
        path = out / 'images' / adapter.name / 'tile.png'
        adapter.tile.save(path)
        tiles.append((adapter.name, data_uri(path.read_bytes()), adapter.how))
    write_page(
        out / 'fleet.html',
        'fleet_demo.html',
        title='A fleet of machines that fail',
        line=line,
        is_trained=is_trained,
        events=[(f'{int(seconds) // 60}:{int(seconds) % 60:02d}', text) for seconds, text in story.events],
        tiles=tiles,
        prompts=[f'a large sks at the {place} on a {background} background' for place, background in PROMPTED],
        bill=bill,
        num_steps=num_steps,
        quarantined=quarantined,
        poisoned=poisoned,
        status=status.replace('http-equiv="refresh"', 'name="refreshed"'),  # it is a copy
    )
    return sheet


def main() -> int:
    parser = CommandParser('diffusion.demo.fleet', __doc__)
    parser.add_argument('--out', type=Path, default=Path('runs/fleet-demo'), metavar='FOLDER', help='made from scratch (default %(default)s)')
    parser.add_argument(
        '--base', type=Path, default=Path('runs/shapes/export'), metavar='FOLDER', help='what the adapters are of (default %(default)s)'
    )
    parser.add_argument('--jobs', type=positive_int, default=len(COLOURS), help='adapters (default and at most %(default)s)')
    parser.add_argument('--machines', type=positive_int, default=4, help='that work (default %(default)s)')
    parser.add_argument('--steps', type=positive_int, default=60, help='of each adapter (default %(default)s)')
    args = parser.parse_args()
    if not 3 <= args.jobs <= len(COLOURS):
        parser.error(f'--jobs {args.jobs}: from 3, which a broken machine has to fail, to {len(COLOURS)}')
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
