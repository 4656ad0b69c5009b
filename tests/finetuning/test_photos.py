"""Photos become a dataset once, the one that data_prep makes of them, and a run trains on it as on any other."""

import base64
import io
import json
import os
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from streaming import LocalDataset

from data_prep.auditing.dataset import audit_dataset
from data_prep.converting.conversion import convert
from data_prep.encoding.dataset import encode
from diffusion import check
from diffusion.checkpoints.reading import find_checkpoint
from diffusion.contracts.errors import DataError
from diffusion.contracts.manifest import Manifest
from diffusion.datasets.loader import dataset_identities, eval_loader, train_loader
from diffusion.encoders.frozen import Vae
from diffusion.finetuning import prepare as module
from diffusion.finetuning.photos import read_photos
from diffusion.finetuning.prepare import prepare_streams
from diffusion.recipe import RecipeError, load_recipe
from diffusion.recipe.schema import Data, EncoderSource, Photos
from diffusion.training.builder import build_trainer
from tests.conftest import CAPTION, OWN_CAPTION, REPOSITORY, RESOLUTION
from tests.faults.children import ranks
from tests.faults.driver import Forked, everything_in

PREPARED = 'run/prepared/data-subject'


def rows(folder):
    dataset = LocalDataset(local=str(folder))
    return {row['key']: row for row in (dataset[i] for i in range(len(dataset)))}


def fit(recipe):
    prepare_streams(recipe)
    trainer = build_trainer(recipe)
    trainer.fit()
    trainer.close()
    return trainer


def test_it_is_the_dataset_that_data_prep_makes(load, photos, encoders_folder, tmp_path):
    for i in range(5, 20):  # two passes of the VAE
        shutil.copy(photos / f'{i % 5}.png', photos / f'{i}.png')
    prepare_streams(load())
    for photo in photos.glob('*.png'):
        if photo.stem != '2':
            photo.with_suffix('.txt').write_text(CAPTION)
    convert(photos, tmp_path / 'images')
    source = EncoderSource(str(encoders_folder))
    encode(tmp_path / 'images', tmp_path / 'latents', [RESOLUTION], source, network='tiny', batch_size=module.SQUARES_A_PASS)
    ours, theirs = rows(tmp_path / PREPARED), rows(tmp_path / 'latents')
    assert list(ours) == list(theirs) == sorted(f'{i}.png' for i in range(20))
    manifests = [Manifest.read(folder) for folder in (tmp_path / PREPARED, tmp_path / 'latents')]
    assert replace(manifests[0], source={}, notes={}) == replace(manifests[1], source={}, notes={})
    assert not audit_dataset(tmp_path / PREPARED).problems
    for key, row in ours.items():
        assert row.keys() == theirs[key].keys()
        for column, value in row.items():
            np.testing.assert_array_equal(value, theirs[key][column])
    assert ours['2.png']['caption'] == OWN_CAPTION
    assert ours['1.png']['caption'] == CAPTION
    assert ours['1.png']['size'].tolist() == [37, 50]
    assert ours['3.png']['size'].tolist() == [50, 39]  # upright


@pytest.mark.parametrize(
    ('files', 'caption', 'expected'),
    [
        ({'a.txt': 'one', 'b.txt': 'two'}, None, {'a.png': ['one'], 'b.png': ['two']}),
        ({}, 'all', {'a.png': ['all'], 'b.png': ['all']}),
        ({'a.txt': 'one'}, 'all', {'a.png': ['one'], 'b.png': ['all']}),
        ({'a.txt': ' \n'}, 'all', {'a.png': ['all'], 'b.png': ['all']}),
        ({'metadata.jsonl': '{"file_name": "a.png", "text": "listed"}'}, 'all', {'a.png': ['listed'], 'b.png': ['all']}),
        ({'a.txt': 'one', 'a.caption': 'other'}, 'all', {'a.png': ['one', 'other'], 'b.png': ['all']}),
        ({'a.txt': 'one'}, None, 'b.png: no caption file'),
        ({'a.txt': b'\xff\xfe'}, 'all', 'a.png: caption is not UTF-8'),
        ({'c.txt': 'renamed'}, 'all', 'c.txt: no such image'),
        ({'c.heic': b'\0\0\0\x18ftypheic'}, 'all', 'c.heic: not a readable JPEG, PNG or WebP'),
        ({'c.jpg': b''}, 'all', 'c.jpg: image is empty'),
        ({'small.png': 31}, 'all', 'small.png: short side below 32 px'),
    ],
)
def test_every_photo_has_its_caption_or_is_named(files, caption, expected, tmp_path):
    for name, content in {'a.png': 40, 'b.png': 40, **files}.items():
        if isinstance(content, int):
            Image.new('RGB', (content, 60)).save(tmp_path / name)
        else:
            (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    data, photos = Data(kind='latents', resolution=32), Photos(str(tmp_path), caption)
    if isinstance(expected, str):
        with pytest.raises(DataError) as error:
            list(read_photos(photos, data))
        assert f'{tmp_path}/{expected}\n' in str(error.value)
        assert str(error.value).startswith('1 file of')
    else:
        assert {photo.key: [text for text, _ in photo.captions] for photo in read_photos(photos, data)} == expected


def test_a_folder_without_photos_is_named_with_its_key(load, tmp_path):
    (tmp_path / 'empty').mkdir()
    for name, flaw in {'empty': 'there is nothing in this folder', 'none': 'no such folder'}.items():
        with pytest.raises(DataError, match=f'^data.streams.subject.photos.folder: {tmp_path}/{name}: {flaw}; name the folder with the images$'):
            prepare_streams(load(f'data.streams.subject.photos.folder={tmp_path}/{name}'))


def test_photos_that_cannot_be_used_end_the_run_with_65(settings, photos, tmp_path):
    (photos / 'broken.jpg').write_bytes((photos / '0.png').read_bytes()[:200])
    with Forked(settings, tmp_path / 'output.txt') as process:
        assert f'{photos}/broken.jpg: not a readable JPEG, PNG or WebP' in process.wait(65)
    assert not (tmp_path / PREPARED).exists()


def test_a_gpu_with_too_little_memory_is_told_with_the_remedy(load, monkeypatch):
    def full(*_):
        raise torch.cuda.OutOfMemoryError('CUDA out of memory')

    monkeypatch.setattr(Vae, 'encode', full)
    with pytest.raises(DataError, match=r'the GPU has too little memory for \d+ images of \d+ x \d+ px: CUDA out of memory; free it .* --batch-size'):
        prepare_streams(load())


def test_a_run_that_is_killed_while_it_prepares_starts_from_scratch(settings, tmp_path):
    with Forked(settings, tmp_path / 'output.txt', DIFFUSION_FAILPOINT='finetuning.encoded:kill') as process:
        process.wait(-9)
    assert not (tmp_path / PREPARED).exists()
    with Forked(settings, tmp_path / 'output.txt') as process:
        process.wait()
    assert len(rows(tmp_path / PREPARED)) == 5


def test_they_are_encoded_once_and_a_resumed_run_equals_an_uninterrupted_one(load, photos, tmp_path, monkeypatch):
    more = 'checkpoint.every=4ba', 'data.caption_dropout=0.3'
    fit(load(*more, 'train.duration=7ba', f'run_folder={tmp_path}/whole'))
    prepare_streams(load(*more, 'train.duration=4ba'))
    for file in (tmp_path / PREPARED).rglob(module.INGREDIENTS_NAME):
        ingredients = json.loads(file.read_text())
        assert re.fullmatch('[0-9a-f]{64}', ingredients['text'].pop('tokenizer'))
        file.write_text(json.dumps(ingredients, indent=1, ensure_ascii=False))  # as an earlier version wrote it
    trainer = fit(load(*more, 'train.duration=4ba'))
    model = trainer.state.model
    assert not model.encoders.vae.is_loaded
    assert not model.encoders.text.parts['text_encoder'].is_loaded
    with monkeypatch.context() as patch:
        patch.setattr(module, '_encode', None)
        shutil.copytree(photos, tmp_path / 'moved')
        subject = f'data.streams.subject.photos.folder={tmp_path}/moved'
        fit(load(*more, subject, 'train.duration=7ba'))
    whole, stopped = (everything_in(find_checkpoint(tmp_path / name)) for name in ('whole', 'run'))
    for name, weight in whole['model'].items():
        assert torch.equal(weight, stopped['model'][name])
    (photos / '1.txt').write_text('another caption')
    with pytest.raises(DataError, match=r'data.streams.subject: photos changed since the run began: 1.png; undo it.* name=NEW run_folder=NEW$'):
        prepare_streams(load(*more, 'train.duration=8ba'))
    with pytest.raises(RecipeError) as refused:
        prepare_streams(load(*more, 'train.duration=8ba', 'data.streams.subject.photos.caption=another'))
    assert refused.value.errors == [f'data.streams.subject.photos.caption: {CAPTION} -> another']
    prepare_streams(load(f'run_folder={tmp_path}/other', 'train.duration=8ba'))


def test_what_changes_before_the_first_checkpoint_is_prepared_again(load, photos, encoders, tmp_path):
    identities = []
    elsewhere = load(f'run_folder={tmp_path}/elsewhere')
    prepare_streams(elsewhere)
    of_another_machine = dataset_identities(train_loader(elsewhere, encoders))['subject']
    os.utime(photos / '0.png')
    for change in (
        lambda: None,
        lambda: (photos / '1.txt').write_text('another caption'),
        lambda: (photos / '4.png').unlink(),
        lambda: (photos / '0.png').write_bytes((photos / '1.png').read_bytes()),
    ):
        change()
        prepare_streams(load())
        identities.append(dataset_identities(train_loader(load(), encoders))['subject'])
    assert len(set(identities)) == 4
    assert identities[0] == of_another_machine
    assert rows(tmp_path / PREPARED).keys() == {f'{i}.png' for i in range(4)}


def prepare_here(arguments):
    prepare_streams(load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', arguments))
    return sorted(rows(f'{arguments[-1].removeprefix("run_folder=")}/prepared/data-subject'))


def test_the_processes_of_a_machine_wait_for_the_first(settings, tmp_path):
    arguments = [*settings, f'run_folder={tmp_path}/run']
    assert ranks(prepare_here, [[arguments], [arguments]], tmp_path) == [str([f'{i}.png' for i in range(5)])] * 2


def test_several_machines_find_it_or_say_how(load, monkeypatch):
    monkeypatch.setenv('WORLD_SIZE', '2')
    monkeypatch.setenv('LOCAL_WORLD_SIZE', '1')
    with pytest.raises(RecipeError, match='start this run on one machine first'):
        prepare_streams(load())
    monkeypatch.setenv('LOCAL_WORLD_SIZE', '2')
    prepare_streams(load())
    monkeypatch.setenv('LOCAL_RANK', '1')
    prepare_streams(load())  # it does not wait for ever
    monkeypatch.setenv('LOCAL_WORLD_SIZE', '1')
    monkeypatch.setenv('LOCAL_RANK', '0')
    prepare_streams(load())


def test_five_photos_fill_a_batch_of_eight(load, photos, encoders):
    recipe = load('data.canonical_nodes=64', 'eval.every=1ba', f'eval.streams.held={{photos: {{folder: {photos}, caption: {CAPTION}}}}}')
    prepare_streams(recipe)
    assert set(torch.cat([batch['sample_key'] for batch in eval_loader(recipe, encoders, 4)])[:, 1].tolist()) == set(range(5))
    loader = train_loader(recipe, encoders)
    keys = torch.cat([batch['sample_key'] for _ in range(20) for batch in loader])
    assert len(keys) == len(keys.unique(dim=0)) == 160  # no view twice
    assert (keys[:, 1].bincount() / 160 - 0.2).abs().max() < 0.05


def test_proportions_hold_and_weights_are_those_of_the_streams(load, latents, encoders):
    class_stream = f'data.streams.class={{local: {latents}, proportion: 0.5}}'
    recipe = load('data.streams.subject.proportion=0.5', 'data.streams.subject.loss_weight=2.5', class_stream)
    prepare_streams(recipe)
    assert not Manifest.read(f'{recipe.run_folder}/prepared/data-subject').text_encoder  # as the other stream
    loader = train_loader(recipe, encoders)
    batches = [batch for _ in range(4) for batch in loader]
    keys, weights = (torch.cat([batch[name] for batch in batches]) for name in ('sample_key', 'loss_weight'))
    of_subject = keys[:, 1] < 5
    assert len(keys) == len(keys.unique(dim=0)) == 4 * 56  # 53 in whole batches
    assert of_subject.sum() == 4 * 28
    assert torch.equal(weights, torch.where(of_subject, 2.5, 1.0))
    assert 'loss_weight' not in next(iter(train_loader(load('data.streams.subject.proportion=1.0'), encoders)))


def test_text_is_stored_where_that_spares_the_text_encoder(load, photos):
    def stores_text(*more):
        prepare_streams(load(*more))
        return bool(Manifest.read(f'{load().run_folder}/prepared/data-subject').text_encoder)

    assert stores_text()
    assert not stores_text('adapter={text_encoders: true, text_lr: 5e-6}')
    assert stores_text('adapter={}')
    (photos / '2.caption').write_text('a second caption')
    assert not stores_text()


def test_portraits_go_to_their_aspect_buckets(load, photos, encoders):
    for name, size in {'tall': (64, 200), 'taller': (70, 260), 'wide': (260, 70)}.items():
        Image.new('RGB', size).save(photos / f'{name}.png')
    for i in range(5):
        (photos / f'{i}.png').unlink()
    (photos / '2.txt').unlink()
    recipe = load('data.resolution=128', 'data.aspect_buckets=true', 'batch.global_size=4')
    prepare_streams(recipe)
    batches = list(train_loader(recipe, encoders))
    assert sorted(tuple(batch['moments'].shape[2:]) for batch in batches) == [(16, 64), (48, 16), (64, 16)]  # a photo each, four times
    assert all(len(batch['sample_key'].unique(dim=0)) == 4 for batch in batches)


def test_photos_of_rare_shapes_are_not_seen_more_often(load, photos, encoders):
    for i in range(5):
        Image.new('RGB', (130, 130)).save(photos / f'{i}.png')
    Image.new('RGB', (70, 260)).save(photos / 'tall.png')
    for more in ([], ['data.streams.subject.proportion=0.5']):
        recipe = load('data.resolution=128', 'data.aspect_buckets=true', 'batch.global_size=4', *more)
        prepare_streams(recipe)
        seen = torch.cat([batch['sample_key'][:, 1] for _ in range(5) for batch in train_loader(recipe, encoders)]).bincount()
        assert len(seen) == 6
        assert seen.max() <= 1.25 * seen.min()


def masked(photos, loss_outside=0.25):
    """A photo of the folder gets a mask of its left half, another one is its own mask by its alpha channel, the others have none."""
    left = Image.new('L', Image.open(photos / '1.png').size)
    left.paste(255, (0, 0, left.width // 2, left.height))
    left.save(photos / '1.mask.png')
    opaque = Image.open(photos / '0.png').convert('RGBA')
    opaque.putalpha(128)
    opaque.save(photos / '0.png')
    return f'data.streams.subject.photos.loss_outside={loss_outside}'


def test_the_loss_counts_less_outside_a_mask(load, photos, encoders, tmp_path):
    outside = masked(photos)
    prepare_streams(load(outside))
    maps = {key: row['loss_map'].astype(np.float64) for key, row in rows(tmp_path / PREPARED).items()}
    assert sorted(maps) == [f'{i}.png' for i in range(5)]  # the mask is no photo
    np.testing.assert_allclose(maps['0.png'], 0.25 + 0.75 * 128 / 255, atol=1e-3)
    left, right = np.split(maps['1.png'], 2, axis=1)
    assert (left[:, :-1] == 1).all()
    assert (right[:, 1:] == 0.25).all()  # between them the resized edge
    assert maps['1.png'].mean() == pytest.approx(0.625, abs=0.02)
    assert all((maps[f'{i}.png'] == 1).all() for i in (2, 3, 4))
    assert not audit_dataset(tmp_path / PREPARED).problems
    trainer = build_trainer(load(outside))
    model, batch = trainer.state.model, next(iter(train_loader(load(outside), encoders)))
    outputs = model(batch)
    factors = np.stack([maps[f'{i}.png'] for i in batch['sample_key'][:, 1].tolist()])
    squared = (outputs.prediction.double() - outputs.target.double()).detach().numpy() ** 2
    expected = (squared * factors[:, None]).mean((1, 2, 3))
    weight = np.ones(len(expected)) if outputs.weight is None else outputs.weight.numpy()
    np.testing.assert_allclose(model.loss(outputs, batch).item(), (expected * weight).mean(), rtol=1e-5)
    assert expected.mean() < 0.95 * squared.mean()
    trainer.close()


def test_streams_without_masks_count_everywhere(load, photos, latents, encoders):
    more = masked(photos), 'data.streams.subject.proportion=0.5', f'data.streams.class={{local: {latents}, proportion: 0.5}}'
    prepare_streams(load(*more))
    batches = [batch for _ in range(4) for batch in train_loader(load(*more), encoders)]
    keys, maps = (torch.cat([batch[name] for batch in batches]) for name in ('sample_key', 'loss_map'))
    assert (maps[keys[:, 1] >= 5] == 1).all()
    assert (maps[keys[:, 1] < 2].float().mean((1, 2)) < 0.7).all()


def test_a_mask_that_changes_is_noticed(load, photos, tmp_path):
    outside = masked(photos)
    fit(load(outside, 'train.duration=2ba', 'checkpoint.every=1ba'))
    with pytest.raises(RecipeError) as refused:
        prepare_streams(load('data.streams.subject.photos.loss_outside=0.5', 'train.duration=3ba'))
    assert refused.value.errors == ['data.streams.subject.photos.loss_outside: 0.25 -> 0.5']
    Image.new('L', Image.open(photos / '1.png').size, 255).save(photos / '1.mask.png')
    with pytest.raises(DataError, match=r'photos changed since the run began: 1.png; undo it'):
        prepare_streams(load(outside, 'train.duration=3ba'))


@pytest.mark.parametrize(
    ('files', 'loss_outside', 'expected'),
    [
        ({'a.mask.png': 40}, None, r'has 1 mask, a.mask.png for example; set photos.loss_outside, to 0.1 for example'),
        ({'a.mask.png': 41}, 0.1, r'a.png: its mask has 41 x 60 px, the photo 40 x 60\n'),
        ({'a.mask.png': 0}, 0.1, r'a.png: its mask is not white anywhere \(at most 0 of 255\); what is to be learned is white\n'),
        ({'a.mask.png': 1}, 0.1, r'a.png: its mask is not white anywhere \(at most 1 of 255\)'),  # class numbers
        ({'a.mask.png': 'top'}, 0.1, r'a.png: its mask is not white in the middle, which is trained on \(at most 0 of 255\)'),
        ({'a.mask.jpg': 40}, None, r'has 1 mask, a.mask.jpg for example'),
        ({'a.jpg': 'photo', 'a.mask.png': 40}, 0.1, r'a.png: a.mask.png is the mask of another photo too; rename one\n'),
        ({'a.mask.png': b'none'}, 0.1, r'a.png: its mask: not a readable JPEG, PNG or WebP\n'),
        ({'c.mask.png': 40}, 0.1, r'c.mask.png: no photo of this name\n'),
        ({}, 0.1, r'^photos.loss_outside: no photo of .* has a mask \(NAME.mask.png\) or an alpha channel; leave the key out'),
    ],
)
def test_a_mask_that_cannot_be_used_is_named(files, loss_outside, expected, tmp_path):
    Image.new('RGB', (40, 60)).save(tmp_path / 'a.png')
    for name, content in files.items():
        if isinstance(content, bytes):
            (tmp_path / name).write_bytes(content)
            continue
        mask = Image.new('L', (content if content in (40, 41) else 40, 60), content if content in (0, 1) else 255)
        if content == 'top':
            mask.paste(0, (0, 5, 40, 60))
        mask.save(tmp_path / name)
    with pytest.raises(DataError, match=expected):
        list(read_photos(Photos(str(tmp_path), 'all', loss_outside), Data(kind='latents', resolution=32)))


def test_the_preview_shows_each_photo_as_it_is_trained_on(load, settings, photos, tmp_path, capsys, monkeypatch):
    outside = masked(photos)
    Image.new('RGB', (40, 120), 'red').save(photos / 'tall.png')
    page = tmp_path / 'photos.html'
    arguments = ['check', str(REPOSITORY / 'yamls/sd2-base-256.yaml'), '--preview', str(page), *settings, outside]
    monkeypatch.setattr('sys.argv', arguments)
    assert check.main() == 0
    sides = [sorted(Image.open(photo).size) for photo in photos.glob('?*.png') if '.mask' not in photo.name]
    cut_off = sum(1 - short / long > 0.25 for short, long in sides)
    assert f'preview: 6 photos, {cut_off} with more than 25% cut off: open {page} in a browser' in capsys.readouterr().out
    text = page.read_text()
    assert '40 x 120 px to 32 x 32, 67% cut off</small> <b class="bad">much cut off' in text
    assert text.count('much cut off</b>') == cut_off < 6
    assert '<code>data.aspect_buckets=true</code>' in text
    assert '; mask: 50%' in text
    pictures = [base64.b64decode(one) for one in re.findall('data:image/jpeg;base64,([^"]+)', text)]
    assert [Image.open(io.BytesIO(picture)).size for picture in pictures] == [(32, 32)] * 6
    left, right = (np.asarray(Image.open(io.BytesIO(pictures[1])), np.float32)[:, part].std(axis=2).mean() for part in (slice(14), slice(18, None)))
    assert left > 4 * right  # outside the mask there is no colour
    assert OWN_CAPTION in text


def test_a_mask_may_be_of_any_format_and_select_by_its_alpha(tmp_path):
    for name in 'ab':
        Image.new('RGB', (40, 60)).save(tmp_path / f'{name}.png')
    selection = Image.new('RGBA', (40, 60), (255, 255, 255, 0))
    selection.paste((255, 255, 255, 255), (0, 20, 40, 40))
    selection.save(tmp_path / 'a.mask.webp', lossless=True, exact=True)
    selection.getchannel('A').save(tmp_path / 'b.Mask.JPG', quality=95)
    for photo in read_photos(Photos(str(tmp_path), 'all', 0.0), Data(kind='latents', resolution=32)):
        inside = np.asarray(photo.mask) > 128
        assert inside[20:40].all()
        assert not inside[:20].any()
        assert not inside[40:].any()


@pytest.mark.parametrize('page', ['', 'encoders', '/proc/photos.html', 'a.txt/page.html'])
def test_a_preview_that_cannot_be_written_is_refused(page, settings, photos, capsys, monkeypatch, tmp_path):
    (tmp_path / 'a.txt').touch()
    (tmp_path / 'encoders').mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr('sys.argv', ['check', str(REPOSITORY / 'yamls/sd2-base-256.yaml'), '--preview', page, *settings])
    assert check.main() == 2
    assert f'--preview: {page or "."}: cannot be written: ' in (said := capsys.readouterr().err)
    assert 'name another file' in said


def test_a_preview_without_photos_is_refused(overrides, capsys, monkeypatch, tmp_path):
    arguments = ['--preview', str(tmp_path / 'page.html'), *overrides, 'data.kind=synthetic']
    monkeypatch.setattr('sys.argv', ['check', str(REPOSITORY / 'yamls/sd2-base-256.yaml'), *arguments])
    assert check.main() == 2
    assert '--preview: no stream of the recipe has photos; leave it out' in capsys.readouterr().err
