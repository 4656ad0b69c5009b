"""Protocol and results of evaluations: all that scores depend on, and the JSON files that their readers (pages, the report of a run, the demo) get.

Two scores may be compared if their protocols are equal. Files that a result names lie below OUT: images as PNG in `samples/` and `neighbours/`; of
a subject also in `photos/` and `base/samples/`. Nothing here needs torch.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NotRequired

from pydantic import AfterValidator
from typing_extensions import TypedDict

from diffusion.common.files import read_json
from diffusion.contracts.errors import InputError

RESULT_NAME, PAGE_NAME = 'evaluation.json', 'evaluation.html'
RECONSTRUCTION_NAME, RECONSTRUCTION_PAGE, SHEET_NAME = 'reconstruction.json', 'reconstruction.html', 'reconstruction.png'
VERSION: Final = 1
DEFAULT_CHUNK = 16  # images drawn together
PHOTOS = 'photos of a subject'  # kind of real images: their number is no sample size
INTERVAL_ERRORS = 2  # an interval is the value +- this many standard deviations, about 95 %
MOST_DECIMALS = 5  # of a number in a table
MOST_PHOTOS = 8  # of a subject, in OUT and on the page
FLOOR_TITLE, CEILING_TITLE = 'before fine-tuning', 'photos among themselves'  # of a subject
OF_STATISTICS = 'The real images are saved statistics: ± is by resampling the drawn images alone, so it leaves out the chance in the real ones.'


@dataclass(frozen=True)
class Protocol:
    """Sets that were compared, and how: everything that a score depends on besides the model."""

    preset: str  # that this began as; '' for none
    metrics: tuple[str, ...]
    samples: int  # images drawn at each guidance scale; as many real ones are compared with them if there are
    guidance: tuple[float, ...]  # scales, each scored by itself
    steps: int
    sampler: str  # diffusers' class, with `@SPACING` if its timesteps are not spaced as the model's own
    seed: int  # keys the noise together with the id of the prompt
    resolution: int  # side in pixels of drawn and of real images
    chunk: int  # images that the network gets at once: other numbers change the last bits
    precision: str  # of the model that draws, `fp32` or `bf16`
    resize: str  # how real images came to the resolution
    extractors: Mapping[str, str]  # SHA-256 of the weights of each feature network
    prompts: Mapping[str, str]  # where they come from, how a caption was chosen from several, and the SHA-256 of ids and texts
    real: Mapping[str, Any]  # kind, identity and count of the real images or statistics

    def to_json(self) -> dict[str, Any]:
        """Return what evaluation.json says under `protocol`."""
        return json.loads(json.dumps(dataclasses.asdict(self)))  # lists for tuples, as they come back from a file

    @property
    def digest(self) -> str:
        """Equal for equal protocols, whatever the preset is called."""
        return digest_of({name: value for name, value in self.to_json().items() if name != 'preset'})


class ReconstructionProtocol(TypedDict):
    """Everything that a figure of reconstructions depends on besides the autoencoder; fields are as those of Protocol."""

    metrics: list[str]
    samples: int
    resolution: int
    resize: str
    latents: str  # what is decoded
    precision: str
    batch: int  # images encoded together
    seed: int  # chooses the images
    extractors: dict[str, str]
    real: dict[str, Any]


def digest_of(protocol: Mapping[str, Any]) -> str:
    """Return the digest of a protocol's fields, 16 hex digits."""
    return hashlib.sha256(json.dumps(protocol, sort_keys=True).encode()).hexdigest()[:16]


class Value(TypedDict, total=False):
    """A metric at one guidance scale, or of an autoencoder; what a metric does not have is left out."""

    value: float
    error: float  # one standard deviation, by resampling images and captions, or the standard error of a mean
    at_infinity: float  # FID extrapolated to infinitely many images
    unbiased: float  # CMMD without the diagonal of its kernels
    subsets_deviation: float  # of KID over its subsets, which others report as its error
    null: float  # the same between two halves of the real images: what a perfect model would score
    null_count: int  # images in each of these halves
    floor: float  # of a subject: the same of the model before fine-tuning
    ceiling: float  # of a subject: the same of its photos among themselves
    target: float  # what the preset's benchmark asks for
    meaning: str
    lower_is_better: bool
    extractor: str


class Score(TypedDict):
    guidance: float  # 0 of autoencoders, which have none
    count: int  # images drawn
    metrics: dict[str, Value]  # by name as asked for (`kid@random-conv`), in that order; `precision_recall` gives two


class Neighbour(TypedDict):
    """A drawn image and the most similar known one, both PNG below OUT."""

    drawn: str
    known: str
    key: str  # of the known image in its dataset: MDS key or file name
    cosine: float
    caption: str  # of the drawn image
    known_caption: str


class Neighbours(TypedDict):
    extractor: str
    guidance: float
    count_known: int
    threshold: float | None  # 99.9th percentile of the cosine between held-out real images and their nearest known one; None without enough of them
    no_threshold: str  # why there is none; '' if there is
    share_above: float | None  # share of the drawn images above the threshold
    pairs: list[Neighbour]  # at most ten, the most similar first; a high cosine may be a copy


class ModelRecord(TypedDict):
    where: str
    sha256: str  # of the weights that draw and of the sampler's settings
    label: str
    batches: int | None  # that it was trained for, if its export says so


class RealRecord(TypedDict):
    where: str
    identity: str
    count: int
    left_out: str  # files in its folder that are no images that can be read, counted by reason; '' if there are none


class SampleRecord(TypedDict):
    """A drawn image that the page shows."""

    file: str
    id: int
    prompt: str
    floor: NotRequired[str]  # of a subject: what the model before fine-tuning drew from the same noise
    original: NotRequired[str]  # of a reconstruction
    score: NotRequired[float]  # of a reconstruction: the first figure of pairs, mean of all autoencoders


class LatentChannel(TypedDict):
    mean: float
    std: float
    posterior_std: float  # root mean square of the posterior's own deviation, the part of `std` that is noise


class LatentRecord(TypedDict):
    """Latents of a set of images, unscaled, as draws from their posteriors: what training sees."""

    mean: float  # over all channels: what `shift_factor` should be
    std: float  # about that mean: 1 / what `scaling_factor` should be
    channels: list[LatentChannel]


class AutoencoderRecord(TypedDict):
    name: str
    where: str
    sha256: str
    latent_channels: int
    downsampling: int  # pixels per latent along a side
    num_parameters: int
    scaling_factor: float
    shift_factor: float
    metrics: dict[str, Value]  # by name as asked for
    latents: LatentRecord
    warnings: list[str]
    images_per_sec: float  # encoded and decoded, in float32
    samples: list[SampleRecord]  # the first images chosen, then the worst; the same of all autoencoders


class Ranking(TypedDict):
    """The best autoencoder by a metric, and those whose difference to it may be chance."""

    best: str
    tied: list[str]  # by two standard errors: of the mean difference on the same images; of rFID of both values


class BaseResult(TypedDict):
    """The part that all results have."""

    version: Literal[1]
    protocol: dict[str, Any]  # fields of Protocol; of reconstructions those of ReconstructionProtocol
    digest: str  # of the protocol: scores with the same one may be compared
    real: RealRecord
    environment: dict[str, Any]


class Reconstructions(BaseResult):
    """Scores of autoencoders: OUT/reconstruction.json."""

    enlarged: int  # images that were smaller than the resolution: their figures are too good
    autoencoders: list[AutoencoderRecord]
    standings: dict[str, Ranking]  # by metric, of several autoencoders; empty of one


def _is_scale(text: str) -> str:
    float(text)
    return text


class Evaluation(BaseResult):
    """Scores of a model or an adapter: OUT/evaluation.json."""

    model: ModelRecord
    scores: list[Score]  # one a guidance scale, ascending
    neighbours: Neighbours | None
    samples: dict[Annotated[str, AfterValidator(_is_scale)], list[SampleRecord]]  # by guidance scale as text, `3.0`: the same ids at each
    photos: NotRequired[list[str]]  # of a subject: its first photos, cropped as they are compared, small
    floor: NotRequired[ModelRecord]  # of a subject: the model before fine-tuning, if it is known
    seconds: float  # of drawing, summed over all ranks and starts
    images_per_sec: float  # drawn by one rank


class _Protocolled(TypedDict):
    protocol: Protocol


class _ReconstructionProtocolled(TypedDict):
    protocol: ReconstructionProtocol


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


def read_reconstructions(folder: Path) -> Reconstructions:
    """Read what diffusion.reconstruct wrote into OUT.

    Raises:
        InputError: it is damaged or of another version.
    """
    path = folder / RECONSTRUCTION_NAME
    found = read_json(path, Reconstructions, InputError, 'reconstruct again')
    read_json(path, _ReconstructionProtocolled, InputError, 'reconstruct again')
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
