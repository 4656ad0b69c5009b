"""Draw images with an exported model.

    python -m diffusion.generate MODEL OUT --prompt "an owl at dusk" [--prompt ...] [--prompts-file FILE] [--seed 0] [--base FOLDER]

MODEL may also be an exported adapter: the model that it belongs to is then opened where its export.json says, or at --base.

Writes a PNG for each prompt, with prompt, seed, guidance, steps and precision inside, and `grid.png`. Image i starts from the noise of seed + i, so
each can be drawn again alone. With --ids the images start as those of diffusion.evaluate do: from the noise of --seed and the id of the prompt, which
evaluation.json and the names of its samples say. Exit code 2 when MODEL cannot be opened, OUT cannot be written or
there is nothing to draw.
"""

from pathlib import Path

from pydantic import PositiveInt

from diffusion.common.command_line import Guidance, Ids, Precision, Prompts, Seed, Size, option, positional
from diffusion.common.processes import quick_imports
from diffusion.common.text import counted
from diffusion.contracts.errors import InputError, refuse_no_model, run_command


class GenerateRequest(Prompts):
    """Prompts to draw, and the model that draws them."""

    model: Path = positional('MODEL', 'folder that diffusion.export wrote, or a published model of a known family in the diffusers layout')
    out: Path = positional('OUT', 'folder for the images; an earlier result there is replaced')
    seed: Seed = option(0, 'starting noise')
    ids: Ids | None = option(None, 'draw these prompts of an evaluation, an id each, with its seed, guidance and steps', 'ID,...')
    base: str | None = option(None, 'where the model that an exported adapter belongs to is, if it has moved', 'FOLDER')
    guidance: Guidance | None = option(None, "guidance scale (default: the recipe's)")
    steps: PositiveInt | None = option(None, "sampling steps (default: the recipe's)")
    size: Size | None = option(None, "in pixels (default: the model's own)", 'WIDTHxHEIGHT')
    precision: Precision | None = option(None, 'of weights and arithmetic (default: bf16 on a GPU, fp32 without one)')
    batch_size: PositiveInt = option(16, 'images drawn together')


def main() -> int:
    args = GenerateRequest.parse('diffusion.generate', __doc__)

    def work() -> None:
        prompts = args.prompts()
        if not prompts:
            raise InputError('nothing to draw; give --prompt or --prompts-file')
        refuse_no_model(args.model)
        if args.out.exists() and not (args.out.is_dir() and ((args.out / 'grid.png').exists() or not any(args.out.iterdir()))):
            raise InputError(f'{args.out}: holds something else already; name a new folder')
        if args.ids is not None and args.size is not None:
            raise InputError('--ids draws images of an evaluation again, which have its size; leave --size out')
        with quick_imports():  # of torch, so after the arguments are read
            from diffusion.cost.hardware import own_device
            from diffusion.evaluation.job.models import DrawingModel, draw_ids
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


if __name__ == '__main__':
    raise SystemExit(main())
