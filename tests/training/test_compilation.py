"""Dynamo and AOTAutograd trace as for the real thing; only the generation of C++ is left out, which takes minutes."""

import pytest
import torch
from composer.utils import dist, get_device
from torch._dynamo.utils import counters

from data_prep.converting.buckets import AspectBuckets
from diffusion.checkpoints.reading import find_checkpoint, read_checkpoint, training_weights
from diffusion.contracts.errors import BAD_RECIPE, train_code
from diffusion.families.registry import build_network
from diffusion.families.sd2 import StableDiffusion2
from diffusion.finetuning.prepare import prepare_streams
from diffusion.recipe import RecipeError, load_recipe
from diffusion.training import machine as compilation
from diffusion.training.builder import build_trainer, fit
from tests.conftest import REPOSITORY

BLOCKS = StableDiffusion2.blocks


@pytest.fixture(autouse=True)
def traced(monkeypatch):
    monkeypatch.setattr(compilation, 'BACKEND', 'aot_eager')
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def test_blocks_that_match_nothing_are_an_error():
    class Network(torch.nn.Module):
        is_gradient_checkpointing = False

    with pytest.raises(
        RecipeError, match='train.compile: blocks compiles nothing: Network has no ResnetBlock2D, .*; set train.compile=network or null'
    ):
        compilation.compile_network(Network(), 'blocks', BLOCKS)


def train(overrides, tmp_path, name, *more):
    recipe = load_recipe(REPOSITORY / 'yamls/shapes.yaml', [*overrides, 'optimizer.eps=1e-5', *more, f'run_folder={tmp_path}/{name}'])
    trainer = build_trainer(recipe)
    trainer.fit()
    trainer.close()
    return training_weights(read_checkpoint(find_checkpoint(tmp_path / name)))


@pytest.mark.parametrize(
    ('mode', 'more'),
    [
        pytest.param('network', ['model.network=shapes'], marks=pytest.mark.long),
        pytest.param('blocks', [], marks=pytest.mark.long),
        pytest.param('network', ['train.checkpoint_activations=true'], marks=pytest.mark.long),
        ('blocks', ['train.sharding=zero2']),
    ],
)
def test_shapes_trains_without_a_graph_break_to_the_same_weights(mode, more, overrides, encoders_folder, tmp_path):
    sampling = ['log.samples.every=2ba', 'log.samples.steps=2', 'train.duration=3ba', 'batch.micro_size=4']
    if more == ['model.network=shapes']:
        from diffusion.encoders.random_encoders import write_stand_in

        write_stand_in(tmp_path / 'encoders', 'shapes')
        more = [*more, f'model.encoders.source={tmp_path}/encoders']
    eager = train(overrides, tmp_path, 'eager', *sampling, *more)
    counters.clear()
    compiled = train(overrides, tmp_path, 'compiled', *sampling, *more, f'train.compile={mode}')
    assert not counters['graph_break']
    assert counters['stats']['unique_graphs'] >= 3  # the U-Net, the noising, the text encoder
    assert eager.keys() == compiled.keys()  # names stay
    for name, weight in eager.items():
        torch.testing.assert_close(compiled[name], weight, rtol=0, atol=1e-5)


def test_images_and_evaluation_compile_nothing():
    unet = build_network('tiny')
    compilation.compile_network(unet, 'network', BLOCKS)
    with compilation.eager(), torch.no_grad():
        for batch_size in (1, 2, 3):
            unet(torch.randn(batch_size, 4, 8, 8), torch.zeros(batch_size, dtype=torch.long), torch.randn(batch_size, 5, 32))
    assert not counters['stats']


def test_a_graph_break_is_an_error():
    @compilation.compiled
    def breaks(x):
        print(x.sum().item())
        return x

    with pytest.raises(torch._dynamo.exc.Unsupported):
        breaks(torch.ones(3))


def test_a_compiler_that_fails_names_the_remedy(overrides, tmp_path, monkeypatch):
    def fails(graph, inputs):
        if len(graph.graph.nodes) < 10:  # what is compiled to try the compiler
            return graph
        raise AssertionError('((4, 8, 8, 64), (4, 64, 8, 8))')

    monkeypatch.setattr(compilation, 'BACKEND', fails)
    recipe = load_recipe(REPOSITORY / 'yamls/shapes.yaml', [*overrides, 'train.compile=network'])
    trainer = build_trainer(recipe)
    with pytest.raises(RecipeError) as refused:
        fit(trainer, recipe)
    assert train_code(refused.value) == BAD_RECIPE
    said = str(refused.value)
    assert 'train.compile: network does not compile on this machine' in said
    assert '((4, 8, 8, 64), (4, 64, 8, 8))' in said
    assert 'set train.compile=null' in said
    assert len(said.splitlines()) == 2
    assert 'Traceback' in (tmp_path / 'run/compile-error.txt').read_text()


def test_a_machine_without_a_compiler_is_refused_before_photos_are_prepared(overrides, tmp_path, monkeypatch, capsys):
    def fails(graph, inputs):
        raise RuntimeError('No working C++ compiler found')

    monkeypatch.setattr(compilation, 'BACKEND', fails)
    photos = 'data.streams={own: {photos: {folder: nowhere}, local: null, remote: null}}'
    recipe = load_recipe(REPOSITORY / 'yamls/shapes.yaml', [*overrides, 'train.compile=network', 'data.kind=latents', photos])
    with pytest.raises(RecipeError, match='network does not compile on this machine: .*No working C.. compiler found; set train.compile=null'):
        prepare_streams(recipe)
    assert 'Traceback' in (tmp_path / 'run/compile-error.txt').read_text()
    announced = 'train.compile=network: the first step compiles the network, 2 minutes'  # as this machine has no GPU
    assert (announced in capsys.readouterr().err) == (not torch.cuda.is_available())


def test_each_block_of_each_bucket_may_be_compiled():
    """After Dynamo's own limit of eight shapes the rest would run uncompiled; with full graphs it is an error."""
    compilation.compile_network(build_network('tiny'), 'blocks', BLOCKS)
    num_shapes = 14  # of SD2's residual blocks
    assert torch._dynamo.config.recompile_limit >= num_shapes * len(AspectBuckets(1024).sizes())


@pytest.mark.parametrize(
    ('mode', 'checkpointed'),
    [
        ('network', True),
        ('blocks', False),
        pytest.param('network', False, marks=pytest.mark.long),
        pytest.param('blocks', True, marks=pytest.mark.long),
    ],
)
def test_under_ddp_with_several_buckets(mode, checkpointed, monkeypatch):
    """DDPOptimizer, which is at work in one process too, cuts graphs by buckets and cannot cut checkpointed ones."""
    dist.initialize_dist(get_device('cpu'))
    monkeypatch.setattr(torch.distributed, '_DEFAULT_FIRST_BUCKET_BYTES', 10_000)
    torch.manual_seed(0)
    unet = build_network('tiny').train()
    if checkpointed:
        StableDiffusion2().checkpoint_activations(unet)
    inputs = torch.randn(2, 4, 8, 8), torch.arange(2), torch.randn(2, 7, 32)
    unet(*inputs).sample.square().mean().backward()
    expected = [parameter.grad.clone() for parameter in unet.parameters()]
    unet.zero_grad()
    compilation.compile_network(unet, mode, BLOCKS)
    wrapped = torch.nn.parallel.DistributedDataParallel(unet, bucket_cap_mb=0.02)
    for _ in range(2):  # DDP arranges its buckets anew after the first
        unet.zero_grad()
        wrapped(*inputs).sample.square().mean().backward()
    for parameter, gradient in zip(unet.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
