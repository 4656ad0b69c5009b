"""Who may write to a checkpoint folder: taking it, losing it, and being refused."""

import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from diffusion.checkpoints.owner import OWNER, take_over
from diffusion.checkpoints.saver import CheckpointSaver
from diffusion.checkpoints.uploading import Misses, Uploader
from diffusion.common.storage import RemoteFolder, StorageRefusal, open_folder
from diffusion.contracts.errors import SUPERSEDED, Superseded
from diffusion.faults.process import explain
from diffusion.recipe import RecipeError, load_recipe
from diffusion.training.builder import build_trainer
from tests.checkpoints.files import content_of, manifest, names, write_checkpoint
from tests.conftest import REPOSITORY, read_json


@pytest.fixture(params=['local', 's3'])
def place(request, tmp_path):
    """A checkpoint folder and the run folder that belongs to it."""
    if request.param == 's3':
        request.getfixturevalue('s3')
        return 's3://bucket/run/checkpoints', 'runs/a'
    return str(tmp_path / 'a/checkpoints'), str(tmp_path / 'a')


def test_each_start_takes_the_folder_from_the_one_before(place):
    first = take_over(*place)
    first.confirm()
    second = take_over(*place)
    second.confirm()
    with pytest.raises(Superseded, match=r'taken over by process \d+ on .*, epoch 2, this process has 1'):
        first.confirm()
    assert explain(Superseded('by another')) == SUPERSEDED == 73
    open_folder(place[0]).delete(OWNER)
    second.confirm()  # takes it back
    second.confirm()


def test_of_starts_at_the_same_instant_one_stays_the_owner(place):
    start = threading.Barrier(3)

    def attempt(_):
        start.wait()
        return take_over(*place)

    def confirmed(owner):
        try:
            owner.confirm()
        except Superseded:
            return False
        return True

    with ThreadPoolExecutor(3) as pool:
        owners = list(pool.map(attempt, range(3)))
    assert sorted(json.loads(owner.content)['epoch'] for owner in owners) == [1, 2, 3]
    assert [json.loads(owner.content)['epoch'] for owner in owners if confirmed(owner)] == [3]


def test_another_run_is_refused_and_a_run_that_was_moved_is_not(place, tmp_path):
    checkpoint_folder, run_folder = place
    take_over(checkpoint_folder, run_folder)
    with pytest.raises(RecipeError, match=r'checkpoint.folder: holds the checkpoints of another run .*run_folder=.*/b\b'):
        take_over(checkpoint_folder, str(tmp_path / 'b'))
    assert json.loads(open_folder(checkpoint_folder).read(OWNER))['epoch'] == 1
    if '://' not in checkpoint_folder:
        (tmp_path / 'a').rename(tmp_path / 'moved')
        take_over(str(tmp_path / 'moved/checkpoints'), str(tmp_path / 'moved'))
        assert read_json(tmp_path / 'moved/checkpoints' / OWNER)['epoch'] == 2


@pytest.mark.parametrize('content', [b'', b'[]', b'{"run": 1', b'[' * 100_000, b'\xff', b'{"run": "a", "epoch": "x", "process": "", "time": ""}'])
def test_a_damaged_owner_is_replaced(tmp_path, content, capsys):
    folder = tmp_path / 'a/checkpoints'
    folder.mkdir(parents=True)
    (folder / OWNER).write_bytes(content)
    take_over(str(folder), str(tmp_path / 'a')).confirm()
    assert 'owner.json is damaged and is replaced' in capsys.readouterr().err


def test_storage_that_refuses_is_said_with_the_key(s3):
    with pytest.raises(StorageRefusal, match='checkpoint.folder: s3://nobucket/x/owner.json: could not be read: .*NoSuchBucket'):
        take_over('s3://nobucket/x', 'runs/a')


def test_the_older_owner_uploads_and_deletes_nothing_more(s3, tmp_path):
    url, deleted = 's3://bucket/run/checkpoints', []
    first = take_over(url, 'runs/a')
    uploader = Uploader(tmp_path, RemoteFolder(url), Misses(), deleted.append, first.confirm)

    def submit(batch):
        write_checkpoint(tmp_path, batch)
        uploader.submit(manifest(batch, content_of(batch)))
        assert uploader.finish() == ''

    submit(4)
    assert (uploader.superseded, len(deleted)) == (None, 1)
    uploader.uploaded = lambda _: take_over(url, 'runs/a')
    submit(8)
    uploader.uploaded = deleted.append
    before = {name: stat.version for name, stat in RemoteFolder(url).files().items()}
    submit(12)
    assert isinstance(uploader.superseded, Superseded)
    assert {name: stat.version for name, stat in RemoteFolder(url).files().items()} == before
    assert len(deleted) == 1


def test_the_older_owner_of_a_local_folder_ends_before_it_writes(overrides, tmp_path):
    """Also if it loses the folder while the new checkpoint is being written."""
    folder = tmp_path / 'run/checkpoints'
    recipe = load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', [*overrides, 'train.duration=4ba', 'checkpoint.every=2ba', 'checkpoint.keep=1'])
    for lost_at in (3, 2):  # twice asked in each save: at the beginning of the second, and, resumed after the first, at the end of the second
        trainer = build_trainer(recipe)
        saver = next(callback for callback in trainer.state.callbacks if isinstance(callback, CheckpointSaver))
        own, asked = saver.confirm_local, itertools.count(1)

        def confirm(own=own, asked=asked, lost_at=lost_at):
            if next(asked) == lost_at:
                take_over(str(folder), recipe.run_folder)
            own()

        saver.confirm_local = confirm
        with pytest.raises(Superseded):
            trainer.fit()
        trainer.engine.close()
        assert trainer.state.timestamp.batch == 4
        assert names(folder) == ['ba00000002.json', 'ba00000002.pt', 'latest.json', 'owner.json']
