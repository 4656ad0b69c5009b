"""Muon against singular value decompositions, against itself written down again in float64, against AdamW, and over several processes."""

import json
import math
import shutil
from dataclasses import asdict
from unittest import mock

import pytest
import torch
from torch import nn

from diffusion.checkpoints.reading import find_checkpoint, read_checkpoint
from diffusion.cost.facts import state_bytes
from diffusion.families.counting.counts import Counter
from diffusion.families.registry import build_network, family_of
from diffusion.recipe import RecipeError, load_recipe
from diffusion.recipe.techniques import MuonSettings
from diffusion.training.builder import build_trainer
from diffusion.training.muon import QUINTIC, Muon, newton_schulz, rows_by_part
from diffusion.training.trainer import lay_out_like_weights
from tests.conftest import REPOSITORY, TINY, run_here
from tests.faults.children import fit, ranks
from tests.faults.driver import YAML, Forked, digest, everything_in
from tests.training.test_sharding import TOLERANCE

MUON = ['optimizer.muon.momentum=0.9']
LR, DECAY, MOMENTUM = 0.02, 0.1, 0.95


def matrix(rows, columns, smallest=1.0, seed=0):
    """U S V^T with singular values from `smallest` to 1, and U V^T; float64."""
    generator = torch.Generator().manual_seed(seed)
    rank = min(rows, columns)
    left, right = (torch.linalg.qr(torch.randn(side, rank, generator=generator, dtype=torch.float64))[0] for side in (rows, columns))
    return left @ torch.diag(torch.linspace(smallest, 1, rank, dtype=torch.float64)) @ right.T, left @ right.T


@pytest.mark.parametrize('shape', [(64, 64), (192, 64), (64, 256), (1, 8)])
@pytest.mark.parametrize(('dtype', 'low', 'high'), [(torch.float32, 0.68, 1.21), (torch.bfloat16, 0.66, 1.23)])
def test_singular_values_become_about_one_and_their_vectors_stay(shape, dtype, low, high):
    given, _ = matrix(*shape, smallest=0.02)
    found = newton_schulz(given.to(dtype), 5).double()
    left, _, right = torch.linalg.svd(given, full_matrices=False)
    values = left.T @ found @ right.T  # diagonal if the vectors stayed
    assert low <= values.diagonal().min()
    assert values.diagonal().max() <= high
    assert (values - values.diagonal().diag()).abs().max() < (0.05 if dtype == torch.bfloat16 else 1e-4)


def test_many_steps_with_converging_coefficients_are_the_polar_factor(monkeypatch):
    """Newton-Schulz of order 5 (15/8, -10/8, 3/8) converges to U V^T; Muon's coefficients trade that for speed."""
    given, expected = matrix(48, 32, smallest=0.05)
    monkeypatch.setattr('diffusion.training.muon.QUINTIC', (15 / 8, -10 / 8, 3 / 8))
    torch.testing.assert_close(newton_schulz(given, 40), expected, rtol=0, atol=1e-6)
    assert QUINTIC == (3.4445, -4.7750, 2.0315)


def test_a_matrix_of_zeros_stays_one():
    assert not newton_schulz(torch.zeros(8, 4), 5).any()


def independent_update(weight, gradients, stacked):
    """The published update of one weight, over its gradients, by singular values in float64: what the quintic makes of each by itself."""
    weight, momentum = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    for gradient in gradients:
        momentum = MOMENTUM * momentum + gradient.double()
        parts = []
        for part in (gradient.double() + MOMENTUM * momentum).chunk(stacked):
            left, values, right = torch.linalg.svd(part, full_matrices=False)
            values = values / part.norm()
            for _ in range(5):
                values = QUINTIC[0] * values + QUINTIC[1] * values**3 + QUINTIC[2] * values**5
            parts.append(0.2 * math.sqrt(max(part.shape)) * left @ torch.diag(values) @ right)
        weight = weight - LR * (torch.cat(parts) + DECAY * weight)
    return weight


@pytest.mark.parametrize(('shape', 'stacked'), [((32, 48), 1), ((48, 16), 3), ((16, 16), 1)])
def test_updates_are_the_published_ones(shape, stacked):
    generator = torch.Generator().manual_seed(1)
    weight = nn.Parameter(torch.randn(shape, generator=generator))
    gradients = [torch.randn(shape, generator=generator) for _ in range(5)]
    expected = independent_update(weight.detach(), gradients, stacked)
    optimizer = muon([{'params': [weight], 'lr': LR, 'weight_decay': DECAY, 'stacked': stacked}])
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    torch.testing.assert_close(weight.detach().double(), expected, rtol=0, atol=2e-5)
    assert list(optimizer.state[weight]) == ['momentum']


@pytest.mark.parametrize('shape', [(32, 48), (48, 16), (16, 16)])
def test_plain_matrices_take_the_steps_of_pytorchs_muon(shape):
    """PyTorch's multiplies in bf16 on every device, ours on a GPU alone: so in float32 here, whose rounding is the difference."""
    generator = torch.Generator().manual_seed(1)
    start, gradients = torch.randn(shape, generator=generator), [torch.randn(shape, generator=generator) for _ in range(8)]
    ours, theirs = (nn.Parameter(start.clone()) for _ in range(2))
    group = {'lr': LR, 'weight_decay': DECAY}
    optimizers = (
        muon([{'params': [ours], 'stacked': 1, **group}]),
        torch.optim.Muon([theirs], **group, momentum=MOMENTUM, ns_coefficients=QUINTIC, ns_steps=5, adjust_lr_fn='match_rms_adamw'),
    )
    with mock.patch.object(torch.Tensor, 'bfloat16', lambda tensor: tensor.clone()):
        for gradient in gradients:
            for weight, optimizer in zip((ours, theirs), optimizers, strict=True):
                weight.grad = gradient.clone()
                optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)
    assert (ours - start).abs().max() > 0.05  # or the test tests nothing
    momenta = optimizers[0].state[ours]['momentum'], optimizers[1].state[theirs]['momentum_buffer']
    torch.testing.assert_close(momenta[0] * (1 - MOMENTUM), momenta[1], rtol=0, atol=1e-6)  # by which their checkpoints differ


def muon(groups):
    return Muon(groups, (0.9, 0.99), 1e-8, MOMENTUM, 5)


def test_the_size_of_an_update_is_adamws():
    """Root mean square 0.2 to 0.3 of the learning rate, whatever the shape: arXiv 2502.16982, section 2.2."""
    for shape in ((64, 64), (256, 64), (64, 512)):
        weight = nn.Parameter(torch.zeros(shape))
        weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        muon([{'params': [weight], 'lr': 1.0, 'weight_decay': 0.0, 'stacked': 1}]).step()
        assert 0.15 < float(weight.detach().square().mean().sqrt()) < 0.25


@pytest.mark.parametrize('divisor', [None, 7.0])
def test_the_other_parameters_follow_adamw_to_the_bit(divisor):
    shapes, updates = [(5, 7), (3,), (2, 3, 3, 3)], []
    for ours in (True, False):
        generator = torch.Generator().manual_seed(3)
        weights = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        group = {'params': weights, 'lr': LR, 'weight_decay': DECAY}
        optimizer = muon([group]) if ours else torch.optim.AdamW([group], betas=(0.9, 0.99), fused=True)
        for number in range(6):
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=generator)
            optimizer.grad_scale = None if divisor is None else torch.tensor(divisor)
            optimizer.found_inf = torch.tensor(float(number == 3))
            optimizer.step()
        updates.append((weights, [optimizer.state[weight] for weight in weights]))
    for one, other in zip(updates[0][0], updates[1][0], strict=True):
        assert torch.equal(one, other)
    assert digest(updates[0][1]) == digest(updates[1][1])


def test_gradients_are_divided_and_those_that_are_not_finite_change_nothing():
    weights, generator = (
        [nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(0))) for _ in range(2)],
        torch.Generator().manual_seed(4),
    )
    plain, guarded = (muon([{'params': [weight], 'lr': LR, 'weight_decay': DECAY, 'stacked': 1}]) for weight in weights)
    for number in range(4):
        gradient = torch.randn(8, 8, generator=generator)
        weights[0].grad, weights[1].grad = gradient.clone(), gradient * 8
        guarded.grad_scale, guarded.found_inf = torch.tensor(8.0), torch.tensor(0.0)
        plain.step()
        guarded.step()
        torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=1e-6)
        before = weights[1].detach().clone(), guarded.state[weights[1]]['momentum'].clone()
        weights[1].grad = torch.full((8, 8), [math.nan, math.inf][number % 2])
        guarded.found_inf = torch.tensor(1.0)
        guarded.step()
        assert torch.equal(weights[1], before[0])
        assert torch.equal(guarded.state[weights[1]]['momentum'], before[1])


@pytest.mark.parametrize(('rows', 'parts'), [(8, 2), (7, 2), (3, 4), (9, 4), (1, 3)])
def test_rows_are_divided_as_pytorch_divides_them(rows, parts):
    chunks = [len(chunk) for chunk in torch.empty(rows, 2).chunk(parts)]
    assert rows_by_part(rows, parts) == chunks + [0] * (parts - len(chunks))


@pytest.mark.parametrize(('network', 'share', 'num_stacks'), [('prx-600m', 0.989, 4), ('sd2-base', 0.345, 2), ('sdxl-base', 0.867, 2)])
def test_the_matrices_of_a_network_are_those_of_its_blocks(network, share, num_stacks):
    with torch.device('meta'):
        built = build_network(network)
    matrices = family_of(network).matrices(built)
    assert sum(weight.numel() for weight in matrices) / sum(weight.numel() for weight in built.parameters()) == pytest.approx(share, abs=1e-3)
    assert len(set(matrices.values())) == num_stacks
    assert all(weight.ndim == 2 and weight.shape[0] % stacked == 0 for weight, stacked in matrices.items())
    names = {name for name, weight in built.named_parameters() if weight in matrices}
    assert not any(word in name for name in names for word in ('embed', 'time_in', 'txt_in', 'img_in', 'final_layer', 'conv_', 'norm'))


@pytest.fixture(scope='module')
def settings(encoders_folder):
    return [
        *TINY, *MUON, f'model.encoders.source={encoders_folder}', 'data.kind=synthetic', 'data.synthetic_samples=64', 'batch.global_size=16',
        'batch.micro_size=8', 'train.duration=6ba', 'optimizer.lr=1e-3', 'optimizer.eps=1e-5', 'ema.half_life=2ba', 'data.caption_dropout=0.3', 'train.cpu_threads=1',
    ]  # fmt: skip


@pytest.fixture(scope='module')
def one_process(settings, tmp_path_factory):
    """Six batches, and eight."""
    folder = tmp_path_factory.mktemp('one')
    for batches in (6, 8):
        fit([*settings, f'run_folder={folder}/{batches}', f'train.duration={batches}ba', 'batch.micro_size=16'])
    return folder


def train(runs):
    """Each of the runs on this rank, one after the other; how many matrices this rank orthogonalized in each."""
    from diffusion.training import muon as module

    counts, stock = {}, module.newton_schulz
    for folder, overrides in runs.items():
        calls = []
        module.newton_schulz = lambda matrix, steps: (calls.append(tuple(matrix.shape)), stock(matrix, steps))[1]  # noqa: B023
        trainer = build_trainer(load_recipe(YAML, [*overrides, f'run_folder={folder}'], num_gpus=2))
        calls.clear()
        trainer.fit()
        trainer.close()
        counts[folder] = len(calls)
    return json.dumps(counts)


def together(num_ranks, runs, settings, folder, nodes=1):
    texts = ranks(train, [[{str(folder / name): [*settings, *more] for name, more in runs.items()}]] * num_ranks, folder, nodes)
    return {name: [json.loads(text)[str(folder / name)] for text in texts] for name in runs}


@pytest.fixture(scope='module')
def two_processes(settings, one_process, tmp_path_factory):
    folder = tmp_path_factory.mktemp('two')
    shutil.copytree(one_process / '6', folder / 'continued', symlinks=True)
    runs = {'ddp': [], 'zero2': ['train.sharding=zero2'], 'continued': ['train.sharding=zero2', 'train.duration=8ba']}
    return folder, together(2, runs, settings, folder)


def assert_equal(one, other):
    states = [read_checkpoint(find_checkpoint(folder)) for folder in (one, other)]
    for part in ('model', 'optimizers'):
        expected, found = (state[part] if part == 'model' else state[part]['Muon']['state'] for state in states)
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=5 * TOLERANCE)


@pytest.mark.parametrize('name', ['ddp', 'zero2'])
def test_two_processes_train_as_one_and_orthogonalize_each_matrix_once(name, settings, one_process, two_processes):
    folder, counts = two_processes
    assert_equal(one_process / '6', folder / name)
    network = build_network('tiny')
    num_matrices = sum(family_of('tiny').matrices(network).values())
    assert sum(counts[name]) == 6 * num_matrices
    assert abs(counts[name][0] - counts[name][1]) <= 6 * 2


def test_a_sharded_run_resumes_from_one_process_and_the_other_way_round(settings, one_process, two_processes, tmp_path):
    folder, _ = two_processes
    assert_equal(one_process / '8', folder / 'continued')
    shutil.copytree(folder / 'zero2', tmp_path / 'run', symlinks=True)
    fit([*settings, f'run_folder={tmp_path}/run', 'train.duration=8ba', 'batch.micro_size=16'])
    assert_equal(one_process / '8', tmp_path / 'run')


def test_hsdp_on_two_nodes_trains_as_one_process(settings, one_process, tmp_path):
    counts = together(4, {'hsdp': ['train.sharding=hsdp', 'batch.micro_size=2']}, settings, tmp_path, nodes=2)
    assert_equal(one_process / '6', tmp_path / 'hsdp')
    assert sum(counts['hsdp']) == 6 * sum(family_of('tiny').matrices(build_network('tiny')).values())


def test_a_killed_run_ends_as_one_that_nobody_touched(settings, tmp_path):
    found = []
    for name, failpoint, code in (('untouched', '', 0), ('killed', 'step@5:kill', -9), ('killed', '', 0)):
        run = [*settings, f'run_folder={tmp_path}/{name}', 'checkpoint.every=2ba']
        with Forked(run, tmp_path / 'output.txt', DIFFUSION_FAILPOINT=failpoint) as process:
            process.wait(code)
    found = [everything_in(find_checkpoint(tmp_path / name)) for name in ('untouched', 'killed')]
    assert found[0].keys() == found[1].keys()
    assert [part for part in found[0] if digest(found[0][part]) != digest(found[1][part])] == []
    state = found[0]['optimizers']['Muon']['state']
    assert {tuple(sorted(names)) for names in state.values()} == {('momentum',), ('exp_avg', 'exp_avg_sq', 'step')}


def test_momentum_is_laid_out_like_its_weight():
    weight = nn.Parameter(torch.randn(4, 6).T)
    optimizer = muon([{'params': [weight], 'lr': LR, 'weight_decay': 0.0, 'stacked': 1}])
    optimizer.state[weight]['momentum'] = torch.randn(6, 4)
    before = optimizer.state[weight]['momentum'].clone()
    lay_out_like_weights(optimizer)
    assert optimizer.state[weight]['momentum'].stride() == weight.stride()
    assert torch.equal(optimizer.state[weight]['momentum'], before)


def test_the_plan_knows_that_muon_keeps_one_state():
    with_muon, without = (load_recipe(YAML, ['data.kind=synthetic', f'optimizer.muon={value}']) for value in ('{}', 'null'))
    counts = [Counter.from_file().counts(recipe, activations=False) for recipe in (with_muon, without)]
    assert counts[1].num_in_matrices == 0
    assert counts[0].num_in_matrices / counts[0].trained_parameters == pytest.approx(0.345, abs=1e-3)
    assert state_bytes(with_muon, 100, 60, num_gpus=1)['optimizer state'] == 8 * 40 + 4 * 60
    assert asdict(with_muon.optimizer)['muon'] == asdict(MuonSettings()) == {'momentum': 0.95, 'steps': 5}


def test_check_says_what_muon_trains():
    shown = run_here('diffusion.check', YAML, 'data.kind=synthetic', 'optimizer.muon={}').stdout
    assert 'Muon trains 34.5% of 865,910,724 parameters' in shown


def test_with_an_adapter_it_is_refused():
    with pytest.raises(RecipeError, match=r'optimizer.muon: would orthogonalize'):
        load_recipe(REPOSITORY / 'yamls/shapes-lora.yaml', ['optimizer.muon={}', 'model.encoders.source=.'])
