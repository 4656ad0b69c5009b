"""The cost callback, the record of the run and its report reckon with one price, the one of when it ran."""

import pytest

from diffusion.cost import prices
from diffusion.cost.prices import load_prices
from diffusion.monitoring.report.pages import write_report
from diffusion.monitoring.report.run import Run, read_log
from diffusion.recipe import load_recipe
from diffusion.training.builder import build_trainer
from tests.conftest import REPOSITORY, TINY, read_json, run_python


@pytest.fixture(scope='module')
def run(latents, encoders_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp('priced') / 'run'
    recipe = load_recipe(
        REPOSITORY / 'yamls/shapes.yaml',
        [*TINY, f'run_folder={folder}', f'model.encoders.source={encoders_folder}', f'data.streams.shapes.local={latents}', 'train.duration=4ba',
         'log.every=1', 'log.samples.every=null', 'ema.half_life=null', 'cost.gpu=rtx-4090', 'cost.price_per_gpu_hour=null'],
    )  # fmt: skip
    trainer = build_trainer(recipe)
    trainer.fit()
    trainer.close()
    return folder


def test_a_gpu_by_name_is_priced_by_the_list(run):
    price = load_prices()['gpu_hour.rtx-4090']
    assert read_json(run / 'environment.json')['price'] == {
        'name': 'gpu_hour.rtx-4090.on-demand', 'dollars': 0.324, 'unit': 'GPU-hour', 'date': price.date, 'source': price.source,
    }  # fmt: skip
    last = read_log(run / 'log.jsonl')[-1]
    assert last['cost/dollars_so_far'] == pytest.approx(last['cost/gpu_hours'] * 0.324)
    assert last['cost/dollars_so_far'] > 0


def test_the_report_of_a_run_does_not_follow_the_list(run, tmp_path, monkeypatch):
    dearer = tmp_path / 'prices.yaml'
    dearer.write_text('gpu_hour: {rtx-4090: {on-demand: {dollars: 99, date: 2030, source: tomorrow}}}')
    monkeypatch.setattr(prices, 'DEFAULT', dearer)
    page = write_report(run).read_text()
    assert '$0.324 per GPU-hour (gpu_hour.rtx-4090.on-demand; SaladCloud post, with 2 vCPU and 16 GB; 2024)' in page
    assert 'tomorrow' not in page


def test_runs_of_before_prices_were_recorded():
    def price(of_recipe, environment):
        return Run(None, '', {'cost': {'gpu': 'h200', 'price_per_gpu_hour': of_recipe}}, [], [], environment).price

    assert price(0.1, {'device': 'CPU'}).dollars == 0.1
    assert price(None, {'device': 'CPU'}) is None  # the list of then is not known
    assert price(0.1, {'price': None}) is None


def test_a_recipe_that_names_an_unknown_gpu_is_refused_without_torch():
    overrides = ['data.kind=synthetic', 'cost.gpu=h1000', 'cost.price_per_gpu_hour=null']
    done = run_python('-X', 'importtime', '-m', 'diffusion.check', REPOSITORY / 'yamls/sd2-base-256.yaml', *overrides, code=2)
    assert "no price for a 'h1000'; did you mean 'h100'?" in done.stderr
    assert not any(line.rpartition('|')[2].strip() == 'torch' for line in done.stderr.splitlines())
