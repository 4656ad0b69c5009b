"""Machines, owners and pools in the hands of operators; others get nothing."""

import re

import pytest

from fleet.service.gate import digest
from tests.fleet.operating.made_up import token_of

ENDPOINTS = [
    ('GET', '/nodes'), ('POST', '/nodes/m/ban'), ('POST', '/nodes/m/drain'), ('POST', '/nodes/m/readmit'), ('GET', '/owners'), ('POST', '/owners'),
    ('DELETE', '/owners/ben/token'), ('GET', '/pools'), ('POST', '/pools'), ('DELETE', '/pools/cloud/token'), ('GET', '/metrics'), ('GET', '/scale?max=4'),
]  # fmt: skip


@pytest.mark.parametrize(('method', 'path'), ENDPOINTS)
def test_owners_may_not(method, path, service, made_up):
    made_up.node('m')
    before = service.get('/nodes').json()['nodes'][0]['state']
    assert service.ask(method, path, 'anna').status_code == 403
    assert service.ask(method, path, 'nobody').status_code == 401
    assert service.get('/nodes').json()['nodes'][0]['state'] == before


def test_a_ban_takes_the_job_at_once(service, made_up, connection, capsys):
    made_up.node('m')
    job = made_up.job('anna', state='leased', node='m', step=100, epoch=1)
    made_up.attempt(job, 1, 'm', 30, 0, (0, 150), pace=0.5)
    answer = service.post('/nodes/m/ban', {'reason': 'answers with others\nimages'})
    assert answer.json() == {'name': 'm', 'state': 'quarantined', 'reason': 'answers with others images'}
    assert 'operator root: ban machine m, which was live: answers with others images\n' in capsys.readouterr().out
    row = service.get(f'/jobs/{job}').json()
    assert (row['state'], row['step'], row['attempts'][0]['ending']) == ('queued', 100, 'released')
    assert service.get('/nodes').json()['nodes'][0]['reason'] == 'answers with others images'

    connection.execute("insert into ban (job, node, until, reason) values (%s, 'm', now() + interval '1 day', 'crashed')", [job])
    assert service.post('/nodes/m/readmit').json()['state'] == 'live'
    row = connection.execute("select judged_from > now() - interval '1 minute' as judged, reason from node where name = 'm'").fetchone()
    assert row == {'judged': True, 'reason': ''}
    assert connection.execute('select count(*) as num from ban').fetchone()['num'] == 0


def test_drain_lets_it_save(service, made_up):
    made_up.node('m')
    job = made_up.job('anna', state='leased', node='m', epoch=1)
    made_up.attempt(job, 1, 'm', 30, 0, (0, 150), pace=0.5)
    assert service.post('/nodes/m/drain').json() == {'name': 'm', 'state': 'draining', 'reason': 'drain by root'}
    assert service.get(f'/jobs/{job}').json()['state'] == 'leased'
    assert service.post('/nodes/m/drain').status_code == 409
    assert service.post('/nodes/n/drain').status_code == 404
    assert service.post('/nodes/m/explode').status_code == 404


def test_odd_names_and_reasons_are_no_crash(service, made_up):
    made_up.node('m')
    for name in ('%00', '%ED%A0%80', 'a%20b', '-x'):
        assert service.post(f'/nodes/{name}/ban').status_code == 404
        assert service.ask('DELETE', f'/owners/{name}/token').status_code == 404
    answer = service.ask('POST', '/nodes/m/ban', content=r'{"reason": "half \ud800 a \u0000 pair"}')
    assert answer.json()['reason'] == 'half   a   pair'


def test_readmitting_a_machine_that_has_left_does_not_bring_it_back(service, made_up):
    made_up.node('m', state='gone')
    assert service.post('/nodes/m/readmit').json()['state'] == 'gone'


def test_an_owner_is_created_changed_and_revoked(service, connection, capsys):
    answer = service.post('/owners', {'name': 'carla', 'create': True, 'budget_dollars': 25, 'max_leased': 3}).json()
    token, key = answer['token'], answer['notice_key']
    assert re.fullmatch('[0-9a-f]{64}', key)
    row = connection.execute("select token_hash, notice_key, budget_dollars, max_leased, is_operator from owner where name = 'carla'").fetchone()
    assert (bytes(row['token_hash']), bytes(row['notice_key']).hex(), row['budget_dollars'], row['max_leased'], row['is_operator']) == (
        digest(token),
        key,
        25,
        3,
        False,
    )
    assert service.client.get('/jobs', headers={'Authorization': f'Bearer {token}'}).json() == {'jobs': []}

    assert service.post('/owners', {'name': 'carla', 'max_leased': 7}).json() == {'name': 'carla', 'created': False}
    other = service.post('/owners', {'name': 'carla', 'new_token': True}).json()
    assert set(other) == {'name', 'created', 'token'}
    assert service.client.get('/jobs', headers={'Authorization': f'Bearer {token}'}).status_code == 401
    (listed,) = [row for row in service.get('/owners').json()['owners'] if row['name'] == 'carla']
    assert (listed['max_leased'], listed['budget_dollars'], listed['spent_dollars']) == (7, 25, 0)
    assert service.ask('DELETE', '/owners/carla/token').status_code == 200
    assert service.client.get('/jobs', headers={'Authorization': f'Bearer {other["token"]}'}).status_code == 401

    printed, listing = capsys.readouterr().out, service.get('/owners').text
    assert 'operator root: create owner carla: max_leased=3, budget_dollars=25, new token' in printed
    assert 'operator root: revoke the token of owner carla' in printed
    for secret in (token, other['token'], key, digest(token).hex()):
        assert secret not in printed
        assert secret not in listing


def test_a_pool_is_created_and_its_price_is_that_of_machines_to_come(service, made_up, connection):
    made_up.node('m')
    token = service.post('/pools', {'name': 'lab', 'create': True, 'price_per_hour': 1.5, 'trusted': True}).json()['token']
    enrolled = service.client.post('/enroll', json={'machine': 'lab-1', 'gpu': 'A100', 'gpu_gb': 80}, headers={'Authorization': f'Bearer {token}'})
    assert enrolled.status_code == 200
    service.post('/pools', {'name': 'lab', 'price_per_hour': 2})
    limits = {'max_machines': 1000, 'max_per_address': 20, 'one_use': False, 'tokens': 0}
    assert connection.execute("select price_per_hour from session where node = 'lab-1'").fetchone()['price_per_hour'] == 1.5
    assert service.get('/pools').json()['pools'] == [
        {'name': 'cloud', 'price_per_hour': 0.324, 'trusted': False, 'nodes': 1, **limits},
        {'name': 'lab', 'price_per_hour': 2, 'trusted': True, 'nodes': 1, **limits},
    ]
    service.ask('DELETE', '/pools/lab/token')
    again = service.client.post('/enroll', json={'machine': 'lab-2', 'gpu': 'A100', 'gpu_gb': 80}, headers={'Authorization': f'Bearer {token}'})
    assert again.status_code == 401


@pytest.mark.parametrize(
    ('path', 'content', 'said'),
    [
        ('/owners', {'name': '../ben'}, 'letters, digits'),
        ('/owners', {'name': ''}, 'letters, digits'),
        ('/owners', {}, 'name: is required'),
        ('/owners', {'name': 'x', 'create': True, 'max_leased': -1}, 'max_leased'),
        ('/owners', {'name': 'x', 'create': True, 'max_leased': 1.5}, 'max_leased'),
        ('/owners', {'name': 'x', 'create': True, 'budget_dollars': True}, 'budget_dollars'),
        ('/owners', {'name': 'x', 'create': True, 'operator': 1}, 'operator'),
        ('/owners', {'name': 'x', 'create': True, 'budget': 3}, 'there is no such setting'),
        ('/pools', {'name': 'x', 'create': True}, 'price_per_hour'),
        ('/pools', {'name': 'x', 'create': True, 'price_per_hour': float('1e9')}, 'price_per_hour'),
    ],
)
def test_what_cannot_be_set_is_refused(path, content, said, service, connection):
    answer = service.post(path, content)
    assert answer.status_code == 422
    assert said in answer.json()['error']
    assert connection.execute("select count(*) as num from owner where name not in ('root', 'anna', 'ben')").fetchone()['num'] == 0


def test_a_typing_error_makes_no_owner_and_no_pool(service):
    before = service.get('/owners').text, service.get('/pools').text
    for path, name in (('/owners', 'ana'), ('/pools', 'clod')):
        answer = service.post(path, {'name': name, 'budget_dollars': 5} if path == '/owners' else {'name': name, 'price_per_hour': 5})
        assert (answer.status_code, '--create' in answer.json()['error']) == (404, True)
    for path, name in (('/owners', 'anna'), ('/pools', 'cloud')):
        assert service.post(path, {'name': name, 'create': True}).status_code == 409
    assert (service.get('/owners').text, service.get('/pools').text) == before
    assert [row['name'] for row in service.get('/owners?name=anna').json()['owners']] == ['anna']


def test_an_operator_cannot_lock_itself_out(service):
    assert service.post('/owners', {'name': 'root', 'operator': False}).status_code == 409
    assert service.ask('DELETE', '/owners/root/token').status_code == 409
    assert service.ask('DELETE', '/owners/nobody/token').status_code == 404
    assert service.get('/owners').status_code == 200
    assert token_of('root') not in service.get('/owners').text
