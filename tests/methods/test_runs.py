"""Whole runs with methods: the micro-batch and the number of processes change nothing, a resume continues to the bit, and the export is the network alone."""

import pytest
import torch
from diffusers import PRXPipeline

from diffusion.checkpoints.exporting import export
from diffusion.checkpoints.reading import find_checkpoint, read_checkpoint
from diffusion.recipe import RecipeError, load_recipe
from diffusion.training.builder import build_model, build_trainer
from diffusion.training.micro_batch import blank_batch
from tests.conftest import REPOSITORY, TINY
from tests.faults.children import ranks
from tests.methods.test_alignment import write_features

FLOW = ['model.network=tiny-prx', 'optimizer.eps=1e-5', 'optimizer.lr=1e-3', 'ema.half_life=1ba', 'train.duration=4ba']
OF_LATENTS = [
    'methods.routing={first_block: 0, last_block: 1}',
    'methods.contrastive.weight=0.1',
    'methods.uncertainty.num_cosines=4',
]  # fmt: skip
TOLERANCE = 2e-6  # as tests/training/test_sharding.py has it


def fit(overrides):
    recipe = load_recipe(REPOSITORY / 'yamls/shapes-flow.yaml', overrides)
    trainer = build_trainer(recipe)
    trainer.fit()
    trainer.close()


def state(folder):
    return read_checkpoint(find_checkpoint(folder))


def average_of(found):
    return dict(found['algorithms'])['EMA']['average']


def assert_equal(one, other, atol):
    one, other = state(one), state(other)
    pairs = [(one['model'], other['model']), (average_of(one), average_of(other))]
    for expected, found in pairs:
        assert expected.keys() == found.keys()
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=0, atol=atol, msg=lambda said, name=name: f'{name}: {said}')


@pytest.fixture(scope='module')
def of_latents(latents, encoders_folder):
    shared = [*TINY, f'model.encoders.source={encoders_folder}', 'data.kind=latents', f'data.streams.shapes.local={latents}']
    return [*shared, *FLOW, *OF_LATENTS]


@pytest.fixture(scope='module')
def of_images(images, encoders_folder, tmp_path_factory):
    features = tmp_path_factory.mktemp('features')
    write_features(features)
    shared = [*TINY, f'model.encoders.source={encoders_folder}', 'data.kind=images', f'data.streams.shapes.local={images}', 'data.flip=true']
    aligned = f'methods.alignment={{source: {features}, block: 1, width: 16}}'
    return [*shared, *FLOW, OF_LATENTS[0], OF_LATENTS[2], aligned]


@pytest.fixture(params=['of_latents', 'of_images'])
def methods(request):
    return request.getfixturevalue(request.param)


def test_neither_micro_batch_nor_processes_nor_sharding_change_the_run(methods, tmp_path):
    fit([*methods, f'run_folder={tmp_path}/one', 'batch.micro_size=8'])
    fit([*methods, f'run_folder={tmp_path}/micro', 'batch.micro_size=2'])
    runs = {'ddp': [], 'zero2': ['train.sharding=zero2', 'batch.micro_size=2']}
    for name, more in runs.items():
        assert ranks(fit, [([*methods, *more, f'run_folder={tmp_path}/{name}'],)] * 2, tmp_path) == ['None', 'None']
    for name in ('micro', *runs):
        assert_equal(tmp_path / 'one', tmp_path / name, TOLERANCE)
    fit([*methods, f'run_folder={tmp_path}/plain', 'methods={routing: null, contrastive: null, uncertainty: null, alignment: null}'])
    plain, with_methods = (state(tmp_path / name)['model'] for name in ('plain', 'one'))
    assert max((with_methods[name] - weight).abs().max() for name, weight in plain.items()) > 100 * TOLERANCE


def test_resumes_to_the_bit(methods, tmp_path):
    fit([*methods, f'run_folder={tmp_path}/once'])
    fit([*methods, f'run_folder={tmp_path}/twice', 'train.duration=2ba', 'optimizer.decay=constant'])
    fit([*methods, f'run_folder={tmp_path}/twice', 'optimizer.decay=constant'])
    fit([*methods, f'run_folder={tmp_path}/once-constant', 'optimizer.decay=constant'])
    assert_equal(tmp_path / 'once-constant', tmp_path / 'twice', 0)


def test_the_export_is_the_network_alone_and_plain_diffusers_opens_it(methods, tmp_path):
    fit([*methods, f'run_folder={tmp_path}/run'])
    export(tmp_path / 'run', tmp_path / 'export')
    average = average_of(state(tmp_path / 'run'))
    pipeline = PRXPipeline.from_pretrained(tmp_path / 'export')
    weights = pipeline.transformer.state_dict()
    assert {f'network.{name}' for name in weights} == {name for name in average if name.startswith('network.')} < average.keys()
    assert all(torch.equal(tensor, average[f'network.{name}']) for name, tensor in weights.items())
    image = pipeline(
        'a red circle', num_inference_steps=2, guidance_scale=1.0, height=32, width=32, skip_text_cleaning=True, use_resolution_binning=False
    )
    assert image.images[0].size == (32, 32)


def test_other_features_are_refused_on_resume(of_images, tmp_path):
    other = tmp_path / 'features'
    write_features(other)
    fit([*of_images, f'run_folder={tmp_path}/run', f'methods.alignment.source={other}', 'train.duration=2ba', 'optimizer.decay=constant'])
    torch.manual_seed(99)
    weights = write_features(other)
    with torch.no_grad():
        weights.layernorm.weight.add_(1)
    weights.save_pretrained(other)
    with pytest.raises(Exception, match='alignment'):
        fit([*of_images, f'run_folder={tmp_path}/run', f'methods.alignment.source={other}', 'optimizer.decay=constant'])


def test_evaluation_and_drawing_do_not_see_methods(of_latents, tmp_path):
    recipes = [load_recipe(REPOSITORY / 'yamls/shapes-flow.yaml', [*of_latents, f'run_folder={tmp_path}/run', *more]) for more in ([], [
        'methods={routing: null, contrastive: null, uncertainty: null, alignment: null}'])]  # fmt: skip
    losses, drawn = [], []
    for recipe in recipes:
        model = build_model(recipe, torch.device('cpu'))
        batch = blank_batch(4, recipe, model)
        batch['moments'].normal_(generator=torch.Generator().manual_seed(0))
        batch['sample_key'][:, 1] = torch.arange(4)
        model.train()
        model.loss(model(batch), batch).backward()
        with torch.no_grad():
            losses.append(model.eval_forward(batch).prediction)
            drawn.append(model.generate(['a circle'], 32, 2.0, 2, 0))
    assert torch.equal(*losses)
    assert torch.equal(*drawn)


@pytest.mark.parametrize(
    ('overrides', 'said'),
    [
        (['methods.routing={first_block: 1, last_block: 0}'], 'methods.routing.last_block: 0 is before first_block, 1'),
        (['methods.alignment={source: ., block: 0}'], 'methods.alignment: looks at the images, and data.kind is latents; set data.kind=images'),
        (['methods.alignment={source: nowhere, block: 0}'], "methods.alignment.source: there is no folder 'nowhere'"),
        (['methods.alignment={source: a/b, block: 0}'], "methods.alignment.revision: 'None' does not pin a/b"),
        (
            ['methods.routing={first_block: 0, last_block: 1}', 'methods.alignment={source: ., block: 0}'],
            'methods.alignment.block: tokens are missing after block 0',
        ),
        (['methods.contrastive.weight=0.1', 'data.kind=images', 'data.streams.train.local=.'], 'methods.contrastive: takes latents of other samples'),
        (['methods.contrastive.weight=0.1', 'batch.global_size=1', 'batch.micro_size=1'], 'methods.contrastive: needs another sample in the batch'),
        (['methods.uncertainty.num_cosines=4', 'train.precision=bf16'], 'methods.uncertainty: bf16 would round the loss'),
    ],
)
def test_what_a_method_needs_is_said_before_anything_starts(overrides, said, request):
    plain = request.getfixturevalue('overrides')
    with pytest.raises(RecipeError) as error:
        load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', [*plain, *overrides])
    assert said in str(error.value)


def test_a_network_without_tokens_is_refused(overrides):
    recipe = load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', [*overrides, 'methods.routing={first_block: 0, last_block: 1}'])
    with pytest.raises(RecipeError, match=r'methods\.routing: works on the tokens of prx, and tiny is a network of sd2; set methods\.routing=null'):
        build_trainer(recipe)
