"""How well a model draws a subject, with networks that stand in for CLIP and DINO."""

import json
import shutil

import pytest
import torch
from PIL import Image

from diffusion.contracts.errors import InputError
from diffusion.evaluation.features.networks import FeatureNetwork, random_conv
from diffusion.evaluation.job import preparing
from diffusion.evaluation.job.evaluating import Ranks, evaluate
from diffusion.evaluation.job.request import EvaluationRequest
from diffusion.evaluation.metrics.distances import photo_fidelity, prompt_fidelity, subject_fidelity
from diffusion.evaluation.pages.page import table_of
from tests.conftest import run_here
from tests.evaluation.test_evaluate import CPU, evaluated_features, page_of
from tests.monitoring.report.pages import assert_stands_alone


class StandIn(FeatureNetwork):
    """Random convolutions under another name, and captions by their letters."""

    def __init__(self, name):
        network = random_conv()
        super().__init__(name, network.sha256, {name: 368}, network.module, network.embed)

    def texts(self, captions):
        return torch.stack([torch.randn(368, generator=torch.Generator().manual_seed(sum(map(ord, caption)))) for caption in captions])


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / 'prompts.txt'
    path.write_text('a {} on the moon\na red {}\n{} at the left\n')
    return path


def test_a_subject_is_scored_with_the_model_before_fine_tuning_as_the_floor(base, base_xl, photos, prompts, tmp_path, monkeypatch):
    """Any two models will do; the scores are those of the functions on the same images."""
    monkeypatch.setattr(preparing, 'load_extractors', lambda names, *_: [StandIn(name) for name in names])
    asked = EvaluationRequest(
        model=str(base), out=tmp_path / 'out', subject=photos, word='sks dog', class_word='dog', prompts=prompts, base=str(base_xl), samples=7, guidance=(3.0,),
        steps=1, chunk=4, keep_images=True,
    )  # fmt: skip
    found = evaluate(asked, Ranks(), CPU)
    metrics = found['scores'][0]['metrics']
    clip, dino = (StandIn(name) for name in preparing.NETWORKS_OF_SUBJECTS)
    drawn, floor = (evaluated_features(folder, clip) for folder in (tmp_path / 'out/images/3.0', tmp_path / 'out/base/images/3.0'))
    of_photos = evaluated_features(photos, clip)
    assert metrics['clip_i']['value'] == pytest.approx(subject_fidelity(drawn, of_photos).value, rel=1e-5)
    assert metrics['clip_i']['floor'] == pytest.approx(subject_fidelity(floor, of_photos).value, rel=1e-5)
    assert metrics['clip_i']['ceiling'] == pytest.approx(photo_fidelity(of_photos).value, rel=1e-5)
    judged = [['a dog on the moon', 'a red dog', 'dog at the left'][i % 3] for i in range(7)]
    assert metrics['clip_t']['value'] == pytest.approx(prompt_fidelity(drawn, clip.texts(judged)).value, rel=1e-5)
    assert metrics['dino']['extractor'] == dino.name
    assert [sample['prompt'] for sample in found['samples']['3.0']][:2] == ['a sks dog on the moon', 'a red sks dog']
    assert found['real']['count'] == 5
    assert found['protocol']['prompts']['class'] == 'dog'
    text = page_of(tmp_path / 'out')
    assert 'the counts differ' not in text  # five photos are no sample of a distribution
    page = assert_stands_alone(text)
    assert [image['alt'] for image in page.attributes('img')][:6] == [*(f'photo {number}' for number in range(1, 6)), 'a sks dog on the moon']
    assert page.texts.count('before fine-tuning') >= 7  # each sample has the floor's next to it
    for name in (*found['photos'], *(sample['floor'] for sample in found['samples']['3.0'])):
        with Image.open(tmp_path / 'out' / name) as image:
            assert image.size == (found['protocol']['resolution'],) * 2
            assert not image.getexif()
    assert (tmp_path / 'out' / found['samples']['3.0'][1]['floor']).read_bytes() == (tmp_path / 'out/base/samples/3.0/000001.png').read_bytes()
    lines = [[cell.strip() for cell in line.split('|')[1:-1]] for line in table_of(tmp_path / 'out').splitlines() if line.startswith('|')]
    assert [line[0] for line in lines[2:]] == list(preparing.MEANINGS)
    references = [dict(part.rsplit(maxsplit=1) for part in line[1].split(', ')[1:]) for line in lines[2:]]
    floors = [float(found['before fine-tuning']) for found in references]
    assert floors == pytest.approx([metrics[name]['floor'] for name in preparing.MEANINGS], rel=1e-3)
    ceilings = [float(found['photos among themselves']) for found in references[:2]]
    assert ceilings == pytest.approx([metrics[name]['ceiling'] for name in ('clip_i', 'dino')], rel=1e-3)
    assert 'photos among themselves' not in references[2]


def test_a_base_of_a_merged_adapter_that_has_moved_is_asked_for(base, photos, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, 'load_extractors', lambda names, *_: [StandIn(name) for name in names])
    merged = shutil.copytree(base, tmp_path / 'merged')
    (merged / 'export.json').write_text(json.dumps({'base': {'source': str(tmp_path / 'gone'), 'revision': None, 'network': 'tiny', 'sha256': {}}}))
    asked = EvaluationRequest(model=str(merged), out=tmp_path / 'out', subject=photos, word='sks dog', class_word='dog', prompts=prompts)
    with pytest.raises(InputError, match=f'{tmp_path}/gone, is no model in the diffusers layout on this machine; name its folder with --base'):
        evaluate(asked, Ranks(), CPU)


@pytest.mark.parametrize(
    ('options', 'said'),
    [
        ((), 'name what to compare with'),
        (('--subject', 'PHOTOS'), '--subject needs --prompts FILE with {} where the subject is named, --word "sks dog" and --class-word dog'),
        (('--subject', 'PHOTOS', '--word', 'sks', '--class-word', 'dog', '--prompts', 'PLAIN'), "'a dog' does not say where the subject is"),
        (
            ('--subject', 'PHOTOS', '--word', 'sks', '--class-word', 'dog', '--prompts', 'PLAIN', '--metrics', 'kid', '--protocol', 'quick'),
            '--subject has metrics of its own, CLIP-I, DINO and CLIP-T of all photos; leave out --protocol, --metrics',
        ),
    ],
)
def test_what_a_subject_needs_is_said(base, photos, tmp_path, options, said):
    (tmp_path / 'plain.txt').write_text('a dog\n')
    places = {'PHOTOS': photos, 'PLAIN': tmp_path / 'plain.txt'}
    options = [places.get(word, word) for word in options]
    assert said in run_here('diffusion.evaluate', base, '--out', tmp_path / 'out', *options, code=2).stderr
