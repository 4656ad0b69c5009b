"""A real PostgreSQL, small jobs, and programs that stand in for training and export."""

import hashlib
import json
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from diffusion.demo.postgres import LocalPostgres
from fleet.attempts.attempt import Programs
from tests.conftest import REPOSITORY

HERE = Path(__file__).parent


def stand_ins(*export: str, **options: Any) -> Programs:
    """Programs that take a second; `options` are those of trainer.py, `export` are more files of the export."""
    return Programs(
        train=(sys.executable, str(HERE / 'trainer.py'), json.dumps(options)),
        export=(sys.executable, str(HERE / 'exporter.py'), *export),
        generate=(sys.executable, str(HERE / 'generator.py')),
    )


def described(path: Path) -> dict[str, Any]:
    """An input of a job."""
    content = path.read_bytes()
    return {'url': str(path), 'sha256': hashlib.sha256(content).hexdigest(), 'bytes': len(content)}


@pytest.fixture
def recipes(tmp_path: Path) -> Path:
    """A folder with one recipe, of an adapter of photos."""
    folder = tmp_path / 'recipes'
    folder.mkdir()
    (folder / 'small.yaml').write_text(yaml.safe_dump({'base': str(REPOSITORY / 'yamls/dreambooth-sd2-lora.yaml')}))
    return folder


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """A tar of a folder with two files."""
    (tmp_path / 'subject').mkdir()
    for name in ('0.png', '1.png'):
        (tmp_path / 'subject' / name).write_bytes(name.encode() * 50)
    with tarfile.open(tmp_path / 'subject.tar', 'w') as tar:
        tar.add(tmp_path / 'subject', arcname='subject')
    return tmp_path / 'subject.tar'


@pytest.fixture
def job(tmp_path: Path, archive: Path) -> Callable[..., Path]:
    """Write a job's file; arguments are further keys."""

    def write(name: str = 'timber', **keys: Any) -> Path:
        path = tmp_path / f'{name}.yaml'
        path.write_text(yaml.safe_dump({'recipe': 'small.yaml', 'inputs': {'subject': described(archive)}, **keys}))
        return path

    return write


@pytest.fixture(scope='session')
def postgres() -> Iterator[LocalPostgres]:
    server = LocalPostgres()
    yield server
    server.stop()
