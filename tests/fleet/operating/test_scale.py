"""How many machines are wanted, and the command that is told so."""

import json
import shlex
import sys
from types import SimpleNamespace

import pytest

from diffusion.contracts.errors import InputError
from fleet.commands.operator import ScaleCommand


def ask(service, **query):
    answer = service.get('/scale', params={'max': 10, **query})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_one_machine_for_each_job_up_to_the_limit(service, made_up):
    assert ask(service)['replicas'] == 0
    for _ in range(15):
        made_up.job('anna')
    assert ask(service)['replicas'] == 10
    assert ask(service, max=4)['replicas'] == 4
    made_up.connection.execute("update owner set max_leased = 3 where name = 'anna'")
    assert ask(service)['replicas'] == 3


def test_a_new_image_gets_machines(service, made_up, connection):
    """Machines that are here run another image; those that come run the one that was deployed since."""
    made_up.node('m')
    made_up.job('anna')
    connection.execute("update job set image = 'sha256:new'")
    assert ask(service)['takeable'] == 1


def test_wanted_hours_count_what_jobs_took(service, made_up):
    made_up.node('m', since=600)
    job = made_up.job('anna', state='done', ended=60, epoch=1)
    made_up.attempt(job, 1, 'm', 120, 60, (0, 1400), 'done')
    for _ in range(8):
        made_up.job('anna')
    made_up.job('anna', step=700, epoch=1)  # half of it is done
    answer = ask(service, wanted_hours=4)
    assert answer['remaining_hours'] == pytest.approx(8.5)
    assert answer['replicas'] == 3
    assert ask(service)['replicas'] == 9


def test_machines_that_work_stay_and_those_idle_for_long_leave(service, made_up):
    made_up.node('works', since=100)
    made_up.node('idle-long', since=100)
    made_up.node('idle-longer', since=90)
    made_up.node('just-done', since=100)
    made_up.node('just-came', since=2)
    running = made_up.job('anna', state='leased', node='works', epoch=1)
    made_up.attempt(running, 1, 'works', 50, 0, (0, 100), pace=0.5)
    done = made_up.job('anna', state='done', ended=1, epoch=1)
    made_up.attempt(done, 1, 'just-done', 50, 1, (0, 1400), 'done')
    earlier = made_up.job('anna', state='done', ended=20, epoch=1)
    made_up.attempt(earlier, 1, 'idle-long', 50, 20, (0, 1400), 'done')
    answer = ask(service)
    assert (answer['wanted'], answer['replicas'], answer['drain']) == (1, 3, ['idle-longer', 'idle-long'])
    assert ask(service, idle_sec=0)['replicas'] == 1


@pytest.mark.parametrize('query', [{'max': 'many'}, {'max': -1}, {'wanted_hours': 0}])
def test_what_is_no_number_is_refused(query, service):
    assert service.get('/scale', params={'max': 10, **query}).status_code == 400


class Answers:
    """A service that says what it is told to."""

    def __init__(self, *answers):
        self.answers, self.posted = list(answers), []

    def get(self, path, **query):
        return {'live': 0, 'why': '', 'drain': [], **self.answers.pop(0)}

    def post(self, path, content=None):
        self.posted.append(path)


def scaler(tmp_path, *answers, code=0, **options):
    program = f'import json, sys; open({str(tmp_path / "calls")!r}, "a").write(json.dumps(sys.argv[1:]) + "\\n"); sys.exit({code})'
    command = ScaleCommand(command=shlex.join([sys.executable, '-c', program, '--replicas={replicas}', 'a b']), max=10, **options)
    service = Answers(*answers)
    return lambda: command.look(service), service.posted


def calls(tmp_path):
    return [json.loads(line) for line in (tmp_path / 'calls').read_text().splitlines()] if (tmp_path / 'calls').exists() else []


def test_the_command_runs_when_the_number_changes_and_again_after_ten_minutes(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr('fleet.commands.operator.time', SimpleNamespace(monotonic=lambda: now[0]))
    look, _ = scaler(tmp_path, *[{'replicas': n} for n in (3, 3, 4, 4, 4)])
    for _ in range(4):
        look()
        now[0] += 60
    assert calls(tmp_path) == [['--replicas=3', 'a b'], ['--replicas=4', 'a b']]
    now[0] += 600
    look()
    assert len(calls(tmp_path)) == 3


def test_a_command_that_fails_runs_again(tmp_path, capsys):
    look, _ = scaler(tmp_path, {'replicas': 3}, {'replicas': 3}, code=5)
    assert not look()
    assert not look()
    assert len(calls(tmp_path)) == 2
    assert 'ended with 5' in capsys.readouterr().err


def test_idle_machines_leave_before_their_number_shrinks(tmp_path):
    look, posted = scaler(tmp_path, {'replicas': 1, 'drain': ['m/1']})
    look()
    assert posted == ['/nodes/m%2F1/drain']
    assert calls(tmp_path) == [['--replicas=1', 'a b']]


def test_a_dry_run_changes_nothing(tmp_path, capsys):
    look, posted = scaler(tmp_path, {'replicas': 1, 'drain': ['m']}, dry_run=True)
    assert look()
    assert (posted, calls(tmp_path)) == ([], [])
    assert 'would run:' in capsys.readouterr().out


def test_the_command_is_split_as_a_shell_would_and_no_shell_runs():
    assert ScaleCommand(command="a 'b c' --n={replicas}; rm x", max=1).words() == ['a', 'b c', '--n={replicas};', 'rm', 'x']
    for text in ('kubectl scale', "a '{replicas}"):
        with pytest.raises(InputError, match='--command'):
            ScaleCommand(command=text, max=1).words()
