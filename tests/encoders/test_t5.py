"""Text encoders of T5's family, against transformers' own classes and counts made by hand."""

import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, T5EncoderModel, UMT5EncoderModel

from data_prep.shapes import vocabulary
from diffusion.contracts.errors import EncoderError
from diffusion.encoders.frozen import FrozenEncoders
from diffusion.encoders.random_encoders import text_lengths_like, write_stand_in
from diffusion.encoders.sizes import KINDS
from diffusion.encoders.text import MaskedClip, MaskedT5, MaskedUmt5, find_masked
from diffusion.families.counting.counts import Counter
from diffusion.recipe.schema import EncoderSource, Recipe

CAPTIONS = ['a small red circle at the left on a blue background', '', 'a cyan square']
CLASSES = {'t5': (T5EncoderModel, MaskedT5), 'umt5': (UMT5EncoderModel, MaskedUmt5)}


@pytest.fixture(params=CLASSES)
def folder(request, tmp_path, monkeypatch):
    kind = {**KINDS['tiny-t5'], 'text_encoder': {**KINDS['tiny-t5']['text_encoder'], 'model_type': request.param}}
    monkeypatch.setitem(KINDS, 'tiny-t5', kind)
    write_stand_in(tmp_path / request.param, 'tiny-t5', words=vocabulary())
    return tmp_path / request.param


def load(folder):
    return FrozenEncoders.load(EncoderSource(str(folder)), find_masked)


def test_encoded_text_is_that_of_transformers_without_padding(folder):
    """Each caption by itself and unpadded needs no mask: so both masks are right, the tokenizer's and the encoder's."""
    encoders = load(folder)
    plain, tokenizer = CLASSES[folder.name][0].from_pretrained(folder / 'text_encoder').eval(), AutoTokenizer.from_pretrained(folder / 'tokenizer')
    assert type(encoders.text) is CLASSES[folder.name][1]
    given = encoders.text.encode(encoders.text.tokenize(CAPTIONS))
    assert given.text.shape == (3, 24, 32)
    for caption, text, mask in zip(CAPTIONS, given.text, given.mask, strict=True):
        ids = tokenizer(caption, return_tensors='pt').input_ids
        assert mask.tolist() == [True] * ids.shape[1] + [False] * (24 - ids.shape[1])
        with torch.no_grad():
            expected = plain(ids).last_hidden_state[0]
        assert expected.std() > 0.1
        torch.testing.assert_close(text[mask], expected, rtol=1e-5, atol=1e-5)
    assert given.mask[1].sum() == 1  # the empty caption is its end alone, and attention has something to attend to
    assert encoders.text.tokenize([' '.join(['circle'] * 50)])['text_encoder'].shape == (1, 24)


def test_what_tokenizes_goes_to_the_workers_of_a_loader_without_the_encoder(folder):
    tokenize = load(folder).text.tokenize
    sent = pickle.dumps(tokenize)
    assert len(sent) < 50_000
    received = pickle.loads(sent)
    assert torch.equal(received(CAPTIONS)['text_encoder'], tokenize(CAPTIONS)['text_encoder'])


@pytest.mark.parametrize(
    ('change', 'said'),
    [
        (lambda weights: {name: weights[name] for name in weights if 'shared' not in name and 'embed_tokens' not in name}, 'missing'),
        (lambda weights: {name: weights[name] for name in weights if 'relative_attention_bias' not in name}, 'missing'),
        (lambda weights: {**weights, 'a.stranger': torch.zeros(2)}, r'1 unexpected \(a.stranger\)'),
        (lambda weights: {**weights, 'encoder.final_layer_norm.weight': torch.zeros(3)}, '1 of another shape'),
    ],
    ids=['no embedding', 'no positions', 'unexpected', 'misshapen'],
)
def test_other_weights_are_refused(folder, change, said):
    file = folder / 'text_encoder/model.safetensors'
    save_file(change(load_file(file)), file, metadata={'format': 'pt'})
    with pytest.raises(EncoderError, match=rf'/text_encoder: its weights do not fit its config.json .*{said}'):
        load(folder)


def test_the_class_is_that_of_the_config(folder, encoders_folder):
    assert type(find_masked(str(encoders_folder), None)) is MaskedClip
    config = json.loads((folder / 'text_encoder/config.json').read_text())
    (folder / 'text_encoder/config.json').write_text(json.dumps({**config, 'model_type': 'bert'}))
    with pytest.raises(EncoderError, match='says model_type bert; known are clip_text_model, t5, umt5'):
        load(folder)
    shutil.rmtree(folder / 'text_encoder')
    with pytest.raises(EncoderError, match='/text_encoder: cannot be loaded: .*name a local folder in the diffusers layout'):
        load(folder)


def test_a_tokenizer_has_to_say_how_long_a_caption_is(folder):
    file = folder / 'tokenizer/tokenizer_config.json'
    config = json.loads(file.read_text())
    assert text_lengths_like(str(folder)) == [config.pop('model_max_length')] == [24]
    file.write_text(json.dumps(config))
    with pytest.raises(EncoderError, match='write the tokens of a caption into its tokenizer_config.json'):
        load(folder)
    with pytest.raises(EncoderError, match='gives no model_max_length'):
        text_lengths_like(str(folder))
    shutil.rmtree(folder / 'tokenizer')
    with pytest.raises(EncoderError, match=r'/tokenizer: cannot be loaded \(tokenizer.json belongs there\)'):
        load(folder)


def test_parameters_and_flop_of_t5_xxl_by_hand():
    """24 layers: 4 projections of attention, 3 matrices of a gated MLP, 2 norms; one table of 32 buckets of position biases; embedding, last norm."""
    width, heads, mlp, layers, tokens = 4096, 64 * 64, 10240, 24, 256
    matrices = 4 * width * heads + 3 * width * mlp
    recipe = Recipe()
    recipe.model.network, recipe.data.resolution = 'prx-600m-t5-xxl', 256
    counted = Counter.from_file().counts(recipe)
    assert counted.encoders.text_parameters == layers * (matrices + 2 * width) + 32 * 64 + 32128 * width + width == 4_762_310_656
    assert counted.encoders.text_flop == 2 * layers * (tokens * matrices + 2 * tokens**2 * heads)
    assert (counted.encoders.text_length, counted.encoders.text_width, counted.latent_channels) == (256, 4096, 16)
