import json
from types import SimpleNamespace

import pytest
import torch
from composer.core import Time, TimeUnit

from diffusion.common import stopwatch
from diffusion.common.stopwatch import Stopwatch
from diffusion.cost.hardware import peak_flops
from diffusion.cost.prices import Price
from diffusion.monitoring.throughput import Goodput, Throughput


class Clock:
    now = 0.0

    def monotonic(self):
        return self.now

    time = monotonic


def run(monkeypatch, batches, every=5, wait=0.25, step=1.0, peak=None, total=100, earlier=0.0, events=None):
    """Batches that take `wait` + `step` seconds on a clock of our own; returns what was logged."""
    clock, logged = Clock(), []
    monkeypatch.setattr(stopwatch, 'time', clock)
    watch = Stopwatch(events, num_gpus=1)
    callback = Throughput(Price('mine', 3.6, 'GPU-hour', 'now', 'me'), every=every, watch=watch)
    phases = Goodput(SimpleNamespace(log=SimpleNamespace(every=every)), watch)
    callback.peak_flops = peak
    callback.load_state_dict({'elapsed_sec': earlier, 'gpu_hours': earlier / 3600 * 8})
    batch = {'sample_key': torch.zeros(10, 2)}
    state = SimpleNamespace(batch=batch, model=SimpleNamespace(flops_per_batch=lambda batch: 10 * 7.0), timestamp=SimpleNamespace())
    logger = SimpleNamespace(log_metrics=logged.append)
    for done in range(1, batches + 1):
        phases.before_dataloader(state, logger)
        clock.now += wait
        phases.after_dataloader(state, logger)
        callback.batch_start(state, logger)
        clock.now += step if done > 2 else 50  # the first two compile
        state.timestamp.batch = Time(done, TimeUnit.BATCH)
        state.get_elapsed_duration = lambda done=done: SimpleNamespace(value=done / total)
        for each in (callback, phases):
            each.batch_end(state, logger)
        phases.eval_before_all(state, logger)
        clock.now += 10
        phases.eval_after_all(state, logger)
    return logged, callback


def test_rates_leave_out_warm_up_and_evaluation_but_money_does_not(monkeypatch):
    logged, _ = run(monkeypatch, 10)
    assert len(logged) == 2
    last = logged[-1]
    assert last['throughput/images_per_sec'] == pytest.approx(10 / 1.25)
    assert last['throughput/images_per_sec_per_gpu'] == pytest.approx(10 / 1.25)
    assert last['throughput/data_wait_share'] == pytest.approx(0.25 / 1.25)
    elapsed = 10 * 0.25 + 2 * 50 + 8 * 1.0 + 9 * 10
    assert last['time/elapsed_hours'] == pytest.approx(elapsed / 3600)
    assert last['cost/dollars_so_far'] == pytest.approx(elapsed / 3600 * 3.6)
    assert last['time/remaining_hours'] == pytest.approx(90 * 1.25 / 3600)
    assert last['cost/dollars_to_go'] == pytest.approx(90 * 1.25 / 3600 * 3.6)
    assert 'throughput/mfu' not in last  # a CPU has no peak


def test_mfu_is_flops_per_second_over_the_peak(monkeypatch):
    logged, _ = run(monkeypatch, 5, peak=100.0)
    assert logged[0]['throughput/mfu'] == pytest.approx(10 / 1.25 * 7.0 / 100.0)


def test_flop_are_counted_without_a_peak(monkeypatch):
    """70 a batch of 10 images."""
    logged, _ = run(monkeypatch, 10)
    assert [record['cost/flop'] for record in logged] == [5 * 70, 10 * 70]


def test_time_and_money_continue_after_a_resume(monkeypatch):
    logged, callback = run(monkeypatch, 5, earlier=7200)
    assert logged[0]['time/elapsed_hours'] > 2
    assert callback.state_dict()['elapsed_sec'] > 7200
    # Two hours on 8 GPUs, then a few minutes on one, at $3.60 a GPU-hour.
    assert 2 * 8 * 3.6 < logged[0]['cost/dollars_so_far'] < 2.1 * 8 * 3.6


def test_what_an_earlier_process_took_after_its_last_checkpoint_counts(monkeypatch, tmp_path):
    line = {'event': 'steps', 'process': 'a', 'time': 10800.0, 'gpus': 1, 'batch': 10, 'steps': 10, 'sec': {'compute': 10800.0}}
    (tmp_path / 'events.jsonl').write_text(json.dumps(line) + '\n')
    logged, _ = run(monkeypatch, 5, earlier=7200, events=tmp_path / 'events.jsonl')
    assert 3.0 < logged[0]['time/elapsed_hours'] < 3.1


def test_peaks():
    assert peak_flops('NVIDIA H200') == 9.89e14
    assert peak_flops('NVIDIA H200 NVL') == 8.35e14  # its data sheet: 1,671 TFLOP/s with sparsity, which is twice as much
    assert peak_flops('a100-40gb') == 3.12e14
    assert peak_flops('NVIDIA GB200') == 2.5e15
    assert peak_flops('NVIDIA H100 PCIe') == 7.56e14
    assert peak_flops('NVIDIA GeForce RTX 4090') == 1.652e14  # summed in float32; 330.3 TFLOP/s in float16
    assert peak_flops('CPU') is peak_flops('NVIDIA GeForce RTX 3060') is None
