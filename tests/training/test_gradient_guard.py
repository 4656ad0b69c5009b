"""What the guard does about non-finite gradients is in tests/faults; here, that clipping inside AdamW is clipping."""

import pytest
import torch
from composer.core import State
from torch import nn

from diffusion.recipe.schema import Faults
from diffusion.training.gradient_guard import GradientGuard


class Kept:
    def log_metrics(self, metrics):
        self.metrics = metrics


def step_by_guard(parameter, optimizer, max_norm):
    """Returns the norm that is logged."""
    model = nn.ParameterList([parameter])
    state = State(model=model, rank_zero_seed=0, run_name='', device=None, optimizers=optimizer)
    state.loss = torch.zeros(())
    logged = Kept()
    GradientGuard(max_norm, 1, Faults()).guard(state, logged)
    optimizer.step()
    return logged.metrics['grad_norm']


@pytest.mark.parametrize('max_norm', [1.0, 0.05, None])
def test_steps_are_those_of_clipped_gradients(max_norm):
    """Against clip_grad_norm_ and AdamW in float64. A large eps, without which AdamW would not see the gradients' scale."""
    torch.manual_seed(0)
    options = {'lr': 0.1, 'eps': 1.0, 'weight_decay': 0.01}
    ours = nn.Parameter(torch.randn(64))
    exact = nn.Parameter(ours.detach().double())
    fused, plain = torch.optim.AdamW([ours], fused=True, **options), torch.optim.AdamW([exact], **options)
    for size in (10.0, 0.01, 3.0, 0.001):  # above the limit and below it
        gradient = size * torch.randn(64)
        ours.grad, exact.grad = gradient.clone(), gradient.double()
        norm = step_by_guard(ours, fused, max_norm)
        expected = nn.utils.clip_grad_norm_([exact], float('inf') if max_norm is None else max_norm)
        plain.step()
        torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(ours.double(), exact, rtol=1e-6, atol=1e-7)
