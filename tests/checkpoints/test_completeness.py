"""A run resumes from everything that a checkpoint should hold, or says what is missing; on the tiny recipe, in this process."""

import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from composer.utils import dist, get_device

from diffusion.checkpoints.completeness import differences, refuse_incomplete
from diffusion.checkpoints.exporting import export
from diffusion.checkpoints.reading import load_safely
from diffusion.checkpoints.saver import write_tensors
from diffusion.contracts.errors import CheckpointError
from diffusion.encoders.frozen import FrozenEncoders
from diffusion.encoders.random_encoders import write_stand_in
from diffusion.recipe import load_recipe
from diffusion.recipe.schema import EncoderSource
from diffusion.training.builder import build_trainer, frozen_digests
from tests.conftest import REPOSITORY, TINY
from tests.faults.children import fit, ranks

WEIGHT = 'network.conv_in.weight'


@pytest.fixture(scope='module')
def base(latents, encoders_folder):
    """With all that has a state of its own: EMA, streaming data, Sobol timesteps."""
    return [
        *TINY, f'model.encoders.source={encoders_folder}', 'data.kind=latents', f'data.streams.train.local={latents}', 'model.timesteps=sobol',
        'checkpoint.every=1ba', 'train.duration=2ba',
    ]  # fmt: skip


@pytest.fixture(scope='module')
def run(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp('whole') / 'run'
    fit([*base, f'run_folder={folder}'])
    return folder


@pytest.fixture(scope='module')
def content(run):
    """Of its last checkpoint."""
    return load_safely(run / 'checkpoints/ba00000002.pt')


@pytest.fixture(scope='module')
def state(base, tmp_path_factory):
    """Of a trainer of the same recipe that has loaded nothing."""
    trainer = build(base, tmp_path_factory.mktemp('fresh') / 'run')
    yield trainer.state
    trainer.close()


def build(base, folder, *more):
    return build_trainer(load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', [*base, f'run_folder={folder}', *more]))


def copied(part):
    """Containers, not the tensors in them."""
    if isinstance(part, dict):
        return {name: copied(value) for name, value in part.items()}
    return type(part)(copied(value) for value in part) if isinstance(part, list | tuple) else part


def copy_of_run(run, folder, change):
    """With another content of the last checkpoint, whose manifest has the digest of it."""
    shutil.copytree(run, folder, symlinks=True)
    path = folder / 'checkpoints/ba00000002.pt'
    content = copied(load_safely(path))
    change(content)
    written = write_tensors(folder / 'new', content)
    (folder / 'new').replace(path)
    manifest = json.loads(path.with_suffix('.json').read_text())
    manifest['files'][path.name] = {'sha256': written.sha256, 'bytes': written.bytes}
    path.with_suffix('.json').write_text(json.dumps(manifest))
    return folder


def without(*path):
    def change(content):
        *parents, last = path
        for name in parents:
            content = dict(content)[name] if isinstance(content, list) and isinstance(name, str) else content[name]
        content.pop(last)

    return change


def without_algorithm(name):
    def change(content):
        content['state']['algorithms'] = [entry for entry in content['state']['algorithms'] if entry[0] != name]

    return change


def with_algorithm(content):
    content['state']['algorithms'].append(('BlurPool', {'repr': 'BlurPool(__import__("os").system("touch executed"))'}))


def misshapen(content):
    content['state']['optimizers']['AdamW']['state'][WEIGHT]['exp_avg'] = torch.zeros(3)


def halved(content):
    content['state']['model'][WEIGHT] = content['state']['model'][WEIGHT].half()


STATE = 'state'
DAMAGES = {
    'a weight': (without(STATE, 'model', WEIGHT), f'state.model.{WEIGHT} is missing'),
    'the model': (without(STATE, 'model'), 'state.model is missing'),
    'a list for the model': (lambda content: content[STATE].update(model=[1]), 'state.model is a list, not a dict'),
    'one weight too many': (lambda content: content[STATE]['model'].update(stranger=torch.zeros(1)), 'state.model.stranger is unexpected'),
    'the optimizer': (without(STATE, 'optimizers'), 'state.optimizers is missing'),
    'its state': (without(STATE, 'optimizers', 'AdamW', 'state'), 'state.optimizers.AdamW.state is missing'),
    'that of a weight': (without(STATE, 'optimizers', 'AdamW', 'state', WEIGHT), f'state.optimizers.AdamW.state.{WEIGHT} is missing'),
    'a moment': (without(STATE, 'optimizers', 'AdamW', 'state', WEIGHT, 'exp_avg'), f'AdamW.state.{WEIGHT}.exp_avg is missing'),
    'the shape of a moment': (misshapen, rf'{WEIGHT}.exp_avg has the shape \(3,\), not \(\d+, 4, 3, 3\)'),
    'the dtype of a weight': (halved, f'state.model.{WEIGHT} is torch.float16, not torch.float32'),
    'the groups': (without(STATE, 'optimizers', 'AdamW', 'param_groups', 0, 'lr'), r'param_groups\[0\].lr is missing'),
    'the schedule': (without(STATE, 'schedulers'), 'state.schedulers is missing'),
    'its position': (without(STATE, 'schedulers', 'LambdaLR', 'last_epoch'), 'state.schedulers.LambdaLR.last_epoch is missing'),
    'the algorithms': (without(STATE, 'algorithms'), 'state.algorithms is missing'),
    'the guard': (without_algorithm('GradientGuard'), 'state.algorithms.GradientGuard is missing'),
    'the EMA': (without_algorithm('EMA'), 'state.algorithms.EMA is missing'),
    'its average': (lambda content: dict(content[STATE]['algorithms'])['EMA'].update(average=None), 'EMA.average is a NoneType, not a dict'),
    'an averaged weight': (without(STATE, 'algorithms', 'EMA', 'average', WEIGHT), f'EMA.average.{WEIGHT} is missing'),
    'an algorithm that Composer would make': (with_algorithm, 'state.algorithms.BlurPool is unexpected'),
    'the callbacks': (without(STATE, 'callbacks'), 'state.callbacks is missing'),
    'the recipe': (without(STATE, 'callbacks', 'RunRecord', 'recipe'), 'state.callbacks.RunRecord.recipe is missing'),
    'the clock': (without(STATE, 'callbacks', 'Throughput'), 'state.callbacks.Throughput is missing'),
    'the time': (without(STATE, 'timestamp'), 'state.timestamp is missing'),
    'the batch': (without(STATE, 'timestamp', 'Timestamp', 'batch'), 'state.timestamp.Timestamp.batch is missing'),
    'the position in the data': (without(STATE, 'dataset_state', 'train', 'epoch'), 'state.dataset_state.train.epoch is missing'),
    'the seed': (without(STATE, 'rank_zero_seed'), 'state.rank_zero_seed is missing'),
    'random state': (without('rng'), 'rng is missing'),
    "one rank's": (without('rng', 0), 'rng has 0 entries, not 1'),
    "Python's": (without('rng', 0, 'python'), r'rng\[0\].python is missing'),
    'its kind': (lambda content: content[STATE]['timestamp']['Timestamp'].update(batch='2'), 'Timestamp.batch is a str, not a int'),
    'its length': (lambda content: content['rng'][0].update(python=(3, (1, 2), None)), r"rng\[0\].python is no state of python's random numbers"),
    'everything': (lambda content: content.clear(), 'is missing'),
}


def test_a_whole_one_is_taken(content, state):
    refuse_incomplete(content, state, 'a.pt')


@pytest.mark.parametrize('damage', DAMAGES)
def test_what_is_missing_is_named(content, state, damage):
    change, said = DAMAGES[damage]
    broken = copied(content)
    change(broken)
    with pytest.raises(CheckpointError, match=rf'^a.pt: not the checkpoint of such a run: .*{said}'):
        refuse_incomplete(broken, state, 'a.pt')


def test_a_run_refuses_it_before_anything_is_loaded_and_names_the_checkpoint(run, base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = copy_of_run(run, tmp_path / 'run', with_algorithm)
    with pytest.raises(CheckpointError, match=f'^{folder}/checkpoints/ba00000002.pt: not the checkpoint of such a run: .*BlurPool is unexpected'):
        build(base, folder, 'train.duration=3ba')
    assert not (tmp_path / 'executed').exists()  # Composer would evaluate what the file says


def test_what_another_pytorch_notes_of_a_schedule_is_not_missed(content, state):
    """PyTorch 2.7 wrote no `_is_initial`; another version may write what this one does not."""
    other = copied(content)
    schedule = other['state']['schedulers']['LambdaLR']
    assert schedule.pop('_is_initial') is False
    schedule['_of_a_later_version'] = 1
    refuse_incomplete(other, state, 'a.pt')


def test_callbacks_and_loggers_come_and_go(run, base, tmp_path):
    shutil.copytree(run, tmp_path / 'run', symlinks=True)
    trainer = build(base, tmp_path / 'run', 'train.duration=3ba', 'log.samples.every=100ba')
    assert trainer.state.timestamp.batch == 2
    trainer.close()


@pytest.mark.long
def test_two_sharded_ranks_refuse_it_together(run, base, tmp_path):
    folder = copy_of_run(run, tmp_path / 'run', DAMAGES['that of a weight'][0])
    more = [f'run_folder={folder}', 'train.duration=3ba', 'train.sharding=zero2', 'batch.micro_size=2']
    first, second = ranks(fit, [[[*base, *more]]] * 2, tmp_path)
    assert first == second
    assert re.match(rf'CheckpointError: {folder}/checkpoints/ba00000002.pt: .*state.optimizers.AdamW.state.{WEIGHT} is missing', first)


def test_other_encoders_are_refused_by_name(run, base, tmp_path):
    """The same folder with other weights: the recipe has not changed."""
    shutil.copytree(run, tmp_path / 'run', symlinks=True)
    path = tmp_path / 'run/checkpoints/ba00000002.json'
    manifest = json.loads(path.read_text())
    environment = json.loads((tmp_path / 'run/environment.json').read_text())
    assert environment['encoders'] == manifest['encoders']
    assert all(re.fullmatch('[0-9a-f]{64}', digest) for digest in manifest['encoders'].values())
    for name in ('vae', 'text_encoder', 'tokenizer'):
        path.write_text(json.dumps({**manifest, 'encoders': {**manifest['encoders'], name: 'f' * 64}}))
        with pytest.raises(
            CheckpointError, match=f'trained with other encoders: {name}: ffffffffffff then, {manifest["encoders"][name][:12]} now; put'
        ):
            build(base, tmp_path / 'run', 'train.duration=3ba')
        with pytest.raises(CheckpointError, match=f'trained with other encoders: {name}: ffff'):
            export(tmp_path / 'run', tmp_path / 'exported')
    del manifest['encoders']['tokenizer']
    path.write_text(json.dumps(manifest))  # of an earlier version
    build(base, tmp_path / 'run', 'train.duration=3ba').close()


def digests(folder):
    dist.initialize_dist(get_device('cpu'), timeout=60.0)
    encoders = FrozenEncoders.load(EncoderSource(str(folder)))
    return json.dumps(frozen_digests(SimpleNamespace(encoders=encoders, base_sha256=None, methods={})))


def test_two_machines_with_different_encoders(encoders_folder, tmp_path):
    write_stand_in(tmp_path / 'other', 'tiny', seed=1)
    for folders, said in (
        ([encoders_folder] * 2, '"text_encoder": '),
        ([encoders_folder, tmp_path / 'other'], 'EncoderError: .* rank 1 .* not those on'),
    ):
        first, second = ranks(digests, [[folder] for folder in folders], tmp_path, nodes=2)
        assert first == second
        assert re.search(said, first)


def test_what_differs():
    whole = {'a': {'b': torch.zeros(2, 3), 'c': [1, {'d': None}]}}
    assert list(differences(whole, whole)) == []
    assert list(differences(whole, [])) == ['the file is a list, not a dict']
    assert list(differences(whole, {'a': {'b': torch.zeros(3, 2), 'c': [1], 'x': 0}})) == [
        'a.x is unexpected',
        'a.b has the shape (3, 2), not (2, 3)',
        'a.c has 1 entries, not 2',
    ]
