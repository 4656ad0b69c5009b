"""How many images show what they should: the metric `shapes` of diffusion.evaluate for images in memory, in any palette.

It knows nothing about the model. `calibration` says how far it can be trusted: on drawn shapes it is always right, and in noise it sees no shape.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from data_prep.shapes import draw
from diffusion.common.images import to_pil
from diffusion.contracts.scenes import Scene, Verdict, random_scene
from diffusion.encoders.frozen import Vae
from diffusion.evaluation.features.drawn_shapes import look
from diffusion.evaluation.job.results import Evaluation

NUM_CALIBRATED = 200
FIELDS = ('colour', 'background', 'shape', 'size', 'place')  # of a scene


def judge(images: Sequence[Image.Image], scenes: Sequence[Scene]) -> Verdict:
    """How many of the images show what their scenes say."""
    seen = [look(image) for image in images]
    right = [[getattr(one, field) == getattr(scene, field) for field in FIELDS] for one, scene in zip(seen, scenes, strict=True)]
    return _verdict(len(right), [sum(column) / len(right) for column in [*zip(*right, strict=True), map(all, right)]])


def verdict_of(found: Evaluation) -> Verdict:
    """The same from what diffusion.evaluate wrote, with `shapes` among its metrics and one guidance scale."""
    [score] = found['scores']
    return _verdict(score['count'], [score['metrics'][f'right_{field}']['value'] for field in (*FIELDS, 'everything')])


def _verdict(num_images: int, shares: Sequence[float]) -> Verdict:
    foreground, background, shape, size, place, everything = shares
    return Verdict(
        num_images=num_images, foreground=foreground, background=background, shape=shape, size=size, place=place, everything=everything
    )  # fmt: skip


def calibration(side_px: int, encoders: Path | None = None, count: int = NUM_CALIBRATED) -> dict[str, Verdict]:
    """Verdicts on shapes drawn as they should be (`real`), on those of other captions (`chance`), and on uniform noise (`noise`).

    Args:
        encoders: folder of an autoencoder; what it leaves of real shapes (`decoded`) is the best that a model of its latents can do.
    """
    rng, pixels = random.Random(0), np.random.default_rng(0)
    scenes = [random_scene(rng) for _ in range(count)]
    real = [draw(scene, side_px, rng) for scene in scenes]
    noise = [Image.fromarray(pixels.integers(0, 256, (side_px, side_px, 3), dtype=np.uint8)) for _ in scenes]
    kinds = {'real': real, 'decoded': _decoded(real, encoders) if encoders else [], 'chance': [*real[1:], real[0]], 'noise': noise}
    return {kind: judge(images, scenes) for kind, images in kinds.items() if images}


def _decoded(images: Sequence[Image.Image], encoders: Path) -> list[Image.Image]:
    """The images after a way through the VAE and back."""
    vae = Vae.find(str(encoders), None)
    batches = torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images]).split(50)
    moments = (vae.encode(batch) for batch in batches)
    return [to_pil(image) for each in moments for image in vae.decode_middle(each)]
