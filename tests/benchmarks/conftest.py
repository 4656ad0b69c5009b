"""Checks of small parts."""

import pytest

from benchmarks.checking.cases import Setting
from benchmarks.checking.slices import Check
from tests.benchmarks.small_parts import MACHINE, part


@pytest.fixture
def check(tmp_path):
    """Makes a check of small parts; each of them in a process of its own, as on a GPU."""

    def make(*functions, machine=MACHINE, tiny=False):
        setting = Setting(tiny, str(tmp_path / 'work'), str(tmp_path / 'rows'))
        (tmp_path / 'work').mkdir(exist_ok=True)
        return Check([part(function, function) for function in functions], setting, tmp_path / 'rows.jsonl', machine, reserve_sec=0.0)

    return make
