"""The trainer as a user meets it: train.py, stopped, killed, resumed, started from a checkpoint."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from composer.core import Callback

from diffusion.checkpoints.initial import load_weights
from diffusion.checkpoints.reading import batches_trained, ema_weights, find_checkpoint, read_checkpoint, training_weights
from diffusion.contracts.errors import CheckpointError
from diffusion.families.registry import build_network
from diffusion.monitoring.report.run import read_log
from diffusion.recipe import load_recipe
from diffusion.recipe.schema import DiffusionSettings, Model
from diffusion.training.builder import build_model, build_trainer
from tests.conftest import REPOSITORY, run_python
from tests.faults.driver import YAML, Forked

MODEL = Model('tiny', diffusion=DiffusionSettings())


def train_py(overrides, tmp_path, *more, code=0):
    """What the command prints."""
    (tmp_path / 'output.txt').unlink(missing_ok=True)
    with Forked([*overrides, *more], tmp_path / 'output.txt') as process:
        return process.wait(code)


def fit(recipe):
    trainer = build_trainer(recipe)
    trainer.fit()
    trainer.close()
    return trainer


def load(overrides, *more):
    return load_recipe(REPOSITORY / YAML, [*overrides, *more])


def test_training_learns(latents, overrides, tmp_path):
    fit(load(overrides, 'data.kind=latents', f'data.streams.train.local={latents}', 'train.duration=60ba', 'optimizer.lr=1e-2'))
    losses = [record['loss/train/total'] for record in read_log(tmp_path / 'run/log.jsonl') if 'loss/train/total' in record]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


def test_a_resumed_run_equals_an_uninterrupted_one(latents, overrides, tmp_path):
    """Noise, timesteps and dropout are keyed by sample, so not even the middle of an epoch needs random state."""
    base = [*overrides, 'data.kind=latents', f'data.streams.train.local={latents}', 'checkpoint.every=4ba', 'data.caption_dropout=0.3']
    for name, durations in (('whole', ('10ba',)), ('stopped', ('4ba', '10ba'))):
        for duration in durations:
            fit(load(base, f'run_folder={tmp_path}/{name}', f'train.duration={duration}'))
    whole, stopped = (read_checkpoint(find_checkpoint(tmp_path / name)) for name in ('whole', 'stopped'))
    for weights in (training_weights, ema_weights):
        a, b = weights(whole), weights(stopped)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)
    for state_a, state_b in zip(whole['optimizers']['AdamW']['state'].values(), stopped['optimizers']['AdamW']['state'].values(), strict=True):
        assert all(torch.equal(torch.as_tensor(state_a[key]), torch.as_tensor(state_b[key])) for key in state_a)
    assert [record['batch'] for record in read_log(tmp_path / 'stopped/log.jsonl')] == list(range(1, 11))


def test_the_checkpoint_keeps_training_weights_and_average_apart(overrides, tmp_path):
    trainer = fit(load(overrides, 'train.duration=6ba', 'ema.half_life=2ba', 'eval.every=2ba', 'optimizer.lr=1e-3'))
    state = read_checkpoint(find_checkpoint(tmp_path / 'run'))
    trained, average = training_weights(state), ema_weights(state)
    assert trained.keys() == average.keys() == trainer.state.model.network.state_dict().keys()
    assert any(not torch.equal(trained[name], average[name]) for name in trained)
    for name, tensor in trainer.state.model.network.state_dict().items():  # after fit the live weights are the training ones
        assert torch.equal(tensor, trained[name])


def test_evaluation_uses_the_average_and_repeats_to_the_bit(latents, overrides, tmp_path):
    recipe = load(
        overrides, 'data.kind=latents', f'data.streams.train.local={latents}', 'eval.every=1ba', f'eval.streams.val.local={latents}',
        'train.duration=3ba', 'optimizer.lr=1e-2', 'ema.half_life=5ba', 'log.samples.every=null',
    )  # fmt: skip
    trainer = build_trainer(recipe)
    trainer.fit()
    logged = read_log(tmp_path / 'run/log.jsonl')[-1]['metrics/eval/loss']
    bins = [name for name in read_log(tmp_path / 'run/log.jsonl')[-1] if name.startswith('metrics/eval/loss_t')]
    assert len(bins) == 10
    values = []
    for _ in range(2):
        trainer.eval()
        values.append({name: float(metric.compute()) for name, metric in trainer.state.eval_metrics['eval'].items()})
    assert values[0] == values[1]
    assert values[0]['loss'] == logged  # both with the average; nothing has moved since
    trainer.state.algorithms[1].averages = []
    trainer.eval()
    assert float(trainer.state.eval_metrics['eval']['loss'].compute()) != logged  # the training weights judge differently
    trainer.close()


def test_nothing_is_averaged_before_the_start(overrides, tmp_path):
    trainer = fit(load(overrides, 'train.duration=3ba', 'ema.start=2ba', 'checkpoint.every=1ba', 'checkpoint.keep=-1'))
    folder = tmp_path / 'run/checkpoints'
    assert ema_weights(read_checkpoint(folder / 'ba00000001.pt')) is None
    assert ema_weights(read_checkpoint(folder / 'ba00000002.pt')) is not None
    assert trainer.state.algorithms[1].averages


def test_phase_two_starts_from_the_weights_of_phase_one(overrides, tmp_path):
    fit(load(overrides))
    first = training_weights(read_checkpoint(find_checkpoint(tmp_path / 'run')))
    second = load_recipe(
        REPOSITORY / 'yamls/sd2-base-512.yaml', [*overrides, 'data.resolution=64', f'load_path={tmp_path}/run', f'run_folder={tmp_path}/second']
    )
    model = build_model(second, torch.device('cpu'))
    assert all(torch.equal(tensor, first[name]) for name, tensor in model.network.state_dict().items())
    fit(second)
    assert batches_trained(read_checkpoint(find_checkpoint(tmp_path / 'second'))) == 2  # counts from zero again


def test_a_checkpoint_that_is_none_is_refused(tmp_path):
    class Payload:
        def __reduce__(self):
            return (os.system, (f'touch {tmp_path}/executed',))

    torch.save({'state': Payload()}, tmp_path / 'evil.pt')
    (tmp_path / 'torn.pt').write_bytes(b'PK\x03\x04 torn')
    torch.save({'state': {'model': [1]}}, tmp_path / 'list.pt')
    torch.save({'state': {'model': {'network.conv_in.weight': 3}}}, tmp_path / 'number.pt')
    torch.save([1], tmp_path / 'top.pt')
    for name, message in (
        ('evil.pt', 'refused'),
        ('torn.pt', 'not a checkpoint'),
        ('none.pt', 'no checkpoint'),
        ('list.pt', 'the checkpoint has a list in the place of `model`'),
        ('number.pt', 'something else than weights by name in the place of `model`'),
        ('top.pt', 'it has no `state`'),
    ):
        with pytest.raises(CheckpointError, match=f'^load_path: {tmp_path}/{name}: .*{message}'):
            load_weights(build_network('tiny'), str(tmp_path / name), MODEL)
    assert not (tmp_path / 'executed').exists()


def test_another_recipe_on_the_same_run_is_refused_by_field(overrides, tmp_path):
    fit(load(overrides))
    wrong = train_py(overrides, tmp_path, 'optimizer.lr=0.05', 'seed=99', 'train.duration=4ba', 'log.every=7', code=64)
    assert 'optimizer.lr: 0.0001 -> 0.05' in wrong
    assert 'seed: 17 -> 99' in wrong
    other = train_py(overrides, tmp_path, 'model.network=shapes', code=64)
    assert 'model.network: tiny -> shapes' in other
    assert 'Traceback' not in wrong
    assert load_recipe(tmp_path / 'run/recipe.yaml').seed == 17  # nothing was overwritten
    fit(load(overrides, 'train.duration=3ba', 'log.every=7', 'batch.micro_size=8', 'name=other'))  # these may change


def test_weights_of_another_network_are_refused(overrides, tmp_path):
    fit(load(overrides))
    with pytest.raises(CheckpointError, match='holds another network than model.network'):
        load_weights(build_network('shapes'), str(tmp_path / 'run'), MODEL)


def test_load_path_is_read_at_the_first_start_only(overrides, tmp_path):
    fit(load(overrides))
    shutil.copytree(tmp_path / 'run', tmp_path / 'phase1')
    second = [*overrides, f'run_folder={tmp_path}/second', f'load_path={tmp_path}/phase1']
    fit(load(second))
    shutil.rmtree(tmp_path / 'phase1')
    fit(load(second, 'train.duration=3ba'))
    with pytest.raises(CheckpointError, match='no checkpoint'):
        fit(load(second, f'run_folder={tmp_path}/third'))


def test_load_path_from_a_url(overrides, tmp_path):
    fit(load(overrides))
    shutil.copyfile(find_checkpoint(tmp_path / 'run'), tmp_path / 'phase1.pt')
    server = ThreadingHTTPServer(('127.0.0.1', 0), partial(SimpleHTTPRequestHandler, directory=tmp_path))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f'http://127.0.0.1:{server.server_port}'
    unet = build_network('tiny')
    load_weights(unet, f'{url}/phase1.pt', MODEL)
    first = training_weights(read_checkpoint(tmp_path / 'phase1.pt'))
    assert all(torch.equal(tensor, first[name]) for name, tensor in unet.state_dict().items())
    for suffix in ('pt', 'json'):  # by the name that it has, its manifest is asked for
        shutil.copy(tmp_path / f'run/checkpoints/ba00000002.{suffix}', tmp_path)
    load_weights(unet, f'{url}/ba00000002.pt', MODEL)
    damaged = bytearray((tmp_path / 'ba00000002.pt').read_bytes())
    damaged[1000] ^= 1
    (tmp_path / 'ba00000002.pt').write_bytes(damaged)
    with pytest.raises(CheckpointError, match=f'^load_path: {url}/ba00000002.pt: not whole: SHA-256'):  # not the temporary copy
        load_weights(unet, f'{url}/ba00000002.pt', MODEL)
    with pytest.raises(CheckpointError, match='cannot be fetched'):
        load_weights(unet, f'{url}/none.pt', MODEL)
    server.shutdown()


def test_durations_in_epochs(overrides, tmp_path):
    trainer = fit(load(overrides, 'train.duration=1ep', 'data.synthetic_samples=40', 'optimizer.warmup=4ba'))
    assert trainer.state.timestamp.batch == 5
    late = train_py(overrides, tmp_path, f'run_folder={tmp_path}/late', 'train.duration=1ep', 'data.synthetic_samples=40', 'ema.start=5ba', code=64)
    assert 'ema.start: 5ba is not before the end of the run, 5ba' in late


def test_the_gradient_norm_is_clipped_and_logged(overrides, tmp_path):
    trainer = build_trainer(load(overrides, 'optimizer.clip_norm=0.01', 'train.duration=3ba'))
    norms = []

    class Spy(Callback):
        def after_train_batch(self, state, logger):  # after the algorithms of this event
            whole = torch.cat([p.grad.flatten() for p in state.model.parameters()])
            norms.append(float((whole / state.optimizers[0].grad_scale).norm()))  # as AdamW reads them

    trainer.state.callbacks.append(Spy())
    trainer.fit()
    trainer.close()
    assert norms == pytest.approx([0.01] * 3, rel=1e-3)
    logged = [record['grad_norm'] for record in read_log(tmp_path / 'run/log.jsonl') if 'grad_norm' in record]
    assert len(logged) == 3
    assert min(logged) > 0.01  # what it was before


def test_train_py_finishes_once_and_says_so_again(overrides, tmp_path):
    first = run_python('train.py', YAML, *overrides)
    assert 'is trained to 2ba' in first.stdout
    again = train_py(overrides, tmp_path)
    assert 'is already trained to 2ba' in again
    written = list((tmp_path / 'run').rglob('*'))
    assert {'recipe.yaml', 'environment.json', 'log.jsonl', 'ba00000002.pt'} <= {path.name for path in written}
    assert [path for path in [tmp_path / 'run', *written] if path.stat().st_mode & 0o007] == []  # nobody outside of the group reads them


def test_train_py_refuses_wrong_recipes_and_data(overrides, images, tmp_path):
    wrong = train_py(overrides, tmp_path, 'optimizer.lrr=1', 'batch.micro_size=3', code=64)
    assert 'optimizer.lrr' in wrong
    assert 'not divisible' in wrong
    data = train_py(overrides, tmp_path, 'data.kind=latents', f'data.streams.train.local={images}', code=65)
    assert 'manifest kind is images' in data
    assert 'Traceback' not in data
    encoders = train_py(overrides, tmp_path, f'model.encoders.source={tmp_path}', code=65)
    assert 'model.encoders.source' in encoders
    if not torch.cuda.is_available():
        device = train_py(overrides, tmp_path, 'train.precision=amp_bf16', code=64)
        assert 'needs a GPU' in device
        assert 'Traceback' not in device


@pytest.mark.long
def test_killed_and_run_again(latents, overrides, tmp_path):
    command = [sys.executable, 'train.py', YAML, *overrides, 'data.kind=latents', f'data.streams.train.local={latents}',
               'data.workers=1', 'train.duration=400ba', 'checkpoint.every=5ba']  # fmt: skip
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    folder = tmp_path / 'run/checkpoints'
    deadline = time.monotonic() + 120
    while not (folder / 'latest.json').exists():
        assert process.poll() is None, 'training ended by itself'
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    reached = batches_trained(read_checkpoint(find_checkpoint(tmp_path / 'run')))
    assert reached < 400
    log = (tmp_path / 'run/log.jsonl').read_text()
    (tmp_path / 'run/log.jsonl').write_text(log + '{"batch": 7, "loss')  # the kill may cut a line short
    out = run_python(*command[1:], f'train.duration={reached + 5}ba').stdout
    assert 'is trained to' in out
    assert batches_trained(read_checkpoint(find_checkpoint(tmp_path / 'run'))) == reached + 5
    assert read_log(tmp_path / 'run/log.jsonl')[-1]['batch'] == reached + 5


def test_wandb_offline_gets_the_recipe(overrides, tmp_path):
    wandb = pytest.importorskip('wandb')
    trainer = build_trainer(load(overrides, 'log.to=[wandb]', 'log.project=shapes', 'log.samples.every=1ba', 'log.samples.steps=2'))
    assert wandb.run.config['optimizer']['lr'] == 1e-4
    assert wandb.run.config['model']['network'] == 'tiny'
    trainer.fit()
    trainer.close()
    assert list((tmp_path / 'run/wandb').glob('offline-run-*'))
    first = wandb_id = (tmp_path / 'run/wandb_id.txt').read_text()
    trainer = build_trainer(load(overrides, 'log.to=[wandb]', 'log.project=shapes', 'train.duration=3ba'))
    assert wandb.run.id == wandb_id == first  # one run in W&B, however often it resumes
    trainer.fit()
    trainer.close()
