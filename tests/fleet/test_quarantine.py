"""When a machine is out, and when its jobs are to blame."""

from dataclasses import replace

import pytest

from fleet.policies.blame import Elsewhere, failures_since_success, why_quarantined
from fleet.policies.rows import Ending
from tests.fleet.making import attempt

CRASHED, DONE = Ending.CRASHED, Ending.DONE


def history(*pairs, node='bad'):
    """Attempts of one machine, a minute each: (job, ending)."""
    return [attempt(1, node, ending, job, started=100.0 * i) for i, (job, ending) in enumerate(pairs)]


THREE = history(('a', CRASHED), ('b', CRASHED), ('c', CRASHED))


@pytest.mark.parametrize(
    ('pairs', 'is_out'),
    [
        ([('a', CRASHED), ('b', CRASHED), ('c', CRASHED)], True),
        ([('a', CRASHED), ('b', Ending.STALLED), ('c', Ending.NODE_FAULT)], True),
        ([('a', CRASHED), ('b', CRASHED)], False),
        ([('a', CRASHED), ('b', CRASHED), ('a', CRASHED), ('b', CRASHED)], False),  # two jobs
        ([('a', CRASHED), ('b', CRASHED), ('x', DONE), ('c', CRASHED)], False),
        ([('x', DONE), ('a', CRASHED), ('b', CRASHED), ('c', CRASHED)], True),
        ([('a', CRASHED), ('b', CRASHED), ('x', Ending.STOPPED), ('y', Ending.LOST), ('z', None), ('c', CRASHED)], True),
        ([(name, Ending.NON_FINITE) for name in 'abcd'], False),
        ([(name, Ending.RECIPE) for name in 'abc'], True),
        ([(name, Ending.LOST) for name in 'abcd'], False),
    ],
)
def test_three_jobs_without_a_success_between(pairs, is_out):
    rows = history(*pairs)
    assert bool(why_quarantined('bad', rows, [])) == is_out
    assert bool(why_quarantined('bad', rows[::-1], [])) == is_out  # in any order
    assert bool(failures_since_success(rows)) == is_out


def test_data_are_the_jobs_until_others_have_done_better():
    """An owner hands in photos that nobody can read; and a machine that cannot read calls all photos wrong."""
    rows = history(*((name, Ending.DATA) for name in 'abc'))
    assert why_quarantined('bad', rows, []) is None
    assert why_quarantined('bad', rows, [attempt(1, 'good', DONE, name) for name in 'abc'])
    assert why_quarantined('bad', rows, [attempt(1, 'good', DONE, 'd')])  # another job of the same owner is a witness for it
    assert why_quarantined('bad', rows, [attempt(1, 'good', Ending.DATA, name) for name in 'abc']) is None


def test_the_reason_quotes_a_line_that_says_something():
    rows = [attempt(1, 'bad', CRASHED, name, message='CUDA error: ECC\n    raise error\n    ^^^^^^^^^^^') for name in 'abc']
    assert why_quarantined('bad', rows, []).splitlines()[1].endswith(': raise error')


def lost_twice(*names, node='bad'):
    return [attempt(epoch, node, Ending.LOST, name, started=100.0 * epoch) for name in names for epoch in (1, 2)]


def test_three_jobs_that_were_lost_twice_each():
    """Its container dies each time, and nobody is left to say so."""
    assert why_quarantined('bad', lost_twice('a', 'b', 'c'), [])
    assert why_quarantined('bad', [*lost_twice('a', 'b'), *history(('c', CRASHED))], [])
    assert not why_quarantined('bad', lost_twice('a', 'b'), [])


def test_jobs_that_kill_containers_everywhere_cost_no_second_machine():
    first = lost_twice('a', 'b', 'c', node='first')
    assert not why_quarantined('bad', lost_twice('a', 'b', 'c'), first)  # the same jobs
    assert not why_quarantined('bad', lost_twice('d', 'e', 'f'), first)  # others of that owner


def test_the_reason_names_the_jobs():
    reason = why_quarantined('bad', THREE, [])
    assert reason.startswith('3 jobs failed on bad since')
    assert reason.count('attempt 1 on bad: crashed') == 3


def test_the_reason_holds_no_tracebacks():
    rows = [replace(one, message='Traceback (most recent call last):\n  File "train.py"\nImportError: no libtorch') for one in THREE]
    lines = why_quarantined('bad', rows, []).splitlines()
    assert len(lines) == 4
    assert all(line.endswith(': ImportError: no libtorch') for line in lines[1:])


@pytest.mark.parametrize(
    ('elsewhere', 'is_nodes'),
    [
        ([], True),
        ([attempt(2, 'x', DONE, 'a', sec=5)], True),
        ([attempt(2, 'x', CRASHED, 'a')], False),
        ([attempt(2, 'x', Ending.DATA, 'a')], False),
        ([attempt(2, 'x', CRASHED, 'a', steps=(0, 500))], False),  # further, and failed all the same
        ([attempt(2, 'x', CRASHED, 'a'), attempt(3, 'y', None, 'a', steps=(0, 11))], True),  # runs beyond the step
        ([attempt(2, 'x', CRASHED, 'a'), attempt(3, 'y', None, 'a', steps=(0, 10))], False),
        ([attempt(2, 'x', CRASHED, 'a'), attempt(3, 'y', DONE, 'a')], True),
        # Not tried elsewhere: others of the owner vote.
        ([attempt(1, 'x', CRASHED, 'b')], False),
        ([attempt(1, 'x', CRASHED, 'b', owner='other')], True),
        ([attempt(1, 'x', CRASHED, 'b'), attempt(1, 'y', None, 'c', sec=61)], True),  # one each: the machine's
        ([attempt(1, 'x', CRASHED, 'b'), attempt(1, 'y', None, 'c', sec=60)], False),  # not longer than the failure
        ([attempt(1, 'x', CRASHED, 'b'), attempt(1, 'y', CRASHED, 'd'), attempt(1, 'z', DONE, 'c')], False),
        ([attempt(1, 'x', CRASHED, 'b'), attempt(1, 'x', DONE, 'd'), attempt(1, 'x', CRASHED, 'e')], True),  # a machine has one vote
        ([attempt(1, 'x', Ending.LOST, 'b', sec=3)], True),
    ],
)
def test_whose_failure(elsewhere, is_nodes):
    assert Elsewhere('bad', elsewhere).is_the_nodes(attempt(1, 'bad', CRASHED, 'a', steps=(0, 10))) == is_nodes


def test_a_flood_of_wrong_jobs_costs_no_machine_but_the_first():
    """Machine after machine takes three jobs that crash wherever they go; others are busy with another owner's."""
    seen, out = [attempt(1, f'busy{i}', None, f'long{i}', sec=9999, owner='other') for i in range(38)], []
    for i in range(20):
        rows = [attempt(1, f'm{i}', CRASHED, f'{i}.{j}', started=1000 * i + 100 * j) for j in range(5)]
        out += [f'm{i}'] if why_quarantined(f'm{i}', rows, seen) else []
        seen += rows
    assert out == ['m0']


@pytest.mark.parametrize('num_bad', [1, 5, 19])
def test_several_broken_machines_among_more_healthy_ones_are_found_before_any_job_has_finished(num_bad):
    bad = {i: [attempt(1, f'bad{i}', CRASHED, f'{i}.{j}', started=100 * j) for j in range(3)] for i in range(num_bad)}
    good = [attempt(1, f'good{i}', None, f'g{i}', sec=300) for i in range(40 - num_bad)]
    for i, rows in bad.items():
        assert why_quarantined(f'bad{i}', rows, good + [row for j in bad if j != i for row in bad[j]])
