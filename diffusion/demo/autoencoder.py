"""Train a small VAE on an image MDS, and write it with a random text encoder as the demo's frozen encoders.

    python -m diffusion.demo.autoencoder IMAGES OUT [--steps 800]

A trained one, because diffusers' AutoencoderKL, which the exported pipeline must find, has no parameter-free form: its
GroupNorm and SiLU stand between any fixed linear map and the latents. The text encoder stays random: what matters to
cross-attention is that different words get different vectors, and random ones do.
"""

from __future__ import annotations

from pathlib import Path

from data_prep.shapes import vocabulary
from diffusion.common.arguments import CommandParser, positive_int
from diffusion.common.files import replacing_folder

DEFAULT_STEPS = 800
NUM_IMAGES = 2048


def main() -> None:
    parser = CommandParser('diffusion.demo.autoencoder', __doc__)
    parser.add_argument('images', type=Path, metavar='IMAGES', help='image MDS, as data_prep.convert writes it')
    parser.add_argument('out', type=Path, metavar='OUT', help='folder for the encoders, in the diffusers layout')
    parser.add_argument('--steps', type=positive_int, default=DEFAULT_STEPS, help='training steps of 16 images (default %(default)s)')
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f'{args.out}: exists already; name a new folder')
    from diffusion.demo.vae import load_images, train_vae  # imports torch, so after the arguments are read
    from diffusion.encoders.random_encoders import write_stand_in

    vae = train_vae(load_images(args.images, NUM_IMAGES), args.steps)
    with replacing_folder(args.out) as temporary:
        write_stand_in(temporary, 'shapes', words=vocabulary(), vae=vae)
    print(f'encoders of the demo: {args.out}')


if __name__ == '__main__':
    main()
