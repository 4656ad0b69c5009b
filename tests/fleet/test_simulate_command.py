"""The command: what it prints, what it compares, and without which packages it works."""

import re
import subprocess
import sys

import pytest

from diffusion.fleet.commands.simulate import main
from tests.conftest import REPOSITORY

SMALL = ['--jobs', '60', '--nodes', '20', '--seeds', '2']


def printed(capsys, *arguments, code=0):
    assert main(arguments) == code
    return capsys.readouterr().out


def rows_of(text):
    cells = [[cell.strip() for cell in line.strip('|').split('|')] for line in text.splitlines() if line.startswith('|')]
    return cells[0], {row[0]: dict(zip(cells[0], row, strict=True)) for row in cells[2:]}


def test_what_is_asked_stands_next_to_the_default(capsys):
    text = printed(capsys, *SMALL, '--interruptions-times', '10', '--checkpoint-steps', '20', '--price', '0.648')
    _, rows = rows_of(text)
    assert list(rows) == ['default', 'asked']
    assert float(rows['asked']['dollars']) > 1.8 * float(rows['default']['dollars'])
    for said in ['interruptions_per_hour 1.01 (default 0.101)', 'checkpoint_steps 20 (default 100)', 'price_per_hour 0.648 (default 0.324)']:
        assert said in text
    assert 'Means of 2 runs of 60 jobs on up to 20 machines.' in text


def test_another_price_is_another_bill_and_nothing_else(capsys):
    _, rows = rows_of(printed(capsys, *SMALL, '--price', '3.24'))
    default, asked = rows['default'], rows['asked']
    assert float(asked['dollars']) == pytest.approx(10 * float(default['dollars']), rel=0.06)
    assert {name: default[name] for name in ('hours', 'mean min', 'lost work')} == {name: asked[name] for name in ('hours', 'mean min', 'lost work')}


def test_the_defaults_are_shown_with_the_published_run(capsys):
    text = printed(capsys, '--seeds', '1')
    _, rows = rows_of(text)
    assert list(rows) == ['default', 'published (SaladCloud)']
    assert rows['default']['done (worst run)'] == '1000.0 (1000)'
    assert '--without slow' in text


def test_the_table_has_a_row_a_policy(capsys):
    _, rows = rows_of(printed(capsys, *SMALL, '--table'))
    assert len(rows) == 8
    assert 'no bans, 3 attempts' in rows
    assert any(re.search(r'x10 \(1\.01/h\)', name) for name in rows)


def test_poison_and_floods_fail(capsys):
    _, rows = rows_of(printed(capsys, *SMALL, '--poison', '3', '--flood', '5', '--without', 'slow'))
    assert (rows['default']['failed'], rows['asked']['failed']) == ('0.0', '8.0')


@pytest.mark.parametrize(
    ('arguments', 'said'),
    [
        (['--jobs', '0'], "'0' is not a whole number of at least 1"),
        (['--interruptions-per-hour', '-1'], "'-1' is not a number of at least 0"),
        (['--interruptions-per-hour', 'nan'], "'nan' is not a number of at least 0"),
        (['--poison', '3', '--jobs', '2'], '--poison 3: more than --jobs 2'),
        (['--bad-nodes', '3', '--nodes', '2'], '--bad-nodes 3: more than --nodes 2'),
        (['--without', 'luck'], 'invalid choice'),
    ],
)
def test_mistakes_are_refused(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_it_needs_neither_torch_nor_what_a_service_needs():
    code = """
import sys
for name in ('torch', 'composer', 'psycopg', 'starlette', 'uvicorn', 'boto3', 'numpy'):
    sys.modules[name] = None
sys.argv = ['fleet', 'simulate', '--jobs', '5', '--nodes', '2', '--seeds', '1']
import runpy
runpy.run_module('diffusion.fleet', run_name='__main__')
"""
    done = subprocess.run([sys.executable, '-c', code], cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, '')
    assert '| default' in done.stdout


def test_where_nothing_gets_done_nothing_is_said_of_jobs_done(capsys):
    _, rows = rows_of(printed(capsys, '--jobs', '5', '--nodes', '3', '--seeds', '1', '--losses', '2', '--interruptions-per-hour', '1000'))
    asked = rows['asked']
    assert (asked['done (worst run)'], asked['mean min'], asked['median'], asked['max'], asked['lost work']) == ('0.0 (0)', '', '', '', '100.0 %')
