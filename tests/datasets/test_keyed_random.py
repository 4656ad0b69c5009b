import math

import torch

from diffusion.datasets.keyed_random import Draw, integers, normal, philox, random_bits, random_order, uniform


def keys(count, epoch=0, first=0, occurrence=0):
    return torch.stack([torch.full((count,), epoch), torch.arange(first, first + count), torch.full((count,), occurrence)], dim=1)


def philox_in_python(counter, key):
    """Philox4x32-10 in Python's unbounded integers, from the paper's figure."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def run_philox(counter, key):
    words = philox(tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key))
    return [int(word) for word in words]


def test_philox_known_answers():
    """The vectors that ship with the authors' Random123 (kat_vectors, philox4x32 10)."""
    ones = 0xFFFFFFFF
    assert run_philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert run_philox([ones] * 4, [ones] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0]
    assert run_philox(*pi) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    assert run_philox(*pi) == philox_in_python(*pi)


def test_each_of_seed_epoch_id_occurrence_and_draw_changes_the_numbers():
    reference = normal(17, keys(4), Draw.NOISE, (4, 8, 8))
    assert torch.equal(reference, normal(17, keys(4), Draw.NOISE, (4, 8, 8)))
    for other in (
        normal(18, keys(4), Draw.NOISE, (4, 8, 8)),
        normal(0, keys(4), Draw.NOISE, (4, 8, 8)),
        normal(17, keys(4, epoch=1), Draw.NOISE, (4, 8, 8)),
        normal(17, keys(4, first=4), Draw.NOISE, (4, 8, 8)),
        normal(17, keys(4, first=2**32), Draw.NOISE, (4, 8, 8)),
        normal(17, keys(4, occurrence=1), Draw.NOISE, (4, 8, 8)),
        normal(17, keys(4, occurrence=2**24 - 1), Draw.NOISE, (4, 8, 8)),
        normal(17, keys(4), Draw.POSTERIOR, (4, 8, 8)),
    ):
        assert (reference - other).abs().min(dim=1).values.max() > 1e-6
        assert abs(torch.corrcoef(torch.stack([reference.flatten(), other.flatten()]))[0, 1]) < 0.15


def test_a_sample_does_not_depend_on_its_batch():
    whole = normal(17, keys(8), Draw.NOISE, (4, 8, 8))
    parts = [normal(17, keys(8)[i : i + 1], Draw.NOISE, (4, 8, 8)) for i in range(8)]
    torch.testing.assert_close(whole, torch.cat(parts), rtol=1e-6, atol=1e-6)
    assert torch.equal(random_bits(17, keys(8), Draw.NOISE, 16)[:, :5], random_bits(17, keys(8), Draw.NOISE, 5))


def test_normal_is_standard_normal():
    values = normal(3, keys(512), Draw.NOISE, (4, 16, 16)).double().flatten()  # half a million
    error = 1 / math.sqrt(len(values))
    assert abs(values.mean()) < 4 * error
    assert abs(values.var() - 1) < 4 * math.sqrt(2) * error
    assert abs((values**3).mean()) < 4 * math.sqrt(15) * error
    assert abs((values**4).mean() - 3) < 4 * math.sqrt(96) * error
    within_one = (values.abs() < 1).double().mean()
    assert abs(within_one - math.erf(1 / math.sqrt(2))) < 4 * 0.5 * error
    assert values.isfinite().all()
    neighbours = values[:-1] * values[1:]
    assert abs(neighbours.mean()) < 4 * error


def test_uniform_and_integers():
    values = uniform(1, keys(10_000), Draw.CAPTION_DROPOUT, 1)
    assert values.min() > 0
    assert values.max() <= 1
    assert abs(values.mean() - 0.5) < 4 / math.sqrt(12 * 10_000)
    t = integers(1, keys(100_000), Draw.TIMESTEP, 1000)
    counts = torch.bincount(t, minlength=1000).double()
    assert len(counts) == 1000  # 0 .. 999, the first and the last included
    chi_squared = ((counts - 100) ** 2 / 100).sum()
    assert abs(chi_squared - 999) < 4 * math.sqrt(2 * 999)


def test_the_kernels_of_a_gpu_compile(tmp_path):
    """Inductor once wrote a product of the counter as an index of 32 bits, in which Philox's multipliers do not fit."""
    from tests.families.gpu_kernels import compile_kernels  # imports Inductor, which takes seconds

    def draws(key):
        return (
            normal(1, key, Draw.NOISE, (4, 8, 8)),
            uniform(1, key, Draw.ROUTING, 9),
            integers(1, key, Draw.CAPTION, 5),
            random_order(1, key, Draw.CROP),
        )

    assert compile_kernels(draws, [keys(8)], tmp_path) >= 3
