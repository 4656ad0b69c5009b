"""Runs all commands in one process that cannot import what takes seconds; prints what each answers, as JSON.

python tests/answers.py COMMAND ...     a module, or a file that ends in .py
"""

import contextlib
import io
import json
import os
import runpy
import sys
import traceback
from pathlib import Path

HEAVY = {'torch', 'streaming', 'composer', 'diffusers', 'transformers', 'matplotlib', 'scipy', 'pandas', 'pyarrow'}


class Forbidden:
    """A finder that is asked before all others."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition('.')[0] in HEAVY:
            raise AssertionError(f'{name} is imported before the arguments are read')


def answer(command, argument):
    """(exit code, what went wrong) of `COMMAND ARGUMENT`."""
    sys.argv = [command, argument]
    try:
        runpy.run_path(command, run_name='__main__') if command.endswith('.py') else runpy.run_module(command, run_name='__main__')
    except SystemExit as ended:
        return ended.code or 0, ''
    except BaseException:
        return 1, traceback.format_exc()
    return 0, ''


def printed(command, argument):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code, wrong = answer(command, argument)
    return {'code': code, 'stdout': out.getvalue(), 'stderr': err.getvalue(), 'wrong': wrong}


def unread(command, argument):
    """The same into a pipe whose other end is closed, as by `| head`; at its end Python writes what is left."""
    reader, writer = os.pipe()
    os.close(reader)
    with contextlib.redirect_stdout(open(writer, 'w', closefd=False)) as pipe:
        code, wrong = answer(command, argument)
        try:
            pipe.flush()
        except BrokenPipeError:
            wrong += traceback.format_exc()
    return {'code': code, 'wrong': wrong}


if __name__ == '__main__':
    sys.path[0] = str(Path(__file__).parents[1])
    sys.meta_path.insert(0, Forbidden)
    for command in sys.argv[1:]:
        answers = {'help': printed(command, '--help'), 'mistake': printed(command, '--no-such-option'), 'unread': unread(command, '--help')}
        print(json.dumps({'command': command, **answers}))
