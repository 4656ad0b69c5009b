"""What the memory table adds up is what there is."""

import pytest
import torch

from benchmarks.live_storages import LiveStorages
from benchmarks.memory import State, activations, fitting, state
from benchmarks.timing import free_memory, memory_bytes
from diffusion.models.unet import build_unet

SD2 = 865_910_724


def test_state_of_sd2_by_hand():
    alone = state(SD2, 'ddp', 'amp_bf16', num_gpus=1)
    assert alone.weights + alone.gradients + alone.adam == SD2 * 16 == 13_854_571_584
    assert alone.ema == SD2 * 4
    assert alone.working_copies == SD2 * 2
    assert alone.buckets == 0
    assert state(SD2, 'ddp', 'amp_bf16').buckets == SD2 * 4
    assert state(SD2, 'ddp', 'bf16').total == SD2 * (16 + 4 + 2)
    eighth = -(-SD2 // 8)  # rounded up
    assert state(SD2, 'zero2', 'bf16') == State(4 * eighth, 4 * eighth, 8 * eighth, 4 * eighth, 2 * SD2, 0)
    assert state(SD2, 'hsdp', 'amp_bf16').working_copies == SD2 * (2 + 4)


def test_the_micro_batch_is_what_is_left():
    held = State(1_000_000_000, 0, 0, 0, 0, 0)
    assert fitting(10, held, 1_000_000_000) == 8  # 9.4 - 1
    assert fitting(1, held, 1) == 0


def test_live_storages_count_each_storage_once_and_until_it_goes():
    with LiveStorages() as storages:
        first = torch.zeros(1000)
        view = first[:10].view(2, 5)
        assert storages.live_bytes == 4000
        second = first + 1
        del first, second
        assert storages.live_bytes == 4000  # the view holds it
        del view
    assert (storages.live_bytes, storages.peak_bytes) == (0, 8000)


def forward(unet, batch, side):
    noisy = torch.randn(batch, 4, side, side).contiguous(memory_format=torch.channels_last)
    return unet(noisy, torch.zeros(batch, dtype=torch.int64), torch.randn(batch, 77, 32)).sample.square().mean()


def test_the_count_is_what_the_process_really_holds():
    """The resident set's growth over a forward pass, against the same pass counted."""
    unet = build_unet('tiny')
    forward(unet, 1, 32).backward()  # what libraries set up once
    free_memory()
    before = memory_bytes()
    loss = forward(unet, 32, 32)
    free_memory()
    grown = memory_bytes() - before
    del loss
    with LiveStorages() as storages:
        loss = forward(unet, 32, 32)
        saved = storages.live_bytes
    del loss
    assert saved > 300e6
    assert grown == pytest.approx(saved, rel=0.05)


def test_activations_grow_with_the_picture_and_shrink_with_bf16():
    small, large = (activations('tiny', px, 'amp_bf16', False) for px in (64, 128))
    assert large.saved == pytest.approx(4 * small.saved, rel=0.35)  # text and timesteps do not grow
    assert activations('tiny', 64, 'bf16', False).saved < small.saved
