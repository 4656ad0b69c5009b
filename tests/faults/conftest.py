"""Datasets with something wrong in them."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from streaming import MDSWriter, StreamingDataset

from diffusion.common import belongings
from tests.conftest import read_json


@pytest.fixture(scope='session', autouse=True)
def nothing_is_left_in_shared_memory() -> Iterator[None]:
    """Runs that are killed for good have no next start that would remove their segments, of which a host has room for a few thousand."""
    yield
    belongings.remove_dead()


@pytest.fixture(scope='session')
def latents_with_nan(latents: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The latents with one sample, number 20 of 48, whose moments are NaN: every epoch meets it once."""
    out = tmp_path_factory.mktemp('nan') / 'latents'
    manifest = read_json(latents / 'manifest.json')
    columns = {name: column['encoding'] for name, column in manifest['columns'].items()}
    rows = StreamingDataset(local=str(latents), batch_size=1)
    with MDSWriter(out=str(out), columns=columns, hashes=manifest['hashes']) as writer:
        for index in range(len(rows)):
            row = rows[index]
            writer.write({**row, 'moments': np.full_like(row['moments'], np.nan)} if index == 20 else row)
    shutil.copy(latents / 'manifest.json', out)
    return out
