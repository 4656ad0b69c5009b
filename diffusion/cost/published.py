"""Throughput that others published for this U-Net (865.9 M parameters): bars to hold a plan against, and something to plan with.

Images per second of all GPUs together, by resolution, with the price per GPU-hour that the source used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diffusion.cost.formulas import Phase, dollars, gpu_hours, run_hours


@dataclass(frozen=True)
class PublishedThroughput:
    """One row of a published table."""

    table: str  # its name on the command line
    source: str
    gpu: str  # as in benchmarks/prices.yaml
    num_gpus: int
    images_per_sec: dict[int, float]
    price_per_gpu_hour: float
    inside: str = 'U-Net'  # what runs in a step
    extrapolated: bool = False  # by its authors

    def hours(self, phases: Sequence[Phase]) -> float:
        return run_hours(phases, self.images_per_sec)

    def gpu_hours(self, phases: Sequence[Phase]) -> float:
        return gpu_hours(self.hours(phases), self.num_gpus)

    def dollars(self, phases: Sequence[Phase]) -> float:
        return dollars(self.gpu_hours(phases), self.price_per_gpu_hour)


# The MosaicML post, January 2023 (table of mosaicml/diffusion-benchmark): encoders in the step, all samples at 512 px, $2 per A100-hour.
MOSAICML_2023_01 = tuple(
    PublishedThroughput('mosaicml-2023-01', 'MosaicML, 2023-01', 'a100-40gb', gpus, {512: rate}, 2.00, 'U-Net, VAE, text', gpus == 256)
    for gpus, rate in ((8, 128.2), (16, 254.0), (32, 485.7), (64, 912.2), (128, 1618.4), (256, 2589.4))
)

# README of mosaicml/diffusion, April 2023: latents encoded beforehand, $2 per A100-hour.
MOSAICML_TWO_PHASE = tuple(
    PublishedThroughput('mosaicml-two-phase', 'mosaicml/diffusion README, 2023', 'a100-40gb', gpus, {256: at_256, 512: at_512}, 2.00)
    for gpus, at_256, at_512 in ((8, 1100, 290), (16, 2180, 585), (32, 4080, 1195), (64, 8530, 2340), (128, 11600, 4590))
)

# The Anyscale post, table 3b with everything on: 4 p4de.24xlarge on demand.
ANYSCALE = PublishedThroughput('anyscale-table-4', 'Anyscale, 2024, table 3b', 'a100-80gb', 32, {256: 5908, 512: 1349}, 40.96 / 8)

PUBLISHED = (*MOSAICML_2023_01, *MOSAICML_TWO_PHASE, ANYSCALE)
