"""A service over a PostgreSQL of its own, empty before each test."""

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from data_prep.crawling.addresses import network
from diffusion.demo.postgres import LocalPostgres
from fleet.queue.database import Database, connected
from fleet.service.app import create_app
from fleet.service.bucket import Bucket
from fleet.service.gate import FleetService
from tests.fleet.fleet import new_database
from tests.fleet.operating.made_up import MadeUp, token_of


@pytest.fixture
def url(postgres: LocalPostgres) -> str:
    return new_database(postgres)


@pytest.fixture
def connection(url: str) -> Iterator[Any]:
    """Each statement is a transaction of its own."""
    with connected(url) as connection:
        connection.autocommit = True
        yield connection


@pytest.fixture
def made_up(connection: Any) -> MadeUp:
    """Two owners, an operator and a pool."""
    made = MadeUp(connection)
    made.owner('root', operator=True)
    made.owner('anna')
    made.owner('ben')
    made.pool()
    return made


class Service:
    """Requests as somebody, without a network."""

    def __init__(self, client: TestClient):
        self.client = client

    def ask(self, method: str, path: str, name: str = 'root', **options: Any) -> Any:
        return self.client.request(method, path, headers={'Authorization': f'Bearer {token_of(name)}', 'Content-Type': 'application/json'}, **options)

    def get(self, path: str, name: str = 'root', **options: Any) -> Any:
        return self.ask('GET', path, name, **options)

    def post(self, path: str, content: Any = None, name: str = 'root') -> Any:
        return self.ask('POST', path, name, json=content or {})


@pytest.fixture
def service(url: str, made_up: MadeUp) -> Iterator[Service]:
    """Threads that sweep and send sleep: tests call them."""
    service = FleetService(
        Database(url), Bucket('s3://bucket/fleet'), sweep_every_sec=3600, notices_to=(network('127.0.0.0/8'),), notices_every_sec=3600
    )
    with TestClient(create_app(service)) as client:
        yield Service(client)
