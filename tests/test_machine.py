"""What a machine cannot do is said before anything is read: no GPU, or one that the installed PyTorch has no kernels for."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu_check
from data_prep.engines.batches import BatchWork
from diffusion.autoencoding.builder import build_trainer as build_autoencoder_trainer
from diffusion.contracts.errors import EncoderError, InputError
from diffusion.cost.hardware import COMPUTE_CAPABILITY, MEMORY_GB, gpu_without_kernels, has_kernels
from diffusion.finetuning.prepare import prepare_streams
from diffusion.recipe import AutoencoderRecipe, RecipeError, load_recipe
from diffusion.recipe.load import load_of_kind
from diffusion.recipe.rules import RULES
from diffusion.training.builder import build_trainer
from fleet.worker.worker import FleetWorker
from tests.conftest import REPOSITORY, run_here

BUILT_FOR = ['sm_50', 'sm_80', 'sm_86', 'sm_90']  # as torch 2.7.0+cu126 has them
SAID = 'NVIDIA B200: PyTorch .* has kernels for sm_50, sm_80, sm_86, sm_90, and none for compute capability 10.0; install a PyTorch that has'


@pytest.mark.parametrize(
    ('capability', 'built_for', 'runs'),
    [
        ((8, 0), ['sm_80'], True),
        ((8, 9), ['sm_80', 'sm_86'], True),  # machine code of an earlier minor version: an L40S
        ((8, 0), ['sm_86'], False),
        ((9, 0), ['sm_80', 'sm_86'], False),
        ((10, 0), BUILT_FOR, False),
        ((10, 0), ['sm_90', 'compute_90'], True),  # PTX is compiled by the driver
        ((8, 6), ['compute_90'], False),
        ((10, 0), ['sm_90a'], False),
        ((10, 0), ['compute_90a'], False),
        ((9, 0), ['sm_90a'], True),
        ((10, 3), ['sm_100f'], True),
        ((12, 0), ['sm_100', 'sm_120'], True),
        ((9, 4), ['gfx90a', 'gfx942'], True),  # ROCm counts otherwise
        ((9, 0), [], True),
    ],
)
def test_code_runs_on_later_minor_versions_and_ptx_on_everything_later(capability, built_for, runs):
    """https://docs.nvidia.com/cuda/blackwell-compatibility-guide and the tables of nvcc's documentation."""
    assert has_kernels(capability, built_for) == runs


@pytest.fixture
def blackwell(monkeypatch):
    monkeypatch.delenv('LOCAL_RANK', raising=False)
    cuda = {'is_available': True, 'get_device_name': 'NVIDIA B200', 'get_device_capability': (10, 0), 'get_arch_list': BUILT_FOR}
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)


PHOTOS = ['data.kind=latents', 'data.streams={own: {photos: {folder: nowhere}, local: null, remote: null}}']


@pytest.mark.skipif(torch.cuda.is_available(), reason='has a GPU')
def test_photos_are_not_prepared_for_a_gpu_that_is_not_there(overrides):
    with pytest.raises(RecipeError, match='train.precision: amp_bf16 needs a GPU') as refused:
        prepare_streams(
            load_recipe(REPOSITORY / 'yamls/shapes.yaml', [*overrides, *PHOTOS, 'train.precision=amp_bf16', 'train.cudnn_benchmark=true'])
        )
    assert len(refused.value.errors) == 2


def test_training_refuses_it_before_photos_are_prepared(blackwell, overrides, tmp_path):
    recipe = load_recipe(REPOSITORY / 'yamls/shapes.yaml', [*overrides, *PHOTOS])
    for start in (prepare_streams, build_trainer):
        with pytest.raises(RecipeError, match=SAID):
            start(recipe)
    vae = load_of_kind(AutoencoderRecipe, REPOSITORY / 'yamls/shapes-vae.yaml', [f'run_folder={tmp_path}/run'], 1, RULES)
    with pytest.raises(RecipeError, match=SAID):
        build_autoencoder_trainer(vae)
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
    'command',
    [
        ['diffusion.evaluate', 'MODEL', '--data', 'nowhere', '--out', 'OUT'],
        ['diffusion.generate', 'MODEL', 'OUT', '--prompt', 'x'],
        ['diffusion.reconstruct', 'nowhere', '--data', 'nowhere', '--out', 'OUT'],
        ['diffusion.serve', 'MODEL', '--port', '0'],
        ['data_prep.encode', 'SOURCE', 'OUT', '--resolution', '32', '--encoders', '.'],
    ],
    ids=lambda command: command[0],
)
def test_commands_refuse_it_before_they_read(command, blackwell, images, tmp_path):
    (tmp_path / 'MODEL').mkdir()
    for name in ('model_index.json', 'export.json'):
        (tmp_path / 'MODEL' / name).write_text('{"resolution": 32}')
    places = {'MODEL': tmp_path / 'MODEL', 'OUT': tmp_path / 'OUT', 'SOURCE': images}
    said = run_here(*(str(places.get(word, word)) for word in command), code=2).stderr
    assert 'none for compute capability 10.0' in said
    assert not (tmp_path / 'OUT').exists()


def test_processes_of_a_cluster_refuse_it(blackwell):
    with pytest.raises(EncoderError, match=SAID):
        BatchWork.start_fed(SimpleNamespace(), cpus=1, gpus=1)


@pytest.fixture
def blackwell_apart(monkeypatch, tmp_path):
    """As `blackwell`, in processes that are started."""
    answers = "is_available=lambda: True, get_device_name=lambda *_: 'NVIDIA B200', get_device_capability=lambda *_: (10, 0)"
    stub = f"from types import SimpleNamespace\n__version__ = '2.7.0+cu126'\ncuda = SimpleNamespace({answers}, get_arch_list=lambda: {BUILT_FOR})\n"
    (tmp_path / 'stub').mkdir()
    (tmp_path / 'stub/torch.py').write_text(stub)
    monkeypatch.setenv('PYTHONPATH', f'{tmp_path}/stub:{REPOSITORY}')


def test_a_gpu_check_is_refused(blackwell_apart, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_check, 'environment_apart', lambda: {'gpu': 'NVIDIA B200'})
    with pytest.raises(InputError, match=SAID):
        gpu_check.prepare(gpu_check.parse(['--work', str(tmp_path / 'work'), '--out', str(tmp_path / 'rows.jsonl')]), [], None)
    assert not (tmp_path / 'work').exists()


def test_a_worker_of_the_fleet_does_not_enrol(blackwell_apart, monkeypatch, tmp_path):
    """Its jobs would fail one after another, and be blamed for it."""
    monkeypatch.setattr(FleetWorker, 'run', lambda self: pytest.fail('enrols'))
    (tmp_path / 'token').write_text('token')
    worker = ['worker', '--server', 'https://host', '--token-file', tmp_path / 'token', '--work', tmp_path / 'work', '--gpu', 'b200', '--gpu-gb', 180]
    assert 'none for compute capability 10.0' in run_here('fleet', *worker, code=2).stderr


def test_plans_and_checks_warn_of_it(monkeypatch):
    """A laptop has no GPU, but a PyTorch that says what it was built for."""
    monkeypatch.setattr(torch._C, '_cuda_getArchFlags', lambda: ' '.join(BUILT_FOR), raising=False)
    warning = 'warning: b200: PyTorch'
    of = partial(run_here, 'diffusion.plan', REPOSITORY / 'yamls/sd2-base-256.yaml', '--gpus', 8)
    assert warning in of('--gpu', 'b200').stderr
    assert 'PyTorch' not in of('--gpu', 'h200').stderr
    checked = run_here(
        'diffusion.check',
        REPOSITORY / 'yamls/shapes.yaml',
        'data.kind=synthetic',
        'model.encoders.source=x/y',
        'model.encoders.revision=' + 40 * 'a',
        'cost.gpu=b200',
    )
    assert warning in checked.stderr
    monkeypatch.setattr(torch._C, '_cuda_getArchFlags', lambda: None)  # a build for CPUs says nothing of the machine that trains
    assert not gpu_without_kernels('b200')


def test_every_gpu_that_may_be_named_is_known_to_run_or_has_its_capability():
    """Those of the list that are not in COMPUTE_CAPABILITY are of versions that every build within setup.py's bounds has kernels for."""
    capabilities = {'a100-40gb': (8, 0), 'a100-80gb': (8, 0), 'h100': (9, 0), 'h100-pcie': (9, 0), 'h100-nvl': (9, 0), 'h200': (9, 0), 'h200-nvl': (9, 0),
                    'l40s': (8, 9), 'a10g': (8, 6), 'rtx-4090': (8, 9), **COMPUTE_CAPABILITY}  # fmt: skip
    assert capabilities.keys() == MEMORY_GB.keys() - {'trainium'}
    assert {gpu for gpu, capability in capabilities.items() if not has_kernels(capability, BUILT_FOR)} == COMPUTE_CAPABILITY.keys()
