"""From a checkpoint to images: export, generate, report."""

import os
import re
import shutil
from unittest import mock

import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from huggingface_hub import HfApi, ModelCard
from PIL import Image
from safetensors.torch import load_file, save_file

from diffusion.checkpoints import model_card
from diffusion.checkpoints.reading import ema_weights, find_checkpoint, read_checkpoint, training_weights
from diffusion.contracts.manifest import Manifest
from diffusion.datasets.keyed_random import Draw, normal
from diffusion.families.counting.counts import Counter
from diffusion.recipe import load_recipe
from diffusion.training.builder import build_trainer
from tests.conftest import REPOSITORY, TINY, read_json, run_here, run_python
from tests.monitoring.report.pages import assert_stands_alone


@pytest.fixture(scope='module')
def run(latents, encoders_folder, tmp_path_factory):
    """A short run with an EMA and a checkpoint before it began."""
    folder = tmp_path_factory.mktemp('after') / 'run'
    recipe = load_recipe(
        REPOSITORY / 'yamls/shapes.yaml',
        [*TINY, f'run_folder={folder}', f'model.encoders.source={encoders_folder}', f'data.streams.shapes.local={latents}', 'train.duration=6ba',
         'ema.start=3ba', 'ema.half_life=2ba', 'optimizer.lr=1e-2', 'checkpoint.every=2ba', 'checkpoint.keep=-1', 'log.samples.every=3ba',
         'log.samples.steps=2'],
    )  # fmt: skip
    trainer = build_trainer(recipe)
    trainer.fit()
    trainer.close()
    return folder


@pytest.fixture(scope='module')
def exported(run):
    out = run_python('-m', 'diffusion.export', run, run / 'export').stdout
    assert 'ema weights after 6 batches' in out
    assert 'the average covers the last 1 batch (16.7% of the run so far); the network at ema.start has 0.0% of the average' in out
    return run / 'export'


def test_the_pipeline_opens_and_holds_the_average(run, exported):
    pipeline = StableDiffusionPipeline.from_pretrained(exported)
    average = ema_weights(read_checkpoint(find_checkpoint(run)))
    assert all(torch.equal(tensor, average[name]) for name, tensor in pipeline.unet.state_dict().items())
    assert isinstance(pipeline.scheduler, DDIMScheduler)
    assert pipeline.scheduler.config.prediction_type == 'v_prediction'
    assert pipeline.scheduler.config.rescale_betas_zero_snr
    facts = read_json(exported / 'export.json')
    assert (facts['weights'], facts['batches'], facts['samples_seen']) == ('ema', 6, 48)
    assert facts['average'] == {'batches': 1, 'share_of_run': 1 / 6, 'start_weight': pytest.approx(0, abs=1e-4)}
    assert not list(exported.rglob('*.bin'))
    assert (exported / 'recipe.yaml').read_text() == (run / 'recipe.yaml').read_text()


def test_an_export_has_the_files_that_every_version_of_transformers_reads(exported, encoders_folder):
    """4 would draw CLIP's weights at random under other names, and find no words in tokenizer.json; 5 writes both unless told otherwise."""
    written, read = (load_file(folder / 'text_encoder/model.safetensors') for folder in (exported, encoders_folder))
    assert written.keys() == read.keys()
    assert all(name.startswith('text_model.') and torch.equal(tensor, written[name]) for name, tensor in read.items())
    assert read_json(exported / 'tokenizer/vocab.json') == read_json(encoders_folder / 'tokenizer/vocab.json')
    merges = [(folder / 'tokenizer/merges.txt').read_text() for folder in (exported, encoders_folder)]
    assert merges[0].splitlines() == merges[1].splitlines()
    assert len(merges[0].splitlines()) > 1


def test_the_default_export_of_a_short_run_is_near_the_network_it_ends_with(latents, encoders_folder, tmp_path):
    """With the half-life of the shipped recipes, 300 times this run: the weights have moved from ema.start, and their average with them."""
    recipe = load_recipe(
        REPOSITORY / 'yamls/shapes.yaml',
        [*TINY, f'run_folder={tmp_path}/run', f'model.encoders.source={encoders_folder}', f'data.streams.shapes.local={latents}',
         'train.duration=20ba', 'ema.start=5ba', 'ema.half_life=6931ba', 'optimizer.lr=1e-2', 'optimizer.decay=constant', 'checkpoint.every=5ba',
         'checkpoint.keep=-1'],
    )  # fmt: skip
    trainer = build_trainer(recipe)
    trainer.fit()
    trainer.close()
    begin, end = (training_weights(read_checkpoint(tmp_path / f'run/checkpoints/ba000000{batch}.pt')) for batch in ('05', '20'))
    average = ema_weights(read_checkpoint(find_checkpoint(tmp_path / 'run')))
    moved, behind = (sum(float((end[name] - other[name]).square().sum()) for name in end) ** 0.5 for other in (begin, average))
    assert behind < 0.25 * moved


def test_the_model_card_says_what_was_trained_on_what(run, exported, latents):
    card = ModelCard.load(exported / 'README.md')
    assert (card.data.library_name, card.data.pipeline_tag, card.data.license) == ('diffusers', 'text-to-image', None)
    unet = UNet2DConditionModel.from_pretrained(exported, subfolder='unet')
    recipe = load_recipe(run / 'recipe.yaml')
    counts = Counter.from_file().counts(recipe)
    for expected in (
        f'tiny, {sum(parameter.numel() for parameter in unet.parameters()):,} parameters',
        'EMA, ba00000006.pt',
        '48 = 6 batches of 8',
        f'{counts.flop * 48:.2e} of the network',
        'at $',  # of shapes.yaml's cost section
        f'commit {read_json(run / "environment.json")["commit"]}',
        'v_prediction, zero terminal SNR',
        'These weights: not stated; choose one before you publish them',
        'The network was trained from random weights',
        'guidance_scale=',
    ):
        assert expected in card.text, (expected, card.text)
    manifest = Manifest.read(latents)
    assert re.search(rf'\| shapes +\| +{manifest.num_samples} +\| 0 of {manifest.attempted}', card.text), card.text


def test_an_export_goes_to_the_hub_under_ones_own_login(run, tmp_path, monkeypatch):
    api = mock.create_autospec(HfApi, instance=True)
    api.upload_folder.return_value.commit_url = 'https://hub/me/mine/commit/1'
    monkeypatch.setattr(model_card, 'HfApi', lambda: api)
    monkeypatch.setattr(model_card, 'get_token', lambda: None)
    push = ('--push-to-hub', 'me/mine', '--license', 'openrail++')
    assert 'hf auth login' in run_here('diffusion.export', run, tmp_path / 'out', *push, code=2).stderr
    assert not (tmp_path / 'out').exists()  # said before the work
    monkeypatch.setattr(model_card, 'get_token', lambda: 'hf_secret')
    assert 'OWNER/NAME' in run_here('diffusion.export', run, tmp_path / 'out', '--push-to-hub', 'mine', code=2).stderr
    result = run_here('diffusion.export', run, tmp_path / 'out', *push)
    assert 'https://hub/me/mine/commit/1' in result.stdout
    assert 'hf_secret' not in result.stdout + result.stderr
    assert api.create_repo.call_args == mock.call('me/mine', private=True, exist_ok=True)
    assert api.upload_folder.call_args.kwargs['folder_path'] == tmp_path / 'out'
    assert ModelCard.load(tmp_path / 'out/README.md').data.license == 'openrail++'
    api.upload_folder.side_effect = OSError('403 Forbidden')
    refused = run_here('diffusion.export', run, tmp_path / 'out', *push, code=2).stderr
    assert '--push-to-hub: me/mine: 403 Forbidden; the export is complete in' in refused


def test_training_weights_on_request(run, tmp_path):
    run_here('diffusion.export', run / 'checkpoints/ba00000004.pt', tmp_path / 'out', '--weights', 'training')
    pipeline = StableDiffusionPipeline.from_pretrained(tmp_path / 'out')
    trained = training_weights(read_checkpoint(run / 'checkpoints/ba00000004.pt'))
    assert all(torch.equal(tensor, trained[name]) for name, tensor in pipeline.unet.state_dict().items())


def test_what_cannot_be_exported_is_refused(run, tmp_path):
    early = run_here('diffusion.export', run / 'checkpoints/ba00000002.pt', tmp_path / 'out', code=2)
    assert 'holds no EMA after 2 batches (ema.half_life=2ba, ema.start=3ba)' in early.stderr
    assert '--weights training' in early.stderr
    (tmp_path / 'mine').mkdir()
    assert 'is not an export of this project' in run_here('diffusion.export', run, tmp_path / 'mine', code=2).stderr
    assert 'no checkpoint' in run_here('diffusion.export', tmp_path, tmp_path / 'out', code=2).stderr
    assert not (tmp_path / 'out').exists()
    torch.save({'state': {'model': {}}}, tmp_path / 'foreign.pt')
    assert 'carries no recipe' in run_here('diffusion.export', tmp_path / 'foreign.pt', tmp_path / 'out', code=2).stderr


def test_an_export_says_that_it_takes_an_older_checkpoint(run, tmp_path):
    damaged = tmp_path / 'run'
    shutil.copytree(run, damaged)
    older, newest = sorted((damaged / 'checkpoints').glob('ba*.pt'))[-2:]
    os.truncate(newest, 1000)
    result = run_here('diffusion.export', damaged, tmp_path / 'out', '--weights', 'training')
    first, second = [line for line in result.stderr.splitlines() if line.startswith('checkpoints: ')]
    assert f'{newest}: not whole: 1,000 bytes' in first
    assert f'{older} is the newest whole one, and is taken' in second
    assert read_json(tmp_path / 'out/export.json')['checkpoint'] == older.name


def test_a_place_that_cannot_be_written_is_refused_with_a_remedy(run, exported, tmp_path):
    (tmp_path / 'file').touch()
    said = f'{tmp_path}/file/out: cannot be written: {tmp_path}/file is not a folder; name another OUT\n'
    assert run_here('diffusion.export', run, tmp_path / 'file/out', code=2).stderr == said
    assert run_here('diffusion.generate', exported, tmp_path / 'file/out', '--prompt', 'a', code=2).stderr == said


def test_encoders_that_moved_can_be_named(run, encoders_folder, tmp_path):
    moved = tmp_path / 'moved'
    shutil.copytree(encoders_folder, moved)
    run_here('diffusion.export', run, tmp_path / 'out', f'model.encoders.source={moved}')
    missing = run_here('diffusion.export', run, tmp_path / 'out2', 'model.encoders.source=/nowhere', code=2)
    assert '/nowhere/vae: cannot be loaded' in missing.stderr


def test_our_sampler_and_the_exported_pipeline_draw_the_same_image(run, exported, encoders):
    from diffusion.training.model import TextToImage

    recipe = load_recipe(run / 'recipe.yaml')
    pipeline = StableDiffusionPipeline.from_pretrained(exported)
    pipeline.set_progress_bar_config(disable=True)
    model = TextToImage(pipeline.unet, encoders, recipe.model, seed=0).eval()
    prompts = ['a small red circle at the left on a blue background', 'a large cyan square at the top on a black background']
    ours = model.generate(prompts, 32, guidance=3.0, steps=10, seed=5)
    key = torch.tensor([[0, 0, 0], [0, 1, 0]])
    latents = normal(5, key, Draw.NOISE, (4, 8, 8))
    theirs = pipeline(prompts, latents=latents, guidance_scale=3.0, num_inference_steps=10, output_type='pt').images
    assert (ours.float() - theirs * 255).abs().max() <= 2


def test_generate_writes_images_that_know_their_prompts(exported, tmp_path):
    prompts = ['a red circle', 'a blue square', 'a red circle']
    arguments = [word for prompt in prompts for word in ('--prompt', prompt)]
    run_python('-m', 'diffusion.generate', exported, tmp_path / 'a', *arguments, '--seed', 7, '--steps', 2, '--batch-size', 2)
    images = sorted((tmp_path / 'a').glob('0*.png'))
    assert [(Image.open(path).info['prompt'], Image.open(path).info['seed']) for path in images] == list(zip(prompts, '789', strict=True))
    assert Image.open(images[0]).size == (32, 32)
    assert Image.open(tmp_path / 'a/grid.png').size == (100, 32)  # three in a row, 2 px between
    assert Image.open(images[0]).tobytes() != Image.open(images[2]).tobytes()  # the same prompt, another seed
    run_here('diffusion.generate', exported, tmp_path / 'b', '--prompt', 'a blue square', '--seed', 8, '--steps', 2)
    alone = Image.open(tmp_path / 'b/0000.png').tobytes()
    among_others = Image.open(images[1]).tobytes()
    assert max(abs(x - y) for x, y in zip(alone, among_others, strict=True)) <= 2  # each can be drawn again alone


def test_generate_refuses_nothing_and_nowhere(exported, tmp_path):
    assert 'nothing to draw' in run_here('diffusion.generate', exported, tmp_path, code=2).stderr
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'mine/thesis.txt').write_text('mine')
    assert 'something else' in run_here('diffusion.generate', exported, tmp_path / 'mine', '--prompt', 'a', code=2).stderr
    assert (tmp_path / 'mine/thesis.txt').exists()
    assert 'no model_index.json' in run_here('diffusion.generate', tmp_path, tmp_path / 'x', '--prompt', 'a', code=2).stderr


@pytest.mark.parametrize(
    ('file', 'content', 'said'),
    [
        ('model_index.json', '[]', 'model_index.json: expected a JSON object, got a list'),
        ('model_index.json', '[' * 100_000, 'model_index.json: JSON nested too deeply'),
        ('export.json', '1' * 5_000, 'export.json: Invalid JSON: number out of range'),
        ('scheduler/scheduler_config.json', '{', 'scheduler_config.json: Expecting property name'),
        ('unet/diffusion_pytorch_model.safetensors', None, r'/unet: its weights do not fit its config.json .* 1 unexpected'),
    ],
    ids=['list', 'deep', 'digits', 'scheduler', 'weights'],
)
def test_generate_refuses_a_damaged_model(exported, tmp_path, file, content, said):
    model = tmp_path / 'model'
    shutil.copytree(exported, model)
    if content is None:
        save_file({**load_file(model / file), 'a.stranger': torch.zeros(1)}, model / file, metadata={'format': 'pt'})
    else:
        (model / file).write_text(content)
    assert re.search(said, run_here('diffusion.generate', model, tmp_path / 'out', '--prompt', 'a', code=2).stderr)
    assert not (tmp_path / 'out').exists()


def test_the_report_is_one_file_with_everything_in_it(run, exported):
    run_here('diffusion.generate', exported, run / 'generated', '--prompt', 'a <red> circle', '--steps', 2)
    run_python('-m', 'diffusion.report', run)
    page = (run / 'report.html').read_text()
    assert_stands_alone(page)
    assert page.count('data:image/png;base64,') == 8 * 3 + 1  # eight prompts after 0, 3 and 6 batches, and an image of the exported model
    for expected in (
        'Loss, speed and memory',
        'a &lt;red&gt; circle',
        'batch 6, ema weights',
        'Time and money',
        'the average (EMA) covers',
        'Where the time went',
        'steps that are in the weights now',
        'a large red circle at the left on a blue background',
        'optimizer:',
        'images/s',
    ):
        assert expected in page, expected
    assert 'is not the folder of a run' in run_here('diffusion.report', exported.parent.parent, code=2).stderr
