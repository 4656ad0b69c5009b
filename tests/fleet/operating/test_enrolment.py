"""Enrolment: who may, how many and under which name; and that a machine gets jobs of the recipes that it has as the service has them."""

import pytest

from fleet.queue.leases import LeaseSettings
from fleet.service import gate
from tests.fleet.fleet import DIGESTS
from tests.fleet.operating.made_up import RECIPE, token_of


@pytest.fixture
def enrol(service, made_up, connection):
    """Enrol a machine with a token (default: the pool's); returns the answer."""
    connection.execute("update pool set token_hash = %s where name = 'cloud'", [gate.digest('pool')])

    def ask(name, token='pool', **said):
        content = {'machine': name, 'gpu': 'g', 'gpu_gb': 24, 'recipes': DIGESTS, **said}
        return service.client.post('/enroll', json=content, headers={'Authorization': f'Bearer {token}'})

    return ask


def claim(service, answer):
    return service.client.post('/claim', json={}, headers={'Authorization': f'Bearer {answer.json()["token"]}'})


def test_a_name_alone_takes_no_machines_place(service, enrol, made_up, connection):
    made_up.job('anna')
    first = enrol('m')
    assert claim(service, first).status_code == 200
    refused = enrol('m')
    assert (refused.status_code, refused.json()['error'][:18]) == (409, 'machine: m is here')
    assert 0 < int(refused.headers['Retry-After']) <= LeaseSettings().lease_sec
    assert connection.execute('select state, epoch from job').fetchone() == {'state': 'leased', 'epoch': 1}
    again = enrol('m', first.json()['token'])  # the same machine: its worker was started again
    assert again.status_code == 200
    assert claim(service, again).json()['epoch'] == 2
    assert enrol('m', first.json()['token']).status_code == 401  # not the last one any more
    assert enrol('other', again.json()['token']).status_code == 401


def test_a_machine_that_is_silent_for_a_lease_has_lost_its_name(enrol, connection):
    token = enrol('m').json()['token']
    connection.execute("update session set last_seen = now() - interval '125 s'")
    connection.execute("update node set last_seen = now() - interval '125 s'")
    other = enrol('m')
    assert other.status_code == 200
    assert enrol('m', token).status_code == 401


def test_a_machine_whose_session_has_ended_comes_again_with_its_last_token(service, enrol, connection):
    service.post('/pools', {'name': 'cloud', 'one_use': True})
    token = service.post('/pools/cloud/tokens', {'num': 1}).json()['tokens'][0]
    first = enrol('m', token)
    connection.execute('update session set ended = now()')
    assert claim(service, first).status_code == 401
    assert enrol('m', first.json()['token']).status_code == 200


def test_a_token_of_its_own_lets_in_one_machine_once(service, enrol, connection, capsys):
    assert service.post('/pools', {'name': 'cloud', 'one_use': True}).status_code == 200
    refused = enrol('m')
    assert refused.status_code == 401
    assert 'pools cloud --tokens N' in refused.json()['error']
    tokens = service.post('/pools/cloud/tokens', {'num': 3}).json()['tokens']
    assert len(set(tokens)) == 3
    assert [pool['tokens'] for pool in service.get('/pools').json()['pools']] == [3]
    assert enrol('a', tokens[0]).status_code == 200
    assert enrol('b', tokens[0]).status_code == 401
    assert enrol('b', tokens[1]).status_code == 200
    service.ask('DELETE', '/pools/cloud/token')
    assert enrol('c', tokens[2]).status_code == 401
    assert not any(token in capsys.readouterr().out for token in tokens)
    assert service.post('/pools/none/tokens', {'num': 1}).status_code == 404
    assert service.post('/pools/cloud/tokens', {'num': 1}, 'anna').status_code == 403


def test_a_refused_enrolment_uses_no_token_up(service, enrol, made_up):
    made_up.pool('other')
    made_up.node('m', pool='other')
    (token,) = service.post('/pools/cloud/tokens', {'num': 1}).json()['tokens']
    assert enrol('m', token).status_code == 409
    assert enrol('n', token).status_code == 200


def test_a_hundred_invented_names_are_twenty_machines(service, enrol, connection):
    """100 names with one pool's token took 100 of 100 jobs and the addresses of all their photos in 4.9 s."""
    answers = [enrol(f'm{i}') for i in range(100)]
    assert [answer.status_code for answer in answers] == [200] * 20 + [409] * 80
    assert 'pools cloud --max-per-address N' in answers[-1].json()['error']
    connection.execute("update node set state = 'quarantined' where name in ('m0', 'm1')")
    connection.execute("update session set ended = now() where node in ('m0', 'm1', 'm2')")
    assert [enrol(f'n{i}').status_code for i in range(2)] == [200, 409]  # a banned machine's next name counts
    service.post('/pools', {'name': 'cloud', 'trusted': True})
    assert enrol('n2').status_code == 200
    service.post('/pools', {'name': 'cloud', 'max_machines': 19})
    full = enrol('n3')
    assert (full.status_code, 'pools cloud --max-machines N' in full.json()['error']) == (409, True)


def test_a_machine_of_another_installation_gets_no_job_of_its_recipes(service, enrol, made_up, connection):
    """An older image, whose folder lacked the recipe, failed 12 of 12 healthy jobs in 3 s and went on."""
    job = made_up.job('anna')
    other = {**DIGESTS, RECIPE: '0' * 64}
    lacks = {name: sha256 for name, sha256 in DIGESTS.items() if name != RECIPE}
    for name, recipes in (('differs', other), ('lacks', lacks), ('says nothing', {})):
        answer = enrol(name.replace(' ', '-'), recipes=recipes, version='0.0.9')
        assert RECIPE in answer.json()['other_recipes']
        assert claim(service, answer).status_code == 204
    assert [RECIPE in node['other_recipes'] for node in service.get('/nodes').json()['nodes']] == [True] * 3
    assert {node['version'] for node in service.get('/nodes').json()['nodes']} == {'0.0.9'}
    assert f'no machine here has the recipe {RECIPE} as the service has it' in service.get(f'/jobs/{job}').json()['waits']
    good = enrol('good')
    assert good.json()['other_recipes'] == []
    assert claim(service, good).json()['recipe'] == RECIPE


def test_a_claimed_speed_is_no_more_than_the_steps_by_the_services_clock(service, enrol, made_up, connection, monkeypatch):
    monkeypatch.setattr('fleet.service.machines._confirm_uploads', lambda *_: None)
    made_up.job('anna')
    token = enrol('m').json()['token']
    headers = {'Authorization': f'Bearer {token}'}
    lease = service.client.post('/claim', json={}, headers=headers).json()
    said = {'epoch': 1, 'step': 1400, 'steps_per_sec': 1e6}
    assert service.client.post(f'/jobs/{lease["job"]}/renew', json=said, headers=headers).status_code == 200
    connection.execute("update attempt set started = now() - interval '1000 s', progressed = now() - interval '700 s'")
    files = {'f.txt': {'sha256': '0' * 64, 'bytes': 1}}
    ended = service.client.post(f'/jobs/{lease["job"]}/end', json={'epoch': 1, 'step': 1400, 'exit_code': 0, 'files': files}, headers=headers)
    assert ended.status_code == 200, ended.text
    assert connection.execute('select steps_per_sec as pace from attempt').fetchone()['pace'] == pytest.approx(2.0, rel=0.01)


def test_who_may_not_make_tokens(service):
    assert service.client.post('/pools/cloud/tokens', json={'num': 1}, headers={'Authorization': f'Bearer {token_of("ben")}'}).status_code == 403
