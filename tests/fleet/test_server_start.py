"""What `server` and `init` refuse before they begin."""

import os
import subprocess
import sys

import pytest

from fleet.jobs.checking import RECIPES
from tests.conftest import REPOSITORY
from tests.fleet.fleet import new_database

SERVER = ('server', '--port', '0', '--bucket')


def fleet(*words, cwd, **environment):
    return subprocess.run(
        [sys.executable, '-m', 'fleet', *map(str, words)], cwd=cwd, capture_output=True, text=True, check=False, timeout=60,
        env={**os.environ, 'PYTHONPATH': str(REPOSITORY), **environment},
    )  # fmt: skip


def first_lines(*words, cwd, url):
    process = subprocess.Popen(
        [sys.executable, '-m', 'fleet', *words], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, 'PYTHONPATH': str(REPOSITORY), 'FLEET_DATABASE_URL': url},
    )  # fmt: skip
    lines = [process.stdout.readline(), process.stdout.readline()]
    process.terminate()
    return lines, process.communicate(timeout=30)[1]


@pytest.fixture
def url(postgres):
    return new_database(postgres)


def test_a_service_has_its_recipes_wherever_it_is_started(url, s3, tmp_path):
    (address, recipes), _ = first_lines(*SERVER, 's3://bucket/fleet', cwd=tmp_path, url=url)
    assert address.split()[-1].startswith('http://127.0.0.1:')
    assert recipes == f'{len(list(RECIPES.glob("*.yaml")))} recipes in {RECIPES}\n'
    ended = fleet(*SERVER, 's3://bucket/fleet', '--recipes', tmp_path, cwd=tmp_path, FLEET_DATABASE_URL=url)
    assert (ended.returncode, f'--recipes {tmp_path}: there is no recipe' in ended.stderr) == (2, True)


def test_a_bucket_that_is_missing_or_refuses_is_an_error(url, s3, tmp_path):
    ended = fleet(*SERVER, 's3://nowhere/fleet', cwd=tmp_path, FLEET_DATABASE_URL=url)
    assert (ended.returncode, ended.stderr) == (2, '--bucket s3://nowhere/fleet: there is no bucket nowhere; create it, or name another\n')
    s3.proxy.fails = lambda method, path: 403
    ended = fleet(*SERVER, 's3://bucket/fleet', cwd=tmp_path, FLEET_DATABASE_URL=url)
    s3.proxy.fails = lambda method, path: False
    assert (ended.returncode, 'the storage refuses this service: AccessDenied' in ended.stderr) == (2, True)


def test_storage_that_compares_no_digests_is_said(url, s3, tmp_path):
    _, said = first_lines(*SERVER, 's3://bucket/fleet', cwd=tmp_path, url=url)
    assert 'takes other bytes' not in said
    assert s3.object_names() == []
    s3.proxy.ignores_digests = True
    for _ in range(2):
        _, said = first_lines(*SERVER, 's3://bucket/fleet', cwd=tmp_path, url=url)
        assert 'takes other bytes than were signed; the service reads every result' in said


def test_storage_that_is_away_may_come_back(url, s3, tmp_path, monkeypatch):
    monkeypatch.setenv('S3_ENDPOINT_URL', 'http://127.0.0.1:9')
    (address, _), said = first_lines(*SERVER, 's3://bucket/fleet', cwd=tmp_path, url=url)
    assert 'listens at' in address
    assert '--bucket s3://bucket/fleet: does not answer (EndpointConnectionError)' in said


@pytest.mark.parametrize('url', ['foo', 'postgresql://user:geheim@host:port:port/x y'])
def test_an_address_that_is_none(url, tmp_path):
    ended = fleet('init', cwd=tmp_path, FLEET_DATABASE_URL=url)
    assert ended.returncode == 2
    assert 'Traceback' not in ended.stderr
    assert 'geheim' not in ended.stderr


def test_messages_name_commands_that_are_there():
    from fleet.commands.operator import OwnersCommand, PoolsCommand

    text = (REPOSITORY / 'fleet/service/gate.py').read_text()
    for command, module in (('owners NAME', OwnersCommand), ('pools NAME', PoolsCommand)):
        assert f'{command} --new-token' in text
        assert '--new-token' in module.__doc__
    assert '--tokens N' in PoolsCommand.__doc__
