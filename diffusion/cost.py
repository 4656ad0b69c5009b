"""From images per second to hours, days and dollars. No torch: a laptop can plan a run.

F1 to F4 of the published cost posts: hours = samples / images_per_sec / 3600, days = hours / 24,
GPU-hours = hours x GPUs, dollars = GPU-hours x price.
"""

from __future__ import annotations

from dataclasses import dataclass


def hours(num_samples: float, images_per_sec: float) -> float:
    return num_samples / images_per_sec / 3600


def dollars(wall_hours: float, num_gpus: int, price_per_gpu_hour: float) -> float:
    return wall_hours * num_gpus * price_per_gpu_hour


@dataclass(frozen=True)
class Phase:
    """One part of a training run: so many samples at one resolution."""

    resolution: int
    num_samples: int


# Stable Diffusion 2 base: 550,000 and 850,000 batches of 2048 (model card; mosaicml/diffusion).
SD2_BASE = (Phase(256, 550_000 * 2048), Phase(512, 850_000 * 2048))


@dataclass(frozen=True)
class PublishedThroughput:
    """One published row: images per second by resolution, U-Net only, latents precomputed."""

    source: str
    gpu: str
    num_gpus: int
    images_per_sec: dict[int, float]
    price_per_gpu_hour: float

    def wall_hours(self, phases: tuple[Phase, ...]) -> float:
        return sum(hours(phase.num_samples, self.images_per_sec[phase.resolution]) for phase in phases)

    def dollars(self, phases: tuple[Phase, ...]) -> float:
        return dollars(self.wall_hours(phases), self.num_gpus, self.price_per_gpu_hour)


PUBLISHED = (
    *(
        PublishedThroughput('mosaicml/diffusion README, 2023', 'A100-40GB', gpus, {256: at_256, 512: at_512}, 2.00)
        for gpus, at_256, at_512 in (
            (8, 1100, 290),
            (16, 2180, 585),
            (32, 4080, 1195),
            (64, 8530, 2340),
            (128, 11600, 4590),
        )
    ),
    PublishedThroughput('Anyscale, 2024, table 3b, on demand', 'A100-80GB', 32, {256: 5908, 512: 1349}, 40.96 / 8),
)
