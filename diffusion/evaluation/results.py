"""`OUT/evaluation.json`, what an evaluation found: the contract between `diffusion.evaluate` and its readers (the page, the report of a run).

Files that it names lie below OUT: images as PNG in `samples/` and `neighbours/`; of a subject also in `photos/` and `base/samples/`.
"""

import math
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NotRequired

from pydantic import AfterValidator
from typing_extensions import TypedDict

from diffusion.common.files import read_json
from diffusion.contracts.errors import InputError
from diffusion.evaluation.protocol import Protocol

RESULT_NAME = 'evaluation.json'
PAGE_NAME = 'evaluation.html'
VERSION: Final = 1
MOST_DECIMALS = 5  # of a number in a table
MOST_PHOTOS = 8  # of a subject, in OUT and on the page
FLOOR_TITLE, CEILING_TITLE = 'before fine-tuning', 'photos among themselves'  # of a subject
OF_STATISTICS = 'The real images are saved statistics: ± is by resampling the drawn images alone, so it leaves out the chance in the real ones.'


class Value(TypedDict, total=False):
    """A metric at one guidance scale; what a metric does not have is left out."""

    value: float
    error: float
    """One standard deviation, by resampling images and captions, or the standard error of a mean."""
    at_infinity: float
    """FID extrapolated to infinitely many images."""
    unbiased: float
    """CMMD without the diagonal of its kernels."""
    subsets_deviation: float
    """Standard deviation of KID over its subsets, which others report as its error."""
    null: float
    """The same between two halves of the real images: what a perfect model would score."""
    null_count: int
    """Images in each of these halves."""
    floor: float
    """Of a subject: the same of the model before fine-tuning."""
    ceiling: float
    """Of a subject: the same of its photos among themselves."""
    target: float
    """What the preset's benchmark asks for."""
    meaning: str
    lower_is_better: bool
    extractor: str


class Score(TypedDict):
    """All metrics at one guidance scale."""

    guidance: float
    count: int
    """Images drawn."""
    metrics: dict[str, Value]
    """By name as asked for (`fid`, `kid@random-conv`), in that order; `precision_recall` gives `precision` and `recall`."""


class Neighbour(TypedDict):
    """A drawn image and the most similar known one."""

    drawn: str
    """PNG below OUT."""
    known: str
    """PNG below OUT."""
    key: str
    """Of the known image in its dataset: MDS key or file name."""
    cosine: float
    caption: str
    """Of the drawn image."""
    known_caption: str


class Neighbours(TypedDict):
    """The most similar pairs of drawn and known images; a high cosine may be a copy."""

    extractor: str
    guidance: float
    count_known: int
    threshold: float | None
    """99.9th percentile of the cosine between held-out real images and their nearest known one; None without enough held-out images."""
    no_threshold: str
    """Why there is none; '' if there is."""
    share_above: float | None
    """Share of the drawn images above the threshold."""
    pairs: list[Neighbour]
    """At most ten, the most similar first."""


class ModelRecord(TypedDict):
    where: str
    sha256: str
    """Of the weights that draw and of the sampler's settings."""
    label: str
    batches: int | None
    """Batches that it was trained for, if its export says so."""


class RealRecord(TypedDict):
    where: str
    identity: str
    count: int
    left_out: str
    """Files in its folder that are no images that can be read, counted by reason; '' if there are none."""


class SampleRecord(TypedDict):
    """A drawn image that the page shows."""

    file: str
    id: int
    prompt: str
    floor: NotRequired[str]
    """Of a subject: what the model before fine-tuning drew from the same noise."""


def _is_scale(text: str) -> str:
    float(text)
    return text


class _Protocolled(TypedDict):
    protocol: Protocol


class Evaluation(TypedDict):
    version: Literal[1]
    protocol: dict[str, Any]
    """Fields of Protocol."""
    digest: str
    """Of the protocol: scores with the same one may be compared."""
    model: ModelRecord
    real: RealRecord
    scores: list[Score]
    """One a guidance scale, ascending."""
    neighbours: Neighbours | None
    samples: dict[Annotated[str, AfterValidator(_is_scale)], list[SampleRecord]]
    """By guidance scale as text, `3.0`: the same ids at each."""
    photos: NotRequired[list[str]]
    """Of a subject: its first photos, cropped as they are compared, small."""
    floor: NotRequired[ModelRecord]
    """Of a subject: the model before fine-tuning, if it is known."""
    seconds: float
    """Of drawing, summed over all ranks and starts."""
    images_per_sec: float
    """Drawn by one rank."""
    environment: dict[str, Any]


def read_evaluation(folder: Path) -> Evaluation:
    """Read the result in the OUT of an evaluation.

    Raises:
        InputError: there is none, or it is damaged or of another version.
    """
    path = folder / RESULT_NAME
    if not path.exists():
        raise InputError(f'{path}: no such file; python -m diffusion.evaluate writes it when all images are scored')
    found = read_json(path, Evaluation, InputError, 'evaluate again')
    read_json(path, _Protocolled, InputError, 'evaluate again')  # its fields, which the pages name as keys
    return found


def with_error(value: float, error: float | None) -> str:
    """Return `12.31 ± 0.12`, or `(12.3 ± 4.1)e-6`: two digits of the error; without one, four digits of the value."""
    if not error or not math.isfinite(error) or not math.isfinite(value):
        return f'{value:.4g}'
    decimals = max(0, 1 - math.floor(math.log10(error)))
    if decimals <= MOST_DECIMALS:
        return f'{value:.{decimals}f} ± {error:.{decimals}f}'
    if abs(value) >= 10**-3:  # an error that says nothing: all images are alike, or nearly
        return f'{value:.{MOST_DECIMALS}g} ± {error:.2g}'
    exponent = 3 * math.floor(math.log10(max(abs(value), error)) / 3)
    decimals += exponent
    return f'({value / 10**exponent:.{max(0, decimals)}f} ± {error / 10**exponent:.{max(0, decimals)}f})e{exponent}'
