"""Configuration files of model folders, checked before the libraries read them: they can name code, other models, and sizes that no machine has."""

import math
import time
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_session
from transformers.utils import cached_file

from diffusion.common.files import MAX_JSON_BYTES, parse_json_object, read_regular
from diffusion.contracts.errors import EncoderError

# What the libraries read of a folder besides weights and vocabularies.
NAMES = (
    'model_index.json',
    'config.json',
    'scheduler_config.json',
    'tokenizer_config.json',
    'preprocessor_config.json',
    'video_preprocessor_config.json',
    'processor_config.json',
    'generation_config.json',
    'adapter_config.json',
)
SIZED = ('config.json', 'scheduler_config.json')  # whose numbers become tensors and layers; others hold 10^30 for no limit
CODE = ('auto_map', 'custom_pipeline', 'custom_pipelines', 'trust_remote_code', 'base_model_name_or_path')  # the last: of an adapter, another model
SILENTLY = dict.fromkeys((f'_raise_exceptions_for_{what}' for what in ('gated_repo', 'missing_entries', 'connection_errors')), False)
MAX_SIZE = 2**24
MAX_LAYERS = 1000
HUB_ATTEMPTS = 3
HUB_TIMEOUT_SEC = 10
# Diffusers 0.42 hands it to a Hub's client that has no such thing any more.
warnings.filterwarnings('ignore', message='The `local_dir_use_symlinks` argument is deprecated', category=UserWarning)

REMEDY = 'take the folder from a source that you trust, or export it again'


def describe(where: str, revision: str | None) -> str:
    return f'{where} at revision {revision}' if revision else where


@cache
def hub_problem() -> str:
    """Return why the Hub cannot be asked, found out once in a process; '' if it answers. Call it before anything is loaded by a Hub id.

    If it does not answer, the libraries read its cache alone from then on. By themselves they ask six times, with 23 s and 3,000 characters on
    the terminal for each of up to ten files.
    """
    if constants.HF_HUB_OFFLINE:
        return f'it is not in the cache of the Hub on this machine ({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE says not to ask the Hub'
    for attempt in range(HUB_ATTEMPTS):
        time.sleep(attempt)
        try:
            get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_SEC)
            return ''
        except Exception as error:  # of httpx, or of httpx2 from huggingface-hub 2 on
            kind = type(error).__name__
    constants.HF_HUB_OFFLINE = True
    return f'{constants.ENDPOINT} cannot be reached ({kind}), and its cache on this machine ({constants.HF_HUB_CACHE}) does not hold it'


def hub_problem_of(source: str) -> str:
    """Return why a source cannot be asked for at the Hub; '' for one on this machine."""
    return '' if Path(source).exists() or source.startswith(('/', '.')) else hub_problem()


def read_configs(source: str, revision: str | None, subfolder: str) -> dict[str, dict[str, Any]]:
    """Return the configurations in a model's folder, local or on the Hub, by file name; those that it does not have are left out.

    Raises:
        EncoderError: one is damaged, names code or another model, or has numbers that no model has.
    """
    configs = {}
    hub_problem_of(source)  # before the libraries ask for file after file
    for name in NAMES:
        try:
            path = cached_file(source, name, subfolder=subfolder, revision=revision, **SILENTLY)
        except (OSError, ValueError):  # no such folder or Hub id, of which the libraries say more
            return {}
        if path is None:
            continue
        where = describe(str(Path(source, subfolder, name)), revision)
        try:
            configs[name] = parse_json_object(read_regular(Path(path), MAX_JSON_BYTES))
        except (OSError, ValueError) as error:
            raise EncoderError(f'{where}: {error}; {REMEDY}') from error
        for key, value in _entries(configs[name]):
            wrong = _flaw(key, value, name in SIZED)
            if wrong is not None:
                raise EncoderError(f'{where}: {key}: {str(value)[:60]} {wrong}; {REMEDY}')
    return configs


def _entries(content: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every key with its value, at any depth; what is in a list has the list's key."""
    left: list[tuple[str, Any]] = list(content.items())
    while left:
        key, value = left.pop()
        yield key, value
        if isinstance(value, dict):
            left += value.items()
        elif isinstance(value, list):
            left += [(key, entry) for entry in value]


def _flaw(key: str, value: Any, sized: bool) -> str | None:
    """Describe what is wrong with an entry; None if nothing is."""
    if key in CODE and value:
        return 'names code or another model, and nothing that a model folder names is run'
    if 'attn_implementation' in key and '/' in str(value):
        return 'names code on the Hub, and nothing that a model folder names is run'
    if isinstance(value, float) and math.isnan(value):
        return 'is not a number'
    if key == 'scaling_factor' and not (_is_number(value) and 0 < value < math.inf):
        return 'is no scale of latents: a number above 0 is'
    if key == 'shift_factor' and value is not None and not (_is_number(value) and math.isfinite(value)):
        return 'is no shift of latents: a finite number is'
    if sized and type(value) is int:
        limit = MAX_LAYERS if 'layers' in key else MAX_SIZE
        if value > limit:
            return f'is more than any model has: at most {limit:,}'
    return None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)
