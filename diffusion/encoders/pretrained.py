"""Frozen models from folders in the diffusers layout, or from the Hub: with exactly their own weights, or not at all.

`from_pretrained` initialises what a file lacks at random and skips what it holds in excess, with a warning that nobody reads.

Configuration files are checked before the libraries read them: they can name code, other models, and sizes that no machine has.
"""

import hashlib
import inspect
import json
import logging
import math
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, get_session
from torch import Tensor
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer, PretrainedConfig, PreTrainedTokenizerBase, Qwen2Tokenizer
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from diffusion.common.files import MAX_JSON_BYTES, parse_json_object, read_regular
from diffusion.common.text import first_line
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

DIFFUSERS_LAYOUT = 'in the diffusers layout'
NUM_NAMED = 3  # weights that a message names
FEW_WEIGHTS = 10**8  # that a network may have, whatever its files hold
LONGEST = 4096  # tokens; transformers stands in 1e30 for a length that a tokenizer does not say
WARN_OF_WEIGHTS = (
    'transformers.modeling_utils',
    'transformers.distributed.tensor_parallel',  # of a plan that nobody asked for
    'diffusers.models.modeling_utils',
    'diffusers.models.model_loading_utils',
)
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


def load_model(
    kind: type, source: str, revision: str | None, subfolder: str, safetensors: bool = True, dtype: torch.dtype = torch.float32, **options: Any
) -> Any:
    """A model of class `kind` (diffusers or transformers), on the CPU, in `dtype`.

    The libraries themselves know three harmless differences: buffers that are computed and not stored (files of older versions hold CLIP's
    `position_ids`), the names that the VAE's attention had in older versions (`query` for `to_q`), and the decoder next to T5's encoder.

    Args:
        kind: class with `from_pretrained`.
        source: local folder or Hub id.
        revision: commit of a Hub id.
        subfolder: of the model in it, such as `vae`.
        safetensors: False: from a pickle, which may hold tensors alone (both libraries see to that).
        options: what the class takes besides its configuration. A class of our own in its place would not know the names of earlier versions.

    Raises:
        EncoderError: it cannot be read, names code, or has missing, unexpected, misshapen or non-finite weights, some of which are named.
    """
    where = describe(f'{source}/{subfolder}'.rstrip('/'), revision)
    config = read_configs(source, revision, subfolder).get('config.json')
    try:
        if config is not None and Path(source).is_dir():
            _refuse_oversized(kind, config, Path(source, subfolder))
        with _without_lists_of_weights():
            model, info = kind.from_pretrained(  # type: ignore[attr-defined]
                source,
                subfolder=subfolder,
                revision=revision,
                use_safetensors=safetensors,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reports them; they are refused below
                torch_dtype=dtype,
                **options,
            )
    except Exception as error:  # of the Hub, of safetensors, of torch, or of a configuration that nobody foresaw
        layout = DIFFUSERS_LAYOUT if subfolder else f'with config.json and {"safetensors" if safetensors else "weights"}'
        raise _not_loaded(where, error, source, layout) from error
    # Weights that an index names and no file holds stay on the meta device.
    absent = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    wrong = {
        'missing': {*info['missing_keys'], *absent},
        'unexpected': info['unexpected_keys'],
        'of another shape': [name if isinstance(name, str) else name[0] for name in info['mismatched_keys']],
        'NaN or infinite': not_finite(model.state_dict()),
    }
    found = [f'{len(names)} {what} ({_some(sorted(names))})' for what, names in wrong.items() if names]
    if found:
        raise EncoderError(
            f'{where}: its weights do not fit its config.json ({kind.__name__}): {"; ".join(found)}. '
            'Download or export the folder again; untrained weights would take the place of missing ones'
        )
    return model


def _refuse_oversized(kind: Any, config: Mapping[str, Any], folder: Path) -> None:
    """Raises ValueError: the network of a configuration has many times the weights of its files, and building it would take all memory."""
    with torch.device('meta'):
        network = kind.from_config(config) if hasattr(kind, 'from_config') else kind(kind.config_class.from_dict(config))
    weights, stored = sum(weight.numel() for weight in network.parameters()), sum(file.stat().st_size for file in folder.iterdir())
    if weights > max(FEW_WEIGHTS, 2 * stored):
        raise ValueError(f'config.json describes a network of {weights:,} weights, the files hold {stored:,} bytes')


def not_finite(weights: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the weights with a NaN or an infinity."""
    return [
        name
        for name, weight in weights.items()
        if weight.is_floating_point() and not weight.is_meta and not weight.sum().isfinite() and not weight.isfinite().all()
    ]


def load_config(kind: type, source: str, revision: str | None, subfolder: str) -> Any:
    """The configuration of such a model: a dictionary for diffusers' kinds, an object for transformers' configurations.

    Raises:
        EncoderError: it cannot be read, or names code.
    """
    read_configs(source, revision, subfolder)
    try:
        if hasattr(kind, 'load_config'):
            defaults = {name: parameter.default for name, parameter in inspect.signature(kind.__init__).parameters.items()}  # type: ignore[misc]
            return {**defaults, **kind.load_config(source, subfolder=subfolder, revision=revision)}
        if Path(source).is_dir() and not Path(source, subfolder, 'config.json').is_file():  # transformers would give its defaults
            raise FileNotFoundError('there is no config.json')
        return kind.from_pretrained(source, subfolder=subfolder, revision=revision)  # type: ignore[attr-defined]
    except Exception as error:  # of the Hub, or of a file that is no JSON
        raise _not_loaded(describe(f'{source}/{subfolder}'.rstrip('/'), revision), error, source) from error


def model_type(source: str, revision: str | None, subfolder: str) -> str | None:
    """Return the `model_type` that a model's config.json gives, such as `t5`; None if it gives none.

    Raises:
        EncoderError: it cannot be read, or names code.
    """
    read_configs(source, revision, subfolder)
    try:
        return PretrainedConfig.get_config_dict(source, subfolder=subfolder, revision=revision)[0].get('model_type')
    except Exception as error:  # of the Hub, or of a file that is no JSON
        raise _not_loaded(describe(f'{source}/{subfolder}'.rstrip('/'), revision), error, source) from error


def load_tokenizer(source: str, revision: str | None, subfolder: str, encoder: Any, kind: type = CLIPTokenizer) -> Any:
    """Return a tokenizer of class `kind`, with `model_max_length` the tokens of a caption. Qwen's keeps that of a conversation: its pipelines say how
    much of it they read.

    Args:
        encoder: configuration of the text encoder that reads its tokens.

    Raises:
        EncoderError: it is missing or damaged, belongs to another encoder, or neither of them limits the length of a caption.
    """
    where = describe(f'{source}/{subfolder}'.rstrip('/'), revision)
    read_configs(source, revision, subfolder)
    files = 'vocab.json and merges.txt belong' if kind is CLIPTokenizer else 'tokenizer.json belongs'
    try:
        tokenizer = kind.from_pretrained(source, subfolder=subfolder, revision=revision)  # type: ignore[attr-defined]
        if is_empty(tokenizer):
            raise ValueError('it knows no words')
    except Exception as error:  # of the Hub, or of files that are damaged
        if hub_problem_of(source):
            raise _not_loaded(where, error, source) from error
        raise EncoderError(f'{where}: cannot be loaded ({files} there): {first_line(error, with_type=True)}') from error
    if len(tokenizer) > encoder.vocab_size:
        raise EncoderError(
            f'{where}: the tokenizer has {len(tokenizer):,} tokens, the text encoder knows {encoder.vocab_size:,}; they do not belong together: '
            'take both from one folder'
        )
    if issubclass(kind, Qwen2Tokenizer):
        if not tokenizer.chat_template:
            raise EncoderError(f'{where}: has no chat template, which captions are put into; copy chat_template.jinja from where it came')
        return tokenizer
    length, positions = tokenizer.model_max_length, getattr(encoder, 'max_position_embeddings', LONGEST + 1)
    if type(length) is not int or not 2 <= min(length, positions) <= LONGEST:
        raise EncoderError(
            f'{where}: gives no model_max_length of at most {LONGEST} and at least 2, but {length!r:.40}; write the tokens of a caption into its '
            f'tokenizer_config.json, such as "model_max_length": {77 if kind is CLIPTokenizer else 256}'
        )
    tokenizer.model_max_length = min(length, positions)  # pipelines read it, and what is exported
    return tokenizer


def is_empty(tokenizer: Any) -> bool:
    """Whether it knows no words: transformers makes such a one of files that are not there, T5's with a space."""
    return len(tokenizer) <= len(tokenizer.all_special_tokens) + 1


def load_scheduler(kind: Any, source: str, revision: str | None) -> Any:
    """Return the sampler of a model in the diffusers layout, of class `kind`.

    Raises:
        EncoderError: it is missing or damaged, or as `make_scheduler`.
    """
    where, config = describe(f'{source}/scheduler', revision), read_configs(source, revision, 'scheduler').get('scheduler_config.json')
    if config is None:
        raise _not_loaded(where, FileNotFoundError('no scheduler_config.json'), source)
    return make_scheduler(kind, config, where)


def make_scheduler(kind: Any, config: Mapping[str, Any], where: str) -> Any:
    """Return the sampler of class `kind` with the content of a scheduler_config.json.

    Raises:
        EncoderError: it is empty, no such sampler takes it, or its noise levels are none.
    """
    if 'num_train_timesteps' not in config:
        raise EncoderError(f'{where}: scheduler_config.json says nothing of how the network was trained; export or download the folder again')
    try:
        scheduler = kind.from_config(config)
    except Exception as error:  # of numbers that make no sampler
        raise EncoderError(f'{where}: is no {kind.__name__}: {first_line(error, with_type=True)}; export or download the folder again') from error
    betas, levels = getattr(scheduler, 'betas', torch.zeros(1)), torch.as_tensor(getattr(scheduler, 'sigmas', 0.0))
    if not (betas.min() >= 0 and betas.max() <= 1 and (levels >= 0).all() and levels.isfinite().all()):
        raise EncoderError(f'{where}: scheduler_config.json has betas or shifts that make no noise levels; export or download the folder again')
    return scheduler


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Digest of all that decides which tokens a caption becomes, after `load_tokenizer`."""
    steps, added = json.loads(tokenizer.backend_tokenizer.to_str()), tokenizer.added_tokens_decoder
    if isinstance(tokenizer, CLIPTokenizer):  # whose class decides the rest
        steps = {'merges': steps['model']['merges']}
    decisive = [
        {name: value for name, value in steps.items() if name not in ('version', 'truncation', 'padding', 'decoder')},
        tokenizer.get_vocab(),
        [repr(added[number]) for number in sorted(added)],
        [str(getattr(tokenizer, f'{name}_token')) for name in ('bos', 'eos', 'unk', 'pad')],
        [tokenizer.model_max_length, tokenizer.padding_side, tokenizer.truncation_side],
        *([tokenizer.chat_template] if tokenizer.chat_template else []),
    ]
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def save_text_encoder(text_encoder: Any, folder: Path) -> None:
    """Write it with the names of weights that published folders have, by which other tools find CLIP's: transformers 4, which diffusers 0.42 takes
    too, and diffusers' converter to a single file, which ComfyUI and AUTOMATIC1111 read."""
    if not isinstance(text_encoder, (CLIPTextModel, CLIPTextModelWithProjection)):
        text_encoder.save_pretrained(folder)
        return
    weights = {
        name if name.startswith(('text_model.', 'text_projection.')) else f'text_model.{name}': tensor
        for name, tensor in text_encoder.state_dict().items()
    }
    text_encoder.save_pretrained(folder, state_dict=weights)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write it, CLIP's with vocab.json and merges.txt as published folders have them: transformers 4, which diffusers 0.42 takes too, needs them."""
    tokenizer.save_pretrained(folder)
    if isinstance(tokenizer, CLIPTokenizer):
        tokenizer.backend_tokenizer.model.save(str(folder))


@contextmanager
def _without_lists_of_weights() -> Iterator[None]:
    """The libraries warn of every weight that does not fit, by name, and advise to train it; `load_model` refuses them in a line. No bars, either."""
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # which transformers draws even for a model of a second
    loggers = [logging.getLogger(name) for name in WARN_OF_WEIGHTS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()


def _not_loaded(where: str, error: Exception, source: str, layout: str = DIFFUSERS_LAYOUT) -> EncoderError:
    problem = hub_problem_of(source)
    remedy = f'name a local folder {layout}, or a Hub id that this machine can reach'
    if problem and layout == DIFFUSERS_LAYOUT:
        remedy += ' (random encoders for a trial: python -m diffusion.stand_in FOLDER)'
    return EncoderError(f'{where}: cannot be loaded: {problem or first_line(error, with_type=True)}; {remedy}')


def _some(names: list[str]) -> str:
    return ', '.join(names[:NUM_NAMED]) + (' ...' if len(names) > NUM_NAMED else '')
