"""Post-hoc averages: the arithmetic against integrals and a trajectory, and whole runs against a run that kept the width that was asked for."""

import json
import shutil

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from torch import nn

from diffusion.checkpoints.exporting import export
from diffusion.checkpoints.post_hoc import LARGEST_RESIDUAL, inner_products, solve
from diffusion.checkpoints.reading import ema_weights, find_checkpoint, read_checkpoint
from diffusion.contracts.errors import CheckpointError
from diffusion.recipe.averaging import Profile
from tests.conftest import TINY, run_here
from tests.faults.children import fit, ranks
from tests.faults.driver import Forked, digest, everything_in

KEPT = [Profile.of_sigma_rel(0.05), Profile.of_sigma_rel(0.10)]


def test_inner_products_are_integrals():
    rng, cells = np.random.default_rng(0), 200_000
    for _ in range(5):
        ends, gammas = rng.uniform(5, 100, 2), rng.uniform(0.5, 20, 2)
        times = (np.arange(cells) + 0.5) / cells * ends.max()
        one, other = ((gamma + 1) * times**gamma / end ** (gamma + 1) * (times <= end) for end, gamma in zip(ends, gammas, strict=True))
        expected = (one * other).sum() * ends.max() / cells
        assert inner_products(ends[:1], gammas[:1], ends[1:], gammas[1:]) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize('sigma_rel', [0.05, 0.10])
def test_a_kept_average_is_found_again(sigma_rel):
    weights, residual = solve([100, 200, 300], KEPT, 300, Profile.of_sigma_rel(sigma_rel))
    expected = [0, 0, 0, 0, float(sigma_rel == 0.05), float(sigma_rel == 0.10)]
    assert list(weights.values()) == pytest.approx(expected, abs=1e-6)
    assert list(weights)[-2:] == [(300, 0), (300, 1)]
    assert residual < 1e-6


def test_a_million_batches_and_hundreds_of_averages_stay_sound():
    weights, residual = solve([5000 * number for number in range(1, 201)], KEPT, 1_000_000, Profile.of_sigma_rel(0.08))
    assert residual < 1e-4
    assert sum(map(abs, weights.values())) < 2  # no large weights that cancel
    assert sum(weights.values()) == pytest.approx(1, abs=1e-9)


def test_within_the_limit_the_sum_is_closer_than_any_kept_average():
    """What LARGEST_RESIDUAL is chosen by: a small network in training, its weights after each of 2,000 steps, widths from 0.02 to 0.25."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 4))
    teacher = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer, batches, trajectory = torch.optim.Adam(network.parameters(), lr=2e-3), 2000, []
    for _ in range(batches):
        inputs = torch.randn(16, 8)
        loss = (network(inputs) - 3 * teacher(inputs).detach() - 0.3 * torch.randn(16, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trajectory.append(nn.utils.parameters_to_vector(network.parameters()).detach().double())
    steps = torch.stack(trajectory)

    def average(profile, until):
        edges = (torch.arange(until + 1, dtype=torch.float64) / until) ** profile.exponent
        return edges.diff() @ steps[:until]

    within = 0
    for every in (2000, 1000, 500, 250, 100):
        saved = list(range(every, batches + 1, every))
        averages = {(batch, number): average(profile, batch) for batch in saved for number, profile in enumerate(KEPT)}
        for sigma_rel in (0.02, 0.03, 0.04, 0.06, 0.075, 0.08, 0.12, 0.15, 0.2, 0.25):
            wanted = Profile.of_sigma_rel(sigma_rel)
            (weights, residual), exact = solve(saved, KEPT, batches, wanted), average(wanted, batches)
            found = sum(weight * averages[at] for at, weight in weights.items())
            nearest = min((averages[batches, number] - exact).norm() for number in range(len(KEPT)))
            if residual <= LARGEST_RESIDUAL:
                within += 1
                assert (found - exact).norm() < 0.8 * nearest, (every, sigma_rel)
                assert (found - exact).norm() < 0.01 * exact.norm(), (every, sigma_rel)
    assert within > 30


@pytest.fixture(scope='module')
def settings(encoders_folder):
    return [
        *TINY, f'model.encoders.source={encoders_folder}', 'data.kind=synthetic', 'data.synthetic_samples=64', 'train.duration=40ba', 'optimizer.lr=3e-3',
        'optimizer.eps=1e-5', 'ema.half_life=null', 'checkpoint.every=4ba', 'checkpoint.keep=2', 'checkpoint.keep_every=4ba', 'train.cpu_threads=1',
    ]  # fmt: skip


@pytest.fixture(scope='module')
def run(settings, tmp_path_factory):
    """A run with two widths."""
    folder = tmp_path_factory.mktemp('post-hoc') / 'run'
    fit([*settings, f'run_folder={folder}', 'ema.sigma_rel=[0.05,0.10]'])
    return folder


@pytest.fixture(scope='module')
def tracked(settings, tmp_path_factory):
    """The same run, with a third width alone."""
    folder = tmp_path_factory.mktemp('tracked') / 'run'
    fit([*settings, f'run_folder={folder}', 'ema.sigma_rel=[0.08]', 'checkpoint.keep_every=null'])
    return folder


def unet(folder):
    return dict(StableDiffusionPipeline.from_pretrained(folder, local_files_only=True, safety_checker=None).unet.state_dict())


def distance(one, other):
    assert one.keys() == other.keys()
    return float(torch.stack([(one[name] - other[name]).norm() for name in one]).norm())


def test_an_export_of_another_width_is_the_average_of_a_run_that_kept_it(run, tracked, tmp_path):
    shown = run_here('diffusion.export', run, tmp_path / 'out', '--sigma-rel', '0.08').stdout
    assert 'its profile is met but for 0.' in shown
    assert 'from 10 checkpoints' in shown
    expected, found = ema_weights(read_checkpoint(find_checkpoint(tracked))), unet(tmp_path / 'out')
    kept = ema_weights(read_checkpoint(find_checkpoint(run)))
    assert distance(found, expected) < 0.02 * distance(kept, expected)
    assert 'EMA of sigma_rel 0.08, post hoc from 10 checkpoints, ba00000040.pt' in (tmp_path / 'out/README.md').read_text()
    facts = json.loads((tmp_path / 'out/export.json').read_text())
    assert (facts['weights'], facts['batches'], facts['post_hoc']['sigma_rel']) == ('ema', 40, 0.08)
    assert facts['post_hoc']['from_checkpoints'] == list(range(4, 41, 4))
    assert facts['post_hoc']['residual'] < 0.01
    assert facts['average']['share_of_run'] == pytest.approx(1 - 0.1 ** (1 / Profile.of_sigma_rel(0.08).exponent), abs=0.03)


def test_without_the_option_it_is_the_first_width(run, tmp_path):
    export(run, tmp_path / 'out')
    expected = ema_weights(read_checkpoint(find_checkpoint(run)))
    assert all(torch.equal(weight, expected[name]) for name, weight in unet(tmp_path / 'out').items())


def test_of_an_earlier_checkpoint_later_ones_are_not_taken_and_damaged_ones_are_named(run, tmp_path, capfd):
    shutil.copytree(run, tmp_path / 'run', symlinks=True)
    damaged = tmp_path / 'run/checkpoints/ba00000012.pt'
    damaged.write_bytes(damaged.read_bytes()[:-1])
    facts = export(tmp_path / 'run/checkpoints/ba00000020.pt', tmp_path / 'out', sigma_rel=0.08)
    assert facts['post_hoc']['from_checkpoints'] == [4, 8, 16, 20]
    assert 'ba00000012.pt: not whole' in capfd.readouterr().err


def test_what_cannot_be_made_is_refused_with_the_remedy(run, settings, tmp_path):
    for sigma_rel, weights, expected in (
        (0.25, 'ema', r'0.25 is out of reach of the averages in 1 checkpoint of .* \(batch 40; sigma_rel=\[0.05, 0.1\]\).*checkpoint.keep_every'),
        (0.5, 'ema', r'0.5 is no width; set it above 0'),
        (-1.0, 'ema', r'-1 is no width'),
        (0.08, 'training', r'--weights training takes none'),
    ):
        (tmp_path / 'alone').mkdir(exist_ok=True)
        for suffix in ('pt', 'json'):
            shutil.copy(run / f'checkpoints/ba00000040.{suffix}', tmp_path / 'alone')
        with pytest.raises(CheckpointError, match=expected):
            export(tmp_path / 'alone', tmp_path / 'out', weights, sigma_rel=sigma_rel)
    fit([*settings, f'run_folder={tmp_path}/plain', 'ema.half_life=2ba', 'train.duration=4ba'])
    with pytest.raises(CheckpointError, match=r'is of a run with ema.half_life=2ba.*train with ema.sigma_rel'):
        export(tmp_path / 'plain', tmp_path / 'out', sigma_rel=0.08)


@pytest.fixture(scope='module')
def two_processes(settings, tmp_path_factory):
    folder = tmp_path_factory.mktemp('two')
    runs = [[*settings, f'run_folder={folder}/{sharding}', 'ema.sigma_rel=[0.05,0.10]', f'train.sharding={sharding}', 'train.duration=8ba']
            for sharding in ('ddp', 'zero2')]  # fmt: skip
    answers = ranks(fit_all, [[runs]] * 2, folder)
    assert answers == ['None', 'None']
    return folder


def fit_all(runs):
    for overrides in runs:
        fit(overrides)


def averages(folder, batch):
    ema = dict(read_checkpoint(find_checkpoint(folder / f'checkpoints/ba{batch:08d}.pt'))['algorithms'])['EMA']
    return [ema['average'], *ema['others']]


@pytest.mark.parametrize('sharding', ['ddp', 'zero2'])
def test_two_processes_average_as_one(sharding, run, two_processes):
    for one, other in zip(averages(run, 8), averages(two_processes / sharding, 8), strict=True):
        assert one.keys() == other.keys()
        for name, weight in one.items():
            torch.testing.assert_close(other[name], weight, rtol=0, atol=2e-5)


def test_a_killed_run_ends_as_one_that_nobody_touched(settings, run, tmp_path):
    again = [*settings, f'run_folder={tmp_path}/run', 'ema.sigma_rel=[0.05,0.10]']
    for failpoint, code in (('step@11:kill', -9), ('', 0)):
        with Forked(again, tmp_path / 'output.txt', DIFFUSION_FAILPOINT=failpoint) as process:
            process.wait(code)
    found = [everything_in(find_checkpoint(folder)) for folder in (run, tmp_path / 'run')]
    assert [part for part in found[0] if digest(found[0][part]) != digest(found[1][part])] == []
