"""CLIP and DINO with random weights from folders and files, against the libraries that everybody uses."""

import json
import shutil

import open_clip
import pytest
import torch
from torchmetrics.functional.multimodal import clip_score as torchmetrics_clip_score
from transformers import CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer, ViTModel

from diffusion.contracts.errors import EncoderError
from diffusion.evaluation.features.networks import EXTRACTORS, load_extractors, load_open_clip
from diffusion.evaluation.features.weights import WeightsSource
from diffusion.evaluation.metrics.distances import clip_score
from tests.evaluation.networks import IMAGE_PX, images, write_dino

CAPTIONS = ['a red circle on green', 'a green square', 'on', 'a', 'red', '', 'three blue owls', 'circle on square on a red circle', 'green ' * 30]


@pytest.fixture(scope='module')
def clip(clip_folder):
    (network,) = load_extractors(['clip-vit-l14'], clip_folder.parent)
    assert EXTRACTORS['clip-vit-l14'].texts
    return network


def test_clip_score_is_torchmetrics(clip, clip_folder, monkeypatch):
    """On images of the network's size, which nobody resizes; pair by pair, because torchmetrics clamps the mean of all."""
    shown = images(len(CAPTIONS), IMAGE_PX, seed=4)
    model, tokenizer = CLIPModel.from_pretrained(clip_folder), CLIPTokenizer.from_pretrained(clip_folder)
    size = {'size': {'shortest_edge': IMAGE_PX}, 'crop_size': {'height': IMAGE_PX, 'width': IMAGE_PX}}
    processor = CLIPProcessor(CLIPImageProcessor(**size), tokenizer)
    ask_images, ask_texts = model.get_image_features, model.get_text_features  # torchmetrics 1.9 wants what transformers 4 answered
    monkeypatch.setattr(model, 'get_image_features', lambda *given: ask_images(*given).pooler_output)
    monkeypatch.setattr(model, 'get_text_features', lambda *given: ask_texts(*given).pooler_output)
    embedded, texts = clip.images(shown)['clip-vit-l14'], clip.texts(CAPTIONS)
    theirs = [float(torchmetrics_clip_score(image, caption, lambda: (model, processor))) for image, caption in zip(shown, CAPTIONS, strict=True)]
    ours = [clip_score(image, text).value for image, text in zip(embedded.split(1), texts.split(1), strict=True)]
    assert ours == pytest.approx(theirs, abs=1e-3)
    assert 0 in theirs  # so that clamping shows
    assert max(theirs) > 1
    assert clip_score(embedded, texts).value == pytest.approx(sum(theirs) / len(theirs), abs=1e-3)


def test_a_long_caption_keeps_its_end(clip):
    """torchmetrics 1.7.4 cuts the end token off, from which CLIP takes its embedding: all long captions get the same one."""
    long, longer, other = clip.texts([f'{"square " * 100}', f'{"square " * 200}', f'{"circle " * 100}'])
    assert torch.equal(long, longer)
    assert not torch.allclose(long, other)


def test_clip_features_do_not_depend_on_the_batch(clip):
    shown = images(4, 48, seed=5)
    one_by_one = torch.cat([clip.images(image[None])['clip-vit-l14'] for image in shown])
    torch.testing.assert_close(clip.images(shown)['clip-vit-l14'], one_by_one, rtol=1e-4, atol=1e-5)
    assert one_by_one.shape == (4, clip.features['clip-vit-l14'])


def test_weights_may_be_a_pickle_of_tensors(clip, clip_folder, tmp_path):
    """The 336 px model was published as one; with code in it, it is refused."""
    folder = tmp_path / 'clip-vit-large-patch14-336'
    shutil.copytree(clip_folder, folder)
    (folder / 'model.safetensors').unlink()
    torch.save(CLIPModel.from_pretrained(clip_folder).state_dict(), folder / 'pytorch_model.bin')
    (pickled,) = load_extractors(['clip-vit-l14-336'], tmp_path)
    shown = images(2, IMAGE_PX, seed=6)
    assert torch.equal(pickled.images(shown)['clip-vit-l14-336'], clip.images(shown)['clip-vit-l14'])
    assert pickled.sha256 != clip.sha256
    torch.save({'logit_scale': print}, folder / 'pytorch_model.bin')
    with pytest.raises(EncoderError, match='cannot be loaded'):
        load_extractors(['clip-vit-l14-336'], tmp_path)


def test_a_folder_with_a_missing_weight_is_refused(clip_folder, tmp_path):
    folder = tmp_path / 'clip-vit-large-patch14'
    shutil.copytree(clip_folder, folder)
    weights = CLIPModel.from_pretrained(clip_folder).state_dict()
    del weights['visual_projection.weight']
    (folder / 'model.safetensors').unlink()
    torch.save(weights, folder / 'pytorch_model.bin')
    with pytest.raises(EncoderError, match=r'1 missing \(visual_projection.weight\)'):
        load_extractors(['clip-vit-l14'], tmp_path)


@pytest.fixture(scope='module')
def architecture(tmp_path_factory) -> str:
    """A tiny network of open_clip, known to it by name."""
    config = {
        'embed_dim': 16,
        'vision_cfg': {'image_size': IMAGE_PX, 'layers': 1, 'width': 32, 'head_width': 16, 'patch_size': 8},
        'text_cfg': {'context_length': 77, 'vocab_size': 49408, 'width': 8, 'heads': 2, 'layers': 1},
    }
    path = tmp_path_factory.mktemp('open_clip') / 'tiny-test.json'
    path.write_text(json.dumps(config))
    open_clip.add_model_config(path)
    return 'tiny-test'


def test_open_clip_from_a_file(architecture, tmp_path):
    model, _, preprocess = open_clip.create_model_and_transforms(architecture)
    torch.save(model.state_dict(), tmp_path / 'open_clip_pytorch_model.bin')
    network = load_open_clip('openclip-vit-h14', WeightsSource(('open_clip_pytorch_model.bin',)), tmp_path, download=False, architecture=architecture)
    shown = images(3, IMAGE_PX, seed=7)
    assert network.features == {'openclip-vit-h14': 16}
    mean, deviation = (torch.tensor(values)[:, None, None] for values in (preprocess.transforms[-1].mean, preprocess.transforms[-1].std))
    with torch.no_grad():
        torch.testing.assert_close(network.images(shown)['openclip-vit-h14'], model.eval().encode_image((shown / 255 - mean) / deviation))
        torch.testing.assert_close(network.texts(CAPTIONS), model.encode_text(open_clip.get_tokenizer(architecture)(CAPTIONS)))
    torch.save({'visual.proj': print}, tmp_path / 'open_clip_pytorch_model.bin')
    with pytest.raises(EncoderError, match='cannot be read as weights of tiny-test'):
        load_open_clip('openclip-vit-h14', WeightsSource(('open_clip_pytorch_model.bin',)), tmp_path, download=False, architecture=architecture)


def test_dino_is_the_class_token(tmp_path):
    model = ViTModel.from_pretrained(write_dino(tmp_path / 'dino-vits16'), add_pooling_layer=False)
    (network,) = load_extractors(['dino-vits16'], tmp_path)
    shown = images(2, 256, seed=8)
    mean, deviation = torch.tensor([0.485, 0.456, 0.406])[:, None, None], torch.tensor([0.229, 0.224, 0.225])[:, None, None]
    with torch.no_grad():
        tokens = model.eval()((shown[..., 16:240, 16:240] / 255 - mean) / deviation).last_hidden_state
    torch.testing.assert_close(network.images(shown)['dino-vits16'], tokens[:, 0])
    assert not EXTRACTORS['dino-vits16'].texts
