"""Every benchmark of training runs with its smallest settings and writes rows that say where they were measured."""

import json

import pytest
from streaming import LocalDataset

from benchmarks import convert
from diffusion.families.registry import training_flops
from tests.conftest import run_here

TINY = ('--network', 'tiny')
COMMANDS = {
    'step': [
        *TINY,
        '--resolution',
        16,
        '--micro-batch',
        2,
        '--steps',
        2,
        '--only',
        'plain loop',
        '+ keyed noise, our objective',
        '+ compile network',
    ],
    'ema': [*TINY, '--repeats', 2],
    'loading': ['--samples', 128, '--rounds', 1],
}


@pytest.fixture(scope='module')
def rows(tmp_path_factory):
    """What each command wrote and printed."""
    made = {}
    for name, arguments in COMMANDS.items():
        out = tmp_path_factory.mktemp(name) / 'rows.jsonl'
        printed = run_here(f'benchmarks.{name}', *arguments, '--out', out).stdout
        made[name] = [json.loads(line) for line in out.read_text().splitlines()], printed
    return made


@pytest.mark.parametrize('name', COMMANDS)
def test_rows_say_where_and_when(name, rows):
    records, printed = rows[name]
    assert len(records) >= 2
    for record in records:
        assert record['benchmark'] == name
        assert record['torch']
        assert {'cpu', 'gpu', 'num_cores', 'commit', 'date', 'diffusers', 'mosaicml'} <= record.keys()
    assert '| ---' in printed


def test_a_step_counts_flop_as_training_does_and_knows_no_peak_of_a_cpu(rows):
    plain, ours, compiled = rows['step'][0]
    assert plain['flop_per_image'] == ours['flop_per_image'] == training_flops('tiny', (4, 4), 16)
    assert plain['mfu'] is ours['mfu'] is None
    assert ours['images_per_sec'] == pytest.approx(2 / ours['median_sec'])
    assert compiled['status'] == 'skipped: needs a GPU'
    assert 'skipped' in rows['step'][1]


def test_an_average_is_one_copy_of_the_weights(rows):
    for row in rows['ema'][0]:
        assert row['held_bytes'] == 4 * row['num_parameters']
    assert [row['traffic_bytes'] / row['num_parameters'] for row in rows['ema'][0]] == [36, 12]


def test_a_conversion_without_its_start_up_is_as_fast_as_its_rows(tmp_path, monkeypatch):
    """50 images/s after 2 s of start-up, by construction; the least that can be done copies every image."""
    crawls = {num_rows: tmp_path / f'crawl{num_rows}' for num_rows in (3, 30)}
    seconds = {str(folder): 2 + num_rows / 50 for num_rows, folder in crawls.items()}
    with monkeypatch.context() as patch:
        patch.setattr(convert, 'run_watched', lambda words: (seconds[str(words[2])], 100.0))
        row = convert.measure('convert, 1 process', crawls, tmp_path)
    assert (row['images_per_sec'], row['startup_sec'], row['peak_mb']) == (pytest.approx(50), pytest.approx(2), 100.0)
    convert.write_crawl(crawls[3], 3)
    convert.floor(crawls[3], tmp_path / 'mds')
    samples = [*LocalDataset(str(tmp_path / 'mds'))]
    assert [sample['caption'] for sample in samples] == ['image 0', 'image 1', 'image 2']
    assert len({sample['image'] for sample in samples}) == 3
    assert convert.run_watched(['-c', 'import time; time.sleep(0.5)'])[1] > 1
    with pytest.raises(SystemExit, match='no such row'):
        convert.run_watched(['-c', 'raise SystemExit("no such row")'])
