"""benchmarks.encode reads rates off the parts' times, sees the object store, and measures what the command itself does."""

import json
import os
import subprocess
import sys

import psutil
import pytest

from benchmarks.encode import Commits, ObjectStore, stages
from diffusion.common.files import read_json_lines
from diffusion.contracts.manifest import Manifest
from tests.conftest import NUM_IMAGES, RESOLUTION, run_python


def test_a_rate_is_that_of_the_time_when_all_workers_are_at_work():
    """40 parts of 10 images, one a second, but for a slow first worker and a last part that comes late."""
    times = [100 + i for i in range(40)]
    times[0], times[-1] = 60, 400
    assert Commits(times, [10] * 40).images_per_sec == pytest.approx(10)


def test_a_part_counts_once_with_what_it_kept(tmp_path):
    (tmp_path / 'parts').mkdir()
    for i in range(10):
        marker = tmp_path / f'parts/{i:02d}.json'
        marker.write_text(json.dumps({'tally': {'kept_in': {'': 4}, 'attempted': 5}}))
        os.utime(marker, (0, 1000 - 2 * i))  # the last one first
    (tmp_path / 'parts/00.failures.parquet').touch()
    commits = Commits.of(tmp_path)
    assert commits.times == [1000 - 2 * i for i in reversed(range(10))]
    assert (sum(commits.images), commits.images_per_sec) == (40, pytest.approx(2))


def test_too_few_parts_are_no_rate():
    with pytest.raises(SystemExit, match='2 parts are too few'):
        _ = Commits([1, 2], [4, 4]).images_per_sec


def test_the_object_store_is_what_its_file_takes(tmp_path):
    """A process named raylet that has written 3 MB to a file of 100 MB which is deleted already, as Ray does it."""
    store = '/dev/shm/plasma-test'
    code = f"""
import os, sys
file = open({store!r}, 'w+b'); os.unlink({store!r}); file.truncate(100 << 20); file.write(bytes(3 << 20)); file.flush()
open('/proc/self/comm', 'w').write('raylet'); print('ready', flush=True); sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, '-c', code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == 'ready\n'
        seen = ObjectStore()
        seen.look(psutil.Process(process.pid))
        seen.look(psutil.Process())  # no raylet
        process.stdin.close()
    assert seen.peak_bytes == 3 << 20


def test_the_stages_are_the_work_of_the_command(images, encoders_folder, tmp_path):
    rates = stages(images, tmp_path / 'latents', str(encoders_folder), RESOLUTION, 16)
    assert list(rates) == ['decode', 'encode', 'write']
    assert min(rates.values()) > 0
    assert Manifest.read(str(tmp_path / 'latents')).num_samples == NUM_IMAGES


@pytest.mark.long
@pytest.mark.timeout(900)
def test_each_way_gives_a_row(tmp_path):
    run_python('-m', 'benchmarks.encode', '--images', 1152, '--resolution', 64, '--out', tmp_path / 'rows.jsonl')
    rows = list(read_json_lines(tmp_path / 'rows.jsonl'))
    local, actors, streamed = (row for row in rows if row['kind'] == 'encode')
    assert [(row['engine'], row['num_encoders'], row['num_decoders']) for row in (local, actors, streamed)] == [
        ('local', 1, 0), ('ray', 2, 0), ('ray', 1, 1)]  # fmt: skip
    for row in (local, actors, streamed):
        assert (row['images'], row['resolution'], row['with_text'], row['device']) == (1152, 64, False, row['gpu'] or row['cpu'])
        assert row['images_per_sec'] > 0
        assert row['first_part_sec'] < row['seconds']
    assert local['object_store_mb'] == 0
    assert streamed['object_store_mb'] > actors['object_store_mb']  # pixels travel
    assert {row['stage'] for row in rows if row['kind'] == 'encode-stage'} == {'decode', 'encode', 'write'}
