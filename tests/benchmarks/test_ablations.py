"""The table of a study against numbers computed by hand, and a small study of real processes that is killed and run again."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.ablations import report, training
from benchmarks.ablations.comparison import beyond_noise, equal, read_batch_sec, read_curve, study_table, values_at
from benchmarks.ablations.study import JUDGE, KID, LOSS, STUDIES, AblationRun, Study, in_turn, timed
from benchmarks.ablations.training import LOG
from diffusion.contracts.errors import INTERRUPTED, InputError, RunError
from diffusion.monitoring.report.run import read_log
from diffusion.recipe import to_yaml
from diffusion.recipe.schema import present
from tests.conftest import REPOSITORY, run_python

STUDY = Study('shapes', 'shapes', (LOSS, KID, JUDGE))
METHOD = 'sobol'


def write_run(folder, losses, flop_per_batch, images_per_sec=(20.0, 20.0, 20.0), global_size=10, every=10, reason='finished', judge=0.5):
    """A run folder as train.py leaves it: an evaluation every `every` batches, `losses` its values."""
    folder.mkdir(parents=True)
    (folder / 'recipe.yaml').write_text(f'batch: {{global_size: {global_size}}}\n')
    (folder / 'environment.json').write_text(json.dumps({'num_cores': 2, 'cpu': 'abacus', 'gpu': None, 'torch': '2', 'commit': 'c0ffee'}))
    records = [{'batch': 0, KID.key: 1.0, JUDGE.key: 0.0}]
    for number, (loss, rate) in enumerate(zip(losses, images_per_sec, strict=True), 1):
        records.append({'batch': number * every, 'throughput/images_per_sec': rate, 'cost/flop': flop_per_batch * number * every})
        records.append({'batch': number * every, LOSS.key: loss, KID.key: 1 / number, JUDGE.key: judge})
    (folder / 'log.jsonl').write_text(''.join(json.dumps(record) + '\n' for record in records))
    line = {'event': 'end', 'process': 'p', 'time': 1.0, 'gpus': 1, 'sec': {}, 'reason': reason}
    (folder / 'events.jsonl').write_text(json.dumps(line) + '\n')
    return folder


def runs_of(out, seeds=(0, 1, 2)):
    return list(in_turn(STUDY, ['baseline', METHOD], seeds, out))


@pytest.fixture
def out(tmp_path):
    """Three seeds and three rounds of timing of each. The method takes half of the FLOP and twice the time of a batch."""
    for seed, offset in enumerate((0.0, 0.1, -0.1)):
        write_run(tmp_path / f'shapes/baseline-{seed}', [3.0 + offset, 2.0 + offset, 1.0 + offset], 100.0, judge=0.50 + offset / 10)
        write_run(tmp_path / f'shapes/{METHOD}-{seed}', [2.0 + offset, 1.5 + offset, 0.9 + offset], 50.0, judge=0.90 + offset / 10)
        slowed = 1.0 if seed else 0.8
        write_run(tmp_path / f'shapes/baseline-time-{seed}', [3.0] * 3, 100.0, [20.0, 1.0, 20.0])
        write_run(tmp_path / f'shapes/{METHOD}-time-{seed}', [3.0] * 3, 50.0, [10.0 * slowed] * 3)
    return tmp_path


@pytest.fixture
def curves(out):
    keys, batch_sec = [one.key for one in STUDY.criteria], {'baseline': 0.5, METHOD: 1.0}
    return {name: [read_curve(out / f'shapes/{name}-{seed}', keys, sec) for seed in range(3)] for name, sec in batch_sec.items()}


def test_a_run_takes_its_batches_times_the_median_time_of_one(out, curves):
    """10 images at 20 images/s; the pause in the middle, at 1 image/s, does not count. Equal is what all runs reached."""
    assert read_batch_sec(out / 'shapes/baseline-time-0') == pytest.approx(10 / 20)
    assert read_batch_sec(out / 'shapes/nowhere') is None
    assert (curves['baseline'][0].sec, curves['baseline'][0].flop) == (pytest.approx(30 * 10 / 20), 3000)
    assert (curves[METHOD][0].sec, curves[METHOD][0].flop) == (pytest.approx(30.0), 1500)
    assert (equal(curves, 'flop'), equal(curves, 'sec')) == (1500, 15)


def test_a_figure_is_linear_between_evaluations(curves):
    """1500 FLOP are 15 batches of the baseline: between 3 after 10 and 2 after 20. 15 s are 15 batches of the method: between 2.0 and 1.5."""
    assert values_at(curves['baseline'], LOSS.key, 'flop', 1500) == pytest.approx([2.5, 2.6, 2.4])
    assert values_at(curves[METHOD], LOSS.key, 'flop', 1500) == pytest.approx([0.9, 1.0, 0.8])
    assert values_at(curves['baseline'], LOSS.key, 'sec', 15) == pytest.approx([1.0, 1.1, 0.9])
    assert values_at(curves[METHOD], LOSS.key, 'sec', 15) == pytest.approx([1.75, 1.85, 1.65])
    assert values_at(curves['baseline'], KID.key, 'flop', 500) == pytest.approx([1.0] * 3)


def test_a_figure_is_not_made_up_where_nothing_was_measured(curves):
    """The loss is first known after 10 batches, 1000 FLOP; beyond the end of a run nothing is known."""
    assert values_at(curves['baseline'], LOSS.key, 'flop', 900) is None
    assert values_at(curves[METHOD], LOSS.key, 'flop', 1600) is None
    assert values_at(curves[METHOD], 'metrics/eval/unknown', 'flop', 1000) is None


def test_the_noise_is_that_of_welch():
    """By hand: variances 1 and 4 of 3 seeds each, se^2 = 5/3, (5/3)^2 / ((1/3)^2/2 + (4/3)^2/2) = 50/17 degrees of freedom.

    Tables of t have 3.182 for 3 and 4.303 for 2 degrees; for 2.94 it is 3.22, and 3.22 * sqrt(5/3) = 4.16.
    """
    for apart, is_beyond in ((4.1, False), (4.2, True), (-4.1, False), (-4.2, True)):
        assert beyond_noise([apart + 1, apart + 2, apart + 3], [0.0, 2.0, 4.0]) == is_beyond
    assert not beyond_noise([1.0], [0.0, 2.0])
    assert beyond_noise([1.0, 1.0], [2.0, 2.0])
    assert not beyond_noise([1.0, 1.0], [1.0, 1.0])


def test_one_seed_has_no_spread_and_no_verdict(curves):
    text = study_table(STUDY.criteria, {name: runs[:1] for name, runs in curves.items()}, {name: [1.0] for name in curves})
    assert 'better' not in text
    assert '±' not in text
    assert '(1 seed)' in text


def test_the_table(out):
    text = report.write_report(STUDY, runs_of(out), 3)
    flop, sec = ([[cell.strip() for cell in line.split('|')] for line in part.splitlines()] for part in text.split('At equal ')[1:])
    assert flop[0] == ['FLOP, 1.5e+03 FLOP (3 seeds):']
    assert flop[4] == ['', 'baseline', '1.00', '2.5000 ± 0.1000', '750.0 ± 0.0', '50.0 ± 1.0', '']
    assert flop[5] == ['', METHOD, '0.50', '0.9000 ± 0.1000, better', '333.3 ± 0.0, better', '90.0 ± 1.0, better', '']
    assert sec[0] == ['time, 15 s of training (3 seeds):']
    assert sec[5][1:4] == [METHOD, '2.17 ± 0.29', '1.7500 ± 0.1000, worse']  # rounds of 1.25, 1 and 1 s against 0.5 s: their median counts
    assert 'Of 6 comparisons, about 0.3 would be called better or worse by chance alone.' in text
    assert '6 runs, 2 cores of an abacus, torch 2, commit c0ffee' in text
    assert (out / 'shapes/table.md').read_text() == text + '\n'
    assert (out / 'shapes/curves.png').stat().st_size > 10_000


def test_what_is_not_finished_is_left_out_and_named(out):
    (out / f'shapes/{METHOD}-2/events.jsonl').unlink()
    text = report.write_report(STUDY, runs_of(out), 3)
    assert f'Not finished, and left out: {METHOD} (seed 2).' in text
    assert '2 to 3 seeds' in text
    assert report.write_report(STUDY, runs_of(out / 'nowhere'), 3).startswith('No run of shapes has finished in ')


def test_without_timing_there_is_no_table_of_equal_time(out):
    (out / f'shapes/{METHOD}-time-0/events.jsonl').unlink()  # one round is missing: the others count
    assert re.search(rf'\| {METHOD} +\| +2\.00 ± 0\.00 \|', report.write_report(STUDY, runs_of(out), 3))
    for seed in range(3):
        (out / f'shapes/{METHOD}-time-{seed}/events.jsonl').unlink(missing_ok=True)
    text = report.write_report(STUDY, runs_of(out), 3)
    assert f'At equal time: not measured yet for {METHOD}.' in text
    assert 'Of 3 comparisons' in text
    assert (out / 'shapes/curves.png').stat().st_size > 10_000


def test_table_and_figure_come_into_the_page(out, tmp_path):
    page = tmp_path / report.PAGE
    page.write_text('before\n<!-- shapes -->\nold\n<!-- shapes -->\nafter\n')
    for _ in range(2):  # again: nothing piles up
        report.write_report(STUDY, runs_of(out), 3, docs=tmp_path)
        text = page.read_text()
        assert text.startswith('before\n<!-- shapes -->\n\n6 runs')
        assert text.endswith('![Loss and scores of shapes over FLOP and over time](ablations-shapes.png)\n\n<!-- shapes -->\nafter\n')
        assert 'old' not in text
    assert (tmp_path / 'ablations-shapes.png').exists()
    with pytest.raises(InputError, match='has 0 lines <!-- emoji -->'):
        report.put(page, 'emoji', 'text')


def test_the_table_needs_no_torch(out):
    code = f"""
import sys
sys.argv = ['ablations', 'shapes', '--table', '--out', {str(out)!r}, '--only', {METHOD!r}]
import runpy
try:
    runpy.run_module('benchmarks.ablations', run_name='__main__')
except SystemExit as end:
    assert not end.code, end.code
assert not {{'torch', 'composer', 'diffusers', 'transformers'}} & set(sys.modules)
"""
    assert 'At equal time' in run_python('-c', code).stdout


def test_an_evaluation_that_one_run_has_skipped(out):
    """One that is stopped at an evaluation resumes after it: the table reads between its neighbours, the end has no figure."""
    log = out / f'shapes/{METHOD}-1/log.jsonl'
    kept = [line for line in log.read_text().splitlines() if not (json.loads(line)['batch'] == 20 and LOSS.key in line)]
    log.write_text('\n'.join(kept) + '\n')
    curve = read_curve(log.parent, [LOSS.key])
    assert curve.at(LOSS.key, 'flop', 1000) == pytest.approx((2.1 + 1.0) / 2)
    assert 'At equal FLOP' in report.write_report(STUDY, runs_of(out), 3)
    log.write_text('\n'.join(line for line in kept if not (json.loads(line)['batch'] == 30 and LOSS.key in line)) + '\n')
    assert f'| {METHOD}    |            0.50 | -  ' in report.write_report(STUDY, runs_of(out), 3)


def test_all_variants_take_their_turn_in_every_seed_and_every_round_of_timing(tmp_path):
    runs = runs_of(tmp_path, (0, 1))
    assert [(run.variant, run.seed) for run in runs] == [('baseline', 0), (METHOD, 0), ('baseline', 1), (METHOD, 1)]
    rounds = [run.folder.name for run in timed(runs, 2)]
    assert rounds == ['baseline-time-0', f'{METHOD}-time-0', 'baseline-time-1', f'{METHOD}-time-1']


@pytest.mark.parametrize('name', STUDIES)
def test_every_recipe_reads_the_data_of_its_study(name, tmp_path):
    of_study = STUDIES[name]
    data = tmp_path / 'data' / of_study.data
    for folder in ('encoders', 'features'):
        (data / folder).mkdir(parents=True)
    for run in in_turn(of_study, of_study.variants(), [0], tmp_path):
        run.folder.mkdir(parents=True)
        recipe = run.recipe()
        assert Path(recipe.run_folder) == run.folder
        kind = 'images' if recipe.methods.alignment is not None else 'latents'
        assert recipe.data.kind == kind
        for part, streams in (('train', recipe.data.streams), ('held-out', recipe.eval.streams)):
            assert [Path(stream.local).resolve() for stream in present(streams).values()] == [data / part / kind]
        assert Path(recipe.model.encoders.source).resolve() == data / 'encoders'
        assert of_study.reads_features([run.variant]) == (recipe.methods.alignment is not None)


def test_a_wrong_change_and_a_wrong_place_are_found_before_anything_is_made(tmp_path):
    for words, said in ((['nope=1'], 'nope'), (['--docs', str(tmp_path)], f'--docs: there is no {tmp_path}/ablations.md; name the folder')):
        ended = run_python('-m', 'benchmarks.ablations', 'shapes', '--out', tmp_path / 'out', *words, code=2)
        assert said in ended.stderr
    assert not (tmp_path / 'out').exists()


def test_a_run_that_was_begun_otherwise_is_not_gone_on_with(tmp_path, monkeypatch):
    run = AblationRun(STUDY, 'baseline', 0, tmp_path)
    for folder in ('data/shapes/encoders', 'shapes/baseline-0'):
        (tmp_path / folder).mkdir(parents=True)
    (run.folder / 'recipe.yaml').write_text(to_yaml(run.recipe()))
    assert not run.finished()
    other = AblationRun(STUDY, 'baseline', 0, tmp_path, ('optimizer.lr=0.5',))
    with pytest.raises(RunError, match=r'was begun with another recipe: optimizer\.lr: 0\.0015 -> 0\.5; undo it, name another --out'):
        other.finished()


def test_a_run_that_fails_is_named_and_the_others_are_trained(tmp_path, monkeypatch, capsys):
    started = []

    def start(run):
        started.append((run.variant, run.seed))
        return subprocess.Popen([sys.executable, '-c', f'raise SystemExit({int(run.variant == METHOD)})'])

    monkeypatch.setattr(training, '_start', start)
    length = SimpleNamespace(train=SimpleNamespace(duration=SimpleNamespace(value=10)))
    monkeypatch.setattr(AblationRun, 'recipe', lambda run: length)
    runs = runs_of(tmp_path, (0, 1))
    assert [(run.variant, run.seed) for run in training.train(runs, jobs=2)] == [(METHOD, 0), (METHOD, 1)]
    assert started == [(run.variant, run.seed) for run in runs]
    assert f'{METHOD}, seed 1: ended with code 1; see {tmp_path}/shapes/{METHOD}-1/train.log' in capsys.readouterr().out


def test_only_some_methods_and_always_the_baseline():
    assert STUDIES['shapes'].variants([METHOD]) == ['baseline', METHOD]
    assert STUDIES['shapes'].variants()[0] == 'baseline'
    with pytest.raises(InputError, match="no recipe 'sobl'"):
        STUDIES['shapes'].variants(['sobl'])


def test_the_page_has_a_place_for_every_study():
    page = (REPOSITORY / 'docs' / report.PAGE).read_text()
    assert {name: page.count(f'<!-- {name} -->\n') for name in STUDIES} == dict.fromkeys(STUDIES, 2)


SMALL = (
    'model.network=tiny-prx', 'train.duration=60ba', 'batch.global_size=8', 'batch.micro_size=8', 'optimizer.warmup=0ba', 'ema.start=1ba',
    'eval.every=30ba', 'eval.samples.every=30ba', 'eval.samples.count=16', 'eval.samples.steps=1', 'log.every=2', 'checkpoint.every=2ba',
)  # fmt: skip


def test_a_killed_study_resumes_and_ends_with_its_table(tmp_path, encoders_folder, latents):
    """Two recipes, real processes of train.py; the second time nothing that was finished is trained again."""
    data = tmp_path / 'out/data/shapes'
    for part in ('train', 'held-out'):
        (data / part).mkdir(parents=True)
        (data / part / 'latents').symlink_to(latents)
    (data / 'encoders').symlink_to(encoders_folder)
    options = ['--seeds', '0', '--only', METHOD, '--rounds', '1', '--out', str(tmp_path / 'out')]
    words = [sys.executable, '-m', 'benchmarks.ablations', 'shapes', *options, *SMALL]
    first, second = (tmp_path / f'out/shapes/{name}-0' for name in ('baseline', METHOD))
    with subprocess.Popen(words, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        deadline = time.monotonic() + 200
        while process.poll() is None and time.monotonic() < deadline and not _reached(second, 2):
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate()
    assert (process.returncode, _reached(second, 2)) == (INTERRUPTED, True), said
    before = (first / 'log.jsonl').read_bytes()
    ended = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr + (second / LOG).read_text()
    assert '1 of 2 runs are finished already' in ended.stdout
    assert (first / 'log.jsonl').read_bytes() == before
    assert read_log(second / 'log.jsonl')[-1]['batch'] == 60
    assert (second / LOG).read_text().count('$ ') >= 2
    for text in ('At equal FLOP', 'At equal time', f'| {METHOD} '):
        assert text in ended.stdout


def _reached(folder, batch):
    log = read_log(folder / 'log.jsonl')
    return bool(log) and log[-1]['batch'] >= batch
