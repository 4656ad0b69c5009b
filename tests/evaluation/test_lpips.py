"""LPIPS with random weights of VGG16 against torchmetrics; what gradients, autocast and wrong files do; the distance of random features."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torchmetrics.functional.image import lpips as theirs
from torchvision.models import vgg16

from diffusion.contracts.errors import EncoderError, InputError
from diffusion.evaluation.features import lpips
from diffusion.evaluation.features.lpips import Lpips, PerceptualDistance, RandomConvDistance, find_perceptual
from tests.evaluation.networks import write_vgg16

SMALL = ((6, 6), (8, 8), (8, 8, 8), (10, 10, 10), (10, 10, 10))


@pytest.fixture(scope='module')
def vgg16_file(tmp_path_factory):
    return write_vgg16(tmp_path_factory.mktemp('vgg16') / 'vgg16.pth')


@pytest.fixture(scope='module')
def published(vgg16_file):
    """With torchmetrics' heads, and random weights of VGG16."""
    return Lpips.of_files(vgg16_file, lpips.published_heads())


def pairs(count=3, size=(40, 48), seed=0):
    generator = torch.Generator().manual_seed(seed)
    first, noise = (torch.rand(count, 3, *size, generator=generator) * 2 - 1 for _ in range(2))
    return first, (0.7 * first + 0.3 * noise)


def small(seed=0):
    """Of few channels, with random weights."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = Lpips(SMALL)
    for head in model.heads:
        head.copy_(torch.rand(head.shape, generator=torch.Generator().manual_seed(seed)))
    return model


def test_the_distance_is_torchmetrics(published, vgg16_file, monkeypatch):
    network = vgg16(weights=None)
    network.load_state_dict({**network.state_dict(), **torch.load(vgg16_file, weights_only=True)})
    monkeypatch.setattr(theirs, '_get_tv_model_features', lambda net, pretrained: network.features)
    images, reference = (part.double() for part in pairs())
    expected = theirs._NoTrainLpips(net='vgg').double()(images, reference).flatten()
    found = published(images.float(), reference.float())
    assert expected.min() > 0.01
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)
    assert published(images.float(), images.float()).tolist() == [0.0] * 3


def test_the_formula_by_hand():
    """Equation 1 in float64 with loops over images and places."""
    model = small().double()
    images, reference = (part.double() for part in pairs(2, (16, 18)))
    found = model(images, reference)
    scale, shift = torch.tensor(lpips.SCALE).double().view(3, 1, 1), torch.tensor(lpips.SHIFT).double().view(3, 1, 1)
    for i in range(2):
        total, (x, y) = 0.0, (((part[i : i + 1].float().double() - shift) / scale) for part in (images, reference))
        for level, head in zip(model.levels, model.heads, strict=True):
            x, y = level(x), level(y)
            places = [(h, w) for h in range(x.shape[2]) for w in range(x.shape[3])]
            for h, w in places:
                unit_x, unit_y = (part[0, :, h, w] / part[0, :, h, w].norm().clamp(min=1e-4) for part in (x, y))
                total += float(((unit_x - unit_y) ** 2 * head).sum()) / len(places)
        assert float(found[i]) == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize('make', [small, RandomConvDistance])
def test_gradients_flow_to_the_images_alone_and_are_right(make):
    model = make().double()
    model._scaled = lambda pixels: (pixels - model.shift) / model.scale  # in float64, as the differences are
    model._unit = lambda features: features * (features.square().sum(dim=1, keepdim=True) + model.epsilon).rsqrt()
    images, reference = (part.double().requires_grad_() for part in pairs(1, (16, 16)))
    model(images, reference).sum().backward()
    assert reference.grad is None
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    step = torch.randn(images.shape, generator=torch.Generator().manual_seed(1)).double() * 1e-6
    with torch.no_grad():
        change = model(images + step, reference) - model(images - step, reference)
    assert float(change) == pytest.approx(2 * float((images.grad * step).sum()), rel=1e-3)


@pytest.mark.parametrize('make', [small, RandomConvDistance])
def test_flat_images_have_finite_gradients(make):
    flat = torch.zeros(1, 3, 16, 16, requires_grad=True)
    make()(flat, torch.ones(1, 3, 16, 16)).sum().backward()
    assert flat.grad.isfinite().all()


@pytest.mark.parametrize('make', [small, RandomConvDistance])
def test_under_autocast_it_is_nearly_the_same_in_float32(make):
    model, (images, reference) = make(), pairs()
    images.requires_grad_()
    expected = model(images, reference)
    with torch.autocast('cpu', torch.bfloat16):
        found = model(images.bfloat16(), reference)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.05, atol=1e-3)
    found.sum().backward()
    assert images.grad.isfinite().all()


def test_training_mode_changes_nothing():
    model, (images, reference) = small(), pairs()
    assert torch.equal(model.train()(images, reference), model.eval()(images, reference))


def test_what_is_kept_for_the_backward_pass_is_bounded():
    """Features and differences of the images alone, each once: nothing of the reference."""
    model, (images, reference) = Lpips(), pairs(1, (64, 64))
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    images.requires_grad_()
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        distance = model(images, reference)
    features = [4 * 64 * 64 * sum(level) // 4**number for number, level in enumerate(lpips.VGG16)]  # bytes of all convolutions' outputs
    held = sum(size for place, size in kept.items() if place not in own)
    assert held < 2.5 * sum(features)
    distance.sum().backward()


def test_the_published_file_is_looked_for_and_its_digest_compared(vgg16_file, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, 'get_dir', lambda: str(tmp_path / 'hub'))
    with pytest.raises(EncoderError, match=r'lpips: its weights \(528 MB, SHA-256 397923af\.\.\.\) are in none of: .*vgg16-397923af.pth.*curl -L'):
        find_perceptual('lpips', tmp_path)
    (tmp_path / 'vgg16-397923af.pth').symlink_to(vgg16_file)
    with pytest.raises(EncoderError, match=r'expected 397923af\.\.\.: another network'):
        find_perceptual('lpips', tmp_path)


def test_a_conversion_to_safetensors_is_the_same_network(published, vgg16_file, tmp_path):
    save_file({**torch.load(vgg16_file, weights_only=True), 'classifier.0.weight': torch.zeros(2, 2)}, tmp_path / 'vgg16.safetensors')
    found = find_perceptual('lpips', tmp_path)
    assert found.sha256 == published.sha256
    assert found.sha256 != small().sha256


@pytest.mark.parametrize(
    ('change', 'said'),
    [
        (lambda tensors: tensors.pop('features.28.bias'), r'1 missing \(features\.28\.bias\)'),
        (lambda tensors: tensors.update({'features.30.weight': torch.zeros(1)}), r'1 unexpected \(features\.30\.weight\)'),
        (lambda tensors: tensors.update({'features.0.weight': torch.zeros(64, 1, 3, 3)}), r'1 of another shape \(features\.0\.weight\)'),
    ],
)
def test_weights_that_do_not_fit_are_refused(change, said, vgg16_file, tmp_path):
    tensors = torch.load(vgg16_file, weights_only=True)
    change(tensors)
    torch.save(tensors, tmp_path / 'vgg16.pth')
    with pytest.raises(EncoderError, match=said):
        Lpips.of_files(tmp_path / 'vgg16.pth', lpips.published_heads())


def test_other_heads_are_refused(monkeypatch):
    monkeypatch.setattr(lpips, 'HEADS_SHA256', '0' * 64)
    with pytest.raises(EncoderError, match='install torchmetrics again'):
        lpips.published_heads()


def test_the_heads_are_positive_and_of_published_size():
    heads = torch.load(lpips.published_heads(), weights_only=True, map_location='cpu')
    assert [tuple(head.shape) for head in heads.values()] == [(1, channels[-1], 1, 1) for channels in lpips.VGG16]
    assert all((head > 0).all() for head in heads.values())


def test_wrong_images_are_refused():
    model = small()
    right = torch.zeros(1, 3, 16, 16)
    for wrong in (torch.zeros(1, 3, 16, 16, dtype=torch.uint8), torch.zeros(3, 16, 16), torch.zeros(1, 1, 16, 16), torch.zeros(1, 3, 15, 16)):
        with pytest.raises(ValueError, match='floats in -1..1 with sides of at least 16 px'):
            model(wrong, right)
    with pytest.raises(ValueError, match='of one shape'):
        model(right, torch.zeros(2, 3, 16, 16))


def test_unknown_names_are_refused():
    with pytest.raises(InputError, match="unknown perceptual distance lpip; did you mean 'lpips'"):
        find_perceptual('lpip')


def test_the_distance_of_random_features_grows_with_the_damage():
    """It is 0 for equal images only, also where they differ by brightness or colour alone, and tells blur and noise from small changes."""
    model = find_perceptual('lpips@random-conv')
    assert isinstance(model, PerceptualDistance)
    images, _ = pairs(2, (64, 64))
    smooth = nn.functional.avg_pool2d(nn.functional.pad(images, (4, 4, 4, 4), mode='reflect'), 9, 1)
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(2))
    distances = [model(smooth + level * noise, smooth).mean() for level in (0.0, 0.02, 0.1, 0.5)]
    assert distances[0] == 0
    assert distances[1] > 0
    assert distances == sorted(distances)
    grey = torch.full((1, 3, 32, 32), -0.8)
    brightness = [float(model(grey + change, grey)) for change in (0.0, 0.1, 0.4, 1.6)]
    assert brightness == sorted(brightness)
    assert brightness[0] == 0
    assert brightness[1] > 1e-4
    assert max(*distances, *brightness) < 1
    assert find_perceptual('lpips@random-conv').sha256 == model.sha256
