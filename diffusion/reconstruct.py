"""Score autoencoders: encode images, decode them, and compare what comes back with the originals.

    python -m diffusion.reconstruct VAE [VAE ...] --data IMAGES --out OUT [--resolution PX] [--samples N] [--metrics psnr,ssim,lpips,fid]

VAE is a local folder in the diffusers layout: an AutoencoderKL, or what holds one in `vae/` (a whole model, the encoders of a recipe). IMAGES is an
image MDS on a disk or in object storage, or a folder of images. Images are encoded to the posterior's mean in float32 and decoded to 8 bits.

OUT gets reconstruction.json (figures, latent statistics, and everything that they depend on), reconstruction.html (the page) and
reconstruction.png (originals, reconstructions, differences). Latents that the scaling_factor and shift_factor of a VAE's config.json do not bring to
mean 0 and deviation 1 are a warning.
"""

import argparse
from pathlib import Path

from diffusion.common.arguments import CommandParser, image_side, names, positive_int, seed_number
from diffusion.common.processes import quick_imports
from diffusion.common.text import print_message, print_page
from diffusion.contracts.errors import run_command

EXIT_CODES = """exit codes: 0 scored; 2 input or options are wrong and the message says how; 3 not finished, for a reason outside (storage):
run the same command again"""


def main() -> int:
    parser = CommandParser('diffusion.reconstruct', __doc__, epilog=EXIT_CODES)
    parser.add_argument('vaes', nargs='+', metavar='VAE', help='folder of an AutoencoderKL, or with one in vae/; several are compared')
    parser.add_argument('--data', required=True, metavar='IMAGES', help='image MDS (folder or URL), or folder of images')
    parser.add_argument('--out', required=True, type=Path, metavar='OUT', help='folder for the result; an earlier result there is replaced')
    parser.add_argument('--resolution', type=image_side, metavar='PX', help='side of the square images (default: as the first, at most 256)')
    parser.add_argument('--samples', type=positive_int, metavar='N', help='images (default: all, at most 30000)')
    parser.add_argument('--metrics', type=names, default=('psnr', 'ssim', 'lpips', 'fid'), metavar='NAME,...', help='psnr, ssim, lpips, fid, '
        'fid_clean; lpips@random-conv and fid@NETWORK take other features, such as fid@random-conv (default: psnr,ssim,lpips,fid)')  # fmt: skip
    parser.add_argument('--weights', type=Path, metavar='FOLDER', help="feature networks' weights (default: local caches); nothing is downloaded")
    parser.add_argument('--download', action='store_true', help="get feature networks' weights that are not on this machine")
    parser.add_argument('--seed', type=seed_number, default=0, help='chooses the images, and resamples for errors (default %(default)s)')
    parser.add_argument(
        '--batch-size', dest='batch', type=positive_int, default=16, metavar='N', help='images encoded together (default %(default)s)'
    )
    args = parser.parse_args()
    return run_command(lambda: run(args), also=(OSError,), out=args.out)


def run(args: argparse.Namespace) -> None:
    with quick_imports():  # of torch, so after the arguments are read
        from diffusion.cost.hardware import own_device
        from diffusion.evaluation.reconstructing import PAGE_NAME, RESULT_NAME, SHEET_NAME, ReconstructionRequest, reconstruct
        from diffusion.evaluation.reconstruction_page import table_of, write_pages

    options = {**vars(args), 'vaes': tuple(args.vaes)}
    result, shown = reconstruct(ReconstructionRequest(**options), own_device())
    write_pages(result, shown, args.out)
    print_page(f'{table_of(result)}\n{", ".join(str(args.out / name) for name in (RESULT_NAME, PAGE_NAME, SHEET_NAME))}')
    for one in result['autoencoders']:
        for line in one['warnings']:
            print_message(f'{one["name"]}: {line}')


if __name__ == '__main__':
    raise SystemExit(main())
