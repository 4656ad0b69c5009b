"""The metrics that `eval.samples.metrics` may name, and what each needs: so much of diffusion/evaluation as can be said without torch."""

from dataclasses import dataclass

MIN_IMAGES = 16  # drawn for one score, in a run or by diffusion.evaluate; below, no distance between distributions means anything


@dataclass(frozen=True)
class Needs:
    """What a metric compares.

    Attributes:
        network: whose features it takes, unless the recipe names another one; none of EMBEDS_CAPTIONS: it takes no other.
        captions: it compares images with their captions, and needs a network that embeds both.
        real: it compares drawn with real images.
    """

    network: str
    captions: bool = False
    real: bool = True


METRICS = {
    'fid': Needs('inception'),
    'fid_clean': Needs('inception'),
    'kid': Needs('inception'),
    'kid_clean': Needs('inception'),
    'cmmd': Needs('clip-vit-l14-336'),
    'clip': Needs('clip-vit-l14', captions=True, real=False),
    'precision_recall': Needs('inception'),
    'shapes': Needs('shapes-look', captions=True, real=False),
}
EMBEDS_CAPTIONS = {
    'inception': False,
    'clip-vit-l14': True,
    'clip-vit-l14-336': True,
    'clip-vit-b16': True,
    'clip-vit-b32': True,
    'openclip-vit-h14': True,
    'dino-vits16': False,
    'random-conv': False,
}
"""The feature networks that METRIC@NETWORK may name: whether each embeds captions, too."""
