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

import os
from contextlib import closing

from data_prep.engines.options import add_engine_options, engine_of
from data_prep.mds.command import add_shard_size, add_sharing_options, parser, run_command
from data_prep.mds.job import Share
from data_prep.mds.tally import Tally
from data_prep.sources.mds import find_images
from diffusion.common.arguments import positive_int
from diffusion.common.processes import end_with_parent, quick_imports
from diffusion.recipe.hub import neither_folder_nor_hub_id
from diffusion.recipe.rules import network_names
from diffusion.recipe.schema import EncoderSource

BUCKET = 'bucket'


def _resolution(text: str) -> int | None:
    return None if text == BUCKET else positive_int(text)


def main() -> int:
    options = parser('data_prep.encode', __doc__)
    options.add_argument('source', metavar='SOURCE', help='image MDS, as data_prep.convert writes it')
    options.add_argument('dest', metavar='DEST', help='folder or URL for the latents MDS, new or begun by this command')
    options.add_argument(
        '--resolution',
        type=_resolution,
        required=True,
        nargs='+',
        metavar='PX',
        help=f'side of the encoded square; several make streams; {BUCKET}: each image at the size of its aspect bucket',
    )
    options.add_argument('--encoders', required=True, metavar='WHERE', help='local folder in the diffusers layout, or a Hub id')
    options.add_argument('--revision', metavar='COMMIT', help='commit of the Hub id')
    options.add_argument('--text-embeddings', action='store_true', help='store the encoded captions too: ten times the size')
    options.add_argument(
        '--network',
        choices=network_names(),
        metavar='NAME',
        help='the model.network whose text encoders --text-embeddings uses (default sd2-base)',
    )
    options.add_argument(
        '--batch-size',
        type=positive_int,
        default=64,
        help='images of 256 px a pass; of larger ones as many pixels (default %(default)s)',
    )
    add_shard_size(options)
    add_sharing_options(options)
    add_engine_options(options, encodes=True)
    args = options.parse_args()
    by_bucket = None in args.resolution
    if by_bucket and len(args.resolution) > 1:
        options.error(f'--resolution {BUCKET} stands alone; encode squares into another DEST')
    if wrong := neither_folder_nor_hub_id(args.encoders):
        options.error(f'--encoders: {wrong}')
    if args.network and not args.text_embeddings:
        options.error('--network only says how --text-embeddings encodes captions; add that, or leave it out: latents do not depend on the network')
    engine = engine_of(options, args)
    launched = args.world_size > 1 and 'LOCAL_RANK' in os.environ
    if launched:
        end_with_parent()  # a killed launcher must not leave this rank behind, writing next to the next run
    location = EncoderSource(args.encoders, args.revision)

    def work(share: Share) -> Tally:
        find_images(args.source, 'encode')
        with quick_imports():  # of torch, so after the arguments and the source are looked at
            from data_prep.encoding.dataset import encode
        return encode(
            args.source,
            args.dest,
            None if by_bucket else args.resolution,
            location,
            network=args.network or 'sd2-base' if args.text_embeddings else None,
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
