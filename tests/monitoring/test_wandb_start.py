"""The beginning of a run with the real W&B client, and no server."""

import sys

import pytest

from diffusion.monitoring import loggers
from diffusion.recipe import RecipeError

wandb = pytest.importorskip('wandb')

NOBODY = 'http://127.0.0.1:9'


@pytest.fixture
def client(monkeypatch, tmp_path):
    """A client that has not begun, and finds no credentials on this machine."""
    wandb.teardown()
    for name in ('WANDB_API_KEY', 'WANDB_IDENTITY_TOKEN_FILE', 'WANDB_MODE'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('NETRC', str(tmp_path / 'netrc'))
    monkeypatch.setenv('WANDB_CONFIG_DIR', str(tmp_path))
    monkeypatch.setenv('WANDB_BASE_URL', NOBODY)
    yield monkeypatch
    wandb.finish()
    wandb.teardown()


def arguments(folder):
    return {'project': 'x', 'name': 'n', 'id': 'abc', 'resume': 'allow', 'dir': str(folder), 'settings': {'disable_git': True, 'quiet': True}}


def test_a_server_that_does_not_answer_costs_seconds_and_the_run_logs_offline(client, tmp_path, capfd):
    client.setenv('WANDB_API_KEY', 'a' * 40)
    client.setenv('WANDB_INIT_TIMEOUT', '1')
    run = loggers.start_wandb(arguments(tmp_path))
    assert run.offline
    assert run.id == 'abc'
    first, why, offline = capfd.readouterr().err.splitlines()
    assert first == f'W&B: connecting to {NOBODY}, for 1 s at most'
    assert NOBODY in why
    (folder,) = (tmp_path / 'wandb').glob('offline-run-*-abc')
    assert offline == f'W&B: offline; to upload: wandb sync {folder}'


def test_nobody_is_asked_for_credentials(client, tmp_path, monkeypatch):
    for stream in ('stdin', 'stderr'):
        monkeypatch.setattr(getattr(sys, stream), 'isatty', lambda: True, raising=False)
    monkeypatch.setattr('click.prompt', lambda *_, **__: pytest.fail('asked'))
    with pytest.raises(RecipeError, match=r'log\.to: wandb: No API key configured.* Set WANDB_API_KEY'):
        loggers.start_wandb(arguments(tmp_path))


def test_an_offline_run_says_one_line(client, recipe, tmp_path, capfd):
    client.setenv('WANDB_MODE', 'offline')
    (tmp_path / 'run').mkdir()
    recipe.log.project = 'x'
    logger = loggers.build('wandb', recipe, tmp_path / 'run')
    logger.init(None, None)
    logger.log_metrics({'loss/train/total': 0.5}, 1)
    logger.post_close()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f'W&B: offline; to upload: wandb sync {tmp_path}/run/wandb/offline-run-')
