"""Draw images with an exported model.

    python -m diffusion.generate MODEL OUT --prompt "an owl at dusk" [--prompt ...] [--prompts-file FILE] [--seed 0] [--base FOLDER]

MODEL may also be an exported adapter: the model that it belongs to is then opened where its export.json says, or at --base.

Writes a PNG for each prompt, with prompt, seed, guidance, steps and precision inside, and `grid.png`. Image i starts from the noise of seed + i, so
each can be drawn again alone. With --ids the images start as those of diffusion.evaluate do: from the noise of --seed and the id of the prompt, which
evaluation.json and the names of its samples say. Exit code 2 when MODEL cannot be opened, OUT cannot be written or
there is nothing to draw.
"""

import argparse
from pathlib import Path

from diffusion.common.arguments import CommandParser, add_prompts, asked_prompts, guidance_scale, image_size, positive_int, seed_number
from diffusion.common.processes import quick_imports
from diffusion.common.text import counted
from diffusion.contracts.errors import InputError, refuse_no_model, run_command


def main() -> int:
    parser = CommandParser('diffusion.generate', __doc__)
    parser.add_argument(
        'model', type=Path, metavar='MODEL', help='folder that diffusion.export wrote, or a published model of a known family in the diffusers layout'
    )
    parser.add_argument('out', type=Path, metavar='OUT', help='folder for the images; an earlier result there is replaced')
    add_prompts(parser)
    parser.add_argument('--seed', type=seed_number, default=0, help='starting noise (default %(default)s)')
    parser.add_argument(
        '--ids', type=whole_numbers, metavar='ID,...', help='draw these prompts of an evaluation, an id each, with its seed, guidance and steps'
    )
    parser.add_argument('--base', metavar='FOLDER', help='where the model that an exported adapter belongs to is, if it has moved')
    parser.add_argument('--guidance', type=guidance_scale, help="guidance scale (default: the recipe's)")
    parser.add_argument('--steps', type=positive_int, help="Sampling steps (default: the recipe's)")
    parser.add_argument('--size', type=image_size, metavar='WIDTHxHEIGHT', help="in pixels (default: the model's own)")
    parser.add_argument('--precision', choices=('fp32', 'bf16'), help='of weights and arithmetic (default: bf16 on a GPU, fp32 without one)')
    parser.add_argument('--batch-size', type=positive_int, default=16, help='images drawn together (default %(default)s)')
    args = parser.parse_args()

    def work() -> None:
        prompts = asked_prompts(args)
        if not prompts:
            raise InputError('nothing to draw; give --prompt or --prompts-file')
        refuse_no_model(args.model)
        if args.out.exists() and not (args.out.is_dir() and ((args.out / 'grid.png').exists() or not any(args.out.iterdir()))):
            raise InputError(f'{args.out}: holds something else already; name a new folder')
        if args.ids is not None and args.size is not None:
            raise InputError('--ids draws images of an evaluation again, which have its size; leave --size out')
        with quick_imports():  # of torch, so after the arguments are read
            from diffusion.cost.hardware import own_device
            from diffusion.evaluation.drawing import draw_ids
            from diffusion.evaluation.models import DrawingModel
            from diffusion.families.pipeline import generate, png_texts, precision_on, settings_of, write_images

        guidance, steps = settings_of(args.model, args.guidance, args.steps)
        precision = args.precision or precision_on(own_device())
        if args.ids is None:
            images = generate(args.model, prompts, args.seed, guidance, steps, args.batch_size, args.base, args.size, precision)
            starts = [{'seed': str(args.seed + i)} for i in range(len(prompts))]
        else:
            if len(args.ids) != len(prompts):
                raise InputError(f'--ids names {counted(len(args.ids), "id")} for {counted(len(prompts), "prompt")}; name one for each')
            images = draw_ids(args.model, prompts, args.ids, args.seed, guidance, steps, args.batch_size, args.base, precision)
            starts = [{'seed': str(args.seed), 'id': str(prompt_id)} for prompt_id in args.ids]
        label = DrawingModel(str(args.model), args.model, args.base).label
        texts = [png_texts(label, prompt, start, guidance, steps, precision) for prompt, start in zip(prompts, starts, strict=True)]
        write_images(images, texts, args.out)
        print(f'{counted(len(prompts), "image")} and grid.png: {args.out}')

    return run_command(work, also=(OSError, ValueError), out=args.out)


def whole_numbers(given: str) -> list[int]:
    """An argparse type: `3,17`."""
    numbers = given.split(',')
    if not all(number.strip().isdigit() for number in numbers):
        raise argparse.ArgumentTypeError(f'{given!r} is not a list of ids, such as 3,17')
    return [int(number) for number in numbers]


if __name__ == '__main__':
    raise SystemExit(main())
