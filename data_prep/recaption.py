"""Write captions of the images of an MDS dataset with a vision-language model, into a new dataset of the same images.

    python -m data_prep.recaption SOURCE DEST --model FOLDER_OR_HUB_ID [--revision COMMIT]           on one device
    composer data_prep/recaption.py SOURCE DEST ...                                                  on all GPUs of a host
    python -m data_prep.recaption ... --captions 3 --temperature 0.7                                 several an image, drawn
    python -m data_prep.recaption ... --engine ray --ray-address HOST:PORT                           on the machines of a Ray cluster

The model is any that transformers loads by AutoModelForImageTextToText with its own code (BLIP, BLIP-2, GIT, LLaVA, Qwen2-VL ...), from safetensors.
The captions that the images have are kept; training draws a new one with the probability --share, and --replace leaves the old ones out.
Captions that are empty or have a word of --refuse are not used: the image keeps its old captions, or is left out with --replace;
both are counted. Draws depend on --seed and the key of a sample, not on what is captioned next to it or before.

SOURCE and DEST are folders or URLs (s3://, gs://, oci://). Run the same command again after a stop to resume.
"""

import argparse
import os
from contextlib import closing
from pathlib import Path

from data_prep.engines.options import add_engine_options, engine_of
from data_prep.mds.command import add_shard_size, add_sharing_options, parser, run_command
from data_prep.mds.job import Share
from data_prep.mds.tally import Tally
from data_prep.sources.mds import find_images
from diffusion.common.arguments import positive_float, positive_int, seed_number
from diffusion.common.processes import end_with_parent, quick_imports
from diffusion.recipe.hub import neither_folder_nor_hub_id, pins
from diffusion.recipe.rules import network_names
from diffusion.recipe.schema import EncoderSource


def _below_one(text: str) -> float:
    value = positive_float(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f'{text} is not below 1; --replace leaves the old captions out')
    return value


def _probability(text: str) -> float:
    value = positive_float(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f'{text} is above 1, and a probability is not')
    return value


def _text(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError('is empty; leave the option out')
    return text.strip()


def _pinned(options: argparse.ArgumentParser, option: str, source: str, revision: str | None) -> EncoderSource:
    """Ends the command where a Hub id has no commit, or a folder has one."""
    if wrong := neither_folder_nor_hub_id(source):
        options.error(f'{option}: {wrong}')
    name = '--revision' if option == '--model' else f'{option}-revision'
    if Path(source).is_dir() and revision:
        options.error(f'{name}: a local folder has none; leave it out')
    if not Path(source).is_dir() and not pins(revision):
        options.error(f"{name} '{revision}' does not pin {source}; give the 40 hex digits of a commit, so that no later upload changes the captions")
    return EncoderSource(source, revision)


def main() -> int:
    options = parser('data_prep.recaption', __doc__)
    options.add_argument('source', metavar='SOURCE', help='image MDS, as data_prep.convert writes it')
    options.add_argument('dest', metavar='DEST', help='folder or URL for the new image MDS, new or begun by this command')
    options.add_argument('--model', required=True, metavar='WHERE', help='folder of a vision-language model (save_pretrained), or a Hub id')
    options.add_argument('--revision', metavar='COMMIT', help='commit of the Hub id')
    options.add_argument(
        '--prompt', type=_text, metavar='TEXT', help='what the model is told (default: nothing; of models that chat: to describe the image in detail)'
    )
    options.add_argument('--captions', type=positive_int, default=1, metavar='N', help='new ones an image; several need --temperature (default 1)')
    options.add_argument(
        '--max-tokens', type=positive_int, default=75, metavar='N', help="of a caption, in the model's own tokens (default %(default)s)"
    )
    options.add_argument('--min-tokens', type=positive_int, metavar='N', help='of a caption: for longer ones than the model writes by itself')
    options.add_argument('--beams', type=positive_int, default=1, metavar='N', help='beam search, instead of drawing (default %(default)s: greedy)')
    options.add_argument('--temperature', type=positive_float, metavar='T', help='draw tokens (default: take the likeliest)')
    options.add_argument('--top-p', type=_probability, metavar='P', help='draw from the likeliest tokens of this probability together (default 1)')
    options.add_argument('--seed', type=seed_number, default=0, help='of the draws (default %(default)s)')
    options.add_argument('--bf16', action='store_true', help='compute in bfloat16: half the memory, faster on a GPU')
    kept = options.add_mutually_exclusive_group()
    kept.add_argument('--share', type=_below_one, default=0.5, metavar='S', help='draws in training that take a new caption (default %(default)s)')
    kept.add_argument('--replace', action='store_true', help='leave the old captions out')
    options.add_argument(
        '--refuse',
        nargs='+',
        type=_text,
        default=[],
        metavar='WORDS',
        help="words or phrases; captions that have one are not used, such as 'I cannot'",
    )
    options.add_argument('--encoders', metavar='WHERE', help="training's encoders: count captions that are longer than these read")
    options.add_argument('--encoders-revision', metavar='COMMIT', help='commit of their Hub id')
    options.add_argument('--network', choices=network_names(), metavar='NAME', help='the model.network of that training (default sd2-base)')
    options.add_argument('--batch-size', type=positive_int, default=32, help='images a pass (default %(default)s)')
    add_shard_size(options)
    add_sharing_options(options)
    add_engine_options(options, encodes=True)
    args = options.parse_args()
    location = _pinned(options, '--model', args.model, args.revision)
    if args.captions > 1 and not args.temperature:
        options.error(f'--captions {args.captions} would be {args.captions} times the same; add --temperature, such as 0.7')
    if args.temperature and args.beams > 1:
        options.error('--temperature draws and --beams searches; leave one of them out')
    if args.top_p and not args.temperature:
        options.error('--top-p says how to draw; add --temperature, or leave it out')
    if args.min_tokens and args.min_tokens > args.max_tokens:
        options.error(f'--min-tokens {args.min_tokens} is above --max-tokens {args.max_tokens}')
    if (args.network or args.encoders_revision) and not args.encoders:
        options.error('--network and --encoders-revision say more about --encoders; add that, or leave them out')
    encoders = (_pinned(options, '--encoders', args.encoders, args.encoders_revision), args.network or 'sd2-base') if args.encoders else None
    engine = engine_of(options, args)
    launched = args.world_size > 1 and 'LOCAL_RANK' in os.environ
    if launched:
        end_with_parent()  # a killed launcher must not leave this rank behind, writing next to the next run

    def work(share: Share) -> Tally:
        find_images(args.source, 'recaption')
        with quick_imports():  # of torch, so after the arguments and the source are looked at
            from data_prep.recaptioning.captioner import Generation
            from data_prep.recaptioning.dataset import Choice, recaption
        generation = Generation(
            prompt=args.prompt,
            num_captions=args.captions,
            max_tokens=args.max_tokens,
            min_tokens=args.min_tokens or 0,
            beams=args.beams,
            temperature=args.temperature or 0.0,
            top_p=args.top_p or 1.0,
            seed=args.seed,
            bf16=args.bf16,
        )
        return recaption(
            args.source,
            args.dest,
            location,
            generation,
            Choice(1.0 if args.replace else args.share, tuple(args.refuse)),
            encoders=encoders,
            batch_size=args.batch_size,
            engine=engine,
            shard_bytes=args.shard_mb << 20,
            share=share,
            merge_only=args.merge,
            launched=launched,
        )

    with closing(engine):
        return run_command(args, work)


if __name__ == '__main__':
    raise SystemExit(main())
