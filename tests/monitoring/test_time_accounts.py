"""The accounts close, whatever happened to the processes of a run; and the interval between saves is the published one."""

import dataclasses
import math
import os
import time
from pathlib import Path

import pytest

from diffusion.common import stopwatch
from diffusion.common.files import json_line, open_to_append, read_json_lines
from diffusion.common.stopwatch import Stopwatch, process_age_sec
from diffusion.cost.formulas import best_interval_sec, overhead
from diffusion.monitoring.time_accounts import account, propose, rows, summary
from diffusion.recipe import Duration


def line(process, at, event='steps', batch=None, steps=0, gpus=None, **sec):
    """A line of events.jsonl, written at second `at`."""
    reached = {} if batch is None else {'batch': batch, 'steps': steps}
    gpus = {} if gpus is None else {'gpus': gpus}
    return {
        'event': event,
        'process': process,
        'time': float(at),
        **gpus,
        **reached,
        'sec': {name.replace('_', ' '): float(value) for name, value in sec.items()},
    }


def closed(accounts, wall_sec):
    assert accounts.wall_sec == pytest.approx(wall_sec)
    assert sum(accounts.sec.values()) == pytest.approx(wall_sec)
    assert min(accounts.sec.values()) >= 0
    assert sum(float(share[:-1]) for _, _, share, _ in rows(accounts)[:-1]) == pytest.approx(100, abs=0.5)
    return accounts


# Killed after batch 30, its last checkpoint at 20; a minute later the next goes on and finishes.
KILLED = [
    line('a', 1005, 'start', gpus=8, start=5),
    line('a', 1020, 'begin', batch=0, start=15),
    line('a', 1030, batch=10, steps=10, compute=9, data_wait=1),
    line('a', 1040, batch=20, steps=10, compute=10),
    line('a', 1043, 'save', batch=20, save=3),
    line('a', 1053, batch=30, steps=10, compute=10),
]
RESUMED = [
    line('b', 1118, 'start', gpus=8, start=5),
    line('b', 1128, 'begin', batch=20, start=10),
    line('b', 1138, batch=30, steps=10, compute=10),
    line('b', 1150, 'evaluation', batch=30, evaluation=12),
    line('b', 1160, batch=40, steps=10, compute=10),
    line('b', 1165, 'save', batch=40, save=5),
    line('b', 1166, 'sampling', batch=40, sampling=1),
    line('b', 1167, 'end', batch=40, other=1),
]


def test_a_run_that_was_killed_and_went_on():
    accounts = closed(account(KILLED + RESUMED), 1167 - 1000)
    assert accounts.sec == {
        'start': 35, 'compute': 39, 'recompute': 10, 'data wait': 1, 'save': 8, 'upload': 0, 'stopped': 60, 'evaluation': 12, 'sampling': 1, 'other': 1,
    }  # fmt: skip
    assert accounts.goodput == pytest.approx(39 / 167)
    assert (accounts.num_steps, accounts.num_lost_steps, accounts.num_processes) == (50, 10, 2)
    assert (accounts.saves_sec, accounts.starts_sec) == ([3, 5], [20, 15])
    assert accounts.gpu_hours == pytest.approx(8 * (167 - 60) / 3600)
    assert accounts.step_sec == pytest.approx(50 / 50)


def test_the_run_is_accounted_for_while_it_goes_on():
    for count in range(1, len(KILLED + RESUMED) + 1):
        lines = (KILLED + RESUMED)[:count]
        closed(account(lines), lines[-1]['time'] - 1000)
    assert account([]).goodput == 0


def test_lost_steps_are_those_done_again_however_often():
    """Back to 20, to 25 (in the middle of a line), to 5; back within a process too."""
    lines, at, done = [], 0, 0
    for process, (begin, end) in zip('abcd', ((0, 30), (20, 45), (25, 50), (5, 60)), strict=True):
        lines.append(line(process, at := at + 4, 'begin', batch=begin, start=4))
        for batch in range(begin + 10, end + 1, 10):
            lines.append(line(process, at := at + 20, batch=batch, steps=10, compute=20))
            done += 10
        if rest := (end - begin) % 10:
            lines.append(line(process, at := at + 2 * rest, batch=end, steps=rest, compute=2 * rest))
            done += rest
    # It steps to 65, goes back to 55, and is at 62 when it writes again.
    lines.append(line('d', at := at + 24, batch=62, steps=12, compute=24))
    accounts = closed(account(lines), at)
    assert accounts.num_steps == done + 12
    assert accounts.num_steps - accounts.num_lost_steps == 62
    assert accounts.sec['compute'] == pytest.approx(2 * 62)
    assert accounts.sec['recompute'] == pytest.approx(2 * accounts.num_lost_steps)


def test_an_unfinished_step_is_lost():
    lines = [*KILLED, line('a', 1060, 'end', batch=30, compute=7)]
    accounts = closed(account(lines), 60)
    assert (accounts.sec['compute'], accounts.sec['recompute'], accounts.num_lost_steps) == (29, 7, 0)


def test_a_first_step_that_fails_is_a_start():
    """It compiles for two minutes, and no step was there to be lost; so it is in a process that continues another."""
    lines = [line('a', 1005, 'start', gpus=8, start=5), line('a', 1020, 'begin', batch=0, start=15), line('a', 1135, 'end', batch=0, compute=115)]
    accounts = closed(account(lines), 135)
    assert {name: sec for name, sec in accounts.sec.items() if sec} == {'start': 135}
    assert accounts.num_lost_steps == 0
    again = closed(account([*KILLED, *RESUMED[:2], line('b', 1135, 'end', batch=20, compute=7)]), 135)
    assert (again.sec['start'], again.sec['recompute'], again.num_lost_steps) == (20 + 15 + 7, 10, 10)


def test_steps_that_no_checkpoint_holds_are_not_saved():
    ended = [*KILLED, {**line('a', 1054, 'end', batch=30, other=1), 'saved': 20}]
    accounts = closed(account(ended), 54)
    assert (accounts.num_steps, accounts.num_lost_steps, accounts.num_unsaved_steps) == (30, 0, 10)
    assert (accounts.sec['compute'], accounts.sec['recompute']) == (19, 10)
    assert '30 steps, 0 of them lost, 10 not saved; 1 process' in summary(accounts, None)
    resumed = account(ended + RESUMED)
    assert (resumed.num_steps, resumed.num_lost_steps, resumed.num_unsaved_steps) == (50, 10, 0)
    assert account(KILLED).num_unsaved_steps == 0  # it may still run


def test_clocks_that_disagree():
    """The next machine's clock is an hour behind: nothing that it counted is thrown away, and nothing becomes negative."""
    behind = [{**record, 'time': record['time'] - 3600} for record in RESUMED]
    accounts = closed(account(KILLED + behind), 53 + 54)
    assert accounts.sec['stopped'] == 0
    ahead = [{**record, 'time': record['time'] + 3600} for record in RESUMED]
    assert closed(account(KILLED + ahead), 167 + 3600).sec['stopped'] == 3660


def test_a_process_that_goes_on_after_another_took_over_is_not_counted():
    late = [line('a', 1063, batch=40, steps=10, compute=10), line('a', 1170, batch=99, steps=59, compute=107)]
    accounts = account([*KILLED, *RESUMED[:3], *late, *RESUMED[3:]])
    assert accounts == account(KILLED + RESUMED)


def test_torn_and_missing_lines(tmp_path):
    path = tmp_path / 'events.jsonl'
    whole = b''.join(map(json_line, KILLED))
    path.write_bytes(whole[:-20])  # the kill cut it
    with open_to_append(path) as file:
        file.write(b''.join(map(json_line, RESUMED)))
    accounts = closed(account(read_json_lines(path)), 167)
    assert accounts.sec['stopped'] == 70  # the last sign of life is ten seconds earlier
    assert accounts.num_lost_steps == 0
    missing = [record for record in KILLED + RESUMED if record['event'] != 'evaluation']
    assert closed(account(missing), 167).sec['other'] == 1 + 12


def test_the_stopwatch_adds_up_to_the_clock(tmp_path):
    began = time.monotonic()
    watch = Stopwatch(tmp_path / 'events.jsonl', num_gpus=2, age_sec=1.5)
    watch.batch = 0
    with watch.phase('sampling'):
        time.sleep(0.02)
    watch.write('begin')
    for batch in range(1, 4):
        watch.switch('data wait')
        time.sleep(0.01)
        watch.switch('compute')
        time.sleep(0.02)
        watch.step(batch)
    with pytest.raises(OSError, match='full'), watch.phase('save'):
        raise OSError('full')
    watch.end('finished')
    took = time.monotonic() - began + 1.5
    watch.end('stopped')  # the first reason counts
    lines = list(read_json_lines(tmp_path / 'events.jsonl'))
    assert [record['event'] for record in lines] == ['start', 'sampling', 'begin', 'end']
    assert lines[-1]['reason'] == 'finished'
    assert lines[-1]['steps'] == 3
    accounts = closed(account(lines), pytest.approx(took, abs=0.01))
    assert accounts.sec['other'] < 1e-3
    assert accounts.sec['compute'] == pytest.approx(0.06, abs=0.03)
    assert accounts.saves_sec == []  # one that failed is no measure
    assert accounts.gpu_hours == pytest.approx(2 * took / 3600, rel=0.01)


def test_a_full_disk_delays_a_line_and_loses_nothing(tmp_path, monkeypatch):
    path = tmp_path / 'events.jsonl'
    watch = Stopwatch(path, num_gpus=1)
    watch.step(1)
    with monkeypatch.context() as patch, Path('/dev/full').open('wb', buffering=0) as full:
        patch.setattr(watch, 'file', full)
        watch.write('steps')
    watch.step(2)
    watch.write('steps')
    lines = list(read_json_lines(path))
    assert [(record['event'], record.get('steps')) for record in lines] == [('start', None), ('steps', 2)]
    assert account(lines).sec['other'] == pytest.approx(0, abs=1e-4)


def test_imports_count():
    boot = next(float(row.split()[1]) for row in Path('/proc/stat').read_text().splitlines() if row.startswith('btime'))
    ticks = int(Path('/proc/self/stat').read_text().rpartition(')')[2].split()[19])
    assert time.time() - process_age_sec() == pytest.approx(boot + ticks / os.sysconf('SC_CLK_TCK'), abs=1.5)  # btime is in whole seconds


def test_phases_without_a_stopwatch_do_nothing(monkeypatch):
    monkeypatch.setattr(stopwatch, '_running', stopwatch._idle)
    with stopwatch.phase('save'):
        pass
    stopwatch.end('finished')


def young_sec(save_sec, between_failures_sec):
    """Interval that loses least time to first order, sqrt(2 C M). J. W. Young, Communications of the ACM 17(9), 1974."""
    return math.sqrt(2 * save_sec * between_failures_sec)


@pytest.mark.parametrize(
    ('save_sec', 'hours_between', 'away_sec', 'interval_sec', 'cost'),
    [
        (5, 9.9, 120, 597, 0.020),  # SaladCloud's jobs on interruptible RTX 4090s
        (30, 50_700 / 64, 600, 218 * 60, 0.005),  # 64 GPUs at Llama 3's rate of failures
        (30, 50_700 / 1024, 600, 54 * 60, 0.022),  # 1,024
    ],
)
def test_intervals_worked_by_hand(save_sec, hours_between, away_sec, interval_sec, cost):
    between_sec = hours_between * 3600
    assert young_sec(save_sec, between_sec) == pytest.approx(interval_sec, rel=0.01)
    assert overhead(young_sec(save_sec, between_sec), save_sec, between_sec, away_sec) == pytest.approx(cost, abs=0.0005)
    best = best_interval_sec(save_sec, between_sec, away_sec)
    assert young_sec(save_sec, between_sec) - save_sec < young_sec(save_sec, between_sec) < best < 1.03 * young_sec(save_sec, between_sec)


def test_saving_every_hundred_steps_costs_more():
    assert overhead(266, 5, 9.9 * 3600, 120) == pytest.approx(0.026, abs=0.0005)


def test_published_totals():
    """Anyscale's Table 4 and SaladCloud's mean job, within half a percent."""
    assert pytest.approx(67_405, rel=0.005) == 411.4 * 4 * 40.96
    assert pytest.approx(0.3348, rel=0.005) == 62.01 / 60 * 0.324


def test_the_proposal():
    accounts = account(KILLED + RESUMED)
    assert propose(accounts, Duration('1800sec'), 50_000) is None  # after minutes
    accounts.wall_sec = 3600
    assert propose(accounts, Duration('1800sec'), 50_000) == (
        'checkpoint.every: 1800sec; with 4 s a save, 17.5 s a start and, assumed, a failure every 6,250 hours (faults.gpu_hours_between_failures), '
        '13420sec would cost the least: 0.06 % of the time instead of 0.23 %'
    )
    assert 'as little as the best, 13420sec' in str(propose(accounts, Duration('13000ba'), 50_000))  # a second a step
    assert propose(account(KILLED[:4]), Duration('1800sec'), 50_000) is None
    assert pytest.approx(young_sec(4, 50_000 / 8 * 3600), rel=1e-3) == 13420


def test_the_summary_says_it_in_a_few_lines():
    accounts = account(KILLED + RESUMED)
    assert 'failure' not in summary(accounts, propose(accounts, Duration('1800sec'), 50_000))
    text = summary(accounts, propose(dataclasses.replace(accounts, wall_sec=3600), Duration('1800sec'), 50_000))
    assert text.startswith('where the time went: 23.4% goodput\n')
    assert 'wall time' in text
    assert '50 steps, 10 of them lost; 2 processes' in text
    assert 'checkpoint.every' in text
