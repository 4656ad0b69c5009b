import os
import pickle
import re

import pytest
import torch
from composer.utils import checkpoint as composers

from diffusion.checkpoints.completeness import safe_loading
from diffusion.checkpoints.reading import find_checkpoint, load_safely
from diffusion.contracts.errors import CheckpointError
from tests.checkpoints.files import content_of, write_checkpoint


def test_the_newest_whole_one_of_a_run(tmp_path, capsys):
    folder = tmp_path / 'run/checkpoints'
    for batch in (4, 8, 12):
        write_checkpoint(folder, batch)
    for place in (tmp_path / 'run', folder):
        assert find_checkpoint(place) == folder / 'ba00000012.pt'
    (folder / 'ba00000012.json').unlink()
    assert find_checkpoint(folder) == folder / 'ba00000008.pt'
    assert capsys.readouterr().err == ''  # one that was never complete is no damage
    (folder / 'ba00000008.pt').write_bytes(b'rot')
    assert find_checkpoint(folder) == folder / 'ba00000004.pt'
    said = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf'checkpoints: {folder}/ba00000008.pt: not whole: 3 bytes, expected [0-9,]+', said[0])
    assert said[1:] == [f'checkpoints: {folder}/ba00000004.pt is the newest whole one, and is taken']
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


@pytest.mark.parametrize(
    'content', [b'', b'rot' * 100, pickle.dumps({'state': 1}), b"c__builtin__\neval\n(S'1'\ntR."], ids=['empty', 'rot', 'pickle', 'evil']
)
def test_what_is_no_archive_is_refused_without_advice(tmp_path, content):
    (tmp_path / 'a.pt').write_bytes(content)
    with pytest.raises(CheckpointError, match='a.pt: not a checkpoint of this project: not an archive .* weights from safetensors') as refused:
        load_safely(tmp_path / 'a.pt')
    assert 'mmap' not in str(refused.value)


def test_composer_loads_safely_inside_and_as_before_outside(tmp_path):
    class Payload:
        def __reduce__(self):
            return (os.system, (f'touch {tmp_path}/executed',))

    path = tmp_path / 'evil.pt'
    torch.save({'state': Payload()}, path)
    with safe_loading(), pytest.raises(CheckpointError, match='refused'):
        composers.safe_torch_load(path)
    with pytest.raises(
        CheckpointError, match=rf'^{path}: refused, nothing was loaded: .* it holds \w+\.system\. .*weights from safetensors'
    ) as refused:
        load_safely(path)
    assert not re.search('weights_only|trust|add_safe_globals|file can still be loaded', str(refused.value))  # PyTorch's advice
    assert refused.value.__suppress_context__
    assert not (tmp_path / 'executed').exists()
    composers.safe_torch_load(path)
    assert (tmp_path / 'executed').exists()  # or the test tests nothing
