"""Every convolution of a compiled step runs in channels_last, forward and backward: read from what Inductor makes of it for a GPU."""

from functools import partial

import pytest
from diffusers import UNet2DConditionModel
from diffusers.models.upsampling import Upsample2D
from torch import nn

from diffusion.families import unet as lean
from diffusion.families.networks import find_network
from diffusion.families.registry import build_network

# train.compile, train.precision, and how `train.sharding` holds the weights: DDP in channels_last, FSDP2 contiguous
DDP, FSDP2 = ('network', 'amp_bf16', True), ('blocks', 'bf16', False)


def small():
    """One block of each kind: residual with and without a shortcut, attention, down- and upsampling."""
    fewer = {'mid_block_type': 'UNetMidBlock2D', 'up_block_types': ['UpBlock2D', 'UpBlock2D']}
    unet = UNet2DConditionModel(**{**find_network('tiny').config, **fewer})
    lean.keep_channels_last(unet)
    lean.attend_plainly(unet)
    return unet


def lower(*arguments):
    from tests.families import lowering  # imports Inductor, which takes seconds: not in every process that collects tests

    return lowering.lower(*arguments)


def elsewhere(step):
    return [each for each in step.convolutions if not all(each.channels_last)]


def test_all_of_a_compiled_network_are_channels_last_and_nothing_adds_up_in_memory():
    step = lower(small, 8, 4, *DDP)
    assert len(step.convolutions) == 2 * sum(isinstance(module, nn.Conv2d) for module in small().modules())
    assert elsewhere(step) == []
    assert step.atomic == 0


def test_all_of_compiled_blocks_are_channels_last_though_the_weights_are_not():
    step = lower(small, 8, 4, *FSDP2)
    assert {each.backward for each in step.convolutions} == {False, True}
    assert {each.weight[2:] for each in step.convolutions} == {(1, 1), (3, 3)}
    assert elsewhere(step) == []


@pytest.mark.long
@pytest.mark.parametrize(('setting', 'number'), [(DDP, 2 * 66), (FSDP2, 92)], ids=['ddp', 'fsdp2'])
def test_all_of_sd2_are_channels_last(setting, number):
    """`blocks` compiles blocks of equal shapes once."""
    step = lower(partial(build_network, 'sd2-base'), 32, 128, *setting)
    assert len(step.convolutions) == number
    assert elsewhere(step) == []


@pytest.mark.long
def test_interpolation_would_add_up_in_memory(monkeypatch):
    monkeypatch.delitem(lean.CLASSES, Upsample2D)
    assert lower(small, 8, 4, *DDP).atomic
