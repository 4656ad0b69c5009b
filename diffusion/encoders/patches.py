"""Frozen feature networks that describe an image patch by patch: DINOv2 and its kin, for training that aligns a network's tokens with them."""

from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import Dinov2Config, Dinov2Model, Dinov2WithRegistersConfig, Dinov2WithRegistersModel, DINOv3ViTConfig, DINOv3ViTModel

from diffusion.contracts.errors import EncoderError
from diffusion.encoders.frozen_part import FrozenPart
from diffusion.encoders.pretrained import describe, load_config, load_model, model_type

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, which all of them were trained with


class Kind(NamedTuple):
    """Classes of transformers."""

    model: type
    config: type


KINDS = {
    'dinov2': Kind(Dinov2Model, Dinov2Config),
    'dinov2_with_registers': Kind(Dinov2WithRegistersModel, Dinov2WithRegistersConfig),
    'dinov3_vit': Kind(DINOv3ViTModel, DINOv3ViTConfig),
}
"""Classes by `model_type` of config.json. All take images of any size, and put what is no patch before the patches."""


class PatchFeatures(FrozenPart[Any]):
    """Args:
    config: of the network; `patch_size` is in pixels, `hidden_size` the channels of a feature.
    source, revision: where it lies.
    kind: its classes.
    """

    def __init__(self, config: Any, source: str, revision: str | None, kind: Kind):
        super().__init__(partial(load_model, kind.model, source, revision, ''))
        self._config, self._kind = config, kind
        self.patch_px, self.width = int(config.patch_size), int(config.hidden_size)

    @classmethod
    def find(cls, source: str, revision: str | None) -> Self:
        """Find it in a local folder with config.json and model.safetensors, or on the Hub. Weights are read when they are first used.

        Raises:
            EncoderError: it cannot be read, or is of another kind.
        """
        name = model_type(source, revision, '')
        if name not in KINDS:
            raise EncoderError(f'{describe(source, revision)}: config.json says model_type {name}; known are {", ".join(KINDS)}')
        return cls(load_config(KINDS[name].config, source, revision, ''), source, revision, KINDS[name])

    def encode(self, images: Tensor, grid: tuple[int, int]) -> Tensor:
        """(B, rows x columns, width) float32 features of the patches, row by row, without gradients.

        Args:
            images: (B, 3, H, W) uint8; they are resized so that they have as many patches as the grid.
            grid: rows and columns.
        """
        with self.computing(bf16=images.device.type == 'cuda'):
            size = [side * self.patch_px for side in grid]
            pixels = images.float()
            if list(pixels.shape[-2:]) != size:
                pixels = torch.nn.functional.interpolate(pixels, size=size, mode='bicubic', antialias=True, align_corners=False).clamp(0, 255)
            tokens = self.module(pixel_values=normalized(pixels)).last_hidden_state
            return tokens[:, -grid[0] * grid[1] :].float()

    def flops(self, grid: tuple[int, int]) -> int:
        """FLOP of an image with as many patches (1 MAC = 2 FLOP), counted on the meta device."""
        with torch.device('meta'), torch.no_grad(), FlopCounterMode(display=False) as counter:
            self._kind.model(self._config)(pixel_values=torch.zeros(1, 3, *(side * self.patch_px for side in grid)))
        return counter.get_total_flops()


def normalized(pixels: Tensor) -> Tensor:
    """(B, 3, H, W) float32 as these networks read them, of values 0..255."""
    mean, std = (torch.tensor(values, device=pixels.device).view(1, 3, 1, 1) for values in (MEAN, STD))
    return (pixels.float() / 255 - mean) / std
