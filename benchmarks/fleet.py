"""What the fleet's queue costs: a claim with 100,000 jobs queued, and forty machines that ask for work when there is none.

    python -m benchmarks.fleet [--queued 100000] [--workers 40] [--poll-sec 15] [--idle-sec 60] [--out FILE.jsonl]

Starts a PostgreSQL and a service of its own on this machine. Prints the milliseconds of a claim in four queues, the plan of its query, and which
share of one core service and database take while machines are idle.
"""

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.measured import command, print_table, record
from diffusion.common.arguments import positive_float, positive_int
from diffusion.contracts.errors import run_command

CLAIMS = 50  # of each queue
SPEC = {'limits': {'attempts': 3, 'losses': 20, 'hours': 6.0, 'dollars': 1.0}, 'validation': {'prompts': []}, 'notify': {'webhook': None}}
# Queue: which share of the jobs the machine cannot take, and why.
QUEUES = {
    'any job fits': '',
    'half of the jobs need a larger GPU': 'update job set gpu_gb = 80 where number % 2 = 0',
    'the 50,000 first need a larger GPU': 'update job set gpu_gb = 80 where number <= (select min(number) + HALF from job)',
    'the 1,000 first are banned from all machines': """insert into ban (job, node, until, reason)
        select early.id, node.name, now() + interval '1 day', '' from node, (select id from job order by number limit 1000) early""",
}


def main() -> int:
    parser = command('fleet', __doc__)
    parser.add_argument('--queued', type=positive_int, default=100_000, help='jobs that wait (default %(default)s)')
    parser.add_argument('--workers', type=positive_int, default=40, help='idle machines (default %(default)s)')
    parser.add_argument('--poll-sec', type=positive_float, default=15, help='between two questions of each (default %(default)s)')
    parser.add_argument('--idle-sec', type=positive_float, default=60, help='that they are watched (default %(default)s)')
    args = parser.parse_args()
    return run_command(lambda: measure(args))


def measure(args: argparse.Namespace) -> None:
    from diffusion.demo.postgres import LocalPostgres

    server = LocalPostgres()
    try:
        claims = list(claims_of(server.url, args.queued))
        columns = ('queue', 'median_ms', 'slowest_ms', 'query_ms')
        print_table(['queue', 'median ms', 'slowest ms', 'of the query, ms'], [[row[name] for name in columns] for row in claims])
        idle = idle_share(server, args.workers, args.poll_sec, args.idle_sec)
        print(f'{args.workers} idle machines, a question each {args.poll_sec:g} s: {idle["service"]:.2%} of a core for the service, '
              f'{idle["database"]:.2%} for the database; without machines {idle["service_alone"]:.2%} and {idle["database_alone"]:.2%}')  # fmt: skip
        record(args.out, [*claims, idle])
    finally:
        server.stop()


def claims_of(url: str, num_queued: int) -> Iterator[dict[str, Any]]:
    """Claim CLAIMS jobs of each queue, each in a transaction of its own as a machine does; prints the query's plan for the first."""
    from fleet.queue import leases
    from fleet.queue.database import Database, connected, create
    from fleet.queue.leases import PICK, LeaseSettings

    create(url)
    with connected(url) as connection:
        for owner in ('ann', 'bob'):
            connection.execute(
                'insert into owner (name, token_hash, notice_key, max_leased, budget_dollars) values (%s, %s, %s, 1000000, 1e9)',
                [owner, secrets.token_bytes(32), b''],
            )
        connection.execute("insert into pool (name, token_hash, price_per_hour) values ('pool', %s, 0.3)", [secrets.token_bytes(32)])
        connection.execute("insert into recipe values ('r', 'said')")
        for number in range(CLAIMS):  # each claims once: one that asks again has forgotten its job
            connection.execute(
                """insert into node (name, pool, gpu, gpu_gb, recipes) values (%s, 'pool', 'fake', 24, '{"r": "said"}')""", [f'machine-{number}']
            )
            connection.execute('insert into session (node, token_hash, price_per_hour) values (%s, %s, 0.3)', [f'machine-{number}', b'%d' % number])
    for name, change in QUEUES.items():
        with connected(url) as connection:
            connection.execute('truncate job, attempt, ban cascade')
            connection.execute(
                """insert into job (owner, recipe, spec) select case when i %% 10 = 0 then 'bob' else 'ann' end, 'r', %s
                from generate_series(1, %s) i""",
                [json.dumps(SPEC), num_queued],
            )
            if change:
                connection.execute(change.replace('HALF', str(num_queued // 2)))
            connection.execute('analyze')
        parameters = {'name': 'machine-0', 'recipes': ['r'], 'gpu_gb': 24, 'image': '', 'trusted': False}
        with connected(url) as connection:
            plan = [row['QUERY PLAN'] for row in connection.execute(f'explain (analyze, buffers) {PICK}', parameters)]
        if not change:
            print('\n'.join(plan))
        times = []
        with connected(url) as connection:
            sessions = {row['node']: row['id'] for row in connection.execute('select node, id from session order by id')}
        database = Database(url, size=1)
        database.open()
        try:
            for node, session in sessions.items():
                began = time.perf_counter()
                with database.transaction() as connection:
                    assert leases.claim(connection, node, session, LeaseSettings()) is not None
                times.append((time.perf_counter() - began) * 1000)
        finally:
            database.close()
        query_ms = float(plan[-1].partition('Execution Time: ')[2].partition(' ms')[0])
        yield {
            'benchmark': 'fleet',
            'queue': name,
            'num_queued': num_queued,
            'median_ms': statistics.median(times),
            'slowest_ms': max(times),
            'query_ms': query_ms,
        }


def idle_share(server: Any, num_workers: int, poll_sec: float, seconds: float) -> dict[str, Any]:
    """CPU of the service and of the database as shares of one core, with machines that ask and are told to wait, and without any."""
    import requests

    from fleet.jobs.checking import recipe_digests
    from fleet.queue.database import connected, new_token
    from fleet.service.gate import digest

    token = new_token('pool')
    with connected(server.url) as connection:
        connection.execute('truncate job, attempt, ban cascade')
        connection.execute('update pool set token_hash = %s, trusted = true', [digest(token)])  # all machines have one address
    with service(server.url, poll_sec) as (address, process):
        tokens = []
        for number in range(num_workers):
            facts = {'machine': f'worker-{number}', 'gpu': 'fake', 'gpu_gb': 24, 'recipes': recipe_digests()}
            tokens.append(requests.post(f'{address}/enroll', data=json.dumps(facts), headers=bearer(token), timeout=10).json()['token'])
        alone = watched(process.pid, server.process.pid, seconds / 2)
        ended = threading.Event()

        def ask(own: str, delay_sec: float) -> None:
            session = requests.Session()
            ended.wait(delay_sec)
            while not ended.wait(poll_sec):
                assert session.post(f'{address}/claim', data='{}', headers=bearer(own), timeout=10).status_code == 204

        threads = [threading.Thread(target=ask, args=(own, poll_sec * i / num_workers), daemon=True) for i, own in enumerate(tokens)]
        for thread in threads:
            thread.start()
        ended.wait(poll_sec)
        busy = watched(process.pid, server.process.pid, seconds)
        ended.set()
    shares = {'service': busy[0], 'database': busy[1], 'service_alone': alone[0], 'database_alone': alone[1]}
    return {'benchmark': 'fleet', 'workers': num_workers, 'poll_sec': poll_sec, **shares}


@contextmanager
def service(url: str, poll_sec: float) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    environment = {**os.environ, 'FLEET_DATABASE_URL': url, 'AWS_ACCESS_KEY_ID': 'none', 'AWS_SECRET_ACCESS_KEY': 'none'}
    words = [sys.executable, '-m', 'fleet', 'server', '--bucket', 's3://none/none', '--port', '0', '--poll-sec', f'{poll_sec}']
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[-1], process
    finally:
        process.kill()
        process.wait()


def watched(service_pid: int, database_pid: int, seconds: float) -> tuple[float, float]:
    """CPU seconds a second of two processes and their children."""
    before, began = (cpu_sec(service_pid), cpu_sec(database_pid)), time.monotonic()
    threading.Event().wait(seconds)
    passed = time.monotonic() - began
    return (cpu_sec(service_pid) - before[0]) / passed, (cpu_sec(database_pid) - before[1]) / passed


def cpu_sec(pid: int) -> float:
    """Of a process and its children, those that have ended too."""
    import psutil

    total = 0.0
    process = psutil.Process(pid)
    for one in (process, *process.children(recursive=True)):
        times = one.cpu_times()
        total += times.user + times.system
    times = process.cpu_times()
    return total + times.children_user + times.children_system


def bearer(token: str) -> dict[str, str]:
    return {'Authorization': f'Bearer {token}', 'Content-Type': 'application/json'}


if __name__ == '__main__':
    raise SystemExit(main())
