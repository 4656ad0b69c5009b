"""A stage of a demo: a command that you could type yourself, printed as such."""

import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from diffusion.common.processes import end_with_parent

AUTOENCODER = Path(__file__).parents[2] / 'yamls/shapes-vae.yaml'


def make_encoders(images: Path, encoders: Path, resolution: int, steps: int | None = None) -> None:
    """Train the small autoencoder on an image MDS and write it with a random text encoder: the demo's frozen encoders.

    A trained one, because diffusers' AutoencoderKL, which the exported pipeline must find, has no parameter-free form: its GroupNorm and SiLU stand
    between any fixed linear map and the latents. The text encoder stays random: what matters to cross-attention is that different words get
    different vectors, and random ones do. Its tokenizer has a token for each word of the captions.

    Args:
        encoders: folder to write; nothing is done if it is there. The run is next to it, in `autoencoder`.
        resolution: side in pixels of the squares that images are cut to.
        steps: of its training; None: those of its recipe.
    """
    if encoders.exists():
        return
    python, run = [sys.executable, '-m'], encoders.parent / 'autoencoder'
    settings = [f'run_folder={run}', f'data.streams.train.local={images}', f'data.resolution={resolution}']
    settings += [] if steps is None else [f'train.duration={steps}ba', f'optimizer.warmup={steps // 8}ba']
    stage('Train the small autoencoder', [*python, 'diffusion.autoencoder', AUTOENCODER, *settings])
    stage('Add a random text encoder', [*python, 'diffusion.stand_in', encoders, '--like', 'shapes', '--vae', run / 'export', '--words-of', images])


def stage(title: str, command: list[object]) -> None:
    """Run the command to its end.

    Raises:
        SystemExit: it failed.
    """
    words = [str(word) for word in command]
    print(f'\n== {title}\n   $ {shlex.join([Path(words[0]).name, *words[1:]])}', flush=True)
    start = time.monotonic()
    with subprocess.Popen(words, preexec_fn=partial(end_with_parent, signal.SIGTERM)) as process:  # noqa: PLW1509 - no threads
        try:
            code = process.wait()
        except KeyboardInterrupt:  # which the command got too; training saves first
            code = process.wait()
    if code:
        print(f'{title}: the command above ended with code {code}; run the demo again to resume', file=sys.stderr)
        raise SystemExit(code if code > 0 else 1)
    print(f'   {time.monotonic() - start:.0f} s', flush=True)
