"""Rows of a fleet that never ran, written past the service: made up, but such as a day leaves."""

import json
import random
from typing import Any

from fleet.service.gate import digest
from tests.fleet.fleet import DIGESTS

RECIPE = 'dreambooth-sdxl-lora.yaml'
STEPS = 1400
GPU = 'NVIDIA GeForce RTX 4090'
SPEC = {
    'recipe': RECIPE,
    'overrides': {'seed': 7},
    'inputs': {},
    'limits': {'attempts': 3, 'losses': 20, 'hours': 6.0, 'dollars': 1.0},
    'needs': {'gpu_gb': 24.0, 'image': None, 'trusted': False},
    'notify': {'webhook': None},
    'validation': {'prompts': []},
}
CAUSES = (
    '3 machines with other successes failed it: data.streams.subject: all 12 photos were refused; photo-3.jpg: cannot identify image file',
    'non_finite on two machines: the loss was NaN at step 211 and at step 208: look at optimizer.lr, which is 0.01',
    'recipe: batch.micro_size 32 does not fit a GPU of 24 GB',
)
ENDINGS = ('lost', 'lost', 'lost', 'stopped', 'released', 'crashed', 'node_fault')


def token_of(name: str) -> str:
    return f'token-of-{name}'


class MadeUp:
    """Writes rows with times in minutes before now."""

    def __init__(self, connection: Any, seed: int = 0):
        self.connection, self.random = connection, random.Random(seed)
        self.sessions: dict[str, int] = {}

    def one(self, query: str, *values: Any) -> Any:
        return next(iter(self.connection.execute(query, values).fetchone().values()))

    def owner(self, name: str, operator: bool = False, **columns: Any) -> str:
        """Returns its token."""
        self.connection.execute(
            'insert into owner (name, token_hash, is_operator, notice_key) values (%s, %s, %s, %s)',
            [name, digest(token_of(name)), operator, bytes(32)],
        )
        for column, value in columns.items():
            self.connection.execute(f'update owner set {column} = %s where name = %s', [value, name])
        return token_of(name)

    def pool(self, name: str = 'cloud', price: float = 0.324, trusted: bool = False) -> None:
        self.connection.execute(
            'insert into pool (name, token_hash, price_per_hour, trusted) values (%s, %s, %s, %s)', [name, digest(f'pool-{name}'), price, trusted]
        )

    def node(self, name: str, since: float = 600, last: float = 0, pool: str = 'cloud', state: str = 'live', reason: str = '', gpu: str = GPU) -> int:
        """A machine with one stay; returns the session."""
        self.connection.execute(
            """insert into node (name, pool, gpu, gpu_gb, state, reason, last_seen, recipes)
            values (%s, %s, %s, 24, %s, %s, now() - %s * interval '1 minute', %s) on conflict (name) do nothing""",
            [name, pool, gpu, state, reason, last, json.dumps(DIGESTS)],
        )
        self.sessions[name] = self.one(
            """insert into session (node, token_hash, price_per_hour, started, last_seen, ended)
            select %s, sha256(gen_random_uuid()::text::bytea), price_per_hour, now() - %s * interval '1 minute', now() - %s * interval '1 minute',
            case when %s in ('live', 'draining', 'quarantined') then null else now() - %s * interval '1 minute' end from pool where name = %s returning id""",
            name, since, last, state, last, pool,
        )  # fmt: skip
        return self.sessions[name]

    def job(self, owner: str, name: str | None = None, state: str = 'queued', age: float = 60, ended: float | None = None, cause: str = '', node: str | None = None,
            step: int = 0, epoch: int = 0, **spec: Any) -> str:  # fmt: skip
        return self.one(
            """insert into job (owner, name, recipe, spec, num_steps, gpu_gb, state, created, ended, cause, node, lease_until, step, epoch)
            values (%s, %s, %s, %s, %s, 24, %s, now() - %s * interval '1 minute', now() - %s::float8 * interval '1 minute', %s, %s,
            case when %s = 'leased' then now() + interval '2 minutes' end, %s, %s) returning id::text""",
            owner, name, RECIPE, json.dumps({**SPEC, **spec}), STEPS, state, age, ended, cause, node, state, step, epoch,
        )  # fmt: skip

    def attempt(self, job: str, epoch: int, node: str, started: float, last: float, steps: tuple[int, int], ending: str | None = None, pace: float | None = None,
                start_min: float | None = 3.0, message: str = '', code: int | None = None) -> None:  # fmt: skip
        self.connection.execute(
            """insert into attempt (job, epoch, node, session, gpu, recipe, price_per_hour, started, last_sign, progressed, first_step, last_step, steps_per_sec,
            ended, ending, message, exit_code)
            select %(job)s, %(epoch)s, %(node)s, s.id, n.gpu, %(recipe)s, s.price_per_hour, now() - %(started)s * interval '1 minute',
            now() - %(last)s * interval '1 minute', now() - (%(started)s - %(start)s::float8) * interval '1 minute', %(first_step)s, %(last_step)s, %(pace)s,
            case when %(ending)s::text is null then null else now() - %(last)s * interval '1 minute' end, %(ending)s, %(message)s, %(code)s
            from session s join node n on n.name = s.node where s.id = %(session)s""",
            {
                'job': job, 'epoch': epoch, 'node': node, 'recipe': RECIPE, 'started': started, 'last': last, 'start': start_min, 'first_step': steps[0],
                'last_step': steps[1], 'pace': pace, 'ending': ending, 'message': message, 'code': code, 'session': self.sessions[node],
            },
        )  # fmt: skip

    def populate(self, num_jobs: int, num_nodes: int, owners: tuple[str, ...] = ('anna', 'ben')) -> None:
        """A fleet in the middle of its work: two thirds done, 2 % failed, each machine at a job, the rest waiting."""
        nodes = [f'salad-{self.random.randrange(16**8):08x}' for _ in range(num_nodes)]
        for number, name in enumerate(nodes):
            self.node(name, since=self.random.uniform(600, 1500), last=self.random.uniform(0, 0.5), state='draining' if number == 7 else 'live',
                      reason='0.21 steps/s, the median of this recipe and GPU is 0.53' if number == 7 else '')  # fmt: skip
        if num_nodes > 2:
            self.node(
                'salad-bad00001',
                state='quarantined',
                reason='4 failures at 4 jobs without a success: CUDA error: uncorrectable ECC error encountered',
                last=1,
            )
        num_done = num_jobs * 2 // 3
        for number in range(num_jobs):
            owner, name = owners[number * number % len(owners)], f'{self.random.choice(("timber", "rex", "luna", "bella", "mug", "chair"))}-{number}'
            if number < num_done:
                self._ended(owner, name, nodes, number / max(1, num_done))
            elif number < num_done + len(nodes):
                self._running(owner, name, nodes[number - num_done])
            else:
                self.job(owner, name, age=1400)

    def _ended(self, owner: str, name: str, nodes: list[str], share: float) -> None:
        fails = self.random.random() < 0.02
        end = 1380 * (1 - share) + 2
        minutes = 42 + self.random.lognormvariate(2.4, 0.8)
        num = 1 + (self.random.random() < 0.1) + (self.random.random() < 0.02)
        job = self.job(
            owner, name, 'failed' if fails else 'done', 1460, end, self.random.choice(CAUSES) if fails else '', epoch=num, step=0 if fails else STEPS
        )
        begin, step = end + minutes, 0
        for epoch in range(1, num + 1):
            last = begin - minutes * epoch / num
            reached = STEPS * epoch // num
            ending = ('crashed' if fails else 'done') if epoch == num else self.random.choice(ENDINGS)
            self.attempt(
                job,
                epoch,
                self.random.choice(nodes),
                begin - minutes * (epoch - 1) / num,
                last,
                (step, reached),
                ending,
                0.5,
                message='' if ending == 'done' else 'x',
            )
            step = reached // 100 * 100

    def _running(self, owner: str, name: str, node: str) -> None:
        reached = self.random.randrange(0, STEPS)
        pace = self.random.gauss(0.53, 0.04) * (0.4 if self.random.random() < 0.06 else 1)
        job = self.job(owner, name, 'leased', 1400, node=node, step=reached // 100 * 100, epoch=1)
        started = reached / abs(pace) / 60 + 3
        self.attempt(
            job, 1, node, started, self.random.uniform(0, 0.5), (0, reached), pace=pace if reached else None, start_min=3 if reached else None
        )
