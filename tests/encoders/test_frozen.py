import json
import logging
import re
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModel

from data_prep.shapes import vocabulary
from diffusion.contracts.errors import EncoderError
from diffusion.encoders.frozen import FrozenEncoders
from diffusion.encoders.frozen_part import use_attention, weights_sha256
from diffusion.encoders.pretrained import save_tokenizer
from diffusion.encoders.random_encoders import build_tokenizer, build_vae, text_encoders_like, vae_like, write_stand_in
from diffusion.encoders.sizes import KINDS
from diffusion.encoders.text import ClipPenultimate
from diffusion.recipe.schema import EncoderSource
from tests.conftest import run_python


def test_latents_are_scaled_once(encoders):
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    moments = encoders.vae.encode(images)
    pixels = images.float() / 127.5 - 1
    posterior = encoders.vae.module.encode(pixels).latent_dist
    torch.testing.assert_close(moments, torch.cat([posterior.mean, posterior.logvar], dim=1))  # unscaled
    latents = encoders.vae.latents(moments, torch.zeros_like(posterior.mean))
    torch.testing.assert_close(latents, posterior.mean * encoders.vae.module.config.scaling_factor)
    decoded = encoders.vae.module.decode(posterior.mean).sample.clamp(-1, 1)
    torch.testing.assert_close(encoders.vae.decode(latents).float(), ((decoded + 1) * 127.5).round(), rtol=0, atol=1)
    assert pixels.min() < -0.9
    assert pixels.max() > 0.9


def test_text_is_the_last_hidden_state_after_the_final_norm(encoders):
    tokens = encoders.text.tokenize(['a red circle', ''])['text_encoder']
    assert tokens.shape == (2, encoders.text.length)
    assert tokens.dtype == torch.int64
    text = encoders.text.encode({'text_encoder': tokens}).text
    assert text.shape == (2, encoders.text.length, encoders.text.width)
    with torch.no_grad():
        states = encoders.text.parts['text_encoder'].module(tokens, output_hidden_states=True)
    torch.testing.assert_close(
        text,
        getattr(encoders.text.parts['text_encoder'].module, 'text_model', encoders.text.parts['text_encoder'].module).final_layer_norm(
            states.hidden_states[-1]
        ),
    )
    assert not torch.equal(text[0], text[1])


def test_nothing_is_trainable_or_in_training_mode(encoders):
    for module in (encoders.vae.module, encoders.text.parts['text_encoder'].module):
        assert not module.training
        assert not any(p.requires_grad for p in module.parameters())


def test_the_last_of_24_layers_is_refused():
    """Taking it is silent otherwise: SD2 reads the penultimate layer, so a right folder stores 23."""

    def of(layers):
        config = CLIPTextConfig(hidden_size=1024, intermediate_size=8, num_hidden_layers=layers, num_attention_heads=16, vocab_size=10)
        tokenizer = type('Tokenizer', (), {'model_max_length': 77})()
        return ClipPenultimate.of(CLIPTextModel(config), tokenizer)

    assert of(23).width == 1024
    with pytest.raises(EncoderError, match='num_hidden_layers: 23'):
        of(24)


def test_the_stand_in_has_stable_diffusions_sizes():
    with torch.device('meta'):
        config = KINDS['sd2-base']
        vae = build_vae(**config['vae'])
        text = CLIPTextModel(CLIPTextConfig(**config['text_encoder']))
    assert sum(p.numel() for p in vae.parameters()) == 83_653_863
    assert sum(p.numel() for p in text.parameters()) == 340_387_840


def test_tokenizer_knows_its_words_and_survives_others(encoders):
    words = vocabulary()
    tokens = encoders.text.tokenize([' '.join(words[:10])])['text_encoder'][0].tolist()
    assert len(set(tokens[1:11])) == 10  # a token a word
    assert encoders.text.tokenizers['tokenizer'].decode(tokens[1:11]).strip() == ' '.join(words[:10])
    assert encoders.text.tokenize(['Ünknown wörds 漢字'])['text_encoder'].shape == (1, encoders.text.length)


def test_a_wrong_location_says_so(tmp_path):
    with pytest.raises(EncoderError, match=f'{tmp_path}/vae: cannot be loaded: .*name a local folder in the diffusers layout, or a Hub id'):
        FrozenEncoders.load(EncoderSource(str(tmp_path)))


def digest_of(folder):
    return FrozenEncoders.find(EncoderSource(str(folder))).text.tokenizer_digests


def swap_words(tokenizer):
    vocabulary = json.loads((tokenizer / 'vocab.json').read_text())
    vocabulary['red</w>'], vocabulary['blue</w>'] = vocabulary['blue</w>'], vocabulary['red</w>']
    (tokenizer / 'vocab.json').write_text(json.dumps(vocabulary))


def reverse_merges(tokenizer):
    first, *merges = (tokenizer / 'merges.txt').read_text().splitlines()
    (tokenizer / 'merges.txt').write_text('\n'.join([first, *reversed(merges)]) + '\n')


def set_entry(**entries):
    def change(tokenizer):
        config = json.loads((tokenizer / 'tokenizer_config.json').read_text())
        (tokenizer / 'tokenizer_config.json').write_text(json.dumps({**config, **entries}))

    return change


@pytest.mark.parametrize(
    'change', [swap_words, reverse_merges, set_entry(pad_token='!'), set_entry(model_max_length=8)], ids=['words', 'merges', 'padding', 'length']
)
def test_whatever_decides_on_the_tokens_of_a_caption_changes_the_digest(encoders_folder, tmp_path, change):
    shutil.copytree(encoders_folder, tmp_path / 'other')
    (tmp_path / 'other/tokenizer/tokenizer.json').unlink()  # Stable Diffusion's were published without it
    assert digest_of(tmp_path / 'other') == digest_of(encoders_folder)
    change(tmp_path / 'other/tokenizer')
    assert digest_of(tmp_path / 'other') != digest_of(encoders_folder)


def test_a_tokenizer_that_was_used_and_written_again_has_its_digest(encoders, encoders_folder, tmp_path):
    shutil.copytree(encoders_folder, tmp_path / 'other')
    encoders.text.tokenize(['a red circle'])
    shutil.rmtree(tmp_path / 'other/tokenizer')
    save_tokenizer(encoders.text.tokenizers['tokenizer'], tmp_path / 'other/tokenizer')
    assert digest_of(tmp_path / 'other') == encoders.text.tokenizer_digests == digest_of(encoders_folder)


UNREACHABLE = """
from pathlib import Path
from data_prep.recaptioning.captioner import Captioner, Generation
from diffusion.checkpoints.initial import _from_hub
from diffusion.contracts.errors import CheckpointError, EncoderError
from diffusion.encoders.frozen import FrozenEncoders
from diffusion.encoders.patches import PatchFeatures
from diffusion.evaluation.features.weights import WeightsSource, find_file, find_folder
from diffusion.families.pipeline import open_pipeline
from diffusion.families.registry import family_of
from diffusion.recipe.schema import EncoderSource
from tests.conftest import run_python

source = WeightsSource(('model.safetensors',), hub='owner/model')
for load in [
    lambda: FrozenEncoders.load(EncoderSource('owner/model', COMMIT)),
    lambda: PatchFeatures.find('owner/model', COMMIT),
    lambda: open_pipeline(Path('owner/model'), family_of('tiny'), COMMIT),
    lambda: Captioner.find(EncoderSource('owner/model', COMMIT), Generation()),
    lambda: _from_hub('owner/model', COMMIT, ['x.safetensors']),
    lambda: find_file('net', source, None, download=True),
    lambda: find_folder('net', source, None, download=True),
]:
    try:
        load()
    except (CheckpointError, EncoderError) as error:
        print(error)
print(FrozenEncoders.load(EncoderSource('owner/cached', COMMIT)).text.tokenize(['a red circle'])['text_encoder'].shape[0])
"""


def test_a_hub_that_cannot_be_reached_is_asked_once_and_its_cache_is_read(encoders_folder, tmp_path):
    """The libraries asked six times for each file, 23 s and 3,000 characters each, and did not read a tokenizer that was in the cache."""
    commit = 'c' * 40
    shutil.copytree(encoders_folder, tmp_path / 'hub/models--owner--cached/snapshots' / commit)
    hub = {'HF_ENDPOINT': 'http://127.0.0.1:9', 'HF_HUB_OFFLINE': '0', 'HF_HUB_CACHE': str(tmp_path / 'hub')}  # nothing listens there
    ended = run_python('-c', f'COMMIT = {commit!r}\n{UNREACHABLE}', **hub)
    *problems, read = ended.stdout.splitlines()
    assert [len(problem) < 500 and 'http://127.0.0.1:9 cannot be reached (ConnectError)' in problem for problem in problems] == [True] * 7
    assert 'python -m diffusion.stand_in' in problems[0]
    assert read == '1'
    assert ended.stderr == ''


WEIGHTS = {'vae': 'diffusion_pytorch_model.safetensors', 'text_encoder': 'model.safetensors'}
KINDS_OF_MODELS = {'vae': AutoencoderKL, 'text_encoder': CLIPTextModel}


@pytest.fixture
def edited(encoders_folder, tmp_path):
    """A copy of the encoders with other weights in one file."""

    def edit(model, change):
        folder = tmp_path / 'edited'
        shutil.copytree(encoders_folder, folder)
        weights = load_file(folder / model / WEIGHTS[model])
        save_file(change(dict(sorted(weights.items()))), folder / model / WEIGHTS[model], metadata={'format': 'pt'})
        return EncoderSource(str(folder))

    return edit


@pytest.fixture
def libraries_say(monkeypatch):
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(f'{record.name}: {record.getMessage()}')
    for name in ('transformers', 'diffusers'):
        monkeypatch.setattr(logging.getLogger(name), 'handlers', [handler])
    return records


@pytest.mark.parametrize('model', WEIGHTS)
@pytest.mark.parametrize(
    ('change', 'said'),
    [
        (lambda weights: {}, r'\d+ missing \(\S+, \S+, \S+ \.\.\.\)'),
        (lambda weights: dict(list(weights.items())[1:]), r'config.json \(\w+\): 1 missing \(\S+\)\. '),
        (lambda weights: {**weights, 'a.stranger': torch.zeros(2)}, r'1 unexpected \(a.stranger\)'),
        (lambda weights: {f'new.{name}': tensor for name, tensor in weights.items()}, r'\d+ missing .*; \d+ unexpected \(new'),
        (lambda weights: {**weights, next(iter(weights)): torch.zeros(3, 3)}, r'1 of another shape \(\S+\)'),
    ],
    ids=['empty', 'missing', 'unexpected', 'renamed', 'misshapen'],
)
def test_no_random_weight_takes_the_place_of_one_that_a_file_lacks(edited, model, change, said, libraries_say):
    with pytest.raises(EncoderError, match=rf'/{model}: its weights do not fit its .*{said}'):
        FrozenEncoders.load(edited(model, change))
    assert not libraries_say  # pages of names, and the advice to train them


def of_older_versions(weights):
    """As SD 1 and 2 are on the Hub: a buffer that is not stored any more, and the former names of the VAE's attention."""
    names = {'to_q': 'query', 'to_k': 'key', 'to_v': 'value', 'to_out.0': 'proj_attn'}
    if any(name.endswith('embeddings.position_embedding.weight') for name in weights):
        old = {f'text_model.{name.removeprefix("text_model.")}': tensor for name, tensor in weights.items()}  # as transformers 4 has them
        return {**old, 'text_model.embeddings.position_ids': torch.arange(16)[None]}
    return {re.sub('|'.join(names), lambda found: names[found[0]], name): tensor for name, tensor in weights.items()}


@pytest.mark.parametrize('model', WEIGHTS)
def test_files_of_older_versions_hold_the_same_weights(edited, encoders, model):
    location = edited(model, of_older_versions)
    stored = load_file(Path(location.source) / model / WEIGHTS[model])
    assert 'text_model.embeddings.position_ids' in stored or any('.query.' in name for name in stored)  # or the test tests nothing
    assert FrozenEncoders.load(location).digests == encoders.digests


def test_files_in_shards(encoders_folder, encoders, tmp_path):
    shutil.copytree(encoders_folder, tmp_path / 'shards')
    for model, kind in KINDS_OF_MODELS.items():
        folder = tmp_path / 'shards' / model
        (folder / WEIGHTS[model]).unlink()
        kind.from_pretrained(encoders_folder, subfolder=model).save_pretrained(folder, max_shard_size='40KB')
    location = EncoderSource(str(tmp_path / 'shards'))
    assert FrozenEncoders.load(location).digests == encoders.digests
    for model in KINDS_OF_MODELS:  # an index that promises more than the files hold
        shard, *others = sorted((tmp_path / 'shards' / model).glob('*.safetensors'))
        assert others
        whole = shard.read_bytes()
        save_file({'a.stranger': torch.zeros(1)}, shard, metadata={'format': 'pt'})
        with pytest.raises(EncoderError, match=rf'/{model}: its weights do not fit its .* missing'):
            FrozenEncoders.load(location)
        shard.write_bytes(whole)


def test_a_folder_without_tokenizer_and_one_with_anothers(encoders_folder, tmp_path):
    folder = tmp_path / 'copy'
    shutil.copytree(encoders_folder, folder)
    shutil.rmtree(folder / 'tokenizer')
    with pytest.raises(EncoderError, match=r'/tokenizer: cannot be loaded \(vocab.json and merges.txt belong there\)'):
        FrozenEncoders.load(EncoderSource(str(folder)))
    build_tokenizer(folder / 'tokenizer', ['word' + chr(97 + i) * 5 for i in range(26)] + vocabulary(), 16)
    with pytest.raises(EncoderError, match='the tokenizer has [0-9,]+ tokens, the text encoder knows [0-9,]+; they do not belong together'):
        FrozenEncoders.load(EncoderSource(str(folder)))


def test_the_digest_of_the_text_encoder_is_that_of_the_file(encoders_folder, encoders):
    in_bf16 = FrozenEncoders.load(EncoderSource(str(encoders_folder))).to('cpu', torch.bfloat16)
    assert in_bf16.digests == encoders.digests
    assert weights_sha256(in_bf16.text.parts['text_encoder'].module) != encoders.digests['text_encoder']  # or the test tests nothing


def filled(model):
    """The same weights whatever a library draws at initialisation."""
    for number, (_, weight) in enumerate(sorted(model.state_dict().items())):
        weight.copy_(torch.arange(weight.numel()).reshape(weight.shape) / 1024 + number)
    return model


@pytest.mark.parametrize(
    ('build', 'digest'),
    [
        (vae_like, 'ad27eab413261f62642cbfa2fd94e156b15e210746a1c23ee6358445ae912480'),
        (lambda like: text_encoders_like(like)[0], 'f13f400639e0718037e3d59d2cb13740fa7ca61b660646951f6dbfef286eb2e5'),
    ],
)
def test_a_digest_is_one_number_under_every_version_of_the_libraries(build, digest):
    """Or latents that were made on one machine would be refused on another, and a run would not resume there."""
    assert weights_sha256(filled(build('tiny'))) == digest


def test_the_stand_in_is_written_for_every_version_of_transformers(encoders_folder, encoders):
    """4 knows CLIP's weights by these names and its tokenizer by these files alone; 5 writes others and reads both."""
    weights = load_file(encoders_folder / 'text_encoder' / WEIGHTS['text_encoder'])
    assert len(weights) == len(encoders.text.parts['text_encoder'].module.state_dict())
    assert all(name.startswith('text_model.') for name in weights)
    assert {'vocab.json', 'merges.txt'} <= {path.name for path in (encoders_folder / 'tokenizer').iterdir()}


def test_digest_follows_the_weights_not_the_file(encoders_folder, tmp_path):
    a = FrozenEncoders.load(EncoderSource(str(encoders_folder)))
    write_stand_in(tmp_path / 'same', 'tiny', seed=0)
    write_stand_in(tmp_path / 'other', 'tiny', seed=1)
    assert FrozenEncoders.load(EncoderSource(str(tmp_path / 'other'))).vae.sha256 != a.vae.sha256
    again = FrozenEncoders.load(EncoderSource(str(encoders_folder)))
    assert again.vae.sha256 == a.vae.sha256 == weights_sha256(a.vae.module)


def test_what_is_encoded_can_be_trained_on(encoders):
    """Encoders run in inference mode, whose tensors autograd would refuse to keep."""
    text = encoders.text.encode(encoders.text.tokenize(['a red circle'])).text
    moments = encoders.vae.encode(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))
    assert not text.is_inference()
    assert not moments.is_inference()
    layer = torch.nn.Linear(encoders.text.width, 1)
    layer(text).sum().backward()
    assert layer.weight.grad.abs().sum() > 0


def test_the_vae_in_bf16_is_close(encoders_folder):
    """Random weights: the moments differ by less than 2 % of their spread; how much a trained VAE's do is not known here."""
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    moments = [FrozenEncoders.load(EncoderSource(str(encoders_folder))).to('cpu', vae_in_bf16=bf16).vae.encode(images) for bf16 in (False, True)]
    assert [each.dtype for each in moments] == [torch.float32] * 2
    assert not torch.equal(*moments)
    assert (moments[0] - moments[1]).square().mean().sqrt() < 0.02 * moments[0].std()


def test_encoders_choose_their_own_attention(encoders, monkeypatch):
    """A kernel for the U-Net alone may know neither CLIP's mask nor the VAE's wide head."""
    monkeypatch.setattr(torch.backends.cudnn, 'version', lambda: 91501)
    use_attention('cudnn')  # which no CPU has
    try:
        encoders.text.encode(encoders.text.tokenize(['a red circle']))
        moments = encoders.vae.encode(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))
        encoders.vae.decode(moments[:, : encoders.vae.latent_channels])
    finally:
        use_attention('auto')
