"""FD-DINOv2 and DINO-MMD with random weights, against timm, PIL and SciPy: everything but the weights is what arXiv 2306.04675 computes."""

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file
from scipy import linalg
from timm.models.vision_transformer import VisionTransformer
from transformers import Dinov2Config, Dinov2Model

from diffusion.contracts.errors import EncoderError
from diffusion.evaluation.features.networks import load_extractors
from diffusion.evaluation.metrics.figures import METRICS
from tests.evaluation.networks import images, write_dinov2

LEARNED, SHOWN = 37, 16  # patches a side of 518 and 224 px
COUNT = 40


def resampled(positions: np.ndarray) -> np.ndarray:
    """Bicubic resampling (a = -0.75) along the first axis by the factor 16.1 / 37, as the published code asks for 16 patches."""
    found = []
    for place in range(SHOWN):
        centre = (place + 0.5) * LEARNED / (SHOWN + 0.1) - 0.5
        row = np.zeros_like(positions[0])
        for near in range(int(np.floor(centre)) - 1, int(np.floor(centre)) + 3):
            x = abs(centre - near)
            weight = 1.25 * x**3 - 2.25 * x**2 + 1 if x <= 1 else -0.75 * (x**3 - 5 * x**2 + 8 * x - 4)
            row = row + weight * positions[min(max(near, 0), LEARNED - 1)]
        found.append(row)
    return np.stack(found)


def reference(folder) -> VisionTransformer:
    """The same weights in timm's network at 224 px."""
    config, weights = Dinov2Config.from_pretrained(folder), load_file(folder / 'model.safetensors')
    positions = weights['embeddings.position_embeddings'].astype(np.float64)
    grid = positions[0, 1:].reshape(LEARNED, LEARNED, -1)
    grid = resampled(resampled(grid).swapaxes(0, 1)).swapaxes(0, 1).reshape(1, SHOWN**2, -1)
    found = {
        'cls_token': weights['embeddings.cls_token'],
        'pos_embed': np.concatenate([positions[:, :1], grid], axis=1).astype(np.float32),
        'patch_embed.proj.weight': weights['embeddings.patch_embeddings.projection.weight'],
        'patch_embed.proj.bias': weights['embeddings.patch_embeddings.projection.bias'],
        'norm.weight': weights['layernorm.weight'],
        'norm.bias': weights['layernorm.bias'],
    }
    for layer in range(config.num_hidden_layers):
        theirs, ours = f'blocks.{layer}', f'encoder.layer.{layer}'
        for kind in ('weight', 'bias'):
            parts = [weights[f'{ours}.attention.attention.{part}.{kind}'] for part in ('query', 'key', 'value')]
            found[f'{theirs}.attn.qkv.{kind}'] = np.concatenate(parts)
            found[f'{theirs}.attn.proj.{kind}'] = weights[f'{ours}.attention.output.dense.{kind}']
            for same in ('norm1', 'norm2', 'mlp.fc1', 'mlp.fc2'):
                found[f'{theirs}.{same}.{kind}'] = weights[f'{ours}.{same}.{kind}']
        for number in (1, 2):
            found[f'{theirs}.ls{number}.gamma'] = weights[f'{ours}.layer_scale{number}.lambda1']
    sizes = {'embed_dim': config.hidden_size, 'depth': config.num_hidden_layers, 'num_heads': config.num_attention_heads}
    network = VisionTransformer(img_size=224, patch_size=14, num_classes=0, init_values=1.0, **sizes).eval()
    network.load_state_dict({name: torch.from_numpy(value) for name, value in found.items()})
    return network


def features_of(network: VisionTransformer, shown: torch.Tensor) -> np.ndarray:
    """Class tokens of images that PIL resized to 224 x 224, each channel by itself, as the paper's code does with --clean_resize.

    Without it that code rounds to levels: 0.05 % of FD and 0.08 % of MMD here.
    """
    channels = [Image.fromarray(channel).resize((224, 224), Image.Resampling.BICUBIC) for channel in shown.flatten(0, 1).float().numpy()]
    levels = torch.from_numpy(np.stack([np.asarray(one).clip(0, 255) for one in channels])).unflatten(0, (-1, 3)) / 255
    mean, deviation = (torch.tensor(values)[:, None, None] for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    with torch.no_grad():
        return network((levels - mean) / deviation).double().numpy()


def frechet(real: np.ndarray, drawn: np.ndarray) -> float:
    first, second = np.cov(real, rowvar=False), np.cov(drawn, rowvar=False)
    root = linalg.sqrtm(first @ second).real
    return float(((real.mean(axis=0) - drawn.mean(axis=0)) ** 2).sum() + np.trace(first + second - 2 * root))


def mmd(real: np.ndarray, drawn: np.ndarray) -> float:
    """Unbiased, of all images: subsets of 1,000 hold them all."""

    def mean_kernel(one: np.ndarray, other: np.ndarray) -> float:
        values = [(x @ y / len(x) + 1) ** 3 for i, x in enumerate(one) for j, y in enumerate(other) if one is not other or i != j]
        return float(np.mean(values))

    return mean_kernel(real, real) + mean_kernel(drawn, drawn) - 2 * mean_kernel(real, drawn)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return write_dinov2(tmp_path_factory.mktemp('weights') / 'dinov2-large')


def test_both_metrics_are_the_papers(folder):
    (network,), theirs = load_extractors(['dinov2-vitl14'], folder.parent), reference(folder)
    sets = [images(COUNT, 64, seed=1), images(COUNT, 64, seed=2, noise=120)]
    real, drawn = (network.images(shown)['dinov2-vitl14'] for shown in sets)
    exact, close = (features_of(theirs, shown) for shown in sets)
    assert METRICS['fd_dinov2'](real, drawn, None, 0, 0)['fid']['value'] == pytest.approx(frechet(exact, close), rel=1e-4)
    assert METRICS['mmd_dinov2'](real, drawn, None, 0, 0)['kid']['value'] == pytest.approx(mmd(exact, close), rel=1e-4)


def test_features_of_224_px_are_timms_to_rounding(folder):
    """Nothing is resized: what differs is the implementation alone. transformers' own resampling of positions differs more."""
    (network,), shown = load_extractors(['dinov2-vitl14'], folder.parent), images(3, 224, seed=3)
    found, expected = network.images(shown)['dinov2-vitl14'], torch.from_numpy(features_of(reference(folder), shown))
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    pixels = (shown / 255 - torch.tensor([0.485, 0.456, 0.406])[:, None, None]) / torch.tensor([0.229, 0.224, 0.225])[:, None, None]
    with torch.no_grad():
        transformers = Dinov2Model.from_pretrained(folder)(pixels).pooler_output
    assert (transformers - expected).abs().max() > 10 * (found - expected).abs().max()


def test_images_are_squeezed_and_not_cropped(folder):
    """torchvision's Resize((224, 224)) does so."""
    (network,), wide = load_extractors(['dinov2-vitl14'], folder.parent), images(2, 96, seed=4)[:, :, :64]
    np.testing.assert_allclose(network.images(wide)['dinov2-vitl14'].numpy(), features_of(reference(folder), wide), atol=1e-4)


def test_another_network_in_its_folder_is_refused(tmp_path):
    folder = write_dinov2(tmp_path / 'dinov2-large')
    weights = Dinov2Model.from_pretrained(folder).state_dict()
    del weights['layernorm.weight']
    (folder / 'model.safetensors').unlink()
    torch.save(weights, folder / 'pytorch_model.bin')
    with pytest.raises(EncoderError, match=r'1 missing \(layernorm.weight\)'):
        load_extractors(['dinov2-vitl14'], tmp_path)
