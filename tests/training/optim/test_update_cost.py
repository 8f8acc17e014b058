"""What makes an update fast changes nothing in it: fused kernels, and clipping that is left out."""

import pytest
import torch
from torch import nn

from truebatch import TrainConfig
from truebatch.training.optim.grad_clip import clip_group
from truebatch.training.optim.param_groups import Group, default_group

CPU = torch.device("cpu")


def model_of(*shapes):
    torch.manual_seed(0)
    return nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])


def give_gradients(model, step, *, turned=False):
    chance = torch.Generator().manual_seed(step)
    for p in model.parameters():
        grad = torch.randn(p.shape, generator=chance)
        p.grad = grad.t().contiguous().t() if turned and p.ndim == 2 else grad


@pytest.mark.parametrize("turned", [False, True], ids=["in order", "another order in memory"])
def test_fused_updates_are_the_ones_of_the_formula(turned):
    config = TrainConfig(learning_rate=0.1, weight_decay=0.01)
    ours, plain = model_of((5, 7), (3,), ()), model_of((5, 7), (3,), ())
    optimiser = default_group(ours, config).optimiser
    assert optimiser.param_groups[0]["fused"]
    reference = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.01, fused=False, foreach=False)
    for step in range(5):
        give_gradients(ours, step, turned=turned)
        give_gradients(plain, step)
        optimiser.step()
        reference.step()
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("largest", [1e-7, 0.5, 1.0, 1.00005, 3.0, 100.0])
@pytest.mark.parametrize("norm", [0.0, 5e-8, 0.4999, 0.99995, 1.0, 2.0])
def test_gradients_that_clipping_leaves_alone_have_the_same_bits(largest, norm):
    ours, plain = model_of((4, 3)), model_of((4, 3))
    for model in (ours, plain):
        give_gradients(model, 0)
        (p,) = model.parameters()
        p.grad *= norm / p.grad.norm()
    group = Group(optimiser=torch.optim.SGD(ours.parameters(), lr=1.0), max_grad_norm=largest)
    (mine,), (theirs,) = ours.parameters(), plain.parameters()
    clip_group(group, float(mine.grad.norm()), CPU)
    nn.utils.clip_grads_with_norm_([theirs], largest, theirs.grad.norm())
    assert torch.equal(mine.grad, theirs.grad)
