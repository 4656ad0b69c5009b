"""The commands of owners and operators against a service process, PostgreSQL and an S3 server."""

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import time

import pytest
import requests
import yaml
from PIL import Image

from fleet.__main__ import COMMANDS
from fleet.__main__ import main as fleet
from fleet.client import http
from fleet.client.following import progress
from fleet.client.submission import pack, parts_of
from fleet.jobs.spec import JobSpec
from fleet.queue.database import connected
from tests.common.s3_server import BUCKET
from tests.fleet.fleet import RECIPE, Service, add_owner, new_database, rows
from tests.fleet.test_service import Node, described


class JobBackend:
    """Runs commands as somebody; each returns (exit code, what it printed, what it said)."""

    def __init__(self, service, tokens, monkeypatch, capsys):
        self.service, self.tokens, self.monkeypatch, self.capsys = service, tokens, monkeypatch, capsys
        monkeypatch.setenv('FLEET_SERVER', service.address)
        monkeypatch.setattr(http, 'PAUSES_SEC', (0.05, 0.05))

    def run(self, *words, name='ann'):
        self.monkeypatch.setenv('FLEET_TOKEN', self.tokens[name])
        self.monkeypatch.setattr('sys.argv', ['fleet', *map(str, words)])
        self.capsys.readouterr()
        try:
            code = fleet()
        except SystemExit as ended:
            code = ended.code
        printed = self.capsys.readouterr()
        for token in self.tokens.values():
            assert token not in printed.out + printed.err
        return code, printed.out, printed.err


@pytest.fixture
def url(postgres):
    return new_database(postgres)


@pytest.fixture
def tokens(url):
    with connected(url) as connection:
        return {'ann': add_owner(connection, 'ann'), 'bob': add_owner(connection, 'bob'), 'root': add_owner(connection, 'root', is_operator=True)}


@pytest.fixture
def desk(url, s3, tokens, monkeypatch, capsys):
    service = Service(url, **{'lease-sec': 60, 'renew-sec': 20})
    desk = JobBackend(service, tokens, monkeypatch, capsys)
    desk.url = url
    yield desk
    service.kill()


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / 'timber'
    (folder / 'more').mkdir(parents=True)
    for name in ('b.jpg', 'a.jpg', 'more/c.jpg', '.DS_Store'):
        Image.new('RGB', (8, 8), (len(name), ord(name[0]), 0)).save(folder / name, 'JPEG')
    return folder


def jobs_file(tmp_path, num=3, **changes):
    file = tmp_path / 'jobs.jsonl'
    lines = [
        {'recipe': RECIPE, 'name': f'timber-{seed}', 'overrides': {'seed': seed}, 'inputs': {'subject': 'timber'}, **changes} for seed in range(num)
    ]
    file.write_text('\n'.join(map(json.dumps, lines)))
    return file


def node_of(desk, pool='cloud', name='node'):
    """A machine of a pool that this creates."""
    _, out, _ = desk.run('pools', pool, '--create', '--price-per-hour', '0.324', name='root')
    return Node(desk.service, re.search(r'shown once: (\S+)', out)[1], name)


def finish(node, lease, **files):
    for name, content in files.items():
        assert node.put(lease, None, name.replace('_', '.'), content) == 200
    described_files = {name.replace('_', '.'): described(content) for name, content in files.items()}
    assert node.of(lease, 'end', exit_code=0, step=1400, files=described_files) == 200


def test_from_a_folder_of_photos_to_results(desk, tmp_path, photos, s3):
    code, out, said = desk.run('submit', jobs_file(tmp_path, 3))
    ids = out.split()
    assert (code, len(ids)) == (0, 3)
    assert '3 of 3 jobs submitted' in said
    assert said.count('uploaded') == 1  # one folder, once
    (key,) = [key for key in s3.object_names() if '/inputs/' in key]
    content = s3.client().get_object(Bucket=BUCKET, Key=key)['Body'].read()
    assert hashlib.sha256(content).hexdigest() in key
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        assert tar.getnames() == ['a.jpg', 'b.jpg', 'more/c.jpg']

    node = node_of(desk)
    lease = node.claim()
    assert lease['job'] == ids[0]
    assert requests.get(lease['inputs']['subject']['url'], timeout=5).content == content
    code, out, _ = desk.run('status')
    assert '0 of 3 jobs done, 2 waiting, 1 on machines' in out
    assert 'timber-0' in out
    finish(node, lease, lora_safetensors=b'adapter', log_json=b'{}')

    code, out, _ = desk.run('fetch', 'timber-0', tmp_path / 'out')
    assert code == 0
    assert (tmp_path / 'out/lora.safetensors').read_bytes() == b'adapter'
    assert desk.run('fetch', ids[0], tmp_path / 'out')[0] == 0  # what is there is left
    (tmp_path / 'out/log.json').write_text('mine')
    code, _, said = desk.run('fetch', ids[0], tmp_path / 'out')
    assert (code, 'another file is there' in said) == (2, True)
    assert (tmp_path / 'out/log.json').read_text() == 'mine'
    (tmp_path / 'full').mkdir()
    (tmp_path / 'full/thesis.txt').write_text('mine')
    code, _, said = desk.run('fetch', ids[0], tmp_path / 'full')
    assert (code, 'holds 1 file of something else, such as thesis.txt' in said) == (2, True)
    assert [path.name for path in (tmp_path / 'full').iterdir()] == ['thesis.txt']
    assert 'has no results' in desk.run('fetch', ids[1], tmp_path / 'other')[2]


def test_the_same_command_twice_is_the_same_jobs(desk, tmp_path, photos):
    file = jobs_file(tmp_path, 120)
    first = desk.run('submit', file)
    assert '50 of 120 jobs submitted' in first[2]
    for path in photos.rglob('*'):
        os.utime(path, (1e9, 1e9))  # not what is in them
    second, third = desk.run('submit', file), desk.run('submit', file, '--key', 'again')
    assert first[1] == second[1]
    assert len(first[1].split()) == len(set(first[1].split())) == 120
    assert not set(first[1].split()) & set(third[1].split())
    assert rows(desk.service.url, 'select count(*) as num from job')[0]['num'] == 240


def test_a_yaml_job_and_its_keys(desk, tmp_path, photos):
    file = tmp_path / 'job.yaml'
    file.write_text(yaml.safe_dump({'recipe': RECIPE, 'inputs': {'subject': {'path': 'timber'}}, 'overrides': {'seed': 7}}))
    assert desk.run('submit', file)[0] == 0
    _, out, _ = desk.run('submit', '--keys')
    for name in JobSpec.__dataclass_fields__:
        assert re.search(rf'^{name}:', out, re.MULTILINE), name
    assert re.search(r'^  dollars: 1\.0 +# Dollars for machines\.$', out, re.MULTILINE)
    assert max(map(len, out.splitlines())) < 250


@pytest.mark.parametrize('command', [('submit',), ('submit', '--check')])
def test_all_mistakes_are_said_at_once(command, desk, tmp_path, photos):
    file = tmp_path / 'jobs.jsonl'
    lines = [
        {'recipe': RECIPE, 'inputs': {'subject': 'timber'}, 'overrides': {'train.duraton': '5ba'}},
        {'recipe': 'yamls/none.yaml'},
        {'recipe': RECIPE, 'inputs': {'subject': 'timber'}, 'nmae': 'x'},
    ]
    file.write_text('\n'.join(map(json.dumps, lines)))
    code, out, said = desk.run(*command, file)
    assert (code, out) == (2, '')
    for text in ('train.duraton', "no 'yamls/none.yaml'", 'nmae'):
        assert text in said
    assert rows(desk.service.url, 'select count(*) as num from job')[0]['num'] == 0


def test_a_check_needs_no_service(desk, tmp_path, photos, monkeypatch):
    monkeypatch.chdir(tmp_path)  # recipes are those of the installation
    monkeypatch.delenv('FLEET_SERVER')
    assert desk.run('submit', '--check', jobs_file(tmp_path))[:2] == (0, '3 jobs, and no mistake in them\n')
    code, _, said = desk.run('submit', '--check', jobs_file(tmp_path, inputs={'subject': 'nowhere'}))
    assert (code, said.count('nowhere is not there')) == (2, 3)
    assert 'which service?' in desk.run('submit', jobs_file(tmp_path))[2]


@pytest.mark.parametrize(
    ('content', 'said'),
    [('', 'there is no job in it'), ('[1]', 'JSON'), ('{"recipe": "x", "inputs": {"a": 3}}', 'inputs.a: a path'), ('{"recipe":', 'JSON')],
)
def test_a_file_that_holds_no_jobs(content, said, desk, tmp_path):
    (tmp_path / 'jobs.jsonl').write_text(content)
    code, _, err = desk.run('submit', tmp_path / 'jobs.jsonl')
    assert code == 2
    assert 'jobs.jsonl' in err
    assert said.lower() in err.lower()


def test_watch_ends_when_all_have(desk, tmp_path, photos):
    ids = desk.run('submit', jobs_file(tmp_path, 2))[1].split()
    node = node_of(desk)
    finish(node, node.claim(), a_txt=b'a')
    assert desk.run('cancel', 'timber-1')[1] == '1 job cancelled\n'
    code, out, _ = desk.run('watch', *ids, '--every-sec', '0.1')
    assert code == 3
    assert 'timber-1 cancelled: by ann' in out
    assert '1 of 2 jobs done, 1 cancelled, $' in out
    assert desk.run('watch', ids[0])[0] == 0
    assert desk.run('watch')[:2] == (0, 'no job waits or runs\n')
    assert desk.run('retry', 'timber-1')[1] == '1 job back in the queue\n'
    assert 'only failed and cancelled ones' in desk.run('retry', 'timber-1')[2]
    assert desk.run('cancel', '--queued')[1] == '1 job cancelled\n'
    assert desk.run('cancel', ids[0])[1] == '0 jobs cancelled; 1 job had ended: done\n'


def test_one_bad_line_hides_no_other(desk, tmp_path, photos):
    job = f'{{"recipe": "{RECIPE}", "inputs": {{"subject": "timber"}}'
    lines = ['{"recipe":', f'{job}, "nmae": 1}}', f'{job}, "priority": 1, "priority": 2}}', f'{job}, "overrides": {{"train.duraton": "5ba"}}}}']
    (tmp_path / 'jobs.jsonl').write_text('\n'.join(lines))
    for words in (('submit',), ('submit', '--check')):
        code, _, said = desk.run(*words, tmp_path / 'jobs.jsonl')
        assert code == 2
        for number, text in enumerate(('Expecting value', 'nmae', "the key 'priority' comes twice", 'train.duraton'), 1):
            assert any(f'jobs.jsonl:{number}: ' in line and text in line for line in said.splitlines()), text


def test_a_check_refuses_what_the_service_refuses(desk, tmp_path, photos):
    file = jobs_file(tmp_path, 1, notify={'webhook': 'http://example.org/'})
    for words in (('submit',), ('submit', '--check')):
        code, _, said = desk.run(*words, file)
        assert (code, 'must begin with https://' in said) == (2, True)


def test_photos_are_looked_at_before_they_are_uploaded(desk, tmp_path, photos, s3):
    file = jobs_file(tmp_path, 1)
    (photos / 'd.png').write_bytes(b'not a photo')
    (photos / 'e.jpg').write_bytes(b'')
    code, _, said = desk.run('submit', file)
    assert code == 2
    for name in ('d.png', 'e.jpg'):
        assert f'{photos / name}: not a readable JPEG, PNG or WebP' in said
    (tmp_path / 'words').mkdir()
    (tmp_path / 'words/a.txt').write_text('no photo')
    (tmp_path / 'empty.tar').touch()
    for name, wrong in (('words', 'there is no image in it'), ('empty.tar', 'neither a tar nor a zip'), ('words/a.txt', 'neither a tar nor a zip')):
        code, _, said = desk.run('submit', jobs_file(tmp_path, 1, inputs={'subject': name}))
        assert (code, wrong in said) == (2, True), name
    assert not s3.object_names()


def test_nothing_is_said_to_be_uploaded_twice(desk, tmp_path, photos):
    assert '1 of 1 input uploaded' in desk.run('submit', jobs_file(tmp_path, 1))[2]
    said = desk.run('submit', jobs_file(tmp_path, 1))[2]
    assert 'nothing to upload: 1 input of these jobs is there already' in said
    assert 'uploaded' not in said


def test_packed_photos_go_when_it_is_ended(desk, tmp_path, photos, s3, monkeypatch):
    scratch = tmp_path / 'scratch'
    scratch.mkdir()
    s3.proxy.fails = lambda method, path: method == 'PUT'  # it waits between its tries
    environment = {**os.environ, 'FLEET_TOKEN': desk.tokens['ann'], 'TMPDIR': str(scratch)}
    process = subprocess.Popen([sys.executable, '-m', 'fleet', 'submit', jobs_file(tmp_path, 1)], env=environment)
    deadline = time.monotonic() + 30
    while not list(scratch.glob('*/*.tar')):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.terminate()
    assert process.wait(30) == 143
    s3.proxy.fails = lambda method, path: False
    assert not list(scratch.iterdir())


def test_two_jobs_of_one_name_are_told_by_their_numbers(desk, tmp_path, photos):
    desk.run('submit', jobs_file(tmp_path, 2, name='timber'))
    code, _, said = desk.run('status', 'timber')
    assert (code, said) == (2, 'timber: 2 jobs of that name or number; give the number: 1, 2\n')
    assert 'number 2 of ann' in (out := desk.run('status', '2')[1])
    assert 'it waits: no machine is here' in out
    finish(node := node_of(desk), node.claim(), a_txt=b'a')
    assert re.search(r'\| timber \| +1 \| ann', desk.run('bill')[1])


def test_an_input_that_the_storage_refuses_is_named(desk, tmp_path, photos, s3):
    for status, remedy in ((404, 'its bucket is missing'), (403, 'is the clock')):
        s3.proxy.fails = lambda method, path, status=status: status if method == 'PUT' else False
        code, _, said = desk.run('submit', jobs_file(tmp_path, 1))
        s3.proxy.fails = lambda method, path: False
        assert (code, f'{photos}: the storage refuses it: HTTP {status}; {remedy}' in said) == (2, True)


def test_others_have_no_jobs(desk, tmp_path, photos):
    (job,) = desk.run('submit', jobs_file(tmp_path, 1))[1].split()
    for words in (('status', job), ('fetch', job, tmp_path / 'x'), ('cancel', job), ('retry', job), ('watch', job)):
        code, out, said = desk.run(*words, name='bob')
        assert (code, out) == (2, ''), words
        assert f'there is no job {job}' in said
    assert desk.run('status', 'timber-0', name='bob')[0] == 2
    assert 'timber-0' in desk.run('status', job, name='root')[1]


def test_operators_commands(desk, tmp_path, photos):
    desk.run('submit', jobs_file(tmp_path, 1))
    node = node_of(desk)
    node.claim()
    assert re.search(r'\| node +\| cloud +\| live ', desk.run('nodes', name='root')[1])
    assert desk.run('drain', 'node', name='root')[1] == 'node is draining\n'
    assert desk.run('ban', 'node', '--reason', 'slow', name='root')[1] == 'node is quarantined\n'
    assert node.claim() == 410
    assert 'slow' in desk.run('nodes', name='root')[1]
    assert desk.run('readmit', 'node', name='root')[1] == 'node is live\n'
    code, _, said = desk.run('ban', 'other', name='root')
    assert (code, said) == (2, 'there is no machine other; `nodes` lists them\n')
    _, out, _ = desk.run('owners', 'carla', '--create', '--budget-dollars', '0.001', name='root')
    assert re.search(r'its token, shown once: fleet-owner-\S{43}\nthe key of its notices, shown once: [0-9a-f]{64}\n', out)
    assert 'shown' not in desk.run('owners', 'carla', '--max-leased', '3', name='root')[1]
    assert re.search(r'\| carla +\|', desk.run('owners', name='root')[1])
    code, out, _ = desk.run('owners', 'carla', name='root')
    assert (code, out.count('\n'), '0.0010' in out, 'changed' in out) == (0, 3, True, False)
    assert 'say --create' in desk.run('owners', 'carlo', name='root')[2]
    assert 'say --create' in desk.run('owners', 'carlo', '--max-leased', '3', name='root')[2]
    assert 'say --create' in desk.run('pools', 'clod', '--price-per-hour', '1', name='root')[2]
    assert 'cloud' in desk.run('pools', 'cloud', name='root')[1]
    for price in ('nan', 'inf', '-1'):
        code, _, said = desk.run('pools', 'cloud', f'--price-per-hour={price}', name='root')
        assert (code, 'is not a number' in said or 'is below 0' in said) == (2, True)
    assert 'opens nothing any more' in desk.run('owners', 'carla', '--revoke', name='root')[1]
    assert re.search(r'\| cloud +\| +0\.3240 ', desk.run('pools', name='root')[1])
    assert 'as a provider bills' in desk.run('bill', '--since', '2026-01-01', name='root')[1]
    assert 'provider' not in desk.run('bill')[1]
    assert json.loads(desk.run('bill', '--json', name='root')[1])['total']['attempts'] == 1
    code, out, _ = desk.run('scale', '--command', 'touch {replicas}', '--max', '4', '--dry-run', name='root')
    assert (code, 'would run: touch 1' in out) == (0, True)
    for words in (('nodes',), ('owners',), ('pools',), ('ban', 'node'), ('scale', '--command', 'x {replicas}', '--max', '1', '--once')):
        code, _, said = desk.run(*words)
        assert (code, 'ann is not an operator; this command is for operators' in said) == (2, True), words


def test_errors_are_for_people(desk, tokens, monkeypatch, tmp_path):
    tokens['nobody'] = 'fleet-owner-unknown'
    code, _, said = desk.run('status', name='nobody')
    assert (code, 'the token is not known' in said) == (2, True)
    assert 'no token: set FLEET_TOKEN' in desk.run('status', '--token-file', os.devnull)[2]
    (tmp_path / 'two').write_text('one\ntwo')
    assert 'two: no token: a token is one line' in desk.run('status', '--token-file', tmp_path / 'two')[2]
    assert 'No such file' in desk.run('status', '--token-file', tmp_path / 'none')[2]
    assert 'is an address such as' in desk.run('status', '--server', 'fleet.example.org')[2]
    code, _, said = desk.run('status', '--server', 'http://user:geheim@127.0.0.1:1')
    assert (code, 'geheim' in said) == (2, False)
    monkeypatch.setattr('fleet.client.http.PAUSES_SEC', (0.01,))
    begin = time.monotonic()
    code, _, said = desk.run('status', '--server', 'http://127.0.0.1:1')
    assert (code, 'does not answer' in said) == (3, True)
    assert said.count('http://127.0.0.1:1 does not answer; tried again for') == 1
    assert time.monotonic() - begin < 30


def test_a_token_in_netrc_does_not_take_its_place(desk, tmp_path, monkeypatch):
    (tmp_path / 'netrc').write_text('machine 127.0.0.1 login somebody password else\n')
    monkeypatch.setenv('NETRC', str(tmp_path / 'netrc'))
    assert desk.run('status')[0] == 0


def test_a_folder_is_packed_the_same_anywhere(tmp_path, photos):
    first = pack(photos, tmp_path / 'scratch')
    copy = tmp_path / 'elsewhere' / 'other-name'
    (copy / 'more').mkdir(parents=True)
    for name in ('more/c.jpg', 'b.jpg', 'a.jpg'):
        (copy / name).write_bytes((photos / name).read_bytes())
        (copy / name).chmod(0o600)
    assert pack(copy, tmp_path / 'scratch').sha256 == first.sha256
    (copy / 'a.jpg').write_bytes(b'another')
    assert pack(copy, tmp_path / 'scratch').sha256 != first.sha256


def test_parts_are_what_a_request_may_carry():
    assert [len(part) for part in parts_of(['x'] * 120)] == [50, 50, 20]
    assert [len(part) for part in parts_of(['x' * 400_000] * 5)] == [2, 2, 1]
    assert list(parts_of([])) == []


def test_progress_counts_every_state():
    states = ['done'] * 3 + ['leased', 'queued', 'failed']
    jobs = [{'state': state, 'dollars': 0.5} for state in states]
    assert progress(jobs) == '3 of 6 jobs done, 1 waiting, 1 on machines, 1 failed, $3.00'


@pytest.mark.parametrize('command', sorted(COMMANDS))
def test_every_command_explains_itself(command, monkeypatch, capsys):
    monkeypatch.setattr('sys.argv', ['fleet', command, '--help'])
    with pytest.raises(SystemExit) as ended:
        fleet()
    assert ended.value.code == 0
    assert f'python -m fleet {command}' in capsys.readouterr().out


def test_a_grid_is_a_job_for_each_combination_and_a_group(desk, tmp_path, photos):
    code, out, said = desk.run('submit', jobs_file(tmp_path, 1), '--grid', 'optimizer.lr=1e-4,5e-5', 'adapter.rank=4,8,16')
    assert (code, len(out.split())) == (0, 6)
    assert f'compare them at {desk.service.address}/groups/timber-0/page' in said
    jobs = rows(desk.url, "select name, spec->'overrides' as overrides, spec->>'group' as group from job order by number")
    assert [job['name'] for job in jobs][:4] == [f'timber-0-lr0.0001-rank{rank}' for rank in (4, 8, 16)] + ['timber-0-lr5e-05-rank4']
    assert jobs[-1]['overrides'] == {'seed': 0, 'optimizer.lr': 5e-5, 'adapter.rank': 16}
    assert {job['group'] for job in jobs} == {'timber-0'}
    assert desk.run('submit', jobs_file(tmp_path, 1), '--grid', 'optimizer.lr=1e-4,5e-5', 'adapter.rank=4,8,16')[1] == out  # each once
    for grid, mistake in ((['optimizer.lr'], 'write a key of the overrides'), (['a=[1'], '--grid a=[1'), (['seed=' + ','.join('1' * 1001)], '1,001')):
        code, _, said = desk.run('submit', jobs_file(tmp_path, 1), '--grid', *grid)
        assert (code, mistake in said) == (2, True), said
