"""Throughput that others published for the U-Net of Stable Diffusion 2 (865.9 M parameters), to plan with and to compare against.

Images per second of all GPUs together, by resolution, with the price per GPU-hour that the source used. Latents are encoded beforehand where
`inside` does not say otherwise. Days and dollars of the sources are in benchmarks/published.yaml, which works them out again from these rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from diffusion.cost.formulas import Phase, run_hours


@dataclass(frozen=True)
class PublishedThroughput:
    """One row of a published table."""

    table: str
    source: str
    gpu: str  # as in diffusion/cost/prices.yaml
    num_gpus: int
    images_per_sec: dict[int, float]
    price_per_gpu_hour: float | None  # None: the source names none
    inside: str = 'U-Net'  # what runs in a step
    extrapolated: bool = False  # by its authors
    global_size: int = 2048  # images per step of all GPUs together
    configuration: str = ''  # what tells it from other rows of its table

    def hours(self, phases: Sequence[Phase]) -> float:
        """Wall hours of phases one after another."""
        return run_hours(phases, self.images_per_sec)

    def dollars(self, phases: Sequence[Phase]) -> float:
        """Price of the phases; ValueError if the source names no price of a GPU-hour."""
        if self.price_per_gpu_hour is None:
            raise ValueError(f'{self.source} names no price of a GPU-hour: take one of diffusion/cost/prices.yaml')
        return self.hours(phases) * self.num_gpus * self.price_per_gpu_hour


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

P4DE_DOLLARS_PER_HOUR = 40.96  # p4de.24xlarge, 8 A100-80GB, on demand in us-west-2, as the Anyscale post prints it

# The Anyscale post, 2024, tables 3a and 3b: one change a row, each on top of those above. Global batch of its README (anyscale/templates).
_CHANGES = ('+ EFA', '+ FSDP', '+ torch.compile')
ANYSCALE_TABLE_3 = tuple(
    PublishedThroughput(
        'anyscale-table-3', f'Anyscale, 2024, table {part}', gpu, gpus, {256: at_256, 512: at_512}, price, 'U-Net', False, 4096, change
    )
    for part, gpu, gpus, price, rates in (
        ('3a', 'a100-40gb', 16, None, ((1269, 474), (1925, 667), (2910, 805))),
        ('3b', 'a100-80gb', 32, P4DE_DOLLARS_PER_HOUR / 8, ((4068, 1029), (5014, 1168), (5908, 1349))),
    )
    for change, (at_256, at_512) in zip(_CHANGES, rates, strict=True)
)

# With everything on, 4 p4de.24xlarge on demand: what its table 4 adds up.
ANYSCALE = ANYSCALE_TABLE_3[-1]


@dataclass(frozen=True)
class PublishedEncoding:
    """Images per second of one GPU that encodes."""

    source: str
    what: str
    gpu: str  # as in diffusion/cost/prices.yaml
    resolution: int
    images_per_sec: float
    flop_per_image: float  # a forward pass of what it encodes with


# Its table 2: 40 A10G next to training at 4,068 images/s; the post has no rate of one. Derived, if the 40 keep up and no more.
ANYSCALE_ENCODING = PublishedEncoding(
    source='Anyscale, 2024, table 2, derived: 4,068 / 40',
    what='an A10G at 256 px with text',
    gpu='a10g',
    resolution=256,
    images_per_sec=ANYSCALE_TABLE_3[3].images_per_sec[256] / 40,
    flop_per_image=3.1785e11,  # VAE 272.7 and text encoder 45.1 GFLOP, as diffusion.plan counts them
)

# MLPerf Training, Stable Diffusion at 512 px, from the result logs: images/s over the whole run; latents and text encoded beforehand.
MLPERF = tuple(
    PublishedThroughput('mlperf', f'MLPerf Training {version}, {submitter}', gpu, gpus, {512: rate}, None, 'U-Net', False, global_size)
    for version, submitter, gpu, gpus, global_size, rate in (
        ('v4.1', 'Dell', 'h100', 4, 256, 580),
        ('v4.1', 'NVIDIA', 'h100', 8, 256, 1099),
        ('v4.1', 'NVIDIA', 'h100', 64, 1024, 7934),
        ('v4.1', 'NVIDIA', 'h100', 512, 2048, 38355),
        ('v5.0', 'HPE', 'h200', 8, 512, 1197),
        ('v5.0', 'HPE', 'h200', 32, 1024, 4455),
        ('v5.0', 'Dell', 'b200', 8, 256, 2194),
    )
)

PUBLISHED = (*MOSAICML_2023_01, *MOSAICML_TWO_PHASE, *ANYSCALE_TABLE_3, *MLPERF)
