"""Turn an MDS dataset of images into one of VAE latents, so that training need not encode again and again.

    composer data_prep/encode.py SOURCE DEST --resolution 256 [512] --encoders FOLDER_OR_HUB_ID [--revision COMMIT]
    composer data_prep/encode.py SOURCE DEST --resolution bucket ...      SOURCE was converted with --buckets aspect:PX
    python -m data_prep.encode ...                                        the same on one device
    python -m data_prep.encode ... --engine ray --ray-address HOST:PORT   the same on the machines of a Ray cluster

Each image's short side is resized to the resolution and the centre cropped, as training does it; smaller images are left out
and counted. Stored are the VAE's moments (mean and log variance, float16, unscaled), so that every epoch draws a new
posterior sample, the caption as text, so that caption dropout stays a matter of training, and for models with size conditioning the height
and width of the original image and top and left of the crop (16 bytes). Several resolutions become the streams DEST/256, DEST/512 ... in one
reading. With --resolution bucket each image is resized until it covers its aspect bucket, and the centre
cropped; DEST has the streams WIDTHxHEIGHT of SOURCE, for data.aspect_buckets=true. Text is cheap to encode while training and its
embeddings are ten times the size of the latents; --text-embeddings stores them nevertheless, and those of the empty caption in
empty_caption.npy; of Stable Diffusion XL also the pooled caption, and empty_caption_pooled.npy.

SOURCE and DEST are folders or URLs (s3://, gs://, oci://). Run the same command again after a stop to resume.
"""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, PositiveInt, model_validator

from data_prep.engines.engine import Engine
from data_prep.engines.options import ModelEngineRequest
from data_prep.mds.command import EXIT_CODES
from data_prep.mds.job import Tally
from data_prep.sources.mds import find_images
from diffusion.common.command_line import option, positional
from diffusion.common.processes import quick_imports
from diffusion.recipe.keys import neither_folder_nor_hub_id
from diffusion.recipe.rules import network_names
from diffusion.recipe.schema import EncoderSource

BUCKET = 'bucket'


class EncodeRequest(ModelEngineRequest):
    """Images to encode, and the encoders."""

    source: str = positional('SOURCE', 'image MDS, as data_prep.convert writes it')
    dest: str = positional('DEST', 'folder or URL for the latents MDS, new or begun by this command')
    resolution: list[Annotated[PositiveInt | None, BeforeValidator(lambda text: None if text == BUCKET else text)]] = option(
        ...,
        f'side of the encoded square; several make streams; {BUCKET}: each image at the size of its aspect bucket',
        'PX',
        several=True,
    )
    encoders: str = option(..., 'local folder in the diffusers layout, or a Hub id', 'WHERE')
    revision: str | None = option(None, 'commit of the Hub id', 'COMMIT')
    text_embeddings: bool = option(False, 'store the encoded captions too: ten times the size')
    network: Literal[tuple(network_names())] | None = option(  # type: ignore[valid-type]
        None, 'the model.network whose text encoders --text-embeddings uses (default sd2-base)', 'NAME'
    )
    batch_size: PositiveInt = option(64, 'images of 256 px a pass; of larger ones as many pixels')

    @model_validator(mode='after')
    def _refuse_what_does_not_fit(self) -> Self:
        if None in self.resolution and len(self.resolution) > 1:
            raise ValueError(f'--resolution {BUCKET} stands alone; encode squares into another DEST')
        if wrong := neither_folder_nor_hub_id(self.encoders):
            raise ValueError(f'--encoders: {wrong}')
        if self.network and not self.text_embeddings:
            raise ValueError(
                '--network only says how --text-embeddings encodes captions; add that, or leave it out: latents do not depend on the network'
            )
        return self


def main() -> int:
    args = EncodeRequest.parse('data_prep.encode', __doc__, EXIT_CODES)

    def work(engine: Engine) -> Tally:
        share = args.share_of_device()
        find_images(args.source, 'encode')
        with quick_imports():  # of torch, so after the arguments and the source are looked at
            from data_prep.encoding.dataset import encode
        return encode(
            args.source,
            args.dest,
            [side for side in args.resolution if side is not None] or None,
            EncoderSource(args.encoders, args.revision),
            network=args.network or 'sd2-base' if args.text_embeddings else None,
            batch_size=args.batch_size,
            engine=engine,
            shard_bytes=args.shard_mb << 20,
            share=share,
        )

    return args.run(args.dest, work)


if __name__ == '__main__':
    raise SystemExit(main())
