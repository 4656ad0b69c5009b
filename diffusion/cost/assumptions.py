"""Assumptions of a bill, in addition to the recipe and the prices: a dataclass per section; meaning and limits stand at each field.

The numbers, with the reason of each, are in cost/assumptions.yaml and nowhere else; a user's own file and `key=value` change some of them.
Every number may be a range: `[low, high]` is uniform, `[low, likely, high]` triangular (formulas.py).
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from diffusion.common.text import counted
from diffusion.contracts.errors import InputError
from diffusion.cost.formulas import NUM_DRAWS, Uncertain, draw, range_problem
from diffusion.recipe.keys import MISSING, Key, key
from diffusion.recipe.merging import merge
from diffusion.recipe.reading import file_layers, override_layers

DEFAULT = Path(__file__).with_name('assumptions.yaml')


def number(doc: str, *limits: Literal['above 0', 'at most 1', 'or null']) -> Any:
    """Declare a number or a range of at least 0; it is above 0 where something is divided by it."""
    return field(default=MISSING, metadata={'key': Key(doc), 'limits': limits})


@dataclass
class PreparationAssumptions:
    num_images: Uncertain = number('Unique images to train on.')
    kept_share: Uncertain = number('Share (0..1) of the downloaded images that the filters keep.', 'above 0', 'at most 1')
    downloaded_share: Uncertain = number(
        'Share (0..1) of the URLs tried that answer; null: nothing is downloaded.', 'above 0', 'at most 1', 'or null'
    )
    bytes_per_image: Uncertain = number('Size of an image, as downloaded and as stored in image shards.')
    urls_per_machine_hour: Uncertain = number('Downloads that one machine tries in an hour.', 'above 0')
    images_per_machine_hour: Uncertain = number('Images that one machine decodes, filters and writes in an hour.', 'above 0')
    machine: str = key(MISSING, 'Name of the price of those machines.')


@dataclass
class EncodingAssumptions:
    num_images: Uncertain = number('Unique latents to train on: images of at least that size; null: all images.', 'or null')
    images_per_gpu_sec: Uncertain = number('Images that one GPU decodes, resizes and encodes in a second.', 'above 0')
    gpu: str | None = key(MISSING, "Name of that GPU's price; null: as training (the rate must then be that GPU's).")


@dataclass
class DerivedEncoding(EncodingAssumptions):
    """Encoding at a resolution of which nothing is assumed; `source` says what it follows from. No file has it."""

    source: str = ''


@dataclass
class OnlineAssumptions:
    headroom: float = key(MISSING, 'Encoders next to training deliver more than it takes by this share (0.1: 10 %).', low=0, high=10)
    images_per_encoder_sec: Uncertain = number(
        'Images that one encoder next to training was measured to encode in a second; null: by its GPU.', 'above 0', 'or null'
    )


@dataclass
class StorageAssumptions:
    price: str = key(MISSING, 'Name of the price of a TB and month.')
    crawl_months: Uncertain = number('Months for which the images as downloaded are kept.')
    image_shard_months: Uncertain = number('Months for which the MDS shards of images are kept.')
    latent_months: Uncertain = number('Months for which the MDS shards of latents are kept.')
    checkpoint_months: Uncertain = number('Months for which the checkpoints are kept.')


@dataclass
class NetworkAssumptions:
    shard_bytes: Uncertain = number('Size of a shard; one PUT writes it, one GET reads it.', 'above 0')
    downloads_per_epoch: Uncertain = number('Times that each shard is fetched in an epoch, by all nodes together.')
    put: str = key(MISSING, 'Name of the price of 1,000 PUTs.')
    get: str = key(MISSING, 'Name of the price of 1,000 GETs.')
    egress: str = key(MISSING, 'Name of the price of a GB from the storage to the GPUs.')


@dataclass
class FaultAssumptions:
    gpu_hours_between_failures: Uncertain = number("Of one GPU; null: the recipe's faults.gpu_hours_between_failures.", 'above 0', 'or null')
    save_sec: Uncertain = number('Seconds for which training stands still for a checkpoint of save_bytes or more.')
    save_bytes: Uncertain = number('Smaller checkpoints take a share of save_sec, by their bytes; null: all take save_sec.', 'above 0', 'or null')
    restart_sec: Uncertain = number('From the start of the processes to the first step: imports, checkpoint, compilation.')
    notice_sec: Uncertain = number('From a failure until someone or something has started the processes again, machines paid for.')
    gpu_hours_between_interruptions: Uncertain = number('On spot: of one GPU, in addition to its failures.', 'above 0')
    wait_sec: Uncertain = number('On spot: until there are machines again, not paid for.')


@dataclass
class WorkAssumptions:
    evaluation_share: Uncertain = number('Evaluations and sample grids, as a share of the training GPU-hours.')
    experiments_share: Uncertain = number("Sweeps, ablations and runs that came to nothing, as a multiple of the final run's GPU-hours.")
    taken_over_share: Uncertain = number('Share (0..1) of the unused reserved GPU-hours that others use and pay for.', 'at most 1')
    person_months: Uncertain = number("People's work on the whole project.")
    person: str = key(MISSING, 'Name of the price of a person for a month.')


@dataclass
class Assumptions:
    preparation: PreparationAssumptions = key(PreparationAssumptions)
    encoding: dict[str, EncodingAssumptions] = key(dict, 'Images encoded to latents before training, by resolution in pixels.')
    online: OnlineAssumptions = key(OnlineAssumptions)
    storage: StorageAssumptions = key(StorageAssumptions)
    network: NetworkAssumptions = key(NetworkAssumptions)
    faults: FaultAssumptions = key(FaultAssumptions)
    work: WorkAssumptions = key(WorkAssumptions)


def load_assumptions(path: Path | None = None, overrides: Sequence[str] = ()) -> Assumptions:
    """Read diffusion/cost/assumptions.yaml, changed by the file `path` and by `key=value` overrides; InputError has all mistakes."""
    errors: list[str] = []
    layers = [*file_layers(DEFAULT, errors), *(file_layers(path, errors) if path is not None else []), *override_layers(overrides, errors)]
    assumptions: Assumptions = merge(Assumptions, layers, errors)
    unset = {error.partition(':')[0] for error in errors}
    errors += [error for error in _mistakes(assumptions) if error.partition(':')[0] not in unset]
    if errors:
        raise InputError('\n'.join([f'{path or DEFAULT.name}: {counted(len(errors), "error")}', *(f'  - {error}' for error in errors)]))
    return assumptions


def _mistakes(section: Any, above: str = '') -> Iterator[str]:
    """Yield a message for each value that is not a number, or out of the limits of its field."""
    for item in fields(section):
        path, value, limits = f'{above}{item.name}', getattr(section, item.name), item.metadata.get('limits')
        if item.name == 'encoding':
            yield from (f"{path}.{px}: '{px}' is not a resolution in pixels, such as 256" for px in value if not (px.isdigit() and int(px) > 0))
            for px, size in value.items():
                yield from _mistakes(size, f'{path}.{px}.')
        elif is_dataclass(value):
            yield from _mistakes(value, f'{path}.')
        elif limits is not None and value != MISSING and not (value is None and 'or null' in limits):
            low, high = (value[0], value[-1]) if isinstance(value, list) and value else (value, value)
            if problem := range_problem(value):
                yield f'{path}: {problem}'
            elif low < 0 or (low == 0 and 'above 0' in limits):
                yield f'{path}: {value} must be {"above" if "above 0" in limits else "at least"} 0'
            elif high > 1 and 'at most 1' in limits:
                yield f'{path}: {value} is a share and at most 1'


def encoding_at(encoding: Mapping[str, EncodingAssumptions], resolution: int) -> tuple[EncodingAssumptions, str] | None:
    """Return what is assumed of encoding at a resolution, and the key that says it; None if nothing is.

    At another resolution a GPU encodes as many pixels a second as at the nearest one of which something is assumed.
    """
    nearest = min(encoding, key=lambda other: abs(math.log(int(other) / resolution)), default=None)
    if nearest is None:
        return None
    size, source = encoding[nearest], f'encoding.{nearest}.images_per_gpu_sec'
    if int(nearest) == resolution:
        return size, size.source if isinstance(size, DerivedEncoding) else source
    rate, pixels = size.images_per_gpu_sec, (int(nearest) / resolution) ** 2
    source = f'{source}, by pixels'
    return DerivedEncoding(size.num_images, [one * pixels for one in rate] if isinstance(rate, list) else rate * pixels, size.gpu, source), source


def draw_all(assumptions: Assumptions, num_draws: int = NUM_DRAWS, seed: int = 0) -> Assumptions:
    """Replace each range by an array of draws, and a missing number of latents by that of all images."""
    made = copy.deepcopy(assumptions)
    sections = {name: section for name, section in vars(made).items() if name != 'encoding'}
    sections |= {f'encoding.{px}': size for px, size in made.encoding.items()}
    for name, section in sections.items():
        for item, value in vars(section).items():
            if value is not None and not isinstance(value, str):
                setattr(section, item, draw(value, f'.{name}.{item}', num_draws, seed))
    for size in made.encoding.values():
        if size.num_images is None:
            size.num_images = made.preparation.num_images
    return made
