"""FID's Inception: torch-fidelity's port of the TensorFlow graph of 2015, with two resizings in front of it.

torch-fidelity and torchmetrics resize inside the network and unpickle its weights. Here the weights are read as tensors, and its layers
get images of their size.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from diffusion.common.processes import quick_imports
from diffusion.common.text import first_line
from diffusion.contracts.errors import EncoderError
from diffusion.evaluation.network import FeatureNetwork, precise
from diffusion.evaluation.resizing import clean, verify_uint8
from diffusion.evaluation.weights import WeightsSource, file_sha256, find_file, read_tensors

SIZE_PX = 299
DIMENSION = 2048


class Inception(FeatureNetwork[nn.Sequential]):
    """Extractor: the pooled features before the last layer, of each image resized as TF1 and as CLEAN say."""

    @classmethod
    def find(cls, name: str, source: WeightsSource, weights: Path | None, download: bool) -> Inception:
        """Raises EncoderError: no weights, other weights, or the extra `eval` is not installed."""
        path = find_file(name, source, weights, download)
        return cls(name, file_sha256(path), {'inception': DIMENSION, 'inception-clean': DIMENSION}, read_layers(path))

    @precise()
    def images(self, images: Tensor) -> dict[str, Tensor]:
        """Return {'inception': (B, 2048), 'inception-clean': (B, 2048)} float32 of (B, 3, H, W) uint8."""
        from torch_fidelity.interpolate_compat_tensorflow import interpolate_bilinear_2d_like_tensorflow1x

        images = verify_uint8(images).to(self.device)
        bilinear = interpolate_bilinear_2d_like_tensorflow1x(images.float(), size=(SIZE_PX, SIZE_PX), align_corners=False)
        return {'inception': self._pooled(bilinear), 'inception-clean': self._pooled(clean(images, SIZE_PX, SIZE_PX))}

    def _pooled(self, levels: Tensor) -> Tensor:
        """(B, 2048) of (B, 3, 299, 299) float levels 0..255."""
        return self.module((levels - 128) / 128).flatten(1)


def read_layers(path: Path) -> nn.Sequential:
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
