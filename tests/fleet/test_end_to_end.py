"""The whole of it: real training on real machines that are killed, a real service, PostgreSQL and S3, and what plain diffusers makes of the results.

In the same run every secret that a worker must not see is a text that is looked for in all that its machine shows.
"""

import base64
import hashlib
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tarfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import requests
import yaml
from PIL import Image

from fleet.queue.database import connected
from tests.conftest import REPOSITORY
from tests.fleet.fleet import Service, add_owner, add_pool, new_database, rows

STEPS, EVERY, FEW_STEPS = 100, 20, 6  # of jobs that are long enough to be killed, and of the others
TINY_LORA = {
    'base': str(REPOSITORY / 'yamls/shapes-lora.yaml'),
    'model': {'network': 'tiny', 'diffusion': {'prediction': 'epsilon', 'schedule': {'zero_terminal_snr': False}}},
    'adapter': {'rank': 2, 'alpha': 2},
    'data': {'streams': {'subject': {'photos': {'folder': 'photos', 'caption': 'a photo of sks'}}}},
    'batch': {'global_size': 4, 'micro_size': 4},
    'ema': {'half_life': '2ba', 'start': '0ba'},
    'train': {'duration': f'{STEPS}ba', 'cpu_threads': 1},
    'checkpoint': {'every': f'{EVERY}ba'},
    'log': {'every': 5},
}
SECRETS = {
    'the key of the bucket': 'canary-secret-key-of-the-bucket',
    'the password of the database': 'canary-password-of-the-database',
    'a photo of another owner': 'canary-in-a-photo-of-bob',
    'a signed address': 'X-Amz-Signature=',
}


@pytest.mark.timeout(600)
def test_six_jobs_on_three_machines_two_of_which_are_killed(base, postgres, s3, tmp_path, monkeypatch, request):
    logging.getLogger('werkzeug').setLevel(logging.ERROR)
    monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', SECRETS['the key of the bucket'])
    url = new_database(postgres).replace('fleet@', f'fleet:{SECRETS["the password of the database"]}@')
    with connected(url) as connection:
        tokens = {'ann': add_owner(connection, 'ann'), 'bob': add_owner(connection, 'bob'), 'pool': add_pool(connection)}
    (tmp_path / 'recipes').mkdir()
    (tmp_path / 'recipes/tiny-lora.yaml').write_text(yaml.safe_dump(TINY_LORA))
    service = Service(url, recipes=tmp_path / 'recipes', **{'lease-sec': 12, 'renew-sec': 1, 'poll-sec': 0.5, 'grace-sec': 2})
    request.addfinalizer(service.kill)
    machines = Machines(service.address, tokens['pool'], tmp_path, {**SECRETS, **{f'the token of {name}': token for name, token in tokens.items()}})
    try:
        inputs = {
            name: upload(service, tokens['ann'], content) for name, content in {'base': packed_folder(base), 'subject': packed_photos(0)}.items()
        }
        long, short = {'overrides': {'seed': 1}}, {'overrides': {'train.duration': f'{FEW_STEPS}ba'}}
        jobs = [
            {'name': 'killed', **long, 'validation': {'prompts': ['a photo of sks'], 'steps': 1}}, {'name': 'undisturbed', **long},
            {'name': 'other', 'overrides': {'seed': 2}}, *({'name': f'short-{number}', **short} for number in range(3)),
        ]  # fmt: skip
        queue(service, tokens['ann'], [{'recipe': 'tiny-lora.yaml', 'inputs': inputs, **job} for job in jobs])
        contents = {'base': packed_folder(base), 'subject': packed_photos(1, SECRETS['a photo of another owner'].encode())}
        bobs = {name: upload(service, tokens['bob'], content) for name, content in contents.items()}
        queue(service, tokens['bob'], [{'recipe': 'tiny-lora.yaml', 'name': 'bobs', 'inputs': bobs, 'needs': {'trusted': True}}])
        machines.start(3)
        for name in ('killed', 'other'):
            machines.kill(wait_for(lambda name=name: training_beyond_a_checkpoint(url, name)))
            machines.start(1)
        wait_for(lambda: not rows(url, "select 1 from job where owner = 'ann' and state in ('queued', 'leased')"), 300)
    finally:
        machines.stop()
        print(machines.logs())
    assert machines.found == []
    assert len(machines.children) >= 12  # it has seen training and export, at the least

    done = {job['name']: job for job in rows(url, "select *, id::text from job where owner = 'ann'")}
    assert {name: job['state'] for name, job in done.items()} == dict.fromkeys([*(job['name'] for job in jobs), 'killed-images'], 'done')
    attempts = {name: rows(url, 'select * from attempt where job = %s order by epoch', job['id']) for name, job in done.items()}
    for name, tries in attempts.items():
        wanted = ['lost', 'done'] if name in ('killed', 'other') else ['done']
        assert [one['ending'] for one in tries] == wanted, name
        assert done[name]['results']['epoch'] == done[name]['epoch'] == len(wanted)
    for name in ('killed', 'other'):
        assert attempts[name][1]['first_step'] >= EVERY
        assert attempts[name][1]['last_step'] == STEPS
        assert attempts[name][0]['node'] != attempts[name][1]['node']
    assert rows(url, "select epoch from job where name = 'bobs'") == [{'epoch': 0}]

    results = {name: fetched(service, tokens['ann'], job['id'], tmp_path / 'results' / name) for name, job in done.items()}
    adapters = {name: (folder / 'lora/pytorch_lora_weights.safetensors').read_bytes() for name, folder in results.items() if name != 'killed-images'}
    assert adapters['killed'] == adapters['undisturbed']
    assert len(set(adapters.values())) == 3  # another seed and another number of steps are other adapters; the three short jobs are one
    assert Image.open(results['killed-images'] / '0000.png').size == (32, 32)
    plain = drawn(base)
    images = {name: drawn(base, results[name] / 'lora') for name in ('killed', 'other')}
    assert not np.array_equal(plain, images['killed'])
    assert not np.array_equal(images['other'], images['killed'])


def test_the_search_for_secrets_finds_them(tmp_path):
    machines = Machines('http://127.0.0.1:1', 'canary-of-the-pool', tmp_path, {**SECRETS, 'the token of the pool': 'canary-of-the-pool'})
    (tmp_path / 'work').mkdir()
    (tmp_path / 'work/harmless').write_text('nothing')
    (tmp_path / 'work/file').write_bytes(b'before ' + base64.b64encode(SECRETS['a photo of another owner'].encode()) + b' after')
    (tmp_path / 'machine.log').write_text('GET /base?X-Amz-Signature=abc')
    words = ['sh', '-c', 'sleep 600 & wait', 'canary-of-the-pool']  # what it starts inherits the environment alone
    environment = {**os.environ, 'KEY': SECRETS['the key of the bucket']}
    with subprocess.Popen(['sh', '-c', '"$@" & wait', 'sh', *words], env=environment, start_new_session=True) as process:
        machines.processes['machine'] = process
        try:
            wait_for(lambda: len({text for _, text in machines.found}) == 4, 30)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            machines.stop()
    assert not any('harmless' in where for where, _ in machines.found)


def wait_for(condition, timeout_sec=180):
    deadline = time.monotonic() + timeout_sec
    while not (found := condition()):
        assert time.monotonic() < deadline, 'it never came'
        time.sleep(0.1)
    return found


def training_beyond_a_checkpoint(url, name):
    """The machine that trains the job, as soon as a checkpoint is published."""
    found = rows(url, "select node from job where name = %s and state = 'leased' and step > 0", name)
    return found[0]['node'] if found else None


def packed_folder(folder):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode='w') as tar:
        tar.add(folder, arcname='base')
    return content.getvalue()


def packed_photos(seed, comment=b''):
    content, rng = io.BytesIO(), np.random.default_rng(seed)
    with tarfile.open(fileobj=content, mode='w') as tar:
        for number in range(4):
            photo = io.BytesIO()
            Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(photo, 'PNG')
            photo.write(comment)  # behind the image's end
            entry = tarfile.TarInfo(f'{number}.png')
            entry.size = photo.tell()
            photo.seek(0)
            tar.addfile(entry, photo)
    return content.getvalue()


def upload(service, token, content):
    answer = service.ask('POST', '/inputs', token, {'sha256': hashlib.sha256(content).hexdigest(), 'bytes': len(content)}).json()
    if 'put' in answer:
        requests.put(answer['put']['url'], data=content, headers=answer['put']['headers'], timeout=30).raise_for_status()
    return answer['input']


def queue(service, token, jobs):
    answer = service.ask('POST', '/jobs', token, '\n'.join(map(json.dumps, jobs)), Idempotency_Key='key')
    assert answer.status_code == 200, answer.text


def fetched(service, token, job, folder):
    for name, file in service.ask('GET', f'/jobs/{job}/results', token).json()['files'].items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(requests.get(file['url'], timeout=30).content)
        assert hashlib.sha256(path.read_bytes()).hexdigest() == file['sha256']
    return folder


def drawn(base, adapter=None):
    """An image by diffusers alone."""
    import torch
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(base)
    pipeline.set_progress_bar_config(disable=True)
    if adapter is not None:
        pipeline.load_lora_weights(adapter, weight_name='pytorch_lora_weights.safetensors')
        assert pipeline.get_active_adapters() == ['default_0']
    noise = torch.Generator().manual_seed(0)
    return pipeline('a photo of sks', num_inference_steps=2, generator=noise, output_type='np').images


class Machines:
    """Worker processes, and a thread that looks for secrets in all that they leave and show: files of the work folder, logs, arguments and environments
    of what they start.

    Args:
        secrets: texts by what they are.
    """

    def __init__(self, server, pool_token, folder, secrets):
        self.server, self.folder, self.secrets = server, folder, secrets
        self.token_file = folder / 'pool-token'
        self.token_file.write_text(pool_token)
        self.processes: dict[str, subprocess.Popen] = {}
        self.number, self.found, self.seen, self.children = 0, [], set(), set()
        # All forms in which a text may be in a file.
        self.pattern = re.compile(b'|'.join(
            re.escape(form) for text in secrets.values() for form in (text.encode(), base64.b64encode(text.encode()).rstrip(b'='))
        ))  # fmt: skip
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._look_on)
        self.thread.start()

    def start(self, number):
        for _ in range(number):
            self.number += 1
            name = f'machine-{self.number}'
            words = ['worker', '--server', self.server, '--token-file', self.token_file, '--work', self.folder / 'work' / name]
            words += ['--machine', name, '--gpu', 'cpu', '--gpu-gb', '0', '--recipes', self.folder / 'recipes']
            with (self.folder / f'{name}.log').open('wb') as log:
                self.processes[name] = subprocess.Popen(
                    [sys.executable, '-m', 'fleet', *map(str, words)], cwd=REPOSITORY, stdout=log, stderr=log,
                    env={**os.environ, 'OMP_NUM_THREADS': '1', 'FLEET_TOKEN': self.secrets['the token of ann']},
                )  # fmt: skip

    def kill(self, name):
        self.processes[name].kill()
        self.processes.pop(name).wait()

    def stop(self):
        self.ended.set()
        self.thread.join()
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            process.wait(30)
        self.look()

    def logs(self):
        return '\n'.join(f'--- {path.name}\n{path.read_text()[-800:]}' for path in sorted(self.folder.glob('*.log')))

    def _look_on(self):
        while not self.ended.wait(0.3):
            self.look()

    def look(self):
        files = [Path(folder) / name for folder, _, names in os.walk(self.folder / 'work') for name in names]
        for path in [*files, *self.folder.glob('*.log')]:
            with suppress(OSError):  # gone in the meantime
                stat = path.lstat()
                known = (path, stat.st_mtime_ns, stat.st_size)
                if known not in self.seen and path.is_file() and not path.is_symlink():
                    self._search(path, path.read_bytes())
                    self.seen.add(known)
        workers = {process.pid for process in self.processes.copy().values()}
        for process in descendants(workers):
            with suppress(OSError):
                shown = [(name, Path(f'/proc/{process}/{name}').read_bytes()) for name in ('cmdline', 'environ')]
                if b'fleet\0worker' in shown[0][1]:
                    continue  # between fork and exec it still is the worker, whose environment is the machine's
                for name, content in shown:
                    self._search(f'{name} of {shown[0][1][:200]!r}', content)
                if b'train.py' in shown[0][1] or b'diffusion.export' in shown[0][1]:
                    self.children.add(process)

    def _search(self, where, content):
        if found := self.pattern.search(content):
            self.found.append((str(where), found[0]))


def descendants(processes):
    """Processes that these have started, and those in turn."""
    parents = {}
    for entry in os.listdir('/proc'):
        if entry.isdigit():
            with suppress(OSError):
                parents[int(entry)] = int(Path(f'/proc/{entry}/stat').read_text().rpartition(')')[2].split()[1])
    found = set(processes)
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - set(processes)
