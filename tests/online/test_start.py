"""Runs as a user starts them, with a Ray cluster of their own."""

import signal
import sys
from pathlib import Path

import psutil
import pytest

from diffusion.common.ray_cluster import ClusterError
from diffusion.recipe import load_recipe
from diffusion.training.builder import build_trainer
from tests.faults.children import fit, ranks
from tests.faults.driver import Forked
from tests.online.online import YAML, ray_keys, soon


def _imports_ray(*overrides: str) -> bool:
    fit(overrides)
    return 'ray' in sys.modules


def test_nothing_of_ray_is_imported_without_the_key(run, tmp_path):
    assert ranks(_imports_ray, [run], tmp_path) == ['False']


def test_a_cluster_without_room_is_refused_at_once(run, cluster):
    with pytest.raises(
        ClusterError, match=r'data.encoders.ray: 5 encoders of 1 CPU each, and the 1 machine of the cluster has 4 CPU: room for 4; set'
    ):
        build_trainer(load_recipe(YAML, [*run, *ray_keys(cluster, 5)]))


def test_a_run_that_is_stopped_leaves_nothing_of_its_cluster(run, tmp_path):
    """With loader processes, which are forked from a process that is a part of the cluster."""
    log = tmp_path / 'run/log.jsonl'
    overrides = [*run, *ray_keys(None, 1), 'data.workers=1', 'train.duration=5000ba', 'eval.every=null']
    with Forked(overrides, tmp_path / 'out.txt') as process:
        process.wait_until(lambda: log.exists() and log.read_text().count('\n') > 3)
        started = psutil.Process(process.pid).children(recursive=True)
        assert any('raylet' in child.name() for child in started)
        process.signal(signal.SIGTERM, group=False)
        said = process.wait(75)
    assert 'encoders: 1 of 1 ready after ' in said
    assert 'Token authentication' not in said  # advice to switch it off
    assert soon(lambda: not psutil.wait_procs(started, timeout=1)[1])
    assert Path(tmp_path / 'run/checkpoints').exists()
