"""The Dockerfile is linted, and built and run for real, without a daemon, a registry and its 7 GB of packages.

`make image` builds it with buildah in chroot isolation. The base image is a minimal system of this host's distribution, in which pip and uv are told of a
folder of empty wheels with the names and versions of constraints.txt. So all instructions run unchanged, and uv resolves the extras under the constraints.
To run commands in the image, this environment's packages are mounted in the place of the empty ones.
"""

import json
import os
import re
import shutil
import signal
import site
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import psutil
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import diffusion
from diffusion.contracts.errors import PREEMPTED
from tests.conftest import REPOSITORY, TINY, write_checkout
from tests.launch.loopback_slurm import wait_until

DOCKERFILE = REPOSITORY / 'Dockerfile'
PINS = [Requirement(line) for line in (REPOSITORY / 'constraints.txt').read_text().splitlines() if not line.startswith('#')]
# Beside a checkout's files; none may get into the image.
DECOYS = ('.env', '.aws/credentials', '.netrc', 'id_rsa', 'runs/mine/checkpoints/ep0.pt', 'data/images/shard.mds', 'wandb/key', '.venv/bin/python',
          'yamls/.secret.yaml', 'yamls/__pycache__/old.pyc', 'diffusion/.ipynb_checkpoints/check.py')  # fmt: skip


def tool(name: str) -> str:
    """The path of a development tool; skip without it."""
    found = shutil.which(name, path=f'{Path(sys.executable).parent}:{os.environ["PATH"]}')
    return found or pytest.skip(f'needs {name}: make install')


def test_hadolint_has_nothing_to_say():
    subprocess.run([tool('hadolint'), DOCKERFILE], check=True)


def test_what_it_must_not_do():
    text = DOCKERFILE.read_text()
    assert re.search(r'^ARG BASE=nvidia/cuda:13\.0\.\d-base-ubuntu24\.04@sha256:[0-9a-f]{64}$', text, re.MULTILINE)
    assert re.findall(r'^FROM (\S+)', text, re.MULTILINE) == ['${BASE}', 'system', 'system']
    assert not re.search(r'^ADD |git clone|curl|https?:', text, re.MULTILINE)  # the checkout is the image
    for name in ('ENTRYPOINT', 'CMD'):  # or a shell would be process 1, which hands no signal on
        assert isinstance(json.loads(re.search(rf'^{name} (.*)$', text, re.MULTILINE)[1]), list)


def test_cuda_of_the_base_image_is_that_of_the_wheels():
    (runtime,) = [pin for pin in PINS if pin.name == 'nvidia-cuda-runtime']
    assert re.search(r'nvidia/cuda:(\d+\.\d+)', DOCKERFILE.read_text())[1] == '.'.join(version_of(runtime).split('.')[:2])


def version_of(pin: Requirement) -> str:
    (specifier,) = pin.specifier
    assert specifier.operator == '=='
    return specifier.version


class Buildah:
    """Images and containers in a folder of their own.

    Args:
        folder: of images and containers.
    """

    def __init__(self, folder: Path):
        # vfs copies layers: slower, and a build that is killed leaves no mounts.
        self.words = ['buildah', '--storage-driver', 'vfs', '--root', f'{folder}/store', '--runroot', f'{folder}/run']
        self.environment = {**os.environ, 'BUILDAH_ISOLATION': 'chroot'}
        self.started: list[subprocess.Popen[str]] = []  # containers

    def __call__(self, *words: str | Path) -> str:
        return self.done([*self.words, *map(str, words)])

    def done(self, words: list[str], **options: Any) -> str:
        result = subprocess.run(words, env=self.environment, capture_output=True, text=True, check=False, **options)
        assert result.returncode == 0, f'{result.stdout[-5000:]}\n{result.stderr[-5000:]}'
        return result.stdout.strip()

    def config(self, image: str) -> dict[str, Any]:
        return json.loads(self('inspect', '--type', 'image', image))['OCIv1']['config']


class Container:
    """A command of an image with the image's entrypoint, user, folder and variables, started as a container is: process 1 of a namespace.

    Args:
        buildah: has the image.
        image: its name.
        command: words after the entrypoint.
        user: instead of the image's, UID:GID.
        volumes: folders or files of this host by their paths in the container.
    """

    def __init__(self, buildah: Buildah, image: str, *command: str, user: str | None = None, volumes: dict[str, Path] | None = None):
        config = buildah.config(image)
        uid, gid = (user or config['User']).split(':')
        name = buildah('from', '--pull-never', image)
        mounts = [f'--volume={path}:{place}' for place, path in (volumes or {}).items()]
        # Isolated by chroot only, so the namespace of processes is made within; whoever makes it must be root.
        begin = ['unshare', '--pid', '--fork', '--kill-child', '--mount-proc', 'setpriv', f'--reuid={uid}', f'--regid={gid}', '--clear-groups']
        words = [*buildah.words, 'run', '--user=0', '--cap-add=CAP_SYS_ADMIN', *mounts, name, '--', *begin, *config['Entrypoint'], *command]
        self.process = subprocess.Popen(words, env=buildah.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        buildah.started.append(self.process)

    def end(self, timeout_sec: float = 120) -> tuple[int, str]:
        """Return exit code and output, once it has ended."""
        output, _ = self.process.communicate(timeout=timeout_sec)
        return self.process.returncode, output

    def send(self, number: int) -> None:
        """Send a signal to process 1, and to no other."""
        (first,) = [process for process in psutil.Process(self.process.pid).children(recursive=True) if process.name() == 'tini']
        first.send_signal(number)


def write_empty_wheel(folder: Path, pin: Requirement) -> None:
    """Write a wheel without files; with the commands of the package of that name, if it is installed here."""
    stem = f'{re.sub("[-_.]+", "_", pin.name)}-{version_of(pin)}'
    with zipfile.ZipFile(folder / f'{stem}-py3-none-any.whl', 'w') as wheel:
        wheel.writestr(f'{stem}.dist-info/METADATA', f'Metadata-Version: 2.1\nName: {pin.name}\nVersion: {version_of(pin)}\n')
        wheel.writestr(f'{stem}.dist-info/WHEEL', 'Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n')
        if pin.name == 'mosaicml':
            wheel.writestr(f'{stem}.dist-info/entry_points.txt', distribution(pin.name).read_text('entry_points.txt'))
        wheel.writestr(f'{stem}.dist-info/RECORD', '')


def base_image(buildah: Buildah, folder: Path) -> str:
    """A minimal system whose pip and uv know only the wheels in /wheels."""
    release = dict(re.findall(r'^(\w+)="?([^"\n]*)', Path('/etc/os-release').read_text(), re.MULTILINE))
    wheels = folder / 'wheels'
    wheels.mkdir()
    whole = [pin for pin in PINS if pin.name in ('setuptools', 'uv')]  # what builds and what installs
    for words in (
        [
            'unshare',  # mmdebstrap mounts /dev/shm and more of this host: killed, it would leave them in a temporary folder
            '--mount',
            'mmdebstrap',
            '--variant=minbase',
            '--components=main,universe' if release['ID'] == 'ubuntu' else '--components=main',
            release['VERSION_CODENAME'],
            f'{folder}/base.tar',
        ],
        [sys.executable, '-m', 'pip', 'download', '--no-deps', f'--dest={wheels}', *map(str, whole)],
    ):
        got = subprocess.run(words, capture_output=True, text=True, check=False)
        if got.returncode:
            pytest.skip(f'{" ".join(words)}, which needs a network: {got.stderr[-300:]}')
    for pin in PINS:
        if pin not in whole:
            write_empty_wheel(wheels, pin)
    (folder / 'pip.conf').write_text('[global]\nno-index = true\nfind-links = /wheels\n')
    (folder / 'uv.toml').write_text('no-index = true\nfind-links = ["/wheels"]\n')
    container = buildah('from', 'scratch')
    for source, place in (('base.tar', '/'), ('wheels', '/wheels'), ('pip.conf', '/etc/pip.conf'), ('uv.toml', '/etc/uv/uv.toml')):
        buildah('add', '--quiet', container, folder / source, place)
    buildah('commit', '--quiet', '--rm', container, 'localhost/base:1')
    return 'localhost/base:1'


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0 or not all(map(shutil.which, ('buildah', 'mmdebstrap'))), reason='needs root, buildah and mmdebstrap')
@pytest.mark.timeout(1200)
class TestImage:
    IMAGE = f'localhost/text-to-image-recipes:{diffusion.__version__}'

    @pytest.fixture(scope='class')
    def checkout(self, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
        """This commit's files, which only their owner may read, and the decoys."""
        folder = tmp_path_factory.mktemp('checkout')
        names = write_checkout(folder)
        for name in names:
            (folder / name).chmod((folder / name).stat().st_mode & 0o700)
        for name in DECOYS:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text('secret')
        return folder, names

    @pytest.fixture(scope='class')
    def buildah(self, checkout, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
        folder = tmp_path_factory.mktemp('buildah')
        folder.chmod(0o755)
        buildah = Buildah(folder)
        try:
            options = f'--pull-never --build-arg BASE={base_image(buildah, folder)}'
            buildah.done(['make', 'image', f'BUILDER={" ".join(buildah.words)}', f'OPTIONS={options}'], cwd=checkout[0])
            yield buildah
        finally:
            for process in buildah.started:  # those that a failed test left
                process.kill()
                process.wait()
            shutil.rmtree(folder)

    @pytest.fixture(scope='class')
    def packages(self, buildah) -> dict[str, Path]:
        """The volume that puts this environment's packages into the image."""
        _, python = Container(buildah, self.IMAGE, 'python', '-c', 'import site; print(site.getsitepackages()[0])').end()
        place, here = python.split()[0], site.getsitepackages()[0]
        if Path(place).parts[-2] != Path(here).parts[-2]:
            pytest.skip(f'the system of the image has {Path(place).parts[-2]}, the tests have {Path(here).parts[-2]}')
        return {place: Path(here)}

    @pytest.fixture
    def encoders_folder(self, encoders_folder: Path) -> Path:
        subprocess.run(['chmod', '--recursive', 'go=rX', encoders_folder], check=True)  # for the user of the image; safetensors writes 600
        return encoders_folder

    def test_it_has_the_checkouts_files_and_nothing_else(self, buildah, checkout):
        kept = ('benchmarks/', 'data_prep/', 'diffusion/', 'fleet/', 'yamls/', 'LICENSE', 'constraints.txt', 'pyproject.toml', 'setup.py', 'train.py')
        _, found = Container(buildah, self.IMAGE, 'find', '.', '-type', 'f', '-printf', '%P %U %m\n').end()
        assert sorted(found.splitlines()) == sorted(
            f'{name} 0 644' for name in checkout[1] if name.startswith(kept) and not Path(name).name.startswith('.')
        )

    def test_its_labels_name_version_and_commit(self, buildah, checkout):
        commit = subprocess.run(
            ['git', 'rev-parse', '--short=12', 'HEAD'], cwd=checkout[0], capture_output=True, text=True, check=True
        ).stdout.strip()
        config = buildah.config(self.IMAGE)
        labels = {key.rpartition('.')[2]: value for key, value in config['Labels'].items()}
        assert (labels['title'], labels['version'], labels['revision']) == ('text-to-image-recipes', diffusion.__version__, commit)
        assert f'GIT_COMMIT={commit}' in config['Env']  # diffusion.common.environment reads it
        assert config['WorkingDir'] == '/app'

    def test_its_packages_have_the_versions_of_constraints(self, buildah):
        _, frozen = Container(buildah, self.IMAGE, 'python', '-m', 'pip', 'list', '--format=json', '--disable-pip-version-check').end()
        installed = {canonicalize_name(one['name']): one['version'] for one in json.loads(frozen.splitlines()[0])}
        pinned = {(canonicalize_name(pin.name), version_of(pin)) for pin in PINS}  # two of a name, if Python's version decides
        assert {'torch', 'mosaicml', 'ray', 'torch-fidelity', 'mlflow', 'psycopg'} <= installed.keys()
        assert {(name, version) for name, version in installed.items() if name not in ('pip', 'setuptools')} - pinned == set()

    def test_a_command_of_the_readme_runs_as_it_is_printed(self, buildah, packages, encoders_folder):
        overrides = [*TINY, 'model.encoders.source=/encoders', 'data.kind=synthetic']
        begun = Container(
            buildah,
            self.IMAGE,
            'python',
            '-m',
            'diffusion.check',
            'yamls/sd2-base-256.yaml',
            *overrides,
            volumes={**packages, '/encoders': encoders_folder},
        )
        code, output = begun.end()
        assert (code, 'encoders:' in output) == (0, True), output

    @pytest.mark.parametrize('user', [None, '4321:1234'])
    def test_it_is_not_root_and_may_write_where_it_should(self, buildah, user):
        script = 'id -u; touch runs/a data/b ~/c /tmp/d && python -c "import getpass; print(getpass.getuser())"; touch train.py /opt/venv/e'
        code, output = Container(buildah, self.IMAGE, 'sh', '-c', script, user=user).end()
        assert (code, output.split()[:2]) == (1, [(user or '1000:1000').split(':')[0], 'recipes'])
        assert output.count('Permission denied') == 2

    def test_sigterm_ends_a_command_that_does_not_handle_it(self, buildah):
        """As process 1 itself it would ignore the signal."""
        begun = Container(buildah, self.IMAGE, 'sh', '-c', 'echo ready; exec sleep 100')
        assert begun.process.stdout.readline() == 'ready\n'
        begun.send(signal.SIGTERM)
        assert begun.end(10)[0] == 128 + signal.SIGTERM

    def test_sigterm_saves_and_the_next_container_resumes(self, buildah, packages, encoders_folder, tmp_path):
        """A run under Composer's launcher, as `docker stop` and Kubernetes end it; the run folder is a volume."""
        runs = tmp_path / 'runs'
        runs.mkdir()
        runs.chmod(0o1777)

        def train(num_batches: int) -> Container:
            overrides = [
                *TINY,
                'model.encoders.source=/encoders',
                'data.kind=synthetic',
                'data.synthetic_samples=64',
                f'train.duration={num_batches}ba',
            ]
            words = ['composer', '--nproc', '1', 'train.py', 'yamls/sd2-base-256.yaml', 'run_folder=runs/mine', *overrides]
            return Container(buildah, self.IMAGE, *words, volumes={**packages, '/encoders': encoders_folder, '/app/runs': runs})

        first = train(100_000)
        log = runs / 'mine/log.jsonl'
        wait_until(lambda: first.process.poll() is not None or (log.exists() and log.read_text().count('loss') > 3), 180, 'a few batches')
        assert first.process.poll() is None, first.end()[1]
        first.send(signal.SIGTERM)
        code, output = first.end()
        assert code == PREEMPTED, output
        last = int(re.search(r'saved after batch ([\d,]+); resume with', output)[1].replace(',', ''))
        assert {path.stat().st_uid for path in runs.rglob('*')} == {1000}
        code, output = train(last + 2).end()
        assert code == 0, output
        assert [row['batch'] for row in map(json.loads, log.read_text().splitlines()) if 'batch' in row][-3:] == [last, last + 1, last + 2]
