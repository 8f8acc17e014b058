"""A stay that a model is quite sure of has a loss and a gradient like any other."""

from __future__ import annotations

import pytest
import torch

from truebatch_systems.seqset_vae.config import LossConfig, ModelConfig
from truebatch_systems.seqset_vae.model.heads import GaussianHead
from truebatch_systems.seqset_vae.train.loss import class_loss


def test_a_set_that_is_sure_beyond_fp32_leaves_all_gradients_finite():
    torch.manual_seed(0)
    head = GaussianHead(ModelConfig(head="gaussian_mil"))
    with torch.no_grad():
        head.gate.bias.fill_(40.0)
        head.prior.fill_(200.0)
    states = torch.randn(2, 3, head.centres.shape[1], requires_grad=True)
    logits = head(states, torch.ones_like(states), torch.tensor([[True, True, False], [True, True, True]]))
    logits.sum().backward()
    assert bool(logits.isfinite().all())
    assert bool(states.grad.isfinite().all())
    assert all(bool(p.grad.isfinite().all()) for p in head.parameters() if p.grad is not None)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("margin", [0.0, 5.0, 30.0, 200.0])
def test_a_focal_loss_is_that_of_its_formula_and_has_a_finite_gradient_however_sure(gamma, margin):
    logits = torch.tensor([[0.0, margin]], requires_grad=True)
    config = LossConfig(classify="focal", focal_gamma=gamma)
    loss = class_loss(logits, torch.tensor([1]), config, ())
    loss.sum().backward()
    assert bool(logits.grad.isfinite().all())
    p = torch.softmax(torch.tensor([0.0, margin], dtype=torch.float64), 0)[1]
    expected = -config.focal_alpha * (1 - p) ** gamma * p.log()
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-4, abs=1e-7)
