"""Alignment with a frozen feature network, against transformers and sums in float64."""

import numpy as np
import pytest
import torch
from transformers import (
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    DINOv3ViTConfig,
    DINOv3ViTModel,
    ViTConfig,
    ViTModel,
)

from diffusion.contracts.errors import EncoderError
from diffusion.encoders.patches import MEAN, STD, PatchFeatures
from diffusion.families.networks import find_network
from diffusion.families.registry import attach_methods, family_of, training_flops
from diffusion.methods.alignment import FeatureAlignment
from diffusion.objectives.objective import Outputs
from diffusion.recipe import RecipeError
from diffusion.recipe.techniques import Alignment, Methods
from tests.families.test_prx import inputs, random_network

SIZES = {'hidden_size': 24, 'num_hidden_layers': 2, 'num_attention_heads': 2, 'patch_size': 4, 'image_size': 16}
KINDS = {
    'dinov2': (Dinov2Model, Dinov2Config(**SIZES), 1),
    'dinov2_with_registers': (Dinov2WithRegistersModel, Dinov2WithRegistersConfig(**SIZES, num_register_tokens=4), 5),
    'dinov3_vit': (DINOv3ViTModel, DINOv3ViTConfig(**SIZES, intermediate_size=48, num_register_tokens=4), 5),
}
FAMILY, NAMED = family_of('tiny-prx'), find_network('tiny-prx')


def write_features(folder, kind='dinov2'):
    torch.manual_seed(4)
    model, config, _ = KINDS[kind]
    network = model(config)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    network.save_pretrained(folder)
    return network.eval()


@pytest.mark.parametrize('kind', KINDS)
def test_features_are_those_of_transformers_for_each_patch(kind, tmp_path):
    theirs = write_features(tmp_path, kind)
    images = torch.randint(0, 256, (3, 3, 12, 20), dtype=torch.uint8)
    pixels = (images / 255 - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    with torch.no_grad():
        expected = theirs(pixel_values=pixels).last_hidden_state[:, KINDS[kind][2] :]  # what comes first are no patches
    ours = PatchFeatures.find(str(tmp_path), None).encode(images, (3, 5))
    assert ours.shape == (3, 15, 24)
    assert not ours.requires_grad
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def test_patches_lie_where_the_tokens_lie(tmp_path):
    """Images of another size are resized so that patch and token are the same part of the image."""
    write_features(tmp_path)
    features = PatchFeatures.find(str(tmp_path), None)
    images = torch.full((1, 3, 32, 64), 128, dtype=torch.uint8)
    images[:, :, 8:16, 48:56] = 255  # row 1 of 4, column 6 of 8
    plain = features.encode(torch.full_like(images, 128), (4, 8))
    change = (features.encode(images, (4, 8)) - plain).norm(dim=-1)[0]
    assert int(change.argmax()) == 1 * 8 + 6


def test_the_loss_by_hand_and_where_its_gradient_ends(tmp_path):
    write_features(tmp_path)
    network = random_network()
    found = attach_methods(
        Methods(alignment=Alignment(str(tmp_path), None, block=0, weight=0.5, width=16)), FAMILY, NAMED.config, network, 1.0, None, 0
    )
    method = found['alignment']
    method.begin({})
    noisy, t, text, mask = inputs()
    prediction = network(noisy, t, text, attention_mask=mask, return_dict=False)[0]
    images = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    tokens = method._tokens.detach().double()
    loss = method(torch.zeros(3), Outputs(prediction, torch.zeros(3, 4, 8, 8), None, t), {'images': images})
    wanted = method.features.encode(images, (4, 4)).double().numpy()
    projected = method.projection.double()(tokens).detach().numpy()
    method.projection.float()
    cosine = (projected * wanted).sum(-1) / np.linalg.norm(projected, axis=-1) / np.linalg.norm(wanted, axis=-1)
    np.testing.assert_allclose(loss.detach().numpy(), 0.5 * (1 - cosine.mean(axis=1)), rtol=1e-4)
    loss.sum().backward()
    assert all(weight.grad is None and not weight.requires_grad for weight in method.features.module.parameters())
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in method.projection.parameters())
    assert network.blocks[0].down_proj.weight.grad.abs().sum() > 0
    assert all(weight.grad is None for weight in network.blocks[1].parameters())  # behind the tokens
    assert not any('features' in name for name in method.state_dict())


def test_tokens_equal_to_the_features_cost_nothing(tmp_path):
    write_features(tmp_path)
    features = PatchFeatures.find(str(tmp_path), None)
    block = torch.nn.Identity()
    method = FeatureAlignment(Alignment(str(tmp_path), None, block=0, width=8), [block], 24, 2, features)
    method.projection = torch.nn.Identity()
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    outputs = Outputs(torch.zeros(2, 4, 8, 8), torch.zeros(2, 4, 8, 8), None, torch.zeros(2))
    for tokens, expected in ((3 * features.encode(images, (4, 4)), 0.0), (-features.encode(images, (4, 4)), 2 * 0.5)):
        method.begin({})
        block(tokens)
        torch.testing.assert_close(method(torch.zeros(2), outputs, {'images': images}), torch.full((2,), expected), rtol=0, atol=1e-5)


def test_flop_of_both_networks_are_counted(tmp_path):
    write_features(tmp_path)
    settings = Alignment(str(tmp_path), None, block=1, width=64)
    plain = training_flops('tiny-prx', (8, 8), 16)
    projection = 3 * 2 * 16 * (32 * 64 + 64 * 64 + 64 * 24)  # 16 tokens; forward, and back to tokens and weights
    features = training_flops('tiny-prx', (8, 8), 16, None, Methods(alignment=settings)) - plain - projection
    of_a_layer = 2 * 17 * (4 * 24 * 24 + 2 * 24 * 96) + 2 * 2 * 17 * 17 * 24  # of 16 patches and one more token
    assert features == pytest.approx(2 * of_a_layer + 2 * 16 * 24 * 3 * 4 * 4, rel=0.01)


def test_other_networks_are_refused(tmp_path):
    ViTModel(ViTConfig(hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)).save_pretrained(tmp_path)
    with pytest.raises(EncoderError, match='config.json says model_type vit; known are dinov2, dinov2_with_registers, dinov3_vit'):
        PatchFeatures.find(str(tmp_path), None)
    with pytest.raises(RecipeError, match=r'methods\.alignment\.source: .*model_type vit'):
        training_flops('tiny-prx', (8, 8), 16, None, Methods(alignment=Alignment(str(tmp_path), None, block=1)))
