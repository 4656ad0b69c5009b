"""How a run begins with Weights & Biases: it asks nobody, waits for a minute at most, and logs offline where the server does not answer."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusion.recipe import RecipeError

if TYPE_CHECKING:
    from wandb import Run

TIMEOUT = 'WANDB_INIT_TIMEOUT'
ANSWER_SEC = 60.0  # W&B's own default is 90, and it retries silently


def start(init: Mapping[str, Any]) -> Run:
    """A run, of which one line says where it is to be seen.

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
    _say(f'connecting to {settings.base_url}, for {seconds:g} s at most')
    try:
        run = wandb.init(**{**init, 'settings': {**init.get('settings', {}), 'init_timeout': seconds}})
    except (AuthenticationError, UsageError) as error:
        raise RecipeError(
            str(init.get('name')), [f'log.to: wandb: {error} Set WANDB_API_KEY, or WANDB_MODE=offline, or leave wandb out of log.to']
        ) from error
    except CommError as error:
        _say(f'its server cannot be used: {error}')
        wandb.teardown()  # or the number of the run would still be in use
        _set_up()
        return _offline(init, 'offline')
    _say(run.url or 'connected')
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
        _say(f'offline; to upload: wandb sync {Path(run.dir).parent}')
    return run


def _say(text: str) -> None:
    print(f'W&B: {text}', file=sys.stderr, flush=True)
