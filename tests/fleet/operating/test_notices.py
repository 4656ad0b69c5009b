"""Notices reach the owner's server once it answers, signed; and nobody else's."""

import hashlib
import hmac
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from data_prep.crawling.addresses import network
from fleet.jobs.checking import RECIPES
from fleet.jobs.spec import JobError, spec_of
from fleet.policies.rows import Ending
from fleet.queue.database import Database
from fleet.queue.endings import close
from fleet.service import background, owners
from fleet.service.background import MAX_TRIES, WebhookSender
from fleet.service.bucket import Bucket
from fleet.service.gate import Account, FleetService

LOOPBACK = (network('127.0.0.0/8'),)
ANNA = Account('owner', 'anna', b'')


class OwnersServer(ThreadingHTTPServer):
    """Remembers what it is told; answers with `status` after `wait_sec`."""

    daemon_threads = True

    def __init__(self):
        super().__init__(('127.0.0.1', 0), _Handler)
        self.told, self.status, self.wait_sec, self.headers = [], 204, 0, {}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f'http://127.0.0.1:{self.server_address[1]}/done?x=1'

    def handle_error(self, request, client_address):
        """Who hangs up on a slow answer."""


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.server.told.append((dict(self.headers), self.rfile.read(int(self.headers['content-length']))))
        time.sleep(self.server.wait_sec)
        self.send_response(self.server.status)
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.end_headers()

    def do_GET(self):
        self.server.told.append(('GET', self.path))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def receiver():
    server = OwnersServer()
    yield server
    server.shutdown()


@pytest.fixture
def sender(url):
    database = Database(url)
    database.open()
    yield WebhookSender(database, LOOPBACK)
    database.close()


def notice(connection, made_up, url, key=b'k' * 32, body='{}'):
    connection.execute("update owner set notice_key = %s where name = 'anna'", [key])
    return connection.execute(
        'insert into notice (job, url, body) values (%s, %s, %s) returning id::text', [made_up.job('anna'), url, body]
    ).fetchone()['id']  # fmt: skip


def row_of(connection, own):
    return connection.execute(
        """select tries, delivered is not null as delivered, last_error, next_try = 'infinity' as given_up,
        case when next_try < 'infinity' then extract(epoch from next_try - now())::float8 end as wait_sec from notice where id = %s""",
        [own],
    ).fetchone()


def test_the_end_of_a_job_is_told_with_a_signature(connection, made_up, receiver, sender):
    key = bytes(range(32))
    connection.execute("update owner set notice_key = %s where name = 'anna'", [key])
    made_up.node('m')
    job = made_up.job('anna', 'timber', 'leased', node='m', epoch=1, notify={'webhook': receiver.url})
    made_up.attempt(job, 1, 'm', 60, 0, (0, 1400), pace=0.5)
    close(connection, job, 1, Ending.LIMIT, 75, 'train.duration: ...')
    assert sender.deliver() == 1
    ((headers, body),) = receiver.told
    said = json.loads(body)
    assert (said['id'], said['name'], said['state'], said['results']) == (job, 'timber', 'failed', f'/jobs/{job}/results')
    assert said['dollars'] == pytest.approx(0.324, rel=1e-3)
    assert 'train.duration' in said['cause']
    assert headers['X-Fleet-Signature'] == f'sha256={hmac.new(key, body, hashlib.sha256).hexdigest()}'
    own = connection.execute('select id::text from notice').fetchone()['id']
    assert headers['X-Fleet-Notice'] == own
    assert row_of(connection, own)['delivered']
    assert sender.deliver() == 0


def test_a_server_that_fails_is_told_again_later(connection, made_up, receiver, sender):
    own = notice(connection, made_up, receiver.url)
    receiver.status = 500
    for tries, wait_sec in enumerate((60, 120, 240), 1):
        assert sender.deliver() == 1
        row = row_of(connection, own)
        assert (row['tries'], row['delivered'], row['last_error']) == (tries, False, 'HTTP 500')
        assert row['wait_sec'] == pytest.approx(wait_sec, abs=2)
        assert sender.deliver() == 0  # not yet
        connection.execute('update notice set next_try = now()')
    receiver.status = 200
    sender.deliver()
    assert row_of(connection, own)['delivered']
    assert len({headers['X-Fleet-Notice'] for headers, _ in receiver.told}) == 1


def test_it_is_given_up_after_days(connection, made_up, receiver, sender):
    own = notice(connection, made_up, receiver.url)
    receiver.status = 404
    whole = 0
    for _ in range(MAX_TRIES):
        assert sender.deliver() == 1
        wait_sec = row_of(connection, own)['wait_sec']
        whole += wait_sec or 0
        connection.execute("update notice set next_try = now() where next_try < 'infinity'")
    assert row_of(connection, own)['given_up']
    assert sender.deliver() == 0
    assert whole / 86400 == pytest.approx(4.42, abs=0.01)  # 1 + 2 + ... + 1,024 minutes, and three days
    assert len(receiver.told) == MAX_TRIES


def test_a_redirect_is_not_followed(connection, made_up, receiver, sender):
    receiver.status, receiver.headers = 302, {'Location': receiver.url}
    own = notice(connection, made_up, receiver.url)
    sender.deliver()
    assert row_of(connection, own)['last_error'] == 'HTTP 302'
    assert len(receiver.told) == 1


@pytest.mark.parametrize(
    ('address', 'networks', 'said'),
    [
        ('http://127.0.0.1:{port}/', (), 'private address'),
        ('https://127.0.0.1:{port}/', (), 'private address'),
        ('https://localhost:{port}/', (), 'private address'),
        ('https://169.254.169.254/latest', LOOPBACK, 'private address'),
        ('http://1.1.1.1/', LOOPBACK, 'private address'),  # public, but without TLS
        ('https://127.0.0.1:{port}/', LOOPBACK, 'TLS error'),
        ('ftp://127.0.0.1/', LOOPBACK, 'not an https address'),
        ('file:///etc/passwd', LOOPBACK, 'not an https address'),
        ('https://[', LOOPBACK, 'bad URL'),
    ],
)
def test_only_addresses_that_may_be_told_are_asked(address, networks, said, connection, made_up, receiver, sender):
    sender.networks = networks
    own = notice(connection, made_up, address.format(port=receiver.server_address[1]))
    sender.deliver()
    assert row_of(connection, own)['last_error'] == said
    assert receiver.told == []


def test_no_transaction_waits_for_a_server_and_others_take_nothing_twice(connection, made_up, receiver, sender, monkeypatch):
    monkeypatch.setattr(background, 'TIMEOUT_SEC', 3)
    receiver.wait_sec = 1.5
    own = notice(connection, made_up, receiver.url)
    thread = threading.Thread(target=sender.deliver)
    thread.start()
    while not receiver.told:
        time.sleep(0.02)
    open_ones = connection.execute(
        "select count(*) as num from pg_stat_activity where datname = current_database() and state like 'idle in transaction%'"
    ).fetchone()
    assert open_ones['num'] == 0
    assert sender.deliver() == 0
    thread.join()
    assert row_of(connection, own)['delivered']


def test_a_server_that_says_nothing_is_left(connection, made_up, receiver, sender, monkeypatch):
    monkeypatch.setattr(background, 'TIMEOUT_SEC', 0.3)
    receiver.wait_sec = 2
    own = notice(connection, made_up, receiver.url)
    begin = time.monotonic()
    sender.deliver()
    assert time.monotonic() - begin < 1.5
    assert row_of(connection, own)['last_error'] == 'took over 0.3 s'


def test_the_service_delivers_by_itself(url, connection, made_up, receiver):
    own = notice(connection, made_up, receiver.url)
    database = Database(url)
    database.open()
    sender = WebhookSender(database, LOOPBACK, every_sec=0.05)
    sender.start()
    for _ in range(100):
        if row_of(connection, own)['delivered']:
            break
        time.sleep(0.05)
    sender.stop()
    database.close()
    assert row_of(connection, own)['delivered']


def test_http_is_refused_at_submission_unless_a_network_is_named():
    spec = spec_of({'recipe': 'shapes-lora.yaml', 'notify': {'webhook': 'http://example.org/'}}, 'line 1')
    bucket = Bucket('s3://bucket/fleet')
    with pytest.raises(JobError, match='http://example.org/ must begin with https://'):
        owners._refuse_inputs_of_others(FleetService(None, bucket, RECIPES), ANNA, spec, 'line 1')
    owners._refuse_inputs_of_others(FleetService(None, bucket, RECIPES, notices_to=LOOPBACK), ANNA, spec, 'line 1')


def test_a_job_that_is_cancelled_while_it_waits_is_told_too(service, made_up, connection):
    job = made_up.job('anna', 'timber', notify={'webhook': 'https://example.com/done'})
    assert service.ask('DELETE', f'/jobs/{job}', 'anna').json() == {'state': 'cancelled'}
    row = connection.execute('select url, body from notice where job = %s', [job]).fetchone()
    assert row['url'] == 'https://example.com/done'
    assert {**json.loads(row['body'])}.items() >= {'id': job, 'state': 'cancelled', 'cause': 'by anna'}.items()
    service.ask('DELETE', f'/jobs/{job}', 'anna')
    assert connection.execute('select count(*) as num from notice').fetchone()['num'] == 1
