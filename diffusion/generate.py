"""Draw images with an exported model.

    python -m diffusion.generate MODEL OUT --prompt "an owl at dusk" [--prompt ...] [--prompts-file FILE] [--seed 0]

Writes a PNG for each prompt, its prompt and seed inside, and `grid.png`. Image i starts from the noise of seed + i, so each
can be drawn again alone. Exit code 2 when MODEL cannot be opened or there is nothing to draw.
"""

from __future__ import annotations

from pathlib import Path

from diffusion.common.arguments import CommandParser, positive_int
from diffusion.common.text import counted
from diffusion.contracts.endings import run_command
from diffusion.contracts.errors import InputError


def main() -> int:
    parser = CommandParser('diffusion.generate', __doc__)
    parser.add_argument(
        'model', type=Path, metavar='MODEL', help='folder that diffusion.export wrote, or any Stable Diffusion in the diffusers layout'
    )
    parser.add_argument('out', type=Path, metavar='OUT', help='folder for the images; an earlier result there is replaced')
    parser.add_argument('--prompt', action='append', default=[], help='what to draw; may be given several times')
    parser.add_argument('--prompts-file', type=Path, metavar='FILE', help='a prompt a line')
    parser.add_argument('--seed', type=int, default=0, help='starting noise (default %(default)s)')
    parser.add_argument('--guidance', type=float, help="guidance scale (default: the recipe's)")
    parser.add_argument('--steps', type=positive_int, help="Sampling steps (default: the recipe's)")
    parser.add_argument('--batch-size', type=positive_int, default=16, help='images drawn together (default %(default)s)')
    args = parser.parse_args()

    def work() -> None:
        lines = args.prompts_file.read_text().splitlines() if args.prompts_file else []
        prompts = [*args.prompt, *(line for line in lines if line.strip())]
        if not prompts:
            raise InputError('nothing to draw; give --prompt or --prompts-file')
        if not (args.model / 'model_index.json').is_file():
            raise InputError(f'{args.model}: no model_index.json; python -m diffusion.export CHECKPOINT OUT writes a model')
        if args.out.exists() and not (args.out.is_dir() and ((args.out / 'grid.png').exists() or not any(args.out.iterdir()))):
            raise InputError(f'{args.out}: holds something else already; name a new folder')
        from diffusion.families.pipeline import generate, write_images  # imports torch, so after the arguments are read

        images = generate(args.model, prompts, args.seed, args.guidance, args.steps, args.batch_size)
        write_images(images, prompts, args.seed, args.out)
        print(f'{counted(len(prompts), "image")} and grid.png: {args.out}')

    return run_command(work, also=(OSError, ValueError))


if __name__ == '__main__':
    raise SystemExit(main())
