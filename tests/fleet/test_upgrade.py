"""A database of an older release becomes one of this release, with its rows; and two services may find it at once."""

import threading
from pathlib import Path

import psycopg
import pytest
from psycopg.sql import SQL, Identifier

from diffusion.contracts.errors import InputError
from fleet.queue.database import VERSION, connected, create, upgrade

OLD = Path(__file__).with_name('schema_1.sql')  # as of 6e5ded8
SHAPE = """
    select table_name || '.' || column_name || ' ' || data_type || ' ' || is_nullable || ' ' || coalesce(column_default, '') as text
    from information_schema.columns where table_schema = 'public'
    union all select indexdef from pg_indexes where schemaname = 'public'
    union all select conrelid::regclass || ' ' || pg_get_constraintdef(oid) from pg_constraint where connamespace = 'public'::regnamespace
"""
ROWS = """
    insert into owner (name, token_hash, notice_key) values ('ann', '\\x01', '\\x02');
    insert into pool (name, token_hash, price_per_hour) values ('cloud', '\\x03', 0.3);
    insert into node (name, pool, gpu, gpu_gb) values ('m', 'cloud', 'g', 24);
    insert into session (node, token_hash, price_per_hour) values ('m', '\\x04', 0.3);
    insert into job (owner, recipe, spec) values ('ann', 'yamls/dreambooth-sdxl-lora.yaml', '{}'), ('ann', 'dreambooth-sd2-lora.yaml', '{}');
"""


@pytest.fixture
def url(postgres):
    """Address of an empty database."""
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute(SQL('drop database if exists {}').format(Identifier('upgraded')))
        connection.execute(SQL('create database {}').format(Identifier('upgraded')))
    return postgres.url.replace('/postgres?', '/upgraded?')


def shape(url):
    with connected(url) as connection:
        return sorted(row['text'] for row in connection.execute(SHAPE))


def test_an_upgraded_schema_is_a_new_one(url, postgres):
    with connected(url) as connection:
        connection.execute(OLD.read_bytes())
        connection.execute(ROWS.encode())
    with connected(url) as connection:
        assert upgrade(connection) == 1
    with connected(url) as connection:
        assert upgrade(connection) == VERSION
        assert [row['recipe'] for row in connection.execute('select recipe from job order by number')] == [
            'dreambooth-sdxl-lora.yaml', 'dreambooth-sd2-lora.yaml',
        ]  # fmt: skip
        assert connection.execute('select max_machines, max_per_address, one_use from pool').fetchone() == {
            'max_machines': 1000, 'max_per_address': 20, 'one_use': False,
        }  # fmt: skip
    upgraded = shape(url)
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute(SQL('drop database {}').format(Identifier('upgraded')))
        connection.execute(SQL('create database {}').format(Identifier('upgraded')))
    create(url)
    assert upgraded == shape(url)


def test_services_that_start_at_once_upgrade_once(url):
    with connected(url) as connection:
        connection.execute(OLD.read_bytes())
    found = []

    def start():
        with connected(url) as connection:
            found.append(upgrade(connection))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [1, VERSION, VERSION, VERSION]


def test_a_later_schema_is_refused(url):
    create(url)
    with connected(url) as connection:
        connection.execute('update fleet_version set version = 99')
    with connected(url) as connection, pytest.raises(InputError, match='has version 99, this code knows 2: update the code'):
        upgrade(connection)
