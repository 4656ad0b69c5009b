import pytest
import torch
from torch import nn

from diffusion.models.unet import UNET_FOLDER, build_unet, training_flops, unet_config


def test_sd2_base_is_the_published_network():
    with torch.device('meta'):
        unet = build_unet('sd2-base')
    assert sum(p.numel() for p in unet.parameters()) == 865_910_724
    assert len(unet.state_dict()) == 686
    kinds = [type(module) for module in unet.modules()]
    assert [kinds.count(kind) for kind in (nn.Linear, nn.Conv2d, nn.GroupNorm, nn.LayerNorm)] == [216, 66, 61, 48]
    assert {processor.__class__.__name__ for processor in unet.attn_processors.values()} == {'AttnProcessor2_0'}


@pytest.mark.parametrize(('latent_side', 'gflop'), [(32, 539.31), (64, 2408.74)])
def test_flops_of_sd2_base(latent_side, gflop):
    """Published counts of one image's forward and backward pass, 256 and 512 px, 77 tokens."""
    assert training_flops('sd2-base', (latent_side, latent_side), 77) / 1e9 == pytest.approx(gflop, abs=0.01)


@pytest.mark.parametrize('name', sorted(path.stem for path in UNET_FOLDER.glob('*.json')))
def test_every_configuration_builds(name):
    with torch.device('meta'):
        unet = build_unet(name)
    known = set(unet.config)
    assert set(unet_config(name)) <= known  # diffusers would pass over a misspelt key
