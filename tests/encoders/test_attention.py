import pytest
import torch

from diffusion.encoders.frozen_part import AttentionError, any_kernel, use_attention
from diffusion.families.registry import build_network, kernels_in_use, shapes
from diffusion.recipe import RecipeError, load_recipe
from diffusion.training.builder import build_trainer
from tests.conftest import REPOSITORY, read_json


@pytest.fixture
def recipe(overrides):
    return load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', [*overrides, 'model.network=tiny', 'data.resolution=32'])


@pytest.fixture(autouse=True)
def all_again():
    yield
    use_attention('auto')


def test_kernels_agree_and_the_one_named_is_used(recipe):
    torch.manual_seed(0)
    unet, noisy, text = build_network('tiny'), torch.randn(2, 4, 8, 8), torch.randn(2, 7, 32)
    outputs = {}
    for name, op in (('flash', 'aten::_scaled_dot_product_flash_attention_for_cpu'), ('math', 'aten::_scaled_dot_product_attention_math')):
        use_attention(name)
        assert kernels_in_use(recipe) == name
        with torch.profiler.profile() as profile:
            outputs[name] = unet(noisy, torch.tensor([3, 900]), text).sample
        assert op in {event.key for event in profile.key_averages()}
    torch.testing.assert_close(outputs['flash'], outputs['math'], rtol=1e-4, atol=1e-5)


def test_what_cannot_run_here_is_refused(recipe, monkeypatch):
    with pytest.raises(AttentionError, match='xformers is not one of auto, cudnn, flash, efficient, math'):
        use_attention('xformers')
    monkeypatch.setattr(torch.backends.cudnn, 'version', lambda: 91501)
    use_attention('cudnn')
    if not torch.cuda.is_available():
        with pytest.raises(AttentionError, match='cannot compute attention of 16 to 16 tokens in fp32'):
            kernels_in_use(recipe)


def test_a_cudnn_whose_attention_is_wrong_is_refused_and_left_out_of_auto(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, 'version', lambda: 91500)
    with pytest.raises(AttentionError, match=r'needs cuDNN 9\.15\.1 \(91501\), and PyTorch .* here brings 91500'):
        use_attention('cudnn')
    use_attention('auto')
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    with any_kernel():
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    monkeypatch.setattr(torch.backends.cudnn, 'version', lambda: 91501)
    use_attention('auto')
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_shapes_are_those_that_the_network_computes(recipe, monkeypatch):
    seen = set()
    computed = torch.nn.functional.scaled_dot_product_attention

    def watch(query, key, value):
        seen.add((query.shape[-2], key.shape[-2], query.shape[-1]))
        return computed(query, key, value)

    monkeypatch.setattr(torch.nn.functional, 'scaled_dot_product_attention', watch)
    side = recipe.data.resolution // 8
    build_network('tiny')(torch.randn(1, 4, side, side), torch.tensor([3]), torch.randn(1, 77, 32))
    assert seen == set(shapes(recipe))


def test_the_recipe_chooses_and_the_run_says_it(overrides, tmp_path):
    if not torch.cuda.is_available():
        with pytest.raises(RecipeError, match=r'train\.attention: cudnn (needs cuDNN|cannot compute) .*; set train\.attention=auto'):
            build_trainer(load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', [*overrides, 'train.attention=cudnn']))
    trainer = build_trainer(load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', [*overrides, 'train.attention=math']))
    trainer.fit()
    trainer.close()
    environment = read_json(tmp_path / 'run/environment.json')
    assert environment['attention'] == 'math'
    assert environment['micro_batch'] == 4
