import copy
import math
from types import SimpleNamespace

import pytest
import torch
from composer.core import Event
from torch import nn

from diffusion.recipe.averaging import Profile
from diffusion.training.ema import EMA, trained_parameters

KEEP = 0.9  # of the average in an update, where a test does not ask how much


class Net(nn.Module):
    """A trained layer, a frozen one, and an integer buffer."""

    def __init__(self):
        super().__init__()
        self.trained = nn.Linear(5, 7)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer('positions', torch.arange(77))


def walk(model, generator):
    with torch.no_grad():
        for parameter in model.trained.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


def test_follows_a_float64_reference():
    generator = torch.Generator().manual_seed(0)
    model, ema = Net(), EMA([Profile.of_half_life(20)])
    ema.update(model, 0.0)
    expected = {name: p.detach().double().clone() for name, p in trained_parameters(model).items()}
    for _ in range(200):
        walk(model, generator)
        ema.update(model, 0.5 ** (1 / 20))
        for name, p in trained_parameters(model).items():
            expected[name] = expected[name] * 0.5 ** (1 / 20) + p.detach().double() * (1 - 0.5 ** (1 / 20))
    for name, value in expected.items():
        torch.testing.assert_close(ema.average[name].double(), value, rtol=1e-5, atol=1e-6)


def averaged(ema, since, batches):
    """A weight's average where the weight is 0 up to batch `since`, then 1, as training counts batches and calls the algorithm."""
    state = SimpleNamespace(model=Net(), timestamp=SimpleNamespace(batch=SimpleNamespace(value=0)))
    for state.timestamp.batch.value in range(1, batches + 1):
        with torch.no_grad():
            state.model.trained.weight.fill_(float(state.timestamp.batch.value > since))
        if ema.match(Event.BATCH_END, state):
            ema.apply(Event.BATCH_END, state, None)
    return float(ema.average['trained.weight'].mean())


def test_half_life_is_a_half_life():
    assert averaged(EMA([Profile.of_half_life(50)]), since=1000, batches=1050) == pytest.approx(0.5, rel=1e-4)
    assert Profile.of_half_life(6931).kept(200_000, 200_001) == pytest.approx(0.9999, abs=1e-7)
    assert math.log(2) / -math.log(0.9999) == pytest.approx(6931, abs=1)


def test_early_in_a_run_the_half_life_is_a_twentieth_of_it():
    """EDM's ramp: of an average after 400 batches the last 20 make up half, whatever half-life the recipe hopes for."""
    assert averaged(EMA([Profile.of_half_life(6931)]), since=380, batches=400) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize('batches', [100, 400, 1040, 1100])  # the half-life has grown after 1,000
def test_an_interval_does_not_change_the_average(batches):
    one, ten = (averaged(EMA([Profile.of_half_life(50)], start=20, interval=interval), batches - 40, batches) for interval in (1, 10))
    assert one == pytest.approx(ten, rel=1e-4)


def test_frozen_weights_and_integers_are_left_alone():
    model, ema = Net(), EMA([Profile.of_half_life(3)])
    frozen, generator = model.frozen.weight.clone(), torch.Generator().manual_seed(0)
    for _ in range(1000):
        walk(model, generator)
        ema.update(model, KEEP)
    assert set(ema.average) == {'trained.weight', 'trained.bias'}
    assert all(value.dtype == torch.float32 for value in ema.average.values())
    ema.swap(model)
    assert torch.equal(model.positions, torch.arange(77))
    assert torch.equal(model.frozen.weight, frozen)


def test_swapping_twice_restores_to_the_bit():
    model, ema, generator = Net(), EMA([Profile.of_half_life(3)]), torch.Generator().manual_seed(0)
    for _ in range(5):
        walk(model, generator)
        ema.update(model, KEEP)
    weights = {name: p.detach().clone() for name, p in trained_parameters(model).items()}
    average = {name: value.clone() for name, value in ema.average.items()}
    ema.swap(model)
    assert all(torch.equal(p, average[name]) for name, p in trained_parameters(model).items())
    with pytest.raises(AssertionError):
        ema.update(model, KEEP)
    with pytest.raises(AssertionError):
        ema.state_dict()
    ema.swap(model)
    assert all(torch.equal(p, weights[name]) for name, p in trained_parameters(model).items())
    assert all(torch.equal(ema.average[name], average[name]) for name in average)


def test_bf16_weights_are_averaged_in_float32():
    """In bf16 an increment of 1e-4 is below one ulp and the average would never move."""
    model, ema, keep = Net().bfloat16(), EMA([Profile.of_half_life(6931)]), 0.9999
    with torch.no_grad():
        model.trained.weight.fill_(1.0)
    ema.update(model, keep)
    with torch.no_grad():
        model.trained.weight.fill_(1.0078125)
    for _ in range(1000):
        ema.update(model, keep)
    moved = float(ema.average['trained.weight'].mean()) - 1
    # Each step moves the average by a few units in the last place of float32: 5 % is what a thousand roundings leave.
    assert moved == pytest.approx(0.0078125 * (1 - keep**1000), rel=0.05)


def test_names_do_not_depend_on_wrappers():
    model, ema = Net(), EMA([Profile.of_half_life(3)])
    ema.update(model, KEEP)

    class Wrapped(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    assert trained_parameters(Wrapped(model)).keys() == ema.average.keys()
    ema.update(Wrapped(model), KEEP)
    ema.update(torch.compile(model), KEEP)
    assert set(ema.average) == {'trained.weight', 'trained.bias'}


def test_another_models_average_is_refused():
    """Composer's EMA skips names that do not match, and silently averages nothing."""
    ema = EMA([Profile.of_half_life(3)])
    ema.load_state_dict({'average': {'other.weight': torch.zeros(2)}})
    with pytest.raises(KeyError, match='differ in 3 of 2 parameters'):
        ema.update(Net(), KEEP)


def test_offloaded_it_is_the_same(tmp_path):
    averages = []
    for offload in (False, True):
        model, ema, generator = Net(), EMA([Profile.of_half_life(20)], offload=offload), torch.Generator().manual_seed(0)
        torch.nn.init.zeros_(model.trained.weight)
        torch.nn.init.zeros_(model.trained.bias)
        for _ in range(5):
            ema.update(model, KEEP)
            walk(model, generator)
        ema.swap(model)
        ema.swap(model)
        averages.append(ema.state_dict()['average'])
    for name, average in averages[0].items():
        assert torch.equal(average, averages[1][name])


def test_a_loaded_average_is_laid_out_like_the_weights():
    """A contiguous checkpoint of a sharded run, read by a channels_last one: other strides would make each update slow."""
    model = nn.Sequential(nn.Conv2d(4, 8, 3)).to(memory_format=torch.channels_last)
    ema = EMA([Profile.of_half_life(20)])
    loaded = {name: p.detach().clone(memory_format=torch.contiguous_format) + 1 for name, p in trained_parameters(model).items()}
    ema.load_state_dict({'average': loaded})
    ema.update(model, KEEP)
    assert ema.average['0.weight'].stride() == model[0].weight.stride() != loaded['0.weight'].stride()
    torch.testing.assert_close(ema.average['0.weight'], model[0].weight + KEEP)


@pytest.mark.parametrize('interval', [1, 4])
def test_power_functions_are_the_weighted_sum_of_the_trajectory(interval):
    """EDM2's definition in float64: batch t counts by the integral of t ** gamma over the batches since the update before."""
    sigmas, batches, generator, trajectory = (0.05, 0.1, 0.25), 60, torch.Generator().manual_seed(0), {}
    model, ema = Net(), EMA([Profile.of_sigma_rel(sigma) for sigma in sigmas], interval=interval)
    state = SimpleNamespace(model=model, timestamp=SimpleNamespace(batch=SimpleNamespace(value=0)))
    for state.timestamp.batch.value in range(1, batches + 1):
        walk(model, generator)
        if ema.match(Event.BATCH_END, state):
            ema.apply(Event.BATCH_END, state, None)
            trajectory[state.timestamp.batch.value] = model.trained.weight.detach().double().clone()
    for average, sigma in zip(ema.averages, sigmas, strict=True):
        exponent = Profile.of_sigma_rel(sigma).gamma + 1
        expected = sum(((batch / batches) ** exponent - ((batch - interval) / batches) ** exponent) * weight for batch, weight in trajectory.items())
        torch.testing.assert_close(average['trained.weight'].double(), expected, rtol=1e-5, atol=1e-6)
    assert ema.average is ema.averages[0]


def test_several_averages_are_saved_and_the_first_is_swapped_in():
    model, generator = Net(), torch.Generator().manual_seed(0)
    ema, other = (EMA([Profile.of_sigma_rel(0.05), Profile.of_sigma_rel(0.1)]) for _ in range(2))
    assert other.state_dict() == {'average': None, 'others': [None]}
    for batch in range(5):
        walk(model, generator)
        ema.update(model, *(profile.kept(batch, batch + 1) for profile in ema.profiles))
    other.load_state_dict(copy.deepcopy(ema.state_dict()))
    assert other.started
    for each in (ema, other):
        each.update(model, 0.9, 0.8)
    for one, loaded in zip(ema.averages, other.averages, strict=True):
        assert all(torch.equal(one[name], loaded[name]) for name in one)
    weight, average = model.trained.weight.detach().clone(), ema.averages[0]['trained.weight'].clone()
    ema.swap(model)
    assert torch.equal(model.trained.weight, average)
    ema.swap(model)
    assert torch.equal(model.trained.weight, weight)
