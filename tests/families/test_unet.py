import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import Attention
from diffusers.models.upsampling import Upsample2D
from torch import nn

from diffusion.families.networks import NETWORKS, find_network
from diffusion.families.registry import build_network, training_flops
from diffusion.families.sd2 import StableDiffusion2
from diffusion.families.unet import CLASSES, GroupNorm, PlainAttention, Upsample, attend_plainly


def test_sd2_base_is_the_published_network():
    with torch.device('meta'):
        unet = build_network('sd2-base')
    assert sum(p.numel() for p in unet.parameters()) == 865_910_724
    assert len(unet.state_dict()) == 686
    numbers = [sum(isinstance(module, kind) for module in unet.modules()) for kind in (nn.Linear, nn.Conv2d, nn.GroupNorm, nn.LayerNorm)]
    assert numbers == [216, 66, 61, 48]
    assert {type(processor) for processor in unet.attn_processors.values()} == {PlainAttention}


@pytest.mark.parametrize(('latent_side', 'gflop'), [(32, 539.31), (64, 2408.74)])
def test_flops_of_sd2_base(latent_side, gflop):
    """Published counts of one image's forward and backward pass, 256 and 512 px, 77 tokens."""
    assert training_flops('sd2-base', (latent_side, latent_side), 77) / 1e9 == pytest.approx(gflop, abs=0.01)


@pytest.mark.parametrize('name', sorted(path.stem for path in NETWORKS.glob('*.json')))
def test_every_configuration_builds(name):
    with torch.device('meta'):
        unet = build_network(name)
    known = set(unet.config)
    assert set(find_network(name).config) <= known  # diffusers would pass over a misspelt key


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_compiled_group_norm_is_that_of_float64(dtype):
    """What torch.compile sees of it computes on channels_last by our own formula."""
    torch.manual_seed(0)
    norm = GroupNorm(8, 32, eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    x = (3 + 2 * torch.randn(4, 32, 6, 5)).to(dtype).contiguous(memory_format=torch.channels_last).requires_grad_()
    exact = torch.nn.GroupNorm(8, 32, eps=1e-5).double()
    exact.load_state_dict(norm.state_dict())
    x64 = x.detach().double().requires_grad_()
    weights = torch.randn(4, 32, 6, 5)
    compiled = torch.compile(norm, backend='aot_eager', fullgraph=True)
    y, y64 = compiled(x), exact(x64)
    assert y.dtype == dtype
    assert y.is_contiguous(memory_format=torch.channels_last)
    (y * weights).sum().backward()
    (y64 * weights).sum().backward()
    close = {torch.float32: {'rtol': 1e-5, 'atol': 1e-5}, torch.bfloat16: {'rtol': 2e-2, 'atol': 2e-2}}[dtype]
    torch.testing.assert_close(y.double(), y64, **close)
    torch.testing.assert_close(x.grad.double(), x64.grad, **close)
    for name, parameter in exact.named_parameters():
        torch.testing.assert_close(norm.get_parameter(name).grad.double(), parameter.grad, rtol=close['rtol'], atol=5 * close['atol'])


def test_compiled_group_norm_leaves_float32_under_autocast():
    """As CUDA's autocast has it; the CPU's own does not."""
    norm = torch.compile(GroupNorm(2, 4), backend='aot_eager', fullgraph=True)
    with torch.autocast('cpu', torch.bfloat16):
        assert norm(torch.randn(1, 4, 2, 2, dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize(('size', 'to'), [((3, 4), None), ((3, 4), (5, 8)), ((4, 3), (7, 6)), ((1, 1), (1, 1)), ((5, 2), (9, 3))])
def test_upsampling_is_interpolate(size, to):
    torch.manual_seed(0)
    ours = Upsample(4, use_conv=True)
    theirs = Upsample2D(4, use_conv=True)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 4, *size)
    gradients = []
    for upsample in (ours, theirs):
        image = x.clone().requires_grad_()
        y = upsample(image, to)
        y.square().sum().backward()
        gradients.append((y, image.grad))
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other)


def test_attention_that_does_more_is_refused():
    unet = UNet2DConditionModel(**find_network('tiny').config)
    attention = next(module for module in unet.modules() if isinstance(module, Attention))
    attention.rescale_output_factor = 2.0
    with pytest.raises(ValueError, match='normalises, adds, scales or drops'):
        attend_plainly(unet)


@pytest.mark.parametrize('weights', ['channels_last', 'contiguous'])
def test_activations_are_channels_last_from_end_to_end(weights):
    """Also where FSDP keeps the weights contiguous; a block that changed the layout would cost copies all the way."""
    unet = build_network('tiny')
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
        unet = build_network('tiny').train()
        if checkpointed:
            StableDiffusion2().checkpoint_activations(unet)
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
    ours = build_network('tiny').train(training)
    theirs = UNet2DConditionModel(**find_network('tiny').config).train(training)
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
