"""NaN and infinity never reach the weights or a checkpoint, on any rank, whatever the policy."""

import math
from pathlib import Path

import pytest
import torch
from composer.core import Callback
from composer.utils import dist, get_device

from diffusion.checkpoints.reading import batches_trained, find_checkpoint, read_checkpoint, training_weights
from diffusion.contracts.errors import FINISHED, NON_FINITE, NonFinite
from diffusion.faults.guards import RunLock
from diffusion.faults.rollback import LeftOut, RollBack, add, read
from diffusion.monitoring.report.run import read_log
from diffusion.recipe import load_recipe
from diffusion.training import builder as training
from diffusion.training.model import TextToImage
from tests.conftest import REPOSITORY
from tests.faults.children import ranks
from tests.faults.driver import YAML, composers_trainer, digest, launch, train, upstream_mended_it


@pytest.fixture
def base(overrides):
    return [*overrides, 'train.duration=8ba', 'optimizer.lr=1e-2', 'checkpoint.every=1ba', 'checkpoint.keep=-1']


@pytest.fixture
def spoil(monkeypatch):
    """Multiplies the loss of some batches (numbers from 1) by a value that is not finite."""

    def arrange(batches, value=math.nan, offset=0.0):
        seen = []
        loss = TextToImage.loss

        def spoiled(self, outputs, batch, *args, **kwargs):
            seen.append(None)
            micro_batches = 2  # of 4, of 8 samples
            number = (len(seen) - 1) // micro_batches + 1
            good = loss(self, outputs, batch, *args, **kwargs)
            return good * value + offset if number in batches else good

        monkeypatch.setattr(TextToImage, 'loss', spoiled)

    return arrange


def run(base, *more, left_out=()):
    trainer = training.build_trainer(load_recipe(REPOSITORY / YAML, [*base, *more]))
    trainer.left_out = list(left_out)
    try:
        trainer.fit()
    finally:
        trainer.engine.close()
    return trainer


def finite(tensors):
    return all(torch.isfinite(tensor).all() for tensor in tensors)


@pytest.mark.parametrize('log_every', [1, 5])
def test_stop_leaves_no_checkpoint_after_the_fault(base, spoil, tmp_path, log_every):
    spoil({4})
    with pytest.raises(NonFinite, match='batch 4: the loss or the gradient norm is not finite'):
        run(base, f'log.every={log_every}')
    state = read_checkpoint(find_checkpoint(tmp_path / 'run'))
    assert batches_trained(state) == 3
    assert finite(training_weights(state).values())


@pytest.mark.parametrize(('value', 'offset'), [(math.nan, 0.0), (math.inf, 0.0), (1.0, math.inf)])
def test_a_skipped_batch_changes_nothing_but_time(base, spoil, tmp_path, value, offset):
    spoil({3}, value, offset)
    skipped = run(base, 'faults.non_finite=skip', f'run_folder={tmp_path}/skipped')
    assert skipped.state.timestamp.batch == 8
    logged = [record['faults/skipped_batches'] for record in read_log(tmp_path / 'skipped/log.jsonl') if 'faults/skipped_batches' in record]
    assert logged == [1]
    spoil(())
    # The reference never computes that batch.
    reference = run(base, f'run_folder={tmp_path}/reference', left_out=[LeftOut(2, 3, '')])
    for trainer in (skipped, reference):
        assert finite(trainer.state.model.state_dict().values())
    assert digest(skipped.state.model.network.state_dict()) == digest(reference.state.model.network.state_dict())
    assert digest(skipped.state.optimizers[0].state_dict()) == digest(reference.state.optimizers[0].state_dict())


def test_too_many_skipped_in_a_row_stop(base, spoil, tmp_path):
    spoil({2, 4, 5, 6})
    with pytest.raises(NonFinite, match='batch 6.*nor those of the 2 batches before it; faults.max_skipped is 2'):
        run(base, 'faults.non_finite=skip', 'faults.max_skipped=2')
    assert finite(training_weights(read_checkpoint(find_checkpoint(tmp_path / 'run'))).values())


def test_weights_that_are_not_finite_are_never_saved(base, tmp_path):
    trainer = training.build_trainer(load_recipe(REPOSITORY / YAML, base))

    class BitFlip(Callback):
        def batch_end(self, state, logger):
            if state.timestamp.batch == 3:
                with torch.no_grad():
                    next(state.model.parameters())[0, 0, 0, 0] = math.inf

    trainer.state.callbacks.insert(0, BitFlip())
    with pytest.raises(NonFinite, match='the weights are not finite although every step was'):
        trainer.fit()
    trainer.engine.close()
    assert batches_trained(read_checkpoint(find_checkpoint(tmp_path / 'run'))) == 2


def test_twin_stock_composer_trains_on_and_saves_nan(base, spoil, tmp_path, monkeypatch):
    spoil({4})
    monkeypatch.setattr(training, 'Trainer', composers_trainer(tmp_path / 'stock'))
    trainer = run(base)
    last = torch.load(tmp_path / 'stock/ba8-rank0.pt', weights_only=False)['state']['model']
    if finite(last.values()) or trainer.state.timestamp.batch < 8:
        upstream_mended_it()


def test_a_rollback_goes_to_the_last_checkpoint_and_not_twice_to_the_same(base, spoil, tmp_path):
    spoil({5})
    with pytest.raises(RollBack) as fault:
        run(base, 'checkpoint.every=3ba', 'faults.non_finite=rollback')
    assert (fault.value.left_out.after_batch, fault.value.left_out.last_batch) == (3, 5)
    folder = str(tmp_path / 'run/checkpoints')
    add(folder, fault.value.left_out)
    assert [finished in read(folder)[0] for finished in range(7)] == [False, False, False, True, True, False, False]
    with pytest.raises(NonFinite, match='gone back to batch 3 once already'):
        add(folder, fault.value.left_out)


def leave_out(folder, run_folder):
    dist.initialize_dist(get_device('cpu'))
    RunLock(Path(run_folder))
    add(folder, LeftOut(3, 5, 'NaN'))
    return read(folder)


def test_all_ranks_learn_what_the_first_one_could_not_do(tmp_path):
    """It alone locks the run folder and writes; a rank that did not hear of an error would wait for it."""
    (tmp_path / 'file').touch()
    no_folder, folder = tmp_path / 'file/folder', tmp_path / 'folder'

    def both(checkpoints, run_folder):
        first, second = ranks(leave_out, [[str(checkpoints), str(run_folder)]] * 2, tmp_path)
        assert first == second
        return first

    assert both(folder, no_folder).startswith(f'RecipeError: {no_folder}: 1 error\n  - run_folder: cannot be written and locked: ')
    assert both(no_folder, folder).startswith(f'FileNotFoundError: {no_folder}')
    assert both(folder, folder) == "[LeftOut(after_batch=3, last_batch=5, cause='NaN')]"
    assert both(folder, folder).startswith('NonFinite: NaN. The run has gone back to batch 3 once already')


def on(latents: Path, base, *more):
    return [*base, 'data.kind=latents', f'data.streams.train.local={latents}', *more]


@pytest.mark.long
def test_rollback_leaves_out_the_data_since_the_last_checkpoint(base, latents_with_nan, tmp_path):
    """48 samples are 6 batches; the second epoch meets the same sample again."""
    with train(on(latents_with_nan, base, 'train.duration=12ba', 'checkpoint.every=2ba', 'faults.non_finite=rollback')) as process:
        output = process.wait()
    left_out = read(str(tmp_path / 'run/checkpoints'))
    assert len(left_out) == 2
    assert [part.last_batch - part.after_batch for part in left_out] == [1 + (part.last_batch - 1) % 2 for part in left_out]
    assert output.count('Going back to batch') == 2
    state = read_checkpoint(find_checkpoint(tmp_path / 'run'))
    assert batches_trained(state) == 12
    assert finite(training_weights(state).values())


@pytest.mark.long
def test_the_same_fault_twice_stops(base, latents_with_nan):
    """No checkpoint between two epochs: the second fault goes back to where the first did."""
    with train(on(latents_with_nan, base, 'train.duration=12ba', 'checkpoint.every=100ba', 'faults.non_finite=rollback')) as process:
        output = process.wait(NON_FINITE)
    assert 'gone back to batch 0 once already' in output
    assert 'Traceback' not in output


@pytest.mark.long
@pytest.mark.parametrize(('policy', 'code'), [('stop', NON_FINITE), ('skip', FINISHED), ('rollback', FINISHED)])
def test_two_ranks_of_which_one_meets_nan(base, latents_with_nan, tmp_path, policy, code):
    run = on(latents_with_nan, base, 'train.duration=8ba', 'checkpoint.every=2ba', f'faults.non_finite={policy}')
    with launch(2, run) as process:
        process.wait(code)
    state = read_checkpoint(find_checkpoint(tmp_path / 'run'))
    assert finite(training_weights(state).values())
    assert batches_trained(state) == 8 if code == 0 else batches_trained(state) < 6
