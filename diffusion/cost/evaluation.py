"""FLOP and hours of an evaluation: images drawn at several guidance scales. Feature networks, which take a few percent more, are left out."""

from collections.abc import Sequence
from dataclasses import dataclass

from diffusion.cost.formulas import SEC_PER_HOUR, Number

DRAWN_TOGETHER = 16  # images of `eval.samples` that a GPU draws at once; those of a chunk that is not full count as drawn
PASSES, PASSES_OF_ADAPTERS = 3, 2  # of a step, in forward passes: frozen weights need no gradients of their own


@dataclass(frozen=True)
class EvaluationWork:
    """Drawing `samples` images at each of some guidance scales.

    Attributes:
        pass_flop: of the denoiser's forward pass over one image.
        decode_flop: of the VAE's decoder over one image.
        guidance: scales; guidance takes a pass with the caption and one without, scale 1 the first alone.
    """

    samples: int
    guidance: Sequence[float]
    steps: int
    pass_flop: float
    decode_flop: float = 0.0

    def flop_of_image(self, guidance: float) -> float:
        """FLOP of one image at a guidance scale."""
        return self.steps * (2 if guidance > 1 else 1) * self.pass_flop + self.decode_flop

    @property
    def flop(self) -> float:
        """FLOP of all images."""
        return self.samples * sum(map(self.flop_of_image, self.guidance))

    def gpu_hours(self, flop_per_sec: Number) -> Number:
        """Hours of one GPU that computes so much in a second; of n GPUs each takes an n-th."""
        return self.flop / flop_per_sec / SEC_PER_HOUR

    def share_of(self, training_flop: float) -> float:
        """Share of a training run's FLOP."""
        return self.flop / training_flop
