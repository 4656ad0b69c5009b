"""Every convolution of a compiled step runs in channels_last, forward and backward: read from what Inductor makes of it for a GPU."""

from functools import partial

import pytest
from diffusers import UNet2DConditionModel
from torch import nn

from diffusion.families import lean
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


def convolutions_of_a_step(*arguments):
    from tests.families import lowering  # imports Inductor, which takes seconds: not in every process that collects tests

    return lowering.convolutions_of_a_step(*arguments)


def elsewhere(found):
    return [each for each in found if not all(each.channels_last)]


def test_all_of_a_compiled_network_are_channels_last():
    found = convolutions_of_a_step(small, 8, 4, *DDP)
    assert len(found) == 2 * sum(isinstance(module, nn.Conv2d) for module in small().modules())
    assert elsewhere(found) == []


def test_all_of_compiled_blocks_are_channels_last_though_the_weights_are_not():
    found = convolutions_of_a_step(small, 8, 4, *FSDP2)
    assert {each.backward for each in found} == {False, True}
    assert {each.weight[2:] for each in found} == {(1, 1), (3, 3)}
    assert elsewhere(found) == []


@pytest.mark.long
@pytest.mark.parametrize(('setting', 'number'), [(DDP, 2 * 66), (FSDP2, 92)], ids=['ddp', 'fsdp2'])
def test_all_of_sd2_are_channels_last(setting, number):
    """`blocks` compiles blocks of equal shapes once."""
    found = convolutions_of_a_step(partial(build_network, 'sd2-base'), 32, 128, *setting)
    assert len(found) == number
    assert elsewhere(found) == []


@pytest.mark.long
@pytest.mark.parametrize('without', ['Conv2d', 'GroupNorm', 'Upsample'])
def test_each_class_is_needed(without, monkeypatch):
    monkeypatch.setattr(lean, 'CLASSES', {base: cls for base, cls in lean.CLASSES.items() if cls.__name__ != without})
    assert elsewhere(convolutions_of_a_step(small, 8, 4, *(FSDP2 if without == 'Conv2d' else DDP)))
