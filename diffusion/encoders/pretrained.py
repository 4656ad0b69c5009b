"""Frozen models from folders in the diffusers layout, or from the Hub: with exactly their own weights, or not at all.

`from_pretrained` initialises what a file lacks at random and skips what it holds in excess, with a warning that nobody reads.
What is written here, both versions of transformers that we support can read, whichever of them wrote it.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import requests
from huggingface_hub import configure_http_backend, constants, get_session
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils import hub as transformers_hub
from transformers.utils import logging as transformers_logging

from diffusion.common.text import first_line
from diffusion.contracts.errors import EncoderError

DIFFUSERS_LAYOUT = 'in the diffusers layout'
NUM_NAMED = 3  # weights that a message names
HUB_ATTEMPTS = 3
HUB_TIMEOUT_SEC = 10
WARN_OF_WEIGHTS = (
    'transformers.modeling_utils',
    'transformers.integrations.tensor_parallel',  # of a plan that nobody asked for
    'transformers.distributed.tensor_parallel',  # its name in transformers 5
    'diffusers.models.modeling_utils',
    'diffusers.models.model_loading_utils',
)


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
        except requests.RequestException as error:
            kind = type(error).__name__
    constants.HF_HUB_OFFLINE = transformers_hub._is_offline_mode = True  # type: ignore[attr-defined]
    configure_http_backend()  # ends the sessions that were opened before
    return f'{constants.ENDPOINT} cannot be reached ({kind}), and its cache on this machine ({constants.HF_HUB_CACHE}) does not hold it'


def load_model(kind: type, source: str, revision: str | None, subfolder: str, safetensors: bool = True) -> Any:
    """A model of class `kind` (diffusers or transformers), on the CPU, in float32.

    The libraries themselves know three harmless differences: buffers that are computed and not stored (files of older versions hold CLIP's
    `position_ids`), the names that the VAE's attention had in older versions (`query` for `to_q`), and the decoder next to T5's encoder.

    Args:
        kind: class with `from_pretrained`.
        source: local folder or Hub id.
        revision: commit of a Hub id.
        subfolder: of the model in it, such as `vae`.
        safetensors: False: from a pickle, which may hold tensors alone (both libraries see to that).

    Raises:
        EncoderError: it cannot be read, or has missing, unexpected or misshapen weights, some of which are named.
    """
    where = describe(f'{source}/{subfolder}'.rstrip('/'), revision)
    problem = _problem_of(source)
    try:
        with _without_lists_of_weights():
            model, info = kind.from_pretrained(  # type: ignore[attr-defined]
                source,
                subfolder=subfolder,
                revision=revision,
                use_safetensors=safetensors,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reports them; they are refused below
            )
    except Exception as error:  # of the Hub, of safetensors, of torch, or of a configuration that nobody foresaw
        layout = DIFFUSERS_LAYOUT if subfolder else f'with config.json and {"safetensors" if safetensors else "weights"}'
        raise _not_loaded(where, error, problem, layout) from error
    # Weights that an index names and no file holds stay on the meta device.
    absent = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    wrong = {
        'missing': {*info['missing_keys'], *absent},
        'unexpected': info['unexpected_keys'],
        'of another shape': [name if isinstance(name, str) else name[0] for name in info['mismatched_keys']],
    }
    found = [f'{len(names)} {what} ({_some(sorted(names))})' for what, names in wrong.items() if names]
    if found:
        raise EncoderError(
            f'{where}: its weights do not fit its config.json ({kind.__name__}): {"; ".join(found)}. '
            'Download or export the folder again; untrained weights would take the place of missing ones'
        )
    return model


def load_config(kind: type, source: str, revision: str | None, subfolder: str) -> Any:
    """The configuration of such a model: a dictionary for diffusers' kinds, an object for transformers' configurations.

    Raises:
        EncoderError: it cannot be read.
    """
    problem = _problem_of(source)
    try:
        if hasattr(kind, 'load_config'):
            defaults = {name: parameter.default for name, parameter in inspect.signature(kind.__init__).parameters.items()}  # type: ignore[misc]
            return {**defaults, **kind.load_config(source, subfolder=subfolder, revision=revision)}
        if Path(source).is_dir() and not Path(source, subfolder, 'config.json').is_file():  # transformers would give its defaults
            raise FileNotFoundError('there is no config.json')
        return kind.from_pretrained(source, subfolder=subfolder, revision=revision)  # type: ignore[attr-defined]
    except Exception as error:  # of the Hub, or of a file that is no JSON
        raise _not_loaded(describe(f'{source}/{subfolder}'.rstrip('/'), revision), error, problem) from error


def model_type(source: str, revision: str | None, subfolder: str) -> str | None:
    """Return the `model_type` that a model's config.json gives, such as `t5`; None if it gives none.

    Raises:
        EncoderError: it cannot be read.
    """
    problem = _problem_of(source)
    try:
        return PretrainedConfig.get_config_dict(source, subfolder=subfolder, revision=revision)[0].get('model_type')
    except Exception as error:  # of the Hub, or of a file that is no JSON
        raise _not_loaded(describe(f'{source}/{subfolder}'.rstrip('/'), revision), error, problem) from error


def load_tokenizer(source: str, revision: str | None, subfolder: str, kind: type = CLIPTokenizer) -> Any:
    """Return a tokenizer of class `kind`, CLIP's or T5's.

    Raises:
        EncoderError: it is missing or damaged.
    """
    where = describe(f'{source}/{subfolder}', revision)
    problem = _problem_of(source)
    files = 'vocab.json and merges.txt belong' if kind is CLIPTokenizer else 'tokenizer.json belongs'
    try:
        tokenizer = kind.from_pretrained(source, subfolder=subfolder, revision=revision)  # type: ignore[attr-defined]
        if len(tokenizer) <= len(tokenizer.all_special_tokens):  # transformers 5 makes an empty one of files that are not there
            raise ValueError('it knows no words')
        return tokenizer
    except Exception as error:  # a missing vocabulary is a TypeError
        if problem:
            raise _not_loaded(where, error, problem) from error
        raise EncoderError(f'{where}: cannot be loaded ({files} there): {first_line(error, with_type=True)}') from error


def save_text_encoder(text_encoder: Any, folder: Path) -> None:
    """Write it with the names of weights that published folders have: of CLIP's transformers 4 reads no others, 5 reads them as well as its own."""
    if not isinstance(text_encoder, (CLIPTextModel, CLIPTextModelWithProjection)):
        text_encoder.save_pretrained(folder)
        return
    weights = {
        name if name.startswith(('text_model.', 'text_projection.')) else f'text_model.{name}': tensor
        for name, tensor in text_encoder.state_dict().items()
    }
    text_encoder.save_pretrained(folder, state_dict=weights)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write it, CLIP's with vocab.json and merges.txt: transformers 4 reads no others, and 5 writes them into tokenizer.json alone."""
    tokenizer.save_pretrained(folder)
    if isinstance(tokenizer, CLIPTokenizer) and not (folder / 'vocab.json').exists():
        tokenizer.backend_tokenizer.model.save(str(folder))


@contextmanager
def _without_lists_of_weights() -> Iterator[None]:
    """The libraries warn of every weight that does not fit, by name, and advise to train it; `load_model` refuses them in a line. No bars, either."""
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # which transformers 5 draws even for a model of a second
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


def _problem_of(source: str) -> str:
    """Why a source cannot be asked for at the Hub; '' for one on this machine."""
    return '' if Path(source).exists() or source.startswith(('/', '.')) else hub_problem()


def _not_loaded(where: str, error: Exception, problem: str, layout: str = DIFFUSERS_LAYOUT) -> EncoderError:
    remedy = f'name a local folder {layout}, or a Hub id that this machine can reach'
    if problem and layout == DIFFUSERS_LAYOUT:
        remedy += ' (random encoders for a trial: python -m diffusion.stand_in FOLDER)'
    return EncoderError(f'{where}: cannot be loaded: {problem or first_line(error, with_type=True)}; {remedy}')


def describe(where: str, revision: str | None) -> str:
    return f'{where} at revision {revision}' if revision else where


def _some(names: list[str]) -> str:
    return ', '.join(names[:NUM_NAMED]) + (' ...' if len(names) > NUM_NAMED else '')
