"""The drawn images that look most like known ones: copies of training images would be among them."""

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from diffusion.common.files import replacing
from diffusion.common.images import save_png, to_pil
from diffusion.common.text import counted
from diffusion.evaluation.distances import nearest
from diffusion.evaluation.extractors import Extractor
from diffusion.evaluation.features import SAMPLE_ID, RealFeatures, pixels
from diffusion.evaluation.preparing import PreparedEvaluation
from diffusion.evaluation.results import Neighbour, Neighbours

NUM_PAIRS = 10
PERCENTILE = 0.999  # of held-out real images: as many of them are more similar to a known one
MIN_HELD_OUT = 1000  # one image lies above the percentile; of fewer images it would be no more than the largest cosine
FOLDER = 'neighbours'


def find_neighbours(prepared: PreparedEvaluation) -> Neighbours | None:
    """The most similar pairs at the highest guidance scale, where copies are most frequent; their images are written as PNG.

    With `--training` the real images that are scored against are held out, and how similar they come to training images is the
    threshold above which a drawn image is suspicious.
    """
    known = prepared.known or (prepared.real if isinstance(prepared.real, RealFeatures) else None)
    extractor = prepared.neighbour
    if known is None or extractor is None:
        return None
    guidance, feature = prepared.job.protocol.guidance[-1], next(iter(extractor.features))
    features = known.parts_of(extractor).load(feature)
    cosine, index = (found[:, 0] for found in nearest(prepared.job.drawn(guidance).load(feature), features))
    threshold, reason = _threshold(prepared, known, extractor, feature, features)
    chunk = prepared.job.protocol.chunk
    draw = cache(prepared.draw)  # again: most images are not kept

    def drawn(place: int) -> Tensor:
        return draw(guidance, place // chunk)[place % chunk]

    ids = known.parts_of(extractor).load(SAMPLE_ID)
    most = cosine.argsort(descending=True, stable=True)[:NUM_PAIRS].tolist()
    return {
        'extractor': extractor.name,
        'guidance': guidance,
        'count_known': len(features),
        'threshold': threshold,
        'no_threshold': reason,
        'share_above': None if threshold is None else float((cosine > threshold).double().mean()),
        'pairs': [_pair(prepared, known, drawn(place), place, int(ids[index[place]]), float(cosine[place])) for place in most],
    }


def _threshold(prepared: PreparedEvaluation, known: RealFeatures, extractor: Extractor, feature: str, features: Tensor) -> tuple[float | None, str]:
    """The threshold, or None and the reason."""
    held_out = prepared.real
    if not isinstance(held_out, RealFeatures):
        return None, 'saved statistics hold no images to set it by'
    if held_out.images.identity == known.images.identity:
        return None, 'no images are held out: --training names none, or those of --data'
    cosine = nearest(held_out.parts_of(extractor).load(feature), features)[0][:, 0]
    if len(cosine) < MIN_HELD_OUT:
        return None, f'{counted(len(cosine), "held-out image")}, and at least {MIN_HELD_OUT:,} are needed to tell what one in a thousand exceeds'
    return float(torch.quantile(cosine.double(), PERCENTILE)), ''


def _pair(prepared: PreparedEvaluation, known: RealFeatures, drawn: Tensor, place: int, known_id: int, cosine: float) -> Neighbour:
    protocol, prompt, image = prepared.job.protocol, prepared.job.prompts[place], known.image(known_id)
    return {
        'drawn': _save(prepared, drawn, f'{prompt.id:06d}-drawn.png', prompt.text),
        'known': _save(prepared, pixels(image, protocol.resolution, known.images.where), f'{prompt.id:06d}-known.png', image.key),
        'key': image.key,
        'cosine': cosine,
        'caption': prompt.text,
        'known_caption': image.caption(protocol.seed) or '',
    }


def _save(prepared: PreparedEvaluation, image: Tensor, name: str, text: str) -> str:
    path = Path(FOLDER, name)
    with replacing(prepared.job.out / path) as temporary:
        save_png(to_pil(image), temporary, {'text': text})
    return path.as_posix()
