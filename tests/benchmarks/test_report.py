"""Reports on constructed result files: every number of the tables worked out here again, and whatever a file may lack or be."""

import json
import math
import re
import sys

import pytest

from benchmarks import report
from benchmarks.reporting.scaling_section import ahead, few
from benchmarks.reporting.series import LOWER_LAW, group
from diffusion.cost.results import Result, gpus_per_node, read_results
from diffusion.cost.scaling import fit
from tests.monitoring.report.pages import assert_stands_alone

NULLS = dict.fromkeys(
    ('device', 'attention', 'images_per_sec', 'images_per_sec_spread', 'images_per_sec_per_gpu', 'step_sec', 'flop_per_image', 'mfu', 'peak_allocated_bytes',
     'peak_reserved_bytes', 'data_wait_share', 'warmup_steps', 'measured_steps', 'measured_sec')
)  # fmt: skip

EVIL = '<img src=x onerror=alert(1)>"\'&$a_b$'


def row(num_gpus, images_per_sec, resolution=256, **changes):
    """A line as benchmarks.throughput writes it, on nodes of 8 H200."""
    flop = {256: 539.31e9, 512: 2408.74e9}.get(resolution, 1e9)
    return {
        'benchmark': 'throughput', 'sweep': 'h200', 'point': f'{num_gpus}-{resolution}-{sorted(changes)}', 'reason': None, 'status': 'measured',
        'settings': {'num_gpus': num_gpus, 'data.resolution': resolution}, 'num_gpus': num_gpus, 'num_nodes': math.ceil(num_gpus / 8),
        'gpus_per_node': min(num_gpus, 8), 'network': 'sd2-base', 'num_parameters': 865_910_724, 'resolution': resolution, 'kind': 'latents',
        'global_size': 2048, 'micro_size': 64, 'accumulation': 2048 // num_gpus // 64, 'precision': 'bf16', 'sharding': 'hsdp', 'compile': 'network',
        'attention': 'cudnn', 'checkpoint_activations': False, 'ema': True, 'device': 'NVIDIA H200', 'images_per_sec': images_per_sec,
        'images_per_sec_spread': 0.012, 'images_per_sec_per_gpu': images_per_sec / num_gpus, 'step_sec': 2048 / images_per_sec, 'flop_per_image': flop,
        'mfu': images_per_sec / num_gpus * flop / 989e12, 'peak_allocated_bytes': 61_230_000_000, 'peak_reserved_bytes': 70_100_000_000,
        'data_wait_share': 0.004, 'warmup_steps': 20, 'measured_steps': 100,
        'measured_sec': 30.0, 'date': '2026-11-20T10:00:00+00:00', 'commit': 'abc1234', 'gpu': 'NVIDIA H200', 'gpu_memory_bytes': 150_000_000_000,
        'cpu': 'Xeon', 'num_cores': 96, 'torch': '2.14.1', 'cuda': '12.6', 'driver': '550', **changes,
    }  # fmt: skip


def law(num_gpus, a, c, f=0.0):
    nodes = math.ceil(num_gpus / 8)
    return 2048 / (a * 2048 / num_gpus + c * (nodes - 1) / nodes + f)


SWEEP = [
    *(row(n, law(n, 1 / 800, 0.03)) for n in (4, 8, 16, 32)),
    *(row(n, law(n, 1 / 180, 0.03), resolution=512) for n in (4, 8, 16, 32)),
    row(8, 1.0, micro_size=512, settings={'num_gpus': 8, 'batch.micro_size': 512}, point='oom')
    | NULLS
    | {'status': 'out of memory', 'reason': 'a | b'},
]


def write(path, rows, tail=''):
    path.write_text(''.join(json.dumps(line) + '\n' for line in rows) + tail)
    return path


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, 'argv', ['report', *map(str, arguments)])
    return report.main()


def cells(text, *words):
    """The cells of the one line of a Markdown table that begins with these."""
    lines = [[cell.strip() for cell in line.strip('|').split(' | ')] for line in text.splitlines() if line.startswith('| ')]
    (found,) = [line for line in lines if line[: len(words)] == list(words)]
    return found


@pytest.fixture(scope='module')
def written(tmp_path_factory):
    """The folder of a report on SWEEP, whose last line a kill cut short."""
    folder = tmp_path_factory.mktemp('report')
    path = write(folder / 'results.jsonl', SWEEP, tail='{"benchmark": "through')
    with pytest.MonkeyPatch.context() as patch:
        assert run(patch, path, '--gpus', '8,64,128', '--price', 'gpu_hour.h200.on-demand=2.5') == 0
    return folder


def test_files_stand_beside_the_rows_and_alone(written):
    names = {path.name for path in written.iterdir()}
    assert names == {'results.jsonl', 'report.md', 'report.html'}
    page = (written / 'report.html').read_text()
    assert page.count('<svg') == 1
    assert_stands_alone(page)


def test_hostile_names_are_text(tmp_path, monkeypatch):
    """Result files are shared: their names, GPUs, points, settings and reasons are anybody's."""
    names = dict.fromkeys(
        ('device', 'gpu', 'cpu', 'sweep', 'network', 'precision', 'sharding', 'attention', 'kind', 'commit', 'torch', 'driver'), EVIL
    )
    rows = [row(n, law(n, 1 / 800, 0.03), settings={'num_gpus': n, EVIL: EVIL}, **names) for n in (4, 8, 16)]
    rows += [row(8, 1.0, point=EVIL) | NULLS | {'status': EVIL, 'reason': EVIL}]
    path = write(tmp_path / f'{EVIL}.jsonl', rows)
    assert run(monkeypatch, path, '--out', tmp_path / 'out', '--price', 'gpu_hour.h200.on-demand=2.5', '--gpu', 'h200') == 0
    page = assert_stands_alone((tmp_path / 'out/report.html').read_text())
    assert page.text.count(EVIL) >= 8
    assert not page.attributes('img')


def test_a_row_states_what_it_must(written):
    """Numbers of the table against the lines of the file."""
    text = (written / 'report.md').read_text()
    assert 'results.jsonl: 9 points, 8 with numbers. Lines that could not be read, as a kill leaves them: 1.' in text
    rate = law(16, 1 / 800, 0.03)
    assert cells(text[: text.index('Where and when')], '3') == [
        '3', 'num_gpus=16, resolution=256', 'measured', '16', f'{rate:,.1f}', f'{rate / 16:,.2f}', '1.2%', f'{rate / 16 * 539.31 / 989e3:.1%}', f'{2048 / rate * 1e3:,.1f}', '61.23', '70.10',
        '0.4%', '20', '100', '1',
    ]  # fmt: skip
    for stated in ('bf16', 'hsdp', 'cudnn', 'abc1234', '2026-11-20', '12.6', '550', 'NVIDIA H200', 'network, text', '539.3', '2,409', 'MFU ='):
        assert stated in text, stated
    assert cells(text, '9', 'out of memory') == ['9', 'out of memory', 'a \\| b']


def test_predictions_are_those_of_the_law_and_of_the_recipe(written):
    """64 GPUs at 256 px: 1,126,400,000 samples at the constructed law's rate, $2.50 per GPU-hour."""
    text = (written / 'report.md').read_text()
    part = text[text.index('sd2-base, 256 px, latents, global batch 2,048') :]
    found = cells(part[: part.index('Dollars at')], 'predicted', '64')
    rate = law(64, 1 / 800, 0.03)
    hours = 1_126_400_000 / rate / 3600
    assert found[2] == f'{rate:,.1f}'
    assert found[4:7] == [f'{rate / 64:,.2f}', f'{rate / 64 / (law(4, 1 / 800, 0.03) / 4):.1%}', '0.0%']
    assert found[7:] == ['2x', f'{hours / 24:.3f}', f'{hours * 64:,.2f}', f'${hours * 64 * 2.5:,.0f}']
    assert 'Dollars at $2.50 per GPU-hour (gpu_hour.h200.on-demand; given on the command line; now)' in part


def test_both_phases_are_added_up(written):
    text = (written / 'report.md').read_text()
    part = text[text.index('## Stable Diffusion 2 base, both phases') :]
    for kind, num_gpus in (('measured', 32), ('predicted', 128)):
        hours = (1_126_400_000 / law(num_gpus, 1 / 800, 0.03) + 1_740_800_000 / law(num_gpus, 1 / 180, 0.03)) / 3600
        found = cells(part, kind, str(num_gpus))
        assert [float(re.sub(r'[$,]', '', cell)) for cell in found[2:5]] == pytest.approx(
            [hours / 24, hours * num_gpus, hours * num_gpus * 2.5], rel=2e-3
        )


def test_the_latest_row_of_a_point_counts(tmp_path, monkeypatch, capsys):
    first = write(tmp_path / 'a.jsonl', [row(8, 100.0), row(16, 190.0)])
    second = write(tmp_path / 'b.jsonl', [row(8, 111.0)])
    assert run(monkeypatch, first, second, '--out', tmp_path / 'out') == 0
    text = capsys.readouterr().out
    assert '111.0' in text
    assert '100.0 |' not in text
    assert 'only the last row counts (1 left out)' in text
    assert not (tmp_path / 'report.md').exists()


def test_rows_are_put_together_by_gpus_only(tmp_path):
    """Another precision, another batch and another sweep are other series; a constant batch per GPU is one."""
    strong = [row(n, law(n, 0.001, 0.01)) for n in (8, 16)]
    other = [row(8, 50.0, precision='amp_bf16'), row(8, 60.0, sweep='later')]
    weak = [row(n, 10.0 * n, global_size=64 * n, kind='images') for n in (1, 2, 4)]
    groups = group(map(Result, [*strong, *other, *weak]))
    counts = [[point.num_gpus for point in one.points] for one in groups]
    assert counts == [[8, 16], [8], [8], [1, 2, 4]]
    assert groups[3].name == 'sd2-base, 256 px, images, 64 images a GPU, NVIDIA H200'
    assert groups[3].global_size(8) == 512
    assert groups[0].gpus_per_node == 8


@pytest.mark.parametrize(
    ('places', 'device', 'expected'),
    [
        ([(1, 1), (2, 1), (4, 1)], 'NVIDIA H200', 8),  # a part of one machine
        ([(4, 1), (8, 2), (16, 4)], 'NVIDIA H200', 4),
        ([(8, 1), (16, 1)], 'NVIDIA H200', 16),
        ([(1, 1), (2, 1)], 'CPU', 2),
        ([(1, 1), (2, 2)], 'CPU', 1),
    ],
)
def test_a_machine_has_as_many_gpus_as_rows_of_several_nodes_say_or_eight(places, device, expected):
    """(GPUs, nodes) of each row."""
    rows = [row(n, 100.0 * n, num_nodes=nodes, gpus_per_node=n // nodes, device=device, point=f'{n}') for n, nodes in places]
    (one,) = group(map(Result, rows))
    assert one.gpus_per_node == expected
    assert gpus_per_node(map(Result, rows), otherwise=6) == (6 if expected == 8 else expected)  # as a plan asks


def test_of_several_micro_batches_the_fastest_counts():
    """A GPU's share of a constant batch bounds its micro-batch, so that it changes along a series."""

    def at(num_gpus, micro_size, rate):
        settings = {'num_gpus': num_gpus, 'batch.micro_size': micro_size}
        return Result(row(num_gpus, rate, micro_size=micro_size, settings=settings, point=f'{num_gpus} {micro_size}'))

    (one,) = group([at(8, 64, 90.0), at(8, 128, 100.0), at(16, 64, 180.0), at(32, 32, 300.0)])
    assert [(point.num_gpus, point.images_per_sec) for point in one.points] == [(8, 100.0), (16, 180.0), (32, 300.0)]


def test_single_points_are_no_scaling(tmp_path, monkeypatch, capsys):
    """Days, GPU-hours and dollars of one row, and linear scaling only if it is asked for."""
    path = write(tmp_path / 'r.jsonl', [row(1, 800.0), row(1, 640.0, compile=None, settings={'num_gpus': 1, 'train.compile': None})])
    assert run(monkeypatch, path) == 0
    text = capsys.readouterr().out
    assert '## Scaling' not in text
    hours = 1_126_400_000 / 800 / 3600
    assert cells(text, 'sd2-base, 256 px, latents, global batch 2,048, NVIDIA H200', '1 GPU')[2:6] == [
        '800.0', f'{hours / 24:.2f}', f'{hours:.2f}', f'${hours * 2:.2f}',
    ]  # fmt: skip
    assert run(monkeypatch, path, '--gpus', '8,16') == 0
    text = capsys.readouterr().out
    assert 'linear scaling is assumed' in text
    assert '6,400.0' in text
    assert '16x [no network]' in text


def test_an_outlier_is_marked_and_predictions_are_given_with_it_and_without(tmp_path, monkeypatch, capsys):
    rows = [row(n, law(n, 1 / 800, 0.03) * (0.6 if n == 64 else 1.0)) for n in (8, 16, 24, 32, 64)]
    assert run(monkeypatch, write(tmp_path / 'r.jsonl', rows), '--gpus', '128') == 0
    text = capsys.readouterr().out
    assert cells(text, 'outlier', '64')[6] == '+66.7%'
    assert cells(text, 'predicted', '128')[2] == f'{law(128, 1 / 800, 0.03):,.1f}'
    series = group(map(Result, rows))[0]
    with_outlier = fit(series.points).predict(128, 2048).images_per_sec
    assert cells(text, 'with outlier', '128')[2] == f'{with_outlier:,.1f}'
    assert series.images_per_sec(128, 2048) == pytest.approx(with_outlier) != pytest.approx(law(128, 1 / 800, 0.03))  # a bill takes the lower
    assert series.images_per_sec(32, 4096) == pytest.approx(fit(series.points).predict(32, 4096).images_per_sec)  # another batch than was measured
    assert series.images_per_sec(32, 2048) == series.points[3].images_per_sec


def test_with_an_outlier_that_is_fast_the_lower_law_is_the_one_without_it(tmp_path, monkeypatch, capsys):
    """It is paid by that law, in the table of both phases and below; only one of the phases has an outlier."""
    rows = [
        *(row(n, law(n, 1 / 800, 0.03) * (1.6 if n == 64 else 1.0)) for n in (8, 16, 24, 32, 64)),
        *(row(n, law(n, 1 / 180, 0.03), resolution=512) for n in (8, 16, 24, 32, 64)),
    ]
    assert run(monkeypatch, write(tmp_path / 'r.jsonl', rows), '--gpus', '128', '--price', '2') == 0
    both = capsys.readouterr().out.partition('## Stable Diffusion 2 base, both phases')[2]
    hours = (1_126_400_000 / law(128, 1 / 800, 0.03) + 1_740_800_000 / law(128, 1 / 180, 0.03)) / 3600
    assert cells(both, 'predicted', '128')[4] == f'${hours * 128 * 2:,.0f}'
    assert both.count(LOWER_LAW) == 1


def test_too_few_rows_to_name_the_one_that_is_off_are_said(tmp_path, monkeypatch, capsys):
    for rates, said in (((3700, 4800, 13600), True), ((3700, 5200, 13600, 25000), True), ((3700, 7200, 13600, 25000), False)):
        rows = [row(8 * 2**i, float(rate)) for i, rate in enumerate(rates)]
        assert run(monkeypatch, write(tmp_path / 'r.jsonl', rows)) == 0
        text = capsys.readouterr().out
        assert ('Not to be relied on: ' in text) == (f'{len(rates)} rows are too few to say which one is off: the law misses them by' in text) == said
        assert 'or more |' not in text


def test_only_gpus_are_predicted_among_which_a_batch_can_be_divided():
    """A batch of 32 in whole images a GPU; one of 4 images a GPU, whatever their number."""
    series = group([Result(row(8, 100.0, global_size=32))])[0]
    assert ahead(series, [8, 16, 24, 32, 64]) == ([16, 32], [24, 64])
    assert ahead(series, []) == ([16, 32], [])
    assert ahead(series, [8, 16]) == ([16], [])
    in_proportion = group([Result(row(n, 12.5 * n, global_size=4 * n)) for n in (8, 16)])[0]
    assert ahead(in_proportion, [24, 4096]) == ([24, 4096], [])


def test_gpus_that_are_left_out_are_named(tmp_path, monkeypatch, capsys):
    path = write(tmp_path / 'r.jsonl', [row(n, law(n, 1 / 800, 0.03)) for n in (8, 16, 32)])
    assert run(monkeypatch, path, '--gpus', '24,1024,4096,8192', '--out', tmp_path) == 0
    text = capsys.readouterr().out
    assert [line.split(' | ')[1].strip() for line in text.splitlines() if line.startswith('| predicted')] == ['1024']
    (line,) = [line for line in text.splitlines() if line.startswith('Not predicted')]
    assert '24, 4,096, 8,192 GPUs, as the global batch of 2,048 images cannot be divided among so many' in line
    assert line in (tmp_path / 'report.md').read_text()


def test_rows_of_a_cpu_and_of_another_u_net_cost_nothing_and_say_processes(tmp_path, monkeypatch, capsys):
    cpu = {'device': 'CPU', 'gpu': None, 'mfu': None, 'network': 'tiny', 'peak_reserved_bytes': None, 'cuda': None}
    assert run(monkeypatch, write(tmp_path / 'r.jsonl', [row(n, 100.0 * n, 32, **cpu) for n in (1, 2)])) == 0
    text = capsys.readouterr().out
    assert 'process-hours' in text
    assert '1 million samples at 32 px' in text
    assert '$' not in text


def test_a_device_has_its_own_price_or_none_and_that_is_said(tmp_path, monkeypatch, capsys):
    """A GB200 is no B200, and an L40S has no price in the list that is shipped."""
    path = write(tmp_path / 'r.jsonl', [row(1, 800.0, device='NVIDIA GB200'), row(2, 400.0, device='NVIDIA L40S'), row(4, 1.0, device='CPU')])
    assert run(monkeypatch, path) == 0
    text = capsys.readouterr().out
    assert "There is no price for 'NVIDIA GB200' and 'NVIDIA L40S': give it with --price DOLLARS, name another GPU of the list with --gpu" in text
    assert '$' not in text
    assert run(monkeypatch, path, '--price', 'gpu_hour.l40s.on-demand=1.5', '--price', 'gpu_hour.gb200.on-demand=9') == 0
    text = capsys.readouterr().out
    hours = 1_126_400_000 / 400 / 3600
    assert cells(text, 'sd2-base, 256 px, latents, global batch 2,048, NVIDIA L40S', '2 GPUs')[5] == f'${hours * 2 * 1.5:,.0f}'
    assert 'There is no price' not in text


def test_the_interconnect_stands_with_the_machine_where_rows_name_one(tmp_path, monkeypatch, capsys):
    path = write(tmp_path / 'r.jsonl', [row(8, 800.0), row(16, 1500.0, interconnect='8 x HDR'), row(32, 2000.0, interconnect='1 x 100GbE')])
    assert run(monkeypatch, path) == 0
    where = capsys.readouterr().out.partition('Where and when:')[2].partition('## ')[0]
    assert [cells(where, number)[1:5] for number in '123'] == [
        ['NVIDIA H200', '150', '', 'Xeon'],
        ['NVIDIA H200', '150', '8 x HDR', 'Xeon'],
        ['NVIDIA H200', '150', '1 x 100GbE', 'Xeon'],
    ]
    assert run(monkeypatch, write(path, [row(8, 800.0, interconnect=None)])) == 0
    where = capsys.readouterr().out.partition('Where and when:')[2].partition('## ')[0]
    assert cells(where, '1')[1:4] == ['NVIDIA H200', '150', 'Xeon']
    assert 'interconnect' not in where


def test_rows_without_numbers_only(tmp_path, monkeypatch, capsys):
    crashed = row(8, 1.0) | NULLS | {'status': 'crashed', 'reason': 'NCCL'}
    odd = {'benchmark': 'throughput', 'point': 'odd', 'status': 'measured', 'images_per_sec': 'fast', 'settings': 3}
    assert run(monkeypatch, write(tmp_path / 'r.jsonl', [crashed, {'benchmark': 'throughput', 'point': 'bare'}, odd])) == 0
    text = capsys.readouterr().out
    assert '3 points, 0 with numbers' in text
    assert cells(text, '1', 'crashed') == ['1', 'crashed', 'NCCL']
    assert 'no status' in text
    assert 'measured, but without images/s' in text
    assert 'Scaling' not in text


def test_rows_of_the_ablation_are_compared(tmp_path, monkeypatch, capsys):
    rows = [
        {'benchmark': 'step', 'row': name, 'network': 'tiny', 'resolution': 32, 'kind': 'latents', 'micro_batch': 16, 'status': status, **numbers}
        for name, status, numbers in (
            ('plain loop', 'measured', {'images_per_sec': 250.0}),
            ('+ SDPA', 'measured', {'images_per_sec': 300.0}),
            ('+ compile', 'skipped: needs a GPU', {}),
        )
    ]
    assert run(monkeypatch, write(tmp_path / 'r.jsonl', rows)) == 0
    text = capsys.readouterr().out
    assert 'tiny, 32 px, latents, micro-batch 16' in text
    assert cells(text, '+ SDPA') == ['+ SDPA', '300', '1.20x']
    assert '+ compile' not in text


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        (None, 'no such file; benchmarks.throughput writes one'),
        ('a,b\n1,2\n', 'none of its 2 lines is a JSON object'),
        ('', 'no rows; needed are rows of benchmarks.throughput'),
        ('{"benchmark": "ema"}\n', 'rows of ema; needed are'),
        ('{"images_per_sec": 3}\n', 'rows that do not say of which benchmark (no key "benchmark"); needed are'),
    ],
)
def test_input_that_is_none(tmp_path, monkeypatch, capsys, content, message):
    path = tmp_path / 'r.jsonl'
    if content is not None:
        path.write_text(content)
    assert run(monkeypatch, path) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / 'report.md').exists()


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['r.jsonl', '--prices', 'none.yaml'], 'none.yaml: no such file'),
        (['r.jsonl', '--gpu', 'h2000'], "no price for a 'h2000'; did you mean 'h200'? There are"),
        (['r.jsonl', '--gpu', 'foo'], "no price for a 'foo'. There are prices for a100-40gb"),
        (['r.jsonl', '--price', 'cheap'], 'nor an offer for h200 in the list of prices (there: on-demand, capacity-block, reserved-1y, spot)'),
        (['r.jsonl', '--price', '2', '--price', 'spot'], 'at which price? --price names $2.00 (gpu_hour.h200.given), $1.65 (gpu_hour.h200.spot)'),
        (['cpu.jsonl', '--price', '2'], '--price 2: for which GPU? nothing here is of one'),
        (['cpu.jsonl', 'r.jsonl', 'b200.jsonl', '--price', '2'], '--price 2: for which GPU? here are h200 and b200'),
        (['r.jsonl', '--samples', '1e6'], '--samples 1,000,000: at which resolution? measured are 256 px, 512 px; write --samples PX=1000000'),
        (['r.jsonl', '--samples', '256=1e6,1024=1e6'], '--samples: no row with numbers is of 1024 px; measured are 256 px, 512 px'),
        (['r.jsonl', '--out', 'r.jsonl'], '--out r.jsonl: cannot be written: '),
        (['r.jsonl', '--out', 'r.jsonl/deeper'], '--out r.jsonl/deeper: cannot be written: '),
    ],
)
def test_arguments_that_do_not_go(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / 'r.jsonl', SWEEP)
    write(tmp_path / 'cpu.jsonl', [row(1, 2.0, device='CPU')])
    write(tmp_path / 'b200.jsonl', [row(2, 2000.0, device='NVIDIA B200')])
    assert run(monkeypatch, *arguments) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count('\n') == 1


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch, capsys):
    """As for a user other than root: opening it is refused."""
    path = write(tmp_path / 'r.jsonl', SWEEP)

    def refused(*_):
        raise PermissionError(13, 'Permission denied')

    monkeypatch.setattr('diffusion.cost.results.read_json_lines', refused)
    assert run(monkeypatch, path) == 2
    assert capsys.readouterr().err == f'{path}: cannot be read: Permission denied\n'


@pytest.mark.parametrize(
    ('option', 'value'),
    [('--gpus', '8,none'), *(('--samples', bad) for bad in ('many', '0', '2.5', '256=1e6,256=2e6', '256=1e6,2e6', '1e6,256=2e6', 'px=1e6', '=1e6'))],
)
def test_options_that_are_none(monkeypatch, capsys, option, value):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, 'r.jsonl', option, value)
    assert ended.value.code == 2
    assert f'error: {option} {value}: ' in capsys.readouterr().err


@pytest.mark.parametrize('amount', ['204.8e6', '256=204.8e6', '256=204800000'])
def test_samples_of_ones_own_recipe_are_what_is_costed(tmp_path, monkeypatch, capsys, amount):
    """204.8 million of 256 px instead of phase 1, for the U-Net of SD2 and for any other."""
    for network in ('sd2-base', 'tiny'):
        path = write(tmp_path / 'r.jsonl', [row(n, law(n, 1 / 800, 0.03), network=network) for n in (4, 8, 16, 32)])
        assert run(monkeypatch, path, '--samples', amount, '--gpus', '64..128', '--price', '2.49') == 0
        text = capsys.readouterr().out
        hours = 204_800_000 / law(64, 1 / 800, 0.03) / 3600
        found = cells(text, 'predicted', '64')
        assert found[9:] == [f'{hours * 64:,.2f}', f'${hours * 64 * 2.49:,.2f}']
        assert cells(text, 'predicted', '128')
        assert 'GPU-hours and dollars are those of 204.8 million samples at 256 px, training alone' in text
        assert 'billion' not in text


def test_samples_of_several_resolutions_are_added_up(tmp_path, monkeypatch, capsys):
    path = write(tmp_path / 'r.jsonl', SWEEP)
    assert run(monkeypatch, path, '--samples', '512=1e8,256=3e8') == 0
    text = capsys.readouterr().out
    hours = (3e8 / law(32, 1 / 800, 0.03) + 1e8 / law(32, 1 / 180, 0.03)) / 3600
    found = cells(text[text.index('## All phases') :], 'measured', '32')
    assert float(found[3].replace(',', '')) == pytest.approx(hours * 32, rel=1e-2)
    assert run(monkeypatch, path, '--samples', '512=1e8') == 0
    text = capsys.readouterr().out
    assert '## All phases' not in text
    assert 'those of 100 million samples at 512 px, training alone' in text


@pytest.mark.parametrize(
    ('asked', 'name', 'dollars'),
    [
        (['2.49'], 'gpu_hour.h200.given', 2.49),
        (['spot'], 'gpu_hour.h200.spot', 1.65),
        (['gpu_hour.h200.spot=1.5'], 'gpu_hour.h200.spot', 1.5),
        (['spot', 'gpu_hour.h200.spot=1.5', 'gpu_hour.h200.on-demand=3'], 'gpu_hour.h200.spot', 1.5),
        (['gpu_hour.h100.spot=1'], 'gpu_hour.h200.on-demand', 2.0),
    ],
)
def test_prices_are_asked_for_as_of_a_plan(tmp_path, monkeypatch, capsys, asked, name, dollars):
    """Dollars and offers count first, then an offer that was changed; the one that counts is named."""
    path = write(tmp_path / 'r.jsonl', [row(n, law(n, 1 / 800, 0.03)) for n in (8, 16)])
    assert run(monkeypatch, path, *(part for text in asked for part in ('--price', text))) == 0
    text = capsys.readouterr().out
    hours = 1_126_400_000 / law(8, 1 / 800, 0.03) / 3600
    assert cells(text[text.index('## Scaling') :], 'measured', '8')[10] == f'${few(hours * 8 * dollars)}'
    assert f'Dollars at ${dollars:.2f} per GPU-hour ({name}; ' in text


def test_dollars_give_a_gpu_without_a_price_one(tmp_path, monkeypatch, capsys):
    for device, name in (('NVIDIA L40S', 'l40s'), ('NVIDIA RTX A6000', 'nvidia-rtx-a6000')):
        assert run(monkeypatch, write(tmp_path / 'r.jsonl', [row(2, 400.0, device=device)]), '--price', '1.5') == 0
        text = capsys.readouterr().out
        assert f'Dollars at $1.50 per GPU-hour (gpu_hour.{name}.given; ' in text
        assert 'There is no price' not in text


def test_offers_may_be_of_several_gpus(tmp_path, monkeypatch, capsys):
    path = write(tmp_path / 'r.jsonl', [row(8, 800.0), row(8, 700.0, device='NVIDIA H100')])
    assert run(monkeypatch, path, '--price', 'spot') == 0
    text = capsys.readouterr().out
    assert 'Dollars at $1.65 per GPU-hour' in text
    assert 'Dollars at $2.25 per GPU-hour' in text


def test_read_results_keeps_the_order_of_points(tmp_path):
    path = write(tmp_path / 'r.jsonl', [row(8, 1.0), row(16, 2.0), row(8, 3.0)])
    results = read_results([path])
    assert [(result.point.num_gpus, result.images_per_sec) for result in results.throughput] == [(8, 3.0), (16, 2.0)]
    assert (results.num_superseded, results.num_unread) == (1, 0)
