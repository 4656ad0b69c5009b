import numpy as np
import pytest
import torch
from composer.core.data_spec import _default_split_batch as split_batch
from diffusers import DDPMScheduler

from diffusion.datasets.keyed_random import Draw, integers, normal
from diffusion.families.registry import build_network, training_flops
from diffusion.objectives.diffusion import Diffusion as Objective
from diffusion.recipe.schema import DiffusionSettings, Model, Schedule
from diffusion.training.model import LossAtTimes, Outputs, TextToImage

OBJECTIVE = Objective(DiffusionSettings())


@pytest.fixture
def batch(encoders):
    generator = torch.Generator().manual_seed(0)
    return {
        'moments': torch.randn(4, 8, 8, 8, generator=generator).half(),
        'tokens': encoders.text.tokenize(['a red circle', 'a blue square', '', 'on a white background']),
        'sample_key': torch.tensor([[0, 3, 0], [0, 11, 0], [0, 12, 0], [0, 29, 0]]),
    }


def build(encoders, seed=17, **model):
    torch.manual_seed(0)
    timesteps = model.pop('timesteps', 'uniform')
    return TextToImage(build_network('tiny'), encoders, Model('tiny', timesteps=timesteps, diffusion=DiffusionSettings(**model)), seed)


def test_the_loss_is_diffusers_loss_for_the_same_noise_and_timesteps(encoders, batch):
    model = build(encoders)
    loss = model.loss(model(batch), batch)

    key = batch['sample_key']
    noise, t = normal(17, key, Draw.NOISE, (4, 8, 8)), integers(17, key, Draw.TIMESTEP, 1000)
    mean, log_variance = batch['moments'].float().chunk(2, dim=1)
    latents = (mean + (0.5 * log_variance).exp() * normal(17, key, Draw.POSTERIOR, (4, 8, 8))) * encoders.vae.scaling_factor
    scheduler = DDPMScheduler(beta_schedule='scaled_linear', beta_start=0.00085, beta_end=0.012)
    text = encoders.text.parts['text_encoder'].module(batch['tokens']['text_encoder']).last_hidden_state
    with torch.no_grad():
        expected = torch.nn.functional.mse_loss(model.network(scheduler.add_noise(latents, noise, t), t, text).sample, noise)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


def test_the_loss_of_a_sample_is_multiplied_by_the_weight_of_its_stream(encoders, batch):
    model = build(encoders, min_snr_gamma=5.0)
    outputs, weights = model(batch), torch.tensor([1.0, 0.5, 3.0, 0.5])
    errors = [model.loss(Outputs(*(part if part is None else part[i : i + 1] for part in outputs)), {}) for i in range(4)]
    expected = (errors[0] + 0.5 * errors[1] + 3 * errors[2] + 0.5 * errors[3]) / 4
    torch.testing.assert_close(model.loss(outputs, {**batch, 'loss_weight': weights}), expected)
    parts = split_batch({**batch, 'loss_weight': weights}, 1)  # as many micro-batches, of one sample each
    torch.testing.assert_close(sum(model.loss(model(part), part) for part in parts) / 4, expected)


def test_micro_batches_share_the_loss_of_a_masked_batch(encoders, batch):
    model, loss_map = build(encoders), torch.rand(batch['moments'][:, 0].shape).half()
    whole = {**batch, 'loss_map': loss_map}
    outputs = model(whole)
    squared = (outputs.prediction.double() - outputs.target.double()).square() * loss_map[:, None].double()
    torch.testing.assert_close(model.loss(outputs, whole).double(), squared.mean(), rtol=1e-5, atol=0)
    torch.testing.assert_close(sum(model.loss(model(part), part) for part in split_batch(whole, 2)) / 2, model.loss(outputs, whole))


def test_images_and_latents_give_the_same_loss(encoders, batch):
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    online = {'images': images, **{k: batch[k] for k in ('tokens', 'sample_key')}}
    precomputed = {'moments': encoders.vae.encode(images), **{k: batch[k] for k in ('tokens', 'sample_key')}}
    model = build(encoders)
    torch.testing.assert_close(model.loss(model(online), online), model.loss(model(precomputed), precomputed))


def test_micro_batches_see_the_noise_of_the_whole_batch(encoders, batch):
    model = build(encoders)
    whole = model(batch)
    for i in range(4):
        part = model(split_batch(batch, 1)[i])
        torch.testing.assert_close(part.prediction, whole.prediction[i : i + 1], rtol=1e-4, atol=1e-5)
        assert part.t == whole.t[i]


def test_seed_and_epoch_change_noise_and_timesteps(encoders, batch):
    first = build(encoders)(batch)
    assert not torch.equal(build(encoders, seed=0)(batch).t, first.t)
    later = {**batch, 'sample_key': batch['sample_key'] + torch.tensor([1, 0, 0])}
    assert not torch.equal(build(encoders)(later).t, first.t)


def test_timesteps_of_the_batch_are_used(encoders, batch):
    timesteps = torch.tensor([999, 0, 5, 500])
    for kind in ('uniform', 'sobol'):
        assert torch.equal(build(encoders, timesteps=kind)({**batch, 'timesteps': timesteps}).t, timesteps)
    with pytest.raises(KeyError, match='timesteps'):  # rather than a uniform draw that nobody asked for
        build(encoders, timesteps='sobol')(batch)


def test_pure_noise_is_trained_with_min_snr(encoders, batch):
    network = build(encoders, prediction='v_prediction', schedule=Schedule(zero_terminal_snr=True), min_snr_gamma=5.0)
    pure_noise = {**batch, 'timesteps': torch.full((4,), 999)}
    assert network.loss(network(pure_noise), pure_noise) > 0


def test_only_the_unet_is_trained_and_saved(encoders):
    model = build(encoders)
    assert {name.split('.')[0] for name, _ in model.named_parameters()} == {'network'}
    assert {name.split('.')[0] for name in model.state_dict()} == {'network'}
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in model.network.parameters())


def test_two_evaluations_agree_to_the_bit_and_by_bin(encoders, batch):
    model = build(encoders).eval()

    def evaluate(epoch):
        metrics = model.get_metrics(is_train=False)
        with torch.no_grad():
            shifted = {**batch, 'sample_key': batch['sample_key'] + torch.tensor([epoch, 0, epoch])}
            outputs = model.eval_forward(shifted)
            for metric in metrics.values():
                model.update_metric(shifted, outputs, metric)
        return outputs, {name: metric.compute() for name, metric in metrics.items()}

    outputs, first = evaluate(epoch=0)
    torch.manual_seed(99)
    _, second = evaluate(epoch=5)  # the epoch must not matter
    assert all(torch.equal(first[name].nan_to_num(), second[name].nan_to_num()) for name in first)
    ids = batch['sample_key'][:, 1]
    assert torch.equal(outputs.t, OBJECTIVE.evenly_spaced(10)[ids % 10])
    errors = (outputs.prediction - outputs.target).square().flatten(1).mean(1)
    torch.testing.assert_close(first['loss'], errors.mean())
    torch.testing.assert_close(first['loss_t300-399'], errors[0])  # id 3
    torch.testing.assert_close(first['loss_t900-999'], errors[3])  # id 29
    assert first['loss_t500-599'].isnan()  # no sample fell into it
    assert OBJECTIVE.evenly_spaced(10).tolist() == list(range(50, 1000, 100))


def test_a_sample_that_fills_up_a_batch_counts_once():
    metric = LossAtTimes(0, 1000)
    metric.update(torch.tensor([4, 2]), torch.tensor([1.0, 2.0]), torch.tensor([10, 20]))
    metric.update(torch.tensor([7, 2, 4]), torch.tensor([6.0, 2.0, 1.0]), torch.tensor([30, 20, 10]))
    assert metric.compute() == 3.0
    upper = LossAtTimes(20, 1000)
    upper.update(torch.tensor([4, 2, 2]), torch.tensor([1.0, 2.0, 2.0]), torch.tensor([10, 20, 20]))
    assert upper.compute() == 2.0


def test_flops_per_batch_counts_the_unet_alone(encoders, batch):
    model = build(encoders)
    per_image = training_flops('tiny', (8, 8), encoders.text.length)
    assert model.flops_per_batch(batch) == 4 * per_image
    images = {
        'images': torch.zeros(2, 3, 32, 32, dtype=torch.uint8),
        'tokens': {'text_encoder': batch['tokens']['text_encoder'][:2]},
        'sample_key': batch['sample_key'][:2],
    }
    assert model.flops_per_batch(images) == 2 * per_image
    wide = {**images, 'images': torch.zeros(2, 3, 32, 96, dtype=torch.uint8)}
    assert model.flops_per_batch(wide) == model.flops_per_batch({**wide, 'images': wide['images'].transpose(2, 3)}) > 2 * 3 * per_image
    moments = {'moments': torch.zeros(2, 8, 8, 24), 'tokens': wide['tokens'], 'sample_key': wide['sample_key']}
    assert model.flops_per_batch(moments) == model.flops_per_batch(wide)


def test_generate_depends_on_seed_and_position_alone(encoders):
    model = build(encoders).eval()
    arguments = {'resolution': 32, 'guidance': 2.0, 'steps': 3}
    both = model.generate(['a red circle', 'a blue square'], **arguments, seed=0)
    assert both.shape == (2, 3, 32, 32)
    assert both.dtype == torch.uint8
    torch.random.manual_seed(5)
    assert torch.equal(both, model.generate(['a red circle', 'a blue square'], **arguments, seed=0))
    assert not torch.equal(both, model.generate(['a red circle', 'a blue square'], **arguments, seed=1))


def test_the_unconditional_of_sampling_is_the_one_of_caption_dropout(encoders):
    """Both are the encoded empty caption; zeros, as an ancestor used when sampling, were never trained."""
    seen = []
    model = build(encoders).eval()
    model.denoise = lambda noisy, t, conditioning: (seen.append(conditioning.text), torch.zeros_like(noisy))[1]
    model.generate(['a red circle'], resolution=32, guidance=2.0, steps=1, seed=0)
    from diffusion.datasets.loader import Collate

    sample = {'moments': np.zeros((8, 8, 8), np.float16), 'captions': [('a red circle', 1.0)], 'sample_key': (0, 0, 0)}
    dropped = Collate(encoders.text.tokenize, seed=0, caption_dropout=1.0)([sample])
    torch.testing.assert_close(seen[0][:1], encoders.text.encode(dropped['tokens']).text)
    assert not torch.equal(seen[0][0], seen[0][1])


def test_a_unet_that_does_not_fit_the_text_encoder_is_refused(encoders):
    with pytest.raises(ValueError, match='expects text of width 64, the text encoder gives 32'):
        TextToImage(build_network('shapes'), encoders, Model('shapes', diffusion=DiffusionSettings()), seed=0)
