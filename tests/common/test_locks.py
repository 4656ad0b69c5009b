"""A lock is held by one process, and by its children only where they are to inherit it."""

import os
import signal

import pytest

from diffusion.common.files import try_lock


@pytest.mark.parametrize('inherited', [True, False])
def test_a_child_that_outlives_the_holder_keeps_an_inherited_lock_alone(tmp_path, inherited):
    reader, writer = os.pipe()
    holder = os.fork()
    if not holder:
        file = (tmp_path / 'lock').open('w')
        assert try_lock(file, inherited)
        child = os.fork()
        if not child:
            signal.pause()
        os.write(writer, f'{child}'.encode())
        os._exit(0)
    child = int(os.read(reader, 20))
    os.waitpid(holder, 0)
    with (tmp_path / 'lock').open('a') as file:
        assert try_lock(file, inherited) is not inherited
    os.kill(child, signal.SIGKILL)


def test_of_two_open_files_one_has_the_lock(tmp_path):
    with (tmp_path / 'lock').open('w') as first, (tmp_path / 'lock').open('w') as second:
        assert try_lock(first)
        assert not try_lock(second)
        first.close()
        assert try_lock(second)
