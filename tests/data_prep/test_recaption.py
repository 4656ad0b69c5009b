"""Captions by a random tiny BLIP: those of transformers itself, the same however the work is shared and interrupted."""

import hashlib
import json
import shutil
from collections import Counter

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from streaming import LocalDataset
from transformers import AutoModelForImageTextToText, AutoProcessor, BlipForConditionalGeneration, BlipProcessor

from data_prep.auditing.dataset import audit_dataset
from data_prep.converting.conversion import Options, convert
from data_prep.encoding.dataset import encode
from data_prep.engines.batches import PartEnd
from data_prep.engines.engine import LocalEngine
from data_prep.mds.job import Job, Share
from data_prep.recaptioning.captioner import Captioner, Generation, KeyedSampling
from data_prep.recaptioning.dataset import NOT_PREPARED, Choice, RecaptionWork, recaption
from diffusion.common.storage import open_folder
from diffusion.contracts.errors import DataError, EncoderError
from diffusion.contracts.manifest import Manifest
from diffusion.datasets.decode import open_image
from diffusion.datasets.loader import train_loader
from diffusion.datasets.shards import agreed_shards, captions_of
from diffusion.recipe import load_recipe
from diffusion.recipe.schema import EncoderSource
from tests.conftest import ASPECT_IMAGES, NUM_IMAGES, REPOSITORY, read_json, run_here, run_python
from tests.data_prep.captioner import write_captioner, write_git, write_llava

MAX_TOKENS = 8
DRAWN = Generation(max_tokens=MAX_TOKENS, num_captions=2, temperature=0.9, top_p=0.95)
NUM_SHARDS = 6


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    return write_captioner(tmp_path_factory.mktemp('captioner') / 'blip')


@pytest.fixture(scope='module')
def where(model):
    return EncoderSource(str(model))


@pytest.fixture(scope='module')
def shards(images, tmp_path_factory):
    """The same images in more shards."""
    folder = tmp_path_factory.mktemp('recaption') / 'images'
    convert(images, folder, Options(shard_bytes=sum(path.stat().st_size for path in images.rglob('*.mds')) // NUM_SHARDS))
    assert len(agreed_shards(open_folder(folder), Manifest.read(folder))) >= NUM_SHARDS
    return folder


@pytest.fixture(scope='module')
def drawn(shards, where):
    """Two captions each, drawn; what all other ways of doing it have to equal."""
    recaption(shards, shards.parent / 'drawn', where, DRAWN, batch_size=5)
    return shards.parent / 'drawn'


def rows(folder):
    return {row['key']: row for row in LocalDataset(local=str(folder))}


def tree(folder):
    """SHA-256 of every file of a dataset, hidden ones too."""
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.rglob('*')) if path.is_file()}


@pytest.mark.parametrize(('prompt', 'beams'), [(None, 1), ('a photo of', 1), (None, 3)])
def test_captions_are_those_of_transformers_one_by_one(prompt, beams, images, model, where, tmp_path):
    """Without our loader, batches, or what removes the prompt."""
    generation = Generation(prompt=prompt, max_tokens=MAX_TOKENS, min_tokens=2, beams=beams)
    tally = recaption(images, tmp_path / 'out', where, generation, Choice(share=1), batch_size=7)
    assert (tally.kept, dict(tally.dropped)) == (NUM_IMAGES, {})
    theirs, processor = BlipForConditionalGeneration.from_pretrained(model), BlipProcessor.from_pretrained(model)
    said, before = rows(tmp_path / 'out'), rows(images)
    assert list(said) == list(before)
    expected = set()
    for key, row in list(before.items())[:16]:
        inputs = processor(images=open_image(row['image']), **({'text': prompt} if prompt else {}), return_tensors='pt')
        written = theirs.generate(**inputs, max_new_tokens=MAX_TOKENS, min_new_tokens=2, num_beams=beams)
        caption = processor.decode(written[0], skip_special_tokens=True)
        assert not prompt or caption.startswith(prompt + ' ')
        assert said[key]['caption'] == caption.removeprefix(prompt or '').strip()
        expected.add(caption)
        others = {name: value for name, value in row.items() if name != 'caption'}
        assert {name: value for name, value in said[key].items() if name != 'caption'} == others
    assert len(expected) > 1


@pytest.mark.parametrize(
    ('write', 'prompt', 'asked'),
    [
        (write_git, None, None),
        (write_git, 'a photo of', 'a photo of'),
        (write_llava, None, 'USER: <image> Describe this image in detail. ASSISTANT:'),
        (write_llava, 'a photo', 'USER: <image> a photo ASSISTANT:'),
    ],
)
def test_models_of_other_kinds_are_asked_as_they_are_used_to(write, prompt, asked, images, tmp_path):
    """Against the ids that their own documentation would have: no end after a prompt, one begin before a chat."""
    write(tmp_path / 'model')
    captioner = Captioner.find(EncoderSource(str(tmp_path / 'model')), Generation(prompt=prompt, max_tokens=6))
    captioner.load(torch.device('cpu'))
    some = [open_image(row['image']) for row in list(rows(images).values())[:6]]
    said = [captions[0].text for captions in captioner.captions(captioner.prepare(some), list('abcdef'))]
    theirs, processor = AutoModelForImageTextToText.from_pretrained(tmp_path / 'model'), AutoProcessor.from_pretrained(tmp_path / 'model')
    for image, caption in zip(some, said, strict=True):
        pixels = processor.image_processor(image, return_tensors='pt')['pixel_values']
        given = {'pixel_values': pixels}
        if asked:
            words = processor.tokenizer(asked.replace('<image>', '<image>' * 16), add_special_tokens=False).input_ids
            given['input_ids'] = torch.tensor([[{write_git: 2, write_llava: 1}[write], *words]])
        written = theirs.generate(**given, max_new_tokens=6, do_sample=False)[0, len(given.get('input_ids', [[]])[0]) :]
        assert caption == processor.tokenizer.decode(written, skip_special_tokens=True)
    assert len(set(said)) > 1


def test_a_prompt_that_the_model_cannot_read_is_refused(images, tmp_path):
    write_llava(tmp_path / 'model')
    for path in [*(tmp_path / 'model').glob('chat_template*')]:
        path.unlink()
    with pytest.raises(EncoderError, match="model: does not caption with the prompt 'a photo': .*; give another --prompt"):
        recaption(images, tmp_path / 'out', EncoderSource(str(tmp_path / 'model')), Generation(prompt='a photo'))
    assert open_folder(tmp_path / 'out').files() == {}  # free for another prompt


def test_old_captions_are_kept_with_their_weights(images, where, tmp_path):
    """The second time, three are there already; equal ones are one."""
    recaption(images, tmp_path / 'once', where, DRAWN, Choice(share=0.8))
    recaption(tmp_path / 'once', tmp_path / 'twice', where, DRAWN, Choice(share=0.5))
    before, once, twice = rows(images), rows(tmp_path / 'once'), rows(tmp_path / 'twice')
    assert once.keys() == before.keys()
    for key, row in once.items():
        captions = captions_of(row)
        assert row['caption'] == captions[0][0] == before[key]['caption']
        if len(captions) == 3:
            assert [weight for _, weight in captions] == pytest.approx([0.2, 0.4, 0.4])
        assert captions_of(twice[key]) == [(caption, pytest.approx(weight)) for caption, weight in halved(captions)]
    assert Counter(len(row['captions']) for row in once.values())[3] > NUM_IMAGES / 2
    assert read_json(tmp_path / 'twice/manifest.json')['source']['fingerprint_of_source'] == Manifest.read(tmp_path / 'once').source['fingerprint']


def halved(captions):
    """`captions`, of which the first is the old one, mixed with those drawn again, which are the same."""
    (old, weight), *new = captions
    if not new:
        return [(old, 1.0)]
    return [(old, weight * 0.5), *((caption, each * 0.5 + 0.5 / len(new)) for caption, each in new)]


def test_the_manifest_says_what_was_done(drawn, shards, model, where):
    manifest, before = Manifest.read(drawn), Manifest.read(shards)
    assert (manifest.kind, manifest.num_samples, manifest.min_side_px) == ('images', NUM_IMAGES, before.min_side_px)
    assert manifest.columns == {**before.columns, 'captions': {'encoding': 'json', 'meaning': '[[caption, weight], ...]; the weights add up to 1'}}
    said = manifest.captioner
    assert (said['source'], said['revision'], said['model_type'], said['prompt'], said['share']) == (str(model), None, 'blip', None, 0.5)
    assert (said['num_captions'], said['max_tokens'], said['temperature'], said['top_p'], said['seed']) == (2, MAX_TOKENS, 0.9, 0.95, 0)
    assert len(said['model_sha256']) == len(said['settings_sha256']) == 64
    cut = manifest.notes[f'new caption cut off at {MAX_TOKENS} tokens']
    assert 0 < cut <= NUM_IMAGES


def test_two_ranks_and_workers_write_the_bytes_of_one(drawn, shards, where, tmp_path):
    first = recaption(shards, tmp_path / 'ranks', where, DRAWN, batch_size=5, share=Share(0, 2))
    assert first.attempted < NUM_IMAGES
    assert not (tmp_path / 'ranks/manifest.json').exists()
    assert recaption(shards, tmp_path / 'ranks', where, DRAWN, batch_size=5, share=Share(1, 2)).attempted == NUM_IMAGES
    recaption(shards, tmp_path / 'workers', where, DRAWN, batch_size=5, engine=LocalEngine(2))
    assert tree(tmp_path / 'ranks') == tree(tmp_path / 'workers') == tree(drawn)


class Stopped(LocalEngine):
    def map(self, work, items):
        yield from super().map(work, items[:2])
        raise KeyboardInterrupt


def test_a_resumed_run_gives_the_same_bytes(drawn, shards, where, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        recaption(shards, tmp_path / 'out', where, DRAWN, batch_size=5, engine=Stopped())
    assert len(list((tmp_path / 'out/parts').glob('*.json'))) == 2
    assert 0 < recaption(shards, tmp_path / 'out', where, DRAWN, batch_size=5).attempted_now < NUM_IMAGES
    assert tree(tmp_path / 'out') == tree(drawn)
    for other, said in ((Generation(), 'num_captions=2, now it is 1'), (Generation(**{**vars(DRAWN), 'seed': 1}), 'seed=0, now it is 1')):
        with pytest.raises(DataError, match=f'was begun with {said}; name another DEST'):
            recaption(shards, tmp_path / 'out', where, other, batch_size=5)


def test_a_killed_run_gives_the_same_bytes(drawn, shards, model, tmp_path):
    """As tests/data_prep/test_kill.py does with convert and encode."""
    out = run_python('-m', 'tests.data_prep.kill', 2, 1, 'recaption', shards, tmp_path / 'out', 1, model, OMP_NUM_THREADS='1').stdout
    assert out.startswith('2 kills')
    assert {name: digest for name, digest in tree(tmp_path / 'out').items() if '.scratch' not in name} == tree(drawn)


def test_draws_have_the_models_probabilities_and_no_neighbours():
    """20,000 draws of one distribution; chi-squared of 3 degrees of freedom has its 99.99 % quantile at 21.1."""
    scores = torch.tensor([2.0, 1.0, 0.5, -1.0, -9.0])
    generation = Generation(temperature=0.8, top_p=0.999)
    ids, count = torch.arange(20_000), 20_000

    def tokens(ids, number=0, steps=1):
        sampling = KeyedSampling(generation, ids, number)
        return torch.stack([sampling(None, scores.expand(len(ids), -1)).argmax(1) for _ in range(steps)])

    found = torch.bincount(tokens(ids)[0], minlength=5)
    assert found[4] == 0  # outside of top_p
    expected = torch.softmax(scores[:4] / 0.8, 0) * count
    assert ((found[:4] - expected) ** 2 / expected).sum() < 21.1
    alone = torch.cat([tokens(ids[i : i + 1], steps=3) for i in range(20)], dim=1)
    assert torch.equal(alone, tokens(ids[:50], steps=3)[:, :20])
    for other in (tokens(ids, number=1)[0], tokens(ids, steps=2)[1], tokens(ids + 10**12)[0]):
        agreeing = (other == tokens(ids)[0]).double().mean().item()
        assert agreeing == pytest.approx((expected / count).square().sum().item(), abs=0.02)  # that of independent draws


def test_what_cannot_be_used_is_counted(images, encoders_folder, where, tmp_path):
    """The model's favourite words are refused; some captions are empty."""
    word = Counter(word for row in recaptioned(images, where, tmp_path / 'all', Choice(share=1)) for word in row['caption'].split()).most_common(1)[
        0
    ][0]
    plain = rows(tmp_path / 'all')
    empty = NUM_IMAGES - len(plain)
    refused = sum(word in row['caption'].split() for row in plain.values())
    assert refused
    choice = Choice(share=0.5, refused=(word.upper(), 'never said'))
    tally = recaption(images, tmp_path / 'kept', where, drawn_once(), choice, encoders=(EncoderSource(str(encoders_folder)), 'tiny'))
    assert tally.kept == NUM_IMAGES
    assert tally.notes['no new caption: has a refused word'] == refused
    assert tally.notes['no new caption: empty'] == empty
    assert sum(len(row['captions']) == 1 and row['captions'][0][1] == 1 for row in rows(tmp_path / 'kept').values()) == refused + empty
    tally = recaption(images, tmp_path / 'left-out', where, drawn_once(), Choice(share=1, refused=choice.refused))
    assert dict(tally.dropped) == {
        reason: n for reason, n in (('no new caption: has a refused word', refused), ('no new caption: empty', empty)) if n
    }
    assert 'captions' not in Manifest.read(tmp_path / 'left-out').columns  # one alone: --text-embeddings takes it
    assert not any(word in row['caption'].split() for row in rows(tmp_path / 'left-out').values())


def drawn_once():
    return Generation(max_tokens=MAX_TOKENS, temperature=1.5)


def recaptioned(images, where, dest, choice):
    recaption(images, dest, where, drawn_once(), choice)
    return rows(dest).values()


def test_captions_longer_than_training_reads_are_counted(images, where, encoders, encoders_folder, tmp_path):
    length = encoders.text.length
    generation = Generation(max_tokens=60, temperature=1.5)
    tally = recaption(images, tmp_path / 'out', where, generation, encoders=(EncoderSource(str(encoders_folder)), 'tiny'))
    new = [row['captions'][-1][0] for row in rows(tmp_path / 'out').values() if len(row['captions']) > 1]
    tokenizer = next(iter(encoders.text.tokenizers.values()))
    long = sum(len(tokenizer(caption).input_ids) > length for caption in new)
    assert tally.notes.get(f'new caption longer than the {length} tokens that training reads', 0) == long > 0


def test_refused_words_are_words():
    choice = Choice(refused=('i cannot', 'sorry'))
    for caption, fault in (
        ('', 'empty'),
        ('I CANNOT see it', 'has a refused word'),
        ('a sorry sight', 'has a refused word'),
        ('sorrytown', ''),
        ('lici cannot', ''),
    ):
        assert choice.fault(caption) == fault
    assert Choice(share=0.6).mixed([('old', 1.0)], ['new', 'old']) == [('old', pytest.approx(0.7)), ('new', pytest.approx(0.3))]


def test_the_result_is_sound_trains_and_encodes(drawn, encoders, encoders_folder, overrides, tmp_path):
    found = audit_dataset(drawn).findings
    assert (found.problems, found.unsound) == ([], {})
    encode(drawn, tmp_path / 'latents', [32], EncoderSource(str(encoders_folder)))
    assert Manifest.read(tmp_path / 'latents').captioner == Manifest.read(drawn).captioner
    assert {key: row['captions'] for key, row in rows(tmp_path / 'latents').items()} == {key: row['captions'] for key, row in rows(drawn).items()}
    known = {tuple(encoders.text.tokenize([caption])['text_encoder'][0].tolist()) for row in rows(drawn).values() for caption, _ in captions_of(row)}
    first = {tuple(encoders.text.tokenize([row['caption']])['text_encoder'][0].tolist()) for row in rows(drawn).values()}
    for kind, folder in (('images', drawn), ('latents', tmp_path / 'latents')):
        stream = [f'data.kind={kind}', f'data.streams.train.local={folder}', 'data.caption_dropout=0']
        recipe = load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', [*overrides, *stream])
        seen = [tuple(ids) for batch in train_loader(recipe, encoders) for ids in batch['tokens']['text_encoder'].tolist()]
        assert set(seen) <= known
        assert 0.2 * NUM_IMAGES < sum(ids not in first for ids in seen) < 0.8 * NUM_IMAGES  # share: half of them


def test_buckets_stay(aspect_images, where, tmp_path):
    recaption(aspect_images, tmp_path / 'out', where, Generation(max_tokens=4, min_tokens=2))
    before = Manifest.read(aspect_images)
    assert Manifest.read(tmp_path / 'out').streams == before.streams
    for stream in before.streams:
        here, there = Manifest.read(tmp_path / 'out' / stream), Manifest.read(aspect_images / stream)
        assert (here.bucket, here.num_samples, here.min_side_px) == (there.bucket, ASPECT_IMAGES.get(stream, 0), there.min_side_px)


def test_images_that_the_processor_refuses_are_left_out(shards, model):
    class Picky(Captioner):
        def prepare(self, images):
            if any(image.getpixel((0, 0)) == corner for image in images):
                raise ValueError('too narrow')
            return super().prepare(images)

    source = open_folder(shards)
    (shard, *_) = agreed_shards(source, Manifest.read(shards))
    everything = rows(shards)
    corner = open_image(next(iter(everything.values()))['image']).getpixel((0, 0))
    job = Job(open_folder(shards.parent), {})

    def messages(captioner):
        return RecaptionWork(source, job, {}, 1 << 20, 4, captioner.find(EncoderSource(str(model)), Generation()), Choice(), None).messages(shard)

    *batches, end = messages(Picky)
    assert isinstance(end, PartEnd)
    refused = [key for key, _, reason in end.failures if reason == NOT_PREPARED]
    taken = [row['key'] for batch in batches for row in batch.rows]
    assert next(iter(everything)) in refused
    assert taken
    assert sorted([*refused, *taken]) == sorted(list(everything)[: shard.num_samples])
    assert all(open_image(everything[key]['image']).getpixel((0, 0)) == corner for key in refused)

    class Lonely(Captioner):
        def prepare(self, images):
            if len(images) > 1:
                raise ValueError('of different sizes')
            return super().prepare(images)

    (error,) = messages(Lonely)
    assert isinstance(error, DataError)
    assert '--batch-size 1' in str(error)


def without_files(model, folder, *names):
    shutil.copytree(model, folder)
    for name in names:
        (folder / name).unlink()
    return folder


def test_other_weights_and_models_are_refused(images, model, tmp_path):
    def refused(folder, match):
        with pytest.raises(EncoderError, match=match):
            recaption(images, tmp_path / 'out', EncoderSource(str(folder)))
        assert not (tmp_path / 'out').exists()

    (tmp_path / 'nothing').mkdir()
    refused(tmp_path / 'nothing', r'there is no config\.json')
    refused(without_files(model, tmp_path / 'processor', 'processor_config.json'), 'its processor cannot be loaded')
    tokens = ('tokenizer.json', 'vocab.txt', 'tokenizer_config.json')
    refused(without_files(model, tmp_path / 'tokenizer', *tokens), 'processor cannot be loaded|knows no words')
    refused(
        without_files(model, tmp_path / 'weights', 'model.safetensors'),
        'cannot be loaded: OSError.* name a local folder with config.json and safetensors',
    )
    tensors = load_file(model / 'model.safetensors')
    pickled = without_files(model, tmp_path / 'pickled', 'model.safetensors')
    torch.save(tensors, pickled / 'pytorch_model.bin')
    refused(pickled, 'cannot be loaded: OSError.* name a local folder with config.json and safetensors')
    one = 'text_decoder.bert.encoder.layer.0.attention.self.query.weight'
    lacking = without_files(model, tmp_path / 'lacking', 'model.safetensors')
    save_file({name: tensor for name, tensor in tensors.items() if name != one}, lacking / 'model.safetensors', {'format': 'pt'})
    refused(lacking, rf'1 missing \({one}\)')
    for name, content, match in (
        ('remote', {'model_type': 'mine'}, "model_type 'mine' is none that transformers"),
        ('code', {'model_type': 'blip', 'auto_map': {'AutoModel': 'mine.Mine'}}, r'config\.json: auto_map: .* names code'),
        ('words', {'model_type': 'bert'}, "model_type 'bert' is none"),
        ('damaged', None, r'config\.json: Expecting'),
    ):
        folder = without_files(model, tmp_path / name, 'config.json')
        (folder / 'config.json').write_text('{' if content is None else json.dumps(content))
        (folder / 'mine.py').write_text('raise SystemExit("this code ran")')
        refused(folder, match)


def test_code_next_to_a_processor_does_not_run(images, model, tmp_path):
    for name in ('preprocessor_config.json', 'processor_config.json', 'tokenizer_config.json'):  # the first: of models from before transformers 5
        folder = shutil.copytree(model, tmp_path / name)
        (folder / 'mine.py').write_text('raise SystemExit("this code ran")')
        content = {
            **(read_json(folder / name) if (folder / name).exists() else {}),
            'auto_map': {'AutoProcessor': 'mine.Mine', 'AutoTokenizer': ['mine.Mine', None]},
        }
        (folder / name).write_text(json.dumps(content))
        with pytest.raises(EncoderError, match=f'{name}: auto_map: .* names code'):
            Captioner.find(EncoderSource(str(folder)), Generation())


def test_what_cannot_be_captioned_is_refused(images, latents, model, where, tmp_path):
    with pytest.raises(DataError, match='manifest kind is latents; recaption needs a dataset of images'):
        recaption(latents, tmp_path / 'out', where)
    with pytest.raises(EncoderError, match='--max-tokens 129 and the prompt are 129 tokens, the model has 128 positions; ask for fewer'):
        recaption(images, tmp_path / 'out', where, Generation(max_tokens=129))


def test_the_command(images, model, tmp_path):
    """Twice: another model in the same folder is another model."""
    here = shutil.copytree(model, tmp_path / 'model')
    words = ['data_prep.recaption', images, tmp_path / 'out', '--model', here, '--max-tokens', MAX_TOKENS, '--min-tokens', 2]
    out = run_here(*words).stdout
    assert f'kept {NUM_IMAGES} 100.0 %' in ' '.join(out.split())
    assert '0 rows now' in run_here(*words).stdout
    write_captioner(here, seed=6)
    assert 'was begun with model_sha256=' in run_here(*words, code=2).stderr
    write_captioner(here)
    content = read_json(here / 'processor_config.json')
    content['image_processor']['image_mean'] = [0, 0, 0]
    (here / 'processor_config.json').write_text(json.dumps(content))
    assert 'was begun with model_settings_sha256=' in run_here(*words, code=2).stderr


@pytest.mark.parametrize(
    ('options', 'said'),
    [
        (['--model', 'nowhere'], "--model: there is no folder 'nowhere'"),
        (['--model', 'Salesforce/blip'], "--revision 'None' does not pin Salesforce/blip; give the 40 hex digits"),
        (['--model', 'Salesforce/blip', '--revision', 'main'], "--revision 'main' does not pin"),
        (['--model', '.', '--revision', 'a' * 40], 'a local folder has none'),
        (['--model', '.', '--captions', '2'], '--captions 2 would be 2 times the same; add --temperature'),
        (['--model', '.', '--temperature', '1', '--beams', '2'], 'leave one of them out'),
        (['--model', '.', '--top-p', '0.5'], 'add --temperature'),
        (['--model', '.', '--min-tokens', '80'], '--min-tokens 80 is above --max-tokens 75'),
        (['--model', '.', '--share', '1'], '1 is not below 1; --replace'),
        (['--model', '.', '--share', '0.5', '--replace'], '--share and --replace: give one'),
        (['--model', '.', '--seed', '-1'], '--seed -1: is below 0'),
        (['--model', '.', '--network', 'tiny'], 'say more about --encoders'),
        (['--model', '.', '--encoders', 'a/b'], "--encoders-revision 'None' does not pin a/b"),
        (['--model', '.', '--refuse', ' '], 'is empty; leave the option out'),
    ],
)
def test_options_that_contradict_each_other(options, said, tmp_path):
    assert said in run_here('data_prep.recaption', tmp_path / 'in', tmp_path / 'out', *options, code=2).stderr


def test_an_image_is_told_by_its_pixels(model):
    """The fixture's captions depend on images at all: or these tests would hold for a model that looks at none."""
    captioner = Captioner.find(EncoderSource(str(model)), Generation(max_tokens=MAX_TOKENS))
    captioner.load(torch.device('cpu'))
    inputs = captioner.prepare([Image.new('RGB', (40, 40), colour) for colour in ('red', 'blue', 'white', 'black', 'green')])
    assert len({captions[0].text for captions in captioner.captions(inputs, list('abcde'))}) > 1
