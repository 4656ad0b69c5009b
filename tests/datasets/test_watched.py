"""A loader process that is stopped from outside is found within the loader's own limit."""

import os
import signal
import threading
import time

import pytest
import torch
from torch.utils.data import Dataset

from diffusion.common.processes import shield_worker
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


def loader(monkeypatch, **options):
    monkeypatch.setattr(watched, 'BEHIND_TORCH_SEC', 0.5)
    return WatchedLoader(
        Tensors(), batch_size=4, num_workers=2, worker_init_fn=shield_worker, timeout=LIMIT_SEC, multiprocessing_context='fork', **options
    )


def stop(processes):
    for process in processes:
        os.kill(process.pid, signal.SIGSTOP)


def assert_gone(processes):
    for process in processes:
        process.join(10)
    assert not [process for process in processes if process.is_alive()]


def test_stopped_loader_processes_are_found_in_time(monkeypatch):
    """With batches that they have announced: torch waits for each of these without a limit."""
    batches = iter(loader(monkeypatch))
    next(batches)
    processes = batches.gi_frame.f_locals['batches']._workers
    time.sleep(1)  # until the queue is full
    stop(processes)
    begun = time.monotonic()
    with pytest.raises(DataUnavailable, match=r'timed out after 3 seconds \(data.timeout_sec\)'):
        list(batches)
    assert time.monotonic() - begun < 60  # not never
    assert_gone(processes)


@pytest.mark.parametrize('epoch_ended', [True, False])
def test_loader_processes_that_stop_between_epochs_are_found_in_time(monkeypatch, epoch_ended):
    """They stay, and torch asks each of them for the next epoch; batches of an epoch that was left lie before their answers."""
    stays = loader(monkeypatch, persistent_workers=True, sampler=range(40))
    batches = iter(stays)
    next(batches)
    if epoch_ended:
        assert len(list(batches)) == 9
    processes = stays._iterator._workers
    time.sleep(0.5)
    stop(processes)
    with pytest.raises(DataUnavailable, match=r'timed out after 3 seconds \(data.timeout_sec\)'):
        next(iter(stays))
    assert_gone(processes)


def test_a_request_to_stop_reaches_a_run_that_waits_for_an_epoch_to_begin(monkeypatch):
    class Asked(BaseException):
        pass

    def ask(*_):
        raise Asked

    stays = loader(monkeypatch, persistent_workers=True, sampler=range(8))
    assert len(list(stays)) == 2
    processes = stays._iterator._workers
    stop(processes)
    signal.signal(signal.SIGUSR1, ask)
    threading.Timer(0.5, signal.raise_signal, (signal.SIGUSR1,)).start()
    with pytest.raises(Asked):
        next(iter(stays))
    stays._kill(stays._iterator)
    assert_gone(processes)


def test_time_between_batches_does_not_count(monkeypatch):
    """A save or an evaluation may take long."""
    batches = iter(loader(monkeypatch))
    next(batches)
    time.sleep(1.5 * LIMIT_SEC)
    assert [len(next(batches)) for _ in range(20)] == [4] * 20
    batches.close()
