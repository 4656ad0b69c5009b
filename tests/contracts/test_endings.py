"""One table from an error to the exit codes of train.py and of all other commands."""

import re

import pytest

from diffusion.common.storage import StorageError, StorageRefusal
from diffusion.contracts import exit_codes
from diffusion.contracts.endings import CODES, run_command, train_code
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


def test_any_other_error_is_a_crash_unless_the_command_names_it(capsys):
    with pytest.raises(FileNotFoundError):
        run_command((REPOSITORY / 'nowhere').read_text)
    assert run_command((REPOSITORY / 'nowhere').read_text, also=(OSError,)) == exit_codes.BAD_INPUT
    assert train_code(OSError()) == exit_codes.CRASH


def test_every_code_is_explained():
    page = (REPOSITORY / 'docs/reliability.md').read_text()
    train, others = (set(map(int, re.findall(r'\d+', ' '.join(re.findall(r'^\| ([\d, ]+) \|', part, re.MULTILINE))))) for part in (
        page.partition('## Exit codes of train.py')[2].partition('## Exit codes of all')[0],
        page.partition('## Exit codes of all other commands')[2].partition('## Launchers')[0],
    ))  # fmt: skip
    assert {code for code, _ in CODES.values()} | {exit_codes.FINISHED, exit_codes.CRASH, exit_codes.INTERRUPTED} <= train
    assert {code for _, code in CODES.values()} | {exit_codes.FINISHED, exit_codes.INTERRUPTED} <= others
