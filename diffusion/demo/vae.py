"""The demo's small VAE: how it is trained, and on what."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from diffusers.models.resnet import ResnetBlock2D
from streaming import LocalDataset
from torch import Tensor
from tqdm import tqdm

from diffusion.datasets.decode import open_image
from diffusion.datasets.transforms import square
from diffusion.encoders.random_encoders import build_vae
from diffusion.encoders.sizes import KINDS
from diffusion.encoders.vae import pixels_to_unit_range

BATCH_SIZE = 16
LEARNING_RATE = 3e-3
KL_WEIGHT = 1e-6  # as Stable Diffusion's: only keeps the latents from drifting


def train_vae(images: Tensor, steps: int, seed: int = 0) -> AutoencoderKL:
    """A VAE for (N, 3, H, W) uint8 images whose latents have zero mean and unit variance in every channel."""
    torch.manual_seed(seed)
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    vae = build_vae(**KINDS['shapes']['vae']).to(device)
    _ease_start(vae)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.05)
    with tqdm(range(steps), desc='autoencoder', unit='step', mininterval=1) as progress:
        for step in progress:
            pixels = pixels_to_unit_range(images[torch.randint(len(images), (BATCH_SIZE,))].to(device))
            posterior = vae.encode(pixels).latent_dist
            error = vae.decode(posterior.sample()).sample - pixels
            loss = error.abs().mean() + error.square().mean() + KL_WEIGHT * posterior.kl().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if step % 50 == 0:
                progress.set_postfix(loss=f'{loss.item():.3f}')
    _whiten(vae, pixels_to_unit_range(images[:512].to(device)))
    return vae.cpu().eval()


@torch.no_grad()
def _ease_start(vae: AutoencoderKL) -> None:
    """Residual branches begin at zero and the posterior almost certain: trains several times faster from random weights."""
    for module in vae.modules():
        if isinstance(module, ResnetBlock2D):
            module.conv2.weight.zero_()
            module.conv2.bias.zero_()
    channels = vae.config.latent_channels
    quant: Any = vae.quant_conv
    quant.weight[channels:] *= 0.1
    quant.bias[channels:] = -8.0


@torch.no_grad()
def _whiten(vae: AutoencoderKL, pixels: Tensor) -> None:
    """Give each latent channel zero mean and unit variance by changing the two 1x1 convolutions next to the latents."""
    mean = vae.encode(pixels).latent_dist.mean
    shift, scale = mean.mean(dim=(0, 2, 3)), mean.std(dim=(0, 2, 3))  # (4,) each
    channels = len(shift)
    quant: Any = vae.quant_conv
    quant.weight[:channels] /= scale.view(-1, 1, 1, 1)
    quant.bias[:channels] = (quant.bias[:channels] - shift) / scale
    quant.bias[channels:] -= 2 * scale.log()  # log variance
    post: Any = vae.post_quant_conv
    post.bias += post.weight[:, :, 0, 0] @ shift
    post.weight *= scale.view(1, -1, 1, 1)
    vae.register_to_config(scaling_factor=1.0)


def load_images(folder: Path, count: int, side_px: int | None = None) -> Tensor:
    """(N, 3, S, S) uint8: the first images of an image MDS, as squares of `side_px` or as large as the short side of the first."""
    dataset = LocalDataset(local=str(folder))
    images = [open_image(dataset[i]['image']) for i in range(min(count, len(dataset)))]
    return torch.stack([square(image, side_px or min(images[0].size)) for image in images])


def words_of_captions(folder: Path) -> list[str]:
    """The words that the captions of an image MDS hold, sorted; lower case, because CLIP's tokenizers know no other."""
    dataset = LocalDataset(local=str(folder))
    captions = (dataset[i]['caption'].lower() for i in range(len(dataset)))
    return sorted({word for caption in captions for word in re.findall(r'[a-z]+', caption)})
