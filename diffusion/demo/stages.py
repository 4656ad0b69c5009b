"""Demos are lists of stages: each is a command that you could type yourself, is printed as such, and is skipped where its result is there."""

import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from diffusion.common.processes import end_with_parent

REPOSITORY = Path(__file__).parents[2]
PYTHON = (sys.executable, '-m')


class Stage(NamedTuple):
    """A command of a demo.

    Attributes:
        made: the file or folder that it makes, or a function that says whether it is done; None: it is always run, and continues by itself.
        outdates: results of later stages that do not fit its own; removed after it.
    """

    title: str
    command: Sequence[object]
    made: Path | Callable[[], bool] | None
    outdates: Sequence[Path] = ()


def run_stages(stages: Iterable[Stage]) -> None:
    """Run those that are not done, in order. A stopped demo resumes here: what is there already is kept.

    Raises:
        SystemExit: one failed.
    """
    for one in stages:
        if one.made is not None and (one.made.exists() if isinstance(one.made, Path) else one.made()):
            continue
        stage(one.title, one.command)
        for path in one.outdates:
            shutil.rmtree(path, ignore_errors=True)


def stage(title: str, command: Sequence[object]) -> None:
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


def encoder_stages(images: Path, encoders: Path, resolution: int, steps: int | None = None) -> list[Stage]:
    """Train the small autoencoder on an image MDS and write it with a random text encoder: the demo's frozen encoders.

    A trained one, because diffusers' AutoencoderKL, which the exported pipeline must find, has no parameter-free form: its GroupNorm and SiLU stand
    between any fixed linear map and the latents. The text encoder stays random: what matters to cross-attention is that different words get
    different vectors, and random ones do. Its tokenizer has a token for each word of the captions.

    Args:
        encoders: folder to write. The run is next to it, in `autoencoder`.
        resolution: side in pixels of the squares that images are cut to.
        steps: of its training; None: those of its recipe.
    """
    run = encoders.parent / 'autoencoder'
    settings = [f'run_folder={run}', f'data.streams.train.local={images}', f'data.resolution={resolution}']
    settings += [] if steps is None else [f'train.duration={steps}ba', f'optimizer.warmup={steps // 8}ba']
    train = [*PYTHON, 'diffusion.autoencoder', REPOSITORY / 'yamls/shapes-vae.yaml', *settings]
    add_text = [*PYTHON, 'diffusion.stand_in', encoders, '--like', 'shapes', '--vae', run / 'export', '--words-of', images]
    return [Stage('Train the small autoencoder', train, encoders), Stage('Add a random text encoder', add_text, encoders)]


def latents_stage(title: str, images: Path, latents: Path, resolution: int, encoders: Path) -> Stage:
    command = [*PYTHON, 'data_prep.encode', images, latents, '--resolution', resolution, '--encoders', encoders]
    return Stage(title, command, latents / 'manifest.json')
