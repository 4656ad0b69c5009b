"""The ladder begins at diffusers' own loop and ends at what train.py does."""

import json
from types import SimpleNamespace

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor

from benchmarks import step, step_rows
from benchmarks.optimizations import OPTIMIZATIONS, Switches, ladder
from benchmarks.step_rows import StepRow, build_step, measured, plain_loss, possible, random_batch, recipe_of
from diffusion.families.unet import CLASSES, PlainAttention
from diffusion.objectives.diffusion import add_noise, signal_and_sigma
from diffusion.recipe import load_recipe
from diffusion.training.builder import build_model
from tests.conftest import REPOSITORY

CPU = torch.device('cpu')
SETTING = {'network': 'tiny', 'resolution': 16, 'micro_batch': 2, 'device': CPU}


def built(switches, encoders_folder, kind='latents'):
    switches = possible(switches, CPU, may_compile=False)
    return build_step(switches, recipe_of(switches, kind=kind, encoders=encoders_folder, **SETTING), CPU)


def processors(model):
    return {type(processor) for processor in model.network.attn_processors.values()}


def is_channels_last(model):
    return all(p.is_contiguous(memory_format=torch.channels_last) for p in model.network.parameters() if p.ndim == 4)


def test_the_first_row_is_the_plain_loop(encoders_folder, monkeypatch):
    assert ladder()[OPTIMIZATIONS[0].name] == Switches()
    drawn = []
    monkeypatch.setattr(torch, 'randn_like', lambda *args, original=torch.randn_like, **kwargs: drawn.append(1) or original(*args, **kwargs))
    model, _, step = built(Switches(), encoders_folder)
    assert processors(model) == {AttnProcessor}
    assert not is_channels_last(model)
    assert not {type(module) for module in model.network.modules()} & set(CLASSES.values())
    step()
    assert len(drawn) == 2  # posterior and noise


def test_a_network_that_reads_more_than_text_takes_the_same_steps(encoders_xl_folder):
    for switches in (Switches(), list(ladder().values())[-1]):
        recipe = recipe_of(
            possible(switches, CPU, may_compile=False), kind='latents', encoders=encoders_xl_folder, **{**SETTING, 'network': 'tiny-xl'}
        )
        model, _, step = build_step(possible(switches, CPU, may_compile=False), recipe, CPU)
        step()
        assert all(torch.isfinite(parameter).all() for parameter in model.network.parameters())


@pytest.mark.parametrize('row', [0, -1])
def test_an_adapter_takes_the_same_steps_and_leaves_the_network_alone(encoders_folder, row):
    switches = possible(list(ladder().values())[row], CPU, may_compile=False)
    model, batch, step = build_step(switches, recipe_of(switches, kind='latents', encoders=encoders_folder, adapter_rank=2, **SETTING), CPU)
    before = {name: weight.clone() for name, weight in model.network.named_parameters()}
    for _ in range(2):
        step()
    changed = {name for name, weight in model.network.named_parameters() if (weight != before[name]).any()}
    assert changed
    assert all('lora_' in name for name in changed)
    whole = built(switches, encoders_folder)[0].flops_per_batch(batch)
    assert 0.6 < model.flops_per_batch(batch) / whole < 0.9


def test_the_last_row_does_everything_that_the_shipped_recipe_does(encoders_folder):
    last = list(ladder().values())[-1]
    assert last == Switches(
        sdpa=True, channels_last=True, fused_adamw=True, reads_loss=False, keyed_noise=True, bf16_encoders=True, compile='network', ema=True
    )
    shipped = load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', ['data.kind=synthetic'])
    on_gpu = recipe_of(last, kind='latents', encoders=encoders_folder, **{**SETTING, 'device': torch.device('cuda')})
    assert on_gpu.train == shipped.train
    assert on_gpu.optimizer == shipped.optimizer
    assert on_gpu.model.diffusion.prediction == shipped.model.diffusion.prediction
    model, _, step = built(last, encoders_folder)
    assert processors(model) == {PlainAttention}
    assert is_channels_last(model)
    assert {type(module) for module in model.network.modules()} >= set(CLASSES.values())
    before = [p.clone() for p in model.network.parameters()]
    for _ in range(2):
        step()
    assert all(torch.isfinite(p).all() for p in model.network.parameters())
    assert any(not torch.equal(old, new) for old, new in zip(before, model.network.parameters(), strict=True))


def test_each_optimization_changes_one_thing():
    rows = ladder()
    above = None
    for optimization in OPTIMIZATIONS[1:]:
        base = rows[optimization.to] if optimization.to else above or Switches()
        above = rows[optimization.name]
        assert sum(vars(base)[name] != vars(above)[name] for name in vars(base)) == 1, optimization.name


@pytest.mark.parametrize('kind', ['latents', 'images'])
def test_the_plain_loop_trains_the_same_objective(kind, encoders_folder):
    """Its noisy latents and target are those of our formulas, so that the rows differ in speed alone."""
    recipe = recipe_of(Switches(), kind=kind, encoders=encoders_folder, **SETTING)
    model = build_model(recipe, CPU)
    batch = random_batch(recipe, model)
    seen = {}
    model.network.forward = lambda noisy, t, text: seen.update(noisy=noisy, t=t) or type('Output', (), {'sample': torch.zeros_like(noisy)})
    torch.manual_seed(0)
    loss = plain_loss(model)(batch)
    torch.manual_seed(0)
    moments = batch['moments'] if kind == 'latents' else model.encoders.vae.encode(batch['images'])
    latents = model.encoders.vae.latents(moments, torch.randn_like(moments[:, :4], dtype=torch.float32))
    noise = torch.randn_like(latents)
    torch.testing.assert_close(
        seen['noisy'], add_noise(latents, noise, *signal_and_sigma(model.objective.alphas_cumprod[seen['t']])), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(loss, noise.square().mean())


def test_a_cpu_trains_as_train_py_does_there():
    here = possible(list(ladder().values())[-1], CPU, may_compile=False)
    assert here.compile is None
    assert not here.bf16_encoders
    assert here.ema


def test_a_step_that_cannot_be_measured_leaves_the_rows_before_it(encoders_folder, monkeypatch):
    """As on a GPU, where each row has the machine to itself."""
    rows = [StepRow(optimization, ladder()[optimization.name]) for optimization in OPTIMIZATIONS[:3]]
    rows[1].status = 'skipped: needs a GPU'
    build = StepRow.build

    def break_down(row, *args):
        if row is rows[2]:
            raise RuntimeError('CUDA error')
        build(row, *args)

    monkeypatch.setattr(StepRow, 'build', break_down)
    setting = {'network': 'tiny', 'resolution': 16, 'kind': 'latents', 'micro_batch': 2}
    done = []
    with pytest.raises(RuntimeError, match='CUDA error'):
        done += measured(rows, setting, encoders_folder, steps=1, warmup=1, alone=True)
    assert rows[0].timing is not None
    came = measured(rows, setting, encoders_folder, steps=1, warmup=1, alone=True)
    assert next(came).line(setting)['images_per_sec'] > 0  # before the next one is begun
    assert next(came).line(setting)['status'] == 'skipped: needs a GPU'
    with pytest.raises(RuntimeError, match='CUDA error'):
        next(came)


def test_benchmarks_step_writes_each_row_when_it_has_it(tmp_path, monkeypatch):
    """Nothing is in memory alone when the next row begins."""
    out = tmp_path / 'step.jsonl'
    at_start = []

    def rows_one_by_one(rows, *args, **kwargs):
        for row in rows:
            row.status = 'skipped: for a test'
            at_start.append(len(out.read_text().splitlines()) if out.exists() else 0)
            yield row

    monkeypatch.setattr(step_rows, 'measured', rows_one_by_one)
    step.measure(
        SimpleNamespace(
            network='tiny', resolution=16, kind='latents', micro_batch=2, adapter_rank=None, only=None, compile=False, steps=1, warmup=1, out=out
        )
    )
    assert at_start == list(range(len(OPTIMIZATIONS)))
    assert [json.loads(line)['row'] for line in out.read_text().splitlines()] == [optimization.name for optimization in OPTIMIZATIONS]


def test_out_of_memory_is_a_row_of_the_ablation(encoders_folder, monkeypatch):
    def no_room(*args):
        raise torch.cuda.OutOfMemoryError('CUDA out of memory')

    monkeypatch.setattr(StepRow, 'build', no_room)
    rows = [StepRow(optimization, ladder()[optimization.name]) for optimization in OPTIMIZATIONS[:2]]
    setting = {'network': 'tiny', 'resolution': 16, 'kind': 'latents', 'micro_batch': 2}
    assert [row.status for row in measured(rows, setting, encoders_folder, steps=1, warmup=1, alone=True)] == ['out of memory'] * 2
