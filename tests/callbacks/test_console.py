from types import SimpleNamespace

import torch
from composer.core import Time, TimeUnit

from diffusion.callbacks.console import ConsoleLine


def test_a_line_says_where_the_run_is(capsys):
    console = ConsoleLine(every=10)
    state = SimpleNamespace(timestamp=SimpleNamespace(batch=Time(1230, TimeUnit.BATCH)), get_elapsed_duration=lambda: SimpleNamespace(value=0.25))
    console.log_metrics({'loss/train/total': torch.tensor(0.12345), 'throughput/images_per_sec': 1234.5, 'throughput/mfu': 0.456})
    console.log_metrics({'time/remaining_hours': 2.5, 'cost/dollars_so_far': 12.3, 'unknown': 'text'})
    console.batch_checkpoint(state, None)
    state.timestamp.batch = Time(1231, TimeUnit.BATCH)
    console.batch_checkpoint(state, None)
    expected = 'batch 1,230 (25.0%)  loss 0.1235  1,234.5 images/s  MFU 45.6%  $12.30 spent  2:30:00 left\n'
    assert capsys.readouterr().err == expected
