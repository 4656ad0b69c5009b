"""Feature networks with random weights, written where published ones would lie; and images to feed them."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
from transformers import CLIPConfig, CLIPModel, Dinov2Config, Dinov2Model, ViTConfig, ViTModel

from diffusion.encoders.random_encoders import build_tokenizer
from diffusion.evaluation.features.lpips import Lpips
from diffusion.evaluation.features.networks import EXTRACTORS, KnownExtractor

WORDS = ('red', 'green', 'circle', 'square', 'on', 'a')
IMAGE_PX = 32  # of the tiny CLIP


class _Random(FeatureExtractorInceptionV3):
    """Its loader reads any file and takes nothing from it."""

    def load_state_dict(self, state_dict, strict=True, assign=False):
        return None


def write_inception(path: Path) -> Path:
    """Inception with seeded random weights (He), 95 MB."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        torch.save({}, path)
        network = _Random('random', ['2048'], feature_extractor_weights_path=str(path))
        for module in network.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
    torch.save(network.state_dict(), path)
    return path


def write_vgg16(path: Path) -> Path:
    """The convolutions of VGG16 with seeded random weights (He) under torchvision's names, 59 MB; biases that are not 0."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        network = Lpips()
        tensors = {}
        for place, conv in network._convolutions():
            nn.init.kaiming_normal_(conv.weight)
            nn.init.normal_(conv.bias, std=0.1)
            tensors |= {f'features.{place}.{name}': value.detach() for name, value in conv.named_parameters()}
    torch.save(tensors, path)
    return path


def write_clip(folder: Path) -> Path:
    """A CLIP of two layers with its tokenizer, in the layout of transformers."""
    tokenizer = build_tokenizer(folder, WORDS, 77)
    ends = {'bos_token_id': tokenizer.bos_token_id, 'eos_token_id': tokenizer.eos_token_id, 'pad_token_id': tokenizer.pad_token_id}
    sizes = {'hidden_size': 32, 'intermediate_size': 64, 'num_hidden_layers': 2, 'num_attention_heads': 2, 'initializer_factor': 10.0}
    config = CLIPConfig(
        text_config={**sizes, **ends, 'vocab_size': len(tokenizer), 'max_position_embeddings': 77},
        vision_config={**sizes, 'image_size': IMAGE_PX, 'patch_size': 8},
        projection_dim=24,
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        CLIPModel(config).save_pretrained(folder)
    return folder


def write_dino(folder: Path) -> Path:
    """A ViT of one layer for DINO's, without the pooling layer that it was published without."""
    config = ViTConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=224, patch_size=16)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        ViTModel(config, add_pooling_layer=False).save_pretrained(folder)
    return folder


def write_dinov2(folder: Path) -> Path:
    """A DINOv2 of two layers, whose positions are those of 518 px and whose weights are large enough to matter."""
    config = Dinov2Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=518, patch_size=14)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = Dinov2Model(config)
        for value in model.parameters():
            nn.init.normal_(value, std=0.1 if value.ndim > 1 else 0.5)
        model.save_pretrained(folder)
    return folder


def without_digest(name: str) -> KnownExtractor:
    """What EXTRACTORS knows of a network, for other weights than the published ones."""
    known = EXTRACTORS[name]
    assert known.source is not None
    return replace(known, source=replace(known.source, sha256=''))


def images(count: int, size_px: int, seed: int, noise: float = 60.0) -> Tensor:
    """(count, 3, size_px, size_px) uint8: one colour each, brighter to one side, with noise."""
    generator = torch.Generator().manual_seed(seed)
    colour = torch.rand(count, 3, 1, 1, generator=generator) * 160
    side = torch.linspace(0, 80, size_px) * torch.rand(count, 1, 1, 1, generator=generator)
    return (colour + side + noise * torch.rand(count, 3, size_px, size_px, generator=generator)).clamp(0, 255).to(torch.uint8)
