"""Prepare a small crawl for a recipe such as `yamls/emoji-64.yaml`: latents with a held-out part, and encoders made for them.

    python -m diffusion.demo.crawl SOURCE RUN [--resolution 64] [--held-out 0.15]

SOURCE is whatever `data_prep.convert` reads, such as a folder that img2dataset wrote. Each stage is a command that you could type yourself
and is printed as such; what is there already is kept. RUN gets `images` (all of them), `train/` and `held-out/` with `images` and `latents` in each,
and `encoders`: a small VAE trained on the training images alone, and a random text encoder with a token for each word of their captions.

Which image is held out depends on its content alone (its SHA-256), so equal images are on the same side.
"""

from pathlib import Path
from typing import Annotated

from pydantic import Field, PositiveInt

from diffusion.common.command_line import Arguments, option, positional
from diffusion.common.files import write_text
from diffusion.demo.stages import PYTHON, Stage, encoder_stages, latents_stage, run_stages

LARGEST_ASPECT_RATIO = 2.0  # of a longer one the square in the middle shows too little
PARTS = ('train', 'held-out')


def prepare_crawl(source: str, run: Path, resolution: int, share: float, autoencoder_steps: int | None = None) -> None:
    """Run every stage that is not done.

    Args:
        share: of the images that are held out, 0..1.

    Raises:
        SystemExit: a stage failed.
    """
    images, encoders = run / 'images', run / 'encoders'
    few = ['--max-aspect-ratio', LARGEST_ASPECT_RATIO, '--duplicates', 'exact']
    run_stages([Stage('Convert the crawl to MDS shards', [*PYTHON, 'data_prep.convert', source, images, *few], images / 'manifest.json')])
    parts = []
    for part, others in split(images, share).items():
        left_out, of_part = run / part / 'left-out.txt', run / part / 'images'
        write_text(left_out, ''.join(f'{digest}\n' for digest in others))
        command = [*PYTHON, 'data_prep.convert', images, of_part, '--skip-list', left_out]
        parts.append(Stage(f'Part: {part}', command, of_part / 'manifest.json'))
    encoded = [latents_stage(f'Encode: {part}', run / part / 'images', run / part / 'latents', resolution, encoders) for part in PARTS]
    run_stages([*parts, *encoder_stages(run / 'train/images', encoders, resolution, autoencoder_steps), *encoded])


def split(images: Path, share: float) -> dict[str, list[str]]:
    """Return for each of PARTS the sorted SHA-256 digests of the images that are not in it."""
    from streaming import LocalDataset  # imports torch, so after the arguments are read

    dataset = LocalDataset(local=str(images))
    digests = sorted({dataset[i]['sha256'] for i in range(len(dataset))})
    held_out = {digest for digest in digests if int(digest[:8], 16) < share * 16**8}
    return {'train': sorted(held_out), 'held-out': [digest for digest in digests if digest not in held_out]}


class CrawlRequest(Arguments):
    """Images, and how much is held out."""

    source: str = positional('SOURCE', 'folder or URL of captioned images')
    run: Path = positional('RUN', 'run folder of the recipe, such as runs/emoji-64')
    resolution: PositiveInt = option(64, 'side of the square training image in pixels')
    held_out: Annotated[float, Field(gt=0, lt=1)] = option(0.15, 'share of the images for evaluation')
    autoencoder_steps: PositiveInt | None = option(None, "of the small autoencoder (default: its recipe's)")


def main() -> None:
    args = CrawlRequest.parse('diffusion.demo.crawl', __doc__)
    prepare_crawl(args.source, args.run, args.resolution, args.held_out, args.autoencoder_steps)


if __name__ == '__main__':
    main()
