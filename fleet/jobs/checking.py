"""A job against its recipe: overrides that owners may give, inputs in their places, and the recipe loader's own judgement.

Overrides come from strangers and run on machines of others: what may be changed is listed, nothing that names a file, a place or a service is.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from diffusion.common.command_line import LARGEST_SEED
from diffusion.common.text import did_you_mean
from diffusion.contracts.errors import InputError
from diffusion.recipe import Recipe, RecipeError
from diffusion.recipe.load import merged_recipe
from diffusion.recipe.reading import Layer, file_layers
from diffusion.recipe.rules import RULES, encoders_are_pinned
from diffusion.recipe.schema import LARGEST_COUNT
from fleet.jobs.spec import MAX_PROMPT_CHARS, NAME, JobError, JobSpec

RECIPES = Path(__file__).parents[2] / 'yamls'
RECIPE_NAME = re.compile(r'(?:yamls/)?([A-Za-z0-9][A-Za-z0-9._-]*\.yaml)')
# `*` is the name of a stream. Nothing here is a path, an address or an account.
ALLOWED = (
    'seed',
    'train.duration', 'train.checkpoint_activations', 'train.precision', 'train.attention',
    'batch.global_size', 'batch.micro_size',
    'optimizer.lr', 'optimizer.weight_decay', 'optimizer.betas', 'optimizer.eps', 'optimizer.clip_norm', 'optimizer.warmup', 'optimizer.decay',
    'optimizer.muon', 'optimizer.muon.momentum', 'optimizer.muon.steps',
    'ema.half_life', 'ema.sigma_rel', 'ema.start', 'ema.interval',
    'adapter.rank', 'adapter.alpha', 'adapter.targets', 'adapter.text_encoders', 'adapter.text_lr', 'adapter.text_weight_decay',
    'data.resolution', 'data.aspect_buckets', 'data.flip', 'data.caption_dropout', 'data.shuffle',
    'data.streams.*', 'data.streams.*.proportion', 'data.streams.*.loss_weight', 'data.streams.*.photos.caption',
    'data.streams.*.drawn.prompts', 'data.streams.*.drawn.num_images', 'data.streams.*.drawn.seed', 'data.streams.*.drawn.guidance',
    'data.streams.*.drawn.steps',
    'checkpoint.every',
    'faults.non_finite', 'faults.max_skipped', 'faults.stall_sec',
)  # fmt: skip
BASE = 'base'  # the input that is the model
LARGEST_OVERRIDES = 64 << 10  # characters; Linux takes 128 KiB an argument
MOST_DRAWN = 10_000  # class images of a stream; a few hundred are usual
_NOT_PLAIN = re.compile(r'[^ -~]|\$')  # only texts hold them, where they may be escaped


@dataclass(frozen=True)
class CheckedJob:
    """A job that its recipe accepts.

    Attributes:
        num_steps: of the whole job; 0 where the recipe counts otherwise than in batches.
    """

    spec: JobSpec
    recipe: Recipe
    num_steps: int


def recipe_path(name: str, recipes: Path = RECIPES) -> Path:
    """The file of a recipe by its name.

    Raises:
        InputError: there is none.
    """
    found = RECIPE_NAME.fullmatch(name)
    if found and (recipes / found[1]).is_file():
        return recipes / found[1]
    known = sorted(path.name for path in recipes.glob('*.yaml'))
    raise InputError(f"recipe: there are {', '.join(known)}, and no '{name[:80]}'{did_you_mean(name.removeprefix('yamls/'), known)}")


def check_job(spec: JobSpec, source: str, recipes: Path = RECIPES) -> CheckedJob:
    """Judge a job as a worker would, before one is paid for.

    Args:
        source: of the job, for messages.
        recipes: folder of the recipes.

    Raises:
        JobError: with every mistake in overrides and inputs, and then every mistake that the recipe loader finds.
    """
    try:
        path = recipe_path(spec.recipe, recipes)
    except InputError as error:
        raise JobError(source, [str(error)]) from error
    plain = [override_of(key, value) for key, value in spec.overrides.items()]
    if (num_chars := sum(map(len, plain))) > LARGEST_OVERRIDES:  # nothing may walk them: YAML reads 20,000 values in seconds
        raise JobError(source, [f'overrides: {num_chars:,} characters; at most {LARGEST_OVERRIDES:,} fit into a command line'])
    errors = [refusal for key in spec.overrides if (refusal := _refusal(key, spec.overrides[key]))]
    try:
        layers = _layers(path)
        errors += _misplaced(spec, merged_recipe(Recipe, str(path), layers, [], plain))
        folders = {name: f'inputs/{name}' for name in spec.inputs}
        rules = [rule for rule in RULES if BASE not in folders or rule is not encoders_are_pinned]  # inputs have digests; the folder is the worker's
        recipe = merged_recipe(Recipe, str(path), layers, [], recipe_overrides(spec, folders), rules=rules) if not errors else None
        errors += _too_long_for_a_job(recipe) if recipe is not None else []
    except RecipeError as error:
        raise JobError(source, [*errors, *error.errors]) from error
    if recipe is None or errors:
        raise JobError(source, errors)
    return CheckedJob(spec, recipe, recipe.train.duration.batches)


@lru_cache(maxsize=256)  # reading a recipe and those that it is based on takes nine tenths of a judgement
def _layers(path: Path) -> list[Layer]:
    """Raises RecipeError: the file is no YAML."""
    layers = file_layers(path, errors := list[str]())
    if errors:
        raise RecipeError(str(path), errors)
    return layers


def recipe_digests(recipes: Path = RECIPES) -> dict[str, str]:
    """Return the SHA-256 of what each recipe of a folder says, with those that it is based on, by name; comments and order of keys do not count.

    Files that cannot be read are left out: nobody can run them.
    """
    found = {}
    for path in sorted(recipes.glob('*.yaml')):
        with suppress(RecipeError):
            layers = [content for _, content in _layers(path)]
            found[path.name] = hashlib.sha256(json.dumps(layers, sort_keys=True).encode()).hexdigest()
    return found


def judgement_key(spec: JobSpec) -> str:
    """Return what the recipe's judgement of a job depends on, as a job in JSON: by this text it is remembered."""
    inputs = {name: {'url': 's3://', 'sha256': '0' * 64, 'bytes': 0} for name in spec.inputs}
    overrides = {key: _judged_alike(key, value) for key, value in spec.overrides.items()}
    return json.dumps({'recipe': spec.recipe, 'overrides': overrides, 'inputs': inputs}, sort_keys=True)


def _judged_alike(key: str, value: object) -> object:
    """Return what stands for an override in the key: values of which a recipe asks for no more than type and range, and which differ in each of a
    thousand jobs, are one; others stand for themselves."""
    match key.rpartition('.')[2], value:
        case 'seed', int() if not isinstance(value, bool) and 0 <= value <= LARGEST_SEED:
            return 0
        case 'caption', str() if _is_plain(value):
            return 'a'
        case 'prompts', list() if value and all(isinstance(text, str) and _is_plain(text) for text in value):
            return ['a'] * len(value)
    return value


def _is_plain(text: str) -> bool:
    """Whether a recipe has nothing to say of a text; of secrets, references and halves of characters the job's own reader has said it."""
    return 0 < len(text.strip()) <= len(text) <= MAX_PROMPT_CHARS


def queue_mistakes(spec: JobSpec, may_be_http: bool = False) -> list[str]:
    """List what a queue refuses beside the recipe's judgement; `fleet run`, which sends no notices, takes it.

    Args:
        may_be_http: whether the service sends notices without TLS, to networks that it was told of.
    """
    if may_be_http or not (spec.notify.webhook or '').startswith('http://'):
        return []
    return [f'notify.webhook: {spec.notify.webhook} must begin with https://; http:// needs a service with --allow-notices-to']


def recipe_overrides(spec: JobSpec, folders: Mapping[str, str]) -> list[str]:
    """The `key=value` arguments of train.py for a job whose inputs are in these folders, by name."""
    given = [override_of(key, value) for key, value in spec.overrides.items()]
    for name, folder in folders.items():
        if name == BASE:
            given += [override_of('model.encoders.source', folder), 'model.encoders.revision=null']
        else:
            given.append(override_of(f'data.streams.{name}.photos.folder', folder))
    return given


def override_of(key: str, value: object) -> str:
    """`key=value` in ASCII, which arrives as the same value: Composer's launcher puts the environment in the place of `$NAME`, and YAML, unlike JSON,
    writes characters beyond U+FFFF with eight digits and reads no control characters."""
    text = json.dumps(value, ensure_ascii=False)
    return f'{key}={_NOT_PLAIN.sub(lambda found: _escaped(found[0]), text)}'


def _escaped(character: str) -> str:
    number = ord(character)
    return f'\\u{number:04x}' if number <= 0xFFFF else f'\\U{number:08x}'


def _refusal(key: str, value: object) -> str:
    """Why an override is refused; '' if it is not."""
    words = key.split('.')
    fits = any(
        len(words) == len(parts) and all(part == word or (part == '*' and NAME.fullmatch(word)) for part, word in zip(parts, words, strict=True))
        for parts in (allowed.split('.') for allowed in ALLOWED)
    )
    if not fits:
        return f'overrides.{key[:80]}: owners may not set it, ask the operator for a recipe that has it{did_you_mean(key, ALLOWED)}'
    if len(words) == 3 and value is not None:
        return f'overrides.{key}: a whole stream may only be left out, with null'
    return ''


def _too_long_for_a_job(recipe: Recipe) -> list[str]:
    """List what a recipe may say and a job may not: a machine is paid for it, and its progress is a share of its batches."""
    duration = recipe.train.duration
    found = []
    if duration.unit != 'ba':
        found.append(f'train.duration: {duration}; a job of a fleet says in batches how long it trains, such as 800ba')
    elif duration.batches > LARGEST_COUNT:
        found.append(f'train.duration: {str(duration)[:40]}; a job of a fleet has at most {LARGEST_COUNT:,} batches')
    found += [
        f'data.streams.{name}.drawn.num_images: {stream.drawn.num_images:,}; a machine draws {MOST_DRAWN:,} at most'
        for name, stream in recipe.data.streams.items()
        if stream is not None and stream.drawn is not None and stream.drawn.num_images > MOST_DRAWN
    ]
    return found


def _misplaced(spec: JobSpec, recipe: Recipe) -> list[str]:
    streams = {name: stream for name, stream in recipe.data.streams.items() if stream is not None}
    photos = [name for name, stream in streams.items() if stream.photos is not None]
    errors = [f'inputs: {name} is missing: a folder of photos of the stream {name} of {spec.recipe}' for name in photos if name not in spec.inputs]
    errors += [f'inputs: {name} is none of this recipe; it takes {", ".join([*photos, BASE])}' for name in spec.inputs if name not in (*photos, BASE)]
    if BASE not in spec.inputs and recipe.model.encoders.revision is None:
        errors.append(f'inputs: {BASE} is missing: the model of {spec.recipe} is {recipe.model.encoders.source}, a folder that machines do not have')
    errors += [
        f'recipe: its stream {name} is read from storage, whose keys a worker does not have; a fleet trains on inputs'
        for name, stream in streams.items() if stream.remote is not None
    ]  # fmt: skip
    return errors
