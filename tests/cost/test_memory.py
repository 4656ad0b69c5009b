"""What the memory table adds up is what there is."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import pytest
import torch

from benchmarks.timing import free_memory, memory_bytes
from diffusion.cost.facts import state_bytes
from diffusion.cost.hardware import gpu_name, memory_gb, mfu, peak_flops
from diffusion.families.counting.tracing import LiveStorages, activations, encoding_bytes
from diffusion.families.registry import build_network
from tests.cost.test_facts import facts_of

SD2 = 865_910_724
COPIES = 'copies of the weights to compute with'


def held(sharding, precision, num_gpus, num_trained=SD2, ema=True, **more):
    recipe = facts_of().recipe
    averages = recipe.ema if ema else replace(recipe.ema, half_life=None)
    return state_bytes(
        replace(recipe, train=replace(recipe.train, sharding=sharding, precision=precision), ema=averages), num_trained, 0, num_gpus, **more
    )


def test_state_of_sd2_by_hand():
    alone = held('ddp', 'amp_bf16', 1)
    assert alone['weights'] + alone['gradients'] + alone['optimizer state'] == SD2 * 16 == 13_854_571_584
    assert alone['EMA'] == SD2 * 4
    assert alone[COPIES] == SD2 * 2
    assert alone["DDP's buckets"] == 0
    assert held('ddp', 'amp_bf16', 8)["DDP's buckets"] == SD2 * 4
    assert sum(held('ddp', 'bf16', 8).values()) == SD2 * (16 + 4 + 2)
    eighth = -(-SD2 // 8)  # rounded up
    assert list(held('zero2', 'bf16', 8).values()) == [4 * eighth, 4 * eighth, 8 * eighth, 4 * eighth, 2 * SD2, 0, 0]
    assert held('hsdp', 'amp_bf16', 8)[COPIES] == SD2 * (2 + 4)


def test_what_is_not_there_takes_nothing_and_nodes_are_replicas():
    assert held('ddp', 'amp_bf16', 8, ema=False)['EMA'] == 0
    assert held('ddp', 'fp32', 1)[COPIES] == 0
    assert held('hsdp', 'bf16', 128) == held('zero2', 'bf16', 8)
    assert held('zero2', 'bf16', 128)['weights'] == 4 * -(-SD2 // 128)
    assert held('hsdp', 'bf16', 8, gpus_per_node=4)['optimizer state'] == 8 * -(-SD2 // 4)
    assert held('hsdp', 'bf16', 8, accumulates=True)['gradients'] == 4 * SD2


def test_an_adapter_adds_its_state_to_a_frozen_network():
    state = held('ddp', 'amp_bf16', 1, num_trained=1000, num_frozen=SD2)
    assert state['frozen network'] == 2 * SD2
    assert sum(state.values()) == 2 * SD2 + (4 + 4 + 8 + 4 + 2) * 1000
    assert held('ddp', 'fp32', 1, num_trained=1000, num_frozen=SD2)['frozen network'] == 4 * SD2


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


def grown_and_counted():
    """Bytes by which the resident set grows over a forward pass, and those of the same pass counted."""
    unet = build_network('tiny')
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
    return grown, saved


@pytest.mark.long
def test_the_count_is_what_the_process_really_holds():
    """In a process of its own: in one that has freed memory and kept it, the pass takes that first."""
    with ProcessPoolExecutor(1, get_context('spawn')) as alone:
        grown, saved = alone.submit(grown_and_counted).result()
    assert saved > 300e6
    assert grown == pytest.approx(saved, rel=0.05)


def test_activations_grow_with_the_image_and_shrink_with_bf16():
    small, large = (activations('tiny', side, 'amp_bf16', False) for side in (8, 16))
    assert large.saved == pytest.approx(4 * small.saved, rel=0.35)  # text and timesteps do not grow
    assert activations('tiny', 8, 'bf16', False).saved < small.saved


def test_gpus_are_known_by_the_names_of_price_lists():
    assert memory_gb('a100-40gb') == 40
    assert peak_flops('h100-nvl') == 8.35e14
    with pytest.raises(ValueError, match=r"no GPU 'a100-40'.*did you mean 'a100-40gb'\?"):
        memory_gb('a100-40')


def test_images_take_what_their_size_says():
    small, large = (encoding_bytes('tiny', px, 'fp32') for px in (64, 128))
    assert large == pytest.approx(4 * small, rel=0.01)
    assert small >= 64 * 64 * 8 * 4 * 2  # in and out of the first convolution's neighbours, 8 channels


@pytest.mark.parametrize(
    ('device', 'name', 'peak'),
    [
        ('NVIDIA A100-SXM4-40GB', 'a100-40gb', 3.12e14),
        ('NVIDIA A100-SXM4-80GB', 'a100-80gb', 3.12e14),
        ('NVIDIA A100 80GB PCIe', 'a100-80gb', 3.12e14),
        ('NVIDIA H100 80GB HBM3', 'h100', 9.89e14),
        ('NVIDIA H100 NVL', 'h100-nvl', 8.35e14),
        ('NVIDIA H100 PCIe', 'h100-pcie', 7.56e14),
        ('NVIDIA H200', 'h200', 9.89e14),
        ('NVIDIA H200 NVL', 'h200-nvl', 8.35e14),
        ('NVIDIA GH200 480GB', None, 9.89e14),
        ('NVIDIA B200', 'b200', 2.25e15),
        ('NVIDIA GB200', 'gb200', 2.5e15),
        ('NVIDIA L40S', 'l40s', 3.62e14),
        ('NVIDIA A10G', 'a10g', 7.0e13),
        ('NVIDIA A10', None, None),
        ('NVIDIA GeForce RTX 4090', 'rtx-4090', 1.652e14),
        ('NVIDIA H200 MIG 3g.71gb', None, None),
        ('CPU', None, None),
    ],
)
def test_devices_go_by_whole_words(device, name, peak):
    """Names as torch gives them; peaks of the vendor's data sheets."""
    assert (gpu_name(device), peak_flops(device)) == (name, peak)
    assert gpu_name(name or 'none') == name
    assert gpu_name(device, ['b200', 'a100-80gb']) == (name if name in ('b200', 'a100-80gb') else None)  # of a list that is someone's own


def test_an_mfu_by_hand():
    """A100: 200 images/s of 624 GFLOP are 124.8 of 312 TFLOP/s."""
    assert mfu(200, 624e9, 312e12) == pytest.approx(0.4)
