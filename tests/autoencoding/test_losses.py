"""Losses against closed forms, the adaptive weight against gradients by hand, and one backward pass against two players' own."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Normal, kl_divergence

from diffusion.autoencoding.losses import MAX_ADAPTIVE_WEIGHT, adaptive_weight, discriminator_loss, generator_loss, kl_per_pixel_value, with_gradient
from diffusion.autoencoding.model import AutoencoderTraining
from diffusion.autoencoding.networks import PatchDiscriminator, build_autoencoder, init_output_scale, last_layer
from diffusion.datasets.keyed_random import Draw, normal
from diffusion.evaluation.features.lpips import RandomConvDistance
from diffusion.recipe.autoencoder import Adversarial, AutoencoderSettings, Perceptual
from tests.training.host_syncs import HostSyncs

SIDE = 32


def batch_of(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, 3, SIDE, SIDE), dtype=torch.uint8, generator=generator)
    return {'images': images, 'sample_key': torch.tensor([[0, i, 0] for i in range(count)])}


def settings(**changes):
    return AutoencoderSettings('tiny', **{'l1': 1.0, 'l2': 0.5, 'kl': 0.01, 'perceptual': Perceptual(0.7, 'lpips@random-conv'), **changes})


def model_of(adversarial=None, **changes):
    torch.manual_seed(0)
    wanted = settings(adversarial=adversarial, **changes)
    return AutoencoderTraining(build_autoencoder('tiny'), RandomConvDistance() if wanted.perceptual else None, wanted, seed=17)


def test_the_divergence_is_that_of_normal_distributions_over_the_pixel_values():
    mean, log_variance = torch.randn(3, 4, 2, 2, dtype=torch.float64), torch.randn(3, 4, 2, 2, dtype=torch.float64)
    reference = kl_divergence(Normal(mean, torch.exp(0.5 * log_variance)), Normal(0.0, 1.0)).sum(dim=(1, 2, 3)) / 48
    torch.testing.assert_close(kl_per_pixel_value(mean, log_variance, 48), reference)


def test_the_convention_of_the_divergence_is_that_of_latent_diffusion():
    """Its loss: (sum of errors + weight x sum of divergences) / batch; ours is that over the pixel values of an image."""
    error, mean, log_variance = torch.rand(5, 3, 8, 8), torch.randn(5, 4, 1, 1), torch.randn(5, 4, 1, 1)
    theirs = (error.sum() + 1e-6 * 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum()) / 5
    ours = error.mean() + 1e-6 * kl_per_pixel_value(mean, log_variance, 3 * 8 * 8).mean()
    torch.testing.assert_close(ours, theirs / (3 * 8 * 8))


def test_both_players_losses_are_cross_entropies():
    real, fake = torch.randn(4, 1, 2, 2, dtype=torch.float64), torch.randn(4, 1, 2, 2, dtype=torch.float64)
    ones, zeros = torch.ones_like(real), torch.zeros_like(fake)
    reference = (F.binary_cross_entropy_with_logits(real, ones) + F.binary_cross_entropy_with_logits(fake, zeros)) / 2
    torch.testing.assert_close(discriminator_loss(real, fake), reference)
    torch.testing.assert_close(generator_loss(fake), F.binary_cross_entropy_with_logits(fake, ones))
    assert float(discriminator_loss(zeros, zeros)) == pytest.approx(math.log(2))


def test_the_adaptive_weight_is_the_ratio_of_gradients_at_the_last_layer():
    layer, inputs = torch.nn.Conv2d(4, 3, 3, padding=1).double(), torch.randn(2, 4, 8, 8, dtype=torch.float64)
    losses = [lambda x: (x - 1).abs().mean(), lambda x: x.sin().mean()]
    lengths = [torch.autograd.grad(loss(layer(inputs)), layer.weight)[0].norm() for loss in losses]
    output = layer(inputs)
    leaf = output.detach().requires_grad_()
    gradients = [torch.autograd.grad(loss(leaf), leaf)[0] for loss in losses]
    weight = adaptive_weight(output, layer.weight, *gradients)
    torch.testing.assert_close(weight, (lengths[0] / (lengths[1] + 1e-4)).float())
    assert not weight.requires_grad
    assert adaptive_weight(output, layer.weight, gradients[0], torch.zeros_like(output)) == MAX_ADAPTIVE_WEIGHT or lengths[0] < 1


def test_the_adaptive_weight_is_bounded():
    layer = torch.nn.Conv2d(1, 1, 1)
    output = layer(torch.ones(1, 1, 4, 4))
    assert adaptive_weight(output, layer.weight, torch.full_like(output, 1e3), torch.zeros_like(output)) == MAX_ADAPTIVE_WEIGHT


def test_a_loss_with_a_known_gradient_has_that_and_its_value():
    x = torch.randn(3, 2, requires_grad=True)
    gradient = torch.randn(3, 2)
    loss = with_gradient(2 * x, gradient, torch.tensor(5.0))
    (3 * loss).backward()
    assert loss.item() == 5
    torch.testing.assert_close(x.grad, 6 * gradient)


def reference_losses(model, batch):
    """Both players' losses as two programs would write them, of float64 copies; the discriminator's own weights and its opponent's apart."""
    wanted, network, discriminator = model.settings, model.network.double(), model.discriminator and model.discriminator.double()
    pixels = batch['images'].double() / 127.5 - 1
    posterior = network.encode(pixels).latent_dist
    noise = normal(17, batch['sample_key'], Draw.POSTERIOR, tuple(posterior.mean.shape[1:])).double()
    output = network.decode(posterior.mean + posterior.std * noise).sample
    of_pixels = wanted.l1 * (output - pixels).abs().mean() + wanted.l2 * (output - pixels).square().mean()
    if wanted.perceptual is not None:
        of_pixels = of_pixels + wanted.perceptual.weight * model.perceptual.double()(output, pixels).mean()
    total = of_pixels + wanted.kl * posterior.kl().sum() / pixels.numel()
    if discriminator is None:
        return total, None
    adversarial = F.softplus(-discriminator(output)).mean()
    first, second = (torch.autograd.grad(each, last_layer(network), retain_graph=True)[0].norm() for each in (of_pixels, adversarial))
    weight = (first / (second + 1e-4)).clamp(max=1e4).detach()
    own = 0.5 * (F.softplus(-discriminator(pixels)).mean() + F.softplus(discriminator(output.detach())).mean())
    return total + wanted.adversarial.weight * weight * adversarial, own


@pytest.mark.parametrize('adversarial', [None, Adversarial(weight=0.8, filters=8, layers=2)])
def test_one_backward_pass_gives_each_player_the_gradients_of_its_own_loss(adversarial):
    batch = batch_of(4)
    model = model_of(adversarial)
    model.loss(model(batch), batch).backward()
    ours = {name: weight.grad for name, weight in model.named_parameters()}
    reference = model_of(adversarial)
    autoencoder, discriminator = reference_losses(reference, batch)
    for prefix, loss in (('network.', autoencoder), ('discriminator.', discriminator)):
        named = {name: weight for name, weight in reference.named_parameters() if name.startswith(prefix)}
        if loss is None:
            assert not named
            continue
        theirs = torch.autograd.grad(loss, list(named.values()), retain_graph=True)
        for name, gradient in zip(named, theirs, strict=True):
            torch.testing.assert_close(ours[name].double(), gradient, rtol=2e-3, atol=2e-5 * float(gradient.abs().max() + 1e-3))


def test_the_value_is_what_both_players_losses_add_up_to():
    batch, model = batch_of(4), model_of(Adversarial(weight=0.8, filters=8, layers=2))
    value = float(model.loss(model(batch), batch))
    parts = {name: float(part) for name, part in model.parts.items()}
    autoencoder, discriminator = reference_losses(model, batch)
    assert value == pytest.approx(float(autoencoder + discriminator), rel=1e-4)
    expected = parts['l1'] + 0.5 * parts['l2'] + 0.7 * parts['perceptual'] + 0.01 * parts['kl'] + parts['discriminator']
    assert value == pytest.approx(expected + 0.8 * parts['adaptive_weight'] * parts['generator'], rel=1e-5)


def test_micro_batches_of_losses_without_a_discriminator_add_up():
    batch, model = batch_of(4), model_of()
    model.loss(model(batch), batch).backward()
    whole = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    for part in ({name: tensor[:1] for name, tensor in batch.items()}, {name: tensor[1:] for name, tensor in batch.items()}):
        (model.loss(model(part), part) * len(part['sample_key']) / 4).backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, whole[name], rtol=1e-4, atol=1e-6)


def test_before_its_start_the_discriminator_gets_zeros_and_changes_nothing():
    batch, adversarial = batch_of(2), Adversarial(filters=8, layers=2)
    model, without = model_of(adversarial), model_of()
    model.discriminates = False
    loss = model.loss(model(batch), batch)
    loss.backward()
    reference = without.loss(without(batch), batch)
    reference.backward()
    assert float(loss) == float(reference)
    assert all(torch.equal(weight.grad, torch.zeros_like(weight)) for weight in model.discriminator.parameters())
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.network.parameters(), without.network.parameters(), strict=True))
    assert 'generator' not in model.parts


def test_the_host_waits_for_nothing():
    batch, model = batch_of(2), model_of(Adversarial(filters=8, layers=2))
    with HostSyncs() as syncs:
        model.loss(model(batch), batch).backward()
    assert syncs.count == 0


def test_the_discriminator_judges_patches_of_70_pixels_and_begins_undecided():
    torch.manual_seed(0)
    discriminator = PatchDiscriminator()
    assert sum(weight.numel() for weight in discriminator.parameters()) == 2_765_633
    pixels = torch.randn(1, 3, 256, 256)
    logits = discriminator(pixels)
    assert logits.shape == (1, 1, 30, 30)
    assert logits.abs().max() < 0.5
    # What one logit sees of an image, apart from the norms, which see all of it.
    plain = torch.nn.Sequential(*[layer for layer in discriminator.layers if isinstance(layer, torch.nn.Conv2d)])
    pixels.requires_grad_()
    plain(pixels)[0, 0, 15, 15].backward()
    seen = pixels.grad[0].abs().sum(0).nonzero()
    assert (seen.max(0).values - seen.min(0).values + 1).tolist() == [70, 70]


def test_an_images_judgement_does_not_depend_on_its_batch():
    discriminator, pixels = PatchDiscriminator(16, 2), torch.randn(3, 3, 32, 32)
    torch.testing.assert_close(discriminator(pixels)[1:2], discriminator(pixels[1:2]))


def test_an_eased_start_begins_with_an_almost_certain_posterior_and_passes_residual_branches_by():
    torch.manual_seed(0)
    network = build_autoencoder('tiny')
    init_output_scale(network)
    posterior = network.encode(torch.rand(2, 3, 32, 32) * 2 - 1).latent_dist
    assert posterior.std.max() < 0.03
    assert network.decoder.mid_block.resnets[0].conv2.weight.count_nonzero() == 0
