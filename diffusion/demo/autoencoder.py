"""Train a small VAE on an image MDS, and write it with a random text encoder as the demo's frozen encoders.

    python -m diffusion.demo.autoencoder IMAGES OUT [--steps 800] [--resolution PX]

A trained one, because diffusers' AutoencoderKL, which the exported pipeline must find, has no parameter-free form: its
GroupNorm and SiLU stand between any fixed linear map and the latents. The text encoder stays random: what matters to
cross-attention is that different words get different vectors, and random ones do. Its tokenizer has a token for each word of the captions.
"""

from __future__ import annotations

from pathlib import Path

from diffusion.common.arguments import CommandParser, positive_int
from diffusion.common.files import replacing_folder
from diffusion.common.imports import quick_imports

DEFAULT_STEPS = 800
NUM_IMAGES = 2048


def main() -> None:
    parser = CommandParser('diffusion.demo.autoencoder', __doc__)
    parser.add_argument('images', type=Path, metavar='IMAGES', help='image MDS, as data_prep.convert writes it')
    parser.add_argument('out', type=Path, metavar='OUT', help='folder for the encoders, in the diffusers layout')
    parser.add_argument('--steps', type=positive_int, default=DEFAULT_STEPS, help='training steps of 16 images (default %(default)s)')
    parser.add_argument(
        '--resolution', type=positive_int, metavar='PX', help='side of the square that images are cut to (default: that of the first)'
    )
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f'{args.out}: exists already; name a new folder')
    with quick_imports():  # of torch, so after the arguments are read
        from diffusion.demo.vae import load_images, train_vae, words_of_captions
        from diffusion.encoders.random_encoders import write_stand_in

    vae = train_vae(load_images(args.images, NUM_IMAGES, args.resolution), args.steps)
    with replacing_folder(args.out) as temporary:
        write_stand_in(temporary, 'shapes', words=words_of_captions(args.images), vae=vae)
    print(f'encoders of the demo: {args.out}')


if __name__ == '__main__':
    main()
