import pytest
import torch
from diffusers import UNet2DConditionModel
from torch import nn

from diffusion.models.channels_last import CLASSES
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


@pytest.mark.parametrize('weights', ['channels_last', 'contiguous'])
def test_activations_are_channels_last_from_end_to_end(weights):
    """Also where FSDP keeps the weights contiguous; a block that changed the layout would cost copies all the way."""
    unet = build_unet('tiny')
    if weights == 'channels_last':
        unet.to(memory_format=torch.channels_last)
    layers = [module for module in unet.modules() if isinstance(module, torch.nn.Conv2d | torch.nn.GroupNorm)]
    wrong = []

    def look(module, inputs, output):
        wrong.extend(type(module).__name__ for x in (*inputs, output) if x.dim() == 4 and not x.is_contiguous(memory_format=torch.channels_last))

    for layer in layers:
        layer.register_forward_hook(look)
    noisy = torch.randn(2, 4, 8, 8).contiguous(memory_format=torch.channels_last)
    unet(noisy, torch.tensor([1, 2]), torch.randn(2, 7, 32))
    assert len(layers) > 20
    assert wrong == []


def test_checkpointed_activations_are_fewer_and_the_gradients_the_same():
    kept, gradients = [], []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        unet = build_unet('tiny').train()
        if checkpointed:
            unet.enable_gradient_checkpointing()
        saved = {}

        def keep(tensor, saved=saved):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = unet(torch.ones(8, 4, 16, 16), torch.arange(8), torch.ones(8, 7, 32)).sample
        output.square().mean().backward()
        kept.append(sum(saved.values()))
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in unet.parameters()]))
    assert kept[1] < 0.6 * kept[0]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize('training', [True, False])
def test_it_computes_what_diffusers_computes(training):
    torch.manual_seed(0)
    ours = build_unet('tiny').train(training)
    theirs = UNet2DConditionModel(**unet_config('tiny')).train(training)
    theirs.load_state_dict(ours.state_dict())
    inputs = torch.randn(64, 4, 8, 8), torch.arange(64), torch.randn(64, 7, 32)  # 64: where diffusers changes the layout
    gradients = []
    for unet in (ours, theirs):
        unet(*inputs).sample.square().mean().backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in unet.parameters()]))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
    assert {name: type(module).__mro__[1] for name, module in ours.named_modules() if type(module) is not type(theirs.get_submodule(name))} == {
        name: type(module) for name, module in theirs.named_modules() if type(module) in CLASSES
    }
