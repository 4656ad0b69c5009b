"""Grids drawn from a run's checkpoints by another process."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from diffusion.checkpoints.manifest import CheckpointManifest
from diffusion.checkpoints.reading import batches_trained, read_checkpoint, recipe_yaml
from diffusion.common.storage import LocalFolder, StorageError
from diffusion.monitoring.report.pictures import sample_grids
from diffusion.recipe import load_recipe, recipe_from_yaml
from diffusion.training.builder import build_trainer
from diffusion.watching.watcher import Watcher, find_checkpoints, folder_of_grids, last_batch
from tests.common.s3_server import BUCKET
from tests.conftest import REPOSITORY, TINY, run_here
from tests.faults.driver import Forked, Process

WATCH = 'diffusion.watch'
RUN = ['data.kind=synthetic', 'data.synthetic_samples=64', 'train.duration=6ba', 'checkpoint.every=2ba', 'checkpoint.keep=3', 'optimizer.lr=1e-2',
       'ema.half_life=2ba', 'log.samples.every=2ba', 'log.samples.steps=2']  # fmt: skip


def pixels(path_or_file):
    with Image.open(path_or_file) as image:
        return np.asarray(image)


@pytest.fixture(scope='module')
def trained(encoders_folder, tmp_path_factory):
    """A finished run that logged to W&B and drew its own grids."""
    folder = tmp_path_factory.mktemp('watched') / 'run'
    more = [f'run_folder={folder}', f'model.encoders.source={encoders_folder}', 'log.to=[wandb]', 'log.project=x']
    trainer = build_trainer(load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', [*TINY, *RUN, *more]))
    trainer.fit()
    trainer.close()
    return folder


@pytest.fixture
def run(trained, tmp_path):
    """A copy without its own grids."""
    folder = shutil.copytree(trained, tmp_path / 'run', ignore=shutil.ignore_patterns('samples', 'wandb'))
    (folder / 'recipe.yaml').write_text((folder / 'recipe.yaml').read_text().replace(str(trained), str(folder)))
    return folder


def tear(run, batch):
    with (run / f'checkpoints/ba{batch:08d}.pt').open('r+b') as file:
        file.truncate(1000)


def test_a_run_in_a_bucket_is_followed_through_a_kill(s3, overrides, tmp_path):
    """The training process is held where a checkpoint's file is in the bucket and its manifest is not."""
    checkpoints = f's3://{BUCKET}/fox/checkpoints'
    following = ['-m', WATCH, f's3://{BUCKET}/fox', '--every-sec', '0.2']
    more = ['log.samples.steps=20', f'checkpoint.folder={checkpoints}']  # grids that take longer than an upload: none is overtaken
    training = Forked([*overrides, *RUN, *more], tmp_path / 'log', DIFFUSION_FAILPOINT='upload.file@2:stop')
    with training:
        training.wait_until(lambda: 'fox/checkpoints/ba00000004.pt' in s3.object_names())
        with Process(following) as watching:
            watching.wait_until(lambda: s3.object_names('fox/samples'))
            time.sleep(1)  # several looks
            assert watching.code() is None
            watching.signal(signal.SIGKILL)
        assert s3.object_names('fox/samples') == ['fox/samples/ba00000002-ema.png']
        training.signal(signal.SIGCONT)
        training.wait(0)
    said = json.loads(s3.client().get_object(Bucket=BUCKET, Key='fox/checkpoints/owner.json')['Body'].read())
    kept = s3.object_names('fox/checkpoints')
    with Process(following) as watching:
        printed = watching.wait(0)
    assert '1 older checkpoint skipped (batch 4): of several only the newest is drawn' in printed
    assert f'1 grid drawn, 1 older checkpoint skipped: s3://{BUCKET}/fox/samples; the run is finished' in printed
    assert said['epoch'] == 1
    assert s3.object_names('fox/checkpoints') == kept
    for batch in (2, 6):
        drawn = s3.client().get_object(Bucket=BUCKET, Key=f'fox/samples/ba0000000{batch}-ema.png')['Body']
        (tmp_path / 'drawn.png').write_bytes(drawn.read())
        own = pixels(tmp_path / f'run/samples/ba0000000{batch}-ema.png')
        assert own.std() > 0
        np.testing.assert_array_equal(pixels(tmp_path / 'drawn.png'), own)


def test_the_grid_is_the_runs_own_and_the_report_shows_it(run, trained):
    before = {path.name: path.stat().st_mtime_ns for path in (run / 'checkpoints').iterdir()}
    printed = run_here(WATCH, run / 'checkpoints', '--every-sec', '0.1')
    assert '1 grid drawn, 2 older checkpoints skipped' in printed.stdout
    assert {path.name: path.stat().st_mtime_ns for path in (run / 'checkpoints').iterdir()} == before
    np.testing.assert_array_equal(pixels(run / 'samples/ba00000006-ema.png'), pixels(trained / 'samples/ba00000006-ema.png'))
    (shown,), _ = sample_grids(run)
    theirs = sample_grids(trained)[0][-1]
    assert (shown.caption, shown.prompts) == ('batch 6, ema weights', theirs.prompts)
    again = run_here(WATCH, run)
    assert 'is there already' in again.stderr
    assert again.stdout.startswith('0 grids drawn')
    assert 'was drawn with other prompts' in run_here(WATCH, run, '--prompt', 'a fox', code=2).stderr


def test_the_grid_of_an_adapter_is_the_runs_own(base, tmp_path):
    adapter = ['adapter.rank=4', 'adapter.alpha=8', 'adapter.text_encoders=true', 'adapter.text_lr=1e-2']
    more = [f'run_folder={tmp_path}/run', f'model.encoders.source={base}', *adapter]
    trainer = build_trainer(load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', [*TINY, *RUN, *more]))
    trainer.fit()
    trainer.close()
    run_here(WATCH, tmp_path / 'run', '--once', '--out', tmp_path / 'out')
    own, untrained = (pixels(tmp_path / f'run/samples/ba0000000{name}.png') for name in ('6-ema', '0-training'))
    np.testing.assert_array_equal(pixels(tmp_path / 'out/ba00000006-ema.png'), own)
    assert (own != untrained).any()


def test_a_later_checkpoint_takes_the_place_of_the_weights(run, trained, tmp_path):
    for path in (run / 'checkpoints').glob('ba00000006.*'):
        shutil.move(path, tmp_path)
    watcher = Watcher(str(run))
    assert watcher.look()
    drawer = watcher.drawer
    assert not watcher.finished
    for path in tmp_path.glob('ba00000006.*'):
        shutil.move(path, run / 'checkpoints')
    assert watcher.look()
    watcher.close()
    assert watcher.finished
    assert watcher.drawer is drawer  # with the encoders that it has
    first, second = (pixels(run / f'samples/ba0000000{batch}-ema.png') for batch in (4, 6))
    assert (first != second).any()
    np.testing.assert_array_equal(first, pixels(trained / 'samples/ba00000004-ema.png'))
    np.testing.assert_array_equal(second, pixels(trained / 'samples/ba00000006-ema.png'))


def test_other_prompts_and_weights_have_a_folder_of_their_own(run, trained, tmp_path):
    out = tmp_path / 'out'
    file = tmp_path / 'prompts.txt'
    file.write_text('a fox\n\nan owl\n')
    run_here(WATCH, run, '--prompt', 'a hare', '--prompts-file', file, '--weights', 'training', '--seed', 3, '--steps', 1, '--once', '--out', out)
    with Image.open(out / 'ba00000006-training.png') as image:
        assert json.loads(image.info['prompts']) == ['a hare', 'a fox', 'an owl']
        assert json.loads(image.info['settings']) == {'guidance': 7.5, 'steps': 1, 'seed': 3}
    assert [path.name for path in out.iterdir()] == ['ba00000006-training.png']
    assert not (run / 'samples').exists()


def test_grids_go_to_the_wandb_run_s_group(run):
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    run_here(WATCH, run, '--once')
    run_id = (run / 'wandb_id.txt').read_text()
    (folder,) = (run / 'wandb').glob(f'offline-run-*-{run_id}-watch')
    records: list[Record] = []
    deadline = time.monotonic() + 30  # another process writes the file, perhaps after `finish` has returned
    while not {'run', 'history'} <= {record.WhichOneof('record_type') for record in records} and time.monotonic() < deadline:
        store, records = DataStore(), []
        store.open_for_scan(str(folder / f'run-{run_id}-watch.wandb'))
        while (data := store.scan_data()) is not None:
            records.append(Record.FromString(data))
    started = next(record.run for record in records if record.WhichOneof('record_type') == 'run')
    assert (started.run_id, started.run_group, started.project, started.job_type) == (f'{run_id}-watch', 'sd2-base-256', 'x', 'watch')
    assert [record.history.step.num for record in records if record.WhichOneof('record_type') == 'history'] == [6]
    (image,) = folder.glob('files/media/images/samples/ema_*.png')
    np.testing.assert_array_equal(pixels(image), pixels(run / 'samples/ba00000006-ema.png'))


def test_without_credentials_the_grids_are_drawn_all_the_same(run, monkeypatch, tmp_path):
    import wandb

    wandb.teardown()
    for name in ('WANDB_API_KEY', 'WANDB_IDENTITY_TOKEN_FILE', 'WANDB_MODE'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('NETRC', str(tmp_path / 'netrc'))
    monkeypatch.setenv('WANDB_CONFIG_DIR', str(tmp_path))
    monkeypatch.setenv('WANDB_BASE_URL', 'http://127.0.0.1:9')
    printed = run_here(WATCH, run, '--once')
    wandb.teardown()
    assert 'W&B: grids are not logged there' in printed.stderr
    assert 'Set WANDB_API_KEY' in printed.stderr
    assert (run / 'samples/ba00000006-ema.png').exists()


def test_what_is_not_whole_is_not_drawn(run, capfd):
    tear(run, 6)
    (run / 'checkpoints/ba00000008.json').write_text('{"torn')
    watcher = Watcher(str(run))
    watcher.once()
    assert [path.name for path in (run / 'samples').iterdir()] == ['ba00000004-ema.png']
    assert not watcher.look()
    said = capfd.readouterr().err
    assert said.count('ba00000006.pt: not whole, not drawn: 1,000 bytes, expected') == 1  # not in every look
    assert said.count('ba00000008.pt: not whole, not drawn: the manifest is damaged') == 1
    assert watcher.summary() == f'1 grid drawn, 1 older checkpoint skipped, 2 checkpoints not whole: {run}/samples'
    watcher.close()


def test_retention_may_delete_a_checkpoint_that_is_read(run, capfd, monkeypatch):
    fetch = LocalFolder.fetch

    def too_late(self, name, scratch):
        if name == 'ba00000006.pt':
            for path in (run / 'checkpoints').glob('ba00000006.*'):
                path.unlink()
        return fetch(self, name, scratch)

    monkeypatch.setattr(LocalFolder, 'fetch', too_late)
    watcher = Watcher(str(run))
    watcher.once()
    watcher.close()
    assert 'ba00000006.pt: deleted by the run before it was read; skipped' in capfd.readouterr().err
    assert '1 checkpoint deleted before it was read' in watcher.summary()
    assert (run / 'samples/ba00000004-ema.png').exists()


def test_it_waits_for_checkpoints_and_for_storage_that_does_not_answer(run, capfd, monkeypatch):
    """Each time that it would sleep, something happens."""
    aside, files, answers = run.parent / 'aside', LocalFolder.files, [False]

    def listed(self, under=''):
        if not answers[0]:
            raise StorageError('no answer')
        return files(self, under)

    def arrives():
        aside.rename(run / 'checkpoints')

    happens = iter([lambda: answers.insert(0, True), arrives])
    (run / 'checkpoints').rename(aside)
    monkeypatch.setattr(LocalFolder, 'files', listed)
    monkeypatch.setattr(time, 'sleep', lambda seconds: next(happens)())
    watcher = Watcher(str(run), every_sec=7)
    watcher.follow()
    watcher.close()
    assert watcher.finished
    failed, _, waiting, drawn = [line for line in capfd.readouterr().err.splitlines() if 'watch: ' in line and 'older' not in line]
    assert failed == 'watch: no answer; trying again in 7 s'
    assert waiting == f'watch: {run}: no checkpoint yet; looking again every 7 s'
    assert drawn.startswith(f'watch: batch 6: {run}/samples/ba00000006-ema.png, 4 prompts, read in ')


def test_it_ends_when_asked_to(run, monkeypatch):
    tear(run, 6)
    monkeypatch.setattr(time, 'sleep', lambda seconds: os.kill(os.getpid(), signal.SIGTERM))
    printed = run_here(WATCH, run, code=130)
    assert printed.stdout.startswith('1 grid drawn')
    assert 'stopped; the same command continues' in printed.stderr


@pytest.mark.long
@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_process_of_its_own_ends_when_asked_to(run, number):
    """In which Composer was imported after the handlers had been installed."""
    tear(run, 6)
    with subprocess.Popen([sys.executable, '-m', WATCH, run], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if line.startswith('watch: '):
                break
        time.sleep(1)
        process.send_signal(number)
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert said.splitlines()[-1] == 'stopped; the same command continues'


def test_what_cannot_be_watched_is_refused(run, tmp_path):
    (tmp_path / 'empty').mkdir()
    assert 'neither a run nor its checkpoints are there' in run_here(WATCH, tmp_path / 'empty', code=2).stderr
    assert 'did you mean s3://bucket/fox' in run_here(WATCH, 's3:/bucket/fox', code=2).stderr
    assert 'the checkpoints are there' in run_here(WATCH, run, '--out', run / 'checkpoints', code=2).stderr
    path = run / 'checkpoints/ba00000006.json'
    path.write_text(path.read_text().replace(CheckpointManifest.parse(path.read_bytes(), 6).encoders['vae'], '0' * 64))
    assert 'was trained with other encoders: vae: 000000000000 then' in run_here(WATCH, run, code=2).stderr
    shutil.rmtree(run / 'checkpoints')
    assert 'no whole checkpoint yet' in run_here(WATCH, run, '--once', code=3).stderr


def test_places():
    assert folder_of_grids('runs/fox/checkpoints') == 'runs/fox/samples'
    assert folder_of_grids('s3://bucket/fox/checkpoints') == 's3://bucket/fox/samples'
    assert folder_of_grids('s3://bucket/fox') == 's3://bucket/fox-samples'
    assert folder_of_grids('s3://bucket') is None


def test_a_run_folder_leads_to_checkpoints_elsewhere(run, tmp_path):
    shutil.move(run / 'checkpoints', tmp_path / 'elsewhere')
    recipe = run / 'recipe.yaml'
    recipe.write_text(recipe.read_text().replace(f'{run}/checkpoints', f'{tmp_path}/elsewhere'))
    assert find_checkpoints(str(run)) == LocalFolder(f'{tmp_path}/elsewhere')


@pytest.fixture
def in_epochs(overrides):
    """The folder of a run of two epochs of 8 batches, whose recipe has no prompts."""
    recipe = load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', [*overrides, 'train.duration=2ep', 'checkpoint.every=6ba', 'checkpoint.keep=-1'])
    recipe.log.samples.prompts = {}
    trainer = build_trainer(recipe)
    trainer.fit()
    trainer.close()
    return Path(recipe.run_folder)


def test_a_length_in_epochs_is_known_from_the_second_on(in_epochs):
    states = [read_checkpoint(path) for path in sorted(in_epochs.glob('checkpoints/*.pt'))]
    ends = [last_batch(recipe_from_yaml(recipe_yaml(state), 'checkpoint'), state) for state in states]
    assert list(zip(map(batches_trained, states), ends, strict=True)) == [(6, None), (12, 16), (16, 16)]
    assert 'nothing to draw: ' in run_here(WATCH, in_epochs, code=2).stderr
    assert run_here(WATCH, in_epochs, '--prompt', 'a fox', '--steps', 1).stdout.endswith('; the run is finished\n')
