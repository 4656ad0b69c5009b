"""Feature networks by name: frozen, named by the digest of their weights, as precise as float32 is on any GPU.

Each takes uint8 images of any size: its resizing is part of a score's meaning, and its name and digest are in the protocol of every evaluation.
CLIP and DINO get antialiased squares; published processors round to levels after resizing, which differs by a third of a level.
"""

import hashlib
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends import cuda, cudnn

from diffusion.checkpoints.manifest import sha256_of
from diffusion.common.images import to_pil
from diffusion.common.processes import quick_imports
from diffusion.common.text import first_line
from diffusion.contracts.errors import EncoderError, InputError
from diffusion.datasets.keyed_random import Draw, random_bits
from diffusion.encoders.frozen_part import any_kernel
from diffusion.encoders.pretrained import load_model, load_tokenizer
from diffusion.evaluation.features import drawn_compositions
from diffusion.evaluation.features.drawn_shapes import DIMENSION, RULE, embedded, look, scenes_of
from diffusion.evaluation.features.weights import WeightsSource, find_file, find_folder, folder_file, read_tensors

INCEPTION_PX, INCEPTION_FEATURES = 299, 2048
CLIP_MEAN, CLIP_DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN, IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DINO_SHORT_SIDE, DINO_SIZE = 256, 224  # px, as its authors evaluate it; DINOv2 without a crop

RANDOM_SEED = int.from_bytes(b'conv')  # no run's: its noise would be these weights
RANDOM_PX = 64  # to which every image is resized
CHANNELS = 32  # of each level
LEVELS = 5  # 64, 32, 16, 8 and 4 px
GRID = 4  # cells a side whose mean colours are features, too: where something is


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


class FeatureNetwork:
    """A frozen network that embeds images and perhaps captions.

    Args:
        name: key of EXTRACTORS.
        sha256: digest of the file of weights.
        features: dimensions by name.
        module: on the CPU; it is frozen here.
        embed: computes its features, in that order, of (B, 3, H, W) uint8 images on its device.
        embed_texts: computes embeddings of captions, of which it gets the device too.
    """

    def __init__(
        self,
        name: str,
        sha256: str,
        features: Mapping[str, int],
        module: nn.Module,
        embed: Callable[[Tensor], Sequence[Tensor]],
        embed_texts: Callable[[Sequence[str], torch.device], Tensor] | None = None,
    ):
        self.name, self.sha256, self.features, self.embed, self.embed_texts = name, sha256, features, embed, embed_texts
        self.module, self.device = module.eval().requires_grad_(False), torch.device('cpu')

    def to(self, device: torch.device | str) -> Self:
        """Move the network; images may be on any device and are moved there, too."""
        self.device = torch.device(device)
        self.module.to(self.device)
        return self

    @precise()
    def images(self, images: Tensor) -> dict[str, Tensor]:
        """Return (B, D) float32 by the names in `features`, of (B, 3, H, W) uint8 images of any size.

        Raises:
            ValueError: other images. Floats are refused because their range is a guess: libraries that scale them to levels turn uint8 into its
                negative, or round down.
        """
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
            raise ValueError(f'images are {images.dtype} {tuple(images.shape)}; feature networks take torch.uint8 (B, 3, H, W) with levels 0..255')
        return dict(zip(self.features, self.embed(images.to(self.device)), strict=True))

    @precise()
    def texts(self, captions: Sequence[str]) -> Tensor:
        """Return (B, D) float32 in the space of the images; a caption is cut to the tokens that the network reads (77 of the published ones)."""
        assert self.embed_texts is not None, self.name
        return self.embed_texts(captions, self.device)


def clean(images: Tensor, height: int, width: int) -> Tensor:
    """Return (B, 3, height, width) float32 levels 0..255: bicubic, antialiased, not rounded; PIL's to the last digit, and clean-fid's."""
    images = images.float()
    if images.shape[-2:] == (height, width):
        return images
    return F.interpolate(images, (height, width), mode='bicubic', antialias=True).clamp(0, 255)


def clean_square(images: Tensor, short_side: int, size: int) -> Tensor:
    """Return (B, 3, size, size): the short side resized as `clean` does, then the centre cropped."""
    height, width = images.shape[-2:]
    scale = short_side / min(height, width)
    resized = clean(images, max(short_side, round(height * scale)), max(short_side, round(width * scale)))
    top, left = (resized.shape[-2] - size) // 2, (resized.shape[-1] - size) // 2
    return resized[..., top : top + size, left : left + size]


def _normalised(levels: Tensor, mean: Sequence[float], deviation: Sequence[float]) -> Tensor:
    """(B, 3, H, W) float32 as the network was trained on them, of levels 0..255."""
    return (levels / 255 - levels.new_tensor(mean)[:, None, None]) / levels.new_tensor(deviation)[:, None, None]


def random_conv() -> FeatureNetwork:
    """Return a network without a file: mean and deviation over space of CHANNELS random filters at LEVELS scales, and mean colours of a coarse grid.

    It is no published network: distances with it are no FID and compare only with one another. They rank models on simple images (shapes,
    emoji), because colours, edges and textures at five scales change its features. Its weights come from a counter-based generator of
    integers, so that they are the same bits on every machine.
    """
    filters = [random_filters(level) for level in range(LEVELS)]
    digest = hashlib.sha256(b''.join(weight.numpy().tobytes() for weight in filters)).hexdigest()
    module = nn.ParameterList(filters)

    def embed(images: Tensor) -> list[Tensor]:
        x = clean(images, RANDOM_PX, RANDOM_PX) / 127.5 - 1
        found = [F.adaptive_avg_pool2d(x, GRID).flatten(1)]
        for weight in module:
            x = F.conv2d(F.pad(x, (1, 1, 1, 1), mode='replicate'), weight)
            found += [x.abs().mean(dim=(2, 3)), x.std(dim=(2, 3))]
            x = F.avg_pool2d(x.relu(), 2)
        return [torch.cat(found, dim=1)]

    return FeatureNetwork('random-conv', digest, {'random-conv': LEVELS * CHANNELS * 2 + 3 * GRID**2}, module, embed)


def random_filters(level: int) -> Tensor:
    """(CHANNELS, inputs, 3, 3): uniform, whole multiples of a constant that keeps the variance of what passes (He)."""
    shape = CHANNELS, 3 if level == 0 else CHANNELS, 3, 3
    bits = random_bits(RANDOM_SEED, torch.tensor([[level, 0, 0]]), Draw.NOISE, math.prod(shape))
    levels = (bits >> 24).float() - 127.5  # uniform on 256 values, standard deviation 73.9
    return (levels * (math.sqrt(2 / math.prod(shape[1:])) / 73.9)).reshape(shape)


def shapes_look() -> FeatureNetwork:
    """Return the analytic look at drawn shapes, for images and for captions of data_prep.shapes; other captions raise DataError."""
    digest = hashlib.sha256(json.dumps(RULE).encode()).hexdigest()

    def embed(images: Tensor) -> list[Tensor]:
        return [torch.stack([embedded(look(to_pil(image))) for image in images.cpu()])]

    def embed_texts(captions: Sequence[str], _device: torch.device) -> Tensor:
        return torch.stack([embedded(scene) for scene in scenes_of(captions)])

    return FeatureNetwork('shapes-look', digest, {'shapes-look': DIMENSION}, nn.Module(), embed, embed_texts)


def compositions_look() -> FeatureNetwork:
    """Return the same for scenes of several objects, `data_prep.shapes --scenes composed`."""
    digest = hashlib.sha256(json.dumps([RULE, drawn_compositions.RULE]).encode()).hexdigest()

    def embed(images: Tensor) -> list[Tensor]:
        return [torch.stack([drawn_compositions.embedded(to_pil(image)) for image in images.cpu()])]

    def embed_texts(captions: Sequence[str], _device: torch.device) -> Tensor:
        return torch.stack([drawn_compositions.embedded_caption(asked) for asked in drawn_compositions.compositions_of(captions)])

    name = 'compositions-look'
    return FeatureNetwork(name, digest, {name: drawn_compositions.DIMENSION}, nn.Module(), embed, embed_texts)


def load_inception(name: str, source: WeightsSource, weights: Path | None, download: bool) -> FeatureNetwork:
    """Return FID's network: torch-fidelity's port of the TensorFlow graph of 2015, features before the last layer of each image in two sizings.

    `inception` is resized bilinearly as TensorFlow 1 does, not antialiased, and `inception-clean` as `clean` does. torch-fidelity and torchmetrics
    resize inside the network and unpickle its weights. Here the weights are read as tensors, and its layers get images of their size.
    """
    path = find_file(name, source, weights, download)
    module = read_inception(path)

    def embed(images: Tensor) -> list[Tensor]:
        from torch_fidelity.interpolate_compat_tensorflow import interpolate_bilinear_2d_like_tensorflow1x

        bilinear = interpolate_bilinear_2d_like_tensorflow1x(images.float(), size=(INCEPTION_PX, INCEPTION_PX), align_corners=False)
        return [module((levels - 128) / 128).flatten(1) for levels in (bilinear, clean(images, INCEPTION_PX, INCEPTION_PX))]

    return FeatureNetwork(name, sha256_of(path), dict.fromkeys(('inception', 'inception-clean'), INCEPTION_FEATURES), module, embed)


def read_inception(path: Path) -> nn.Sequential:
    """Return the network up to its pooling, with the weights of a file."""
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


def load_clip(name: str, source: WeightsSource, weights: Path | None, download: bool) -> FeatureNetwork:
    """Return CLIP as transformers has it, from a folder."""
    from transformers import CLIPModel  # takes seconds

    folder, model = _load_folder(CLIPModel, name, source, weights, download)
    tokenizer = load_tokenizer(str(folder), None, '', model.config.text_config)
    side, length = model.config.vision_config.image_size, model.config.text_config.max_position_embeddings

    def embed(images: Tensor) -> list[Tensor]:
        pixels = _normalised(clean_square(images, side, side), CLIP_MEAN, CLIP_DEVIATION)
        return [model.visual_projection(model.vision_model(pixel_values=pixels).pooler_output)]

    def embed_texts(captions: Sequence[str], device: torch.device) -> Tensor:
        tokens = tokenizer(list(captions), padding='max_length', max_length=length, truncation=True, return_tensors='pt').to(device)
        return model.text_projection(model.text_model(**tokens).pooler_output)

    return FeatureNetwork(name, sha256_of(folder_file(folder)), {name: model.config.projection_dim}, model, embed, embed_texts)


def load_open_clip(name: str, source: WeightsSource, weights: Path | None, download: bool, architecture: str = 'ViT-H-14') -> FeatureNetwork:
    """Return CLIP as open_clip has it, from one file."""
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
    tokenizer, side = open_clip.get_tokenizer(architecture), model.visual.image_size[0]

    def embed(images: Tensor) -> list[Tensor]:
        return [model.encode_image(_normalised(clean_square(images, side, side), CLIP_MEAN, CLIP_DEVIATION))]

    def embed_texts(captions: Sequence[str], device: torch.device) -> Tensor:
        return model.encode_text(tokenizer(list(captions)).to(device))

    return FeatureNetwork(name, sha256_of(path), {name: model.visual.output_dim}, model, embed, embed_texts)


def load_pickscore(name: str, source: WeightsSource, weights: Path | None, download: bool) -> FeatureNetwork:
    """Return PickScore (arXiv 2305.01569): CLIP ViT-H/14 tuned on choices of people between two images of a prompt.

    The score is exp(logit_scale), of its weights, times the cosine of image and prompt without a prefix (README of yuvalkirstain/PickScore).
    """
    network = load_clip(name, source, weights, download)
    return _scoring(network, float(network.module.state_dict()['logit_scale'].exp()))


def load_hps(name: str, source: WeightsSource, weights: Path | None, download: bool, architecture: str = 'ViT-H-14') -> FeatureNetwork:
    """Return HPSv2.1 (arXiv 2306.09341, its weights of 2023-12): open_clip's ViT-H/14 tuned on rankings of images by people.

    The score is the cosine of image and prompt, which goes in without a prefix, times 100 as in its benchmark (hpsv2/evaluation.py of
    https://github.com/tgxs002/HPSv2); `hpsv2.score` returns the cosine. Its code fits the longer side to 224 px: the same for square images.
    """
    return _scoring(load_open_clip(name, source, weights, download, architecture), 100.0)


def _scoring(network: FeatureNetwork, scale: float) -> FeatureNetwork:
    """A network whose score of an image is the product of its unit embedding with the caption's, which has the length `scale`."""
    embed_texts = network.embed_texts
    assert embed_texts is not None
    network.embed_texts = lambda captions, device: F.normalize(embed_texts(captions, device)) * scale
    return network


def load_dino(name: str, source: WeightsSource, weights: Path | None, download: bool) -> FeatureNetwork:
    """Return the class token of DINO (arXiv 2104.14294), with which DreamBooth measures how much of a subject is kept."""
    from transformers import ViTModel  # takes seconds

    # DINO was published without the layer that transformers adds after the class token.
    folder, model = _load_folder(ViTModel, name, source, weights, download, add_pooling_layer=False)

    def embed(images: Tensor) -> list[Tensor]:
        pixels = _normalised(clean_square(images, DINO_SHORT_SIDE, DINO_SIZE), IMAGENET_MEAN, IMAGENET_DEVIATION)
        return [model(pixel_values=pixels, interpolate_pos_encoding=True).last_hidden_state[:, 0]]

    return FeatureNetwork(name, sha256_of(folder_file(folder)), {name: model.config.hidden_size}, model, embed)


def load_dinov2(name: str, source: WeightsSource, weights: Path | None, download: bool) -> FeatureNetwork:
    """Return the class token of DINOv2 (arXiv 2304.07193) after its last norm, as FD-DINOv2 takes it (arXiv 2306.04675): of 224 px, squeezed.

    Its positions, learned at 518 px, are resampled as the published code does, with the factor 16.1 / 37. transformers takes 16 / 37, which moves
    every feature.
    """
    from transformers import Dinov2Model  # takes seconds

    folder, model = _load_folder(Dinov2Model, name, source, weights, download)
    positions, side = model.embeddings.position_embeddings, DINO_SIZE // model.config.patch_size
    learned = math.isqrt(positions.shape[1] - 1)
    if learned != side:
        grid = positions[:, 1:].unflatten(1, (learned, learned)).permute(0, 3, 1, 2)
        grid = F.interpolate(grid, scale_factor=(side + 0.1) / learned, mode='bicubic').flatten(2).transpose(1, 2)
        model.embeddings.position_embeddings = nn.Parameter(torch.cat([positions[:, :1], grid], dim=1))

    def embed(images: Tensor) -> list[Tensor]:
        return [model(pixel_values=_normalised(clean(images, DINO_SIZE, DINO_SIZE), IMAGENET_MEAN, IMAGENET_DEVIATION)).pooler_output]

    return FeatureNetwork(name, sha256_of(folder_file(folder)), {name: model.config.hidden_size}, model, embed)


def _load_folder(kind: type[Any], name: str, source: WeightsSource, weights: Path | None, download: bool, **options: Any) -> tuple[Path, Any]:
    """The folder and its model, with exactly its weights; their pickle, if that is what the folder holds, may contain tensors alone."""
    folder = find_folder(name, source, weights, download)
    return folder, load_model(kind, str(folder), None, '', folder_file(folder).suffix == '.safetensors', **options)


@dataclass(frozen=True)
class KnownExtractor:
    """A feature network that can be named."""

    features: tuple[str, ...]  # names of what it returns
    load: Callable[..., FeatureNetwork]  # takes name, source, folder of weights and whether to download; nothing without a source
    source: WeightsSource | None = None  # None: it needs no weights
    texts: bool = False  # it embeds captions
    embeds: bool = True  # likeness of its features is likeness of images, so that any metric may take them


INCEPTION_FILES = ('weights-inception-2015-12-05-6726825d.pth', 'inception-2015-12-05.pth')
INCEPTION_URL = f'https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/{INCEPTION_FILES[0]}'
LAION_H14 = 'CLIP-ViT-H-14-laion2B-s32B-b79K'
LAION_FILES = (f'{LAION_H14}/open_clip_pytorch_model.bin', f'{LAION_H14}/open_clip_model.safetensors')
OPENAI_CLIPS = {
    'clip-vit-l14': ('clip-vit-large-patch14', '1.7 GB'),  # CLIP score as NeMo's
    'clip-vit-l14-336': ('clip-vit-large-patch14-336', '1.7 GB'),  # CMMD's
    'clip-vit-b16': ('clip-vit-base-patch16', '0.6 GB'),  # mosaicml/diffusion's CLIP score
    'clip-vit-b32': ('clip-vit-base-patch32', '0.6 GB'),
}
EXTRACTORS = {
    'inception': KnownExtractor(
        ('inception', 'inception-clean'), load_inception, WeightsSource(INCEPTION_FILES, url=INCEPTION_URL, sha256='6726825d', size='95.7 MB')
    ),
    **{
        name: KnownExtractor((name,), load_clip, WeightsSource((repository,), hub=f'openai/{repository}', size=size), texts=True)
        for name, (repository, size) in OPENAI_CLIPS.items()
    },
    # MLPerf's, and the text encoder of Stable Diffusion 2, which it therefore favours.
    'openclip-vit-h14': KnownExtractor(
        ('openclip-vit-h14',), load_open_clip, WeightsSource(LAION_FILES, hub=f'laion/{LAION_H14}', size='3.9 GB'), texts=True
    ),
    'dino-vits16': KnownExtractor(('dino-vits16',), load_dino, WeightsSource(('dino-vits16',), hub='facebook/dino-vits16', size='87 MB')),
    'dinov2-vitl14': KnownExtractor(('dinov2-vitl14',), load_dinov2, WeightsSource(('dinov2-large',), hub='facebook/dinov2-large', size='1.2 GB')),
    'pickscore': KnownExtractor(
        ('pickscore',), load_pickscore, WeightsSource(('PickScore_v1',), hub='yuvalkirstain/PickScore_v1', size='3.9 GB'), texts=True, embeds=False
    ),
    'hpsv2': KnownExtractor(
        ('hpsv2',), load_hps, WeightsSource(('HPSv2/HPS_v2.1_compressed.pt',), hub='xswu/HPSv2', size='3.9 GB'), texts=True, embeds=False
    ),
    'random-conv': KnownExtractor(('random-conv',), random_conv),
    'shapes-look': KnownExtractor(('shapes-look',), shapes_look, texts=True, embeds=False),
    'compositions-look': KnownExtractor(('compositions-look',), compositions_look, texts=True, embeds=False),
}
EMBEDDING = {name: known for name, known in EXTRACTORS.items() if known.embeds}
"""Networks that METRIC@NETWORK may name, and by which neighbours are looked for."""


def load_extractors(
    names: Sequence[str], weights: Path | None = None, device: torch.device | str = 'cpu', download: bool = False
) -> list[FeatureNetwork]:
    """Return the networks of these names, in this order, on `device`.

    Args:
        weights: folder with files and folders of weights; what is not there is looked up in the caches of torch.hub and the Hub.
        download: get what is missing from the network, which never happens otherwise.

    Raises:
        InputError: unknown names.
        EncoderError: weights are missing (of all networks, with the commands to get them), are others than their digest says, or do not fit.
    """
    unknown = [name for name in names if name not in EXTRACTORS]
    if unknown:
        raise InputError(f'unknown feature networks {", ".join(unknown)}; known: {", ".join(EXTRACTORS)}')
    found, errors = list[FeatureNetwork](), list[str]()
    for name in names:
        known = EXTRACTORS[name]
        try:
            network = known.load(name, known.source, weights, download) if known.source else known.load()
            found.append(network.to(device))
        except EncoderError as error:
            errors.append(str(error))
    if errors:
        raise EncoderError('\n'.join(errors))
    return found


def in_batches(extractor: FeatureNetwork, images: Tensor, size: int) -> dict[str, Tensor]:
    """Compute features of (B, 3, H, W) uint8 `size` at a time, the last batch padded by its last image: the same whoever computes them."""
    found: list[dict[str, Tensor]] = []
    for batch in images.split(size):
        padded = torch.cat([batch, batch[-1:].expand(size - len(batch), -1, -1, -1)])
        found.append({name: value[: len(batch)].float().cpu() for name, value in extractor.images(padded).items()})
    return {name: torch.cat([one[name] for one in found]) for name in found[0]}
