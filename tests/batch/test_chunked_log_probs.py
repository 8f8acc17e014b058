"""Log-probabilities in chunks are those of whole logits, and so are the gradients of any loss on them."""

import pytest
import torch

from truebatch.batch.chunked_cross_entropy import LogitRule
from truebatch.batch.chunked_log_probs import chunked_log_probs
from truebatch.errors import BatchError


def whole(hidden, weight, bias, labels, rule, temperature):
    logits = hidden @ weight.T
    logits = (logits if bias is None else logits + bias) * rule.scale
    logits = logits if rule.softcap is None else rule.softcap * torch.tanh(logits / rule.softcap)
    log_p = (logits / temperature).log_softmax(-1)
    return log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("rule", [LogitRule(), LogitRule(scale=0.7), LogitRule(softcap=2.0, scale=1.3)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("at_once", [13 * 2, 13 * 100])
def test_values_and_gradients_are_those_of_whole_logits(rule, temperature, has_bias, at_once):
    chance = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 6, generator=chance, dtype=torch.float64).requires_grad_() for n in (7, 13))
    bias = torch.randn(13, generator=chance, dtype=torch.float64).requires_grad_() if has_bias else None
    labels = torch.randint(13, (7,), generator=chance)
    found = chunked_log_probs(
        hidden, weight, labels, bias=bias, rule=rule, temperature=temperature, logits_at_once=at_once
    )
    wanted = whole(hidden, weight, bias, labels, rule, temperature)
    of = [part for part in (hidden, weight, bias) if part is not None]

    def loss(log_probs, entropy):
        return (log_probs.exp() * torch.arange(1.0, 8.0)).sum() + (entropy * log_probs).sum()

    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)
    for one, other in zip(torch.autograd.grad(loss(*found), of), torch.autograd.grad(loss(*wanted), of), strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


def test_half_precision_gives_numbers_in_fp32():
    hidden, weight = torch.randn(3, 4).bfloat16().requires_grad_(), torch.randn(5, 4).bfloat16()
    found = chunked_log_probs(hidden, weight, torch.tensor([0, 1, 2]))
    assert found.log_probs.dtype == torch.float32
    found.log_probs.sum().backward()
    assert hidden.grad.dtype == torch.bfloat16


def test_no_cells_are_no_numbers():
    weight = torch.randn(5, 4).requires_grad_()
    found = chunked_log_probs(torch.zeros(0, 4), weight, torch.zeros(0, dtype=torch.int64))
    found.log_probs.sum().backward()
    assert not weight.grad.any()


def test_a_cell_without_a_label_is_refused():
    with pytest.raises(BatchError, match="every cell needs a label"):
        chunked_log_probs(torch.zeros(2, 4), torch.zeros(5, 4), torch.tensor([1]))
