"""Every convolution of a compiled step runs in channels_last, forward and backward: read from what Inductor makes of it for a GPU."""

import pytest

from diffusion.models import lean
from tests.models.lowering import convolutions_of_a_step

# train.compile, train.precision, and how `train.sharding` holds the weights: FSDP2 contiguous, DDP in channels_last
DDP, FSDP2 = ('unet', 'amp_bf16', True), ('blocks', 'bf16', False)


def lost(unet, side, batch_size, setting):
    """Those of a step, and those of them that do not run in channels_last."""
    found = convolutions_of_a_step(unet, side, batch_size, *setting)
    return found, [each for each in found if not all(each.channels_last)]


@pytest.mark.parametrize('setting', [DDP, FSDP2], ids=['ddp', 'fsdp2'])
def test_all_are_channels_last(setting):
    found, elsewhere = lost('tiny', 8, 4, setting)
    assert {each.backward for each in found} == {False, True}
    assert len(found) >= 40
    assert elsewhere == []


@pytest.mark.long
@pytest.mark.parametrize(('setting', 'number'), [(DDP, 2 * 66), (FSDP2, 30)], ids=['ddp', 'fsdp2'])
def test_all_of_sd2_are_channels_last(setting, number):
    """`blocks` compiles blocks of equal shapes once."""
    found, elsewhere = lost('sd2-base', 32, 128, setting)
    assert len(found) >= number
    assert elsewhere == []


@pytest.mark.long
@pytest.mark.parametrize('without', ['Conv2d', 'GroupNorm', 'Upsample'])
def test_each_class_is_needed(without, monkeypatch):
    classes = {base: cls for base, cls in lean.CLASSES.items() if cls.__name__ != without}
    monkeypatch.setattr(lean, 'CLASSES', classes)
    assert lost('tiny', 8, 4, FSDP2 if without == 'Conv2d' else DDP)[1]
