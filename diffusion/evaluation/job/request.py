"""Options of diffusion.evaluate and diffusion.reconstruct, and presets of them that follow published evaluations. Needs no torch."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, PositiveInt, model_validator

from diffusion.common.command_line import Arguments, Guidance, Names, Precision, Seed, SidePx, option, positional, split_names
from diffusion.common.text import did_you_mean
from diffusion.evaluation.job.results import DEFAULT_CHUNK
from diffusion.recipe.catalog import METRICS

DEFAULT_SAMPLES = 30_000
DEFAULT_METRICS = ('fid', 'kid', 'cmmd', 'clip')
DEFAULT_GUIDANCE = (1.5, 3.0, 5.0, 7.5)
DEFAULT_STEPS = 50
CHANGEABLE = ('metrics', 'samples', 'guidance', 'steps', 'resolution', 'sampler')  # options that a preset sets
OF_SUBJECT = 'subject: CLIP-I, DINO and CLIP-T of a fine-tuned model, in place of --data'
OF_PROTOCOL = 'protocol: what the figures depend on'
OF_COMPARISON = 'comparing finished evaluations, without MODEL and other options'


@dataclass(frozen=True)
class Preset:
    """Options of the command that together follow a published evaluation, or this project's own."""

    source: str  # who evaluates like this, and where it differs from ours
    metrics: tuple[str, ...]
    samples: int
    guidance: tuple[float, ...]
    steps: int
    resolution: int | None = None
    sampler: str | None = None  # as in Protocol; None: the model's own
    targets: Mapping[str, float] = dataclasses.field(default_factory=dict)  # that a published benchmark asks for, by the metric


PRESETS = {
    'quick': Preset(
        'this project: a first impression in minutes; KID and CMMD, which have little bias at few samples',
        metrics=('kid', 'cmmd', 'clip'), samples=2_048, guidance=(3.0, 7.5), steps=25,
    ),
    'coco2014-30k': Preset(
        'this project: 30,000 images of COCO 2014 val, one caption of each by a keyed draw, short side resized, centre crop',
        metrics=('fid', 'fid_clean', 'kid', 'cmmd', 'clip', 'precision_recall'), samples=30_000, guidance=(1.5, 3.0, 5.0, 7.5), steps=50,
    ),
    'mosaicml': Preset(
        'mosaicml/diffusion, clean-fid and a sweep of guidance over 10,000 COCO captions at 256 px; it draws with its own sampler',
        metrics=('fid_clean', 'kid_clean', 'clip@clip-vit-b16'), samples=10_000, guidance=(1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0), steps=50,
        resolution=256,
    ),
    'mlperf': Preset(
        'MLPerf Training, Stable Diffusion: 30,000 captions of COCO 2014 val from its published list (--prompts), its statistics as DATASET (npz); '
        'a target of training speed, not of quality',
        metrics=('fid', 'clip@openclip-vit-h14'), samples=30_000, guidance=(8.0,), steps=50, resolution=512,
        sampler='DDIMScheduler@leading',  # from 981 down to 1; ours begins at 999
        targets={'fid': 90.0, 'clip@openclip-vit-h14': 15.0},  # it asks for a cosine of 0.15; a CLIP score is 100 times that
    ),
    'prx': Preset(
        "Photoroom's PRX during training; its published FIDs are of inverted images (uint8 given to an extractor that multiplies by 255)",
        metrics=('fid', 'kid', 'cmmd', 'clip'), samples=10_000, guidance=(3.5,), steps=28, resolution=256,
    ),
    'fd-dinov2': Preset(
        'arXiv 2306.04675 (dgm-eval): FD and MMD of 50,000 images, by the class token of DINOv2 ViT-L/14 at 224 px; '
        'it scores images that others drew, so guidance, steps and sampler are ours',
        metrics=('fd_dinov2', 'mmd_dinov2'), samples=50_000, guidance=(1.5, 3.0, 5.0, 7.5), steps=50,
    ),
    'hpsv2': Preset(
        'arXiv 2306.09341: an image for each of the 3,200 prompts of its benchmark (--prompts), 800 in each of four styles; '
        'it reports each style by itself, and ours is their mean; guidance and steps are ours',
        metrics=('hpsv2', 'pickscore'), samples=3_200, guidance=(7.5,), steps=50,
    ),
}  # fmt: skip


def _known_preset(name: str) -> str:
    if name not in PRESETS:
        raise ValueError(f'unknown preset {name}{did_you_mean(name, PRESETS)} Known: {", ".join(PRESETS)}')
    return name


class EvaluationRequest(Arguments):
    """Model, data and protocol of an evaluation; None leaves it to the preset, the model or the defaults above."""

    model: str = positional('MODEL', 'exported folder or adapter, run folder, checkpoint, or OWNER/NAME on the Hub')
    data: str = option('', 'real images: MDS, folder, or file of statistics', 'DATASET')
    out: Path = option(..., 'folder for the result, new or begun by this command', 'OUT')
    revision: str | None = option(None, 'of MODEL on the Hub', 'COMMIT')
    base: str | None = option(None, 'where the model that an exported adapter belongs to is, if it has moved', 'FOLDER')
    weights: Path | None = option(None, "feature networks' weights (default: local caches); nothing is downloaded", 'FOLDER')
    download: bool = option(False, "get feature networks' weights that are not on this machine")
    training: str | None = option(None, 'images among which neighbours of the drawn ones are looked for (default: DATASET)', 'DATASET')
    cache: Path | None = option(None, 'features of real images (default: .real_features next to OUT)', 'FOLDER')
    plan: bool = option(False, 'only say what it would take')
    keep_images: bool = option(False, 'keep all drawn images as MDS in OUT/images')
    save_statistics: Path | None = option(None, 'statistics of the real images, to use as DATASET (.safetensors)', 'FILE')

    subject: Path | None = option(None, 'folder of photos; --prompts name the subject as {}', 'PHOTOS', group=OF_SUBJECT)
    word: str = option('', 'what stands for {} in prompts: "sks dog"', 'TEXT', group=OF_SUBJECT)
    class_word: str = option('', 'its class, for CLIP and the model before fine-tuning: dog', 'TEXT', group=OF_SUBJECT)

    protocol: Annotated[str, AfterValidator(_known_preset)] | None = option(
        None, f'a preset, which the other options change: {", ".join(PRESETS)}', 'NAME', group=OF_PROTOCOL
    )
    metrics: Names | None = option(
        None,
        f'{", ".join(METRICS)}; METRIC@NETWORK takes the features of another network, such as kid@random-conv (default: {",".join(DEFAULT_METRICS)})',
        'NAME,...',
        group=OF_PROTOCOL,
    )
    samples: PositiveInt | None = option(None, 'images at each guidance scale (default: 30000, or all captions)', 'N', group=OF_PROTOCOL)
    guidance: Annotated[tuple[Guidance, ...], BeforeValidator(split_names)] | None = option(
        None, 'guidance scales, each scored (default: 1.5,3,5,7.5)', 'SCALE,...', group=OF_PROTOCOL
    )
    steps: PositiveInt | None = option(None, 'sampling steps (default: 50)', 'N', group=OF_PROTOCOL)
    sampler: str | None = option(
        None, "diffusers' scheduler, such as DDIMScheduler or, spaced otherwise, DDIMScheduler@leading", 'CLASS', group=OF_PROTOCOL
    )
    resolution: SidePx | None = option(None, "side of drawn and real images (default: the model's)", 'PX', group=OF_PROTOCOL)
    seed: Seed = option(0, 'of noise, choice of captions and resampling', group=OF_PROTOCOL)
    chunk: PositiveInt = option(DEFAULT_CHUNK, 'images drawn together', 'N', group=OF_PROTOCOL)
    precision: Precision | None = option(None, 'of the denoiser (default: bf16 on a GPU, fp32 without one)', group=OF_PROTOCOL)
    prompts: Path | None = option(None, "a prompt a line, in place of the dataset's captions", 'FILE', group=OF_PROTOCOL)

    compare: list[Path] = option([], 'folders with evaluation.json or reconstruction.json', 'OUT', group=OF_COMPARISON, several=True)
    page: Path | None = option(None, 'the page about them, one HTML file', 'FILE', group=OF_COMPARISON)

    @model_validator(mode='after')
    def _names_what_to_compare_with(self) -> Self:
        if self.page is not None:
            raise ValueError('--page is where --compare OUT OUT ... writes; an evaluation writes its own page, OUT/evaluation.html')
        alone = self.prompts is not None and self.save_statistics is None  # what compares with prompts needs no more
        if not self.plan and bool(self.data) == (self.subject is not None) and (self.data or not alone):
            raise ValueError('name what to compare with: --data DATASET or --subject PHOTOS; for metrics of prompts --prompts FILE is enough')
        return self

    def choice(self, name: str, default: Any) -> Any:
        """Return an option as given, as the preset has it, or the default."""
        given = getattr(self, name)
        if given is None and self.protocol is not None:
            given = getattr(PRESETS[self.protocol], name)
        return default if given is None else given

    @property
    def changes(self) -> list[str]:
        """Options of the preset that others replace."""
        if self.protocol is None:
            return []
        return [name for name in CHANGEABLE if getattr(self, name) not in (None, getattr(PRESETS[self.protocol], name))]


class ComparisonRequest(Arguments):
    """Finished evaluations to compare."""

    compare: list[Path] = option(..., 'folders with evaluation.json or reconstruction.json', 'OUT', several=True)
    page: Path = option(..., 'the page, one HTML file', 'FILE')


class ReconstructionRequest(Arguments):
    """Autoencoders to score, images and figures."""

    vaes: list[str] = positional('VAE', 'folder of an AutoencoderKL, or with one in vae/; several are compared')
    data: str = option(..., 'image MDS (folder or URL), or folder of images', 'IMAGES')
    out: Path = option(..., 'folder for the result; an earlier result there is replaced', 'OUT')
    resolution: SidePx | None = option(None, 'side of the square images (default: as the first, at most 256)', 'PX')
    samples: PositiveInt | None = option(None, 'images (default: all, at most 30000)', 'N')
    metrics: Names = option(
        ('psnr', 'ssim', 'lpips', 'fid'),
        'psnr, ssim, lpips, fid, fid_clean; lpips@random-conv and fid@NETWORK take other features, such as fid@random-conv '
        '(default: psnr,ssim,lpips,fid)',
        'NAME,...',
    )
    weights: Path | None = option(None, "feature networks' weights (default: local caches); nothing is downloaded", 'FOLDER')
    download: bool = option(False, "get feature networks' weights that are not on this machine")
    seed: Seed = option(0, 'chooses the images, and resamples for errors')
    batch_size: PositiveInt = option(16, 'images encoded together', 'N')
