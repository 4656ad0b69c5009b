"""Where a run's first weights come from, and that it is said what they are."""

import json
import shutil

import pytest
import torch
from huggingface_hub import constants

from diffusion.checkpoints.initial import load_weights
from diffusion.checkpoints.manifest import sha256_of
from diffusion.contracts.errors import CheckpointError
from diffusion.families.registry import build_network
from diffusion.recipe import RecipeError, load_recipe
from diffusion.recipe.schema import DiffusionSettings, Model
from diffusion.training.builder import build_trainer
from tests.conftest import REPOSITORY

UNET_FILE = 'unet/diffusion_pytorch_model.safetensors'
MODEL = Model('tiny', diffusion=DiffusionSettings())

COMMIT = '0123456789abcdef0123456789abcdef01234567'


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A model on the Hub, as huggingface_hub has cached it; returns its folder."""
    cache = tmp_path / 'hub'
    folder = cache / 'models--owner--model/snapshots' / COMMIT
    build_network('tiny').save_pretrained(folder / 'unet', safe_serialization=True)
    (folder / 'scheduler').mkdir()
    (folder / 'scheduler/scheduler_config.json').write_text('{"prediction_type": "v_prediction"}')
    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(cache))
    return folder


def test_a_published_model_is_loaded_and_named(published, capsys):
    unet = build_network('tiny')
    load_weights(unet, f'owner/model@{COMMIT}', MODEL)
    from safetensors.torch import load_file

    weights = load_file(published / UNET_FILE)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in unet.state_dict().items())
    said = capsys.readouterr().err
    assert f'load_path: starting from owner/model@{COMMIT}, {UNET_FILE}: published weights' in said
    assert 'set to prediction_type v_prediction, and this run trains with prediction_type epsilon' in said
    assert sha256_of(published / UNET_FILE) in said


def test_a_published_model_that_does_not_fit_is_refused(published):
    config = json.loads((published / 'unet/config.json').read_text())
    path = f'owner/model@{COMMIT}'
    (published / 'unet/config.json').write_text(json.dumps({**config, 'attention_head_dim': 4, 'sample_size': 96}))  # the same shapes, other heads
    with pytest.raises(CheckpointError, match='holds another network than model.network: attention_head_dim: 4 there'):
        load_weights(build_network('tiny'), path, MODEL)
    for content in ('[]', '{', '[' * 100_000):
        (published / 'unet/config.json').write_text(content)
        with pytest.raises(CheckpointError, match='config.json'):
            load_weights(build_network('tiny'), path, MODEL)
    (published / UNET_FILE).unlink()
    (published / 'unet/diffusion_pytorch_model.bin').write_bytes(b'a pickle')
    with pytest.raises(CheckpointError, match=f'has no {UNET_FILE}: only safetensors are read'):
        load_weights(build_network('tiny'), path, MODEL)
    shutil.rmtree(published)
    with pytest.raises(CheckpointError, match=f'owner/model at commit {COMMIT} cannot be fetched from the Hub'):
        load_weights(build_network('tiny'), path, MODEL)


def test_a_published_model_has_to_be_pinned(overrides):
    for revision in ('main', '', COMMIT[:7]):
        with pytest.raises(RecipeError, match=f"load_path: '{revision}' does not pin owner/model; write the 40 hex digits"):
            load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', [*overrides, f'load_path=owner/model@{revision}'])
    load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', [*overrides, f'load_path=owner/model@{COMMIT}'])
    with pytest.raises(CheckpointError, match='no such file or folder.*OWNER/NAME@COMMIT'):
        load_weights(build_network('tiny'), 'owner/model', MODEL)


def test_what_a_run_starts_from_is_said_with_its_batch_and_kind(overrides, tmp_path, capsys):
    trainer = build_trainer(load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', overrides))
    trainer.fit()
    trainer.close()
    capsys.readouterr()
    load_weights(build_network('tiny'), str(tmp_path / 'run'), MODEL)
    file = tmp_path / 'run/checkpoints/ba00000002.pt'
    expected = (
        f'load_path: starting from {tmp_path}/run, checkpoints/ba00000002.pt: batch 2, weights as trained (not the EMA); SHA-256 {sha256_of(file)}'
    )
    assert expected in capsys.readouterr().err
    export = tmp_path / 'export'
    build_network('tiny').save_pretrained(export / 'unet', safe_serialization=True)
    (export / 'export.json').write_text('{"weights": "ema", "batches": 1234}')
    load_weights(build_network('tiny'), str(export), MODEL)
    assert f'{export}, {UNET_FILE}: batch 1,234, EMA weights; SHA-256' in capsys.readouterr().err
