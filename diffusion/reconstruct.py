"""Score autoencoders: encode images, decode them, and compare what comes back with the originals.

    python -m diffusion.reconstruct VAE [VAE ...] --data IMAGES --out OUT [--resolution PX] [--samples N] [--metrics psnr,ssim,lpips,fid]

VAE is a local folder in the diffusers layout: an AutoencoderKL, or what holds one in `vae/` (a whole model, the encoders of a recipe). IMAGES is an
image MDS on a disk or in object storage, or a folder of images. Images are encoded to the posterior's mean in float32 and decoded to 8 bits.

OUT gets reconstruction.json (figures, latent statistics, and everything that they depend on), reconstruction.html (the page),
reconstruction.png (originals, reconstructions, differences) and samples/. python -m diffusion.evaluate --compare shows several OUT on one page.
Latents that the scaling_factor and shift_factor of a VAE's config.json do not bring to mean 0 and deviation 1 are a warning.
"""

from diffusion.common.processes import quick_imports
from diffusion.common.text import print_page
from diffusion.contracts.errors import run_command
from diffusion.evaluation.job.request import ReconstructionRequest

EXIT_CODES = """exit codes: 0 scored; 2 input or options are wrong and the message says how; 3 not finished, for a reason outside (storage):
run the same command again"""


def main() -> int:
    request = ReconstructionRequest.parse('diffusion.reconstruct', __doc__, EXIT_CODES)
    return run_command(lambda: run(request), also=(OSError,), out=request.out)


def run(request: ReconstructionRequest) -> None:
    with quick_imports():  # of torch, so after the arguments are read
        from diffusion.cost.hardware import own_device
        from diffusion.evaluation.job.reconstructing import reconstruct
        from diffusion.evaluation.job.results import RECONSTRUCTION_NAME, RECONSTRUCTION_PAGE, SHEET_NAME
        from diffusion.evaluation.pages.page import table_of, write_page

    reconstruct(request, own_device())
    write_page([request.out], request.out / RECONSTRUCTION_PAGE)
    written = ', '.join(str(request.out / name) for name in (RECONSTRUCTION_NAME, RECONSTRUCTION_PAGE, SHEET_NAME))
    print_page(f'{table_of(request.out)}\n{written}')


if __name__ == '__main__':
    raise SystemExit(main())
