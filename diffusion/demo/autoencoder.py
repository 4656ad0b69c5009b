"""Train a small VAE on an image MDS, and write it with a random text encoder as the demo's frozen encoders.

    python -m diffusion.demo.autoencoder IMAGES OUT [--steps 800]

A trained one, because diffusers' AutoencoderKL, which the exported pipeline must find, has no parameter-free form: its
GroupNorm and SiLU stand between any fixed linear map and the latents. The text encoder stays random: what matters to
cross-attention is that different words get different vectors, and random ones do.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from diffusers.models.resnet import ResnetBlock2D
from streaming import LocalDataset
from torch import Tensor
from tqdm import tqdm

from data_prep.shapes import vocabulary
from diffusion.arguments import positive_int
from diffusion.datasets.decode import open_image
from diffusion.datasets.transforms import square
from diffusion.files import replacing_folder
from diffusion.models.encoders import pixels_to_unit_range
from diffusion.models.stand_in import KINDS, build_vae, write_stand_in

BATCH_SIZE = 16
DEFAULT_STEPS = 800
LEARNING_RATE = 3e-3
NUM_PICTURES = 2048
KL_WEIGHT = 1e-6  # as Stable Diffusion's: only keeps the latents from drifting


def train_vae(images: Tensor, steps: int, seed: int = 0) -> AutoencoderKL:
    """A VAE for (N, 3, H, W) uint8 pictures whose latents have zero mean and unit variance in every channel."""
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


def load_pictures(folder: Path, count: int) -> Tensor:
    """(N, 3, H, W) uint8: the first pictures of an image MDS."""
    dataset = LocalDataset(local=str(folder))
    rows = (dataset[i] for i in range(min(count, len(dataset))))
    pictures = (open_image(row['image']) for row in rows)
    return torch.stack([square(picture, min(picture.size)) for picture in pictures])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog='python -m diffusion.demo.autoencoder', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('images', type=Path, metavar='IMAGES', help='image MDS, as data_prep.convert writes it')
    parser.add_argument('out', type=Path, metavar='OUT', help='folder for the encoders, in the diffusers layout')
    parser.add_argument('--steps', type=positive_int, default=DEFAULT_STEPS, help='training steps of 16 pictures (default %(default)s)')
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f'{args.out}: exists already; name a new folder')
    vae = train_vae(load_pictures(args.images, NUM_PICTURES), args.steps)
    with replacing_folder(args.out) as temporary:
        write_stand_in(temporary, 'shapes', words=vocabulary(), vae=vae)
    print(f'encoders of the demo: {args.out}')


if __name__ == '__main__':
    main()
