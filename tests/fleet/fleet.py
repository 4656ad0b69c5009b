"""A fleet for tests: an empty database, an operator, owners, a pool; the service in this process or as processes."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import psycopg
import requests
from psycopg.sql import SQL, Identifier

from diffusion.demo.postgres import LocalPostgres
from fleet.jobs.checking import recipe_digests
from fleet.jobs.spec import spec_of
from fleet.queue import database
from fleet.queue.database import Connection, connected, create
from fleet.service.gate import digest
from tests.conftest import REPOSITORY

RECIPE = 'yamls/dreambooth-sdxl-lora.yaml'
DIGESTS = recipe_digests()  # what a machine of this installation says when it enrols


def new_database(server: LocalPostgres) -> str:
    """The URL of a new, empty fleet."""
    name = f'fleet_{secrets.token_hex(6)}'
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(SQL('create database {}').format(Identifier(name)))
    url = server.url.replace('/postgres?', f'/{name}?')
    create(url)
    return url


def add_owner(connection: Connection, name: str, **columns: Any) -> str:
    """Returns its token."""
    token = database.new_token('owner')
    columns = {'budget_dollars': 1e6, 'max_leased': 1000, 'max_queued': 10**6, **columns}
    names, places = ', '.join(columns), ', '.join(['%s'] * len(columns))
    connection.execute(
        f'insert into owner (name, token_hash, notice_key, {names}) values (%s, %s, %s, {places})',
        [name, digest(token), secrets.token_bytes(32), *columns.values()],
    )
    return token


def add_pool(connection: Connection, name: str = 'pool', price: float = 0.324, trusted: bool = False, **columns: Any) -> str:
    """Returns its token. All machines of tests come from one address."""
    token = database.new_token('pool')
    columns = {'name': name, 'token_hash': digest(token), 'price_per_hour': price, 'trusted': trusted, 'max_per_address': 10**6, **columns}
    places = ', '.join(['%s'] * len(columns))
    connection.execute(f'insert into pool ({", ".join(columns)}) values ({places})', list(columns.values()))
    return token


def add_jobs(connection: Connection, owner: str, num: int, content: Mapping[str, Any] | None = None, **columns: Any) -> None:
    """Queue jobs past the checks of a submission."""
    spec = spec_of({'recipe': RECIPE, **(content or {})}, 'test')
    columns = {'recipe': spec.recipe.removeprefix('yamls/'), 'spec': spec.to_json(), 'num_steps': 10, **columns}
    names, places = ', '.join(columns), ', '.join(['%s'] * len(columns))
    connection.execute(f'insert into job (owner, {names}) select %s, {places} from generate_series(1, {num})', [owner, *columns.values()])


def rows(url: str, query: str, *values: Any) -> list[dict[str, Any]]:
    with connected(url) as connection:
        return connection.execute(query, values).fetchall()


class Service:
    """A process of `python -m fleet server`; short times unless said otherwise."""

    def __init__(self, url: str, bucket: str = 's3://bucket/fleet', port: int = 0, **options: Any):
        self.url, self.bucket, self.port = url, bucket, port
        self.options = {'lease-sec': 1.5, 'renew-sec': 0.5, 'poll-sec': 0.5, 'grace-sec': 1, **options}
        self.start()

    def start(self) -> None:
        words = [word for name, value in self.options.items() for word in (f'--{name}', str(value))]
        self.process = subprocess.Popen(
            [sys.executable, '-m', 'fleet', 'server', '--bucket', self.bucket, '--port', str(self.port), *words],
            stdout=subprocess.PIPE, text=True, cwd=REPOSITORY, env={**os.environ, database.URL_VARIABLE: self.url},
        )  # fmt: skip
        line = self.process.stdout.readline()
        assert 'listens at' in line, line
        self.address = line.split()[-1]
        self.port = int(self.address.rpartition(':')[2])
        self.wait()

    def wait(self) -> None:
        deadline = time.monotonic() + 30
        while True:
            with suppress(requests.RequestException):
                if requests.get(f'{self.address}/healthz', timeout=5).ok:
                    return
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(30)
        self.process.stdout.close()
        return code

    def ask(self, method: str, path: str, token: str, content: Any = None, **headers: str) -> requests.Response:
        body = None if content is None else content if isinstance(content, str) else json.dumps(content)
        headers = {'Authorization': f'Bearer {token}', 'Content-Type': 'application/json'} | {
            name.replace('_', '-'): value for name, value in headers.items()
        }
        return requests.request(method, self.address + path, data=body, headers=headers, timeout=30)
