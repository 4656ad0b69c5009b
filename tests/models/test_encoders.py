import pytest
import torch
from transformers import CLIPTextConfig, CLIPTextModel

from data_prep.shapes import vocabulary
from diffusion.errors import EncoderError
from diffusion.models.attention import use_attention
from diffusion.models.encoders import FrozenEncoders, weights_sha256
from diffusion.models.stand_in import KINDS, build_vae, write_stand_in
from diffusion.recipe.schema import Encoders


def test_latents_are_scaled_once(encoders):
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    moments = encoders.encode_images(images)
    pixels = images.float() / 127.5 - 1
    posterior = encoders.vae.encode(pixels).latent_dist
    torch.testing.assert_close(moments, torch.cat([posterior.mean, posterior.logvar], dim=1))  # unscaled
    latents = encoders.latents(moments, torch.zeros_like(posterior.mean))
    torch.testing.assert_close(latents, posterior.mean * encoders.vae.config.scaling_factor)
    decoded = encoders.vae.decode(posterior.mean).sample.clamp(-1, 1)
    torch.testing.assert_close(encoders.decode(latents).float(), ((decoded + 1) * 127.5).round(), rtol=0, atol=1)
    assert pixels.min() < -0.9
    assert pixels.max() > 0.9


def test_text_is_the_last_hidden_state_after_the_final_norm(encoders):
    tokens = encoders.tokenize(['a red circle', ''])
    assert tokens.shape == (2, encoders.text_length)
    assert tokens.dtype == torch.int64
    text = encoders.encode_text(tokens)
    assert text.shape == (2, encoders.text_length, encoders.text_width)
    with torch.no_grad():
        states = encoders.text_encoder(tokens, output_hidden_states=True)
    torch.testing.assert_close(text, encoders.text_encoder.text_model.final_layer_norm(states.hidden_states[-1]))
    assert not torch.equal(text[0], text[1])


def test_nothing_is_trainable_or_in_training_mode(encoders):
    for module in (encoders.vae, encoders.text_encoder):
        assert not module.training
        assert not any(p.requires_grad for p in module.parameters())


def test_the_last_of_24_layers_is_refused():
    """Taking it is silent otherwise: SD2 reads the penultimate layer, so a right folder stores 23."""

    def of(layers):
        config = CLIPTextConfig(hidden_size=1024, intermediate_size=8, num_hidden_layers=layers, num_attention_heads=16, vocab_size=10)
        vae = build_vae(**KINDS['tiny']['vae'])
        tokenizer = type('Tokenizer', (), {'model_max_length': 77})()
        return FrozenEncoders(vae, CLIPTextModel(config), tokenizer)

    assert of(23).text_width == 1024
    with pytest.raises(EncoderError, match='num_hidden_layers: 23'):
        of(24)


def test_the_stand_in_has_stable_diffusions_sizes():
    with torch.device('meta'):
        config = KINDS['sd2-base']
        vae = build_vae(**config['vae'])
        text = CLIPTextModel(CLIPTextConfig(**config['text'], hidden_act='gelu'))
    assert sum(p.numel() for p in vae.parameters()) == 83_653_863
    assert sum(p.numel() for p in text.parameters()) == 340_387_840


def test_tokenizer_knows_its_words_and_survives_others(encoders):
    words = vocabulary()
    tokens = encoders.tokenize([' '.join(words[:10])])[0].tolist()
    assert len(set(tokens[1:11])) == 10  # a token a word
    assert encoders.tokenizer.decode(tokens[1:11]).strip() == ' '.join(words[:10])
    assert encoders.tokenize(['Ünknown wörds 漢字']).shape == (1, encoders.text_length)


def test_a_wrong_location_says_so(tmp_path):
    with pytest.raises(EncoderError, match='cannot load vae, text_encoder and tokenizer from'):
        FrozenEncoders.load(Encoders(str(tmp_path)))


def test_digest_follows_the_weights_not_the_file(encoders_folder, tmp_path):
    a = FrozenEncoders.load(Encoders(str(encoders_folder)))
    write_stand_in(tmp_path / 'same', 'tiny', seed=0)
    write_stand_in(tmp_path / 'other', 'tiny', seed=1)
    assert FrozenEncoders.load(Encoders(str(tmp_path / 'other'))).vae_sha256 != a.vae_sha256
    again = FrozenEncoders.load(Encoders(str(encoders_folder)))
    assert again.vae_sha256 == a.vae_sha256 == weights_sha256(a.vae)


def test_what_is_encoded_can_be_trained_on(encoders):
    """Encoders run in inference mode, whose tensors autograd would refuse to keep."""
    text = encoders.encode_text(encoders.tokenize(['a red circle']))
    moments = encoders.encode_images(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))
    assert not text.is_inference()
    assert not moments.is_inference()
    layer = torch.nn.Linear(encoders.text_width, 1)
    layer(text).sum().backward()
    assert layer.weight.grad.abs().sum() > 0


def test_the_vae_in_bf16_is_close(encoders_folder):
    """Random weights: the moments differ by less than 2 % of their spread; how much a trained VAE's do is not known here."""
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    moments = [FrozenEncoders.load(Encoders(str(encoders_folder))).to('cpu', vae_in_bf16=bf16).encode_images(images) for bf16 in (False, True)]
    assert [each.dtype for each in moments] == [torch.float32] * 2
    assert not torch.equal(*moments)
    assert (moments[0] - moments[1]).square().mean().sqrt() < 0.02 * moments[0].std()


def test_encoders_choose_their_own_attention(encoders):
    """A kernel for the U-Net alone may know neither CLIP's mask nor the VAE's wide head."""
    use_attention('cudnn')  # which no CPU has
    try:
        encoders.encode_text(encoders.tokenize(['a red circle']))
        moments = encoders.encode_images(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))
        encoders.decode(moments[:, : encoders.latent_channels])
    finally:
        use_attention('auto')
