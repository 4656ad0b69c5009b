"""Score autoencoders: encode images, decode them, and compare what comes back with the originals.

    python -m diffusion.reconstruct VAE [VAE ...] --data IMAGES --out OUT [--resolution PX] [--samples N] [--metrics psnr,ssim,lpips,fid]

VAE is a local folder in the diffusers layout: an AutoencoderKL, or what holds one in `vae/` (a whole model, the encoders of a recipe). IMAGES is an
image MDS on a disk or in object storage, or a folder of images. Images are encoded to the posterior's mean in float32 and decoded to 8 bits.

OUT gets reconstruction.json (figures, latent statistics, and everything that they depend on), reconstruction.html (the page) and
reconstruction.png (originals, reconstructions, differences). Latents that the scaling_factor and shift_factor of a VAE's config.json do not bring to
mean 0 and deviation 1 are a warning.
"""

from pathlib import Path

from pydantic import PositiveInt

from diffusion.common.command_line import Arguments, Names, Seed, SidePx, option, positional
from diffusion.common.processes import quick_imports
from diffusion.common.text import print_message, print_page
from diffusion.contracts.errors import run_command

EXIT_CODES = """exit codes: 0 scored; 2 input or options are wrong and the message says how; 3 not finished, for a reason outside (storage):
run the same command again"""


class ReconstructionRequest(Arguments):
    """Autoencoders to score, images and figures."""

    vaes: list[str] = positional('VAE', 'folder of an AutoencoderKL, or with one in vae/; several are compared')
    data: str = option(..., 'image MDS (folder or URL), or folder of images', 'IMAGES')
    out: Path = option(..., 'folder for the result; an earlier result there is replaced', 'OUT')
    resolution: SidePx | None = option(None, 'side of the square images (default: as the first, at most 256)', 'PX')
    samples: PositiveInt | None = option(None, 'images (default: all, at most 30000)', 'N')
    metrics: Names = option(
        ('psnr', 'ssim', 'lpips', 'fid'),
        'psnr, ssim, lpips, fid, fid_clean; lpips@random-conv and fid@NETWORK take other features, such as fid@random-conv '
        '(default: psnr,ssim,lpips,fid)',
        'NAME,...',
    )
    weights: Path | None = option(None, "feature networks' weights (default: local caches); nothing is downloaded", 'FOLDER')
    download: bool = option(False, "get feature networks' weights that are not on this machine")
    seed: Seed = option(0, 'chooses the images, and resamples for errors')
    batch_size: PositiveInt = option(16, 'images encoded together', 'N')


def main() -> int:
    request = ReconstructionRequest.parse('diffusion.reconstruct', __doc__, EXIT_CODES)
    return run_command(lambda: run(request), also=(OSError,), out=request.out)


def run(request: ReconstructionRequest) -> None:
    with quick_imports():  # of torch, so after the arguments are read
        from diffusion.cost.hardware import own_device
        from diffusion.evaluation.job.reconstructing import PAGE_NAME, RESULT_NAME, SHEET_NAME, reconstruct
        from diffusion.evaluation.pages.reconstructions import reconstruction_table, write_reconstructions

    result, shown = reconstruct(device=own_device(), **dict(request))
    write_reconstructions(result, shown, request.out)
    print_page(f'{reconstruction_table(result)}\n{", ".join(str(request.out / name) for name in (RESULT_NAME, PAGE_NAME, SHEET_NAME))}')
    for one in result['autoencoders']:
        for line in one['warnings']:
            print_message(f'{one["name"]}: {line}')


if __name__ == '__main__':
    raise SystemExit(main())
