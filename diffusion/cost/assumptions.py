"""What a bill assumes beside the recipe and the prices: one dataclass a section, one docstring line a field, units in names and text.

The numbers, with the reason of each, are in cost/assumptions.yaml and nowhere else. A file of one's own and `key=value` change some of them.
Every number may be a range: `[low, high]` is uniform, `[low, likely, high]` triangular (`uncertain.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf

from diffusion.contracts.errors import InputError
from diffusion.cost.uncertain import NUM_DRAWS, Uncertain, check, draw, high, low
from diffusion.recipe.strict_yaml import file_layers, merge, override_layers

DEFAULT = Path(__file__).with_name('assumptions.yaml')


@dataclass
class Preparation:
    num_images: Uncertain = MISSING
    """Unique pictures to train on."""
    kept_share: Uncertain = MISSING
    """Share (0..1) of the downloaded pictures that the filters keep."""
    downloaded_share: Uncertain = MISSING
    """Share (0..1) of the URLs tried that still answer; null: the pictures are there already, and nothing is downloaded."""
    bytes_per_image: Uncertain = MISSING
    """Size of a picture, as downloaded and as stored in image shards."""
    urls_per_machine_hour: Uncertain = MISSING
    """Downloads that one machine tries in an hour."""
    images_per_machine_hour: Uncertain = MISSING
    """Pictures that one machine decodes, filters and writes in an hour."""
    machine: str = MISSING
    """Price of those machines, by its name in the list of prices."""


@dataclass
class Encoding:
    num_images: Uncertain = MISSING
    """Pictures of at least that size: unique latents to train on; null: all of preparation.num_images."""
    images_per_gpu_sec: Uncertain = MISSING
    """Pictures that one GPU decodes, resizes and encodes in a second."""
    gpu: str | None = MISSING
    """Price of that GPU, by its name in the list of prices; null: as training (the rate must then be that GPU's)."""


@dataclass
class Storage:
    price: str = MISSING
    """What a TB and month costs, by its name in the list of prices."""
    crawl_months: Uncertain = MISSING
    """How long the pictures as downloaded are kept."""
    image_shard_months: Uncertain = MISSING
    """How long the MDS shards of pictures are kept."""
    latent_months: Uncertain = MISSING
    """How long the MDS shards of latents are kept."""
    checkpoint_months: Uncertain = MISSING
    """How long the checkpoints that the recipe keeps are kept."""


@dataclass
class Network:
    shard_bytes: Uncertain = MISSING
    """Size of a shard; one PUT writes it, one GET reads it."""
    downloads_per_epoch: Uncertain = MISSING
    """Times that each shard is fetched in an epoch, by all nodes together."""
    put: str = MISSING
    """What 1,000 PUTs cost, by its name in the list of prices."""
    get: str = MISSING
    """What 1,000 GETs cost, by its name in the list of prices."""
    egress: str = MISSING
    """What a GB from the storage to the GPUs costs, by its name in the list of prices."""


@dataclass
class Faults:
    gpu_hours_between_failures: Uncertain = MISSING
    """Of one GPU; null: the recipe's faults.gpu_hours_between_failures."""
    save_sec: Uncertain = MISSING
    """How long training stands still for a checkpoint."""
    restart_sec: Uncertain = MISSING
    """From the start of the processes to the first step: imports, checkpoint, compilation."""
    notice_sec: Uncertain = MISSING
    """From a failure until someone or something has started the processes again, machines paid for."""
    gpu_hours_between_interruptions: Uncertain = MISSING
    """On spot: of one GPU, beside its failures."""
    wait_sec: Uncertain = MISSING
    """On spot: until there are machines again, not paid for."""


@dataclass
class Work:
    evaluation_share: Uncertain = MISSING
    """Evaluations and sample grids, as a share of the training GPU-hours."""
    experiments_share: Uncertain = MISSING
    """Sweeps, ablations and runs that came to nothing, as a multiple of the final run's training GPU-hours."""
    taken_over_share: Uncertain = MISSING
    """Share of reserved GPU-hours that this project leaves unused and that others use and pay for (0..1)."""
    person_months: Uncertain = MISSING
    """People's work on the whole project."""
    person: str = MISSING
    """What a person costs in a month, by its name in the list of prices."""


@dataclass
class Assumptions:
    preparation: Preparation = field(default_factory=Preparation)
    encoding: dict[str, Encoding] = field(default_factory=dict)
    """By resolution in pixels: what is encoded to latents before training."""
    storage: Storage = field(default_factory=Storage)
    network: Network = field(default_factory=Network)
    faults: Faults = field(default_factory=Faults)
    work: Work = field(default_factory=Work)


SECTIONS: tuple[type, ...] = (Preparation, Encoding, Storage, Network, Faults, Work, Assumptions)
NULLABLE = ('preparation.downloaded_share', 'encoding.*.num_images', 'encoding.*.gpu', 'faults.gpu_hours_between_failures')
TEXTS = ('machine', 'gpu', 'price', 'put', 'get', 'egress', 'person')  # names of prices

SHARES = ('kept_share', 'downloaded_share', 'taken_over_share')  # at most 1
DIVISORS = (
    'kept_share',
    'downloaded_share',
    'urls_per_machine_hour',
    'images_per_machine_hour',
    'images_per_gpu_sec',
    'shard_bytes',
    'gpu_hours_between_failures',
    'gpu_hours_between_interruptions',
)  # above 0


class AssumptionError(InputError):
    """Everything that is wrong with a file of assumptions and what overrides it."""


def load_assumptions(path: Path | None = None, overrides: Sequence[str] = ()) -> Assumptions:
    """diffusion/cost/assumptions.yaml, changed by the file `path` and by `key=value` overrides.

    Raises:
        AssumptionError: with all mistakes: unknown keys, values that are neither numbers nor ranges, or out of range.
    """
    errors: list[str] = []
    layers = [*file_layers(DEFAULT, errors), *(file_layers(path, errors) if path is not None else []), *override_layers(overrides, errors)]
    config = merge(Assumptions, layers, errors)
    unset = {error.partition(':')[0] for error in errors}
    errors += [error for error in _mistakes(OmegaConf.to_container(config)) if error.partition(':')[0] not in unset]  # type: ignore[arg-type]
    if errors:
        count = f'{len(errors)} error' + ('s' if len(errors) > 1 else '')
        raise AssumptionError('\n'.join([f'{path or DEFAULT.name}: {count}', *(f'  - {error}' for error in errors)]))
    assumptions = OmegaConf.to_object(config)
    assert isinstance(assumptions, Assumptions)
    return assumptions


def draw_all(assumptions: Assumptions, num_draws: int = NUM_DRAWS, seed: int = 0) -> Assumptions:
    """The same with an array of draws in the place of each range, and numbers of images where they are all of them."""
    drawn: Assumptions = _drawn(assumptions, '', num_draws, seed)
    for size in drawn.encoding.values():
        if size.num_images is None:
            size.num_images = drawn.preparation.num_images
    return drawn


def _drawn(value: Any, name: str, num_draws: int, seed: int) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {item.name: _drawn(getattr(value, item.name), f'{name}.{item.name}', num_draws, seed) for item in dataclasses.fields(value)}
        return dataclasses.replace(value, **parts)
    if isinstance(value, dict):
        return {key: _drawn(inner, f'{name}.{key}', num_draws, seed) for key, inner in value.items()}
    return value if value is None or isinstance(value, str) else draw(value, name, num_draws, seed)


def _mistakes(values: dict[str, Any], prefix: str = '') -> Iterator[str]:
    """Values that are no numbers, or out of range."""
    for key, value in values.items():
        path = f'{prefix}{key}'
        if isinstance(value, dict):
            if prefix == 'encoding.' and not (key.isdigit() and int(key) > 0):
                yield f"{path}: '{key}' is not a resolution in pixels, such as 256"
            yield from _mistakes(value, f'{path}.')
        elif key in TEXTS or value == MISSING or (value is None and any(fnmatch(path, name) for name in NULLABLE)):
            continue
        elif problem := check(value):
            yield f'{path}: {problem}'
        elif low(value) < 0 or (low(value) == 0 and key in DIVISORS):
            yield f'{path}: {value} must be {"above" if key in DIVISORS else "at least"} 0'
        elif key in SHARES and high(value) > 1:
            yield f'{path}: {value} is a share and at most 1'
