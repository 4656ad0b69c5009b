"""Everything that a score depends on besides the model: two scores may be compared if their protocols are equal."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DEFAULT_CHUNK = 16  # images drawn together


@dataclass(frozen=True)
class Protocol:
    """What was compared with what, and how.

    Attributes:
        preset: name of the preset that this began as; '' for none.
        metrics: names in METRICS.
        samples: images drawn at each guidance scale; as many real ones are compared with them if there are.
        guidance: scales, each scored by itself.
        steps: of the sampler.
        sampler: diffusers' class, with `@SPACING` if its timesteps are not spaced as the model's own.
        seed: keys the noise together with the id of the prompt.
        resolution: side in pixels of drawn and of real images.
        chunk: images that the network gets at once: other numbers change the last bits.
        precision: of the model that draws, `fp32` or `bf16`.
        resize: how real images came to the resolution.
        extractors: SHA-256 of the weights of each feature network.
        prompts: where they come from, how a caption was chosen from several, and the SHA-256 of ids and texts.
        real: kind, identity and count of the real images or statistics.
    """

    preset: str
    metrics: tuple[str, ...]
    samples: int
    guidance: tuple[float, ...]
    steps: int
    sampler: str
    seed: int
    resolution: int
    chunk: int
    precision: str
    resize: str
    extractors: Mapping[str, str]
    prompts: Mapping[str, str]
    real: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return what evaluation.json says under `protocol`."""
        return json.loads(json.dumps(dataclasses.asdict(self)))  # lists for tuples, as they come back from a file

    @property
    def digest(self) -> str:
        """Equal for equal protocols, whatever the preset is called."""
        return digest_of({name: value for name, value in self.to_json().items() if name != 'preset'})


def digest_of(protocol: Mapping[str, Any]) -> str:
    """Return the digest of a protocol's fields, 16 hex digits."""
    return hashlib.sha256(json.dumps(protocol, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Preset:
    """Options of the command that together follow a published evaluation, or this project's own.

    Attributes:
        source: who evaluates like this, and where it differs from ours.
        targets: values that a published benchmark asks for, by the metric.
        sampler: as in Protocol, in place of the model's own; None keeps that.
    """

    source: str
    metrics: tuple[str, ...]
    samples: int
    guidance: tuple[float, ...]
    steps: int
    resolution: int | None = None
    targets: Mapping[str, float] = dataclasses.field(default_factory=dict)
    sampler: str | None = None


PRESETS = {
    'quick': Preset(
        'this project: a first impression in minutes; KID and CMMD, which have little bias at few samples',
        metrics=('kid', 'cmmd', 'clip'),
        samples=2_048,
        guidance=(3.0, 7.5),
        steps=25,
    ),
    'coco2014-30k': Preset(
        'this project: 30,000 images of COCO 2014 val, one caption of each by a keyed draw, short side resized, centre crop',
        metrics=('fid', 'fid_clean', 'kid', 'cmmd', 'clip', 'precision_recall'),
        samples=30_000,
        guidance=(1.5, 3.0, 5.0, 7.5),
        steps=50,
    ),
    'mosaicml': Preset(
        'mosaicml/diffusion, clean-fid and a sweep of guidance over 10,000 COCO captions at 256 px; it draws with its own sampler',
        metrics=('fid_clean', 'kid_clean', 'clip@clip-vit-b16'),
        samples=10_000,
        guidance=(1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0),
        steps=50,
        resolution=256,
    ),
    'mlperf': Preset(
        'MLPerf Training, Stable Diffusion: 30,000 captions of COCO 2014 val from its published list (--prompts), its statistics as DATASET (npz); '
        'a target of training speed, not of quality',
        metrics=('fid', 'clip@openclip-vit-h14'),
        samples=30_000,
        guidance=(8.0,),
        steps=50,
        resolution=512,
        targets={'fid': 90.0, 'clip@openclip-vit-h14': 15.0},  # it asks for a cosine of 0.15; a CLIP score is 100 times that
        sampler='DDIMScheduler@leading',  # from 981 down to 1; ours begins at 999
    ),
    'prx': Preset(
        "Photoroom's PRX during training; its published FIDs are of inverted images (uint8 given to an extractor that multiplies by 255)",
        metrics=('fid', 'kid', 'cmmd', 'clip'),
        samples=10_000,
        guidance=(3.5,),
        steps=28,
        resolution=256,
    ),
}
