"""Which requests reach the page, and where it listens."""

import json
import socket

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from diffusion.contracts.errors import InputError
from diffusion.serving.gate import Gate, is_loopback, listen, url_of

JOIN = '/gradio_api/queue/join'
CALL = {'session_hash': 'x1', 'fn_index': 1, 'data': ['a cat', 7]}


def gate_of(app, only_here=True, on_leave=print, is_alive=lambda: True):
    return Gate(app, only_here, on_leave, {(JOIN, 1): 2, ('/gradio_api/run/predict', 0): 0}, is_alive)


def client(**options):
    async def echo(request):
        return PlainTextResponse(await request.body() or 'passed')

    app = Starlette(routes=[Route('/{path:path}', echo, methods=['GET', 'POST', 'PUT'])])
    return TestClient(gate_of(app, **options), base_url='http://127.0.0.1:7860', follow_redirects=False)


@pytest.mark.parametrize('host', ['localhost', 'localhost:7860', '127.0.0.1', '127.0.0.1:80', '[::1]:7860', '[::1]'])
def test_names_of_this_machine_pass(host):
    answer = client().get('/', headers={'host': host})
    assert (answer.status_code, answer.text) == (200, 'passed')
    assert "default-src 'self'" in answer.headers['content-security-policy']
    assert 'http' not in answer.headers['content-security-policy']


@pytest.mark.parametrize(
    'host', ['evil.example', 'evil.example:7860', '127.0.0.1.evil.example', 'localhost.evil.example', '10.0.0.1:7860', '', ':7860']
)
def test_other_names_pass_only_a_server_that_is_open_to_others(host):
    """A stranger's page can give its own name the address 127.0.0.1, and would then read this one."""
    refused = client().get('/', headers={'host': host})
    assert refused.status_code == 403
    assert '--host' in refused.text
    assert client(only_here=False).get('/', headers={'host': host}).status_code == 200


@pytest.mark.parametrize(
    ('path', 'status'),
    [
        ('/', 200),
        ('/config', 200),
        ('/assets/index.js', 200),
        ('/gradio_api/queue/data?session_hash=x1', 200),
        ('/gradio_api/queue/data?session_hash=', 400),
        ('/gradio_api/queue/data', 400),
        ('/gradio_api/queue/join', 405),
        ('/gradio_api/queue/status', 404),
        ('/gradio_api/startup-events', 404),
        ('/gradio_api/run/other', 404),
        ('/gradio_api/file=/tmp/x.png', 200),
        ('/gradio_api/file=http://evil.example/', 404),
        ('/gradio_api/upload', 404),
        ('/gradio_api/proxy=http://evil.example/', 404),
        ('/gradio_api/process_recording', 404),
        ('/gradio_api/vibe-edit/', 404),
        ('/gradio_api/component_server', 404),
        ('/gradio_api/mcp/', 404),
        ('/monitoring', 404),
        ('/login', 404),
        ('/docs', 404),
    ],
)
def test_only_what_the_page_needs_is_reached(path, status):
    assert client().get(path).status_code == status


def test_large_bodies_and_other_methods_are_refused():
    body = json.dumps(CALL).encode()
    assert client().post(JOIN, content=body + b' ' * (65536 - len(body))).status_code == 200
    assert client().post(JOIN, content=body + b' ' * (65537 - len(body))).status_code == 413
    assert client().post(JOIN, content=iter([body, b' ' * 65536])).status_code == 413  # of a length that it does not say
    assert client().put(JOIN).status_code == 405
    assert client().post('/').status_code == 405


def test_only_what_a_call_needs_passes():
    more = {'event_id': 'a', 'batched': True, 'simple_format': True, 'request': {}, 'trigger_id': 9}
    assert client().post(JOIN, json=CALL | more).json() == CALL
    assert client().post('/gradio_api/run/predict', json={'session_hash': 'x1', 'fn_index': 0, 'data': []}).status_code == 200


WRONG_CALLS = [
    *[CALL | {'session_hash': value} for value in ('', None, 3, [], {}, 'A', 'a b', 'x' * 41, 'é')],
    *[CALL | {'fn_index': value} for value in (None, 0, 2, -1, 10**30, 1.0, True, '1', [1])],
    *[CALL | {'data': value} for value in (None, [], ['a'], [0] * 20_000, {}, 'ab')],
    *[{name: value for name, value in CALL.items() if name != missing} for missing in CALL],
    [CALL], None, 'text',
]  # fmt: skip


@pytest.mark.parametrize('body', [*map(json.dumps, WRONG_CALLS), '', '{', '[' * 60_000, '\x00', '{"session_hash": ' + '9' * 5000 + '}'])
def test_a_body_that_is_no_call_of_the_page_is_refused(body):
    answer = client().post(JOIN, content=body)
    assert answer.status_code == 400
    assert len(answer.text) < 200


def test_health():
    assert client().get('/health').status_code == 200
    assert client(is_alive=lambda: False).get('/health').status_code == 503


def test_who_no_longer_listens_to_progress_has_left():
    left = []

    async def app(scope, receive, send):
        assert not left
        await send({'type': 'http.response.start', 'status': 200, 'headers': []})
        await send({'type': 'http.response.body'})

    page = TestClient(gate_of(app, on_leave=left.append), base_url='http://127.0.0.1')
    page.get('/config?session_hash=other')
    page.get('/gradio_api/queue/data?session_hash=x1')
    assert left == ['x1']


def test_a_taken_port_and_a_strangers_address_are_refused_with_the_remedy():
    with listen('127.0.0.1', 0) as bound:
        bound.listen()
        port = bound.getsockname()[1]
        assert url_of(bound) == f'http://127.0.0.1:{port}'
        with pytest.raises(InputError, match=f'127.0.0.1:{port} cannot be listened at: Address already in use; name another --port'):
            listen('127.0.0.1', port)
    for host in ('192.0.2.1', 'no such name'):
        with pytest.raises(InputError, match=f'{host}:0 cannot be listened at'):
            listen(host, 0)
    for port in (-1, 65536, 99999):
        with pytest.raises(InputError, match=f'--port {port}: ports go from 0, a free one, to 65535'):
            listen('127.0.0.1', port)


def test_what_loopback_is():
    assert all(map(is_loopback, ('localhost', '127.0.0.1', '127.8.8.8', '::1')))
    assert not any(map(is_loopback, ('0.0.0.0', '::', '10.0.0.1', 'example.com', 'localhost.example.com', '')))


@pytest.mark.skipif(not socket.has_ipv6, reason='no IPv6 here')
def test_ipv6():
    try:
        bound = listen('::1', 0)
    except InputError:
        pytest.skip('this machine has no ::1')
    with bound:
        assert url_of(bound) == f'http://[::1]:{bound.getsockname()[1]}'
