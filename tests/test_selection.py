"""Which tests run, and what `make test-changed` chooses."""

import json
import subprocess
import sys

import pytest

from tests.changed import tests_of as chosen_for
from tests.conftest import REPOSITORY
from tests.selection import NUM_TURNS, SECONDS, SLOW_SEC, TURN_PERIOD_SEC, quarantined, turn_of, turns_of_slow_files

pytest_plugins = ['pytester']


@pytest.mark.parametrize('apart_sec', [24 * 3600, 4 * 3600, 8 * 3600])
def test_regular_commits_go_through_all_turns(apart_sec):
    assert len({(1_790_000_000 + number * apart_sec) // TURN_PERIOD_SEC % NUM_TURNS for number in range(NUM_TURNS)}) == NUM_TURNS


def test_each_turn_has_its_share():
    turns = [turn_of(f'faults/test_{number}.py') for number in range(700)]
    assert all(60 < turns.count(turn) < 140 for turn in range(NUM_TURNS))
    seconds = json.loads(SECONDS.read_text())
    slow = turns_of_slow_files(seconds)
    assert slow.keys() == {file for file, sec in seconds.items() if sec >= SLOW_SEC}
    sums = [sum(seconds[file] for file, turn in slow.items() if turn == number) for number in range(NUM_TURNS)]
    assert max(sums) - min(sums) <= max(seconds.values())
    assert f'--under {SLOW_SEC})' in (REPOSITORY / 'Makefile').read_text(), 'files in between would never run'


def test_whoever_is_in_quarantine_exists_and_has_a_reason():
    listed = quarantined()
    assert all(listed.values()), 'quarantine.txt: `NAME # what was seen`'
    if listed:
        subprocess.run([sys.executable, '-m', 'pytest', '--collect-only', '-m', '', *listed], cwd=REPOSITORY, check=True)


def test_a_change_calls_for_its_room_and_those_that_import_it():
    chosen = chosen_for({'diffusion/checkpoints/saver.py'})
    assert {'tests/checkpoints', 'tests/faults/test_kill.py', 'tests/training/test_builder.py', 'tests/test_readme.py'} <= set(chosen)
    assert not [name for name in chosen if name.startswith(('tests/cost/test_prices', 'tests/objectives', 'tests/recipe'))]


def test_a_table_calls_for_the_room_that_reads_it():
    assert {'tests/cost', 'tests/test_plan.py'} <= set(chosen_for({'diffusion/cost/prices.yaml'}))


@pytest.mark.parametrize(
    ('changed', 'chosen'),
    [
        ({'tests/cost/test_prices.py'}, ['tests/cost/test_prices.py']),
        ({'tests/conftest.py'}, ['tests']),
        ({'constraints.txt', 'docs/data.md'}, ['tests']),
        (set(), []),
    ],
)
def test_changes_of_tests_alone(changed, chosen):
    assert chosen_for(changed) == chosen


def test_quarantine_order_and_record(pytester):
    pytester.makepyfile(
        **{
            'tests/conftest': 'from selection import pytest_addoption, pytest_collection_modifyitems, pytest_configure',
            'tests/selection': (REPOSITORY / 'tests/selection.py').read_text(),
            'tests/test_quick': 'def test_flaky(): assert False',
            'tests/test_slow': 'def test_it(): pass',
        }
    )
    folder = pytester.path / 'tests'
    (folder / 'seconds.json').write_text('{"test_slow.py": 9, "test_gone.py": 5}')
    (folder / 'quarantine.txt').write_text('# names\ntests/test_quick.py::test_flaky # seen once, a busy machine\n')
    pytester.makeini('[pytest]\n')
    ran = pytester.runpytest_subprocess('-v', '-p', 'no:cacheprovider', '--record')
    ran.stdout.fnmatch_lines(['tests/test_slow.py::test_it PASSED*', 'tests/test_quick.py::test_flaky XFAIL*'])
    assert ran.ret == 0
    assert json.loads((folder / 'seconds.json').read_text()) == {}
    (folder / 'seconds.json').write_text('{"test_slow.py": 9}')
    pytester.runpytest_subprocess('--under', '9', '-p', 'no:cacheprovider').assert_outcomes(xfailed=1, deselected=1)
