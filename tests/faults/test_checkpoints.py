"""Promises about checkpoints, each with a twin in which stock Composer breaks it.

- No damaged checkpoint is loaded, and the newest whole one is. No pickle of others is executed.
- A kill at any point of a save or an upload costs what came since the checkpoint before, and the run ends as an uninterrupted one, to the bit.
- A storm of the storage or an outage does not stop training before the allowed misses; what is in storage is complete at any moment.
- A full disk does not either. Old checkpoints go, also those of earlier processes, on disks and in storage. Running a finished run again changes nothing.
"""

import io
import json
import os
import random
import resource
import shutil
import signal
import time
from contextlib import suppress

import pytest
import torch
from composer.core import Callback
from composer.utils import dist, get_device

from diffusion.checkpoints import uploading
from diffusion.checkpoints.manifest import CheckpointManifest, batches_of, sha256_of
from diffusion.checkpoints.owner import OWNER
from diffusion.checkpoints.reading import batches_trained, ema_weights, find_checkpoint, read_checkpoint
from diffusion.checkpoints.resume import find_newest
from diffusion.checkpoints.saver import CheckpointSaver
from diffusion.checkpoints.uploading import Misses, Uploader
from diffusion.common import object_storage
from diffusion.common.storage import StorageRefusal, open_folder
from diffusion.contracts.errors import CheckpointError, StorageOutage
from diffusion.recipe import load_recipe
from diffusion.training import builder
from diffusion.training.builder import build_trainer, finished
from tests.checkpoints.files import write_checkpoint
from tests.common.s3_server import BUCKET
from tests.conftest import REPOSITORY, TINY
from tests.faults.children import exit_code, fit, ranks, start
from tests.faults.driver import digest, upstream_mended_it
from tests.faults.stock import stock_fit, stock_trainer

REMOTE = 'run/checkpoints'
URL = f's3://{BUCKET}/{REMOTE}'


@pytest.fixture(scope='module')
def common(encoders_folder):
    """Epochs of three batches, and captions are dropped: what is wrong after a resume shows in the weights."""
    return [
        *TINY, f'model.encoders.source={encoders_folder}', 'data.kind=synthetic', 'data.synthetic_samples=24', 'data.caption_dropout=0.3',
        'optimizer.lr=1e-3', 'ema.half_life=2ba', 'train.duration=6ba', 'checkpoint.every=2ba', 'checkpoint.keep=-1',
    ]  # fmt: skip


@pytest.fixture
def base(common, tmp_path):
    return [*common, f'run_folder={tmp_path}/run']


@pytest.fixture(scope='module')
def six(common, tmp_path_factory):
    """The checkpoints of a run that nothing disturbed, at 2, 4 and 6."""
    run = tmp_path_factory.mktemp('whole') / 'run'
    fit([*common, f'run_folder={run}'])
    return run / 'checkpoints'


@pytest.fixture(scope='module')
def uninterrupted(six):
    return result(six)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / 'run/checkpoints'


@pytest.fixture
def impatient(monkeypatch):
    """The storage's clients give up at once, and the uploader tries again soon."""
    monkeypatch.setattr(object_storage, 'ATTEMPTS', 1)
    monkeypatch.setattr(uploading, 'FIRST_PAUSE_SEC', 0.02)
    object_storage.client_of.cache_clear()


def build(overrides):
    return build_trainer(load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', overrides))


def saver_of(trainer):
    return next(callback for callback in trainer.state.callbacks if isinstance(callback, CheckpointSaver))


def saved(folder):
    return batches_of(path.name for path in folder.iterdir())


def result(folder):
    """What training made, without the times that it took."""
    state = read_checkpoint(find_checkpoint(folder))
    assert ema_weights(state)
    return digest([batches_trained(state), ema_weights(state), *(state[part] for part in ('model', 'optimizers', 'schedulers'))])


def flip(path, rng):
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def damage(kind, folder):
    """To the newest of 2, 4, 6."""
    path, manifest = folder / 'ba00000006.pt', folder / 'ba00000006.json'
    if kind == 'flipped':
        flip(path, random.Random(6))
    elif kind == 'no manifest':
        manifest.unlink()
    elif kind == 'torn manifest':
        manifest.write_bytes(manifest.read_bytes()[:100])
    else:
        os.truncate(path, int(path.stat().st_size * float(kind)))


# ---- what is loaded


KINDS = ['0', '0.25', '0.5', '0.99', 'flipped', 'no manifest', 'torn manifest']


@pytest.mark.parametrize('kind', [pytest.param(kind, marks=[] if kind in ('0.5', 'flipped') else pytest.mark.long) for kind in KINDS])
def test_no_damaged_checkpoint_is_loaded_and_the_newest_whole_one_is(kind, six, base, folder, capsys, uninterrupted):
    """More damage, without the training: tests/checkpoints/test_resume.py."""
    shutil.copytree(six, folder)
    (folder / 'latest.json').write_text('stale')
    damage(kind, folder)
    trainer = build(base)
    assert trainer.state.timestamp.batch == 4
    said = capsys.readouterr().err
    assert ('ba00000006.pt is not whole' in said) == (kind != 'no manifest')
    trainer.fit()
    trainer.close()
    assert result(folder) == uninterrupted


def test_twin_stock_loads_a_flipped_bit(tmp_path):
    stock_fit(tmp_path, 6)
    path, rng = tmp_path / 'ba6-rank0.pt', random.Random(0)
    weights = torch.load(path, weights_only=False)['state']['model']
    at = path.read_bytes().index(next(iter(weights.values())).numpy().tobytes()[:64])
    data = bytearray(path.read_bytes())
    data[at + rng.randrange(64)] ^= 64
    path.write_bytes(data)
    try:
        assert stock_trainer(tmp_path, 8).state.timestamp.batch == 6
    except Exception:
        upstream_mended_it()


def test_twin_stock_does_not_fall_back(tmp_path):
    stock_fit(tmp_path, 6)
    os.truncate(tmp_path / 'ba6-rank0.pt', 30_000)
    try:
        stock_trainer(tmp_path, 8)
    except (OSError, RuntimeError):
        return
    upstream_mended_it()


class Payload:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (os.system, (f'touch {self.marker}',))


class InStorage(Payload):
    """A tensor's storage as pickle alone saves it: torch.load within the pickle."""

    def __reduce__(self):
        content = io.BytesIO()
        torch.save(Payload(self.marker), content)
        return (torch.storage._load_from_bytes, (content.getvalue(),))


def test_no_pickle_of_others_runs_on_resuming(base, folder, tmp_path, monkeypatch):
    """Wherever it is in the file, not even with a manifest that fits, and not where Composer is the first to read it either."""
    fit([*base, 'train.duration=2ba'])
    path = folder / 'ba00000002.pt'
    content = torch.load(path, weights_only=False)
    said = json.loads((folder / 'ba00000002.json').read_text())
    evil = Payload(tmp_path / 'executed')
    places = [{**content, 'rng': [one]} for one in (evil, InStorage(evil.marker))]
    places += [{**content, 'state': {**content['state'], part: evil}} for part in ('model', 'optimizers', 'algorithms', 'callbacks', 'integrations')]
    for place in places:
        torch.save(place, path)
        said['files'][path.name] = {'sha256': sha256_of(path), 'bytes': path.stat().st_size}
        (folder / 'ba00000002.json').write_text(json.dumps(said))
        with pytest.raises(CheckpointError, match='refused, nothing was loaded: besides weights'):
            build(base)
        with monkeypatch.context() as patch:
            patch.setattr(builder, 'read_checkpoint', lambda _: content['state'])
            with pytest.raises(CheckpointError, match='refused, nothing was loaded: besides weights'):
                build(base)
    assert not (tmp_path / 'executed').exists()


def test_twin_stock_runs_it(tmp_path):
    stock_fit(tmp_path, 2)
    path = tmp_path / 'ba2-rank0.pt'
    torch.save({**torch.load(path, weights_only=False), 'rng': [Payload(tmp_path / 'executed')]}, path)
    with suppress(Exception):
        stock_trainer(tmp_path, 4)
    if not (tmp_path / 'executed').exists():
        upstream_mended_it()


# ---- kills


SAVE = ['save.begin', 'save.half', 'save.written', 'save.renamed', 'save.manifest', 'save.latest', 'retention.between']
QUICK = ('save.half', 'save.renamed')


@pytest.mark.parametrize('place', [pytest.param(place, marks=[] if place in QUICK else pytest.mark.long) for place in SAVE])
def test_killed_during_a_save(place, base, folder, tmp_path, uninterrupted):
    """At the second one; the next process goes on from whichever is whole, and sweeps."""
    base = [*base, 'checkpoint.keep=2', 'checkpoint.every=1ba']
    time = '@4' if place == 'save.written' else '@1' if place == 'retention.between' else '@3'
    assert exit_code(start(fit, base, DIFFUSION_FAILPOINT=f'{place}{time}:kill')) == -signal.SIGKILL
    whole = saved(folder)
    trainer = build(base)
    assert trainer.state.timestamp.batch == max(whole) >= 2
    assert not [path.name for path in folder.iterdir() if path.name.startswith('.')]
    assert batches_of((path.name for path in folder.iterdir()), 'pt') == saved(folder)
    trainer.fit()
    trainer.close()
    assert saved(folder) == [5, 6]
    assert result(folder) == uninterrupted


def stock_killed_at_its_link(folder):
    kept = os.symlink

    def symlink(target, link):
        if 'ba4' in target:
            os.kill(os.getpid(), signal.SIGKILL)
        kept(target, link)

    os.symlink = symlink
    stock_fit(folder, 6)


def test_twin_stock_killed_at_its_link_begins_at_step_0(tmp_path):
    assert exit_code(start(stock_killed_at_its_link, tmp_path)) == -signal.SIGKILL
    assert (tmp_path / 'ba4-rank0.pt').exists()
    if stock_trainer(tmp_path, 6).state.timestamp.batch == 4:
        upstream_mended_it()


def complete(s3):
    """The batches in storage; asserts that what has a manifest is there, to the bit."""
    client = s3.client()
    names = [key.removeprefix(f'{REMOTE}/') for key in s3.object_names(REMOTE)]
    for batch in batches_of(names):
        said = CheckpointManifest.parse(client.get_object(Bucket=BUCKET, Key=f'{REMOTE}/ba{batch:08d}.json')['Body'].read(), batch)
        content = client.get_object(Bucket=BUCKET, Key=f'{REMOTE}/{said.file}')['Body'].read()
        assert len(content) == said.content.bytes
    return batches_of(names)


@pytest.mark.parametrize('place', ['upload.file', *(pytest.param(place, marks=pytest.mark.long) for place in ('upload.begin', 'upload.manifest'))])
def test_killed_during_the_upload_of_the_last(place, s3, base, folder):
    """The run is finished then; running it again brings its result to storage all the same, also from another folder."""
    base = [*base, f'checkpoint.folder={URL}', 'checkpoint.every=100ba']
    assert exit_code(start(fit, base, DIFFUSION_FAILPOINT=f'{place}:kill')) == -signal.SIGKILL
    assert complete(s3) == ([6] if place == 'upload.manifest' else [])
    trainer = build(base)
    assert finished(trainer)
    saver_of(trainer).finish()
    assert complete(s3) == [6]
    shutil.rmtree(folder)
    assert build(base).state.timestamp.batch == 6


def upload(staging):
    uploader = Uploader(staging, open_folder(URL), Misses(), lambda manifest: None)
    uploader.submit(CheckpointManifest.parse((staging / 'ba00000004.json').read_bytes(), 4))
    assert uploader.finish() == ''


def test_killed_in_the_second_part_of_an_upload(s3, tmp_path):
    write_checkpoint(tmp_path, 4, random.Random(0).randbytes(20_000_000))  # parts have 8 MB
    children = []

    def fails(method, path):
        if 'partNumber=2' in path:
            children[0].kill()
        return False

    s3.proxy.fails = fails
    children.append(start(upload, tmp_path))
    assert exit_code(children[0]) == -signal.SIGKILL
    assert s3.object_names() == []
    s3.proxy.fails = lambda method, path: False
    upload(tmp_path)
    assert complete(s3) == [4]


# ---- storage


def test_a_storm_does_not_kill_the_run(s3, base, folder, tmp_path, monkeypatch, uninterrupted):
    """A third of all requests fails, in five ways; then another machine goes on from there in the same weather."""
    monkeypatch.setattr(uploading, 'FIRST_PAUSE_SEC', 0.02)
    monkeypatch.setattr(object_storage, 'ATTEMPTS', 3)
    object_storage.client_of.cache_clear()
    rng = random.Random(3)

    def fails(method, path):
        return rng.choice([503, 500, 429, 502, 'cut']) if rng.random() < 0.3 else False

    base = [*base, f'checkpoint.folder={URL}', 'checkpoint.allowed_misses=100']
    s3.proxy.fails = fails
    for _ in range(20):  # a start needs the list and the newest file, and says so if it does not get them
        try:
            trainer = build([*base, 'train.duration=4ba'])
            break
        except StorageOutage:
            continue
    trainer.fit()
    trainer.close()
    assert s3.proxy.num_failures > 3
    assert 4 in complete(s3)
    shutil.rmtree(folder)
    monkeypatch.setattr(object_storage, 'ATTEMPTS', 10)
    object_storage.client_of.cache_clear()
    trainer = build(base)
    assert trainer.state.timestamp.batch == 4
    trainer.fit()
    trainer.close()
    assert 6 in complete(s3)
    assert result(folder) == uninterrupted


class Weather(Callback):
    """PUT is refused between two batches; looks at the storage after each."""

    def __init__(self, s3, begins, ends):
        self.s3, self.begins, self.ends, self.seen = s3, begins, ends, []

    def batch_start(self, state, logger):
        outage = self.begins <= state.timestamp.batch < self.ends
        self.s3.proxy.fails = lambda method, path: outage and method in ('PUT', 'POST')

    def batch_end(self, state, logger):
        self.seen.append(complete(self.s3))


def test_an_outage_is_trained_through(s3, base, impatient, folder):
    trainer = build([*base, f'checkpoint.folder={URL}', 'train.duration=12ba', 'checkpoint.every=1ba', 'checkpoint.allowed_misses=11'])
    weather = Weather(s3, 3, 10)
    trainer.state.callbacks.append(weather)
    trainer.fit()
    trainer.close()
    assert saver_of(trainer).misses.total >= 4
    assert saver_of(trainer).misses.in_a_row == 0
    assert complete(s3)[-1] == 12
    assert all(max(seen, default=0) <= 4 for seen in weather.seen[3:9])
    assert len(saved(folder)) == 2


def test_an_outage_ends_the_run_after_the_allowed_misses_and_the_next_process_uploads(s3, base, impatient, folder, capsys):
    base = [*base, f'checkpoint.folder={URL}', 'train.duration=40ba', 'checkpoint.every=1ba', 'checkpoint.allowed_misses=2']
    trainer = build(base)
    s3.proxy.fails = lambda method, path: method in ('PUT', 'POST')
    with pytest.raises(StorageOutage, match=r'[34] checkpoints in a row missed, allowed are 2'):  # a save can overtake two: in hand and waiting
        trainer.fit()
    trainer.close()
    reached = saved(folder)
    assert len(reached) >= 3  # none was deleted before it was safe
    assert complete(s3) == []
    s3.proxy.fails = lambda method, path: False
    trainer = build([*base, f'train.duration={reached[-1] + 1}ba'])
    assert trainer.state.timestamp.batch == reached[-1]
    trainer.fit()
    trainer.close()
    assert complete(s3)[-1] == reached[-1] + 1


def test_a_refused_upload_ends_the_run_at_once_with_the_words_of_the_storage(s3, base, folder):
    """Not after the 15 minutes in which an outage may pass."""
    trainer = build([*base, f'checkpoint.folder={URL}', 'train.duration=2ba', 'checkpoint.every=100ba'])
    s3.proxy.fails = lambda method, path: 403 if method in ('PUT', 'POST') else False  # from now on: a start takes the folder
    start = time.monotonic()
    with pytest.raises(
        StorageRefusal, match=r'ba00000002.pt: the storage refused it: .*AccessDenied.*check the credentials.*the same command uploads it'
    ):
        trainer.fit()
    assert time.monotonic() - start < 60
    trainer.close()
    s3.proxy.fails = lambda method, path: False
    trainer = build([*base, f'checkpoint.folder={URL}', 'train.duration=2ba'])
    assert finished(trainer)
    saver_of(trainer).finish()
    trainer.close()
    assert complete(s3) == [2]


def test_an_upload_that_the_end_of_the_run_cannot_have_is_an_error(s3, base, impatient, monkeypatch):
    monkeypatch.setattr(uploading, 'END_SEC', 1)
    trainer = build([*base, f'checkpoint.folder={URL}', 'checkpoint.every=100ba'])
    s3.proxy.fails = lambda method, path: method in ('PUT', 'POST')
    with pytest.raises(StorageOutage, match=r'ba00000006.pt could not be uploaded within 1 s: .*could not be written'):
        trainer.fit()


def stock_upload(folder):
    stock_fit(folder, 8)


@pytest.mark.long
def test_twin_stock_dies_of_an_outage(s3, tmp_path):
    assert exit_code(start(stock_upload, f's3://{BUCKET}/stock')) == 0
    s3.proxy.fails = lambda method, path: method in ('PUT', 'POST')
    if exit_code(start(stock_upload, f's3://{BUCKET}/stock')) == 0:
        upstream_mended_it()


# ---- disks and leftovers


class FullDisk(Callback):
    """The kernel refuses files beyond a size between two batches, as a full disk does: in the middle of one."""

    def __init__(self, num_bytes, begins, ends):
        self.num_bytes, self.begins, self.ends = num_bytes, begins, ends

    def batch_end(self, state, logger):
        full = self.begins <= state.timestamp.batch < self.ends
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.num_bytes if full else hard, hard))


@pytest.fixture
def unlimited():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_does_not_kill_the_run(base, folder, tmp_path, unlimited, capsys, uninterrupted):
    trainer = build([*base, 'checkpoint.every=1ba'])
    trainer.state.callbacks.append(FullDisk(200_000, 3, 5))
    trainer.fit()
    trainer.close()
    assert saved(folder) == [1, 2, 5, 6]
    assert 'ba00000003.pt was not written: [Errno 27] File too large' in capsys.readouterr().err
    assert not [path.name for path in folder.iterdir() if path.name.startswith('.') or path.name.endswith('.corrupt')]
    assert result(folder) == uninterrupted


def test_twin_stock_dies_of_a_full_disk(tmp_path, unlimited):
    trainer = stock_trainer(tmp_path, 8)
    trainer.state.callbacks.insert(0, FullDisk(30_000, 4, 5))
    try:
        trainer.fit()
    except (OSError, RuntimeError):
        assert (tmp_path / 'ba4-rank0.pt').exists()  # a torn file under its last name
    else:
        upstream_mended_it()


@pytest.mark.parametrize('place', ['local', 's3'])
def test_old_checkpoints_go_also_those_of_earlier_processes(place, base, folder, request):
    base = [*base, 'checkpoint.keep=2', 'checkpoint.keep_every=5ba', 'checkpoint.every=1ba']
    if place == 's3':
        s3 = request.getfixturevalue('s3')
        base.append(f'checkpoint.folder={URL}')
    for batches in (3, 6, 8):
        fit([*base, f'train.duration={batches}ba'])
    if place == 's3':
        left = complete(s3)
        assert left[-2:] == [7, 8] or left[-1] == 8  # one that the next overtook is no loss
        assert len(left) <= 3
        assert len(saved(folder)) == 2
    else:
        assert saved(folder) == [5, 7, 8]


def test_twin_stock_forgets_what_earlier_processes_saved(tmp_path):
    for batches in (4, 8):
        stock_fit(tmp_path, batches, save_num_checkpoints_to_keep=1)
    if len(list(tmp_path.glob('ba*-rank0.pt'))) == 1:
        upstream_mended_it()


def test_a_finished_run_again_changes_nothing(base, folder):
    fit(base)

    def checkpoints():
        return {path.name: (path.stat().st_mtime_ns, sha256_of(path)) for path in folder.iterdir() if path.name != OWNER}

    before = checkpoints()
    trainer = build(base)
    assert finished(trainer)
    trainer.close()
    assert checkpoints() == before


def test_twin_stock_raises_for_a_finished_run(tmp_path):
    stock_fit(tmp_path, 4)
    try:
        stock_fit(tmp_path, 4)
    except ValueError:
        return
    upstream_mended_it()


# ---- several processes


def test_all_ranks_learn_of_a_failed_save(base, tmp_path):
    """Only the first one writes; a rank that did not hear of it would wait for the others for half an hour."""
    failing = ','.join(f'save.begin@{count}:enospc' for count in (2, 3))
    arguments = [*base, 'batch.micro_size=2', 'checkpoint.every=1ba', 'checkpoint.allowed_misses=1']
    first, second = ranks(fit, [[arguments]] * 2, tmp_path, DIFFUSION_FAILPOINT=failing)
    assert first == second
    assert 'StorageOutage: 2 checkpoints in a row missed, allowed are 1' in first


def look(folder, staging):
    dist.initialize_dist(get_device('cpu'))
    return str(find_newest(folder, staging))


def test_two_nodes_without_a_common_disk(tmp_path, s3):
    """From storage each fetches it; from the disk of one the other cannot, and says so."""
    disks = [tmp_path / f'node{node}' for node in range(2)]
    write_checkpoint(disks[0], 4)
    first, second = ranks(look, [[str(disk), disk] for disk in disks], tmp_path, nodes=2)
    assert first == second
    assert 'is there on the first machine and not on all; put checkpoint.folder on a disk that they share' in first
    for path in disks[0].iterdir():
        s3.client().upload_file(str(path), BUCKET, f'{REMOTE}/{path.name}')
    for place in (disks[0], tmp_path / 'empty'):
        first, second = ranks(look, [[URL, place], [URL, disks[1]]], tmp_path, nodes=2)
        assert (str(place / 'ba00000004.pt') in first, str(disks[1] / 'ba00000004.pt') in second) == (True, True)
        assert saved(disks[1]) == [4]
        shutil.rmtree(disks[1])
