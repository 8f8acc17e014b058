"""Faults that a look at outputs alone, at one mode, or at the summed gradient does not see."""

import torch
from torch import nn

from tests.proof import planted as P
from tests.proof.test_faults import samples
from truebatch.proof.verification import verify


def language(model=None):
    torch.manual_seed(0)
    return P.LanguageModel() if model is None else model()


def asked(model, objective=None, data=None, **given):
    return verify(model, objective or P.NextToken(), data or samples(), P.FIELDS, **given)


# --- gradients --------------------------------------------------------------------------------------------------------


def over(report, part="gradient"):
    return [d for r in report.broken for d in r.differences if d.part == part and d.is_over]


def test_a_clip_in_a_hook_on_the_accumulated_gradient_is_seen():
    model = language()

    def clip(parameter):
        parameter.grad.clamp_(-1e-3, 1e-3)

    model.layers[0].mlp.weight.register_post_accumulate_grad_hook(clip)
    assert over(asked(model))


def test_a_normalisation_in_backward_of_every_micro_batch_is_seen():
    class Normalised(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad / (grad.norm() + 1e-12)

    class Model(P.LanguageModel):
        def hidden(self, batch):
            return Normalised.apply(super().hidden(batch))

    assert over(asked(language(Model)))


def test_a_gradient_hook_that_depends_on_the_number_of_rows_is_seen():
    model = language()
    rows = []
    model.register_forward_pre_hook(lambda _m, args: rows.append(len(args[0]["input_ids"])))
    model.head.weight.register_hook(lambda grad: grad * (1.28 if rows[-1] > 1 else 1.0))
    assert over(asked(model))


def test_a_small_parameter_whose_gradient_is_wrong_is_seen_beside_large_ones():
    class Model(P.LanguageModel):
        def __init__(self):
            super().__init__()
            self.small = nn.Parameter(torch.ones(16))

        def hidden(self, batch):
            x = super().hidden(batch)
            factor = 1.5 if len(batch["input_ids"]) > 1 else 1.0
            return x + 1e-6 * factor * (self.small - self.small.detach())

    found = over(asked(language(Model)))
    assert found
    assert "small by itself" in found[0].where


def test_a_parameter_whose_gradient_is_nothing_but_rounding_raises_no_alarm():
    """Softmax takes no notice of the bias of keys: its gradient is 0, but for rounding."""
    report = asked(language())
    assert report.ok, str(report)


def test_nothing_is_left_in_grad_and_what_was_there_comes_back():
    model = language()
    model.head.weight.grad = torch.full_like(model.head.weight, 3.0)
    outside = torch.ones(16, requires_grad=True)

    class Scaled(P.NextToken):
        def sums(self, model, batch):
            return {k: v * outside.mean() for k, v in super().sums(model, batch).items()}

    asked(model, Scaled())
    assert torch.equal(model.head.weight.grad, torch.full_like(model.head.weight, 3.0))
    assert model.head.bias.grad is None
    assert outside.grad is None


def test_dropout_keyed_by_sample_is_the_same_where_layers_are_run_again():
    from torch.utils.checkpoint import checkpoint

    from truebatch.tensors.noise import KeyedDropout

    class Model(P.LanguageModel):
        def __init__(self):
            super().__init__()
            self.off = KeyedDropout(0.3)

        def hidden(self, batch):
            return checkpoint(lambda x: self.off(x), super().hidden(batch), use_reentrant=False)

    report = asked(language(Model).train())
    assert report.ok, str(report)
    assert report.mode == "train"
