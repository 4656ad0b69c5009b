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

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, model_validator

from data_prep.engines.engine import Engine
from data_prep.engines.options import ModelEngineRequest
from data_prep.mds.command import EXIT_CODES
from data_prep.mds.job import Tally
from data_prep.sources.mds import find_images
from diffusion.common.command_line import Seed, option, positional
from diffusion.common.processes import quick_imports
from diffusion.recipe.keys import neither_folder_nor_hub_id, pins
from diffusion.recipe.rules import network_names
from diffusion.recipe.schema import EncoderSource


def _below_one(share: float) -> float:
    if share >= 1:
        raise ValueError(f'{share:g} is not below 1; --replace leaves the old captions out')
    return share


def _not_empty(text: str) -> str:
    if not text.strip():
        raise ValueError('is empty; leave the option out')
    return text.strip()


def _pinned(option: str, source: str, revision: str | None) -> EncoderSource:
    """Return the location; raises ValueError where a Hub id has no commit, or a folder has one."""
    if wrong := neither_folder_nor_hub_id(source):
        raise ValueError(f'{option}: {wrong}')
    name = '--revision' if option == '--model' else f'{option}-revision'
    if Path(source).is_dir() and revision:
        raise ValueError(f'{name}: a local folder has none; leave it out')
    if not Path(source).is_dir() and not pins(revision):
        raise ValueError(
            f"{name} '{revision}' does not pin {source}; give the 40 hex digits of a commit, so that no later upload changes the captions"
        )
    return EncoderSource(source, revision)


class RecaptionRequest(ModelEngineRequest):
    """Images to caption, the model, and which of its captions are used."""

    source: str = positional('SOURCE', 'image MDS, as data_prep.convert writes it')
    dest: str = positional('DEST', 'folder or URL for the new image MDS, new or begun by this command')
    model: str = option(..., 'folder of a vision-language model (save_pretrained), or a Hub id', 'WHERE')
    revision: str | None = option(None, 'commit of the Hub id', 'COMMIT')
    prompt: Annotated[str, AfterValidator(_not_empty)] | None = option(
        None, 'what the model is told (default: nothing; of models that chat: to describe the image in detail)', 'TEXT'
    )
    captions: PositiveInt = option(1, 'new ones an image; several need --temperature', 'N')
    max_tokens: PositiveInt = option(75, "of a caption, in the model's own tokens", 'N')
    min_tokens: PositiveInt | None = option(None, 'of a caption: for longer ones than the model writes by itself', 'N')
    beams: PositiveInt = option(1, 'beam search, instead of drawing (default 1: greedy)', 'N')
    temperature: PositiveFloat | None = option(None, 'draw tokens (default: take the likeliest)', 'T')
    top_p: Annotated[float, Field(gt=0, le=1)] | None = option(None, 'draw from the likeliest tokens of this probability together (default 1)', 'P')
    seed: Seed = option(0, 'of the draws')
    bf16: bool = option(False, 'compute in bfloat16: half the memory, faster on a GPU')
    share: Annotated[PositiveFloat, AfterValidator(_below_one)] | None = option(None, 'draws in training that take a new caption (default 0.5)', 'S')
    replace: bool = option(False, 'leave the old captions out')
    refuse: list[Annotated[str, AfterValidator(_not_empty)]] = option(
        [], "words or phrases; captions that have one are not used, such as 'I cannot'", 'WORDS', several=True
    )
    encoders: str | None = option(None, "training's encoders: count captions that are longer than these read", 'WHERE')
    encoders_revision: str | None = option(None, 'commit of their Hub id', 'COMMIT')
    network: Literal[tuple(network_names())] | None = option(  # type: ignore[valid-type]
        None, 'the model.network of that training (default sd2-base)', 'NAME'
    )
    batch_size: PositiveInt = option(32, 'images a pass')

    @model_validator(mode='after')
    def _refuse_what_does_not_fit(self) -> Self:
        _ = self.location, self.encoders_of_training
        if self.captions > 1 and not self.temperature:
            raise ValueError(f'--captions {self.captions} would be {self.captions} times the same; add --temperature, such as 0.7')
        if self.temperature and self.beams > 1:
            raise ValueError('--temperature draws and --beams searches; leave one of them out')
        if self.top_p and not self.temperature:
            raise ValueError('--top-p says how to draw; add --temperature, or leave it out')
        if self.min_tokens and self.min_tokens > self.max_tokens:
            raise ValueError(f'--min-tokens {self.min_tokens} is above --max-tokens {self.max_tokens}')
        if self.share and self.replace:
            raise ValueError('--share and --replace: give one')
        if (self.network or self.encoders_revision) and not self.encoders:
            raise ValueError('--network and --encoders-revision say more about --encoders; add that, or leave them out')
        return self

    @property
    def location(self) -> EncoderSource:
        return _pinned('--model', self.model, self.revision)

    @property
    def encoders_of_training(self) -> tuple[EncoderSource, str] | None:
        """Their location, and the network that they are for."""
        return (_pinned('--encoders', self.encoders, self.encoders_revision), self.network or 'sd2-base') if self.encoders else None


def main() -> int:
    args = RecaptionRequest.parse('data_prep.recaption', __doc__, EXIT_CODES)

    def work(engine: Engine) -> Tally:
        share = args.share_of_device()
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
            args.location,
            generation,
            Choice(1.0 if args.replace else args.share or 0.5, tuple(args.refuse)),
            encoders=args.encoders_of_training,
            batch_size=args.batch_size,
            engine=engine,
            shard_bytes=args.shard_mb << 20,
            share=share,
        )

    return args.run(args.dest, work)


if __name__ == '__main__':
    raise SystemExit(main())
