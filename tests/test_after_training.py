"""From a checkpoint to pictures: export, generate, report."""

import re
import shutil

import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline
from PIL import Image

from diffusion.checkpoints.reading import ema_weights, find_checkpoint, read_checkpoint, training_weights
from diffusion.models.keyed_random import Draw, normal
from diffusion.recipe import load_recipe
from diffusion.training import build_trainer
from tests.conftest import REPOSITORY, TINY, read_json, run_here, run_python


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
    assert not list(exported.rglob('*.bin'))
    assert (exported / 'recipe.yaml').read_text() == (run / 'recipe.yaml').read_text()


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
    assert 'no export of ours' in run_here('diffusion.export', run, tmp_path / 'mine', code=2).stderr
    assert 'no checkpoint' in run_here('diffusion.export', tmp_path, tmp_path / 'out', code=2).stderr
    assert not (tmp_path / 'out').exists()
    torch.save({'state': {'model': {}}}, tmp_path / 'foreign.pt')
    assert 'carries no recipe' in run_here('diffusion.export', tmp_path / 'foreign.pt', tmp_path / 'out', code=2).stderr


def test_encoders_that_moved_can_be_named(run, encoders_folder, tmp_path):
    moved = tmp_path / 'moved'
    shutil.copytree(encoders_folder, moved)
    run_here('diffusion.export', run, tmp_path / 'out', f'model.encoders.source={moved}')
    missing = run_here('diffusion.export', run, tmp_path / 'out2', 'model.encoders.source=/nowhere', code=2)
    assert 'cannot load vae' in missing.stderr


def test_our_sampler_and_the_exported_pipeline_draw_the_same_picture(run, exported, encoders):
    from diffusion.models.stable_diffusion import StableDiffusion

    recipe = load_recipe(run / 'recipe.yaml')
    pipeline = StableDiffusionPipeline.from_pretrained(exported)
    pipeline.set_progress_bar_config(disable=True)
    model = StableDiffusion(pipeline.unet, encoders, recipe.model, seed=0).eval()
    prompts = ['a small red circle at the left on a blue background', 'a large cyan square at the top on a black background']
    ours = model.generate(prompts, 32, guidance=3.0, steps=10, seed=5)
    key = torch.tensor([[0, 0], [0, 1]])
    latents = normal(5, key, Draw.NOISE, (4, 8, 8))
    theirs = pipeline(prompts, latents=latents, guidance_scale=3.0, num_inference_steps=10, output_type='pt').images
    assert (ours.float() - theirs * 255).abs().max() <= 2


def test_generate_writes_pictures_that_know_their_prompts(exported, tmp_path):
    prompts = ['a red circle', 'a blue square', 'a red circle']
    arguments = [word for prompt in prompts for word in ('--prompt', prompt)]
    run_python('-m', 'diffusion.generate', exported, tmp_path / 'a', *arguments, '--seed', 7, '--steps', 2, '--batch-size', 2)
    pictures = sorted((tmp_path / 'a').glob('0*.png'))
    assert [(Image.open(path).info['prompt'], Image.open(path).info['seed']) for path in pictures] == list(zip(prompts, '789', strict=True))
    assert Image.open(pictures[0]).size == (32, 32)
    assert Image.open(tmp_path / 'a/grid.png').size == (100, 32)  # three in a row, 2 px between
    assert Image.open(pictures[0]).tobytes() != Image.open(pictures[2]).tobytes()  # the same prompt, another seed
    run_here('diffusion.generate', exported, tmp_path / 'b', '--prompt', 'a blue square', '--seed', 8, '--steps', 2)
    alone = Image.open(tmp_path / 'b/0000.png').tobytes()
    beside = Image.open(pictures[1]).tobytes()
    assert max(abs(x - y) for x, y in zip(alone, beside, strict=True)) <= 2  # each can be drawn again alone


def test_generate_refuses_nothing_and_nowhere(exported, tmp_path):
    assert 'nothing to draw' in run_here('diffusion.generate', exported, tmp_path, code=2).stderr
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'mine/thesis.txt').write_text('mine')
    assert 'something else' in run_here('diffusion.generate', exported, tmp_path / 'mine', '--prompt', 'a', code=2).stderr
    assert (tmp_path / 'mine/thesis.txt').exists()
    assert 'no model_index.json' in run_here('diffusion.generate', tmp_path, tmp_path / 'x', '--prompt', 'a', code=2).stderr


def test_the_report_is_one_file_with_everything_in_it(run, exported):
    run_here('diffusion.generate', exported, run / 'generated', '--prompt', 'a <red> circle', '--steps', 2)
    run_python('-m', 'diffusion.report', run)
    page = (run / 'report.html').read_text()
    assert not re.findall(r'(?:src|href)="(?!data:)', page)  # nothing from elsewhere
    assert page.count('data:image/png;base64,') == 3 + 1 + 1 + 1  # grids at 0, 3 and 6, a picture, the curves, the time
    for expected in (
        'Loss, speed and memory',
        'a &lt;red&gt; circle',
        'batch 6, ema weights',
        'Time and money',
        'Where the time went',
        'steps that are in the weights now',
        'would cost the least',
        '$33,875',
        'optimizer:',
        'images/s',
    ):
        assert expected in page, expected
    assert 'is not the folder of a run' in run_here('diffusion.report', exported.parent.parent, code=2).stderr
