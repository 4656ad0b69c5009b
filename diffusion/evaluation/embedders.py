"""Networks that embed an image as one vector: CLIP (with its captions) of transformers and of open_clip, and DINO.

Each gets its images as CLEAN squares: published processors round to levels after resizing, which differs by a third of a level.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import CLIPModel, CLIPTokenizer, ViTModel

from diffusion.common.text import first_line
from diffusion.contracts.errors import EncoderError
from diffusion.encoders.pretrained import load_model, load_tokenizer
from diffusion.evaluation.network import FeatureNetwork, precise
from diffusion.evaluation.resizing import clean_square
from diffusion.evaluation.weights import WeightsSource, file_sha256, find_file, find_folder, folder_file

CLIP_MEAN, CLIP_DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN, IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DINO_SHORT_SIDE, DINO_SIZE = 256, 224  # px, as its authors evaluate it


class ClipEmbedder(FeatureNetwork[CLIPModel]):
    """TextExtractor: CLIP as transformers has it, from a folder."""

    def __init__(self, name: str, model: CLIPModel, tokenizer: CLIPTokenizer, sha256: str):
        super().__init__(name, sha256, {name: model.config.projection_dim}, model)
        self._tokenizer, self._size_px = tokenizer, model.config.vision_config.image_size

    @classmethod
    def find(cls, name: str, source: WeightsSource, weights: Path | None, download: bool) -> ClipEmbedder:
        """Raises EncoderError: no folder, or its weights or tokenizer are incomplete."""
        folder = find_folder(name, source, weights, download)
        model = _of_folder(CLIPModel, folder)
        return cls(name, model, load_tokenizer(str(folder), None, '', model.config.text_config), file_sha256(folder_file(folder)))

    @precise()
    def images(self, images: Tensor) -> dict[str, Tensor]:
        """Return {name: (B, D) float32} of (B, 3, H, W) uint8."""
        pixels = _normalised(images.to(self.device), self._size_px, self._size_px, CLIP_MEAN, CLIP_DEVIATION)
        return {self.name: self.module.visual_projection(self.module.vision_model(pixel_values=pixels).pooler_output)}

    @precise()
    def texts(self, captions: Sequence[str]) -> Tensor:
        """Return (B, D) float32 of captions, cut to the tokens that the network reads (77 of the published ones)."""
        length = self.module.config.text_config.max_position_embeddings
        tokens = self._tokenizer(list(captions), padding='max_length', max_length=length, truncation=True, return_tensors='pt').to(self.device)
        return self.module.text_projection(self.module.text_model(**tokens).pooler_output)


class OpenClip(FeatureNetwork[Any]):
    """TextExtractor: CLIP as open_clip has it, from one file."""

    def __init__(self, name: str, model: Any, tokenizer: Any, sha256: str):
        super().__init__(name, sha256, {name: model.visual.output_dim}, model)
        self._tokenizer, self._size_px = tokenizer, model.visual.image_size[0]

    @classmethod
    def find(cls, name: str, source: WeightsSource, weights: Path | None, download: bool, architecture: str = 'ViT-H-14') -> OpenClip:
        """Raises EncoderError: no file, other weights, or the extra `eval` is not installed."""
        try:
            import open_clip
        except ImportError as error:
            raise EncoderError(f"{name} needs open_clip: uv pip install -e '.[eval]' ({error})") from error
        path = find_file(name, source, weights, download)
        model = open_clip.create_model(architecture, pretrained=None, load_weights=False, pretrained_image=False, pretrained_text=False)
        try:
            open_clip.load_checkpoint(model, str(path), strict=True, weights_only=True)
        except Exception as error:  # of the unpickler, of safetensors, of torch
            raise EncoderError(f'{path}: cannot be read as weights of {architecture}: {first_line(error, with_type=True)}') from error
        return cls(name, model, open_clip.get_tokenizer(architecture), file_sha256(path))

    @precise()
    def images(self, images: Tensor) -> dict[str, Tensor]:
        """Return {name: (B, D) float32} of (B, 3, H, W) uint8."""
        return {self.name: self.module.encode_image(_normalised(images.to(self.device), self._size_px, self._size_px, CLIP_MEAN, CLIP_DEVIATION))}

    @precise()
    def texts(self, captions: Sequence[str]) -> Tensor:
        """Return (B, D) float32 of captions, cut to 77 tokens."""
        return self.module.encode_text(self._tokenizer(list(captions)).to(self.device))


class Dino(FeatureNetwork[ViTModel]):
    """Extractor: the class token of DINO (arXiv 2104.14294), with which DreamBooth measures how much of a subject is kept."""

    def __init__(self, name: str, model: ViTModel, sha256: str):
        super().__init__(name, sha256, {name: model.config.hidden_size}, model)

    @classmethod
    def find(cls, name: str, source: WeightsSource, weights: Path | None, download: bool) -> Dino:
        """Raises EncoderError: no folder, or its weights are incomplete."""
        folder = find_folder(name, source, weights, download)  # DINO was published without the layer that transformers adds after the class token
        return cls(name, _of_folder(ViTModel, folder, add_pooling_layer=False), file_sha256(folder_file(folder)))

    @precise()
    def images(self, images: Tensor) -> dict[str, Tensor]:
        """Return {name: (B, D) float32} of (B, 3, H, W) uint8."""
        pixels = _normalised(images.to(self.device), DINO_SHORT_SIDE, DINO_SIZE, IMAGENET_MEAN, IMAGENET_DEVIATION)
        return {self.name: self.module(pixel_values=pixels, interpolate_pos_encoding=True).last_hidden_state[:, 0]}


def _of_folder(kind: type[nn.Module], folder: Path, **options: Any) -> Any:
    """With exactly the weights of the folder, whose pickle, if that is what it holds, may contain tensors alone."""
    return load_model(kind, str(folder), None, '', folder_file(folder).suffix == '.safetensors', **options)


def _normalised(images: Tensor, short_side: int, size: int, mean: Sequence[float], deviation: Sequence[float]) -> Tensor:
    """(B, 3, size, size) float32 as the network was trained on them."""
    levels = clean_square(images, short_side, size) / 255
    return (levels - levels.new_tensor(mean)[:, None, None]) / levels.new_tensor(deviation)[:, None, None]
