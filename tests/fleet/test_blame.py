"""What becomes of a job when an attempt has ended: each row of the table, and the counts at their limits."""

import random

import pytest

from fleet.policies.blame import UNPROVEN, judge, proven_nodes, reopened
from fleet.policies.rows import Ending, ending_of
from tests.fleet.making import DAY, attempt, job

NOW = 5000.0


def decided(*endings, proven=(), quarantined=(), limits=None, forgiven=0, steps=(0, 1)):
    """The decision on a job whose attempts ended so: each an ending, or (ending, machine); machines are n1, n2, ... by default."""
    pairs = [one if isinstance(one, tuple) else (one, f'n{i}') for i, one in enumerate(endings, 1)]
    attempts = [
        attempt(i, node, ending, steps=steps, message=f'message {i}', exit_code=70) for i, (ending, node) in enumerate(pairs, 1)
    ]  # fmt: skip
    return judge(job(limits=limits, epoch=len(pairs), forgiven=forgiven), attempts, proven, quarantined, NOW)


@pytest.mark.parametrize(
    ('code', 'ending'),
    [(0, 'done'), (64, 'recipe'), (65, 'data'), (70, 'crashed'), (73, 'lost'), (75, 'stopped'), (143, 'stopped'), (129, 'stopped'), (76, 'stalled'),
     (77, 'non_finite'), (1, 'crashed'), (-9, 'crashed'), (137, 'crashed'), (139, 'crashed'), (2, 'crashed')],
)  # fmt: skip
def test_exit_codes(code, ending):
    assert ending_of(code) == ending


@pytest.mark.parametrize('code', ['recipe', 'data'])
def test_a_machine_that_calls_a_job_wrong_is_believed_with_a_second_one_that_finishes_others(code):
    """One that answered 64 to everything, such as of an older image, failed 298 of 298 jobs in 13 s."""
    ending, other = Ending(code), Ending.DATA if code == 'recipe' else Ending.RECIPE
    assert [(ban.node, ban.until) for ban in decided(ending, proven=['n1']).bans] == [('n1', NOW + DAY)]
    assert decided(ending, proven=['n1']).state == 'queued'
    found = decided(ending, ending, proven=['n1', 'n2'])
    assert found.state == 'failed'
    assert found.cause.startswith(f'its {"recipe is" if code == "recipe" else "data are"} wrong: 2 machines')
    assert 'message 1' in found.cause
    assert 'message 2' in found.cause
    assert decided(ending, ending, proven=['n1']).state == 'queued'
    assert decided(ending, ending, proven=['n1', 'n2'], quarantined=['n1']).state == 'queued'
    assert decided(ending, other, proven=['n1', 'n2']).state == 'queued'
    assert decided(ending, Ending.LOST, ending, proven=['n1', 'n3']).state == 'failed'
    assert decided(*[ending] * 8).state == 'queued'
    assert decided(*[ending] * 9).state == 'failed'


def test_done_and_cancelled():
    assert decided(Ending.CRASHED, Ending.DONE).state == 'done'
    assert decided(Ending.CANCELLED).state == 'cancelled'
    assert decided(Ending.DONE, limits={'dollars': 0.0001}).state == 'done'  # it has what it paid for


@pytest.mark.parametrize('ending', ['crashed', 'stalled', 'non_finite', 'node_fault'])
def test_a_machine_that_failed_a_job_does_not_get_it_for_a_day(ending):
    found = decided(Ending(ending))
    [banned] = found.bans
    assert (found.state, banned.job, banned.node, banned.since, banned.until) == ('queued', 'j', 'n1', NOW, NOW + DAY)
    assert 'message 1' in found.cause


@pytest.mark.parametrize('ending', ['stopped', 'released', 'lost'])
def test_what_is_nobodys_fault_bans_nobody(ending):
    found = decided(Ending(ending))
    assert (found.state, found.not_before, found.bans) == ('queued', NOW, ())


@pytest.mark.parametrize('lost', [Ending.LOST, Ending.RELEASED, Ending.STOPPED])
def test_a_machine_that_lost_a_job_twice_at_the_same_step_does_not_get_it_for_a_day(lost):
    """A container that is killed whole reports nothing: without this the same machine would take the same job until `limits.losses`.

    One that claimed and gave back did so 351 times, and the job stayed the first in the queue."""
    assert [ban.node for ban in decided((lost, 'n1'), (lost, 'n1')).bans] == ['n1']
    assert [ban.node for ban in decided((lost, 'n1'), (lost, 'n2'), (lost, 'n1')).bans] == ['n1']
    assert decided((lost, 'n1'), (lost, 'n2')).bans == ()
    assert decided((lost, 'n1'), (lost, 'n1'), forgiven=1).bans == ()
    moved = [attempt(1, 'n1', lost, steps=(0, 50)), attempt(2, 'n1', lost, steps=(40, 60))]  # it handed a checkpoint over in between
    assert judge(job(epoch=2), moved, (), (), NOW).bans == ()


@pytest.mark.parametrize('ending', ['crashed', 'stalled'])
@pytest.mark.parametrize('limit', [1, 3])
def test_failures_count_on_proven_machines_alone(ending, limit):
    failures = [Ending(ending)] * limit
    names = [f'n{i}' for i in range(1, limit + 1)]
    found = decided(*failures, proven=names, limits={'attempts': limit})
    assert found.state == 'failed'
    assert all(f'attempt {i} on n{i}: {ending}, exit code 70, after step 1: message {i}' in found.cause for i in range(1, limit + 1))
    assert len(found.bans) == 1
    assert decided(*failures, proven=names[1:], limits={'attempts': limit}).state == 'queued'
    assert decided(*failures, proven=names, quarantined=names[:1], limits={'attempts': limit}).state == 'queued'
    assert decided(*failures[1:], Ending.LOST, proven=names, limits={'attempts': limit}).state == 'queued'


def test_a_machine_proven_later_counts_at_the_next_failure_and_not_before():
    endings = [Ending.CRASHED, Ending.CRASHED, Ending.CRASHED]
    assert decided(*endings).state == 'queued'
    assert decided(*endings, Ending.STOPPED, proven=['n1', 'n2', 'n3']).state == 'queued'  # that attempt went well
    assert decided(*endings, Ending.CRASHED, proven=['n1', 'n2', 'n3']).state == 'failed'


def test_a_job_that_fails_on_machines_without_any_success_ends_too():
    assert UNPROVEN == 3
    assert decided(*[Ending.CRASHED] * 8).state == 'queued'
    found = decided(*[Ending.CRASHED] * 9)
    assert found.state == 'failed'
    assert 'message 9' in found.cause
    assert decided(*[Ending.NON_FINITE, Ending.CRASHED] * 4, Ending.CRASHED, limits={'attempts': 3}).state == 'failed'
    assert decided(*[(Ending.NON_FINITE, 'only')] * 8).state == 'queued'
    assert decided(*[(Ending.NON_FINITE, 'only')] * 9).state == 'failed'


@pytest.mark.parametrize('quarantined', [False, True])
@pytest.mark.parametrize('ending', ['lost', 'crashed', 'node_fault'])
def test_machines_that_vanish_are_losses_and_so_are_failures_of_quarantined_ones(ending, quarantined):
    endings = [(Ending(ending), 'bad')] * 21
    names = ['bad'] if quarantined else []
    assert decided(*endings[:20], quarantined=names, limits={'attempts': 100}).state == 'queued'
    expected = 'queued' if ending == 'crashed' and not quarantined else 'failed'
    found = decided(*endings, quarantined=names, limits={'attempts': 100})
    assert found.state == expected
    assert expected == 'queued' or 'limits.losses is 20' in found.cause


def test_losses_are_not_counted_after_an_attempt_that_went_well():
    endings, names = [(Ending.CRASHED, 'bad')] * 21, ['bad']
    assert decided(*endings, Ending.STOPPED, quarantined=names).state == 'queued'
    assert decided(*endings, Ending.LOST, quarantined=names).state == 'failed'


def test_nan_fails_on_the_second_machine():
    nan = Ending.NON_FINITE
    assert decided((nan, 'a')).state == 'queued'
    assert decided((nan, 'a'), (nan, 'a')).state == 'queued'  # its ban was lifted: still one machine
    assert decided((nan, 'a'), (nan, 'b')).state == 'failed'
    assert decided((nan, 'a'), Ending.LOST, (nan, 'b')).state == 'failed'
    assert decided((nan, 'a'), (Ending.CRASHED, 'b')).state == 'queued'
    assert decided((nan, 'a'), (nan, 'b'), quarantined=['a']).state == 'queued'


@pytest.mark.parametrize('ending', ['stopped', 'lost', 'crashed', 'released', 'limit'])
def test_hours_and_dollars_end_a_job(ending):
    attempts = [attempt(1, 'a', Ending.LOST, sec=1800, price=0.4), attempt(2, 'b', Ending(ending), sec=1800, price=0.2)]  # 1 h, $0.30
    for limits, state in [({'hours': 1.0}, 'failed'), ({'dollars': 0.3}, 'failed'), ({'hours': 1.01, 'dollars': 0.31}, 'queued')]:
        found = judge(job(limits=limits, epoch=2), attempts, (), (), NOW)
        assert found.state == ('failed' if ending == 'limit' else state)
        if state == 'failed':
            assert f'limits.{next(iter(limits))}' in found.cause
    assert judge(job(limits={'hours': 1.0}, epoch=2, forgiven=1), attempts, (), (), NOW).state == ('failed' if ending == 'limit' else 'queued')


def test_attempts_before_a_retry_count_no_more():
    endings, names = [Ending.CRASHED] * 4, ['n1', 'n2', 'n3', 'n4']
    assert decided(*endings, proven=names).state == 'failed'
    assert decided(*endings, proven=names, forgiven=3).state == 'queued'
    assert decided(*endings, proven=names, forgiven=3, limits={'attempts': 1}).state == 'failed'


def test_a_job_that_makes_no_step_waits_longer_each_time():
    pauses = [decided(*[Ending.STOPPED] * num, steps=(5, 5)).not_before - NOW for num in range(1, 9)]
    assert pauses == [0, 30, 60, 120, 240, 480, 900, 900]
    assert decided(*[Ending.STOPPED] * 5, steps=(5, 6)).not_before == NOW
    assert decided(*[Ending.LOST] * 5, steps=(5, 5)).not_before == NOW  # the machines', which vanish
    assert decided(Ending.STOPPED, Ending.LOST, Ending.STOPPED, steps=(5, 5)).not_before == NOW + 30


def test_an_attempt_that_runs_cannot_be_judged():
    with pytest.raises(ValueError, match='attempt 1 has not ended'):
        decided(None)


def test_proven_by_another_job_alone():
    rows = [
        attempt(1, 'a', Ending.DONE, 'other'),
        attempt(1, 'b', Ending.DONE, 'j'),
        attempt(1, 'c', Ending.STOPPED, 'other'),
        attempt(2, 'd', job='other'),
    ]
    assert proven_nodes('j', rows) == {'a'}


def test_jobs_failed_by_a_machine_that_is_quarantined_later_return():
    proven = ['bad', 'good', 'fine']

    def failed(id, *pairs, state='failed'):
        return job(id, state=state, epoch=len(pairs)), [attempt(i, node, ending, id) for i, (ending, node) in enumerate(pairs, 1)]

    crashed, nan = Ending.CRASHED, Ending.NON_FINITE
    cases = {
        'back': failed('back', (crashed, 'bad'), (crashed, 'good'), (crashed, 'fine')),
        'nan': failed('nan', (nan, 'bad'), (nan, 'good')),
        'own': failed('own', (crashed, 'bad'), (crashed, 'good'), (crashed, 'good'), (crashed, 'fine')),
        'stranger': failed('stranger', (crashed, 'good'), (crashed, 'good'), (crashed, 'fine')),
        'data': failed('data', (crashed, 'bad'), (Ending.DATA, 'good'), (Ending.DATA, 'fine')),
        'queued': failed('queued', (crashed, 'bad'), state='queued'),
        'done': failed('done', (crashed, 'bad'), (Ending.DONE, 'good'), state='done'),
    }
    jobs, attempts = [one for one, _ in cases.values()], {one.id: rows for one, rows in cases.values()}
    found = reopened('bad', jobs, attempts, dict.fromkeys(cases, proven), (), NOW)
    assert [(one.id, decision.state, decision.not_before) for one, decision in found] == [('back', 'queued', NOW), ('nan', 'queued', NOW)]
    assert reopened('other', jobs, attempts, dict.fromkeys(cases, proven), (), NOW) == []


@pytest.mark.parametrize('seed', range(40))
def test_every_job_ends_whatever_happens_to_it(seed):
    """Attempts without a success: at most losses + 1 of one kind and UNPROVEN x attempts of the other; only stops are free, and they cost hours."""
    draw = random.Random(seed)
    kinds = [Ending.CRASHED, Ending.STALLED, Ending.NON_FINITE, Ending.LOST, Ending.NODE_FAULT]
    kinds = draw.sample(kinds, draw.randint(1, len(kinds)))
    attempts, state = [], 'queued'
    one = job(limits={'attempts': draw.randint(1, 4), 'losses': draw.randint(1, 20)})
    while state == 'queued':
        attempts.append(attempt(len(attempts) + 1, draw.choice('abcdefgh'), draw.choice(kinds), sec=1))
        state = judge(one, draw.sample(attempts, len(attempts)), draw.choice(['', 'abc']), draw.choice(['', 'ah']), NOW).state
        assert len(attempts) <= 3 * one.limits.attempts + one.limits.losses + 3 + 20
    assert state == 'failed'
