"""convert and encode by a small Ray cluster of this host: the same files, and what happens when processes die."""

import hashlib
import shutil
import sys
import time
from collections import Counter
from importlib.util import find_spec

import pytest
import torch

from data_prep.converting.conversion import Options, convert
from data_prep.encoding.dataset import encode
from data_prep.engines import cluster as driver
from data_prep.engines.cluster import ClusterEngine, check_for
from data_prep.recaptioning.dataset import recaption
from diffusion.common import ray_cluster
from diffusion.common.environment import code_identity
from diffusion.common.ray_cluster import ClusterError, ClusterRefusal
from diffusion.common.storage import scratch_for
from diffusion.contracts.errors import EncoderError, IncompleteError
from diffusion.recipe.schema import EncoderSource
from tests.conftest import NUM_IMAGES, REPOSITORY, read_json, run_here, run_python
from tests.data_prep.captioner import write_captioner
from tests.data_prep.engines.works import DiesAfterCommit, DiesAtStart, NumberFile, Squares
from tests.data_prep.test_convert import write_webdataset
from tests.data_prep.test_recaption import DRAWN
from tests.faults.children import ranks

pytestmark = pytest.mark.skipif(find_spec('ray') is None, reason='Ray is an extra')


@pytest.fixture(scope='module', autouse=True)
def cluster():
    """One of this host, which claims four CPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('PYTHONPATH', str(REPOSITORY))  # workers inherit it: they have to find `tests`
        patch.setenv('OMP_NUM_THREADS', '1')
        patch.setenv('RAY_USAGE_STATS_ENABLED', '0')
        ray_cluster._keep_authentication('a test')  # before Ray is imported, which then reads what its processes do
        import ray

        ray.init('local', num_cpus=4, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as many as a worker has: on a CPU, the last bits of a convolution depend on it
        yield
        torch.set_num_threads(threads)
        ray.shutdown()


def engine(**options):
    return ClusterEngine(**options)


def tree(folder):
    """SHA-256 of every file, hidden ones too."""
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.rglob('*')) if path.is_file()}


def write_squares(folder, numbers):
    """A source for `Squares`."""
    folder.mkdir()
    for number in numbers:
        (folder / {13: 'poison', 14: 'slow'}.get(number, str(number))).write_text(str(number))
    return Squares(str(folder), str(folder.parent)), [NumberFile(name) for name in sorted(path.name for path in folder.iterdir())]


def undo_half(folder):
    """Leave what a run would that was killed in the middle."""
    for marker in sorted(folder.glob('parts/*.json'))[::2]:
        shutil.rmtree(folder / marker.stem, ignore_errors=True)
        marker.unlink()
        marker.with_suffix('.failures.parquet').unlink()
    for name in ('manifest.json', 'index.json', 'failures.parquet'):
        for path in folder.rglob(name):
            path.unlink()


def test_convert_gives_the_same_files_whoever_does_which_part(tmp_path):
    source = write_webdataset(tmp_path / 'source', per_shard=2)
    options = Options(duplicates='exact')
    convert(source, tmp_path / 'local', options)
    out = shutil.copytree(tmp_path / 'local', tmp_path / 'ray')
    undo_half(out)
    shutil.rmtree(out / 'digests')
    assert convert(source, out, options, engine=engine(actors=2)).attempted_now == 6
    assert tree(out) == tree(tmp_path / 'local')


def test_encode_gives_the_same_files_with_pixels_from_other_processes(images, encoders_folder, tmp_path):
    """Several resolutions, and the text too."""
    where = EncoderSource(str(encoders_folder))
    encode(images, tmp_path / 'local', [32, 16], where, network='tiny', batch_size=5)
    tally = encode(images, tmp_path / 'ray', [32, 16], where, network='tiny', batch_size=5, engine=engine(actors=1, decoders=1))
    assert tally.kept == 2 * NUM_IMAGES
    assert tree(tmp_path / 'ray') == tree(tmp_path / 'local')


def test_recaption_gives_the_same_files(images, tmp_path):
    """Draws are those of the sample wherever they are made; prepared images travel from other processes."""
    where = EncoderSource(str(write_captioner(tmp_path / 'model')))
    recaption(images, tmp_path / 'local', where, DRAWN, batch_size=5)
    recaption(images, tmp_path / 'ray', where, DRAWN, batch_size=5, engine=engine(actors=1, decoders=1))
    assert tree(tmp_path / 'ray') == tree(tmp_path / 'local')


def test_encode_in_buckets_half_by_each_engine(aspect_images, encoders_folder, tmp_path):
    where = EncoderSource(str(encoders_folder))
    encode(aspect_images, tmp_path / 'local', None, where)
    out = shutil.copytree(tmp_path / 'local', tmp_path / 'out')
    undo_half(out)
    tally = encode(aspect_images, out, None, where, engine=engine(actors=1))
    assert 0 < tally.attempted_now < tally.attempted
    assert tree(out) == tree(tmp_path / 'local')


def test_a_damaged_shard_is_refused_as_it_is_locally(images, encoders_folder, tmp_path):
    source = shutil.copytree(images, tmp_path / 'source')
    shard = source / '00001/shard.00000.mds'
    shard.write_bytes(shard.read_bytes()[:-1])
    said = []
    for options in (), ('--engine', 'ray', '--ray-actors', 1, '--ray-decoders', 1):
        command = ['data_prep.encode', source, tmp_path / 'out', '--resolution', 32, '--encoders', encoders_folder]
        said.append([line for line in run_here(*command, *options, code=2).stderr.splitlines() if 'SHA-256' in line])
    assert len(said[0]) == 1
    assert said[0] == said[1]


def test_other_encoders_on_another_machine_are_refused(images, encoders_folder, tmp_path, monkeypatch):
    """They have the same path there."""
    monkeypatch.setattr('diffusion.encoders.frozen_part.weights_sha256', lambda module: 'other')
    with pytest.raises(EncoderError, match=r'machine .* of the Ray cluster: .*: vae has SHA-256 .*, the dataset was begun with other'):
        encode(images, tmp_path / 'out', [32], EncoderSource(str(encoders_folder)), engine=engine(actors=1))


def test_a_worker_that_dies_after_its_commit_is_replaced(tmp_path, monkeypatch, capsys):
    source = write_webdataset(tmp_path / 'source', per_shard=2)
    convert(source, tmp_path / 'local')
    monkeypatch.setattr('data_prep.converting.conversion.Conversion', DiesAfterCommit)
    convert(source, tmp_path / 'ray', engine=engine(actors=1))
    assert (tmp_path / 'has-died').exists()
    assert tree(tmp_path / 'ray') == tree(tmp_path / 'local')
    assert 'ray' not in (tmp_path / 'ray/job.json').read_text()
    assert 'a worker on' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('dies_reading', 'options', 'attempts'),
    [(False, {'actors': 2}, 2), (False, {'actors': 1, 'decoders': 3}, 4), (True, {'actors': 1, 'decoders': 1}, 2)],
)
def test_a_part_that_kills_its_worker_is_set_aside(dies_reading, options, attempts, tmp_path, monkeypatch):
    """All others are done, also those that its worker did at the same time, and it is not tried for ever."""
    if attempts < 4:
        monkeypatch.setattr('data_prep.engines.cluster.MAX_ATTEMPTS', attempts)  # each starts a process
    work, items = write_squares(tmp_path / 'source', [1, 2, 3, 13, 20, 21])
    work = Squares(work.source, work.dest, dies_reading)
    said = rf'part part-poison, read from {tmp_path}/source/poison, was set aside after {attempts} attempts'
    with pytest.raises(IncompleteError, match=said) as raised:
        for _ in engine(**options).map(work, items):
            pass
    assert 'leave the file out of SOURCE' in str(raised.value)
    assert len((tmp_path / 'deaths').read_text().split()) == attempts
    done = Counter((tmp_path / 'done').read_text().split())
    assert set(done) == {'1', '2', '3', '20', '21'}
    assert max(done.values()) <= 2  # at most once with the poison


def test_a_part_that_never_ends_is_set_aside(tmp_path, monkeypatch):
    monkeypatch.setattr('data_prep.engines.cluster.MAX_ATTEMPTS', 2)
    work, items = write_squares(tmp_path / 'source', [1, 14])
    with pytest.raises(IncompleteError, match=r'slow.*it took more than 0\.02 minutes \(--ray-part-min\)'):
        list(engine(actors=1, part_min=0.02).map(work, items))
    assert (tmp_path / 'done').read_text() == '1\n'


@pytest.mark.parametrize('restart_sec', [0, 15])
def test_workers_that_die_before_they_begin_end_the_job(tmp_path, monkeypatch, restart_sec):
    """But not before one that starts slowly could have begun, whose tries Ray uses up in a moment."""
    monkeypatch.setattr('data_prep.engines.cluster.MAX_FALSE_STARTS', 2)
    monkeypatch.setattr('data_prep.engines.cluster.RESTART_SEC', restart_sec)
    work, items = write_squares(tmp_path / 'source', [1])
    begun = time.monotonic()
    with pytest.raises(ClusterError, match='2 workers with CPU 1 died before they could begin; the last one: '):
        list(engine(actors=1).map(DiesAtStart(work.source, work.dest), items))
    assert time.monotonic() - begun >= restart_sec


def test_results_come_with_their_parts(tmp_path):
    work, items = write_squares(tmp_path / 'source', range(1, 6))
    assert sorted(engine(actors=1, decoders=2).map(work, items)) == [1, 4, 9, 16, 25]
    assert list(engine().map(work, [])) == []


@pytest.mark.parametrize(
    ('options', 'said'),
    [
        (
            {'resource': 'A10G'},
            r'1 worker with CPU 1, A10G 1 each would not fit: the cluster has 1 machine with CPU 4, A10G 0 in all; room for 0 workers: too little A10G;',
        ),
        ({'actors': 3, 'cpus': 2}, r'3 workers with CPU 2 each would not fit: .* in all; room for 2 workers: too little CPU; ask for less'),
        (
            {'decoders': 4},
            r'1 worker with CPU 1 each, and 4 decoders with 1 CPU each would not fit: .* in all; 1 worker would leave 3 CPUs for 4 decoders;',
        ),
    ],
)
def test_what_the_cluster_cannot_give_is_refused(options, said, tmp_path):
    work, items = write_squares(tmp_path / 'source', [1])
    with pytest.raises(ClusterRefusal, match=said):
        list(engine(**options).map(work, items))


def test_a_refusal_leaves_dest_new(crawl, tmp_path):
    with pytest.raises(ClusterRefusal):
        convert(crawl, tmp_path / 'out', engine=engine(resource='TPU'))
    assert not (tmp_path / 'out').exists()


def test_machines_that_never_come_end_the_wait(tmp_path, monkeypatch, capsys):
    work, items = write_squares(tmp_path / 'source', [1])
    monkeypatch.setattr('data_prep.engines.cluster.SAY_SEC', 0.2)
    monkeypatch.setattr('data_prep.engines.cluster.START_MIN', 0.03)
    waits = r'waiting for 1 worker with CPU 1, A10G 1 each; the cluster has CPU [0-4] free of 4, A10G 0 free of 0'
    with pytest.raises(ClusterError, match=f'{waits}; none has begun in'):
        list(engine(actors=1, resource='A10G', wait_min=0.03).map(work, items))
    assert 'squares: waiting for 1 worker' in capsys.readouterr().err


def test_a_machine_with_other_versions_is_refused(tmp_path, monkeypatch):
    work, items = write_squares(tmp_path / 'source', [1])
    monkeypatch.setattr(driver, 'code_identity', lambda: {**code_identity(), 'torch': '9.9'})
    with pytest.raises(ClusterRefusal, match=r'machine [0-9.]+ of the Ray cluster: torch is .*, the driver has 9\.9: install the same versions'):
        list(engine().map(work, items))


def test_folders_that_a_machine_does_not_share_are_refused(tmp_path, monkeypatch):
    work, items = write_squares(tmp_path / 'source', [1])
    with check_for(work, items[0]) as check:
        assert check() is None
        identity, folder, source, token = check.args
        assert f'{tmp_path}/other/1 of SOURCE is not there: use object storage' in check.func(identity, folder, str(tmp_path / 'other/1'), token)
        with scratch_for(work.writes) as another:
            (another / 'token').write_text('of another disk')
            said = check.func(identity, folder, source, (str(another / 'token'), token[1]))
            assert f'DEST {tmp_path} is another folder there than here: use object storage' in said
    assert 'is another folder there' in check()  # its token is gone


def test_options_that_could_do_nothing_are_refused(tmp_path, monkeypatch):
    command = ['data_prep.convert', tmp_path, tmp_path / 'out']
    for options, said in (
        (['--ray-actors', 2], '--ray-actors is for --engine ray'),
        (['--engine', 'ray', '--world-size', 2], '--engine ray shares the work among machines by itself'),
        (['--engine', 'ray', '--processes', 2], '--processes is for --engine local'),
        (['--engine', 'ray', '--merge'], '--merge writes no part'),
        (['--engine', 'ray', '--ray-wait-min', 5], '--ray-wait-min needs --ray-actors'),
        (['--engine', 'ray', '--ray-decoders', 5], '--ray-decoders: unknown option'),
        (['--engine', 'ray', '--ray-address', 'head'], "--ray-address head: 'head' is no address of a cluster; write host:port of its head"),
    ):
        assert said in run_here(*command, *options, code=2).stderr
    encode = ['data_prep.encode', *command[1:], '--resolution', 32, '--encoders', tmp_path, '--engine', 'ray', '--ray-gpus']
    for gpus in '-1', '1.5', 'one', 'nan':
        assert (
            f'--ray-gpus {gpus}: is neither 0 (none), nor a share of one GPU such as 0.5, nor a whole number'
            in run_here(*encode, gpus, code=2).stderr
        )
    monkeypatch.setenv('RANK', '1')  # as a launcher does
    monkeypatch.setenv('WORLD_SIZE', '2')
    assert 'no launcher such as composer' in run_here(*command, '--engine', 'ray', code=2).stderr


def converts_without_ray(crawl, out):
    import data_prep.encode
    import data_prep.encoding.dataset  # noqa: F401

    run_here('data_prep.convert', crawl, out, '--processes', 1)
    return [name for name in sys.modules if name.partition('.')[0] == 'ray']


def test_nothing_of_ray_is_imported_without_the_engine(crawl, tmp_path):
    assert ranks(converts_without_ray, [[crawl, tmp_path / 'out']], tmp_path) == ['[]']


def test_as_a_user_does(images, encoders_folder, tmp_path):
    """One process from a cold start, with a cluster of its own."""
    encode(images, tmp_path / 'local', [32], EncoderSource(str(encoders_folder)))
    options = '--resolution', 32, '--encoders', encoders_folder, '--engine', 'ray', '--ray-actors', 1
    result = run_python('-m', 'data_prep.encode', images, tmp_path / 'out', *options, OMP_NUM_THREADS='1')
    assert f'kept {NUM_IMAGES} 100.0 %' in ' '.join(result.stdout.split())
    assert 'ray' not in read_json(tmp_path / 'out/job.json')
    assert tree(tmp_path / 'out') == tree(tmp_path / 'local')
