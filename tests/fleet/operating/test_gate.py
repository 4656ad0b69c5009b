"""Requests that should not reach an endpoint: from pages of others, without a token, too slow; and texts that a terminal would obey."""

import asyncio
import base64

import pytest

from fleet.service import gate
from tests.fleet.operating.made_up import token_of

TOKEN = token_of('root')
BASIC, BEARER = f'Basic {base64.b64encode(b"root:" + TOKEN.encode()).decode()}', f'Bearer {TOKEN}'


@pytest.mark.parametrize('content_type', ['text/plain', 'application/json'])
@pytest.mark.parametrize('path', ['/pools', '/owners', '/nodes/m/ban'])
def test_nothing_but_a_look_comes_of_a_password_that_browsers_send(path, content_type, service, made_up, connection):
    """A form on any page sent the operator's basic authentication with it: a pool became trusted, a budget 0."""
    made_up.node('m')
    content = {'/pools': '{"name": "cloud", "trusted": true}', '/owners': '{"name": "anna", "budget_dollars": 0}'}.get(path, '{}')
    answer = service.client.post(path, content=content, headers={'Authorization': BASIC, 'Content-Type': content_type})
    assert answer.status_code in (401, 415), answer.text
    assert 'WWW-Authenticate' not in answer.headers  # no window that asks for the password
    assert service.client.get('/', headers={'Authorization': BASIC}).status_code == 200
    assert connection.execute("select trusted from pool where name = 'cloud'").fetchone() == {'trusted': False}
    assert connection.execute("select budget_dollars > 0 as some from owner where name = 'anna'").fetchone() == {'some': True}
    assert connection.execute("select state from node where name = 'm'").fetchone() == {'state': 'live'}


@pytest.mark.parametrize(
    ('headers', 'status'),
    [
        ({'Sec-Fetch-Site': 'cross-site'}, 403),
        ({'Origin': 'https://evil.example'}, 403),
        ({'Origin': 'null'}, 403),
        ({'Content-Type': 'text/plain'}, 415),
        ({'Content-Type': 'application/x-www-form-urlencoded'}, 415),
        ({'Origin': 'http://testserver', 'Sec-Fetch-Site': 'same-origin'}, 200),
        ({'Content-Type': 'application/json; charset=utf-8'}, 200),
    ],
)
def test_pages_of_others_change_nothing_even_with_a_token(headers, status, service, connection):
    headers = {'Authorization': BEARER, 'Content-Type': 'application/json', **headers}
    assert service.client.post('/pools', content='{"name": "cloud", "trusted": true}', headers=headers).status_code == status
    assert connection.execute("select trusted from pool where name = 'cloud'").fetchone()['trusted'] == (status == 200)


def ask_slowly(service, token, parts):
    """Send the parts of a body, then nothing; returns the status, how many parts were taken, and whether the connection is to be closed."""
    headers = {
        'host': 'fleet',
        'content-type': 'application/x-ndjson',
        'content-length': '1000',
        'idempotency-key': 'k',
        'authorization': f'Bearer {token}',
    }
    scope = {
        'type': 'http', 'asgi': {'version': '3.0'}, 'http_version': '1.1', 'method': 'POST', 'path': '/jobs', 'raw_path': b'/jobs', 'root_path': '',
        'scheme': 'http', 'query_string': b'', 'headers': [(name.encode(), value.encode()) for name, value in headers.items()],
        'client': ('127.0.0.1', 1), 'server': ('fleet', 80),
    }  # fmt: skip
    sent, taken = [], 0

    async def receive():
        nonlocal taken
        if taken < len(parts):
            taken += 1
            return {'type': 'http.request', 'body': parts[taken - 1], 'more_body': True}
        return await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    asyncio.run(asyncio.wait_for(service.client.app(scope, receive, send), 20))
    return sent[0]['status'], taken, (b'connection', b'close') in sent[0]['headers']


def test_no_body_is_read_for_a_token_that_opens_nothing(service):
    assert ask_slowly(service, 'wrong', [b'{']) == (401, 0, True)


def test_a_body_comes_in_time_or_not_at_all(service, monkeypatch):
    monkeypatch.setattr(gate, 'BODY_SEC', 0.3)
    assert ask_slowly(service, token_of('anna'), [b'{', b'"recipe"']) == (408, 2, True)


def test_a_body_has_a_limit_without_a_length(service):
    assert ask_slowly(service, token_of('anna'), [b'x' * (1 << 19)] * 4) == (413, 3, False)


@pytest.mark.parametrize('key', ['gpu', 'image', 'recipes'])
@pytest.mark.parametrize('text', ['a\x1b[2Jb', 'a\nb', 'a\x9bb', 'a\u202eb', 'a\0b'])
def test_a_machine_says_nothing_of_itself_that_a_terminal_would_obey(key, text, service, connection):
    connection.execute("update pool set token_hash = %s where name = 'cloud'", [gate.digest('pool')])
    content = {'machine': 'm', 'gpu': 'g', 'gpu_gb': 24, key: text if key != 'recipes' else {text: '0' * 64}}
    answer = service.client.post('/enroll', json=content, headers={'Authorization': 'Bearer pool'})
    assert answer.status_code == 422
    assert answer.json()['error'].startswith(key)
    assert 'control characters' in answer.json()['error']


def test_a_message_says_nothing_that_a_terminal_would_obey(service, made_up, connection):
    session = made_up.node('m')
    connection.execute('update session set token_hash = %s where id = %s', [gate.digest('node'), session])
    job = made_up.job('anna', state='leased', node='m', epoch=1)
    made_up.attempt(job, 1, 'm', 30, 0, (0, 150))
    said = {'epoch': 1, 'exit_code': 64, 'message': 'bad \x1b[31mrecipe\x1b[0m\x9b2J\u202e\nline 2\0'}
    answer = service.client.post(f'/jobs/{job}/end', json=said, headers={'Authorization': 'Bearer node'})
    assert answer.status_code == 200, answer.text
    row = service.get(f'/jobs/{job}').json()
    assert row['attempts'][0]['message'] == 'bad recipe\\u202e\nline 2'
    assert row['cause'] == f'attempt 1 on m: recipe, exit code 64, after step 150: {row["attempts"][0]["message"]}'


def test_the_protocol_is_described(service):
    answer = service.client.get('/openapi.json').json()
    assert answer['paths']['/jobs/{job}/renew']['post']['requestBody']['content']['application/json']['schema']['$ref'].endswith('/RenewRequest')
    assert service.client.get('/docs').status_code == 404  # its page would load scripts of others
