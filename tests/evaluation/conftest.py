from pathlib import Path

import pytest

from tests.evaluation.networks import write_clip, write_inception


@pytest.fixture(scope='session')
def inception_file(tmp_path_factory) -> Path:
    return write_inception(tmp_path_factory.mktemp('inception') / 'inception-2015-12-05.pth')


@pytest.fixture(scope='session')
def clip_folder(tmp_path_factory) -> Path:
    return write_clip(tmp_path_factory.mktemp('clip') / 'clip-vit-large-patch14')
