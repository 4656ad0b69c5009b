"""The comparison of loss weights and decays, on a task too small to learn anything."""

import pytest
import torch

from benchmarks.measuring.objectives import Variant, measure, papers_weight, table


def test_a_run_is_trained_and_judged_alike_from_the_same_seed(latents, encoders_folder, tmp_path):
    for name, folder in (('latents', latents), ('encoders', encoders_folder)):
        (tmp_path / name).symlink_to(folder)
    num_threads = torch.get_num_threads()
    first, again, other = (measure((Variant(weight, 'cooldown'), 3, 'mlp', 3, 4, tmp_path)) for weight in ('none', 'none', 'min-snr'))
    torch.set_num_threads(num_threads)
    assert first == again
    assert (other['weight'], other['decay'], other['seed'], other['batches']) == ('min-snr', 'cooldown', 3, 3)
    assert 0 <= first['foreground'] <= 1


def test_the_weight_of_the_paper_with_its_floor():
    snr = torch.tensor([0.0, 0.05, 1.0, 9.0])
    torch.testing.assert_close(papers_weight(snr, 5.0), torch.tensor([0.1, 0.1, 0.5, 0.5]))


def test_the_table_has_a_line_a_variant():
    rows = [{'weight': 'none', 'decay': 'constant', 'foreground': share, 'background': 1.0} for share in (0.5, 0.7)]
    (line,) = table(rows)
    assert line == ['no weights, constant', 2, '60.0 ± 14.1', '50.0 .. 70.0', '100.0 ± 0.0', '100.0 .. 100.0']
    with pytest.raises(KeyError):
        table([{'weight': 'none', 'decay': 'constant'}])
