import os

import pytest
import torch
from composer.utils import checkpoint as composers

from diffusion.checkpoints.reading import find_checkpoint, load_safely
from diffusion.checkpoints.safe_loading import safe_loading
from diffusion.errors import CheckpointError
from tests.checkpoints.files import content_of, write_checkpoint


def test_the_newest_whole_one_of_a_run(tmp_path):
    folder = tmp_path / 'run/checkpoints'
    for batch in (4, 8, 12):
        write_checkpoint(folder, batch)
    for place in (tmp_path / 'run', folder):
        assert find_checkpoint(place) == folder / 'ba00000012.pt'
    (folder / 'ba00000012.json').unlink()
    assert find_checkpoint(folder) == folder / 'ba00000008.pt'
    (folder / 'ba00000008.pt').write_bytes(b'rot')
    assert find_checkpoint(folder) == folder / 'ba00000004.pt'
    (folder / 'ba00000004.json').write_text('{')
    with pytest.raises(CheckpointError, match=r'none of the 2 checkpoints is whole: .*ba00000008.pt.*expected.*ba00000004.pt.*damaged'):
        find_checkpoint(folder)
    with pytest.raises(CheckpointError, match='no checkpoint'):
        find_checkpoint(tmp_path)


def test_a_file_by_its_name_is_checked_if_it_has_a_manifest(tmp_path):
    path = write_checkpoint(tmp_path, 4)
    assert find_checkpoint(path) == path
    path.write_bytes(content_of(4)[:-1] + b'x')
    with pytest.raises(CheckpointError, match='not whole: SHA-256'):
        find_checkpoint(path)
    (tmp_path / 'ba00000004.json').unlink()
    assert find_checkpoint(path) == path
    (tmp_path / 'other.pt').touch()
    (tmp_path / 'other.json').write_text('no manifest')
    assert find_checkpoint(tmp_path / 'other.pt') == tmp_path / 'other.pt'


def test_composer_loads_safely_inside_and_as_before_outside(tmp_path):
    class Payload:
        def __reduce__(self):
            return (os.system, (f'touch {tmp_path}/executed',))

    path = tmp_path / 'evil.pt'
    torch.save({'state': Payload()}, path)
    with safe_loading(), pytest.raises(CheckpointError, match='refused'):
        composers.safe_torch_load(path)
    with pytest.raises(CheckpointError, match='refused'):
        load_safely(path)
    assert not (tmp_path / 'executed').exists()
    composers.safe_torch_load(path)
    assert (tmp_path / 'executed').exists()  # or the test tests nothing
