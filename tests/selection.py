"""Which tests run, and in what order: the files that take longest first, slow files and long tests in turns, and tests in quarantine, which cannot fail a
run.

`tests/seconds.json` has the seconds of each file that took RECORDED_SEC or more in the last recorded run; `pytest --record` writes it.
"""

import json
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from zlib import crc32

import pytest

TESTS = Path(__file__).parent
SECONDS = TESTS / 'seconds.json'
QUARANTINE = TESTS / 'quarantine.txt'
RECORDED_SEC = 3
SLOW_SEC = 60  # of a file: with those that take longer `make test` would take three quarters of an hour
LONG_LIMIT_SEC = 1800  # others have 300, which a compilation exceeds beside other work
NUM_TURNS = 7
# One commit a day and one every few hours both go through all turns: a day has six periods, and there are seven turns.
TURN_PERIOD_SEC = 4 * 3600


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup('this repository')
    group.addoption('--under', type=float, metavar='SEC', help='leave out the files of tests that take so long or longer')
    group.addoption('--turn', action='store_true', help=f'of long tests and files of {SLOW_SEC} s or more the seventh that this commit has to run')
    group.addoption('--record', action='store_true', help=f'write the seconds of each file that ran to {SECONDS.relative_to(TESTS.parent)}')


@pytest.hookimpl(trylast=True)  # `-m` has chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seconds = json.loads(SECONDS.read_text())
    left_out = set()
    if (limit_sec := config.getoption('under')) is not None:
        left_out |= {item for item in items if seconds.get(_file(item.nodeid), 0) >= limit_sec}
    if config.getoption('turn'):
        committed = int(subprocess.check_output(['git', 'show', '--no-patch', '--format=%ct', 'HEAD'], cwd=TESTS))
        turns = turns_of_slow_files(seconds)
        for item in items:
            file = _file(item.nodeid)
            is_apart = file in turns or item.get_closest_marker('long')
            if not is_apart or turns.get(file, turn_of(file)) != committed // TURN_PERIOD_SEC % NUM_TURNS:
                left_out.add(item)
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    flaky = quarantined()
    for item in items:
        if item.get_closest_marker('long') and not item.get_closest_marker('timeout'):
            item.add_marker(pytest.mark.timeout(LONG_LIMIT_SEC))
        if reason := flaky.get(item.nodeid):
            item.add_marker(pytest.mark.xfail(reason=reason, strict=False))
    items.sort(key=lambda item: -seconds.get(_file(item.nodeid), 0))


def turn_of(file: str) -> int:
    """Return the turn in which the long tests of a file run: together, since they share what they are set up with."""
    return crc32(file.encode()) % NUM_TURNS


def turns_of_slow_files(seconds: Mapping[str, float]) -> dict[str, int]:
    """Return the turn of each slow file: the longest first, each into the turn that is the shortest until then."""
    turns, taken_sec = {}, [0.0] * NUM_TURNS
    for file, sec in sorted(seconds.items(), key=lambda item: (-item[1], item[0])):
        if sec >= SLOW_SEC:
            turns[file] = taken_sec.index(min(taken_sec))
            taken_sec[turns[file]] += sec
    return turns


def quarantined() -> dict[str, str]:
    """Return the tests of quarantine.txt, by their names, with what is known of each."""
    lines = [line for line in QUARANTINE.read_text().splitlines() if line and not line.startswith('#')]
    return {name.strip(): reason.strip() for name, _, reason in (line.partition(' # ') for line in lines)}


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption('record') and not hasattr(config, 'workerinput'):  # one of several processes hears of all tests
        config.pluginmanager.register(Recorder())


class Recorder:
    """Writes SECONDS after each test, so that an ended run has recorded what it ran."""

    def __init__(self) -> None:
        self.known = json.loads(SECONDS.read_text())
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[_file(report.nodeid)] += report.duration
        known = {**self.known, **self.seconds}
        known = {name: round(known[name]) for name in sorted(known) if known[name] >= RECORDED_SEC and (TESTS / name).is_file()}
        SECONDS.write_text(json.dumps(known, indent=0) + '\n')


def _file(nodeid: str) -> str:
    return nodeid.partition('::')[0].removeprefix('tests/')
