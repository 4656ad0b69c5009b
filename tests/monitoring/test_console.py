"""What a person sees while a run trains, on a real pseudo-terminal and without one."""

import fcntl
import logging
import os
import pty
import struct
import sys
import termios
import warnings
from types import SimpleNamespace

import pytest
import torch
from composer.core import Time

from diffusion.monitoring.console import ConsoleLine, fitting
from diffusion.training.builder import build_trainer

LOGGED = {
    'loss/train/total': torch.tensor(0.12345), 'lr-AdamW/group0': 1e-4, 'throughput/images_per_sec': 1234.5, 'throughput/images_per_sec_per_gpu': 154.3,
    'throughput/mfu': 0.456, 'throughput/data_wait_share': 0.012, 'throughput/peak_memory_gb': 71.2, 'cost/dollars_so_far': 12.3,
    'cost/dollars_to_go': 45.6, 'time/remaining_hours': 2.5, 'unknown': 'text',
}  # fmt: skip


def at(batch):
    return SimpleNamespace(batch=Time(batch, 'ba'), sample=Time(64 * batch, 'sp'))


@pytest.fixture
def state():
    return SimpleNamespace(
        timestamp=at(1230), max_duration=Time(4920, 'ba'), get_elapsed_duration=lambda: SimpleNamespace(value=0.25),
        eval_timestamp=at(3), dataloader_len=Time(7, 'ba'),  # of the evaluation, while it runs
    )  # fmt: skip


class Terminal:
    """A pseudo-terminal of a width, and what is on its screen."""

    def __init__(self, columns):
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack('HHHH', 24, columns, 0, 0))
        self.columns, self.file, self.text = columns, os.fdopen(slave, 'w', encoding='utf-8'), ''

    def frames(self):
        """Every text that began at the left edge, since the last call."""
        os.set_blocking(self.master, False)
        new = b''
        while True:
            try:
                new += os.read(self.master, 65536)
            except BlockingIOError:
                break
        self.text += new.decode()
        return [frame for line in new.decode().split('\r\n') for frame in line.split('\r')]

    def screen(self):
        self.frames()
        lines = []
        for line in self.text.split('\r\n'):
            shown = ''
            for frame in line.split('\r'):
                shown = frame + shown[len(frame) :]
            lines.append(shown.rstrip())
        return lines


@pytest.fixture(params=[80, 200])
def terminal(request):
    terminal = Terminal(request.param)
    yield terminal
    terminal.file.close()
    os.close(terminal.master)


def test_a_line_says_where_the_run_is(capsys, state):
    console = ConsoleLine(every=10)
    console.fit_start(state, None)
    console.log_metrics({'loss/train/total': torch.tensor(0.12345), 'throughput/images_per_sec': 1234.5, 'throughput/mfu': 0.456})
    console.log_metrics({'time/remaining_hours': 2.5, 'cost/dollars_so_far': 12.3, 'unknown': 'text'})
    console.batch_checkpoint(state, None)
    state.timestamp = at(1231)
    console.batch_checkpoint(state, None)
    expected = 'batch 1,230 (25.0%)  loss 0.1235  2:30:00 left  1,234.5 images/s  MFU 45.6%  $12.30 spent  78,720 samples\n'
    assert capsys.readouterr().err == expected


def test_slow_batches_have_a_line_a_minute(capsys, state, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr('diffusion.monitoring.console.time', SimpleNamespace(monotonic=lambda: clock.now))
    line = ConsoleLine(every=100)
    for batch, clock.now in ((1201, 35), (1202, 70), (1203, 105), (1204, 140), (1300, 141), (1301, 200), (1302, 202)):
        state.timestamp = at(batch)
        line.batch_checkpoint(state, None)
    assert [text.split()[1] for text in capsys.readouterr().err.splitlines()] == ['1,202', '1,204', '1,300', '1,302']


@pytest.mark.parametrize(('num_gpus', 'dollars', 'shown'), [(1, 0.004, []), (8, 0.01, ['per GPU', '$0.01 spent', '$0.01 to go'])])
def test_numbers_that_say_nothing_are_left_out(num_gpus, dollars, shown, capsys, state, monkeypatch):
    monkeypatch.setattr('diffusion.monitoring.console.dist.get_world_size', lambda: num_gpus)
    line = ConsoleLine(every=10)
    line.log_metrics({**LOGGED, 'cost/dollars_so_far': dollars, 'cost/dollars_to_go': dollars})
    line.batch_checkpoint(state, None)
    printed = capsys.readouterr().err
    assert [text for text in ('per GPU', '$0.01 spent', '$0.01 to go') if text in printed] == shown
    assert '$0.00' not in printed


def test_an_evaluation_has_a_line_of_its_own(capsys, state):
    console = ConsoleLine(every=10)
    console.eval_start(state, None)
    console.log_metrics({'metrics/eval/loss': torch.tensor(0.4567), 'metrics/eval/loss_t000-099': 0.9})
    console.eval_batch_end(state, None)
    console.eval_end(state, None)
    assert capsys.readouterr().err == 'evaluation after batch 1,230: loss 0.4567\n'


def test_a_terminal_has_one_line_with_everything_that_fits(terminal, state, monkeypatch):
    monkeypatch.setattr(sys, 'stderr', terminal.file)
    console = ConsoleLine(every=10)
    console.fit_start(state, None)
    console.log_metrics(LOGGED)
    state.timestamp = at(1240)
    for _ in range(10):
        console.batch_checkpoint(state, None)
    console.bar.refresh()
    line = terminal.frames()[-1].rstrip()
    for part in ('25%', '1,240/4,920', 'loss 0.1235', '1,234.5 images/s', '2:30:00 left'):
        assert part in line
    assert 'per GPU' not in line  # there is one
    for part in ('lr 1.00e-04', 'MFU 45.6%', 'waiting 1.2%', '71.2 GB', '$12.30 spent', '$45.60 to go', '79,360 samples'):
        assert terminal.columns == 80 or part in line
    console.fit_end(state, None)
    assert terminal.columns == 80 or len(line) == terminal.columns - 1  # a full last column would begin another line
    assert all(len(shown) < terminal.columns for shown in terminal.screen())
    assert sys.stderr is terminal.file  # as it was


def test_what_is_printed_stays_readable_above_the_line(terminal, state, monkeypatch):
    monkeypatch.setattr(sys, 'stderr', terminal.file)
    handler = logging.StreamHandler(terminal.file)
    library = logging.getLogger('a.library')
    monkeypatch.setattr(library, 'handlers', [handler])
    console = ConsoleLine(every=10)
    console.fit_start(state, None)
    console.log_metrics(LOGGED)
    console.batch_checkpoint(state, None)
    sys.stderr.write(warnings.formatwarning('something is odd', UserWarning, 'file.py', 7, line=''))  # as Python shows it, which pytest collects
    library.warning('a logger speaks')
    print('half a', file=sys.stderr, end=' ')
    console.bar.refresh()
    print('line', file=sys.stderr)
    console.eval_start(state, None)
    console.eval_batch_end(state, None)
    assert 'evaluating 3/7' in ''.join(terminal.frames())
    console.log_metrics({'metrics/eval/loss': 0.4567})
    console.eval_end(state, None)
    console.close(state, None)
    print('the end', file=sys.stderr, flush=True)
    screen = [line for line in terminal.screen() if line]
    assert screen[:4] == ['file.py:7: UserWarning: something is odd', 'a logger speaks', 'half a line', 'evaluation after batch 1,230: loss 0.4567']
    assert [line.startswith(' 25%') for line in screen[4:]] == [True, False]
    assert screen[-1] == 'the end'
    assert handler.stream is terminal.file


def test_the_least_important_part_goes_first():
    parts = ['loss 0.1', '1:00 left', 'waiting 1 %']
    for columns in range(100):
        text = fitting(parts, columns)
        assert len(text) <= columns
        assert ('waiting 1 %' in text) <= ('1:00 left' in text) <= ('loss 0.1' in text)
    assert text == '  loss 0.1  1:00 left  waiting 1 %'


def test_a_terminal_does_not_change_what_a_run_is_built_of(recipe, monkeypatch):
    """Composer's own bar with its banner would come with `progress_bar`."""
    monkeypatch.setattr(sys, 'stderr', SimpleNamespace(isatty=lambda: True, write=lambda text: len(text), flush=lambda: None))
    trainer = build_trainer(recipe)
    assert [type(logger).__name__ for logger in trainer.logger.destinations] == ['JsonlLog', 'ConsoleLine']
    trainer.close()
