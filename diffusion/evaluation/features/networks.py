"""Feature networks: frozen, named by the digest of their weights, as precise as float32 is on any GPU.

Each takes uint8 images of any size: its resizing is part of a score's meaning. CLIP and DINO get CLEAN squares; published processors round to
levels after resizing, which differs by a third of a level.
"""

import hashlib
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends import cuda, cudnn

from diffusion.common.processes import quick_imports
from diffusion.common.text import first_line
from diffusion.contracts.errors import EncoderError
from diffusion.datasets.keyed_random import Draw, random_bits
from diffusion.encoders.frozen_part import any_kernel
from diffusion.encoders.pretrained import load_model, load_tokenizer
from diffusion.evaluation.features.weights import WeightsSource, file_sha256, find_file, find_folder, folder_file, read_tensors

CLEAN = 'bicubic, antialiased, not rounded'  # PIL's to the last digit, and clean-fid's
TF1 = 'bilinear as in TensorFlow 1, not antialiased'
INCEPTION_PX, INCEPTION_FEATURES = 299, 2048
CLIP_MEAN, CLIP_DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN, IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DINO_SHORT_SIDE, DINO_SIZE = 256, 224  # px, as its authors evaluate it

RANDOM_SEED = int.from_bytes(b'conv')  # no run's: its noise would be these weights
RANDOM_PX = 64  # to which every image is resized
CHANNELS = 32  # of each level
LEVELS = 5  # 64, 32, 16, 8 and 4 px
GRID = 4  # cells a side whose mean colours are features, too: where something is

Module = TypeVar('Module', bound=nn.Module)


@contextmanager
def precise() -> Iterator[None]:
    """Context, also a decorator, of a network's calls: no gradients, float32 throughout, the same algorithms each time, any kernel of attention.

    cuDNN multiplies in TF32 (10 bits) unless told not to, and may choose among convolutions by time; a run may have allowed TF32 for products, too.
    """
    allowed = cuda.matmul.allow_tf32
    cuda.matmul.allow_tf32 = False
    full = cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False)
    try:
        with torch.inference_mode(), torch.autocast('cuda', enabled=False), any_kernel(), full:
            yield
    finally:
        cuda.matmul.allow_tf32 = allowed


def verify_uint8(images: Tensor) -> Tensor:
    """Return the images unchanged.

    Raises:
        ValueError: not (B, 3, H, W) uint8. Floats are refused because their range is a guess: libraries that scale them to levels turn
            uint8 into its negative, or round down.
    """
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(f'images are {images.dtype} {tuple(images.shape)}; feature networks take torch.uint8 (B, 3, H, W) with levels 0..255')
    return images


def clean(images: Tensor, height: int, width: int) -> Tensor:
    """Return (B, 3, height, width) float32 levels 0..255, resized as CLEAN says."""
    images = verify_uint8(images).float()
    if images.shape[-2:] == (height, width):
        return images
    return F.interpolate(images, (height, width), mode='bicubic', antialias=True).clamp(0, 255)


def clean_square(images: Tensor, short_side: int, size: int) -> Tensor:
    """Return (B, 3, size, size): the short side resized as CLEAN says, then the centre cropped."""
    height, width = verify_uint8(images).shape[-2:]
    scale = short_side / min(height, width)
    resized = clean(images, max(short_side, round(height * scale)), max(short_side, round(width * scale)))
    top, left = (resized.shape[-2] - size) // 2, (resized.shape[-1] - size) // 2
    return resized[..., top : top + size, left : left + size]


class FeatureNetwork(Generic[Module]):
    """Base of the extractors that are networks.

    Args:
        name: as in EXTRACTORS.
        sha256: of the file of weights.
        features: dimensions by name.
        module: on the CPU; it is frozen here.
    """

    def __init__(self, name: str, sha256: str, features: Mapping[str, int], module: Module):
        self.name, self.sha256, self.features = name, sha256, features
        self.module = module.eval().requires_grad_(False)
        self.device = torch.device('cpu')

    def to(self, device: torch.device | str) -> Self:
        """Move the network; images may be on any device and are moved there, too."""
        self.device = torch.device(device)
        self.module.to(self.device)
        return self

    def _square(self, images: Tensor, short_side: int, size: int, mean: Sequence[float], deviation: Sequence[float]) -> Tensor:
        """(B, 3, size, size) float32 as the network was trained on them."""
        levels = clean_square(images.to(self.device), short_side, size) / 255
        return (levels - levels.new_tensor(mean)[:, None, None]) / levels.new_tensor(deviation)[:, None, None]


class RandomConv(FeatureNetwork[nn.ParameterList]):
    """Mean and deviation over space of CHANNELS random filters at LEVELS scales, and the mean colours of a coarse grid: needs no weights file.

    It is no published network: distances with it are no FID and compare only with one another. They rank models on simple images (shapes,
    emoji), because colours, edges and textures at five scales change its features. Its weights come from a counter-based generator of
    integers, so that they are the same bits on every machine.
    """

    def __init__(self) -> None:
        filters = [random_filters(level) for level in range(LEVELS)]
        digest = hashlib.sha256(b''.join(weight.numpy().tobytes() for weight in filters)).hexdigest()
        super().__init__('random-conv', digest, {'random-conv': LEVELS * CHANNELS * 2 + 3 * GRID**2}, nn.ParameterList(filters))

    @precise()
    def images(self, images: Tensor) -> dict[str, Tensor]:
        """Return {'random-conv': (B, 368) float32} of (B, 3, H, W) uint8."""
        x = clean(images.to(self.device), RANDOM_PX, RANDOM_PX) / 127.5 - 1
        found = [F.adaptive_avg_pool2d(x, GRID).flatten(1)]
        for weight in self.module:
            x = F.conv2d(F.pad(x, (1, 1, 1, 1), mode='replicate'), weight)
            found += [x.abs().mean(dim=(2, 3)), x.std(dim=(2, 3))]
            x = F.avg_pool2d(x.relu(), 2)
        return {self.name: torch.cat(found, dim=1)}


def random_filters(level: int) -> Tensor:
    """(CHANNELS, inputs, 3, 3): uniform, whole multiples of a constant that keeps the variance of what passes (He)."""
    shape = CHANNELS, 3 if level == 0 else CHANNELS, 3, 3
    bits = random_bits(RANDOM_SEED, torch.tensor([[level, 0, 0]]), Draw.NOISE, math.prod(shape))
    levels = (bits >> 24).float() - 127.5  # uniform on 256 values, standard deviation 73.9
    return (levels * (math.sqrt(2 / math.prod(shape[1:])) / 73.9)).reshape(shape)


class Inception(FeatureNetwork[nn.Sequential]):
    """FID's: torch-fidelity's port of the TensorFlow graph of 2015, features before the last layer, of each image resized as TF1 and as CLEAN say.

    torch-fidelity and torchmetrics resize inside the network and unpickle its weights. Here the weights are read as tensors, and its layers
    get images of their size.
    """

    @classmethod
    def find(cls, name: str, source: WeightsSource, weights: Path | None, download: bool) -> Self:
        """Raises EncoderError: no weights, other weights, or the extra `eval` is not installed."""
        path = find_file(name, source, weights, download)
        return cls(name, file_sha256(path), {'inception': INCEPTION_FEATURES, 'inception-clean': INCEPTION_FEATURES}, read_inception(path))

    @precise()
    def images(self, images: Tensor) -> dict[str, Tensor]:
        """Return {'inception': (B, 2048), 'inception-clean': (B, 2048)} float32 of (B, 3, H, W) uint8."""
        from torch_fidelity.interpolate_compat_tensorflow import interpolate_bilinear_2d_like_tensorflow1x

        images = verify_uint8(images).to(self.device)
        bilinear = interpolate_bilinear_2d_like_tensorflow1x(images.float(), size=(INCEPTION_PX, INCEPTION_PX), align_corners=False)
        resized = {'inception': bilinear, 'inception-clean': clean(images, INCEPTION_PX, INCEPTION_PX)}
        return {name: self.module((levels - 128) / 128).flatten(1) for name, levels in resized.items()}


def read_inception(path: Path) -> nn.Sequential:
    """Return the network up to its pooling, with the weights of a file.

    Raises:
        EncoderError: torch-fidelity is not installed, or these are not Inception's weights.
    """
    try:
        with quick_imports():
            from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    except ImportError as error:
        raise EncoderError(f"inception needs torch-fidelity: uv pip install -e '.[eval]' ({error})") from error
    tensors = read_tensors(path)
    with tempfile.TemporaryDirectory() as folder:
        # The class unpickles whatever its file holds, so it gets one that is written here.
        safe = Path(folder, 'inception.pth')
        torch.save(tensors, safe)
        try:
            network = FeatureExtractorInceptionV3('inception', ['2048'], feature_extractor_weights_path=str(safe))
        except RuntimeError as error:
            raise EncoderError(f'{path}: not the weights of Inception as torch-fidelity has them: {first_line(error)}') from error
    return nn.Sequential(*list(network.children())[:-1])  # in the order of its forward; the last is the classifier


class ClipEmbedder(FeatureNetwork[Any]):
    """CLIP as transformers has it, from a folder; embeds captions, too."""

    def __init__(self, name: str, model: Any, tokenizer: Any, sha256: str):
        super().__init__(name, sha256, {name: model.config.projection_dim}, model)
        self._tokenizer, self._size_px = tokenizer, model.config.vision_config.image_size

    @classmethod
    def find(cls, name: str, source: WeightsSource, weights: Path | None, download: bool) -> Self:
        """Raises EncoderError: no folder, or its weights or tokenizer are incomplete."""
        from transformers import CLIPModel  # takes seconds

        folder, model = _load_folder(CLIPModel, name, source, weights, download)
        return cls(name, model, load_tokenizer(str(folder), None, '', model.config.text_config), file_sha256(folder_file(folder)))

    @precise()
    def images(self, images: Tensor) -> dict[str, Tensor]:
        """Return {name: (B, D) float32} of (B, 3, H, W) uint8."""
        pixels = self._square(images, self._size_px, self._size_px, CLIP_MEAN, CLIP_DEVIATION)
        return {self.name: self.module.visual_projection(self.module.vision_model(pixel_values=pixels).pooler_output)}

    @precise()
    def texts(self, captions: Sequence[str]) -> Tensor:
        """Return (B, D) float32 of captions, cut to the tokens that the network reads (77 of the published ones)."""
        length = self.module.config.text_config.max_position_embeddings
        tokens = self._tokenizer(list(captions), padding='max_length', max_length=length, truncation=True, return_tensors='pt').to(self.device)
        return self.module.text_projection(self.module.text_model(**tokens).pooler_output)


class OpenClip(FeatureNetwork[Any]):
    """CLIP as open_clip has it, from one file; embeds captions, too."""

    def __init__(self, name: str, model: Any, tokenizer: Any, sha256: str):
        super().__init__(name, sha256, {name: model.visual.output_dim}, model)
        self._tokenizer, self._size_px = tokenizer, model.visual.image_size[0]

    @classmethod
    def find(cls, name: str, source: WeightsSource, weights: Path | None, download: bool, architecture: str = 'ViT-H-14') -> Self:
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
        return {self.name: self.module.encode_image(self._square(images, self._size_px, self._size_px, CLIP_MEAN, CLIP_DEVIATION))}

    @precise()
    def texts(self, captions: Sequence[str]) -> Tensor:
        """Return (B, D) float32 of captions, cut to 77 tokens."""
        return self.module.encode_text(self._tokenizer(list(captions)).to(self.device))


class Dino(FeatureNetwork[Any]):
    """The class token of DINO (arXiv 2104.14294), with which DreamBooth measures how much of a subject is kept."""

    @classmethod
    def find(cls, name: str, source: WeightsSource, weights: Path | None, download: bool) -> Self:
        """Raises EncoderError: no folder, or its weights are incomplete."""
        from transformers import ViTModel  # takes seconds

        # DINO was published without the layer that transformers adds after the class token.
        folder, model = _load_folder(ViTModel, name, source, weights, download, add_pooling_layer=False)
        return cls(name, file_sha256(folder_file(folder)), {name: model.config.hidden_size}, model)

    @precise()
    def images(self, images: Tensor) -> dict[str, Tensor]:
        """Return {name: (B, D) float32} of (B, 3, H, W) uint8."""
        pixels = self._square(images, DINO_SHORT_SIDE, DINO_SIZE, IMAGENET_MEAN, IMAGENET_DEVIATION)
        return {self.name: self.module(pixel_values=pixels, interpolate_pos_encoding=True).last_hidden_state[:, 0]}


def _load_folder(kind: type[Any], name: str, source: WeightsSource, weights: Path | None, download: bool, **options: Any) -> tuple[Path, Any]:
    """The folder and its model, with exactly its weights; their pickle, if that is what the folder holds, may contain tensors alone."""
    folder = find_folder(name, source, weights, download)
    return folder, load_model(kind, str(folder), None, '', folder_file(folder).suffix == '.safetensors', **options)
