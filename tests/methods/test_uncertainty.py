"""Learned loss weights, against the weights that are best in closed form."""

import math

import torch

from diffusion.methods.uncertainty import LearnedWeights
from diffusion.objectives.objective import Outputs
from diffusion.recipe.techniques import Uncertainty


def outputs_at(t):
    return Outputs(prediction=torch.zeros(1), target=torch.zeros(1), weight=None, t=t)


def test_begins_as_the_plain_loss():
    error, t = torch.rand(7), torch.rand(7)
    assert torch.equal(LearnedWeights(Uncertainty(), 1.0)(error, outputs_at(t), {}), error)


def test_the_loss_by_hand():
    method = LearnedWeights(Uncertainty(3), 1000)
    with torch.no_grad():
        method.log_error.weight.copy_(torch.tensor([[0.5, -1.0, 2.0]]))
    t, error = torch.tensor([0, 250, 999]), torch.tensor([0.1, 2.0, 3.0])
    expected = []
    for time, e in zip([0.0, 0.25, 0.999], [0.1, 2.0, 3.0], strict=True):
        u = 0.5 - math.cos(math.pi * time) + 2 * math.cos(2 * math.pi * time)
        expected.append(e / math.exp(u) + u)
    torch.testing.assert_close(method(error, outputs_at(t), {}), torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_learns_the_mean_error_of_each_time_so_that_all_weigh_alike():
    def true_error(t):
        return torch.exp(2 * torch.sin(5 * t) - 1)

    torch.manual_seed(0)
    method = LearnedWeights(Uncertainty(16), 1.0)
    optimizer = torch.optim.LBFGS(method.parameters(), max_iter=200)
    t = torch.rand(4000)
    error = true_error(t) * torch.distributions.Exponential(1.0).sample((4000,))  # whose mean is 1

    def step():
        optimizer.zero_grad()
        loss = method(error, outputs_at(t), {}).mean()
        loss.backward()
        return loss

    optimizer.step(step)
    at = torch.linspace(0.05, 0.95, 10)
    with torch.no_grad():
        learned = torch.exp(method.log_error(method.cosines(at))[:, 0])
    assert ((learned / true_error(at)).log().abs() < 0.25).all()  # 16 numbers fitted to 4000 draws of spread 1: about 0.06 each
