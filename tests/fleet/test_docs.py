"""docs/fleet.md leads from nothing to a running fleet: its commands run, in their order, with a machine that does the job at once."""

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys

import numpy as np
import psycopg
from PIL import Image
from psycopg.sql import SQL, Identifier

from tests import pages
from tests.conftest import REPOSITORY
from tests.fleet.fleet import Service
from tests.fleet.test_service import Node, described

PAGE = (REPOSITORY / 'docs/fleet.md').read_text()
BLOCKS = pages.commands('docs/fleet.md')


def commands(block):
    return [shlex.split(line)[1:] for line in BLOCKS[block] if line.startswith('python ')]


def test_from_nothing_to_a_running_fleet(postgres, s3, tmp_path, monkeypatch):
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute(SQL('create database {}').format(Identifier('docs')))
    url = postgres.url.replace('/postgres?', '/docs?')
    environment = {**os.environ, 'PYTHONPATH': str(REPOSITORY)}

    def run(words, **more):
        result = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False, env={**environment, **more})
        assert result.returncode == 0, (words, result.stdout, result.stderr)
        return result.stdout

    said = run(commands(0)[0], FLEET_DATABASE_URL=url)
    operator = re.search(r'fleet-owner-\S+', said)[0]
    (server,) = commands(1)
    assert server[:4] == ['-m', 'fleet', 'server', '--bucket']
    s3.client().create_bucket(Bucket='my-bucket')
    service = Service(url, bucket=server[4])
    try:
        as_operator = {'FLEET_SERVER': service.address, 'FLEET_TOKEN': operator}
        owners, pools = commands(2)
        anna = re.search(r'fleet-owner-\S+', run(owners, **as_operator))[0]
        pool = re.search(r'fleet-pool-\S+', run(pools, **as_operator))[0]
        (tmp_path / 'pool-token').write_text(pool)
        (worker,) = commands(3)
        worker = [word.replace('https://fleet.example.com', service.address).replace('/data/fleet', str(tmp_path / 'work')) for word in worker]
        run([*worker, '--idle-min', '0.01'])
        (tmp_path / 'photos/timber').mkdir(parents=True)
        Image.fromarray(np.zeros((40, 40, 3), np.uint8)).save(tmp_path / 'photos/timber/0.png')
        job = json.loads(re.search(r'```json\n(.*?)```', PAGE, re.DOTALL)[1])
        (tmp_path / 'jobs.jsonl').write_text(json.dumps(job) + '\n')
        as_anna = {'FLEET_SERVER': service.address, 'FLEET_TOKEN': anna}
        submit, watch, status, fetch, bill = commands(4)
        first = run(submit, **as_anna)
        assert run(submit, **as_anna).split()[-1] == first.split()[-1]  # the same jobs again
        node = Node(service, pool, 'machine')
        for kind, name in (('train', 'lora/weights.safetensors'), ('sample', '0.png')):
            lease = node.claim()
            assert lease['kind'] == kind
            node.put(lease, None, name, b'result')
            assert node.of(lease, 'end', exit_code=0, step=1400, files={name: described(b'result')}) == 200
        run(watch, **as_anna)
        assert 'done' in run(status, **as_anna)
        run(fetch, **as_anna)
        fetched = tmp_path / 'results/timber/lora/weights.safetensors'
        assert hashlib.sha256(fetched.read_bytes()).hexdigest() == described(b'result')['sha256']
        assert 'timber' in run(bill, **as_anna)
    finally:
        service.kill()


def test_every_block_is_run_here():
    assert len(BLOCKS) == 5
