"""Draw pictures with an exported model.

    python -m diffusion.generate MODEL OUT --prompt "an owl at dusk" [--prompt ...] [--prompts-file FILE] [--seed 0]

Writes a PNG for each prompt, its prompt and seed inside, and `grid.png`. Picture i starts from the noise of seed + i, so each
can be drawn again alone. Exit code 2 when MODEL cannot be opened or there is nothing to draw.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from tqdm import tqdm

from diffusion.arguments import positive_int
from diffusion.files import replacing_folder
from diffusion.pictures import grid


def generate(
    model: Path, prompts: Sequence[str], seed: int, guidance: float | None = None, steps: int | None = None, batch_size: int = 16
) -> Iterator[Image.Image]:
    """One picture a prompt, as they are drawn; guidance and steps default to those of the recipe's sample grids."""
    facts = json.loads((model / 'export.json').read_text()) if (model / 'export.json').exists() else {}
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    pipeline = StableDiffusionPipeline.from_pretrained(model, use_safetensors=True).to(device)
    pipeline.set_progress_bar_config(disable=True)
    for start in tqdm(range(0, len(prompts), batch_size), desc='generate', unit='batch'):
        batch = list(prompts[start : start + batch_size])
        yield from pipeline(
            batch,
            num_inference_steps=steps or facts.get('steps', 50),
            guidance_scale=facts.get('guidance', 7.5) if guidance is None else guidance,
            # Noise from the CPU's generator: the same picture on any device.
            generator=[torch.Generator().manual_seed(seed + start + i) for i in range(len(batch))],
        ).images


def write_pictures(pictures: Iterable[Image.Image], prompts: Sequence[str], seed: int, out: Path) -> None:
    """`0000.png` ... with prompt and seed inside, and `grid.png` at the end; an earlier result in OUT is replaced."""
    drawn = []
    with replacing_folder(out) as temporary:
        for i, (prompt, picture) in enumerate(zip(prompts, pictures, strict=True)):
            info = PngInfo()
            info.add_text('prompt', prompt)
            info.add_text('seed', str(seed + i))
            picture.save(temporary / f'{i:04d}.png', pnginfo=info)
            drawn.append(picture)
        grid(drawn).save(temporary / 'grid.png')


def main() -> int:
    parser = argparse.ArgumentParser(prog='python -m diffusion.generate', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        'model', type=Path, metavar='MODEL', help='folder that diffusion.export wrote, or any Stable Diffusion in the diffusers layout'
    )
    parser.add_argument('out', type=Path, metavar='OUT', help='folder for the pictures; an earlier result there is replaced')
    parser.add_argument('--prompt', action='append', default=[], help='what to draw; may be given several times')
    parser.add_argument('--prompts-file', type=Path, metavar='FILE', help='a prompt a line')
    parser.add_argument('--seed', type=int, default=0, help='starting noise (default %(default)s)')
    parser.add_argument('--guidance', type=float, help="guidance scale (default: the recipe's)")
    parser.add_argument('--steps', type=positive_int, help="DDIM steps (default: the recipe's)")
    parser.add_argument('--batch-size', type=positive_int, default=16, help='pictures drawn together (default %(default)s)')
    args = parser.parse_args()
    try:
        lines = args.prompts_file.read_text().splitlines() if args.prompts_file else []
        prompts = [*args.prompt, *(line for line in lines if line.strip())]
        if not prompts:
            raise ValueError('nothing to draw; give --prompt or --prompts-file')
        if not (args.model / 'model_index.json').is_file():
            raise ValueError(f'{args.model}: no model_index.json; python -m diffusion.export CHECKPOINT OUT writes a model')
        if args.out.exists() and not (args.out.is_dir() and ((args.out / 'grid.png').exists() or not any(args.out.iterdir()))):
            raise ValueError(f'{args.out}: holds something else already; name a new folder')
        pictures = generate(args.model, prompts, args.seed, args.guidance, args.steps, args.batch_size)
        write_pictures(pictures, prompts, args.seed, args.out)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f'{len(prompts)} pictures and grid.png: {args.out}')
    return 0


if __name__ == '__main__':
    raise SystemExit(main())
