"""Randomly initialised encoders in the diffusers layout, where the real ones cannot be had.

    python -m diffusion.stand_in FOLDER [--like sd2-base] [--vae EXPORT] [--words-of IMAGES] [--pipeline]

For tests (`tiny`, `tiny-xl` with two text encoders, `tiny-t5`, `tiny-sd3` with three, `tiny-z-image`, `tiny-flux2`) and for measuring speed on a
machine without the Hub (`sd2-base`, `sdxl-base`, `prx-600m`: the real sizes; `prx-600m-t5-xxl` is 19 GB, `sd35-medium` 23 GB, `z-image` and
`flux2-klein-4b` 16 GB). Their tokenizers know letters and no words: captions longer than 16 to 24 letters (the tiny ones), 77 or 256 are cut.
Images made with untrained ones mean nothing; the folder's README says so. With --vae the VAE is a trained one, such as the export of
diffusion.autoencoder, and with --words-of the tokenizer has a token for each word of the captions of an image MDS. With --pipeline the folder is
a whole model, for trying out diffusion.generate and diffusion.evaluate.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from diffusion.common.command_line import Arguments, option, positional
from diffusion.common.files import replacing_folder
from diffusion.common.processes import quick_imports
from diffusion.contracts.errors import run_command
from diffusion.encoders.sizes import KINDS
from diffusion.recipe.rules import NETWORKS

SIDE = 32  # latents along a side of what a flow transformer draws


class StandInRequest(Arguments):
    """Sizes of the random encoders, and what is taken from elsewhere."""

    folder: Path = positional('FOLDER')
    like: Literal[tuple(sorted(KINDS))] = option('sd2-base', 'sizes to imitate')  # type: ignore[valid-type]
    pipeline: bool = option(False, 'also a random network of the same name and a sampler: what diffusion.export writes')
    vae: Path | None = option(None, "folder whose vae/ takes the random one's place", 'EXPORT')
    words_of: Path | None = option(None, "image MDS whose captions' words the tokenizer knows", 'IMAGES')

    @model_validator(mode='after')
    def _refuse_what_does_not_fit(self) -> Self:
        if self.folder.exists() and self.vae is not None:
            raise ValueError(f'{self.folder}: exists already; name a new folder')
        if self.pipeline and not (NETWORKS / f'{self.like}.json').exists():
            raise ValueError(f'--pipeline: no network is called {self.like}; leave --pipeline out')
        return self


def main() -> None:
    args = StandInRequest.parse('diffusion.stand_in', __doc__)
    with quick_imports():  # of torch, so after the arguments are read
        from diffusers import AutoencoderKL

        from diffusion.datasets.shards import words_of
        from diffusion.encoders.pretrained import load_model
        from diffusion.encoders.random_encoders import write_stand_in

    def write() -> None:
        vae = None if args.vae is None else load_model(AutoencoderKL, str(args.vae), None, 'vae')
        with nullcontext(args.folder) if args.folder.exists() else replacing_folder(args.folder) as temporary:
            write_stand_in(temporary, args.like, words=() if args.words_of is None else words_of(args.words_of), vae=vae)
            if args.pipeline:
                write_pipeline(temporary, args.like)

    if ended := run_command(write, out=args.folder, remedy='name another FOLDER'):
        raise SystemExit(ended)
    print(f'randomly initialised {"model" if args.pipeline else "encoders"} in the sizes of {args.like}: {args.folder}')


def write_pipeline(folder: Path, like: str) -> None:
    """Add a random network and a sampler to the encoders in the folder."""
    import torch
    from diffusers import DDIMScheduler

    from diffusion.encoders.frozen import FrozenEncoders
    from diffusion.families.registry import build_network, family_of
    from diffusion.objectives.flow import Flow
    from diffusion.recipe.schema import EncoderSource, FlowSettings

    torch.manual_seed(0)
    network, family = build_network(like), family_of(like)
    encoders = FrozenEncoders.load(EncoderSource(str(folder)), family.find_text)
    is_flow = family.objective == 'flow'
    of_sd = DDIMScheduler(1000, 0.00085, 0.012, 'scaled_linear', clip_sample=False, steps_offset=1)  # Stable Diffusion's
    scheduler = family.scheduler(Flow(FlowSettings())) if is_flow else of_sd
    side = SIDE if is_flow else network.config.sample_size  # a flow transformer has no size of its own
    family.pipeline(network, encoders, scheduler, side * encoders.vae.downsampling).save_pretrained(folder)


if __name__ == '__main__':
    main()
