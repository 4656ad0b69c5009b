"""Scores of drawn images during training: the same on any number of ranks, and training does not notice them."""

import re

import pytest
import torch

from diffusion.checkpoints.reading import ema_weights, find_checkpoint, read_checkpoint, training_weights
from diffusion.common.stopwatch import EVENTS
from diffusion.contracts.errors import DataError, EncoderError
from diffusion.datasets.loader import eval_loader
from diffusion.evaluation.features.networks import EMBEDDING, load_extractors
from diffusion.evaluation.metrics.distances import kid, kid_error
from diffusion.evaluation.metrics.figures import METRICS
from diffusion.faults import preemption
from diffusion.monitoring.report.run import Run, read_log
from diffusion.monitoring.sample_scores import HeldOut, SampleScores, repeated
from diffusion.monitoring.time_accounts import account, read_events
from diffusion.recipe import RecipeError, catalog, load_recipe
from diffusion.training.builder import build_model, build_trainer, finished, outcome
from diffusion.training.builder import fit as builder_fit
from tests.conftest import REPOSITORY
from tests.faults.children import fit, ranks
from tests.faults.driver import YAML

KID = 'metrics/eval/kid/random-conv'
SCORED = ['eval.samples.every=2ba', 'eval.samples.count=16', 'eval.samples.metrics=[kid@random-conv]', 'eval.samples.steps=2']


@pytest.fixture
def on_latents(overrides, latents):
    return [
        *overrides, 'data.kind=latents', f'data.streams.train.local={latents}', f'eval.streams.val.local={latents}', 'eval.every=2ba', 'train.duration=3ba',
        'ema.half_life=5ba', 'optimizer.lr=1e-2',
    ]  # fmt: skip


def load(overrides, *more):
    return load_recipe(REPOSITORY / YAML, [*overrides, *more])


def scores(folder):
    return {record['batch']: record[KID] for record in read_log(folder / 'log.jsonl') if KID in record}


def test_scores_are_logged_counted_and_leave_training_alone(on_latents, tmp_path):
    for name, more in (('plain', []), ('scored', SCORED)):
        trainer = build_trainer(load(on_latents, f'run_folder={tmp_path}/{name}', *more))
        trainer.fit()
        trainer.close()
    plain, scored = (read_checkpoint(find_checkpoint(tmp_path / name)) for name in ('plain', 'scored'))
    for weights in (training_weights, ema_weights):
        a, b = weights(plain), weights(scored)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)
    assert list(scores(tmp_path / 'scored')) == [0, 2, 3]  # untrained, every two batches, and at the end
    assert scores(tmp_path / 'plain') == {}
    spent = {name: account(read_events(tmp_path / name / EVENTS)).sec['evaluation'] for name in ('plain', 'scored')}
    assert spent['scored'] > spent['plain']
    assert len(list((tmp_path / 'scored/evaluation').glob('real-random-conv-*.safetensors'))) == 1

    # The last one by hand: the average draws, and what it is compared with are the images that were encoded.
    recipe = load(on_latents, f'run_folder={tmp_path}/scored', *SCORED)
    model = build_model(recipe, torch.device('cpu'), resumes=True).eval()
    model.network.load_state_dict(ema_weights(scored))
    held_out = HeldOut(eval_loader(recipe, model.encoders, 4).dataset, 16, model.encoders, tmp_path / 'elsewhere')
    [network] = load_extractors(['random-conv'])
    images = model.generate(held_out.captions(), 32, recipe.eval.samples.guidance, 2, 0, held_out.ids)
    expected = kid(held_out.features(network)['random-conv'], network.images(images)['random-conv'], 0).value
    assert scores(tmp_path / 'scored')[3] == pytest.approx(expected, rel=1e-6)


def test_a_resumed_run_has_the_scores_of_a_whole_one(on_latents, tmp_path):
    for name, durations in (('whole', ['4ba']), ('stopped', ['2ba', '4ba'])):
        for duration in durations:
            fit([*on_latents, *SCORED, f'run_folder={tmp_path}/{name}', f'train.duration={duration}'])
    assert scores(tmp_path / 'whole') == scores(tmp_path / 'stopped')


def test_scores_have_their_standard_error(on_latents, tmp_path, capsys):
    """On the console, next to the score, and in the log; a Frechet distance has none."""
    fit([*on_latents, *SCORED, f'run_folder={tmp_path}/run', 'eval.samples.metrics=[kid@random-conv,fid@random-conv]'])
    recipe = load(on_latents, f'run_folder={tmp_path}/run', *SCORED)
    model = build_model(recipe, torch.device('cpu'), resumes=True).eval()
    model.network.load_state_dict(ema_weights(read_checkpoint(find_checkpoint(tmp_path / 'run'))))
    held_out = HeldOut(eval_loader(recipe, model.encoders, 4).dataset, 16, model.encoders, tmp_path / 'elsewhere')
    [network] = load_extractors(['random-conv'])
    images = model.generate(held_out.captions(), 32, recipe.eval.samples.guidance, 2, 0, held_out.ids)
    real, drawn = held_out.features(network)['random-conv'], network.images(images)['random-conv']
    last = read_log(tmp_path / 'run/log.jsonl')[-1]
    expected = kid_error(real, drawn, kid(real, drawn, 0), 0)
    assert last[f'{KID}_error'] == pytest.approx(expected, rel=1e-6)
    assert 'metrics/eval/fid/random-conv' in last
    assert 'metrics/eval/fid/random-conv_error' not in last
    printed = re.findall(r'^scores after batch (\d+): kid@random-conv ([-\d.]+) ± ([\d.]+), fid@random-conv [\d.]+$', capsys.readouterr().err, re.M)
    assert [batch for batch, *_ in printed] == ['0', '2', '3']
    assert float(printed[-1][1]) == pytest.approx(last[KID], rel=0.05)
    assert float(printed[-1][2]) == pytest.approx(last[f'{KID}_error'], rel=0.05)


def test_a_run_ends_when_its_score_no_longer_improves_and_does_not_train_on(on_latents, tmp_path, capsys):
    """Weights that hardly move draw equal images: the second score is no better than that of the untrained model."""
    stuck = [*on_latents, *SCORED, 'optimizer.lr=1e-30', 'train.duration=6ba', 'eval.samples.stop.metric=kid@random-conv']
    impatient = [*stuck, 'eval.samples.stop.patience=1']

    def run(overrides):
        trainer, recipe = build_trainer(load(overrides)), load(overrides)
        already = finished(trainer)
        builder_fit(trainer, recipe)
        return already, outcome(trainer, recipe), int(find_checkpoint(tmp_path / 'run').stem.removeprefix('ba'))

    why = 'kid@random-conv has not improved on [-0-9.e]+, of batch 0, in 1 score, eval.samples.stop.patience=1'
    already, ending, batch = run(impatient)
    assert (already, batch) == (False, 2)
    assert re.fullmatch(f'trained until its score no longer improved, to batch 2 \\({why}; raise it to train on\\)', ending)
    assert re.search(f'^early stop after batch 2: {why}$', capsys.readouterr().err, re.MULTILINE)
    assert Run.read(tmp_path / 'run').state() == 'stopped early'
    log = (tmp_path / 'run/log.jsonl').read_text()

    assert run(impatient) == (True, ending, 2)  # the same command again
    assert re.search('^early stop after batch 2: ', capsys.readouterr().err, re.MULTILINE)
    assert (tmp_path / 'run/log.jsonl').read_text() == log
    assert Run.read(tmp_path / 'run').state() == 'stopped early'

    assert run([*stuck, 'eval.samples.stop.patience=2']) == (
        False,
        ending.replace('batch 2', 'batch 4').replace('1 score', '2 scores').replace('patience=1', 'patience=2'),
        4,
    )
    assert run([one for one in stuck if 'stop' not in one]) == (False, 'trained to 6ba', 6)
    assert Run.read(tmp_path / 'run').state() == 'finished'


@pytest.mark.parametrize(
    ('values', 'lower', 'last'), [([5, 4, 3, 3.5, 3.2, 1], True, 4), ([1, 2, 3, 3, 4, 3, 2], False, 6), ([6, 5, 4, 3, 2, 1, 0], True, 6)]
)
def test_only_scores_in_a_row_end_a_run(values, lower, last, on_latents, tmp_path, monkeypatch):
    """Better is what the metric says; an equal score is no improvement."""
    given = iter(values)
    monkeypatch.setattr(SampleScores, '_figures', lambda *_: {'kid@random-conv': ({'value': float(next(given))}, lower)})
    stop = ['eval.samples.stop.metric=kid@random-conv', 'eval.samples.stop.patience=2']
    fit([*on_latents, *SCORED, *stop, 'eval.samples.every=1ba', 'train.duration=6ba'])
    assert list(scores(tmp_path / 'run')) == list(range(last + 1))


@pytest.mark.long
def test_ranks_stop_together(on_latents, tmp_path):
    stop = ['optimizer.lr=1e-30', 'train.duration=6ba', 'eval.samples.stop.metric=kid@random-conv', 'eval.samples.stop.patience=1']
    ranks(fit, [[[*on_latents, *SCORED, *stop, f'run_folder={tmp_path}/two', 'train.compile=null']]] * 2, tmp_path)
    assert list(scores(tmp_path / 'two')) == [0, 2]


@pytest.mark.long
@pytest.mark.parametrize('sharding', ['ddp', 'zero2'])
def test_ranks_share_the_drawing(sharding, on_latents, tmp_path):
    """Three chunks on two ranks: one of them draws the last chunk a second time, which counts once."""
    options = [*on_latents, *SCORED, 'eval.samples.count=40', f'train.sharding={sharding}', 'train.compile=null']
    fit([*options, f'run_folder={tmp_path}/one'])
    ranks(fit, [[[*options, f'run_folder={tmp_path}/two']]] * 2, tmp_path)
    one, two = scores(tmp_path / 'one'), scores(tmp_path / 'two')
    assert one[0] == two[0]  # the untrained model: the same weights
    assert two == pytest.approx(one, rel=1e-3)  # after that the sums of gradients are rounded in another order


def test_prompts_of_the_recipe_are_drawn_in_turn():
    assert repeated(['a', 'b', 'c'], 8) == ['a', 'b', 'c', 'a', 'b', 'c', 'a', 'b']


def test_real_images_of_latents_are_decoded_and_cached(on_latents, images, encoders, tmp_path):
    recipe = load(on_latents)
    from_latents = HeldOut(eval_loader(recipe, encoders, 4).dataset, 8, encoders, tmp_path / 'latents')
    as_images = load(on_latents, 'data.kind=images', f'data.streams.train.local={images}', f'eval.streams.val.local={images}')
    from_images = HeldOut(eval_loader(as_images, encoders, 4).dataset, 8, encoders, tmp_path / 'images')
    assert from_latents.ids == from_images.ids == [0, 6, 12, 18, 24, 30, 36, 42]
    assert from_latents.captions() == from_images.captions()
    real = torch.stack([from_images.dataset.view(i, 0)['images'] for i in from_images.ids])
    moments = encoders.vae.encode(real)
    reconstructed = encoders.vae.decode(moments.chunk(2, dim=1)[0] * encoders.vae.scaling_factor)
    decoded = torch.cat(list(from_latents.images()))
    assert decoded.shape == real.shape == (8, 3, 32, 32)
    assert (decoded.float() - reconstructed.float()).abs().max() <= 2  # stored as float16
    assert (decoded.float() - torch.cat(list(from_images.images())).float()).abs().max() <= 1  # runs on images are compared with the same
    assert real.float().std(dim=0).mean() > 10  # they differ from one another


def test_real_features_are_computed_once_for_what_they_depend_on(on_latents, encoders, tmp_path, monkeypatch):
    dataset = eval_loader(load(on_latents), encoders, 4).dataset
    [network] = load_extractors(['random-conv'])
    first = HeldOut(dataset, 8, encoders, tmp_path).features(network)['random-conv']
    assert first.shape == (8, 368)
    seen = []
    monkeypatch.setattr(type(network), 'images', lambda self, images: seen.append(len(images)) or {'random-conv': torch.zeros(len(images), 368)})
    assert torch.equal(HeldOut(dataset, 8, encoders, tmp_path).features(network)['random-conv'], first)
    assert seen == []
    assert HeldOut(dataset, 24, encoders, tmp_path).features(network)['random-conv'].shape == (24, 368)
    assert seen == [16, 8]
    monkeypatch.setattr(network, 'sha256', 'of other weights')
    assert not HeldOut(dataset, 8, encoders, tmp_path).features(network)['random-conv'].any()


def test_names_that_recipes_may_use_are_those_of_the_evaluation():
    assert {
        name: catalog.MetricRequirements(
            metric.extractor, metric.needs_captions, metric.needs_real, tuple(metric.figures) if len(metric.figures) > 1 else ()
        )
        for name, metric in METRICS.items()
    } == catalog.METRICS
    assert {name: known.texts for name, known in EMBEDDING.items()} == catalog.EMBEDS_CAPTIONS


def test_missing_weights_stop_before_the_first_step(on_latents, tmp_path, monkeypatch):
    monkeypatch.setenv('HF_HUB_CACHE', str(tmp_path / 'empty'))
    with pytest.raises(EncoderError, match=r'eval\.samples\.weights'):
        build_trainer(load(on_latents, *SCORED, 'eval.samples.metrics=[kid]', f'eval.samples.weights={tmp_path}'))
    assert not (tmp_path / 'run/log.jsonl').exists()


def test_captions_that_a_metric_is_not_for_stop_before_the_first_step(on_latents, tmp_path):
    with pytest.raises(DataError, match="'an owl' is no caption of data_prep.shapes"):
        build_trainer(load(on_latents, *SCORED, 'eval.samples.metrics=[shapes]', 'eval.samples.prompts=[an owl]'))
    assert not (tmp_path / 'run/log.jsonl').exists()


def test_a_request_to_stop_leaves_the_scores_out(on_latents, tmp_path, monkeypatch):
    trainer = build_trainer(load(on_latents, *SCORED))
    monkeypatch.setattr(preemption, 'agreed', lambda: trainer.state.timestamp.batch.value == 2)
    with pytest.raises(preemption.Preempted):
        trainer.fit()
    trainer.close()
    assert list(scores(tmp_path / 'run')) == [0]


def test_more_images_than_evaluation_samples_are_refused(on_latents):
    with pytest.raises(RecipeError, match=r'eval\.samples\.count: 49 images are to be drawn, and the evaluation data hold 48 samples; set it to 48'):
        build_trainer(load(on_latents, *SCORED, 'eval.samples.count=49'))
