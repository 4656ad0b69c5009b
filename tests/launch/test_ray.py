"""The files of launch/ray are what Ray, EC2 and Kubernetes accept, keep the token private, and name the resources that documents name."""

import copy
import json
import os
import runpy
import subprocess
from pathlib import Path

import botocore.session
import jsonschema
import pytest
import setuptools
import yaml
from botocore.validate import ParamValidator
from packaging.requirements import Requirement

from tests.conftest import REPOSITORY

FOLDER = REPOSITORY / 'launch/ray'
KUBERNETES = '1.34'
RESOURCE = 'A10G'  # what encoders ask for, on either cluster


def changed(document, path, value, rename=None):
    """A copy with another value at a path; with `rename`, with the key itself misspelt."""
    document = copy.deepcopy(document)
    *above, last = path
    place = document
    for step in above:
        place = place[step]
    if rename:
        place[rename] = place.pop(last)
    else:
        place[last] = value
    return document


class TestClusterLauncher:
    @pytest.fixture(scope='class')
    def cluster(self):
        return yaml.safe_load((FOLDER / 'cluster.yaml').read_text())

    @staticmethod
    def validate(cluster):
        """By the schema that Ray ships, and its own rules for what the schema cannot say."""
        from ray.autoscaler._private.util import validate_config

        validate_config({'cluster_synced_files': [], **cluster})  # which `ray up` fills in

    @staticmethod
    def flaws_of_machine(node_config):
        """What EC2's interface does not know; Ray itself turns SubnetIds into one SubnetId."""
        shape = botocore.session.get_session().get_service_model('ec2').operation_model('RunInstances').input_shape
        request = {'MinCount': 1, 'MaxCount': 1, **node_config}
        request['SubnetId'] = request.pop('SubnetIds')[0]
        return ParamValidator().validate(request, shape).generate_report() or sorted(request.keys() - shape.members)

    def test_ray_accepts_it(self, cluster):
        self.validate(cluster)

    @pytest.mark.parametrize(
        ('path', 'value', 'rename'),
        [
            (('available_node_types',), None, 'available_node_type'),
            (('available_node_types', 'encoder', 'min_workers'), None, 'min_worker'),
            (('available_node_types', 'encoder', 'min_workers'), '4', None),
            (('available_node_types', 'encoder', 'resources', RESOURCE), 0.5, None),
            (('setup_commands',), 'pip install ray', None),
            (('head_node_type',), 'heads', None),
            (('max_workers',), 3, None),  # less than the types ask for
        ],
    )
    def test_ray_refuses_what_is_misspelt(self, cluster, path, value, rename):
        with pytest.raises((jsonschema.ValidationError, ValueError)):
            self.validate(changed(cluster, path, value, rename))

    def test_ec2_knows_every_key_of_every_machine(self, cluster):
        for name, machine in cluster['available_node_types'].items():
            assert not self.flaws_of_machine(machine['node_config']), name
        wrong = changed(cluster['available_node_types']['encoder']['node_config'], ('InstanceMarketOptions',), None, 'InstanceMarketOption')
        assert self.flaws_of_machine(wrong)
        wrong = changed(cluster['available_node_types']['encoder']['node_config'], ('BlockDeviceMappings', 0, 'Ebs', 'VolumeSize'), '200')
        assert self.flaws_of_machine(wrong)

    def test_machines_use_roles_and_do_not_hand_them_on(self, cluster):
        for machine in cluster['available_node_types'].values():
            config = machine['node_config']
            assert config['IamInstanceProfile']
            assert config['MetadataOptions']['HttpTokens'] == 'required'
            assert config['SecurityGroupIds']  # without them Ray makes a group that lets everybody in on port 22
            assert all(disk['Ebs']['Encrypted'] for disk in config['BlockDeviceMappings'])

    def test_only_encoders_offer_the_resource_and_trainers_offer_nothing(self, cluster):
        types = cluster['available_node_types']
        assert {name for name, machine in types.items() if machine['resources'].get(RESOURCE)} == {'encoder'}
        assert types['trainer']['resources'] == {'CPU': 0, 'GPU': 0}
        assert types['head']['resources'] == {'CPU': 0}
        spot = {name for name, machine in types.items() if machine['node_config'].get('InstanceMarketOptions') == {'MarketType': 'spot'}}
        assert spot == {'cpu', 'encoder'}  # what may vanish without ending a run
        assert sum(machine.get('max_workers', 0) for machine in types.values()) == cluster['max_workers']

    def test_the_token_comes_as_a_private_file_and_ray_starts_with_it(self, cluster):
        assert cluster['file_mounts']['/home/ubuntu/.ray/auth_token'] == '~/.ray/auth_token'
        for command in [*cluster['head_start_ray_commands'], *cluster['worker_start_ray_commands']]:
            assert 'ray stop' in command or command.startswith('. ~/.profile;')

    def test_its_commands_prepare_a_machine(self, cluster, tmp_path):
        """Those that need neither Ray nor a network, twice, as `ray up` does it after a change."""
        home = tmp_path / 'home'
        (home / '.ray').mkdir(parents=True)
        (home / '.ray/auth_token').write_text('secret')
        (home / '.ray/auth_token').chmod(0o644)
        head = subprocess.run(['git', 'rev-parse', 'HEAD'], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.strip()
        subprocess.run(['git', 'archive', '--output', home / 'code.tar', 'HEAD'], cwd=REPOSITORY, check=True)
        (home / '.profile').touch()
        environment = {'HOME': str(home), 'PATH': os.environ['PATH']}
        for _ in range(2):
            for command in [*cluster['initialization_commands'], *cluster['setup_commands']]:
                if 'pip' not in command:
                    subprocess.run(['bash', '-ec', command], env=environment, check=True)
        assert (home / '.ray/auth_token').stat().st_mode & 0o777 == 0o600
        assert (home / 'recipes/setup.py').read_text() == self.committed('setup.py')
        assert len((home / '.profile').read_text().splitlines()) == 2
        shown = '. ~/.profile; echo $RAY_AUTH_MODE $RAY_USAGE_STATS_ENABLED $GIT_COMMIT $PATH'
        mode, statistics, commit, path = subprocess.run(
            ['bash', '-c', shown], env=environment, capture_output=True, text=True, check=True
        ).stdout.split()
        assert (mode, statistics, commit) == ('token', '0', head)
        assert path.startswith(f'{home}/venv/bin:')

    @staticmethod
    def committed(path):
        return subprocess.run(['git', 'show', f'HEAD:{path}'], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout

    def test_every_command_is_shell(self, cluster):
        for key in ('initialization_commands', 'setup_commands', 'head_start_ray_commands', 'worker_start_ray_commands'):
            for command in cluster[key]:
                subprocess.run(['bash', '-n'], input=command, text=True, check=True)
        with pytest.raises(subprocess.CalledProcessError):
            subprocess.run(['bash', '-n'], input='test -x (', text=True, check=True, capture_output=True)


class TestKubernetes:
    @pytest.fixture(scope='class')
    def documents(self):
        return list(yaml.safe_load_all((FOLDER / 'kuberay.yaml').read_text()))

    @pytest.fixture(scope='class')
    def cluster(self, documents):
        return documents[0]

    @staticmethod
    def groups(cluster):
        return {'head': cluster['spec']['headGroupSpec'], **{group['groupName']: group for group in cluster['spec']['workerGroupSpecs']}}

    @classmethod
    def validate(cls, cluster):
        """The RayCluster by our list of its fields, its pods by Kubernetes' own schema, in which an unknown key is an error."""
        import kubernetes_validate

        schema = yaml.safe_load(Path(__file__).with_name('raycluster.schema.yaml').read_text())
        jsonschema.validate(cluster, schema, cls=jsonschema.Draft202012Validator)
        for name, group in cls.groups(cluster).items():
            pod = {'apiVersion': 'v1', 'kind': 'PodTemplate', 'metadata': {'name': name}, 'template': group['template']}
            kubernetes_validate.validate(pod, KUBERNETES, strict=True)

    def test_kubernetes_accepts_it(self, documents, cluster):
        import kubernetes_validate

        self.validate(cluster)
        (policy,) = documents[1:]
        kubernetes_validate.validate(policy, KUBERNETES, strict=True)
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(changed(policy, ('spec', 'ingress'), None, 'ingres'), KUBERNETES, strict=True)

    @pytest.mark.parametrize(
        ('path', 'value', 'rename'),
        [
            (('spec', 'headGroupSpec'), None, 'headGroup'),
            (('spec', 'workerGroupSpecs', 1, 'replicas'), '4', None),
            (('spec', 'workerGroupSpecs', 1, 'maxReplicas'), None, 'maxReplica'),
            (('spec', 'headGroupSpec', 'rayStartParams', 'num-cpus'), 0, None),
            (('spec', 'headGroupSpec', 'rayStartParams', 'num-cpus'), None, 'num_cpus'),
            (('spec', 'headGroupSpec', 'template', 'spec', 'securityContext'), None, 'securityContent'),
            (('spec', 'workerGroupSpecs', 1, 'template', 'spec', 'containers', 0, 'volumeMounts', 0, 'readOnly'), None, 'readonly'),
            (('spec', 'workerGroupSpecs', 1, 'template', 'spec', 'tolerations', 0, 'effect'), 1, None),
        ],
    )
    def test_what_is_misspelt_is_refused(self, cluster, path, value, rename):
        import kubernetes_validate

        with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
            self.validate(changed(cluster, path, value, rename))

    def test_every_pod_has_the_token_as_a_file_and_no_privileges(self, documents, cluster):
        for name, group in self.groups(cluster).items():
            pod = group['template']['spec']
            (container,) = pod['containers']
            environment = {variable['name']: variable['value'] for variable in container['env']}
            assert environment['RAY_AUTH_MODE'] == 'token'
            volumes = {volume['name']: volume for volume in pod['volumes']}
            mounted = {mount['mountPath']: volumes[mount['name']] for mount in container['volumeMounts']}  # KeyError: a volume that is not there
            folder, file = environment['RAY_AUTH_TOKEN_PATH'].rsplit('/', 1)
            assert (mounted[folder]['secret']['defaultMode'], file) == (0o440, 'auth_token')
            assert mounted['/dev/shm']['emptyDir']['medium'] == 'Memory', name
            assert pod['securityContext']['runAsNonRoot']
            assert pod['securityContext']['fsGroup'] == pod['securityContext']['runAsGroup']  # or it could not read the token
            assert container['securityContext'] == {'allowPrivilegeEscalation': False, 'capabilities': {'drop': ['ALL']}}
            assert documents[1]['spec']['podSelector']['matchLabels'].items() <= group['template']['metadata']['labels'].items()
        assert not any(document['kind'] == 'Secret' for document in documents)

    def test_only_encoders_offer_the_resource_and_may_be_lost(self, cluster):
        groups = self.groups(cluster)
        offered = {
            name: json.loads(json.loads(group['rayStartParams'].get('resources', '"{}"'))) for name, group in groups.items()
        }  # as a shell does
        assert offered == {'head': {}, 'cpu': {}, 'encoder': {RESOURCE: 1}}
        assert groups['head']['rayStartParams']['num-cpus'] == '0'
        tolerant = {name for name, group in groups.items() if any(one['key'] == 'spot' for one in group['template']['spec'].get('tolerations', []))}
        assert tolerant == {'cpu', 'encoder'}
        for group in groups.values():
            size = next(volume['emptyDir']['sizeLimit'] for volume in group['template']['spec']['volumes'] if volume['name'] == 'shm')
            memory = group['template']['spec']['containers'][0]['resources']['limits']['memory']
            assert 0.28 <= int(size.removesuffix('Gi')) / int(memory.removesuffix('Gi')) <= 0.32  # of which Ray makes its object store


def test_the_version_of_the_image_is_one_that_setup_allows(monkeypatch):
    arguments = {}
    monkeypatch.setattr(setuptools, 'setup', lambda **given: arguments.update(given))
    runpy.run_path(str(REPOSITORY / 'setup.py'))
    ray, *_ = arguments['extras_require']['ray']
    version = next(yaml.safe_load_all((FOLDER / 'kuberay.yaml').read_text()))['spec']['rayVersion']
    assert version in Requirement(ray).specifier
