"""A run of an autoencoder as a user meets it: every shipped recipe, a stop and a resume, two ranks, and what is exported."""

import copy
import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image

from diffusion.autoencoding import builder
from diffusion.autoencoding.exporting import export, normalise_latents
from diffusion.autoencoding.networks import build_autoencoder
from diffusion.checkpoints.reading import ema_weights, find_checkpoint, read_checkpoint, training_weights
from diffusion.contracts.errors import PREEMPTED, CheckpointError, EncoderError
from diffusion.datasets.loader import train_loader
from diffusion.encoders.frozen import Vae
from diffusion.evaluation.metrics.reconstructions import LatentStatistics, psnr, ssim
from diffusion.monitoring.report.run import read_log
from diffusion.recipe import AutoencoderRecipe, RecipeError, load_any_recipe, load_recipe
from diffusion.training.builder import build_model as build_text_to_image
from diffusion.training.builder import finished, fit
from diffusion.training.ema import averaged_weights
from tests.conftest import REPOSITORY, read_json, run_here
from tests.faults.children import ranks
from tests.faults.driver import Forked, digest, everything_in
from tests.faults.test_signals import has_trained

YAMLS = [path for path in sorted((REPOSITORY / 'yamls').glob('*.yaml')) if '\nautoencoder:' in path.read_text()]
YAML = str(REPOSITORY / 'yamls/vae-f8c4.yaml')
TINY = [
    'autoencoder.network=tiny',
    'autoencoder.perceptual.network=lpips@random-conv',
    'autoencoder.adversarial.filters=8',
    'autoencoder.adversarial.layers=2',
    'autoencoder.num_measured=20',
    'data.resolution=32',
    'data.workers=0',
    'data.canonical_nodes=1',
    'batch.global_size=8',
    'batch.micro_size=4',
    'optimizer.lr=1e-3',
    'optimizer.warmup=1ba',
    'ema.half_life=10ba',
    'train.duration=6ba',
    'train.precision=fp32',
    'train.cpu_threads=1',
    'log.every=1',
]


def load(*overrides, path=YAML) -> AutoencoderRecipe:
    return load_any_recipe(path, [*TINY, *overrides])


def run(recipe):
    trainer = builder.build_trainer(recipe)
    fit(trainer, recipe, afterwards=lambda: export(trainer, recipe, recipe_out(recipe)))
    return trainer


def recipe_out(recipe):
    return Path(recipe.run_folder) / 'export'


@pytest.fixture(scope='module')
def trained(images, tmp_path_factory):
    """A run with everything switched on, and its recipe."""
    folder = tmp_path_factory.mktemp('vae')
    streams = [
        f'data.streams.train.local={images}',
        f'eval.streams.held.local={images}',
        'eval.every=3ba',
        'log.samples.every=3ba',
        'log.samples.count=10',
    ]
    recipe = load(f'run_folder={folder}/run', *streams)
    return run(recipe), recipe


@pytest.mark.parametrize('path', YAMLS, ids=lambda path: path.stem)
def test_every_shipped_recipe_runs_on_synthetic_images(path, tmp_path):
    recipe = load(f'run_folder={tmp_path}/run', 'data.kind=synthetic', 'data.synthetic_samples=48', 'train.duration=3ba', path=path)
    assert finished(run(recipe))
    assert load_any_recipe(tmp_path / 'run/recipe.yaml') == recipe
    AutoencoderKL.from_pretrained(tmp_path / 'run/export', subfolder='vae')


def test_the_log_has_each_loss_and_the_discriminator_from_its_start_on(trained):
    _, recipe = trained
    log = read_log(recipe_out(recipe).parent / 'log.jsonl')
    by_batch = {record['batch']: record for record in log if 'loss/train/l1' in record}
    assert [batch for batch in sorted(by_batch) if 'loss/train/discriminator' in by_batch[batch]] == [3, 4, 5, 6]  # 0.3 of 6 batches go without
    assert by_batch[6]['loss/train/adaptive_weight'] > 0


def test_held_out_images_are_scored_with_the_averaged_weights(trained, images):
    trainer, recipe = trained
    evaluated = [record for record in read_log(recipe_out(recipe).parent / 'log.jsonl') if 'metrics/eval/psnr' in record]
    assert [record['batch'] for record in evaluated] == [3, 6]
    dataset, model = trainer.state.evaluators[0].dataloader.dataloader.dataset, trainer.state.model
    originals = torch.stack([dataset.view(i, 0)['images'] for i in range(dataset.num_samples)])
    with averaged_weights(trainer.state) as weights:
        drawn = model.reconstruct(originals)
    assert weights == 'ema'
    for name, figure in (('psnr', psnr), ('ssim', ssim)):
        assert evaluated[-1][f'metrics/eval/{name}'] == pytest.approx(float(figure(drawn, originals).mean()), rel=1e-4)


def test_a_grid_shows_originals_above_their_reconstructions(trained):
    trainer, recipe = trained
    folder = recipe_out(recipe).parent / 'samples'
    assert sorted(path.name for path in folder.iterdir()) == ['ba00000000-training.png', 'ba00000003-ema.png', 'ba00000006-ema.png']
    with Image.open(folder / 'ba00000006-ema.png') as image:
        pixels = np.asarray(image)
    dataset = trainer.state.evaluators[0].dataloader.dataloader.dataset
    first = dataset.view(0, 0)['images'].permute(1, 2, 0).numpy()
    rows, columns = (round(side / 32) for side in pixels.shape[:2])
    assert (rows, columns) == (4, 8)
    assert any((pixels[y : y + 32, x : x + 32] == first).all() for y in range(4) for x in range(4))


def test_the_export_holds_the_average_and_opens_in_plain_diffusers_and_here(trained):
    trainer, recipe = trained
    out = recipe_out(recipe)
    facts = read_json(out / 'export.json')
    assert (facts['weights'], facts['batches'], facts['samples_seen']) == ('ema', 6, 48)
    network = AutoencoderKL.from_pretrained(out, subfolder='vae')
    dataset, model = trainer.state.train_dataloader.dataset, trainer.state.model
    images = torch.stack([dataset.view(i, 0)['images'] for i in range(4)])
    with averaged_weights(trainer.state), torch.no_grad():
        expected = model.network.decode(model.moments(images).chunk(2, dim=1)[0]).sample
    with torch.no_grad():
        found = network.decode(network.encode(images.float() / 127.5 - 1).latent_dist.mode()).sample
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)  # the scale in the weights changes no reconstruction
    vae = Vae.find(str(out), None)
    assert (vae.downsampling, vae.latent_channels, vae.scaling_factor, vae.shift_factor) == (4, 4, 1.0, 0.0)
    averages = ema_weights(read_checkpoint(find_checkpoint(out.parent)))
    assert torch.equal(averages['decoder.conv_out.weight'], network.decoder.conv_out.weight)


@pytest.mark.parametrize('folded', [True, False])
def test_latents_of_the_export_have_zero_mean_and_unit_variance(folded, trained, tmp_path):
    """By NumPy, of draws from the posteriors of the images that were measured; with 1 x 1 convolutions in every channel."""
    trainer, _ = trained
    dataset = trainer.state.train_dataloader.dataset
    images = torch.stack([dataset.view(i, 0, epoch=0)['images'] for i in range(dataset.num_samples)])
    torch.manual_seed(0)
    network = trainer.state.model.network if folded else build_autoencoder('tiny')
    if not folded:
        network.quant_conv, network.post_quant_conv = None, None
        network.register_to_config(use_quant_conv=False, use_post_quant_conv=False)
    pixels = images.float() / 127.5 - 1
    statistics = LatentStatistics(4)
    with torch.no_grad():
        before = network.encode(pixels).latent_dist
        reconstructed = network.decode(before.mode()).sample
    statistics.add(before.parameters)
    network = copy.deepcopy(network)
    config = normalise_latents(network, statistics.record())
    network.register_to_config(**config)
    network.save_pretrained(tmp_path / 'vae')
    vae = Vae.find(str(tmp_path), None)
    with torch.no_grad():
        moments = network.encode(pixels).latent_dist.parameters
        again = network.decode(moments.chunk(2, dim=1)[0]).sample
    torch.testing.assert_close(again, reconstructed, rtol=1e-3, atol=1e-4)
    draws = [vae.latents(moments, torch.randn(moments.shape[0], 4, *moments.shape[2:])).numpy() for _ in range(20)]
    latents = np.stack(draws).astype(np.float64)  # (20, N, 4, h, w)
    assert latents.mean() == pytest.approx(0, abs=0.01)
    assert latents.std() == pytest.approx(1, abs=0.01)
    by_channel = latents.mean(axis=(0, 1, 3, 4)), latents.std(axis=(0, 1, 3, 4))
    if folded:
        np.testing.assert_allclose(by_channel[0], 0, atol=0.03)
        np.testing.assert_allclose(by_channel[1], 1, atol=0.03)
    unscaled = latents / vae.scaling_factor + vae.shift_factor
    np.testing.assert_allclose(unscaled.mean(axis=(0, 1, 3, 4)), config['latents_mean'], atol=0.03 / vae.scaling_factor)
    np.testing.assert_allclose(unscaled.std(axis=(0, 1, 3, 4)), config['latents_std'], atol=0.03 / vae.scaling_factor)


def test_a_finished_run_is_exported_again_if_the_folder_is_gone(trained, tmp_path):
    _, recipe = trained
    out = recipe_out(recipe)
    before = {path.name: path.read_bytes() for path in out.rglob('*') if path.is_file()}
    shutil.rmtree(out)
    run(recipe)
    assert {path.name: path.read_bytes() for path in out.rglob('*') if path.is_file()} == before
    run(recipe)  # it is there
    trainer = builder.build_trainer(recipe)
    (tmp_path / 'mine').mkdir()
    with pytest.raises(CheckpointError, match='is not an export of this project'):
        export(trainer, recipe, tmp_path / 'mine')
    trainer.close()


def test_another_run_starts_from_an_export_or_a_run(trained, tmp_path):
    _, recipe = trained
    for source, weights in ((recipe_out(recipe), None), (recipe_out(recipe).parent, 'as trained')):
        more = [f'run_folder={tmp_path}/{source.name}', f'load_path={source}', 'data.kind=synthetic']
        model = builder.build_model(load(*more), torch.device('cpu'))
        if weights:
            theirs = training_weights(read_checkpoint(find_checkpoint(source)))
        else:
            theirs = AutoencoderKL.from_pretrained(source, subfolder='vae').state_dict()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in model.network.state_dict().items())
    with pytest.raises(CheckpointError, match='holds another network'):
        builder.build_model(load(f'load_path={recipe_out(recipe)}', 'autoencoder.network=shapes', 'data.kind=synthetic'), torch.device('cpu'))


def test_stopped_and_resumed_it_equals_a_run_that_nobody_touched(images, tmp_path):
    """The discriminator begins after the stop."""
    overrides = [*TINY, f'data.streams.train.local={images}', 'train.duration=40ba', 'autoencoder.adversarial.start=0.6', 'checkpoint.every=1000ba']
    with Forked([*overrides, f'run_folder={tmp_path}/run'], tmp_path / 'first.txt', YAML) as process:
        process.wait_until(has_trained(tmp_path, 3))
        process.signal(signal.SIGTERM)
        output = process.wait(PREEMPTED)
    assert 'resume with' in output
    assert not (tmp_path / 'run/export').exists()
    with Forked([*overrides, f'run_folder={tmp_path}/run'], tmp_path / 'second.txt', YAML) as process:
        assert 'is trained to 40ba; its autoencoder' in process.wait()
    with Forked([*overrides, f'run_folder={tmp_path}/untouched'], tmp_path / 'third.txt', YAML) as process:
        process.wait()
    ours, theirs = (everything_in(find_checkpoint(tmp_path / name)) for name in ('run', 'untouched'))
    assert [part for part in ours if digest(ours[part]) != digest(theirs[part])] == []
    first, second = ((tmp_path / name / 'export/vae/diffusion_pytorch_model.safetensors').read_bytes() for name in ('run', 'untouched'))
    assert first == second


def train_as_a_rank(overrides, world_size):
    recipe = load_any_recipe(YAML, [*TINY, *overrides], num_gpus=world_size)
    trainer = builder.build_trainer(recipe)
    trainer.fit()
    facts = export(trainer, recipe, recipe_out(recipe))
    return json.dumps({'weight': float(trainer.state.model.module.parts['adaptive_weight']), 'mean': facts['latents_as_trained']['mean']})


def test_two_ranks_train_as_one_with_the_same_samples_at_once(images, tmp_path):
    """The adaptive weight is that of the gradients of all ranks; so are the latents that are measured."""
    common = [f'data.streams.train.local={images}', 'autoencoder.adversarial.start=0', 'optimizer.eps=1e-3', 'autoencoder.num_measured=45']
    one = load(*common, 'batch.micro_size=8', f'run_folder={tmp_path}/one')
    trainer = run(one)
    alone = float(trainer.state.model.parts['adaptive_weight'])
    answers = ranks(train_as_a_rank, [([*common, f'run_folder={tmp_path}/two'], 2)] * 2, tmp_path)
    answers = [json.loads(answer) for answer in answers]
    assert answers[0] == answers[1]
    assert answers[0]['weight'] == pytest.approx(alone, rel=1e-3)
    first, second = (training_weights(read_checkpoint(find_checkpoint(tmp_path / name))) for name in ('one', 'two'))
    for name, weight in first.items():
        torch.testing.assert_close(second[name], weight, rtol=0, atol=2e-4)
    measured = read_json(tmp_path / 'one/export/export.json')['latents_as_trained']['mean']
    assert answers[0]['mean'] == pytest.approx(measured, abs=1e-3)


def test_each_command_refuses_the_others_recipe(overrides):
    with pytest.raises(RecipeError, match='python -m diffusion.autoencoder trains and exports'):
        load_recipe(YAML, TINY)
    assert not isinstance(load_any_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', overrides), AutoencoderRecipe)


def test_a_report_of_the_run_can_be_made(trained):
    _, recipe = trained
    folder = recipe_out(recipe).parent
    run_here('diffusion.report', folder)
    page = (folder / 'report.html').read_text()
    assert 'Network <code>tiny</code>' in page


def test_a_shift_is_refused_where_the_pipeline_would_not_add_it(overrides, encoders_folder, tmp_path):
    shutil.copytree(encoders_folder, tmp_path / 'shifted')
    config = tmp_path / 'shifted/vae/config.json'
    config.write_text(json.dumps({**read_json(config), 'shift_factor': 0.25}))
    recipe = load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', [*overrides, f'model.encoders.source={tmp_path}/shifted'])
    with pytest.raises(EncoderError, match='shift_factor 0.25, which StableDiffusionPipeline does not add back'):
        build_text_to_image(recipe, torch.device('cpu'))


def test_random_crops_depend_on_seed_epoch_and_sample_alone(images, tmp_path):
    recipe = load(f'data.streams.train.local={images}', 'data.resolution=16', f'run_folder={tmp_path}/run')
    first, second = (train_loader(recipe, None).dataset for _ in range(2))
    crops = [first.view(i, 0, epoch=0)['images'] for i in range(6)]
    assert all(torch.equal(crop, second.view(i, 0, epoch=0)['images']) for i, crop in enumerate(crops))
    assert sum(not torch.equal(crop, second.view(i, 0, epoch=1)['images']) for i, crop in enumerate(crops)) >= 5
    assert sum(not torch.equal(crop, second.view(i, 1, epoch=0)['images']) for i, crop in enumerate(crops)) >= 5
