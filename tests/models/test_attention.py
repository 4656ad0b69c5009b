import pytest
import torch

from diffusion.models.attention import AttentionError, kernel_in_use, use_attention
from diffusion.models.unet import build_unet
from diffusion.recipe import RecipeError, load_recipe
from diffusion.training import build_trainer
from tests.conftest import REPOSITORY, read_json


@pytest.fixture(autouse=True)
def all_again():
    yield
    use_attention('auto')


def test_kernels_agree_and_the_one_named_is_used():
    torch.manual_seed(0)
    unet, noisy, text = build_unet('tiny'), torch.randn(2, 4, 8, 8), torch.randn(2, 7, 32)
    outputs = {}
    for name, op in (('flash', 'aten::_scaled_dot_product_flash_attention_for_cpu'), ('math', 'aten::_scaled_dot_product_attention_math')):
        use_attention(name)
        assert kernel_in_use('fp32') == name
        with torch.profiler.profile() as profile:
            outputs[name] = unet(noisy, torch.tensor([3, 900]), text).sample
        assert op in {event.key for event in profile.key_averages()}
    torch.testing.assert_close(outputs['flash'], outputs['math'], rtol=1e-4, atol=1e-5)


def test_what_cannot_run_here_is_refused():
    with pytest.raises(AttentionError, match='xformers is not one of auto, cudnn, flash, efficient, math'):
        use_attention('xformers')
    use_attention('cudnn')
    if not torch.cuda.is_available():
        with pytest.raises(AttentionError, match='cannot compute attention in fp32'):
            kernel_in_use('fp32')


def test_the_recipe_chooses_and_the_run_says_it(overrides, tmp_path):
    if not torch.cuda.is_available():
        with pytest.raises(RecipeError, match=r'train\.attention: cudnn cannot compute .* set train\.attention=auto'):
            build_trainer(load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', [*overrides, 'train.attention=cudnn']))
    trainer = build_trainer(load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', [*overrides, 'train.attention=math']))
    trainer.fit()
    trainer.close()
    environment = read_json(tmp_path / 'run/environment.json')
    assert environment['attention'] == 'math'
    assert environment['micro_batch'] == 4
