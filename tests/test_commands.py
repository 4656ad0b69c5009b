"""Every command answers --help and a wrong argument before it imports what takes seconds, also if nobody reads the answer to its end."""

import json
import re
import runpy
import sys

import pytest

from tests.conftest import REPOSITORY, run_python


def commands():
    """All files that can be run: modules of the packages, and files next to them."""
    files = [
        path.relative_to(REPOSITORY)
        for folder in ('diffusion', 'data_prep', 'fleet', 'benchmarks', 'launch', '.')
        for path in listed(REPOSITORY / folder)
    ]
    runnable = [path for path in files if "\nif __name__ == '__main__':" in (REPOSITORY / path).read_text()]
    return [str(path) if path.parent.name == '' else '.'.join(path.with_suffix('').parts) for path in sorted(runnable)]


def listed(folder):
    return folder.glob('*.py') if folder == REPOSITORY else folder.rglob('*.py')


COMMANDS = commands()


@pytest.fixture(scope='module')
def answers():
    """By command; from one process, as a start each would take a minute."""
    lines = run_python('tests/answers.py', *COMMANDS).stdout.splitlines()
    return {answer['command']: answer for answer in map(json.loads, lines)}


def test_the_commands_are_found():
    assert {'train.py', 'diffusion.check', 'diffusion.demo.__main__', 'diffusion.stand_in', 'data_prep.encode', 'benchmarks.step'} <= {*COMMANDS}


@pytest.mark.parametrize('command', COMMANDS)
def test_every_command_explains_itself_at_once(command, answers):
    answer = answers[command]['help']
    assert (answer['code'], answer['wrong']) == (0, '')
    assert command.removesuffix('.__main__') in answer['stdout']
    assert len(answer['stdout'].splitlines()) > 5


@pytest.mark.parametrize('command', COMMANDS)
def test_every_command_refuses_a_wrong_argument_at_once(command, answers):
    answer = answers[command]['mistake']
    assert (answer['code'], answer['wrong']) == (64 if command in ('train.py', 'diffusion.autoencoder') else 2, '')
    assert answer['stderr']


def test_an_argument_that_is_not_utf8_is_refused_before_the_work(monkeypatch, capsys, tmp_path):
    """DEST of such a name once failed when all rows were converted."""
    monkeypatch.setattr(sys, 'argv', ['convert', str(tmp_path), str(tmp_path / 'out\udcff')])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module('data_prep.convert', run_name='__main__')
    assert ended.value.code == 2
    assert 'out\\udcff: is not UTF-8; rename' in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


SOURCES = [
    ('convert', 'OUT'),
    ('encode', 'OUT', '--resolution', '64', '--encoders', '.'),
    ('recaption', 'OUT', '--model', '.'),
    ('download', 'OUT'),
    ('audit',),
]


@pytest.mark.parametrize(('command', 'options'), [(command, options) for command, *options in SOURCES])
@pytest.mark.parametrize('is_there', [True, False])
def test_a_source_is_looked_at_before_large_libraries_are_imported(command, options, is_there, tmp_path):
    """`convert NOFOLDER` once imported torch and transformers for 9 seconds before it said so."""
    source = tmp_path / 'source'
    if is_there:
        source.mkdir()
    program = (
        'import runpy, sys\nsys.argv = sys.argv[1:]\ntry:\n    runpy.run_module(sys.argv[0], run_name="__main__")\n'
        'except SystemExit as end:\n    print(end.code, sorted({"torch", "transformers", "streaming", "ray"} & sys.modules.keys()))'
    )
    options = [str(tmp_path / 'out') if option == 'OUT' else option for option in options]
    ended = run_python('-c', program, f'data_prep.{command}', source, *options)
    assert ended.stdout == '2 []\n'
    assert str(source) in ended.stderr


@pytest.mark.parametrize(
    'command', ['diffusion.check', 'diffusion.evaluate', 'data_prep.convert', 'data_prep.shapes', 'benchmarks.step', 'benchmarks.report']
)
def test_no_command_takes_the_beginning_of_an_option(command, monkeypatch, capsys):
    """`--hel` once meant --help; another option that begins so would give it another meaning, or none."""
    monkeypatch.setattr(sys, 'argv', [command, '--hel'])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(command, run_name='__main__')
    assert ended.value.code == 2
    assert capsys.readouterr().out == ''


@pytest.mark.parametrize('command', ['diffusion.generate', 'diffusion.watch', 'diffusion.evaluate'])
@pytest.mark.parametrize('scale', ['nan', '-1', '0.5'])
def test_every_command_that_draws_refuses_the_same_guidance(command, scale, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', [command, 'MODEL', f'--guidance={scale}'])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(command, run_name='__main__')
    assert ended.value.code == 2
    assert re.search(f'--guidance:? .*{scale}', capsys.readouterr().err)


@pytest.mark.parametrize('command', COMMANDS)
def test_help_may_be_left_early(command, answers):
    assert answers[command]['unread'] == {'code': 0, 'wrong': ''}
