"""A loader process that is stopped from outside is found within the loader's own limit."""

import os
import signal
import time

import pytest
import torch
from torch.utils.data import Dataset

from diffusion.common.signals import spare_worker
from diffusion.contracts.errors import DataUnavailable
from diffusion.datasets import watched
from diffusion.datasets.watched import WatchedLoader

LIMIT_SEC = 3


class Tensors(Dataset):
    """A batch of them lies in memory that the loader's process hands over when it is asked for."""

    def __len__(self):
        return 10_000

    def __getitem__(self, i):
        return torch.full((100,), float(i))


def endless(monkeypatch):
    monkeypatch.setattr(watched, 'BEHIND_TORCH_SEC', 0.5)
    return WatchedLoader(Tensors(), batch_size=4, num_workers=2, worker_init_fn=spare_worker, timeout=LIMIT_SEC, multiprocessing_context='fork')


def test_stopped_loader_processes_are_found_in_time(monkeypatch):
    """With batches that they have announced: torch waits for each of these without a limit."""
    batches = iter(endless(monkeypatch))
    next(batches)
    processes = batches.gi_frame.f_locals['batches']._workers
    time.sleep(1)  # until the queue is full
    for process in processes:
        os.kill(process.pid, signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(DataUnavailable, match=r'timed out after 3 seconds \(data.timeout_sec\)'):
        list(batches)
    assert time.monotonic() - begun < 60  # not never
    for process in processes:
        process.join(10)
    assert not [process for process in processes if process.is_alive()]


def test_time_between_batches_does_not_count(monkeypatch):
    """A save or an evaluation may take long."""
    batches = iter(endless(monkeypatch))
    next(batches)
    time.sleep(1.5 * LIMIT_SEC)
    assert [len(next(batches)) for _ in range(20)] == [4] * 20
    batches.close()
