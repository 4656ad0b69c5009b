import errno
import os
import resource

import pytest
import torch

from diffusion.checkpoints.manifest import sha256_of
from diffusion.checkpoints.reading import load_safely
from diffusion.checkpoints.saver import write_tensors
from diffusion.common.files import write_text
from tests.checkpoints.files import names

VALUE = {'a': torch.arange(100_000), 'b': [torch.ones(3), 'text', 1.5]}


def test_the_digest_is_that_of_the_file(tmp_path):
    content = write_tensors(tmp_path / 'ba00000001.pt', VALUE)
    path = tmp_path / 'ba00000001.pt'
    assert (content.sha256, content.bytes) == (sha256_of(path), path.stat().st_size)
    read = load_safely(path)
    assert torch.equal(read['a'], VALUE['a'])
    assert read['b'][1:] == ['text', 1.5]
    assert names(tmp_path) == ['ba00000001.pt']


@pytest.mark.parametrize(('place', 'kind'), [('save.half', 'enospc'), ('save.written', 'enospc'), ('save.half', 'crash')])
def test_what_fails_leaves_the_old_file_and_nothing_else(place, kind, tmp_path, monkeypatch, failpoints):
    path = tmp_path / 'ba00000001.pt'
    write_tensors(path, {'old': torch.ones(1)})
    failpoints(f'{place}:{kind}')
    with pytest.raises(OSError if kind == 'enospc' else RuntimeError) as raised:
        write_tensors(path, VALUE)
    assert getattr(raised.value, 'errno', None) == (errno.ENOSPC if kind == 'enospc' else None)  # the cause, not what torch makes of it
    assert 'old' in load_safely(path)
    assert names(tmp_path) == [path.name]


def test_a_file_that_cannot_grow(tmp_path):
    """A real refusal of the kernel, in a child whose files may have 300 kB."""
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
        try:
            write_tensors(tmp_path / 'ba00000001.pt', VALUE)
        except OSError as error:
            os._exit(error.errno)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == errno.EFBIG
    assert names(tmp_path) == []


def test_text(tmp_path):
    write_text(tmp_path / 'latest.json', 'one')
    write_text(tmp_path / 'latest.json', 'two')
    assert (tmp_path / 'latest.json').read_text() == 'two'
    assert names(tmp_path) == ['latest.json']
