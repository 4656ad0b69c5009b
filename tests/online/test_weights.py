"""Encoders on other machines change nothing: the same weights, to the bit, however many there are and whatever becomes of them."""

import os
import signal
import sys

import psutil
import pytest

from diffusion.common.files import read_json_lines
from tests.online.online import BATCH, EVALUATED, NUM_BATCHES, AtBatch, process_of, ray_keys, soon, trained


@pytest.mark.parametrize(('actors', 'keys'), [(1, {}), (2, {'send': 'bytes', 'ahead': 1})])
def test_any_number_of_encoders_gives_the_weights_of_encoding_in_the_step(run, cluster, in_step, images, tmp_path, capfd, actors, keys):
    evaluation = ['eval.every=4ba', f'eval.streams.own.local={images}', 'eval.streams.held_out=null']
    pools, processes = [], []

    def look(pool):
        pools.append(pool)
        processes.extend(psutil.Process(process_of(pool, member)) for member in pool.members)

    assert trained([*run, *evaluation, *ray_keys(cluster, actors, **keys)], AtBatch(NUM_BATCHES, look)) == in_step
    assert pools[0].num_images >= NUM_BATCHES * BATCH + EVALUATED  # which the model would also have encoded itself
    assert not sys.modules['ray'].is_initialized()
    assert len(processes) == actors
    assert not psutil.wait_procs(processes, timeout=60)[1]
    assert f'encoders: {actors} of {actors} ready after ' in capfd.readouterr().err
    metrics = list(read_json_lines(tmp_path / 'run/log.jsonl'))[-1]
    assert metrics['encoders/serving'] == actors
    assert metrics['encoders/replaced'] == 0
    assert metrics['encoders/images_per_sec_per_encoder'] > 0
    assert 0 <= metrics['encoders/wait_share'] <= 1


def test_encoders_that_die_or_hang_are_replaced_and_change_nothing(run, cluster, in_step, capfd):
    def hit(pool, number, signal_number):
        pool.patience_sec = 2
        os.kill(process_of(pool, pool.members[number]), signal_number)

    def wait(pool):
        assert soon(lambda: pool.advance(0.5) or pool.num_replaced == 2)

    blows = AtBatch(2, lambda pool: hit(pool, 0, signal.SIGKILL)), AtBatch(4, lambda pool: hit(pool, 1, signal.SIGSTOP))
    assert trained([*run, *ray_keys(cluster, 2)], *blows, AtBatch(NUM_BATCHES, wait)) == in_step
    said = capfd.readouterr().err
    for number, why in enumerate(['its process has died', 'has not answered for']):
        assert f'encoders: encoder-{number} is lost: {why}' in said
        assert f'encoders: encoder-{number} is back, on ' in said
    assert '(data.encoders.ray.patience_sec=2) and was killed' in said
