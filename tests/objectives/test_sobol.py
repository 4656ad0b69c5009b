import math

import pytest
import torch

from diffusion.datasets.keyed_random import Draw, integers
from diffusion.objectives.objective import _reversed_bits, sobol_points, spread_points

T = 1000


def keys(count, epoch=0, first=0):
    return torch.stack([torch.full((count,), epoch), torch.arange(first, first + count), torch.zeros(count, dtype=torch.int64)], dim=1)


def sobol_timesteps(seed, key, batch, num_timesteps):
    """As diffusion's `times` makes timesteps of points."""
    return spread_points(seed, key, batch) * num_timesteps >> 32


def run(num_batches, size=64, seed=17, num_timesteps=T):
    """(num_batches, size): every batch has samples of its own."""
    return torch.stack([sobol_timesteps(seed, keys(size, first=i * size), i, num_timesteps) for i in range(num_batches)])


def test_reversed_bits():
    words = [0, 1, 2, 3, 2**31, 2**32 - 1, 0x12345678]
    assert _reversed_bits(torch.tensor(words)).tolist() == [int(f'{word:032b}'[::-1], 2) for word in words]


@pytest.mark.parametrize('count', [2, 64, 2048])
def test_without_the_shift_they_are_the_points_of_pytorchs_engine(count):
    engine = torch.quasirandom.SobolEngine(1, scramble=False)  # in Gray-code order: the same points within each power of two
    expected = engine.draw(count, dtype=torch.float64)[:, 0].sort().values
    shift = sobol_points(17, torch.tensor([0]))  # the point 0, shifted
    ours = (sobol_points(17, torch.arange(count)) ^ shift).double() / 2**32
    assert torch.equal(ours.sort().values, expected)


@pytest.mark.parametrize('bits', [0, 1, 6, 11])
@pytest.mark.parametrize('batch', [0, 1, 5, 999_999])
def test_an_aligned_batch_has_one_point_in_each_of_as_many_bins(bits, batch):
    size = 2**bits
    points = sobol_points(17, torch.arange(batch * size, (batch + 1) * size))
    assert (points >> (32 - bits)).sort().values.tolist() == list(range(size))
    timesteps = sobol_timesteps(17, keys(size), batch, num_timesteps=size)
    assert timesteps.sort().values.tolist() == list(range(size))


def test_the_shipped_batch_has_each_timestep_two_or_three_times():
    for batch in (0, 1, 549_999):
        counts = torch.bincount(sobol_timesteps(17, keys(2048, first=batch * 2048), batch, T), minlength=T)
        assert counts.shape == (T,)
        assert set(counts.tolist()) == {2, 3}


def test_neither_ranks_nor_order_change_the_timestep_of_a_sample():
    key = keys(64, epoch=3, first=2**33)
    expected = sobol_timesteps(17, key, 7, T)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sobol_timesteps(17, key[order], 7, T), expected[order])
    strided = torch.cat([key[0::2], key[1::2]])  # as two ranks gather them
    assert torch.equal(sobol_timesteps(17, strided, 7, T).view(2, 32).T.flatten(), expected)


def test_a_sample_gets_other_timesteps_in_other_epochs_and_seeds():
    reference = sobol_timesteps(17, keys(64), 7, T)
    for other in (
        sobol_timesteps(18, keys(64), 7, T),
        sobol_timesteps(17, keys(64, epoch=1), 7, T),  # the same points, dealt anew
        sobol_timesteps(17, keys(64), 8, T),
    ):
        assert (reference == other).float().mean() < 0.1
    assert not torch.equal(reference.sort().values, sobol_timesteps(18, keys(64), 7, T).sort().values)
    # Over many epochs one sample sees all timesteps alike, whatever the batches it is in.
    seen = torch.stack([sobol_timesteps(17, keys(8, epoch=epoch), epoch, T)[0] for epoch in range(1000)]).double()
    assert abs(seen.mean() - (T - 1) / 2) < 4 * T / math.sqrt(12 * 1000)
    assert torch.bincount((seen // 100).long(), minlength=10).min() > 65


def test_a_sample_that_a_batch_has_twice_has_two_points():
    """Up-sampling can put it there; it is trained at a timestep for each occurrence, in whatever order the ranks gather them."""
    key = keys(64)
    key[32:, 1], key[32:, 2] = key[:32, 1], 1
    timesteps = sobol_timesteps(17, key, 0, 64)
    assert timesteps.sort().values.tolist() == list(range(64))
    assert torch.equal(sobol_timesteps(17, key.flip(0), 0, 64).flip(0), timesteps)


def test_over_a_run_timesteps_are_uniform():
    for size in (64, 48):  # 48: not a power of two, so that no batch is aligned
        counts = torch.bincount(run(500, size).flatten(), minlength=T)
        assert counts.shape == (T,)
        assert (counts - 500 * size / T).abs().max() <= 2  # of 32 and 24; independent draws would be off by 15 somewhere


def test_the_sequence_begins_anew_after_2_to_the_32_points():
    assert torch.equal(sobol_points(17, torch.arange(2**32 - 2, 2**32 + 2))[2:], sobol_points(17, torch.arange(2)))


def test_the_loss_of_a_batch_varies_less():
    """A stand-in for the loss: falls with the timestep, as a U-Net's does, and has noise of its own from sample to sample."""
    sobol = run(400)
    uniform = torch.stack([integers(17, keys(64, first=i * 64), Draw.TIMESTEP, T) for i in range(400)])

    def loss(t):
        return torch.exp(-t / 250.0)

    assert abs(loss(sobol).mean() - loss(torch.arange(T)).mean()) < 1e-3  # no bias
    # One point in each of 64 bins, all at the same place in theirs: (loss(0) - loss(T))^2 / 12 / 64^2, against var(loss) / 64.
    assert loss(sobol).mean(dim=1).var() < 0.03 * loss(uniform).mean(dim=1).var()
    noise = 0.1 * torch.randn(400, 64, generator=torch.Generator().manual_seed(0))
    assert (loss(sobol) + noise).mean(dim=1).var() < 0.5 * (loss(uniform) + noise).mean(dim=1).var()
