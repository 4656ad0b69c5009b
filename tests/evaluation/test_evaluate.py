"""A whole evaluation with tiny models: what it writes, that pieces of it give the same, and what it says of wrong input."""

import json
import logging
import math
import re
import shutil
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers.utils import logging as transformers_logging

from data_prep.auditing.dataset import audit_dataset
from diffusion.contracts.errors import DataError
from diffusion.datasets.keyed_random import Draw, by_id, normal
from diffusion.datasets.transforms import covered
from diffusion.encoders.frozen import FrozenEncoders
from diffusion.evaluation.features.networks import EXTRACTORS, load_extractors
from diffusion.evaluation.job import evaluating
from diffusion.evaluation.job.evaluating import Ranks, evaluate
from diffusion.evaluation.job.images import Prompt, open_images
from diffusion.evaluation.job.models import DrawingModel, chunks_of
from diffusion.evaluation.job.preparing import prepare
from diffusion.evaluation.job.request import PRESETS, EvaluationRequest
from diffusion.evaluation.metrics.figures import METRICS, find_metric
from diffusion.evaluation.pages.page import table_of, write_page
from diffusion.families.registry import build_network, family_of
from diffusion.objectives import build_objective
from diffusion.objectives.diffusion import scheduler_config
from diffusion.recipe import load_recipe
from diffusion.recipe.schema import EncoderSource, FlowSettings, Model
from tests.conftest import NUM_IMAGES, REPOSITORY, RESOLUTION, read_json, run_here
from tests.evaluation.networks import without_digest
from tests.monitoring.report.pages import assert_stands_alone

SHAPE = 'a small red circle at the left on a blue background'
SAMPLES, CHUNK = 20, 8  # three chunks, the last one padded
OPTIONS = ('--metrics', 'kid@random-conv', '--samples', SAMPLES, '--guidance', '1,3', '--steps', 2, '--chunk', CHUNK)
CPU = torch.device('cpu')


def command(model, data, out, *options, code=0):
    return run_here('diffusion.evaluate', model, '--data', data, '--out', out, *(options or OPTIONS), code=code)


def request(base, images, out, **changes):
    fields = {'metrics': ('kid@random-conv',), 'samples': SAMPLES, 'guidance': (1.0, 3.0), 'steps': 2, 'chunk': CHUNK}
    return EvaluationRequest(model=str(base), data=str(images), out=out, **{**fields, **changes})


def page_of(out):
    write_page([out], out / 'evaluation.html')
    return (out / 'evaluation.html').read_text()


def files_of(out):
    """Everything that has to be the same whoever wrote it: features of drawn images, samples, neighbours."""
    return {path.relative_to(out): path.read_bytes() for path in out.rglob('*') if path.suffix == '.png'} | {
        path.relative_to(out): tensors(path) for path in (out / 'drawn').rglob('*.safetensors')
    }


def tensors(path):
    """The bytes after the header, which notes the seconds."""
    content = path.read_bytes()
    return content[8 + int.from_bytes(content[:8], 'little') :]


def figures_of(out):
    return {name: value for name, value in read_json(out / 'evaluation.json').items() if name not in ('seconds', 'images_per_sec')}


@pytest.fixture(scope='module')
def scored(base, images, tmp_path_factory):
    out = tmp_path_factory.mktemp('scored') / 'out'
    done = command(base, images, out, *OPTIONS, '--keep-images', '--save-statistics', out.parent / 'real.safetensors')
    said = f'evaluate: draws {2 * SAMPLES} images ({SAMPLES} images at each guidance scale of 1, 3, 2 steps): about 0:00:'
    assert done.stderr.startswith(said)  # before anything is drawn
    return out, done.stdout


def test_the_result_says_what_was_compared_and_how(scored, images):
    out, printed = scored
    found = read_json(out / 'evaluation.json')
    protocol = found['protocol']
    assert (protocol['samples'], protocol['steps'], protocol['sampler'], protocol['resolution']) == (SAMPLES, 2, 'PNDMScheduler', RESOLUTION)
    assert protocol['extractors'] == {'random-conv': load_extractors(['random-conv'])[0].sha256}
    assert found['real'] == {'where': str(images), 'identity': protocol['real']['identity'], 'count': SAMPLES, 'left_out': ''}
    assert [(score['guidance'], score['count'], *score['metrics']) for score in found['scores']] == [
        (1.0, SAMPLES, 'kid@random-conv'),
        (3.0, SAMPLES, 'kid@random-conv'),
    ]
    assert len(found['samples']['3.0']) == SAMPLES
    assert all((out / sample['file']).is_file() for samples in found['samples'].values() for sample in samples)
    assert all((out / pair[side]).is_file() for pair in found['neighbours']['pairs'] for side in ('drawn', 'known'))
    assert len(found['neighbours']['pairs']) == 10
    assert f'{found["scores"][0]["metrics"]["kid@random-conv"]["value"]:.2f}' in printed
    assert 'evaluation.html' in printed
    assert (out / 'evaluation.html').read_text().count('data:image') >= 10


def test_metrics_of_prompts_need_no_real_images(base, clip_folder, tmp_path):
    """Benchmarks of preferences draw so: the scores are those of the same prompts next to real images."""
    prompts = tmp_path / 'prompts.txt'
    prompts.write_text('a red circle\na green square\n' * 8)
    options = ('--prompts', prompts, '--weights', clip_folder.parent, '--guidance', 3, '--steps', 2)
    out = tmp_path / 'out'
    done = run_here('diffusion.evaluate', base, '--out', out, *options, '--metrics', 'clip')
    found = read_json(out / 'evaluation.json')
    assert found['real'] == {'where': '', 'identity': 'none', 'count': 0, 'left_out': ''}
    assert (found['neighbours'], found['scores'][0]['count']) == (None, 16)
    assert 'against' not in done.stdout
    text = assert_stands_alone((out / 'evaluation.html').read_text()).text
    assert 'real images none: scores of prompts' in text
    assert 'compared with 0 real' not in text

    both = tmp_path / 'both'
    images = write_folder(tmp_path / 'real')
    run_here('diffusion.evaluate', base, '--data', images, '--out', both, *options, '--metrics', 'clip')
    assert read_json(both / 'evaluation.json')['scores'] == found['scores']

    said = run_here('diffusion.evaluate', base, '--out', tmp_path / 'kid', *options, '--metrics', 'clip,kid@random-conv', code=2).stderr
    assert 'kid@random-conv: compared with real images; name them as --data DATASET, or leave out these metrics' in said
    said = run_here('diffusion.evaluate', base, '--out', out, *options, '--save-statistics', tmp_path / 'file.safetensors', code=2).stderr
    assert 'name what to compare with: --data DATASET or --subject PHOTOS; for metrics of prompts --prompts FILE is enough' in said


def write_folder(folder):
    folder.mkdir()
    for number in range(16):
        Image.new('RGB', (RESOLUTION, RESOLUTION), (15 * number, 90, 200)).save(folder / f'{number:02d}.png')
    return folder


def test_an_image_depends_on_seed_and_id_alone(scored, base):
    """Against diffusers' own pipeline, from the noise that `TextToImage.generate` draws from."""
    out, _ = scored
    samples = read_json(out / 'evaluation.json')['samples']['3.0'][:CHUNK]
    ids = torch.tensor([sample['id'] for sample in samples])
    assert len(set(ids.tolist())) == CHUNK
    pipeline = StableDiffusionPipeline.from_pretrained(base)
    pipeline.set_progress_bar_config(disable=True)
    noise = normal(0, by_id(ids), Draw.NOISE, (4, 8, 8))
    expected = pipeline([sample['prompt'] for sample in samples], latents=noise, guidance_scale=3.0, num_inference_steps=2).images
    for sample, image in zip(samples, expected, strict=True):
        assert Image.open(out / sample['file']).tobytes() == image.tobytes()


def test_the_last_chunk_is_padded():
    """The bits of an image depend on how many are drawn together."""
    chunks = chunks_of([Prompt(i, 'a') for i in (7, 8, 9)], 2)
    assert [[prompt.id for prompt in chunk] for chunk in chunks] == [[7, 8], [9, 9]]


def test_generate_draws_an_image_of_an_evaluation_again(scored, base, tmp_path):
    out, _ = scored
    sample = read_json(out / 'evaluation.json')['samples']['3.0'][3]
    options = ('--prompt', sample['prompt'], '--ids', sample['id'], '--guidance', 3, '--steps', 2, '--batch-size', CHUNK)
    run_here('diffusion.generate', base, tmp_path / 'again', *options)
    again = Image.open(tmp_path / 'again/0000.png')
    assert again.info['id'] == str(sample['id'])
    difference = np.asarray(again, int) - np.asarray(Image.open(out / sample['file']), int)
    assert np.abs(difference).max() <= 1  # a chunk of other prompts: the last bits


def test_kept_images_are_a_dataset_that_an_audit_accepts(scored):
    out, _ = scored
    for guidance in ('1.0', '3.0'):
        result = audit_dataset(out / 'images' / guidance)
        assert result.problems == []
        assert result.findings.checked == SAMPLES
    command(out / 'nowhere', out / 'images/3.0', out.parent / 'x', code=2)


def test_the_figures_are_those_of_the_images(scored, images):
    """The kept images and the real ones through the extractor and the metric, without the parts in between."""
    out, _ = scored
    (extractor,) = load_extractors(['random-conv'])
    found = read_json(out / 'evaluation.json')
    chosen = {sample['id'] for sample in found['samples']['3.0']}
    real, drawn = evaluated_features(images, extractor, chosen), evaluated_features(out / 'images/3.0', extractor)
    values = find_metric('kid@random-conv')(real, drawn, None, 0)['kid']
    assert values['value'] == pytest.approx(found['scores'][1]['metrics']['kid@random-conv']['value'], rel=1e-5)


def evaluated_features(where, extractor, wanted=None):
    """(N, D) of the images of a dataset as training sees them, one at a time."""
    dataset = open_images(str(where))
    shown = [image for part in range(len(dataset.parts) - 1) for image in dataset.read(part, wanted or range(1000))]
    return torch.cat([extractor.images(covered(image.content, RESOLUTION, RESOLUTION)[0][None])[extractor.name] for image in shown])


def test_two_processes_draw_the_same_as_one_and_the_last_one_scores(scored, base, images, tmp_path):
    assert evaluate(request(base, images, tmp_path / 'out', keep_images=True), Ranks(1, 2), CPU) is None
    found = evaluate(request(base, images, tmp_path / 'out', keep_images=True), Ranks(0, 2), CPU)
    assert found is not None
    assert files_of(tmp_path / 'out') == files_of(scored[0])
    assert figures_of(tmp_path / 'out') == figures_of(scored[0])


@pytest.mark.parametrize('place', ['evaluation.real', 'evaluation.drawn@2'])
def test_after_a_stop_only_what_is_missing_is_drawn(scored, base, images, tmp_path, monkeypatch, place):
    asked = request(base, images, tmp_path / 'out', keep_images=True, cache=tmp_path / 'cache')
    monkeypatch.setattr('diffusion.common.processes._passed', Counter())
    monkeypatch.setenv('DIFFUSION_FAILPOINT', f'{place}:crash')
    with pytest.raises(RuntimeError, match=place.partition('@')[0]):
        evaluate(asked, Ranks(), CPU)
    monkeypatch.delenv('DIFFUSION_FAILPOINT')
    there = {path: path.stat().st_mtime_ns for path in (tmp_path / 'out/drawn').rglob('*.safetensors')}
    assert len(there) == (2 if 'drawn' in place else 0)
    evaluate(asked, Ranks(), CPU)
    assert {path: path.stat().st_mtime_ns for path in there} == there
    assert files_of(tmp_path / 'out') == files_of(scored[0])
    assert figures_of(tmp_path / 'out') == figures_of(scored[0])


def test_fewer_samples_are_a_part_of_more_and_real_features_are_kept(base, images, tmp_path):
    few, more = (evaluate(request(base, images, tmp_path / str(n), samples=n), Ranks(), CPU) for n in (16, 24))
    assert [sample['id'] for sample in few['samples']['3.0']] == [sample['id'] for sample in more['samples']['3.0']][:16]
    for sample in few['samples']['3.0']:
        assert (tmp_path / '16' / sample['file']).read_bytes() == (tmp_path / '24' / sample['file']).read_bytes()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / '.real_features').rglob('*.safetensors')}
    evaluate(request(base, images, tmp_path / 'seeded', samples=24, seed=0, guidance=(5.0,)), Ranks(), CPU)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / '.real_features').rglob('*.safetensors')} == before


def test_statistics_stand_in_for_the_images(scored, base, images, tmp_path):
    """FID against a file is FID against the images that it was made from; a published npz, too."""
    out, _ = scored
    prompts = tmp_path / 'prompts.txt'
    prompts.write_text('a red circle\n' * SAMPLES)
    asked = {'prompts': prompts, 'metrics': ('fid@random-conv',), 'guidance': (3.0,)}
    of_images = evaluate(request(base, images, tmp_path / 'images', **asked), Ranks(), CPU)
    of_file = evaluate(request(base, out.parent / 'real.safetensors', tmp_path / 'file', **asked), Ranks(), CPU)
    value, again = (found['scores'][0]['metrics']['fid@random-conv']['value'] for found in (of_images, of_file))
    assert again == pytest.approx(value, rel=1e-9)
    assert of_file['neighbours'] is None
    for text in (table_of(tmp_path / 'file'), page_of(tmp_path / 'file')):
        assert 'by resampling the drawn images alone' in text
    assert 'by resampling the drawn images alone' not in table_of(tmp_path / 'images')
    assert of_file['real']['count'] == SAMPLES


@pytest.fixture(scope='module')
def base_flow(encoders_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp('base-flow')
    torch.manual_seed(0)
    family = family_of('tiny-prx')
    encoders = FrozenEncoders.load(EncoderSource(str(encoders_folder)), family.find_text)
    scheduler = build_objective(Model('tiny-prx', flow=FlowSettings(shift=1.5))).scheduler()
    family.pipeline(build_network('tiny-prx'), encoders, scheduler, 32).save_pretrained(folder)
    return folder


@pytest.mark.parametrize('fixture', ['base_xl', 'base_flow'])
def test_other_families_are_drawn_with_their_own_samplers(fixture, images, tmp_path, request):
    model = request.getfixturevalue(fixture)
    command(model, images, tmp_path / 'out', *OPTIONS[:3], 16, '--guidance', '1,3', '--steps', 2)
    found = read_json(tmp_path / 'out/evaluation.json')
    assert found['protocol']['sampler'] == ('EulerDiscreteScheduler' if fixture == 'base_xl' else 'FlowMatchEulerDiscreteScheduler')
    assert found['protocol']['resolution'] == RESOLUTION
    assert found['scores'][0]['metrics']['kid@random-conv']['value'] > 0


def test_a_folder_of_photos_with_captions_is_a_dataset(base, tmp_path):
    folder = tmp_path / 'photos/deeper'
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for i in range(17):
        Image.fromarray(rng.integers(0, 256, (40, 36, 3), dtype=np.uint8)).save(folder / f'{i:02d}.png')
        (folder / f'{i:02d}.txt').write_text(f'a photo of {i}\n')
    found = evaluate(request(base, tmp_path / 'photos', tmp_path / 'out', samples=17), Ranks(), CPU)
    assert sorted(sample['prompt'] for sample in found['samples']['1.0']) == sorted(f'a photo of {i}' for i in range(17))
    (folder / '03.txt').unlink()
    said = command(base, tmp_path / 'photos', tmp_path / 'other', *OPTIONS[:3], 17, code=2).stderr
    assert '1 image without a caption, deeper/03.png for one; add captions, or name --prompts FILE' in said


def test_training_images_are_searched_for_copies(base, images, aspect_images, tmp_path, monkeypatch):
    """Held-out real images say how similar one that is no copy comes; a few of them cannot say what one in a thousand exceeds."""
    asked = request(base, images, tmp_path / 'out', training=str(aspect_images))
    found = evaluate(asked, Ranks(), CPU)['neighbours']
    assert found['count_known'] == 23
    assert (found['threshold'], found['share_above']) == (None, None)
    assert found['no_threshold'] == '20 held-out images, and at least 1,000 are needed to tell what one in a thousand exceeds'
    assert found['no_threshold'] in table_of(tmp_path / 'out')
    assert found['no_threshold'] in page_of(tmp_path / 'out')
    monkeypatch.setattr(evaluating, 'MIN_HELD_OUT', SAMPLES)
    found = evaluate(asked, Ranks(), CPU)['neighbours']
    [network] = load_extractors(['random-conv'])

    def embedded(where, ids):
        opened = open_images(str(where))
        read = [image for part in range(len(opened.parts) - 1) for image in opened.read(part, ids(opened))]
        return network.images(torch.stack([opened.pixels(image, RESOLUTION) for image in read]))['random-conv'].double()

    held_out, known = embedded(images, lambda opened: opened.chosen(SAMPLES, 0)), embedded(aspect_images, lambda _: range(23))
    cosines = torch.nn.functional.cosine_similarity(held_out[:, None], known[None], dim=-1).amax(dim=1)
    assert found['threshold'] == pytest.approx(float(np.quantile(cosines.numpy(), 0.999)), abs=1e-6)
    assert found['no_threshold'] == ''
    assert found['pairs'][0]['known_caption'].split()[0] in ('128x128', '192x64', '64x192', '64x256')


def test_neighbours_are_looked_for_by_a_network_that_embeds(base, images, tmp_path):
    """The look at shapes holds words alone: any two images with the same words would be neighbours."""
    prompts = tmp_path / 'prompts.txt'
    prompts.write_text(f'{SHAPE}\n' * SAMPLES)
    found = evaluate(request(base, images, tmp_path / 'out', metrics=('shapes',), prompts=prompts), Ranks(), CPU)
    assert found['neighbours']['extractor'] == 'random-conv'
    assert 0 < found['neighbours']['pairs'][0]['cosine'] <= 1
    both = prepare(request(base, images, tmp_path / 'both', metrics=('shapes', 'kid@random-conv'), prompts=prompts), CPU)
    assert both.neighbour.name == 'random-conv'
    assert [one.name for one in both.networks] == ['shapes-look', 'random-conv']


def test_captions_that_the_metric_is_not_for_are_refused_before_anything_is_written(base, images, tmp_path):
    (tmp_path / 'prompts.txt').write_text(f'{SHAPE}\n' * SAMPLES + 'an owl\n')
    options = '--metrics', 'shapes', '--prompts', tmp_path / 'prompts.txt', '--samples'
    said = command(base, images, tmp_path / 'out', *options, SAMPLES + 1, code=2).stderr
    assert 'is no caption of data_prep.shapes' in said
    assert not (tmp_path / 'out').exists()


def test_what_is_no_image_in_a_folder_is_counted_and_told(base, tmp_path):
    rng = np.random.default_rng(0)
    for i in range(18):
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(tmp_path / f'{i:02d}.png')
        (tmp_path / f'{i:02d}.txt').write_text('a red circle')
    Image.fromarray(rng.random((32, 32), dtype=np.float32), mode='F').save(tmp_path / '99.tiff')
    Image.fromarray(rng.random((32, 32), dtype=np.float32), mode='F').save(tmp_path / 'float.png', 'TIFF')
    (tmp_path / 'empty.jpg').touch()
    found = evaluate(request(base, tmp_path, tmp_path / 'out', samples=18, guidance=(3.0,)), Ranks(), CPU)
    told = '3 files (a tiff file: 1, such as 99.tiff; not a readable JPEG, PNG or WebP: 2, such as empty.jpg)'
    assert found['real'] == {**found['real'], 'count': 18, 'left_out': told}
    assert told in table_of(tmp_path / 'out')
    assert told in page_of(tmp_path / 'out')
    for i in range(18):
        (tmp_path / f'{i:02d}.png').unlink()
    shutil.rmtree(tmp_path / 'out')
    with pytest.raises(DataError, match='holds no image .* left out: 3 files'):
        open_images(str(tmp_path))


def test_a_checkpoint_that_cannot_be_exported_leaves_out_to_another(base, images, tmp_path):
    (tmp_path / 'run').mkdir()
    command(tmp_path / 'run', images, tmp_path / 'out', code=2)
    command(base, images, tmp_path / 'out', *OPTIONS[:3], 16, '--guidance', '1', '--steps', 1)
    assert not (tmp_path / 'out/model.json').exists()


@pytest.mark.parametrize(
    ('changes', 'said'),
    [
        ({'--steps': 3}, 'was begun with steps 2, now 3; name another OUT'),
        ({'--seed': 1}, 'seed 0, now 1'),
        ({'--guidance': '1'}, 'guidance [1.0, 3.0], now [1.0]'),
    ],
)
def test_another_protocol_is_refused_by_name(scored, base, images, changes, said):
    out, _ = scored
    before = (out / 'evaluation.json').read_bytes()
    options = dict(zip(OPTIONS[::2], OPTIONS[1::2], strict=True)) | changes
    assert said in command(base, images, out, *(word for pair in options.items() for word in pair), '--keep-images', code=2).stderr
    assert (out / 'evaluation.json').read_bytes() == before


@pytest.mark.parametrize(
    ('options', 'said'),
    [
        (('--metrics', 'fidd'), 'unknown metric fidd; known: fid'),
        (('--metrics', 'fid', '--weights', '/nowhere'), 'inception'),
        (('--metrics', 'kid@shapes-look'), 'unknown metric kid@shapes-look'),
        (('--metrics', 'kid@random-conv', '--samples', 3), '3 images to draw: too few, 16 are the least that can be scored'),
        (('--metrics', 'kid@random-conv', '--samples', NUM_IMAGES + 1), f'holds {NUM_IMAGES} images, {NUM_IMAGES + 1} are asked for; set --samples'),
        (('--metrics', 'kid@random-conv', '--protocol', 'quik'), "unknown preset quik; did you mean 'quick'?"),
        (('--metrics', 'kid@random-conv', '--resolution', 33), '--resolution 33: has to be a multiple of'),
        (('--metrics', 'kid@random-conv', '--sampler', 'Euler'), 'cannot draw with Euler'),
        (('--metrics', 'kid@random-conv', '--sampler', 'DDIMScheduler@even'), 'unknown spacing of timesteps; known: leading, linspace, trailing'),
        (('--metrics', 'kid@random-conv', '--revision', 'a' * 40), '--revision is of a model on the Hub'),
        (('--guidance', '0.5'), '--guidance 0.5: is below 1'),
    ],
)
def test_wrong_options_are_named(base, images, tmp_path, options, said):
    assert said in command(base, images, tmp_path / 'out', *options, code=2).stderr
    assert not list(tmp_path.rglob('*.safetensors'))


def test_wrong_input_is_named(base, images, latents, tmp_path):
    def said(data, *options, model=base):
        return command(model, data, tmp_path / 'out', *OPTIONS, *options, code=2).stderr

    (tmp_path / 'empty').mkdir()
    assert 'holds no image' in said(tmp_path / 'empty')
    assert 'no such folder' in said(tmp_path / 'missing')
    assert 'manifest kind is latents' in said(latents)
    assert 'no such file or folder' in said(images, model=tmp_path / 'model')
    assert 'hf download owner/name --revision' in said(images, '--revision', 'a' * 40, model='owner/name')
    (tmp_path / 'prompts.txt').write_text('a\n\nb\n \n')
    assert '2 empty lines (2, 4); a line number keys the noise' in said(images, '--prompts', tmp_path / 'prompts.txt')
    np.savez(tmp_path / 'pickled.npz', mu=np.array([{}], dtype=object), sigma=np.eye(2))
    assert 'cannot be read as statistics: is damaged, or holds something else; it has to hold mu (D)' in said(tmp_path / 'pickled.npz')
    for content, why in (
        ({'mu': np.zeros(4)}, 'it has no sigma; it has to hold'),
        ({'mu': np.zeros(4), 'sigma': np.eye(3)}, 'mu has the shape (4,), sigma (3, 3)'),
        ({'mu': np.full(4, np.nan), 'sigma': np.eye(4)}, 'mu or sigma holds numbers that are not finite'),
    ):
        np.savez(tmp_path / 'bad.npz', **content)
        assert f'bad.npz: cannot be read as statistics: {why}' in said(tmp_path / 'bad.npz')
    (tmp_path / 'text.npz').write_text('text')
    assert 'is damaged, or holds something else' in said(tmp_path / 'text.npz')
    assert said(tmp_path / 'none.npz').rstrip().endswith('none.npz: no such file')
    assert 'prompts.txt: is a file, and none of statistics' in said(tmp_path / 'prompts.txt')
    np.savez(tmp_path / 'plain.npz', mu=np.zeros(4), sigma=np.eye(4))
    assert 'kid@random-conv needs the images themselves' in said(tmp_path / 'plain.npz')
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'mine/thesis.txt').write_text('mine')
    assert 'holds something else already (thesis.txt)' in command(base, images, tmp_path / 'mine', code=2).stderr


def test_all_missing_weights_are_named_at_once(base, images, tmp_path, monkeypatch):
    monkeypatch.setenv('TORCH_HOME', str(tmp_path))
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_CACHE', str(tmp_path))
    said = command(base, images, tmp_path / 'out', '--metrics', 'fid,clip,kid@dino-vits16', '--weights', tmp_path / 'weights', code=2).stderr
    for name, size in (('inception', '95.7 MB'), ('clip-vit-l14', '1.7 GB'), ('dino-vits16', '87 MB')):
        assert f'{name}: its weights ({size}' in said
    assert said.count('Get them with: ') == 3
    assert not (tmp_path / 'out').exists()


def test_a_refusal_shows_digests_in_short(scored, base, images, tmp_path):
    (tmp_path / 'prompts.txt').write_text('a\n' * SAMPLES)
    said = command(base, images, scored[0], *OPTIONS, '--keep-images', '--prompts', tmp_path / 'prompts.txt', code=2).stderr
    assert re.search(r'prompts\.sha256 [0-9a-f]{8}, now [0-9a-f]{8};', said)


def test_a_damaged_shard_is_found(base, images, tmp_path):
    shutil.copytree(images, tmp_path / 'images')
    shard = next((tmp_path / 'images').rglob('*.mds'))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(bytes(content))
    assert 'SHA-256' in command(base, tmp_path / 'images', tmp_path / 'out', code=2).stderr


def test_a_preset_is_named_only_if_it_is_followed(base, images, tmp_path):
    asked = partial(EvaluationRequest, model=str(base), data=str(images), out=tmp_path / 'out')
    assert asked(protocol='prx').changes == []
    assert asked(protocol='prx', steps=10, samples=5).changes == ['samples', 'steps']
    assert asked(protocol='prx', steps=28).changes == []
    said = command(base, images, tmp_path / 'out', '--protocol', 'prx', '--steps', 10, '--samples', 16, '--plan')
    assert '--samples, --steps differs from the preset prx; the result does not carry its name or targets' in said.stderr
    assert json.dumps(asked(protocol='mlperf').choice('guidance', None)) == '[8.0]'


def test_the_sampler_of_mlperf_takes_its_references_steps(tmp_path):
    """DDIM of mlcommons/training's ldm/models/diffusion/ddim.py, written out, on a made-up network that predicts v."""
    schedule = load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', ['data.streams.train.local=/data']).model.diffusion.schedule
    (tmp_path / 'model_index.json').write_text('{"_class_name": "StableDiffusionPipeline", "scheduler": ["diffusers", "DDIMScheduler"]}')
    (tmp_path / 'scheduler').mkdir()
    settings = scheduler_config(schedule, 'v_prediction') | {'_class_name': 'DDIMScheduler'}
    (tmp_path / 'scheduler/scheduler_config.json').write_text(json.dumps(settings))
    scheduler = DrawingModel('', tmp_path).scheduler(PRESETS['mlperf'].sampler)
    scheduler.set_timesteps(50)
    steps = (np.arange(0, 1000, 20) + 1)[::-1]
    assert scheduler.timesteps.tolist() == steps.tolist()

    alphas = np.cumprod(1 - np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2)
    theirs = 1.7
    ours = torch.tensor([[[[theirs]]]], dtype=torch.float64)
    for step, alpha_before in zip(steps, [*alphas[steps[1:]], alphas[0]], strict=True):
        v, alpha = math.sin(theirs + step), alphas[step]
        clean, noise = alpha**0.5 * theirs - (1 - alpha) ** 0.5 * v, alpha**0.5 * v + (1 - alpha) ** 0.5 * theirs
        ours = scheduler.step(torch.full_like(ours, v), int(step), ours).prev_sample
        theirs = alpha_before**0.5 * clean + (1 - alpha_before) ** 0.5 * noise
    assert ours.item() == pytest.approx(theirs, rel=1e-4)


def test_a_plan_draws_nothing(base, images, tmp_path):
    """FLOP of the tiny networks, against a pass of diffusers' own that is counted while it computes."""
    said = command(base, images, tmp_path / 'out', '--samples', 40, '--guidance', '1,3', '--steps', 10, '--plan').stdout
    pipeline = StableDiffusionPipeline.from_pretrained(base)
    text = torch.zeros(1, pipeline.tokenizer.model_max_length, pipeline.unet.config.cross_attention_dim)
    plain = partial(sdpa_kernel, SDPBackend.MATH)  # PyTorch counts nothing of the CPU's fused attention
    with torch.no_grad(), plain(), FlopCounterMode(display=False) as a_pass:
        pipeline.unet(torch.zeros(1, 4, 8, 8), 0, text)
    with torch.no_grad(), plain(), FlopCounterMode(display=False) as decoding:
        pipeline.vae.decode(torch.zeros(1, 4, 8, 8))
    expected = 40 * (10 * (1 + 2) * a_pass.get_total_flops() + 2 * decoding.get_total_flops())
    assert float(said.split(' FLOP in all')[0].split()[-1]) == pytest.approx(expected, rel=0.01)
    assert not (tmp_path / 'out').exists()
    said = command(base, images, tmp_path / 'out', '--protocol', 'mlperf', '--plan', code=2).stderr
    assert f'holds {NUM_IMAGES} images, 30,000 are asked for; set --samples {NUM_IMAGES} or less' in said


def test_saved_statistics_are_of_the_network_and_as_wide(inception_file, base, tmp_path, monkeypatch):
    monkeypatch.setitem(EXTRACTORS, 'inception', without_digest('inception'))
    (tmp_path / 'prompts.txt').write_text('a\n' * SAMPLES)
    np.savez(tmp_path / 'narrow.npz', mu=np.zeros(4), sigma=np.eye(4))
    options = '--metrics', 'fid', '--prompts', tmp_path / 'prompts.txt', '--weights', inception_file.parent
    said = command(base, tmp_path / 'narrow.npz', tmp_path / 'out', *options, code=2).stderr
    assert 'narrow.npz: holds 4 numbers a mean, and inception has 2,048; name the statistics of that network, or the images' in said
    assert not (tmp_path / 'out').exists()


def test_long_captions_are_cut_without_a_warning_each(base, images, tmp_path, monkeypatch):
    (tmp_path / 'prompts.txt').write_text(f'{"very " * 200}\n' * 16)
    warned = []
    monkeypatch.setattr(logging.getLogger('transformers').handlers[0], 'emit', warned.append)
    transformers_logging.set_verbosity_warning()
    said = command(base, images, tmp_path / 'out', *OPTIONS[:2], '--prompts', tmp_path / 'prompts.txt', '--guidance', 1, '--steps', 1)
    assert not warned
    assert '16 images at each scale, 1 step of' in said.stdout


def test_the_help_names_every_metric_and_how_to_compare(tmp_path):
    said = ' '.join(run_here('diffusion.evaluate', '--help').stdout.split())
    for word in (*METRICS, '--compare OUT', '--page FILE'):
        assert word in said
    refused = run_here('diffusion.evaluate', 'model', '--out', tmp_path, '--page', 'page.html', code=2).stderr
    assert '--page is where --compare OUT OUT ... writes' in refused


def test_a_stand_in_is_a_model_to_try_things_with(images, tmp_path):
    run_here('diffusion.stand_in', tmp_path / 'model', '--like', 'tiny', '--pipeline')
    said = command(tmp_path / 'model', images, tmp_path / 'out', '--metrics', 'shapes,kid@random-conv', '--samples', 16, '--steps', 1).stdout
    assert 'kid@random-conv' in said
