"""The service over HTTP, with PostgreSQL and an S3 server: who may what, and what a machine that has lost its lease can still do: nothing."""

import hashlib
import json
import time
from urllib.parse import parse_qs, urlsplit

import pytest
import requests

from fleet.queue.database import connected
from tests.common.s3_server import BUCKET
from tests.fleet.fleet import DIGESTS, RECIPE, Service, add_jobs, add_owner, add_pool, new_database, rows

PHOTOS = b'a tar of photos'
SHA256 = hashlib.sha256(PHOTOS).hexdigest()


@pytest.fixture
def url(postgres):
    return new_database(postgres)


@pytest.fixture
def tokens(url):
    with connected(url) as connection:
        return {'ann': add_owner(connection, 'ann'), 'bob': add_owner(connection, 'bob'), 'pool': add_pool(connection)}


@pytest.fixture
def service(url, s3, tokens):
    service = Service(url)
    yield service
    service.kill()


def described(content: bytes) -> dict:
    return {'sha256': hashlib.sha256(content).hexdigest(), 'bytes': len(content)}


class Node:
    def __init__(self, service, pool_token, name='node'):
        self.service, self.pool_token, self.name, self.token = service, pool_token, name, ''
        self.enroll()

    def enroll(self):
        """Also again, with the last token."""
        said = {'machine': self.name, 'gpu': 'fake', 'gpu_gb': 24, 'recipes': DIGESTS}
        answer = self.service.ask('POST', '/enroll', self.token or self.pool_token, said)
        assert answer.status_code == 200, answer.text
        self.token = answer.json()['token']

    def ask(self, path, content=None):
        return self.service.ask('POST', path, self.token, content or {})

    def claim(self):
        answer = self.ask('/claim')
        return answer.json() if answer.status_code == 200 else answer.status_code

    def put(self, lease, step, name, content):
        signed = self.ask(f'/jobs/{lease["job"]}/urls', {'epoch': lease['epoch'], 'step': step, 'files': {name: described(content)}})
        if signed.status_code != 200:
            return signed.status_code
        signed = signed.json()['files'][name]
        return requests.put(signed['url'], data=content, headers=signed['headers'], timeout=10).status_code

    def of(self, lease, verb, **content):
        return self.ask(f'/jobs/{lease["job"]}/{verb}', {'epoch': lease['epoch'], **content}).status_code


def finish(node, lease):
    assert node.put(lease, None, 'f.txt', b'result') == 200
    assert node.of(lease, 'end', exit_code=0, files={'f.txt': described(b'result')}) == 200


def spec(**changes):
    inputs = {'subject': {'url': f's3://bucket/fleet/owners/ann/inputs/{SHA256}.tar', 'sha256': SHA256, 'bytes': len(PHOTOS)}}
    return {'recipe': RECIPE, 'inputs': inputs, **changes}


def submit(service, token, *specs, key='key'):
    return service.ask('POST', '/jobs', token, '\n'.join(map(json.dumps, specs)), Idempotency_Key=key)


def test_a_job_from_submission_to_results(service, tokens, s3):
    upload = service.ask('POST', '/inputs', tokens['ann'], described(PHOTOS)).json()
    assert requests.put(upload['put']['url'], data=PHOTOS, headers=upload['put']['headers'], timeout=10).status_code == 200
    assert 'put' not in service.ask('POST', '/inputs', tokens['ann'], described(PHOTOS)).json()  # it is there
    job = submit(service, tokens['ann'], spec(inputs={'subject': upload['input']}, name='timber', validation={'prompts': ['a dog']})).json()['jobs'][
        0
    ]
    node = Node(service, tokens['pool'])
    lease = node.claim()
    assert (lease['job'], lease['epoch'], lease['checkpoint'], lease['kind'], lease['num_steps']) == (job, 1, None, 'train', 1400)
    assert requests.get(lease['inputs']['subject']['url'], timeout=10).content == PHOTOS
    assert node.put(lease, 100, 'ba100.pt', b'weights') == 200
    assert node.of(lease, 'publish', step=100, files={'ba100.pt': described(b'weights')}) == 200
    assert node.of(lease, 'publish', step=200, files={'ba200.pt': described(b'weights')}) == 422  # was never uploaded
    assert node.of(lease, 'publish', step=100, files={'ba100.pt': {**described(b'weights'), 'bytes': 8}}) == 422
    assert node.of(lease, 'end', exit_code=0, step=1400, files={}) == 422  # done, and nothing to show
    assert node.put(lease, None, 'lora/weights.safetensors', b'adapter') == 200
    assert node.of(lease, 'end', exit_code=0, step=1400, files={'lora/weights.safetensors': described(b'adapter')}) == 200
    files = service.ask('GET', f'/jobs/{job}/results', tokens['ann']).json()['files']
    assert requests.get(files['lora/weights.safetensors']['url'], timeout=10).content == b'adapter'
    told = service.ask('GET', f'/jobs/{job}', tokens['ann']).json()
    assert (told['state'], told['attempts'][0]['ending'], len(told['children'])) == ('done', 'done', 1)
    child = node.claim()  # the prompts, drawn by whoever asks next
    assert (child['job'], child['kind'], child['name'], child['validation']['prompts']) == (told['children'][0], 'sample', 'timber-images', ['a dog'])
    assert requests.get(child['model']['files']['lora/weights.safetensors']['url'], timeout=10).content == b'adapter'
    node.put(child, None, 'grid.png', b'png')
    assert node.of(child, 'end', exit_code=0, files={'grid.png': described(b'png')}) == 200
    assert node.claim() == 204


def test_a_machine_that_lost_its_lease_can_do_nothing(service, url, tokens, s3):
    with connected(url) as connection:
        add_jobs(connection, 'ann', 1)
    zombie, heir = Node(service, tokens['pool'], 'zombie'), Node(service, tokens['pool'], 'heir')
    since = time.monotonic()
    old = zombie.claim()
    assert zombie.put(old, 5, 'f', b'five') == 200
    assert zombie.of(old, 'publish', step=5, files={'f': described(b'five')}) == 200
    signed = zombie.ask(f'/jobs/{old["job"]}/urls', {'epoch': 1, 'step': 6, 'files': {'f': described(b'six')}}).json()['files']['f']
    while (new := heir.claim()) == 204:
        time.sleep(0.1)
    assert 1 < time.monotonic() - since < 5  # beside other tests; test_storm.py has the bound
    assert (new['job'], new['epoch'], new['checkpoint']['step']) == (old['job'], 2, 5)
    assert requests.get(new['checkpoint']['files']['f']['url'], timeout=10).content == b'five'
    assert zombie.of(old, 'renew', step=6) == 409
    assert zombie.of(old, 'inputs') == 409
    assert zombie.put(old, 7, 'f', b'seven') == 409  # no further URLs
    assert zombie.of(old, 'publish', step=5, files={'f': described(b'five')}) == 409
    assert zombie.of(old, 'end', exit_code=0, files={'f': described(b'five')}) == 409
    assert zombie.of({**old, 'epoch': 2}, 'renew', step=6) == 409  # the heir's epoch is of no use to it either
    # The URL that it still has leads to a place of its own epoch; what lies there already stays.
    assert '/e1/' in signed['url']
    assert requests.put(signed['url'], data=b'six', headers=signed['headers'], timeout=10).status_code == 200
    assert requests.put(signed['url'], data=b'six', headers=signed['headers'], timeout=10).status_code == 412
    assert heir.put(new, 6, 'f', b'6 of 2') == 200
    assert heir.of(new, 'publish', step=6, files={'f': described(b'6 of 2')}) == 200
    assert sorted(s3.object_names()) == [f'fleet/owners/ann/jobs/{old["job"]}/{name}/f' for name in ('e1/s5', 'e1/s6', 'e2/s6')]
    assert [row['epoch'] for row in rows(url, "select (checkpoint->>'epoch')::int as epoch from job")] == [2]


def test_a_put_is_signed_with_all_that_it_may_do(service, url, tokens):
    """The server of the tests does not check signatures; what S3 would refuse is in the list of what was signed."""
    with connected(url) as connection:
        add_jobs(connection, 'ann', 1)
    node = Node(service, tokens['pool'])
    lease = node.claim()
    content = {'epoch': 1, 'step': 5, 'files': {'f': described(b'five')}}
    signed = node.ask(f'/jobs/{lease["job"]}/urls', content).json()['files']['f']
    query = parse_qs(urlsplit(signed['url']).query)
    assert set(query['X-Amz-SignedHeaders'][0].split(';')) == {'content-length', 'host', 'if-none-match', 'x-amz-checksum-sha256'}
    assert query['X-Amz-Algorithm'] == ['AWS4-HMAC-SHA256']
    assert int(query['X-Amz-Expires'][0]) <= 900
    assert signed['headers']['If-None-Match'] == '*'
    assert signed['headers']['Content-Length'] == '4'
    assert urlsplit(signed['url']).path == f'/bucket/fleet/owners/ann/jobs/{lease["job"]}/e1/s5/f'


@pytest.mark.parametrize('name', ['../f', '/f', 'a/../f', 'a//f', '.f', 'f\n', 'a/b/c/d/e/f', ''])
def test_files_keep_to_their_place(name, service, url, tokens):
    with connected(url) as connection:
        add_jobs(connection, 'ann', 1)
    node = Node(service, tokens['pool'])
    assert node.put(node.claim(), 5, name, b'five') == 422


def test_of_another_owners_jobs_there_is_no_sign(service, tokens):
    job = submit(service, tokens['ann'], spec()).json()['jobs'][0]
    for method, path in (('GET', ''), ('GET', '/results'), ('DELETE', ''), ('POST', '/retry')):
        missing = service.ask(method, f'/jobs/00000000-0000-0000-0000-000000000000{path}', tokens['bob'])
        answer = service.ask(method, f'/jobs/{job}{path}', tokens['bob'])
        assert (answer.status_code, missing.status_code) == (404, 404)
        assert answer.text.replace(job, '') == missing.text.replace('00000000-0000-0000-0000-000000000000', '')
    assert service.ask('GET', '/jobs', tokens['bob']).json()['jobs'] == []
    assert [row['id'] for row in service.ask('GET', '/jobs', tokens['ann']).json()['jobs']] == [job]


def test_inputs_of_others_are_refused(service, tokens):
    for url in (f's3://bucket/fleet/owners/ann/inputs/{SHA256}.tar', 's3://other/fleet/owners/bob/inputs/x.tar', 's3://bucket/fleet/owners/bobby/x.tar',
                'https://example.com/x.tar', 's3://bucket/fleet/owners/bob/jobs/x.tar', '/etc/passwd'):  # fmt: skip
        answer = submit(service, tokens['bob'], spec(inputs={'subject': {'url': url, 'sha256': SHA256, 'bytes': 5}}))
        assert answer.status_code == 422, url
        assert 'inputs.subject.url' in answer.json()['errors'][0]


@pytest.mark.parametrize(
    ('method', 'path'),
    [('POST', '/claim'), ('POST', '/enroll'), ('POST', '/leave'), ('GET', '/jobs'), ('POST', '/jobs'), ('POST', '/inputs')],
)
def test_without_the_right_token_nothing_opens(method, path, service, tokens):
    content = {'machine': 'x', 'gpu': 'x', 'gpu_gb': 1}
    node = Node(service, tokens['pool'])
    wrong = ['', 'x', tokens['ann'][:-1]]
    wrong += [tokens['ann'], node.token] if path == '/enroll' else [tokens['pool'], tokens['ann'] if path in ('/claim', '/leave') else node.token]
    for token in wrong:
        assert service.ask(method, path, token, content).status_code == 401


def test_a_machine_that_enrols_again_is_another_session(service, url, tokens):
    with connected(url) as connection:
        add_jobs(connection, 'ann', 1)
    node = Node(service, tokens['pool'])
    lease, former = node.claim(), node.token
    node.enroll()
    assert service.ask('POST', '/claim', former, {}).status_code == 401
    again = node.claim()  # at once: its lease is not waited for
    assert (again['job'], again['epoch']) == (lease['job'], 2)
    assert [row['ending'] for row in rows(url, 'select ending from attempt order by epoch')] == ['lost', None]


def test_a_submission_said_twice_is_one(service, url, tokens):
    specs = [spec(overrides={'seed': seed}) for seed in range(20)]
    first, second = submit(service, tokens['ann'], *specs), submit(service, tokens['ann'], *specs)
    assert first.json() == second.json()
    assert len(set(first.json()['jobs'])) == rows(url, 'select count(*) as num from job')[0]['num'] == 20
    other = submit(service, tokens['ann'], *specs[:3])
    assert other.status_code == 422
    assert 'another submission has this key' in other.json()['error']
    assert submit(service, tokens['ann'], spec(), key='').status_code == 400


def test_a_wrong_job_never_reaches_a_machine(service, url, tokens):
    answer = submit(
        service, tokens['ann'], spec(), spec(overrides={'train.duratoin': '5ba', 'load_path': '/etc'}), spec(recipe='yamls/none.yaml'), {'x': 1}
    )
    assert answer.status_code == 422
    errors = answer.json()['errors']
    assert [error.partition(': ')[0] for error in errors] == ['line 2'] * 3 + ['line 3'] + ['line 4'] * 2, errors
    assert any("did you mean 'train.duration'" in error for error in errors)
    assert rows(url, 'select count(*) as num from job')[0]['num'] == 0


def test_a_budget_and_a_number_of_leases_hold(service, url, tokens):
    with connected(url) as connection:
        add_jobs(connection, 'ann', 3)
        connection.execute("update owner set max_leased = 1 where name = 'ann'")
    one, two = Node(service, tokens['pool'], 'one'), Node(service, tokens['pool'], 'two')
    lease = one.claim()
    assert two.claim() == 204
    with connected(url) as connection:
        connection.execute("update owner set max_leased = 2, budget_dollars = 0 where name = 'ann'")
    assert two.claim() == 204
    answer = one.ask(f'/jobs/{lease["job"]}/renew', {'epoch': 1, 'step': 1}).json()
    assert answer['action'] == 'stop'
    assert 'the budget of ann is spent' in answer['reason']


def test_a_cancelled_job_is_stopped_at_the_next_renewal_and_can_be_retried(service, tokens):
    job = submit(service, tokens['ann'], spec()).json()['jobs'][0]
    node = Node(service, tokens['pool'])
    lease = node.claim()
    assert service.ask('DELETE', f'/jobs/{job}', tokens['ann']).json()['state'] == 'cancelled'
    assert node.of(lease, 'renew', step=1) == 409
    assert node.claim() == 204
    assert service.ask('POST', f'/jobs/{job}/retry', tokens['ann']).status_code == 200
    assert node.claim()['epoch'] == 2


def test_a_poison_job_ends_when_two_machines_that_finish_others_say_so(service, url, tokens):
    """They prove themselves afterwards, while the job waits for a machine that has not refused it."""
    job = submit(service, tokens['ann'], spec()).json()['jobs'][0]
    nodes = [Node(service, tokens['pool'], name) for name in ('one', 'two')]
    for node in nodes:
        assert node.of(node.claim(), 'end', exit_code=64, message='adapter.rank: 0 is outside 1 .. 1024 with key AKIAABCDEFGHIJKLMNOP') == 200
        assert node.claim() == 204
    with connected(url) as connection:
        add_jobs(connection, 'ann', 2)
    for node in nodes:
        assert service.ask('GET', f'/jobs/{job}', tokens['ann']).json()['state'] == 'queued'
        finish(node, node.claim())
    told = service.ask('GET', f'/jobs/{job}', tokens['ann']).json()
    assert (told['state'], len(told['attempts'])) == ('failed', 2)
    assert told['cause'].startswith('its recipe is wrong: 2 machines say so that have finished other jobs\n  attempt 1 on one: recipe, exit code 64')
    assert told['cause'].count('adapter.rank: 0 is outside 1 .. 1024 with key ***') == 2


def test_a_body_beyond_the_limit_and_no_json_are_refused(service, tokens):
    assert service.ask('POST', '/jobs', tokens['ann'], 'x' * ((1 << 20) + 1), Idempotency_Key='k').status_code == 413
    assert service.ask('POST', '/enroll', tokens['pool'], '[' * 100_000).status_code == 400
    for content in ({'machine': 'a/b'}, {'machine': 'x', 'gpu_gb': -1}, {'machine': 'x', 'gpu_gb': '24'}, {'machine': 'x', 'gpu_gb': float('nan')}):
        assert service.ask('POST', '/enroll', tokens['pool'], {'gpu': 'x', 'gpu_gb': 1, **content}).status_code == 422
    assert BUCKET == 'bucket'


def test_two_services_at_once(service, url, tokens, s3):
    other = Service(url)
    with connected(url) as connection:
        add_jobs(connection, 'ann', 1)
    node = Node(service, tokens['pool'])
    lease = node.claim()
    node.service = other
    assert node.of(lease, 'renew', step=1) == 200
    assert other.stop() in (0, -15)
    node.service = service
    assert node.of(lease, 'renew', step=2) == 200
