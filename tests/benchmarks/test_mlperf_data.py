"""The benchmark's own data become ours, and a run on them, killed and resumed, becomes a log that MLCommons' checker accepts."""

import io
import pickle
import signal
import tarfile

import numpy as np
import pytest
from streaming import StreamingDataset

from benchmarks.mlperf.moments import TRANSFORM
from benchmarks.mlperf.runs import RECIPE
from diffusion.encoders.frozen import Vae
from diffusion.evaluation.job.images import read_prompts_file
from diffusion.recipe import load_recipe
from diffusion.training.builder import build_trainer
from tests.benchmarks.mlperf_runs import FAILS, PASSES, write_evaluation
from tests.conftest import TINY, read_json, run_here
from tests.faults.children import exit_code, start

SHAPE = 8, 64, 64
PX = 256  # of the tiny VAE, which has 4 px a latent


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def write_tar(path, samples):
    """As webdataset_images2latents.py leaves it: a whole folder, its own entry first; `samples` by key, each content by suffix."""
    with tarfile.open(path, 'w') as tar:
        folder = tarfile.TarInfo('')
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for key, files in samples.items():
            for suffix, content in sorted(files.items()):
                member = tarfile.TarInfo(f'{key}.{suffix}')
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def sample(rng, caption='a red circle'):
    moments = rng.normal(0, 3, (1, *SHAPE)).astype(np.float32)
    moments[:, 4:] -= 10  # log variances
    return {'npy': npy(moments), 'txt': caption.encode(), 'json': b'{"LICENSE": "CC-BY"}'}, moments[0]


@pytest.fixture(scope='module')
def tars(tmp_path_factory):
    """Two tars of six samples each, and their moments by key."""
    folder, rng, expected = tmp_path_factory.mktemp('tars'), np.random.default_rng(0), {}
    for shard in range(2):
        samples = {}
        for i in range(6):
            key = f'{shard:05}{i:04}'
            samples[key], expected[f'{shard:05}/{key}'] = sample(rng, f'caption {i} of {shard}')
        write_tar(folder / f'{shard:05}.tar', samples)
    (folder / 'sha512sums.txt').write_text('of the download\n')
    return folder, expected


@pytest.fixture(scope='module')
def moments(tars, encoders_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp('moments') / 'mds'
    run_here('benchmarks.mlperf.data', 'moments', tars[0], out, '--encoders', encoders_folder, '--processes', 1)
    return out


def test_moments_and_captions_arrive_as_the_reference_reads_them(tars, moments, encoders_folder):
    rows = {row['key']: row for row in StreamingDataset(local=str(moments), batch_size=1)}
    _, expected = tars
    assert rows.keys() == expected.keys()
    for key, exact in expected.items():
        assert rows[key]['moments'].dtype == np.float16
        np.testing.assert_array_equal(rows[key]['moments'], exact.astype(np.float16))  # x.half() of ddpm.py, get_input
    assert rows['00001/000010002']['caption'] == 'caption 2 of 1'
    manifest = read_json(moments / 'manifest.json')
    assert (manifest['kind'], manifest['num_samples'], manifest['resolution'], manifest['transform']) == ('latents', 12, PX, TRANSFORM)
    assert manifest['encoder']['vae_sha256'] == Vae.find(str(encoders_folder), None).sha256


def test_what_cannot_be_used_is_counted(encoders_folder, tmp_path):
    rng = np.random.default_rng(1)
    whole, _ = sample(rng)
    unusable = {
        'a': {'txt': b'no moments'},
        'b': {'npy': whole['npy']},
        'c': {**whole, 'npy': whole['npy'][:-100]},
        'd': {**whole, 'npy': pickle.dumps([1.0])},
        'e': {**whole, 'npy': npy(np.full((1, *SHAPE), 1e6, np.float32))},
        'f': {**whole, 'txt': b'\xff\xfe\xff'},
    }
    (tmp_path / 'tars').mkdir()
    write_tar(tmp_path / 'tars/00000.tar', {**unusable, 'g': whole})
    out = run_here('benchmarks.mlperf.data', 'moments', tmp_path / 'tars', tmp_path / 'out', '--encoders', encoders_folder, '--processes', 1).stdout
    manifest = read_json(tmp_path / 'out/manifest.json')
    reasons = {'no moments': 1, 'no caption': 1, 'moments cannot be read': 2, 'moments not finite': 1, 'caption is not UTF-8': 1}
    assert (manifest['num_samples'], manifest['dropped']) == (1, reasons)
    assert 'dropped: moments cannot be read' in out


@pytest.mark.parametrize(
    ('make', 'said'),
    [
        (
            lambda folder: write_tar(folder / '0.tar', {'a': {'npy': npy(np.zeros((1, 8, 32, 32), np.float32)), 'txt': b'a'}}),
            'these are not the tars',
        ),
        (lambda folder: (folder / '0.tar').write_bytes(b'x' * 2000), 'cannot be read'),
        (lambda folder: (folder / 'readme.txt').write_text('x'), 'holds no .tar'),
    ],
)
def test_other_folders_are_refused(encoders_folder, tmp_path, make, said):
    (tmp_path / 'tars').mkdir()
    make(tmp_path / 'tars')
    out = run_here('benchmarks.mlperf.data', 'moments', tmp_path / 'tars', tmp_path / 'out', '--encoders', encoders_folder, '--processes', 1, code=2)
    assert said in out.stderr


def test_a_conversion_that_was_stopped_resumes(tars, moments, encoders_folder, tmp_path):
    """By its parts: one of two hosts, then the other one."""
    command = ['benchmarks.mlperf.data', 'moments', tars[0], tmp_path / 'out', '--encoders', encoders_folder, '--processes', 1, '--world-size', 2]
    run_here(*command, '--rank', 1)
    assert not (tmp_path / 'out/manifest.json').exists()
    run_here(*command, '--rank', 0)
    assert read_json(tmp_path / 'out/index.json') == read_json(moments / 'index.json')


TSV = 'image_id\tid\tcaption\n42\t7\tA "big" dog, running\n43\t9\t"A cat with a ""hat"""\n'


def test_prompts_are_the_captions_in_their_order(tmp_path):
    (tmp_path / 'list.tsv').write_text(TSV)
    run_here('benchmarks.mlperf.data', 'prompts', tmp_path / 'list.tsv', tmp_path / 'prompts.txt')
    prompts = read_prompts_file(tmp_path / 'prompts.txt')
    assert [tuple(prompt) for prompt in prompts] == [(0, 'A "big" dog, running'), (1, 'A cat with a "hat"')]


@pytest.mark.parametrize(
    ('content', 'said'),
    [
        ('a\tb\n1\t2\n', 'has a, b; val2014_30k.tsv has the columns caption, id, image_id'),
        (TSV + '1\t2\t\n', '1 captions are empty'),
        ('', 'has no row'),
    ],
)
def test_other_lists_are_refused(tmp_path, content, said):
    (tmp_path / 'list.tsv').write_text(content)
    assert said in run_here('benchmarks.mlperf.data', 'prompts', tmp_path / 'list.tsv', tmp_path / 'prompts.txt', code=2).stderr


def train(overrides):
    trainer = build_trainer(load_recipe(RECIPE, overrides))
    trainer.fit()
    trainer.close()


def test_a_run_that_was_killed_and_resumed_has_a_log_that_passes(moments, encoders_folder, tmp_path):
    """Trained for real on converted moments, with a tiny network; its scores are made up. It dies right after it saved its second checkpoint."""
    checking = pytest.importorskip('mlperf_logging.compliance_checker.mlp_compliance', reason='mlperf-logging is installed with [dev]')
    run, out = tmp_path / 'run', tmp_path / 'logs'
    more = [f'model.encoders.source={encoders_folder}', f'run_folder={run}', f'data.streams.train.local={moments}', f'data.resolution={PX}']
    sizes = ['batch.global_size=4', 'batch.micro_size=2', 'train.duration=6ba', 'checkpoint.every=2ba']
    overrides = [*TINY, *more, *sizes]
    assert exit_code(start(train, overrides, DIFFUSION_FAILPOINT='save.latest@2:kill')) == -signal.SIGKILL
    assert exit_code(start(train, overrides)) == 0
    assert sorted(path.stem for path in (run / 'checkpoints').glob('*.pt')) == ['ba00000002', 'ba00000004', 'ba00000006']
    for batches, scores in ((2, FAILS), (4, FAILS), (6, PASSES)):
        write_evaluation(run, batches, *scores)
    refused = run_here('benchmarks.mlperf', run, '--out', out, code=2).stderr
    assert all(key in refused for key in ('model.network: tiny -> sd2-base', f'data.resolution: {PX} -> 512', 'checkpoint.every: 2ba -> 128000ba'))
    assert 'optimizer' not in refused
    said = run_here('benchmarks.mlperf', run, '--out', out, '--rehearsal', '--division', 'closed').stdout
    assert 'A rehearsal: no result.' in said
    cells = [cell.strip() for cell in said.splitlines()[2].split('|')]
    assert cells[2:5] == ['17', '2', '24']  # seed, starts, samples
    checker = checking.make_checker('training', '5.0.0', quiet=False, werror=True)
    valid, *_ = checking.main(str(out / 'result_0.txt'), 'training_5.0.0/common.yaml', checker)
    assert valid
    log = (out / 'result_0.txt').read_text()
    assert '"key": "train_samples", "value": 12' in log
    assert '"key": "gradient_accumulation_steps", "value": 2' in log
