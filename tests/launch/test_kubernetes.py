"""The manifests of launch/kubernetes are what Kubernetes accepts, and the commands in them run."""

import copy
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import yaml

from diffusion.contracts.errors import BAD_DATA, BAD_RECIPE, CRASH, NON_FINITE, PREEMPTED, STALLED, SUPERSEDED
from diffusion.demo.postgres import LocalPostgres
from tests.conftest import REPOSITORY
from tests.fleet.fake_service import TOKEN, FakeService
from tests.fleet.fleet import new_database
from tests.launch.loopback_slurm import wait_until
from tests.launch.test_ray import changed
from tests.launch.test_slurm_fleet import SLOW

FOLDER = REPOSITORY / 'launch/kubernetes'
KUBERNETES = '1.34'
POD = ('spec', 'template', 'spec')
NODE = ('spec', 'replicatedJobs', 0)
FILES = ('fleet-job.yaml', 'fleet-workers.yaml', 'fleet-server.yaml')
ALL = (*FILES, 'train-job.yaml', 'train-jobset.yaml', 'data-prep.yaml')
(IMAGE,) = re.findall(r'--tag ([\w-]+):', (REPOSITORY / 'Makefile').read_text())


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def workloads(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The document itself, the items of a List, or the Jobs that a JobSet makes."""
    if document['kind'] == 'List':
        return document['items']
    if document['kind'] == 'JobSet':
        jobs = document['spec']['replicatedJobs']
        return [{'apiVersion': 'batch/v1', 'kind': 'Job', 'metadata': {'name': job['name']}, **job['template']} for job in jobs]
    return [document]


def pod_of(name: str) -> dict[str, Any]:
    return documents(name)[0]['spec']['template']['spec']


def words_of(container: dict[str, Any]) -> list[str]:
    """Process 1, or what the image's entrypoint starts."""
    (words,) = (container[key] for key in ('command', 'args') if key in container)
    return words


def command_of(name: str, replaced: dict[str, str]) -> list[str]:
    """The command of the container with what Kubernetes, and a machine without its paths, put in the place of some texts."""
    words = []
    for word in words_of(pod_of(name)['containers'][0]):
        for text, other in replaced.items():
            word = word.replace(text, other)
        words.append(word)
    return words


def validate(document: dict[str, Any]) -> None:
    """By Kubernetes' own schemas, in which an unknown key is an error; a JobSet by the models of its API, and its Jobs by Kubernetes' schema.

    Raises:
        kubernetes_validate.ValidationError, ValueError: it is wrong; the latter from what is JobSet's.
    """
    import kubernetes_validate

    if document['kind'] == 'JobSet':
        from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

        # The models check types and pass unknown keys by: those are what they do not give back.
        kept = JobsetV1alpha2JobSet.from_dict(copy.deepcopy(document)).to_dict()
        if lost := list(differences(document, kept)):
            raise ValueError(f'JobSet does not know {", ".join(lost)}')
    for workload in workloads(document):
        kubernetes_validate.validate(workload, KUBERNETES, strict=True)


def differences(given: Any, kept: Any, place: str = '') -> Iterator[str]:
    """Where `kept` lacks or changes what is in `given`."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            yield from differences(value, kept.get(key), f'{place}.{key}')
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for number, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from differences(one, other, f'{place}[{number}]')
    elif given != kept:
        yield place


@pytest.mark.parametrize('name', ALL)
def test_kubernetes_accepts_it(name):
    for document in documents(name):
        validate(document)


@pytest.mark.parametrize(
    ('name', 'path', 'value', 'rename'),
    [
        ('fleet-job.yaml', ('spec', 'backoffLimitPerIndex'), None, 'backoffLimitPerindex'),
        ('fleet-job.yaml', ('spec', 'podFailurePolicy', 'rules', 0, 'onExitCodes', 'values'), '64', None),
        ('fleet-job.yaml', ('spec', 'podFailurePolicy', 'rules', 1, 'onPodConditions'), None, 'onPodCondition'),
        ('fleet-job.yaml', ('spec', 'template', 'spec', 'terminationGracePeriodSeconds'), '120', None),
        ('fleet-workers.yaml', ('spec', 'template', 'spec', 'containers', 0, 'env', 0, 'valueFrom', 'fieldRef', 'fieldPath'), None, 'path'),
        ('fleet-server.yaml', ('spec', 'template', 'spec', 'containers', 0, 'livenessProbe', 'tcpSocket'), None, 'tcp'),
        ('train-job.yaml', ('spec', 'backoffLimit'), None, 'backofLimit'),
        ('train-job.yaml', (*POD, 'tolerations', 1, 'effect'), None, 'effects'),
        ('train-job.yaml', (*POD, 'volumes', 3, 'emptyDir', 'medium'), None, 'media'),
        ('train-job.yaml', (*POD, 'containers', 0, 'lifecycle', 'preStop'), None, 'prestop'),
        ('data-prep.yaml', ('items', 0, 'spec', 'completions'), '64', None),
        ('data-prep.yaml', ('items', 1, 'spec', 'maxFailedIndexes'), None, 'maxFailedIndices'),
        ('train-jobset.yaml', ('spec', 'failurePolicy'), None, 'failurePolice'),
        ('train-jobset.yaml', ('spec', 'failurePolicy', 'rules', 0, 'onJobFailureMessagePatterns'), None, 'onJobFailureMessages'),
        ('train-jobset.yaml', ('spec', 'coordinator', 'jobIndex'), '0', None),
        ('train-jobset.yaml', (*NODE, 'replicas'), '4', None),
        ('train-jobset.yaml', (*NODE, 'replicas'), None, 'replica'),
        ('train-jobset.yaml', (*NODE, 'template', 'spec', 'backoffLimit'), None, 'backofLimit'),
        ('train-jobset.yaml', (*NODE, 'template', *POD, 'containers', 0, 'env', 1, 'valueFrom', 'fieldRef', 'fieldPath'), None, 'path'),
        ('train-jobset.yaml', (*NODE, 'template', *POD, 'terminationGracePeriodSeconds'), '180', None),
    ],
)
def test_what_is_misspelt_is_refused(name, path, value, rename):
    import kubernetes_validate

    with pytest.raises((kubernetes_validate.ValidationError, ValueError)):
        validate(changed(documents(name)[0], path, value, rename))


@pytest.mark.parametrize(('name', 'number'), [*((name, 0) for name in ALL), ('data-prep.yaml', 1)])
def test_every_pod_is_closed_and_its_mounts_are_there(name, number):
    document, *others = documents(name)
    document = workloads(document)[number]
    pod = document['spec']['template']['spec']
    (container,) = pod['containers']
    volumes = {volume['name']: volume for volume in pod['volumes']}
    mounted = {mount['mountPath']: volumes.pop(mount['name']) for mount in container['volumeMounts']}  # KeyError: a volume that is not there
    assert not volumes
    assert pod['securityContext']['runAsNonRoot']
    assert pod['securityContext']['fsGroup'] == pod['securityContext']['runAsGroup']  # or it could not read the secrets
    assert container['securityContext'] == {'allowPrivilegeEscalation': False, 'readOnlyRootFilesystem': True, 'capabilities': {'drop': ['ALL']}}
    assert pod['automountServiceAccountToken'] is False
    secrets = {path: volume['secret'] for path, volume in mounted.items() if 'secret' in volume}
    assert all(secret['defaultMode'] == 0o440 for secret in secrets.values())
    written = [*words_of(container), *(variable.get('value', '') for variable in container['env'])]
    for path in secrets:
        assert any(f'{path}/' in word for word in written), path  # it is read
    assert not any(one['kind'] == 'Secret' for one in (document, *others))
    labels = document['spec']['template']['metadata']['labels']
    for other in others:
        selector = other['spec']['selector']
        assert selector.get('matchLabels', selector).items() <= labels.items()


@pytest.mark.parametrize(('name', 'number'), [*((name, 0) for name in ALL), ('data-prep.yaml', 1)])
def test_every_container_is_the_image_of_the_dockerfile(name, number):
    """In its working folder, after its tini; only where a hook asks for the children of process 1 the launcher is that."""
    (container,) = workloads(documents(name)[0])[number]['spec']['template']['spec']['containers']
    assert container['image'] == f'REGISTRY/{IMAGE}:VERSION'
    assert 'workingDir' not in container
    assert ('command' in container) == ('lifecycle' in container)


@pytest.mark.parametrize('name', ['fleet-job.yaml', 'fleet-workers.yaml'])
def test_what_trains_has_a_gpu_shared_memory_and_a_place_to_write(name):
    pod = pod_of(name)
    (container,) = pod['containers']
    gpus = container['resources']['limits']['nvidia.com/gpu']
    assert f'--gpus={gpus}' in container['args']
    volumes = {volume['name']: volume for volume in pod['volumes']}
    places = {mount['mountPath']: volumes[mount['name']].get('emptyDir') for mount in container['volumeMounts']}
    assert places['/dev/shm']['medium'] == 'Memory'
    assert places['/scratch'] is not None
    assert places['/tmp'] is not None
    assert pod['terminationGracePeriodSeconds'] >= 120


def test_only_the_jobs_pods_and_the_service_know_the_bucket():
    """A worker on a stranger's machine has the token of its pool, nothing else."""
    names = {name: {volume['secret']['secretName'] for volume in pod_of(name)['volumes'] if 'secret' in volume} for name in FILES}
    assert names == {
        'fleet-job.yaml': {'fleet-bucket'},
        'fleet-workers.yaml': {'fleet-pool'},
        'fleet-server.yaml': {'fleet-database', 'fleet-bucket'},
    }


class TestJob:
    @staticmethod
    def action(code: int, disrupted: bool = False) -> str:
        """What Kubernetes does with a pod that has ended: the first rule that fits, or a failure that counts."""
        for rule in documents('fleet-job.yaml')[0]['spec']['podFailurePolicy']['rules']:
            exits = rule.get('onExitCodes')
            if exits is not None:
                assert exits['operator'] == 'In'
                assert exits['containerName'] == 'fleet'
            if code in exits['values'] if exits else disrupted and rule['onPodConditions'] == [{'type': 'DisruptionTarget', 'status': 'True'}]:
                return rule['action']
        return 'Count'

    def test_what_follows_each_ending(self):
        """As docs/reliability.md says."""
        assert {self.action(code) for code in (BAD_RECIPE, BAD_DATA, SUPERSEDED, NON_FINITE)} == {'FailIndex'}
        assert {self.action(code) for code in (CRASH, STALLED, 137, 143, 247, 1)} == {'Count'}
        assert self.action(PREEMPTED) == 'Ignore'
        assert {self.action(code, disrupted=True) for code in (137, 143, PREEMPTED)} == {'Ignore'}
        assert self.action(BAD_RECIPE, disrupted=True) == 'FailIndex'

    def test_what_the_rules_need(self):
        spec = documents('fleet-job.yaml')[0]['spec']
        assert spec['completionMode'] == 'Indexed'
        assert spec['backoffLimitPerIndex'] > 0  # FailIndex needs it
        assert spec['podReplacementPolicy'] == 'Failed'
        assert spec['template']['spec']['restartPolicy'] == 'Never'
        assert spec['maxFailedIndexes'] < spec['completions']

    @pytest.fixture
    def start(self, job_list):
        """The manifest's command for an index."""

        def begin(index: int) -> subprocess.Popen[str]:
            replaced = {
                '$(JOB_COMPLETION_INDEX)': str(index),
                '/jobs/': f'{job_list.folder}/jobs/',
                '/scratch': str(job_list.folder / f'pod-{time.time_ns()}'),
            }
            words = command_of('fleet-job.yaml', {**replaced, 's3://BUCKET/fleet': str(job_list.results)})
            return subprocess.Popen(words, cwd=REPOSITORY, env=job_list.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

        return begin

    def test_its_command_does_the_job_of_its_index(self, job_list, start):
        for index in range(2):
            job_list.add(str(index))
        ended = start(1)
        assert ended.wait(100) == 0, ended.stdout.read()
        assert (job_list.is_done('0'), job_list.is_done('1')) == (False, True)

    def test_a_wrong_job_fails_its_index(self, job_list, start):
        job_list.add('0', priority='high')
        ended = start(0)
        assert self.action(ended.wait(100)) == 'FailIndex', ended.stdout.read()

    def test_an_evicted_pod_saves_a_killed_one_resumes_and_an_older_one_is_refused(self, job_list, start):
        """Three pods of one index, the third while the second runs, as when a node that seemed dead was not."""
        job_list.add('0', SLOW, SLOW, {'steps': 1, 'every': 1})
        evicted = start(0)
        wait_until(lambda: job_list.latest('0')['step'], what='a checkpoint')
        evicted.send_signal(signal.SIGTERM)
        assert evicted.wait(pod_of('fleet-job.yaml')['terminationGracePeriodSeconds']) == PREEMPTED
        saved = job_list.latest('0')['step']
        older = start(0)
        wait_until(lambda: job_list.latest('0')['step'] > saved, what='another checkpoint')
        newer = start(0)
        assert newer.wait(100) == 0, newer.stdout.read()
        assert older.wait(100) == SUPERSEDED, older.stdout.read()
        assert self.action(SUPERSEDED) == 'FailIndex'
        assert f'resuming at step {saved:,}' in older.stdout.read()


def test_the_workers_command_enrols_under_the_name_of_the_pod(tmp_path):
    service = FakeService([])
    (tmp_path / 'token').write_text(f'{TOKEN}\n')
    replaced = {
        'https://fleet.example.com': service.url,
        '/run/secrets/fleet': str(tmp_path),
        '/scratch': str(tmp_path / 'work'),
        '$(POD_NAME)': 'fleet-workers-7',
    }
    command = command_of('fleet-workers.yaml', replaced)
    command[0] = sys.executable
    worker = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: service.asked('/claim'), what='a claim')
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(30) == 0, worker.stderr.read()
    (enrolled,) = service.asked('/enroll')
    assert (enrolled['machine'], enrolled['gpus']) == ('fleet-workers-7', 1)
    assert service.asked('/leave')
    service.shutdown()
    service.server_close()


class TestServer:
    @pytest.fixture
    def database(self):
        server = LocalPostgres()
        yield new_database(server)
        server.stop()

    def test_its_command_answers_its_probes(self, database, tmp_path, s3):
        (tmp_path / 'url').write_text(f'{database}\n')
        command = command_of('fleet-server.yaml', {'/run/secrets/database': str(tmp_path), '--port=8080': '--port=0'})
        command[0] = sys.executable
        s3.client().create_bucket(Bucket=next(word for word in command if 's3://' in word).split('/')[2])
        server = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        timer = threading.Timer(60, server.kill)  # nothing that hangs outlives the test
        timer.start()
        port = re.search(r':(\d+)$', server.stdout.readline().strip())[1]
        container = pod_of('fleet-server.yaml')['containers'][0]
        path = container['readinessProbe']['httpGet']['path']
        assert container['startupProbe']['httpGet']['path'] == path
        wait_until(lambda: self.answer(f'http://127.0.0.1:{port}{path}') == {'database': True}, 30, 'readiness')
        server.send_signal(signal.SIGTERM)
        assert server.wait(pod_of('fleet-server.yaml')['terminationGracePeriodSeconds']) in (0, -signal.SIGTERM)
        timer.cancel()

    @staticmethod
    def answer(url: str) -> dict[str, Any] | None:
        try:
            with urlopen(url, timeout=5) as answer:
                return json.load(answer)
        except (URLError, OSError):
            return None

    def test_ports_are_those_of_the_command(self):
        server, service, _ = documents('fleet-server.yaml')
        container = server['spec']['template']['spec']['containers'][0]
        (port,) = container['ports']
        assert f'--port={port["containerPort"]}' in container['args']
        assert '--host=0.0.0.0' in container['args']
        for name in ('startupProbe', 'readinessProbe', 'livenessProbe'):
            probe = container[name]
            assert probe.get('httpGet', probe.get('tcpSocket'))['port'] == port['name']
        assert service['spec']['ports'][0]['targetPort'] == port['name']

    def test_a_database_that_is_away_makes_it_unready_and_kills_nothing(self):
        """/healthz asks the database (tests/fleet/test_service.py)."""
        container = pod_of('fleet-server.yaml')['containers'][0]
        assert container['readinessProbe']['httpGet']['path'] == '/healthz'
        assert 'httpGet' not in container['livenessProbe']

    def test_one_of_two_is_always_there(self):
        server, _, budget = documents('fleet-server.yaml')
        assert server['spec']['replicas'] == 2
        assert budget['spec']['minAvailable'] == 1
        assert server['spec']['strategy']['rollingUpdate']['maxUnavailable'] == 0


def test_applying_the_workers_again_leaves_their_number():
    (workers,) = documents('fleet-workers.yaml')
    assert 'replicas' not in workers['spec']
    validate({**copy.deepcopy(workers), 'spec': {**workers['spec'], 'replicas': 3}})
