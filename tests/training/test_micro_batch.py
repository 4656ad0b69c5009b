import pytest
import torch

from diffusion.cost.facts import divisors
from diffusion.encoders.text import TextEncoders
from diffusion.families.registry import build_network
from diffusion.recipe import RecipeError, load_recipe
from diffusion.training import micro_batch
from diffusion.training.micro_batch import ballast_bytes, blank_batch, largest_fitting, micro_size
from diffusion.training.model import TextToImage
from tests.conftest import REPOSITORY


def load(overrides, *more):
    return load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', [*overrides, *more])


@pytest.mark.parametrize('limit', [0, 1, 5, 37, 64, 256, 1000])
def test_the_largest_is_found_in_few_tries(limit):
    tried = []
    found = largest_fitting(divisors(256), lambda size: tried.append(size) or size <= limit)
    assert found == max((size for size in divisors(256) if size <= limit), default=0)
    assert len(tried) <= 4  # of 9 divisors


def out_of_indices():
    return RuntimeError('cuDNN error: CUDNN_STATUS_NOT_SUPPORTED')  # an answer here, and no lack of memory in a row of a sweep


@pytest.mark.parametrize('too_large', [torch.cuda.OutOfMemoryError, out_of_indices])
def test_a_try_is_a_training_step_and_lack_of_memory_an_answer(too_large, overrides, encoders, monkeypatch):
    recipe = load(overrides)
    model = TextToImage(build_network('tiny'), encoders, recipe.model, recipe.seed)
    sizes = []

    def limited(batch, forward=model.forward):
        sizes.append(len(batch['moments']))
        if sizes[-1] > 4:
            raise too_large()
        return forward(batch)

    monkeypatch.setattr(model, 'forward', limited)
    assert largest_fitting(divisors(16), lambda size: micro_batch._fits(lambda count: blank_batch(count, recipe, model), size, recipe, model)) == 4
    assert all(parameter.grad is None for parameter in model.network.parameters())


@pytest.mark.parametrize(('kind', 'timesteps'), [('latents', 'sobol'), ('images', 'uniform')])
def test_the_batch_that_is_tried_is_one_that_trains(kind, timesteps, overrides, encoders, monkeypatch):
    recipe = load(overrides, f'data.kind={kind}', 'data.streams.train.local=/x', f'model.timesteps={timesteps}')
    model = TextToImage(build_network('tiny'), encoders, recipe.model, recipe.seed)
    batch = blank_batch(3, recipe, model)
    assert model(batch).prediction.shape == (3, 4, *[32 // encoders.vae.downsampling] * 2)
    assert ('images' in batch) == (kind == 'images')
    monkeypatch.delattr(TextEncoders, 'encode')  # a dataset with encoded captions: the text encoder takes no memory
    assert model(blank_batch(3, recipe, model, text_stored=True)).prediction.shape == (3, 4, *[32 // encoders.vae.downsampling] * 2)


@pytest.mark.parametrize(
    ('more', 'world_size', 'bytes_per_parameter'),
    [
        ([], 1, 12),  # Adam's moments and the average
        (['ema.half_life=null'], 1, 8),
        (['ema.offload=true'], 1, 8),
        (['train.precision=amp_bf16'], 8, 16),  # DDP's buckets
        (['train.precision=bf16'], 8, 12),  # FSDP2 reduces block by block
        (['train.sharding=zero2'], 8, 1.5),
        (['train.sharding=hsdp'], 16, 1.5),  # two nodes
    ],
)
def test_ballast(more, world_size, bytes_per_parameter, overrides, monkeypatch):
    monkeypatch.setattr(micro_batch.dist, 'get_world_size', lambda: world_size)
    monkeypatch.setattr(micro_batch.dist, 'get_local_world_size', lambda: min(world_size, 8))
    unet = build_network('tiny')
    count = sum(parameter.numel() for parameter in unet.parameters())
    assert ballast_bytes(load(overrides, *more), unet) == pytest.approx(bytes_per_parameter * count, abs=12)  # shards are whole


def test_auto_needs_a_gpu_and_a_number_is_taken_as_it_is(overrides, encoders):
    recipe = load(overrides, 'batch.micro_size=2')
    model = TextToImage(build_network('tiny'), encoders, recipe.model, recipe.seed)
    assert micro_size(recipe, model, lambda size: blank_batch(size, recipe, model)) == 2
    with pytest.raises(RecipeError, match='auto tries how much fits on a GPU, and this machine has none; set a number'):
        micro_size(load(overrides, 'batch.micro_size=auto'), model, None)
