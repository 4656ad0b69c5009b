"""The ladder begins at diffusers' own loop and ends at what train.py does."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor

from benchmarks import step, step_rows
from benchmarks.optimizations import ABOVE, OPTIMIZATIONS, Switches, switches_of
from benchmarks.step_rows import StepRow, build_step, plain_loss, possible, random_batch, recipe_of
from diffusion.families.unet import CLASSES, PlainAttention
from diffusion.objectives.diffusion import add_noise, signal_and_sigma
from diffusion.recipe import load_recipe
from diffusion.training.builder import build_model
from tests.conftest import REPOSITORY

CPU = torch.device('cpu')
LAST = '+ EMA each step = train.py'
SETTING = {'network': 'tiny', 'resolution': 16, 'micro_batch': 2, 'device': CPU}


def built(switches, encoders_folder, kind='latents'):
    switches = possible(switches, CPU)
    return build_step(switches, recipe_of(switches, kind=kind, encoders=encoders_folder, **SETTING), CPU)


def processors(model):
    return {type(processor) for processor in model.network.attn_processors.values()}


def is_channels_last(model):
    return all(p.is_contiguous(memory_format=torch.channels_last) for p in model.network.parameters() if p.ndim == 4)


def test_the_first_row_is_the_plain_loop(encoders_folder, monkeypatch):
    assert switches_of('plain loop') == Switches()
    drawn = []
    monkeypatch.setattr(torch, 'randn_like', lambda *args, original=torch.randn_like, **kwargs: drawn.append(1) or original(*args, **kwargs))
    model, _, step = built(Switches(), encoders_folder)
    assert processors(model) == {AttnProcessor}
    assert not is_channels_last(model)
    assert not {type(module) for module in model.network.modules()} & set(CLASSES.values())
    step()
    assert len(drawn) == 2  # posterior and noise


def test_a_network_that_reads_more_than_text_takes_the_same_steps(encoders_xl_folder):
    for switches in (Switches(), switches_of(LAST)):
        recipe = recipe_of(possible(switches, CPU), kind='latents', encoders=encoders_xl_folder, **{**SETTING, 'network': 'tiny-xl'})
        model, _, step = build_step(possible(switches, CPU), recipe, CPU)
        step()
        assert all(torch.isfinite(parameter).all() for parameter in model.network.parameters())


def test_the_last_row_does_everything_that_the_shipped_recipe_does(encoders_folder):
    last = switches_of(LAST)
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
    assert next(iter(OPTIMIZATIONS)) not in ABOVE
    for name, above in ABOVE.items():
        before, after = vars(switches_of(above)), vars(switches_of(name))
        assert sum(before[key] != after[key] for key in before) == 1, name


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
    here = possible(switches_of(LAST), CPU)
    assert here.compile is None
    assert not here.bf16_encoders
    assert here.ema


@pytest.mark.parametrize('error', [None, RuntimeError('CUDA error')])
def test_benchmarks_step_writes_each_row_when_it_has_it(tmp_path, monkeypatch, error):
    """Nothing is in memory alone when the next row begins, or breaks the device."""
    out, at_start = tmp_path / 'step.jsonl', []

    def measure(row, *args):
        at_start.append(len(out.read_text().splitlines()) if out.exists() else 0)
        if error is not None and row.name == '+ channels_last':
            raise error
        row.status = 'measured elsewhere'

    monkeypatch.setattr(StepRow, 'measure', measure)
    monkeypatch.setattr(step_rows, 'possible', lambda switches, *_: switches)  # as on a GPU: no row is skipped
    options = SimpleNamespace(network='tiny', resolution=16, kind='latents', micro_batch=2, only=None, steps=1, warmup=1, out=out)
    with nullcontext() if error is None else pytest.raises(RuntimeError, match='CUDA error'):
        step.measure(options)
    measured = [*OPTIMIZATIONS][: None if error is None else 2]
    assert at_start == list(range(len(OPTIMIZATIONS)))[: None if error is None else 3]
    assert [json.loads(line)['row'] for line in out.read_text().splitlines()] == measured


def test_out_of_memory_is_a_row_of_the_ablation(encoders_folder, monkeypatch):
    def no_room(*args):
        raise torch.cuda.OutOfMemoryError('CUDA out of memory')

    monkeypatch.setattr(StepRow, 'build', no_room)
    row = StepRow('plain loop', Switches())
    setting = {'network': 'tiny', 'resolution': 16, 'kind': 'latents', 'micro_batch': 2}
    row.measure(setting, encoders_folder, steps=1, warmup=1)
    assert row.line(setting)['status'] == 'out of memory'


def test_what_does_nothing_here_is_skipped():
    rows = [step_rows.step_row(name) for name in OPTIMIZATIONS]
    skipped = {row.name: row.status for row in rows if row.status != 'measured'}
    assert skipped == {
        '+ encoders in bf16': 'skipped: needs a GPU',
        '+ compile blocks': 'skipped: needs a GPU',
        '+ resident bf16 (FSDP2)': 'skipped: needs a GPU',
        '+ compile network': 'skipped: needs a GPU',
    }
