"""Requirements of one recipe by arithmetic: samples, FLOP, memory of a GPU, loader, checkpoints, scores. No torch: a laptop can plan a run.

Activations are counted by families/counting/tracing.py. The search on the GPU itself (`batch.micro_size: auto`) is in training/micro_batch.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from diffusion.contracts.errors import ManifestError
from diffusion.contracts.manifest import MANIFEST_NAME, Manifest
from diffusion.cost.assumptions import Assumptions
from diffusion.cost.formulas import SEC_PER_HOUR, Number, Phase, hours, median
from diffusion.cost.prices import RULES
from diffusion.recipe import AnyRecipe, Recipe, RecipeError, load_any_recipe, to_dict
from diffusion.recipe.averaging import profiles
from diffusion.recipe.keys import MISSING
from diffusion.recipe.load import kind_of
from diffusion.recipe.manifest_rules import manifest_errors
from diffusion.recipe.merging import merge
from diffusion.recipe.reading import file_layers, override_layers
from diffusion.recipe.rules import PIXELS_PER_LATENT
from diffusion.recipe.schema import EvalSamples, RayEncoders, present
from diffusion.recipe.techniques import optimizer_of

# Of a sample in addition to its moments: key, caption and what MDS adds. LAION's captions have 60 to 100 letters; an assumption, 1 % at 256 px.
TEXT_BYTES = 200
FEW_PHOTOS, PHOTO_SUFFIXES = 10, ('.jpg', '.jpeg', '.png', '.webp')
MEMORY_SHARE = 0.94  # of a GPU; the rest is for fragments, NCCL and cuDNN's workspaces
DRAWN_TOGETHER = 16  # images of `eval.samples` that a GPU draws at once; those of a chunk that is not full count as drawn
PASSES, PASSES_OF_ADAPTERS = 3, 2  # of a step, in forward passes: frozen weights need no gradients of their own
FP32_BYTES = 4  # a parameter in a checkpoint: of the weights, and of each average


@dataclass(frozen=True)
class EncoderCounts:
    """The frozen networks. FLOP of a forward pass over one sample; bytes a sample at the highest moment of encoding an image."""

    downsampling: int  # pixels per latent along a side
    latent_channels: int
    text_length: int  # tokens of a caption
    text_width: int  # channels of the encoded text
    text_parameters: int
    vae_parameters: int
    text_flop: int
    vae_flop: int
    vae_peak_bytes: int


@dataclass(frozen=True)
class Counts:
    """Counts of one recipe."""

    num_parameters: int
    trained_parameters: int  # all of the network's, or those of its adapter and of its text encoders' adapters
    flop: int  # of the network's forward and backward pass over one sample
    saved_bytes: int  # activations of one sample that are kept for its backward pass (diffusion/families/counting/tracing.py)
    peak_bytes: int  # at the highest moment
    latent_channels: int  # of the network's input
    encoders: EncoderCounts | None  # None where their architecture is not known without their weights
    num_in_matrices: int = 0  # parameters that the optimizer treats as matrices; 0 for AdamW


def load_for_planning(path: str, overrides: Sequence[str]) -> AnyRecipe:
    """Load a recipe that is sound on one GPU at least, or raise RecipeError with all errors.

    What only training needs has stand-ins: the checkpoint of the phase before, the place of the data, and a folder of encoders.
    """
    layers = [*file_layers(Path(path), []), *override_layers(overrides, [])]
    given = to_dict(merge(kind_of(layers), layers, []))
    later = ['load_path=later'] if given['load_path'] == MISSING else []
    source = given['model']['encoders']['source'] if 'model' in given else ''  # if it is missing, load_any_recipe reports it
    if (source.startswith(('/', '.', '~')) or source.count('/') > 1) and not Path(source).is_dir():
        later.append('model.encoders.source=.')  # a folder of another machine; a Hub id is OWNER/NAME
    for section in ('data', 'eval'):
        nowhere = [
            name
            for name, stream in given[section]['streams'].items()
            if stream is not None and not any(stream[source] for source in ('remote', 'local', 'photos', 'drawn'))
        ]
        later += [f'{section}.streams.{name}.local=later' for name in nowhere]
    return load_any_recipe(path, [*overrides, *later], rules=RULES)


def known_images(recipe: AnyRecipe) -> int | None:
    """Return the samples of the recipe's datasets by their manifests, if all of them lie on this machine's disks, and of its photos and drawn images.

    Photos that are not on this machine count as FEW_PHOTOS; ManifestError if a manifest cannot be read, or contradicts the recipe.
    """
    streams, prepared = present(recipe.data.streams), 0
    for name, stream in list(streams.items()):
        if stream.drawn is not None or stream.photos is not None:
            del streams[name]
        if stream.drawn is not None:
            prepared += stream.drawn.num_images
        elif stream.photos is not None:
            folder = Path(stream.photos.folder)
            prepared += sum(path.suffix.lower() in PHOTO_SUFFIXES for path in folder.rglob('*')) if folder.is_dir() else FEW_PHOTOS
    folders = {name: Path(stream.local) for name, stream in streams.items() if stream.local is not None and stream.remote is None}
    if recipe.data.kind == 'synthetic' or len(folders) < len(streams) or not all((folder / MANIFEST_NAME).exists() for folder in folders.values()):
        return None
    manifests, errors = {name: Manifest.read(folder) for name, folder in folders.items()}, []
    for name, manifest in manifests.items():  # as train.py finds them, before a GPU is rented; of aspect buckets it looks at each
        if not (manifest.streams and recipe.data.aspect_buckets):
            found = manifest_errors(manifest, recipe, f'data.streams.{name}.local={folders[name]}')
            errors += [f'{folders[name]}: {error}' for error in found]
    if errors:
        raise ManifestError('\n'.join(errors))
    return prepared + sum(manifest.num_samples for manifest in manifests.values())


def num_shards(sharding: str, world_size: int, local_world_size: int) -> int:
    """Return the number of GPUs among which the weights and their state are divided, by the recipe's `train.sharding`."""
    return {'ddp': 1, 'zero2': world_size, 'hsdp': local_world_size}[sharding]


def state_bytes(
    recipe: AnyRecipe,
    num_trained: int,  # parameters
    num_in_matrices: int,  # of these, those that the optimizer treats as matrices
    num_gpus: int,
    gpus_per_node: int = 8,
    accumulates: bool = False,  # there are several micro-batches a step; FSDP2 keeps whole gradients until the last of them
    num_frozen: int = 0,  # parameters of the network that an adapter belongs to, in the precision that they are computed with
) -> dict[str, int]:
    """Return what one GPU holds from step to step or for the length of one, apart from activations, by purpose."""
    sharding, precision = recipe.train.sharding, recipe.train.precision
    shards = num_shards(sharding, num_gpus, min(num_gpus, gpus_per_node))
    share = -(-num_trained // shards)
    # In bf16, and under zero2 and hsdp without `bf16` the gathered fp32 weights.
    copies = {'amp_bf16': 2, 'bf16': 2, 'fp32': 0}[precision] + (4 if sharding != 'ddp' and precision != 'bf16' else 0)
    with_ddp = sharding == 'ddp' and precision != 'bf16' and num_gpus > 1  # it averages in buffers; FSDP2 reduces block by block instead
    return {
        'weights': 4 * share,
        'gradients': 4 * (num_trained if accumulates else share),
        'optimizer state': optimizer_of(recipe).state_bytes(share, -(-num_in_matrices // shards)),
        'EMA': 0 if recipe.ema.offload else 4 * share * len(profiles(recipe.ema)),
        'copies of the weights to compute with': copies * num_trained,
        "DDP's buckets": 4 * num_trained if with_ddp else 0,
        'frozen network': (4 if precision == 'fp32' else 2) * num_frozen,
    }


def divisors(number: int) -> list[int]:
    """Return all divisors, from the smallest."""
    return [size for size in range(1, number + 1) if number % size == 0]


@dataclass(frozen=True)
class Cluster:
    """A number of GPUs of one kind, in nodes."""

    gpu: str  # by the names of diffusion/cost/prices.yaml
    gpu_gb: float
    num_gpus: int
    gpus_per_node: int

    @property
    def num_nodes(self) -> int:
        return -(-self.num_gpus // self.gpus_per_node)


@dataclass(frozen=True)
class GpuMemory:
    """Bytes of one GPU while it trains, by purpose."""

    parts: dict[str, int]
    micro_size: int
    gpu_bytes: float

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.micro_size > 0 and self.total <= MEMORY_SHARE * self.gpu_bytes


def drawing_flop(num_images: int, guidance: Sequence[float], steps: int, pass_flop: float, decode_flop: float = 0.0) -> float:
    """FLOP of drawing so many images at each guidance scale; feature networks, which take a few percent more, are left out.

    FLOP are of the denoiser's forward pass over one image, and of the VAE's decoder; guidance above 1 takes a second pass, without the caption.
    """
    return num_images * sum(steps * (2 if scale > 1 else 1) * pass_flop + decode_flop for scale in guidance)


@dataclass(frozen=True)
class Facts:
    """One recipe and the counts of its networks."""

    recipe: AnyRecipe
    counts: Counts
    num_images: Number | None  # unique images; None for synthetic data, and where nothing is assumed of their size
    images_known: bool = False  # the manifests of the recipe's local data give their number

    @property
    def name(self) -> str:
        return self.recipe.name

    @property
    def resolution(self) -> int:
        return self.recipe.data.resolution

    @property
    def encodes_images(self) -> bool:
        """Whether the VAE is in the step: the data are images, and no other machines encode them."""
        return self.recipe.data.kind == 'images' and self.online is None

    @property
    def online(self) -> RayEncoders | None:
        """Encoders on machines of their own."""
        encoders = self.recipe.data.encoders
        return encoders.ray if encoders is not None and self.recipe.data.kind == 'images' else None

    @property
    def pixels_per_latent(self) -> int:
        """Along a side."""
        encoders = self.counts.encoders
        return encoders.downsampling if encoders is not None else PIXELS_PER_LATENT

    def on(self, num_gpus: int) -> 'Facts':
        """Return the facts with a micro-batch of at most a GPU's share of the batch."""
        batch = self.recipe.batch
        share, left_over = divmod(batch.global_size, num_gpus)
        if isinstance(batch.micro_size, str) or left_over or batch.micro_size <= share:
            return self
        return replace(self, recipe=replace(self.recipe, batch=replace(batch, micro_size=share)))

    @cached_property
    def num_batches(self) -> int:
        """Steps of the run; RecipeError if they are given in epochs of an unknown number of images, or of fewer than a batch."""
        duration = self.recipe.train.duration
        if duration.unit == 'ba':
            return duration.value
        if self.num_images is None:
            raise RecipeError(self.name, [f'train.duration: {self.recipe.train.duration} of how many images? give it in batches, such as 1000ba'])
        per_epoch = int(median(self.num_images) // self.recipe.batch.global_size)  # what is left over is no batch
        if any(stream.photos or stream.drawn for stream in present(self.recipe.data.streams).values()):  # repeated to fill the last batch
            per_epoch = math.ceil(median(self.num_images) / self.recipe.batch.global_size)
        if not per_epoch:
            size = f'{median(self.num_images):,.0f} images and batch.global_size={self.recipe.batch.global_size}'
            raise RecipeError(self.name, [f'train.duration: {self.recipe.train.duration} of {size}: an epoch has no whole batch'])
        return duration.value * per_epoch

    @property
    def phase(self) -> Phase:
        return Phase(self.resolution, self.num_batches * self.recipe.batch.global_size)

    @property
    def epochs(self) -> Number | None:
        return None if self.num_images is None or not np.all(self.num_images) else self.phase.num_samples / self.num_images

    @property
    def total_flop(self) -> float:
        return float(self.counts.flop) * self.phase.num_samples

    @property
    def encoder_flop(self) -> int | None:
        """Passes of the encoders in a step, for one sample: forward, and back where they have adapters."""
        encoders = self.counts.encoders
        return None if encoders is None else self.encodes_text * encoders.text_flop + self.encodes_images * encoders.vae_flop

    @property
    def encodes_text(self) -> bool:
        """Whether steps encode captions: those of photos and drawn images are stored before the first one, unless text encoders are trained."""
        streams, adapter = present(self.recipe.data.streams).values(), self.recipe.adapter
        return not streams or (adapter is not None and adapter.text_encoders) or any(not (one.photos or one.drawn) for one in streams)

    @property
    def latent_bytes(self) -> int:
        """Bytes of one sample of latents: mean and log variance of each channel in float16, and its text."""
        side = self.resolution // self.pixels_per_latent
        return 2 * 2 * self.counts.latent_channels * side**2 + TEXT_BYTES

    def sample_bytes(self, assumptions: Assumptions) -> Number:
        """Bytes that the loader reads for one sample."""
        return {'synthetic': 0, 'latents': self.latent_bytes, 'images': assumptions.preparation.bytes_per_image}[self.recipe.data.kind]

    @property
    def checkpoint_bytes(self) -> int:
        weights_and_averages = FP32_BYTES * self.counts.trained_parameters * (1 + len(profiles(self.recipe.ema)))
        return weights_and_averages + optimizer_of(self.recipe).state_bytes(self.counts.trained_parameters, self.counts.num_in_matrices)

    def save_interval_sec(self, images_per_sec: Number) -> Number:
        """Convert `checkpoint.every` to time."""
        every = self.recipe.checkpoint.every
        return every.value if every.unit == 'sec' else every.value * self.recipe.batch.global_size / images_per_sec

    def checkpoints_kept(self, images_per_sec: Number) -> int:
        """Count them in the end: the newest `keep` (-1: all) and the first of every `keep_every` batches, at most those written, and one."""
        seconds = hours(self.phase.num_samples, images_per_sec) * SEC_PER_HOUR
        num_saves = max(1, round(float(median(seconds / self.save_interval_sec(images_per_sec)))))
        keep, every = self.recipe.checkpoint.keep, self.recipe.checkpoint.keep_every
        return num_saves if keep == -1 else min(num_saves, keep + (self.num_batches // every.batches if every else 0))

    @property
    def num_scores(self) -> int:
        """How often `eval.samples` draws: before the first step, at intervals and at the end."""
        every = None if self.samples is None else self.samples.every
        return 0 if every is None else 1 + math.ceil(self.num_batches / every.batches)

    @property
    def samples(self) -> EvalSamples | None:
        """Images drawn and scored, by recipes of networks that draw."""
        return self.recipe.eval.samples if isinstance(self.recipe, Recipe) else None

    def score_hours(self, images_per_sec: Number, num_gpus: int) -> Number:
        """Wall hours of `eval.samples`, if drawing reaches the FLOP/s of the steps; GPUs without a chunk wait for those that have one."""
        samples, passes = self.samples, PASSES if self.recipe.adapter is None else PASSES_OF_ADAPTERS
        if samples is None:
            return 0.0
        drawn_by_one = DRAWN_TOGETHER * math.ceil(samples.count / DRAWN_TOGETHER / num_gpus)
        flop = drawing_flop(self.num_scores * drawn_by_one, [samples.guidance], samples.steps, self.counts.flop / passes)
        return flop / (self.counts.flop * images_per_sec / num_gpus) / SEC_PER_HOUR

    @property
    def per_sample_bytes(self) -> int:
        """Activations at the highest moment: the network's, or the VAE's before it."""
        encoders = self.counts.encoders
        return max(self.counts.peak_bytes, encoders.vae_peak_bytes if encoders is not None and self.encodes_images else 0)

    def memory(self, cluster: Cluster, micro_size: int | None = None) -> GpuMemory:
        """Return the memory of one GPU; `micro_size` is the recipe's unless given, and with `auto` the largest that should fit, 0 if none does."""
        recipe, encoders, counts = self.recipe, self.counts.encoders, self.counts
        per_gpu, gpu_bytes = recipe.batch.global_size // cluster.num_gpus, cluster.gpu_gb * 1e9
        trained, frozen = (counts.trained_parameters, counts.num_in_matrices), counts.num_parameters if recipe.adapter is not None else 0
        encoder_bytes = 0
        if encoders is not None:
            text_bytes = (4 if recipe.train.precision == 'fp32' else 2) * encoders.text_parameters * self.encodes_text
            encoder_bytes = text_bytes + 4 * encoders.vae_parameters

        def held(accumulates: bool) -> dict[str, int]:
            state = state_bytes(recipe, *trained, cluster.num_gpus, cluster.gpus_per_node, accumulates, frozen)
            return state | {'frozen encoders': encoder_bytes}

        if micro_size is None and recipe.batch.micro_size == 'auto':
            room_bytes = gpu_bytes * MEMORY_SHARE - sum(held(accumulates=True).values())
            micro_size = max((size for size in divisors(per_gpu) if size <= room_bytes // self.per_sample_bytes), default=0)
        elif micro_size is None:
            micro_size = int(recipe.batch.micro_size)
        parts = {name: num_bytes for name, num_bytes in held(accumulates=micro_size < per_gpu).items() if num_bytes}
        return GpuMemory({**parts, 'activations': micro_size * self.per_sample_bytes}, micro_size, gpu_bytes)

    def remedies(self, cluster: Cluster, counts_of: Callable[[AnyRecipe], Counts]) -> list[str]:
        """Return overrides under which the recipe would fit, each by itself, by the counts of the recipe so changed."""
        train, micro_size = self.recipe.train, self.memory(cluster).micro_size
        smaller = [size for size in divisors(self.recipe.batch.global_size // cluster.num_gpus) if size < micro_size]
        fitting_sizes = [size for size in smaller if self.memory(cluster, size).fits]
        remedies = [f'batch.micro_size={max(fitting_sizes)}'] if fitting_sizes else []
        changes: list[tuple[str, Any]] = [('checkpoint_activations', True)] if not train.checkpoint_activations else []
        changes += [('sharding', 'zero2')] if train.sharding == 'ddp' and self.recipe.adapter is None and isinstance(self.recipe, Recipe) else []
        for key, value in changes:
            changed = replace(self.recipe, train=replace(train, **{key: value}))
            if Facts(changed, counts_of(changed), self.num_images).memory(cluster, micro_size or 1).fits:
                blocks = ' train.compile=blocks' if key == 'sharding' and train.compile == 'network' else ''
                remedies.append(f'train.{key}={str(value).lower()}{blocks}')
        return remedies
