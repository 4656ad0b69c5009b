"""One table from an error to the exit codes of train.py and of all other commands."""

import errno
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from safetensors import SafetensorError

from diffusion.common.command_line import CommandParser
from diffusion.common.storage import StorageError, StorageRefusal
from diffusion.common.text import markdown_table, print_message, print_page
from diffusion.contracts.errors import BAD_INPUT, CODES, CRASH, FINISHED, INTERRUPTED, DataError, run_command, train_code
from diffusion.faults import process
from diffusion.recipe import RecipeError
from tests.conftest import REPOSITORY


def test_what_work_returns_is_the_exit_code(capsys):
    assert [run_command(lambda: None), run_command(lambda: 1)] == [0, 1]


@pytest.mark.parametrize(
    ('error', 'code', 'of_train'),
    [(RecipeError('a.yaml', ['lr: too high']), 2, 64), (StorageRefusal('no such bucket'), 2, 64), (StorageError('no answer'), 3, 76)],
)
def test_an_error_of_the_table_is_printed_without_a_traceback(error, code, of_train, capsys):
    def work():
        raise error

    assert (run_command(work), train_code(error)) == (code, of_train)
    assert capsys.readouterr().err == f'{error}\n'


def test_terminals_are_shown_control_characters_and_marks_of_direction_as_text(capsys, monkeypatch):
    """Whatever the way of a file's, a peer's or a model's text to the terminal."""
    monkeypatch.setattr(process, 'ignore_requests', lambda **_: None)
    monkeypatch.setattr(process, 'announce', lambda _: None)
    evil, shown = 'a\x1b[2J\u202eb\tc\r\x9bd\u2028é\n', 'a\\x1b[2J\\u202eb\tc\\r\\x9bd\\u2028é\n'

    def refuse(*_):
        raise DataError(evil)

    ways = [
        lambda: print_page(evil),
        lambda: print_page(markdown_table(('name', 'n'), [(evil, 1)])),
        lambda: print_message(ValueError(evil)),
        lambda: run_command(refuse),
        lambda: process.explain(DataError(evil)),
        lambda: process.explain(ZeroDivisionError(evil)),  # a crash, with its traceback
        lambda: CommandParser('x', '').error(evil),
    ]
    for way in ways:
        with suppress(SystemExit):
            way()
        out, err = capsys.readouterr()
        assert shown in out + err
        assert evil not in out + err


def test_any_other_error_is_a_crash_unless_the_command_names_it(capsys):
    with pytest.raises(FileNotFoundError):
        run_command((REPOSITORY / 'nowhere').read_text)
    assert run_command((REPOSITORY / 'nowhere').read_text, also=(OSError,)) == BAD_INPUT
    assert train_code(OSError()) == CRASH


@pytest.mark.parametrize(
    ('error', 'said'),
    [
        (PermissionError(errno.EACCES, 'Permission denied', 'here/out'), 'Permission denied'),
        (OSError(errno.EROFS, 'Read-only file system', 'here/.out.tmp-host-1-0123abcd/a/b'), 'Read-only file system'),
        (NotADirectoryError(errno.ENOTDIR, 'Not a directory', 'here'), 'Not a directory'),
        (OSError(errno.ENOSPC, 'No space left on device'), 'No space left on device'),
        (SafetensorError('Error while serializing: I/O error: No space left on device (os error 28)'), 'No space left on device'),
        (FileNotFoundError(errno.ENOENT, 'No such file', 'here/other'), None),
        (OSError(errno.EIO, 'Input/output error'), None),
    ],
)
def test_a_place_that_cannot_be_written_is_named_with_a_remedy(tmp_path, monkeypatch, capsys, error, said):
    def work():
        raise error

    monkeypatch.chdir(tmp_path)
    if said is None:  # of something else
        with pytest.raises(OSError, match=error.strerror):
            run_command(work, out=Path('here/out'))
    else:
        assert run_command(work, out=Path('here/out')) == BAD_INPUT
        assert capsys.readouterr().err == f'here/out: cannot be written: {said}; name another OUT\n'


def test_a_place_that_cannot_be_written_is_named_before_the_work(tmp_path, monkeypatch):
    """In a process that no capability lets into closed folders, as tests may run as root."""
    (tmp_path / 'closed').mkdir(mode=0o500)
    (tmp_path / 'secret').touch(mode=0o000)
    (tmp_path / 'file').touch()
    code = """
import sys
from pathlib import Path
from diffusion.contracts.errors import run_command
raise SystemExit(run_command(lambda: print('worked' if sys.argv[1] != 'reads' else Path('secret').read_text()), out=Path(sys.argv[1]), remedy='REMEDY'))
"""

    def ended(place):
        user = ['setpriv', '--bounding-set=-dac_override,-dac_read_search'] if os.geteuid() == 0 else []
        return subprocess.run([*user, sys.executable, '-c', code, place], capture_output=True, text=True, check=False)

    for name, why in (
        ('closed/out', 'closed is closed to this user'),
        ('closed/a/b/out', 'closed is closed to this user'),
        ('file/out', 'file is not a folder'),
    ):
        found = ended(tmp_path / name)
        assert (found.returncode, found.stdout) == (2, '')
        assert found.stderr == f'{tmp_path}/{name}: cannot be written: {tmp_path}/{why}; REMEDY\n'
    assert ended(tmp_path / 'new/deep/out').stdout == 'worked\n'
    assert not (tmp_path / 'new').exists()
    monkeypatch.setenv('PYTHONPATH', str(REPOSITORY))
    monkeypatch.chdir(tmp_path)
    found = ended('reads')
    assert found.returncode == 2
    assert found.stderr.startswith('secret: cannot be read: Permission denied; ask the owner of that file or folder')


def test_every_code_is_explained():
    page = (REPOSITORY / 'docs/reliability.md').read_text()
    train, others = (set(map(int, re.findall(r'\d+', ' '.join(re.findall(r'^\| ([\d, ]+) \|', part, re.MULTILINE))))) for part in (
        page.partition('## Exit codes of train.py')[2].partition('## Exit codes of all')[0],
        page.partition('## Exit codes of all other commands')[2].partition('## Launchers')[0],
    ))  # fmt: skip
    assert {code for code, _ in CODES.values()} | {FINISHED, CRASH, INTERRUPTED} <= train
    assert {code for _, code in CODES.values()} | {FINISHED, INTERRUPTED} <= others
