"""Adapters in training: what is trained, saved and resumed, on tiny networks; counts of the real ones."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from data_prep.encoding.dataset import encode
from diffusion.checkpoints.reading import find_checkpoint, read_checkpoint, weights_by_part
from diffusion.contracts.errors import CheckpointError, ManifestError
from diffusion.families.adapters import add_adapter, store_frozen_in_bf16
from diffusion.families.counting.counts import Counter
from diffusion.families.counting.tracing import as_on_a_gpu
from diffusion.families.registry import FAMILIES, build_network, training_flops
from diffusion.recipe import Recipe, RecipeError, load_recipe
from diffusion.recipe.schema import Adapter, EncoderSource
from diffusion.training import machine as compilation
from diffusion.training.builder import build_model, build_trainer
from tests.conftest import REPOSITORY, RESOLUTION, TINY, run_here
from tests.faults.children import fit, ranks

LORA = ['adapter.rank=4', 'adapter.alpha=8', 'optimizer.lr=1e-2', 'optimizer.weight_decay=1e-2', 'train.duration=4ba', 'checkpoint.every=2ba',
        'data.kind=synthetic', 'data.synthetic_samples=64',
        'model.diffusion.prediction=epsilon', 'model.diffusion.schedule.zero_terminal_snr=false']  # fmt: skip
WITH_TEXT = ['adapter.text_encoders=true', 'adapter.text_lr=1e-3', 'adapter.text_weight_decay=1e-1']


def load(base, folder, *more, of='shapes'):
    """A recipe that trains an adapter of `base` on synthetic data."""
    streams = {'shapes': ['data.streams.shapes=null']}.get(of, [])
    return load_recipe(REPOSITORY / f'yamls/{of}.yaml', [*TINY, *streams, f'model.encoders.source={base}', f'run_folder={folder}', *LORA, *more])


def train(base, folder, *more, of='shapes'):
    trainer = build_trainer(load(base, folder, *more, of=of))
    trainer.fit()
    trainer.close()
    return trainer


def state(folder, batch=4):
    return read_checkpoint(find_checkpoint(folder / f'checkpoints/ba{batch:08d}.pt'))


def largest_difference(one, other):
    assert one.keys() == other.keys()
    return max(float((tensor - other[name]).abs().max()) for name, tensor in one.items())


@pytest.fixture(scope='module')
def trained(base, tmp_path_factory):
    """A run with adapters on the network and the text encoder, its trainer included."""
    folder = tmp_path_factory.mktemp('adapted') / 'run'
    return folder, train(base, folder, *WITH_TEXT)


def continued(base, folder, where, *more):
    """The state of the same run, killed after its second batch and started again."""
    shutil.copytree(folder, where)
    for name in ('ba00000004.pt', 'ba00000004.json', 'latest.json'):
        (where / 'checkpoints' / name).unlink()
    train(base, where, *more)
    return state(where)


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(base, trained, tmp_path):
    folder, _ = trained
    once, twice = state(folder), continued(base, folder, tmp_path / 'run', *WITH_TEXT)
    for average in (False, True):
        one, other = (weights_by_part(each, 'unet', average) for each in (once, twice))
        assert one.keys() == other.keys() == {'unet', 'text_encoder'}
        assert all(torch.equal(tensor, other[part][name]) for part, named in one.items() for name, tensor in named.items())
    moments = [each['optimizers']['AdamW']['state'] for each in (once, twice)]
    assert all(torch.equal(moments[0][name]['exp_avg'], moments[1][name]['exp_avg']) for name in moments[0])
    for where, name in ((folder, 'once'), (tmp_path / 'run', 'twice')):
        run_here('diffusion.export', where, tmp_path / name)
    files = [(tmp_path / name / 'lora/pytorch_lora_weights.safetensors').read_bytes() for name in ('once', 'twice')]
    assert files[0] == files[1]


def test_adapters_alone_are_trained_and_saved(base, trained):
    folder, trainer = trained
    model, optimizer = trainer.state.model, trainer.state.optimizers[0]
    in_optimizer = {id(weight) for group in optimizer.param_groups for weight in group['params']}
    assert in_optimizer == {id(weight) for name, weight in model.named_parameters() if 'lora_' in name}
    assert [(group['initial_lr'], group['weight_decay']) for group in optimizer.param_groups] == [(1e-2, 1e-2), (1e-3, 1e-1)]
    saved = state(folder)
    names = {name for name, _ in model.named_parameters() if 'lora_' in name}
    assert saved['model'].keys() == saved['optimizers']['AdamW']['state'].keys() == dict(saved['algorithms'])['EMA']['average'].keys() == names
    assert all(float(tensor.abs().max()) > 0 for tensor in saved['model'].values())
    for part, module in (('unet', model.network), ('text_encoder', model.text_encoders['text_encoder'])):
        before = {name.removeprefix('text_model.'): tensor for name, tensor in load_file(next((base / part).glob('*.safetensors'))).items()}
        after = {name.replace('.base_layer', ''): tensor for name, tensor in module.state_dict().items() if 'lora_' not in name}
        assert before.keys() == after.keys()
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())  # frozen


def test_images_are_drawn_with_the_adapted_text_encoder(trained, base, tmp_path):
    model = trained[1].state.model.eval()
    plain = build_model(load(base, tmp_path / 'run'), torch.device('cpu'))
    plain.network = model.network  # with its adapter
    drawn, without = (each.generate(['a red circle'], 32, guidance=1.0, steps=2, seed=0).float() for each in (model, plain))
    assert (drawn - without).abs().max() >= 1  # 0 without the adapter of the text encoder
    assert not model.encoders.text.encode(model.encoders.text.tokenize(['a'])).text.is_inference()
    with torch.no_grad():
        assert not model.encoders.text.encode(model.encoders.text.tokenize(['a'])).text.requires_grad


def test_another_base_is_refused(base, trained, tmp_path):
    folder, _ = trained
    shutil.copytree(folder, tmp_path / 'run')
    shutil.copytree(base, tmp_path / 'other')
    file = tmp_path / 'other/unet/diffusion_pytorch_model.safetensors'
    weights = load_file(file)
    save_file({**weights, 'conv_in.bias': weights['conv_in.bias'] + 1}, file, metadata={'format': 'pt'})
    with pytest.raises(CheckpointError, match='unet: .* then, .* now; an adapter belongs to one network'):
        build_trainer(load(base, tmp_path / 'run', *WITH_TEXT, f'load_path={tmp_path}/other'))
    (tmp_path / 'other/unet/diffusion_pytorch_model.safetensors').unlink()
    with pytest.raises(CheckpointError, match='model.encoders.source: .*/other has no unet/diffusion_pytorch_model.safetensors'):
        build_trainer(load(tmp_path / 'other', tmp_path / 'new'))
    with pytest.raises(CheckpointError, match='holds an adapter, not a network; .* --merged'):
        build_trainer(load(base, tmp_path / 'new', f'load_path={folder}'))


def test_what_cannot_be_adapted_is_refused(base, encoders_folder, images, tmp_path):
    error = 'adapter.rank: 40 is above 16, the smaller side of .*to_q in UNet2DConditionModel; set at most that'
    with pytest.raises(RecipeError, match=error):
        build_trainer(load(base, tmp_path / 'run', 'adapter.rank=40'))
    encode(images, tmp_path / 'stored', [RESOLUTION], EncoderSource(str(encoders_folder)), network='tiny')
    stored = ['data.kind=latents', f'data.streams.shapes.local={tmp_path}/stored', 'data.streams.shapes.remote=null']
    with pytest.raises(ManifestError, match='text_encoder: the dataset stores encoded text, which text encoders that are trained would change'):
        build_trainer(load(base, tmp_path / 'run', *WITH_TEXT, *stored))
    with pytest.raises(
        CheckpointError, match="set to prediction_type epsilon.* trains with prediction_type v_prediction; set the recipe's objective"
    ):
        build_trainer(load(base, tmp_path / 'run', 'model.diffusion.prediction=v_prediction'))
    with pytest.raises(CheckpointError, match='is set to beta_schedule scaled_linear, and this run trains with beta_schedule linear; set'):
        build_trainer(load(base, tmp_path / 'run', 'model.diffusion.schedule.kind=linear'))


def example_batch(model):
    return {
        'moments': torch.randn(2, 8, 4, 4, generator=torch.Generator().manual_seed(0)).half(),
        'tokens': model.encoders.text.tokenize(['a red circle', 'a blue square']),
        'sample_key': torch.tensor([[0, 3, 0], [0, 11, 0]]),
    }


def gradients(base, folder, *more):
    model = build_model(load(base, folder, *WITH_TEXT, *more), torch.device('cpu')).train()
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if 'lora_B' in name:  # zero at the beginning, where A has no gradient
            weight.data = 0.1 * torch.randn(weight.shape, generator=generator)
    batch = example_batch(model)
    model.loss(model(batch), batch).backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}


def test_gradients_cross_checkpointed_blocks_of_a_frozen_base(base, tmp_path):
    plain, checkpointed = (gradients(base, tmp_path, *more) for more in ([], ['train.checkpoint_activations=true']))
    assert all(float(gradient.abs().max()) > 0 for gradient in plain.values())
    assert largest_difference(plain, checkpointed) < 1e-6


@pytest.mark.long
def test_compiled_blocks_train_and_resume_the_same(base, tmp_path, monkeypatch):
    monkeypatch.setattr(compilation, 'BACKEND', 'aot_eager')
    torch._dynamo.reset()
    compiled = [*WITH_TEXT, 'optimizer.eps=1e-5', 'train.compile=blocks']
    train(base, tmp_path / 'eager', *compiled, 'train.compile=null')
    train(base, tmp_path / 'run', *compiled)
    once, resumed = state(tmp_path / 'run')['model'], continued(base, tmp_path / 'run', tmp_path / 'resumed', *compiled)['model']
    torch._dynamo.reset()
    assert largest_difference(once, resumed) == 0
    assert largest_difference(once, state(tmp_path / 'eager')['model']) < 1e-4


def test_two_ranks_train_as_one(base, tmp_path):
    shared = [*TINY, f'model.encoders.source={base}', *LORA, *WITH_TEXT, 'optimizer.eps=1e-5', 'optimizer.betas=[0.9,0.999]']
    fit([*shared, f'run_folder={tmp_path}/one'])
    arguments = [([*shared, f'run_folder={tmp_path}/two'],)] * 2
    assert ranks(fit, arguments, tmp_path) == ['None', 'None']
    one, two = (state(tmp_path / name)['model'] for name in ('one', 'two'))
    assert largest_difference(one, two) < 2e-4


def test_a_base_in_bf16_leaves_the_adapter_in_float32():
    torch.manual_seed(0)
    network = build_network('tiny')
    adapter = Adapter(rank=4)
    add_adapter(network, adapter, FAMILIES['sd2'].adapter_targets['attention'], seed=1)
    exact = {name: weight.clone() for name, weight in network.named_parameters()}
    store_frozen_in_bf16(network)
    for name, weight in network.named_parameters():
        assert weight.dtype == (torch.float32 if 'lora_' in name else torch.bfloat16)
        assert weight.requires_grad == ('lora_' in name)
        assert torch.equal(weight, exact[name] if 'lora_' in name else exact[name].bfloat16())
    again = build_network('tiny')
    add_adapter(again, adapter, FAMILIES['sd2'].adapter_targets['attention'], seed=1)  # equal on all ranks, whatever was drawn before
    assert all(torch.equal(weight, exact[name]) for name, weight in again.named_parameters() if 'lora_' in name)


def test_a_step_in_bf16_has_gradients_in_float32(base, tmp_path):
    """What a GPU does with amp_bf16, by the CPU's autocast."""
    recipe = load(base, tmp_path, *WITH_TEXT)
    recipe.train.precision = 'amp_bf16'  # which a recipe cannot ask for without a GPU
    model = build_model(recipe, torch.device('cpu')).train()
    frozen = {weight.dtype for name, weight in model.named_parameters() if 'lora_' not in name}
    assert frozen == {torch.bfloat16}
    batch = example_batch(model)
    conditioning = model.encoders.text.encode(batch['tokens'])
    with as_on_a_gpu('amp_bf16'):
        model.denoise(batch['moments'].float()[:, :4], torch.tensor([10, 500]), conditioning).square().mean().backward()
    for name, weight in model.named_parameters():
        if 'lora_B' in name:
            assert weight.grad.dtype == torch.float32
            assert float(weight.grad.abs().max()) > 0


@pytest.mark.parametrize(
    ('network', 'adapter', 'expected'),
    [
        ('sd2-base', Adapter(rank=4), 829_952),
        ('sd2-base', Adapter(rank=16), 3_319_808),
        ('sd2-base', Adapter(rank=16, targets='attention+ff'), 6_914_048),
        ('sd2-base', Adapter(rank=4, text_encoders=True), 829_952 + 753_664),
        ('sdxl-base', Adapter(rank=4, text_encoders=True), 5_806_080 + 294_912 + 1_310_720),
    ],
)
def test_counts_of_the_real_networks(network, adapter, expected, monkeypatch):
    """Published counts (of diffusers' own script, on the meta device); of the U-Net 71 % of the FLOP of full training."""
    recipe = Recipe()
    recipe.model.network, recipe.data.resolution, recipe.adapter = network, 512, adapter
    recipe.model.encoders.source = '.'
    monkeypatch.setattr('diffusion.families.counting.tracing.training_flops', lambda *_: 0)
    assert Counter({}).counts(recipe, activations=False).trained_parameters == expected


def test_a_step_of_an_adapter_takes_70_percent_of_a_full_one():
    full, adapted = (training_flops('sd2-base', (64, 64), 77, adapter) for adapter in (None, Adapter(rank=4)))
    assert adapted / 1e12 == pytest.approx(1.715, abs=0.001)
    assert adapted / full == pytest.approx(0.71, abs=0.005)


def test_sdxl_trains_adapters_of_both_text_encoders(base_xl, tmp_path):
    changes = ['model.network=tiny-xl', 'train.sharding=ddp', *WITH_TEXT, 'ema.half_life=null', 'ema.offload=false']
    trainer = train(base_xl, tmp_path / 'run', *changes, of='sdxl-base-256')
    saved = weights_by_part(state(tmp_path / 'run'), 'unet', average=False)
    assert saved.keys() == {'unet', 'text_encoder', 'text_encoder_2'}
    layers = len(trainer.state.model.text_encoders['text_encoder'].encoder.layers)
    assert not [name for name in saved['text_encoder'] if f'layers.{layers - 1}.' in name]  # whose output nobody reads
    assert [name for name in saved['text_encoder'] if f'layers.{layers - 2}.' in name]
    assert all(float(tensor.abs().max()) > 0 for named in saved.values() for tensor in named.values())
