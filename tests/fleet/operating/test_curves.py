"""The loss of a job while it runs, in the terminal and on its page; and the page that compares the jobs of a group."""

from itertools import pairwise

import pytest

from fleet.client.tables import curve_lines
from fleet.queue.leases import MAX_POINTS, extended
from fleet.service import gate
from tests.fleet.operating.test_page import page_of


def point(step, loss=0.5):
    return [step, loss, 1e-4, 2.0]


def test_a_curve_is_even_and_bounded():
    curve = []
    for begin in range(0, 100_000, 50):
        curve = extended(curve, [point(step) for step in range(begin + 1, begin + 51)], 100_000)
    steps = [step for step, *_ in curve]
    assert MAX_POINTS <= len(steps) <= MAX_POINTS + 1
    assert {after - before for before, after in pairwise(steps[:-1])} == {250}
    assert steps[-1] == 100_000


def test_a_resume_replaces_what_the_lost_attempt_had_said():
    curve = extended([], [point(step, 0.9) for step in range(1, 11)], 20)
    curve = extended(curve, [point(step, 0.1) for step in range(6, 9)], 20)
    assert [(step, loss) for step, loss, *_ in curve] == [(1, 0.9), (2, 0.9), (3, 0.9), (4, 0.9), (5, 0.9), (6, 0.1), (7, 0.1), (8, 0.1)]
    assert extended(curve, [[None, 1, 1, 1], point(-1), point(21)], 20) == curve


@pytest.fixture
def running(service, made_up, connection):
    """A job on a machine; returns a function that says something of it."""
    session = made_up.node('m')
    connection.execute('update session set token_hash = %s where id = %s', [gate.digest('node'), session])
    job = made_up.job('anna', 'timber', state='leased', node='m', epoch=1, overrides={'optimizer.lr': 1e-4}, group='lr')
    made_up.attempt(job, 1, 'm', 30, 0, (0, 150))

    def say(verb='renew', **content):
        return service.client.post(f'/jobs/{job}/{verb}', json={'epoch': 1, **content}, headers={'Authorization': 'Bearer node'})

    say.job = job
    return say


def test_an_owner_sees_the_loss_while_the_job_runs(service, running):
    assert running(step=100, curve=[point(step, 1 / step) for step in range(1, 101)]).status_code == 200
    answer = service.get(f'/jobs/{running.job}', 'anna').json()
    assert answer['curve'][0] == [1, 1.0, 1e-4, 2.0]
    assert len(answer['curve']) == 25  # of 1,400 steps each fourth
    loss, rate, pace = curve_lines(answer['curve'])[1:]
    assert loss.startswith('loss          █')
    assert loss.endswith('1 at step 1, 0.01031 at step 97')
    assert rate.endswith('0.0001 at step 1, 0.0001 at step 97')
    assert pace.startswith('steps/s')
    page = page_of(service, f'/jobs/{running.job}/page', 'anna')
    assert 'Training' in page.text
    assert page.attributes('svg')[0]['aria-label'].startswith('loss over steps, from ')
    assert running('end', exit_code=75, curve=[point(104)]).status_code == 200
    assert service.get(f'/jobs/{running.job}', 'anna').json()['curve'][-1][0] == 104


@pytest.mark.parametrize('curve', [[[1, 2, 3]], [[1, 2, 3, 'x']], [point(1)] * 1001, 'x', None])
def test_what_is_no_curve_is_refused(curve, running):
    assert running(curve=curve).status_code == 422


def test_a_group_is_compared(service, running, made_up):
    made_up.job('anna', 'fast', overrides={'optimizer.lr': 5e-4}, group='lr')
    made_up.job('ben', 'other', overrides={'optimizer.lr': 5e-3}, group='lr')
    running(step=100, curve=[point(step, 1 / step) for step in range(1, 101)])
    page = page_of(service, '/groups/lr/page', 'anna')
    assert '2 jobs of one group' in page.text
    for text in ('timber', 'fast', '0.0005', 'optimizer.lr', 'running', 'waiting'):
        assert text in page.text, text
    assert 'other' not in page.text
    line, sample = page.attributes('polyline')  # in the drawing, and beside the name of its job
    assert line['style'] == sample['style'] == '--colour: var(--series1); stroke-dasharray: none'
    assert '3 jobs of one group' in page_of(service, '/groups/lr/page').text
    assert service.get('/groups/none/page', 'anna').status_code == 404


def test_each_of_twelve_jobs_of_a_group_has_a_line_of_its_own(service, made_up, connection):
    for number in range(12):
        made_up.job('anna', f'job-{number}', overrides={'seed': number}, group='seeds')
    connection.execute("update job set curve = '[[1, 0.5, 1e-4, 2.0], [700, 0.25, 1e-4, 2.0]]'")
    styles = [line['style'] for line in page_of(service, '/groups/seeds/page', 'anna').attributes('polyline') if line['points'] != '1,3 23,3']
    assert len(set(styles)) == len(styles) == 12
