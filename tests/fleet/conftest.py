"""A real PostgreSQL for the tests of the fleet, and what they put into it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from diffusion.fleet.queue.local_postgres import LocalPostgres


@pytest.fixture(scope='session')
def postgres() -> Iterator[LocalPostgres]:
    server = LocalPostgres()
    yield server
    server.stop()
