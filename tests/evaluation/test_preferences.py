"""PickScore and HPSv2.1 with random weights, each against the other library: PickScore's network is transformers', HPSv2.1's open_clip's."""

import json

import open_clip
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

from diffusion.contracts.errors import InputError
from diffusion.encoders.random_encoders import build_tokenizer
from diffusion.evaluation.features.networks import EXTRACTORS, load_extractors, load_hps
from diffusion.evaluation.features.weights import WeightsSource
from diffusion.evaluation.metrics.figures import METRICS, find_metric
from tests.evaluation.networks import IMAGE_PX, WORDS, images

CAPTIONS = ['a red circle on green', 'a green square', 'on', 'a', 'red', '', 'circle on square on a red circle', 'green ' * 100]
VOCABULARY = 49408  # of open_clip's tokenizer
MEAN, DEVIATION = torch.tensor([0.48145466, 0.4578275, 0.40821073]), torch.tensor([0.26862954, 0.26130258, 0.27577711])


def write_clip_with_gelu(folder, vocabulary: int, eos: int) -> CLIPModel:
    """A tiny CLIP as ViT-H/14 has it (GELU and not its quick form), with a scale that is not 100."""
    sizes = {'hidden_size': 32, 'intermediate_size': 128, 'num_hidden_layers': 2, 'num_attention_heads': 2, 'hidden_act': 'gelu'}
    config = CLIPConfig(
        text_config={**sizes, 'vocab_size': vocabulary, 'max_position_embeddings': 77, 'eos_token_id': eos, 'initializer_factor': 10.0},
        vision_config={**sizes, 'image_size': IMAGE_PX, 'patch_size': 8, 'initializer_factor': 10.0},
        projection_dim=24,
        logit_scale_init_value=3.7,
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = CLIPModel(config).eval()
    model.save_pretrained(folder)
    return model


def as_open_clip(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights under the names of open_clip."""
    found = {
        'logit_scale': weights['logit_scale'],
        'visual.class_embedding': weights['vision_model.embeddings.class_embedding'],
        'visual.conv1.weight': weights['vision_model.embeddings.patch_embedding.weight'],
        'visual.positional_embedding': weights['vision_model.embeddings.position_embedding.weight'],
        'visual.proj': weights['visual_projection.weight'].T,
        'token_embedding.weight': weights['text_model.embeddings.token_embedding.weight'],
        'positional_embedding': weights['text_model.embeddings.position_embedding.weight'],
        'text_projection': weights['text_projection.weight'].T,
    }
    names = {'vision_model.pre_layrnorm': 'visual.ln_pre', 'vision_model.post_layernorm': 'visual.ln_post', 'text_model.final_layer_norm': 'ln_final'}
    for ours, theirs in (('vision_model', 'visual.'), ('text_model', '')):
        for layer in range(2):
            before, after = f'{ours}.encoder.layers.{layer}', f'{theirs}transformer.resblocks.{layer}'
            parts = {
                'layer_norm1': 'ln_1',
                'layer_norm2': 'ln_2',
                'mlp.fc1': 'mlp.c_fc',
                'mlp.fc2': 'mlp.c_proj',
                'self_attn.out_proj': 'attn.out_proj',
            }
            names |= {f'{before}.{part}': f'{after}.{other}' for part, other in parts.items()}
            for kind in ('weight', 'bias'):
                found[f'{after}.attn.in_proj_{kind}'] = torch.cat([weights[f'{before}.self_attn.{part}_proj.{kind}'] for part in 'qkv'])
    return {name: value.contiguous() for name, value in found.items()} | {
        f'{other}.{kind}': weights[f'{name}.{kind}'] for name, other in names.items() for kind in ('weight', 'bias')
    }


def architecture(folder, vocabulary: int) -> str:
    """The same sizes, known to open_clip by name."""
    config = {
        'embed_dim': 24,
        'vision_cfg': {'image_size': IMAGE_PX, 'layers': 2, 'width': 32, 'head_width': 16, 'patch_size': 8},
        'text_cfg': {'context_length': 77, 'vocab_size': vocabulary, 'width': 32, 'heads': 2, 'layers': 2},
    }
    path = folder / f'tiny-preference-{vocabulary}.json'
    path.write_text(json.dumps(config))
    open_clip.add_model_config(path)
    return path.stem


def normalised(shown: Tensor) -> Tensor:
    return (shown / 255 - MEAN[:, None, None]) / DEVIATION[:, None, None]


def test_pickscore_is_its_own_scale_times_the_cosine(tmp_path):
    folder = tmp_path / 'PickScore_v1'
    tokenizer = build_tokenizer(folder, WORDS, 77)
    assert tokenizer.eos_token_id == len(tokenizer) - 1  # open_clip takes the largest id for the end
    write_clip_with_gelu(folder, len(tokenizer), tokenizer.eos_token_id)
    (network,), shown = load_extractors(['pickscore'], tmp_path), images(len(CAPTIONS), IMAGE_PX, seed=1)
    theirs = open_clip.create_model(architecture(tmp_path, len(tokenizer)), load_weights=False).eval()
    theirs.load_state_dict(as_open_clip(load_file(folder / 'model.safetensors')))
    tokens = torch.zeros(len(CAPTIONS), 77, dtype=torch.long)  # padded by open_clip's 0 and not by the tokenizer's token
    for row, caption in zip(tokens, CAPTIONS, strict=True):
        ids = CLIPTokenizer.from_pretrained(folder)(caption, truncation=True, max_length=77)['input_ids']
        row[: len(ids)] = torch.tensor(ids)
    with torch.no_grad():
        pictures, texts = theirs.encode_image(normalised(shown), normalize=True), theirs.encode_text(tokens, normalize=True)
        expected = theirs.logit_scale.exp() * (pictures * texts).sum(dim=1)
    found = [score(network, image[None], [caption], 'pickscore') for image, caption in zip(shown, CAPTIONS, strict=True)]
    assert found == pytest.approx(expected.tolist(), abs=1e-4)
    assert min(found) < -1  # no cosine is clamped, and none is times 100
    assert max(map(abs, found)) < 41  # e^3.7


def test_hps_is_a_hundred_times_the_cosine(tmp_path):
    """The file holds more than weights, as the published one; its own scale has no effect."""
    model = write_clip_with_gelu(tmp_path / 'clip', VOCABULARY, VOCABULARY - 1)
    weights = as_open_clip(load_file(tmp_path / 'clip' / 'model.safetensors'))
    torch.save({'epoch': 1, 'name': 'hps', 'state_dict': weights}, tmp_path / 'HPS_v2.1_compressed.pt')
    source, shown = WeightsSource(('HPS_v2.1_compressed.pt',)), images(len(CAPTIONS), IMAGE_PX, seed=2)
    network = load_hps('hpsv2', source, tmp_path, download=False, architecture=architecture(tmp_path, VOCABULARY))
    tokens = open_clip.get_tokenizer('ViT-H-14')(CAPTIONS)
    with torch.no_grad():
        pictures = model.get_image_features(normalised(shown)).pooler_output
        texts = model.get_text_features(tokens).pooler_output
    expected = 100 * torch.nn.functional.cosine_similarity(pictures, texts)
    found = [score(network, image[None], [caption], 'hpsv2') for image, caption in zip(shown, CAPTIONS, strict=True)]
    assert found == pytest.approx(expected.tolist(), abs=1e-3)
    assert max(map(abs, found)) > 1


def score(network, shown, captions, name) -> float:
    return METRICS[name](None, network.images(shown)[name], network.texts(captions), 0, 0)['preference']['value']


@pytest.mark.parametrize('name', ['pickscore', 'hpsv2'])
def test_a_preference_is_of_its_own_network(name):
    assert EXTRACTORS[name].texts
    with pytest.raises(InputError, match=f'{name} takes no other network; leave out @clip-vit-l14'):
        find_metric(f'{name}@clip-vit-l14')
    with pytest.raises(InputError, match=f'unknown metric kid@{name}'):
        find_metric(f'kid@{name}')
