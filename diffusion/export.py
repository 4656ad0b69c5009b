"""Turn a checkpoint into a diffusers folder that `DiffusionPipeline.from_pretrained` opens.

    python -m diffusion.export CHECKPOINT OUT [--weights ema|training] [--sigma-rel S] [--merged] [--license ID] [--push-to-hub OWNER/NAME]
        [key=value ...]

CHECKPOINT is a `.pt` file of a run, or its run folder (then the latest is taken). OUT gets safetensors, the sampler's schedule
as it was trained, the encoders, the recipe, `export.json`, which says which weights these are (the EMA unless asked otherwise) and what part of
the run they are an average of, and a model card (README.md). --push-to-hub uploads all of it with the login of `hf auth login`; a new repository
is private.

Of a run with ema.sigma_rel, --sigma-rel makes an average of another width out of those in its checkpoints (EDM2's post-hoc EMA), which
checkpoint.keep_every keeps: S is the width as a share of the run.

Of an adapter OUT gets lora/pytorch_lora_weights.safetensors for diffusers and lora/kohya.safetensors for other programs, and with --merged the
whole pipeline too, with the adapter added to its weights.

Exit code 0 when OUT is complete, 2 when the checkpoint or OUT cannot be used. A damaged checkpoint of a run folder is named, and the one before it
is taken.
"""

from pathlib import Path
from typing import Literal

from diffusion.common.command_line import Arguments, option, positional
from diffusion.common.processes import quick_imports
from diffusion.contracts.errors import run_command
from diffusion.recipe.averaging import Coverage


class ExportRequest(Arguments):
    """Which weights to export, and where to."""

    checkpoint: Path = positional('CHECKPOINT', '.pt file, or the folder of a run')
    out: Path = positional('OUT', 'folder to write; an earlier export there is replaced')
    weights: Literal['ema', 'training'] = option('ema', 'which weights')
    sigma_rel: float | None = option(None, 'width of the average, as a share of the run (default: the first that it kept)', 'S')
    merged: bool = option(False, 'of an adapter: also write the whole pipeline, with the adapter in its weights')
    license: str | None = option(None, "licence of the weights in the model card, by the Hub's identifiers, such as openrail++", 'ID')
    push_to_hub: str | None = option(None, 'upload OUT to the Hugging Face Hub when it is complete', 'OWNER/NAME')
    overrides: list[str] = positional(
        'key=value', "changes to the checkpoint's recipe, such as model.encoders.source=FOLDER if it has moved", default=[]
    )


def main() -> int:
    args = ExportRequest.parse('diffusion.export', __doc__)
    with quick_imports():  # of torch, so after the arguments are read
        from diffusion.checkpoints.exporting import export
        from diffusion.checkpoints.model_card import check_upload, push_to_hub

    def work() -> None:
        if args.push_to_hub is not None:
            check_upload(args.push_to_hub)
        facts = export(args.checkpoint, args.out, args.weights, args.overrides, args.license, args.merged, args.sigma_rel)
        url = None if args.push_to_hub is None else push_to_hub(args.out, args.push_to_hub)
        print(f'{facts["weights"]} weights after {facts["batches"]:,} batches: {args.out}{"" if url is None else f", {url}"}')
        if facts['average'] is not None:
            print(f'the average covers {Coverage(**facts["average"])}')  # type: ignore[arg-type]
        if facts['post_hoc'] is not None:
            print(f'its profile is met but for {facts["post_hoc"]["residual"]:.2%}, from {len(facts["post_hoc"]["from_checkpoints"])} checkpoints')  # type: ignore[index]

    return run_command(work, out=args.out)


if __name__ == '__main__':
    raise SystemExit(main())
