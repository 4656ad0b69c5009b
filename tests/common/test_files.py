"""Files that are replaced whole, and JSON that somebody else has written."""

import errno
import fcntl
import os
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import NotRequired

import pytest
from typing_extensions import TypedDict

from diffusion.common import files
from diffusion.common.files import lives, parse_json, parse_json_object, read_json, replacing, replacing_folder


def test_a_file_is_on_the_disk_before_it_takes_its_name(tmp_path, monkeypatch):
    """Or a loss of power leaves the name with nothing behind it."""
    done = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, 'fsync', lambda descriptor: (done.append(os.readlink(f'/proc/self/fd/{descriptor}')), sync(descriptor)))
    monkeypatch.setattr(os, 'replace', lambda source, target: (done.append('replaced'), replace(source, target)))
    with replacing(tmp_path / 'recipe.yaml') as temporary:
        temporary.write_text('name: a')
    assert done == [str(temporary), 'replaced', str(tmp_path)]
    assert [path.name for path in tmp_path.iterdir()] == ['recipe.yaml']


def write_folder(folder: Path, name: str, times: int = 1) -> None:
    for _ in range(times):
        with replacing_folder(folder) as temporary:
            for i in range(20):
                (temporary / f'{i}').write_text(name)


def contents(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.iterdir())]


def test_two_writers_of_one_folder_do_not_meet(tmp_path):
    """The second one once removed what the first was writing, and what both left was neither's."""
    folder = tmp_path / 'out'
    with replacing_folder(folder) as first:
        (first / 'a').write_text('first')
        write_folder(folder, 'second')
        assert contents(folder) == ['second'] * 20
        (first / 'b').write_text('first')
    assert contents(folder) == ['first'] * 2
    assert [path.name for path in tmp_path.iterdir()] == ['out']


def test_processes_that_write_one_folder_leave_one_whole(tmp_path):
    context = get_context('fork')
    writers = [context.Process(target=write_folder, args=(tmp_path / 'out', str(i), 60)) for i in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 4
    assert len(contents(tmp_path / 'out')) == 20
    assert len(set(contents(tmp_path / 'out'))) == 1
    assert [path.name for path in tmp_path.iterdir()] == ['out']


def test_only_what_killed_processes_left_is_removed(tmp_path):
    ended = subprocess.Popen([sys.executable, '-c', ''])
    ended.wait()
    assert not lives(ended.pid)
    assert lives(1)  # also if it is another user's

    def leftover(prefix: str, *inside: str) -> Path:
        path = tmp_path / f'{prefix}0123abcd'
        path.mkdir()
        for name in (*inside, 'a'):
            (path / name).touch()
        return path

    dead = leftover(f'{files.SCRATCH_PREFIX}1-', '.lock')
    half_removed = leftover(f'{files.SCRATCH_PREFIX}2-')  # the lock goes first
    not_locked_yet = leftover(f'{files.NEW_PREFIX}{ended.pid}-')
    just_made, elsewhere = leftover(f'{files.NEW_PREFIX}{os.getpid()}-'), leftover(f'.scratch-elsewhere-{os.getuid()}-', '.lock')
    locked = leftover(f'{files.SCRATCH_PREFIX}3-', '.lock')  # also by a container with the same host name, whose processes have other ids here
    with (locked / '.lock').open() as held:
        assert files.try_lock(held)
        write_folder(tmp_path / 'out', 'new')
    assert not any(path.exists() for path in (dead, half_removed, not_locked_yet))
    assert all(path.exists() for path in (just_made, elsewhere, locked))


def test_a_disk_without_locks_keeps_what_may_be_in_use(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, 'flock', refuse)
    with files.scratch_in(tmp_path) as scratch:
        write_folder(tmp_path / 'out', 'new')
        assert scratch.exists()
    assert contents(tmp_path / 'out') == ['new'] * 20


def test_a_folder_that_fails_leaves_the_old_one_and_nothing_else(tmp_path):
    write_folder(tmp_path / 'out', 'old')
    with pytest.raises(RuntimeError), replacing_folder(tmp_path / 'out'):
        raise RuntimeError
    assert contents(tmp_path / 'out') == ['old'] * 20
    (tmp_path / 'file').write_text('of somebody')
    with pytest.raises(NotADirectoryError):
        write_folder(tmp_path / 'file', 'new')
    assert (tmp_path / 'file').read_text() == 'of somebody'
    assert sorted(path.name for path in tmp_path.iterdir()) == ['file', 'out']


@pytest.mark.parametrize('text', ['', '{', '[' * 100_000, '{"a":' * 100_000, '1' * 5_000, b'\xff', 'NaN1'], ids=range(7))
def test_there_is_one_error_for_all_that_is_no_json(text):
    with pytest.raises(ValueError, match='.'):
        parse_json(text)


def test_an_object_is_wanted():
    assert parse_json_object('{"a": [1]}') == {'a': [1]}
    for text in ('[]', '1', 'null', '"a"'):
        with pytest.raises(ValueError, match='expected a JSON object, got a'):
            parse_json_object(text)


class Facts(TypedDict):
    steps: int
    size: NotRequired[tuple[int, int]]
    base: NotRequired[dict[str, str]]


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        ('{"steps": 4, "size": [1, 2], "more": null}', None),
        ('{}', 'steps: Field required'),
        ('{"steps": "4"}', "steps: Input should be a valid integer, not '4'"),
        ('{"steps": true, "size": [1, "2"]}', 'not True (and 1 more)'),
        ('{"steps": 4, "base": {"source": []}}', 'base.source: Input should be a valid string, not []'),
        ('[]', 'Input should be an object, not []'),
        ('{"steps": 4', 'Invalid JSON'),
        ('{"steps": ' * 5000, 'Invalid JSON'),
        (b'\xff\xfe', 'Invalid JSON'),
    ],
)
def test_a_file_is_read_as_the_type_that_it_should_hold(tmp_path, content, message):
    path = tmp_path / 'facts.json'
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if message is None:
        assert read_json(path, Facts) == {'steps': 4, 'size': (1, 2)}
    else:
        with pytest.raises(LookupError, match='facts.json: ') as caught:
            read_json(path, Facts, LookupError, 'export again')
        assert message in str(caught.value)
        assert 'export again' in str(caught.value)


@pytest.mark.parametrize('kind', ['missing', 'folder', 'device', 'fifo', 'large', 'nul'])
def test_what_is_no_ordinary_file_is_refused_at_once(tmp_path, kind, monkeypatch):
    monkeypatch.setattr('diffusion.common.files.MAX_JSON_BYTES', 100)
    path = {'device': Path('/dev/zero'), 'nul': tmp_path / 'a\0b', 'folder': tmp_path}.get(kind, tmp_path / kind)
    if kind == 'fifo':
        os.mkfifo(path)
    if kind == 'large':
        path.write_text('{}' + ' ' * 100)
    with pytest.raises(ValueError, match='restore the file'):
        read_json(path, Facts)
