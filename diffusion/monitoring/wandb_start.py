"""Start Weights & Biases without questions: wait a minute at most, and log offline if the server does not answer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusion.common.text import print_message
from diffusion.recipe import RecipeError

if TYPE_CHECKING:
    from wandb import Run

TIMEOUT = 'WANDB_INIT_TIMEOUT'
ANSWER_SEC = 60.0  # W&B's own default is 90, and it retries silently


def start(init: Mapping[str, Any]) -> Run:
    """Start a W&B run and print its address.

    Args:
        init: arguments of wandb.init.

    Raises:
        RecipeError: W&B knows no credentials, or refuses them.
    """
    import wandb
    from wandb.errors import AuthenticationError, CommError, UsageError

    settings = _set_up()
    if settings.mode in ('offline', 'dryrun', 'disabled'):
        return _offline(init, settings.mode)
    seconds = float(os.environ.get(TIMEOUT, ANSWER_SEC))
    _log(f'connecting to {settings.base_url}, for {seconds:g} s at most')
    try:
        run = wandb.init(**{**init, 'settings': {**init.get('settings', {}), 'init_timeout': seconds}})
    except (AuthenticationError, UsageError) as error:
        raise RecipeError(
            str(init.get('name')), [f'log.to: wandb: {error} Set WANDB_API_KEY, or WANDB_MODE=offline, or leave wandb out of log.to']
        ) from error
    except CommError as error:
        _log(f'its server cannot be used: {error}')
        wandb.teardown()  # or the number of the run would still be in use
        _set_up()
        return _offline(init, 'offline')
    _log(run.url or 'connected')
    return run


def _set_up() -> Any:
    """Before the first use: without hints and headers, for which `start` has a line, and without the questions at a terminal, for whose answer all
    GPUs would wait. Warnings and errors stay."""
    import wandb

    return wandb.setup(wandb.Settings(show_info=False)).settings


def _offline(init: Mapping[str, Any], mode: str) -> Run:
    import wandb

    # Offline nothing is known that could be resumed, and W&B would warn of it.
    run = wandb.init(**{**{name: value for name, value in init.items() if name != 'resume'}, 'mode': mode})
    if mode != 'disabled':
        _log(f'offline; to upload: wandb sync {Path(run.dir).parent}')
    return run


def _log(text: str) -> None:
    print_message(f'W&B: {text}')
