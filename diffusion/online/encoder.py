"""One encoder: a frozen VAE in a process of its own on any machine of a Ray cluster. Images in, moments out, an expected error as data.

A method that raised would arrive as Ray's error with a traceback of another machine; what a user can do something about is returned instead.
"""

import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from diffusion.common.environment import code_identity
from diffusion.common.ray_cluster import ClusterRefusal
from diffusion.common.text import counted
from diffusion.contracts.batch import StoredImages
from diffusion.contracts.errors import EncoderError
from diffusion.cost.hardware import gpu_without_kernels
from diffusion.datasets.decode import ImageError
from diffusion.datasets.transforms import covered
from diffusion.encoders.frozen import Vae


@dataclass(frozen=True)
class Settings:
    """Requirements on an encoder, so that its moments are those of the trainer."""

    source: str  # of the VAE, as `model.encoders` has it
    revision: str | None
    vae_sha256: str  # of the trainer's VAE
    identity: Mapping[str, str | None]  # of the trainer's code
    in_bf16: bool  # let the VAE multiply in bf16
    backend: str | None  # of torch.compile, where training compiles
    benchmark: bool  # cuDNN tries its algorithms, as `train.cudnn_benchmark` says
    on_gpu: bool
    threads: int  # on the CPU
    dtype: str  # of the moments, float32 or float16
    shapes: Sequence[tuple[int, int, int, int]]  # (B, 3, H, W) of the training micro-batches, tried out before the first of them arrives


class BadImage(Exception):
    """The stored image at `position` of a micro-batch cannot be decoded."""

    def __init__(self, position: int, cause: str):
        super().__init__(position, cause)
        self.position, self.cause = position, cause


class ImageEncoder:
    """Lives in a Ray actor. `busy_sec` is called from a thread of its own while `encode` computes."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.begun: float | None = None
        self.vae: Vae | None = None
        self.decoders = ThreadPoolExecutor(settings.threads)
        self.error: Exception | None = None
        try:
            self._start()
        except (ClusterRefusal, EncoderError) as error:
            self.error = error

    def ready(self) -> Exception | str:
        """Name of this machine, or what keeps the encoder from serving."""
        return self.error or _machine()

    def busy_sec(self) -> float:
        """Seconds that the current call has taken so far; 0 between calls."""
        begun = self.begun
        return 0.0 if begun is None else time.monotonic() - begun

    def encode(self, images: np.ndarray | StoredImages, training: bool) -> np.ndarray | Exception:
        """Return moments (B, 2C, h, w) of (B, 3, H, W) uint8 images, or of stored ones; or why there are none.

        Args:
            training: as a training step does, compiled if it is; evaluation never is.
        """
        if self.error is not None:
            return self.error
        self.begun = time.monotonic()
        try:
            if isinstance(images, StoredImages):  # (B, 3, H, W) uint8, as the loader's processes make them
                pixels = torch.stack(list(self.decoders.map(partial(_decode, images), range(len(images.contents)))))
            else:
                pixels = torch.from_numpy(images.copy())  # Ray's arrays are read-only
            return self._moments(pixels, training)
        except (ClusterRefusal, BadImage) as error:
            return error
        finally:
            self.begun = None

    def _start(self) -> None:
        settings = self.settings
        own = code_identity()
        different = [f'{name} {own.get(name)} (the trainer has {theirs})' for name, theirs in settings.identity.items() if own.get(name) != theirs]
        if different:
            raise ClusterRefusal(
                f'data.encoders.ray: the encoder {_machine()} would compute something else: {", ".join(different)}; install the same version of this '
                'project and of its packages on all machines of the cluster'
            )
        device = torch.device('cuda' if settings.on_gpu else 'cpu')
        if settings.on_gpu and (lacking := gpu_without_kernels()):
            raise EncoderError(f'the encoder {_machine()}: {lacking}')
        torch.backends.cudnn.benchmark = settings.benchmark
        try:
            vae = Vae.find(settings.source, settings.revision)
            vae.to(device)
            vae.in_bf16 = settings.in_bf16
            if settings.backend is not None:
                vae.compile(settings.backend)
            _ = vae.module
        except EncoderError as error:
            raise EncoderError(f'model.encoders.source, read by the encoder {_machine()}: {error}') from None
        if vae.sha256 != settings.vae_sha256:
            raise EncoderError(
                f"model.encoders: the VAE of the encoder {_machine()} has the digest {vae.sha256[:12]}, the trainer's {settings.vae_sha256[:12]}; "
                'give all machines the same folder, or name the revision of a Hub id'
            )
        self.vae = vae
        if settings.on_gpu or settings.backend is not None:  # compilation and cuDNN's trials take longer than any later micro-batch
            for shape in settings.shapes:
                self._moments(torch.zeros(shape, dtype=torch.uint8), training=True)

    def _moments(self, images: Tensor, training: bool) -> np.ndarray:
        assert self.vae is not None
        torch.set_num_threads(self.settings.threads)  # of this thread, which Ray chose
        try:
            with nullcontext() if training else torch.compiler.set_stance('force_eager'):
                moments = self.vae.encode(images.to(self.vae.device))
            return moments.to(getattr(torch, self.settings.dtype)).cpu().numpy()
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            raise ClusterRefusal(
                f'data.encoders.ray: the GPU of the encoder {_machine()} has no room for a micro-batch of {counted(len(images), "image")} of '
                f'{images.shape[-1]} x {images.shape[-2]} px; lower batch.micro_size, or give each encoder a whole GPU: data.encoders.ray.gpus=1'
            ) from None


def _decode(images: StoredImages, position: int) -> Tensor:
    try:
        pixels, _ = covered(images.contents[position], images.width, images.height)
    except ImageError as error:
        raise BadImage(position, f'{type(error).__name__}: {error}') from None
    return pixels.flip(-1) if images.mirrored[position] else pixels


def _machine() -> str:
    return f'on {socket.gethostname()}'
