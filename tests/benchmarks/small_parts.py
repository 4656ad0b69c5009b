"""Cases of a GPU check that need neither torch nor time: what test_gpu_check.py lets its processes measure."""

import os
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.checking.cases import Case, CheckPart, NotHere
from benchmarks.checking.judging import load_predictions

MACHINE = {'commit': 'abc1234', 'torch': '2.14.1', 'gpu': None, 'cpu': 'a CPU', 'num_cores': 2, 'cuda': None, 'python': '3.11', 'date': 'then'}


PREDICTIONS = """
tolerance: 0.15
devices:
  cpu: [{part: ceilings, row: copy, key: gb_per_sec, low: 1e9, high: 1e9, source: a mistake}]
roofline: {source: x, resolution: 1, micro_batch: 1, classes: {}}
"""


def part(name, function):
    return CheckPart(name, f'tests.benchmarks.small_parts:{function}', 1, f'about {name}')


def counted(setting, name):
    """Adds a line to a file for each time that a case is measured."""
    with (Path(setting.work) / 'measured.txt').open('a') as file:
        file.write(f'{name}\n')
    return {'gb_per_sec': 10.0}


def measured(check):
    path = check.setting.folder / 'measured.txt'
    return path.read_text().split() if path.exists() else []


def predictions():
    return replace(load_predictions(), devices={})


def good(setting):
    return [Case(name, lambda name=name: counted(setting, name), planned_sec=0.1) for name in ('first', 'second')]


def skipped(setting):
    def measure():
        raise NotHere('needs the moon')

    return [Case('on the moon', measure)]


def failing(setting):
    def measure():
        raise ValueError('this is wrong')

    return [Case('raises', measure), *good(setting)]


def crashing(setting):
    return [
        Case('before', lambda: counted(setting, 'before')),
        Case('crashes', lambda: os._exit(7)),
        Case('after', lambda: counted(setting, 'after')),
    ]


def broken(setting):
    raise ImportError('no such library')


def out_of_limits(setting):
    return [Case('check', lambda: {'checks': {'fine': [1, 1], 'too large': [3.0, 2.0], 'not a number': [float('nan'), 2.0]}})]


def endless(setting):
    """Killed at the slice's end in its first slice; a second one finds `measured.txt` and is quick."""

    def measure():
        counted(setting, 'slow')
        if (Path(setting.work) / 'measured.txt').read_text().count('slow') == 1:
            time.sleep(600)
        return {}

    # A quarter of the slice is over when it begins, so that the slice ends before its limit does.
    return [Case('first', lambda: time.sleep(2.5) or counted(setting, 'first'), planned_sec=0.1), Case('slow', measure, planned_sec=0.1)]


def hanging(setting):
    return [Case('hangs', lambda: time.sleep(600), planned_sec=-29.0), Case('next', lambda: counted(setting, 'next'))]


def planned_long(setting):
    return [*good(setting), Case('long', dict, planned_sec=1000.0)]


def compiles(setting):
    def measure():
        for name in ('TORCHINDUCTOR_CACHE_DIR', 'TRITON_CACHE_DIR'):
            folder = Path(os.environ[name])
            folder.mkdir(parents=True)
            (folder / 'kernel').touch()
        return {}

    return [Case('compile', measure)]
