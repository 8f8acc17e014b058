"""A loss made chunk by chunk is the loss of all logits, and so are its gradients."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional

from truebatch.batch import chunked_cross_entropy
from truebatch.batch.chunked_cross_entropy import LogitRule, chunked_nll
from truebatch.errors import BatchError
from truebatch.training.memory.measure import added_bytes

CPU = torch.device("cpu")

RULES = [
    LogitRule(), LogitRule(scale=0.3), LogitRule(softcap=2.0), LogitRule(scale=1.7, softcap=5.0), LogitRule(scale=-2.0),
    LogitRule(scale=0.0),
]  # fmt: skip


def make(cells, width=16, vocabulary=40, *, dtype=torch.float64, seed=0):
    chance = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        torch.randn(*shape, generator=chance, dtype=dtype).requires_grad_()
        for shape in ((cells, width), (vocabulary, width), (vocabulary,))
    )
    labels = torch.randint(0, vocabulary, (cells,), generator=chance)
    labels[torch.rand(cells, generator=chance) < 0.3] = -100
    return hidden, weight, bias, labels


def whole(hidden, weight, bias, labels, rule):
    logits = functional.linear(hidden, weight, bias) * rule.scale
    logits = logits if rule.softcap is None else rule.softcap * torch.tanh(logits / rule.softcap)
    return functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")


@pytest.mark.parametrize("rule", RULES, ids=str)
@given(cells=st.integers(1, 40), at_once=st.integers(1, 2000), seed=st.integers(0, 9))
@settings(deadline=None, max_examples=15)
def test_chunks_change_neither_loss_nor_gradient(rule, cells, at_once, seed):
    *parts, labels = make(cells, seed=seed)
    wanted = whole(*parts, labels, rule)
    found = chunked_nll(parts[0], parts[1], labels, bias=parts[2], rule=rule, logits_at_once=at_once)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    pairs = zip(torch.autograd.grad(found / 7, parts), torch.autograd.grad(wanted / 7, parts), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("is_wide", [False, True], ids=["as it is", "wider vocabulary"])
@pytest.mark.parametrize("rule", RULES, ids=str)
@given(cells=st.integers(0, 40), share=st.sampled_from([0.0, 0.1, 0.6, 0.95, 1.0]), seed=st.integers(0, 9))
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_only_cells_with_a_label_are_looked_at_and_nothing_else_changes(rule, is_wide, cells, share, seed, monkeypatch):
    monkeypatch.setattr(chunked_cross_entropy, "_is_worth_widening", lambda _weight: is_wide)
    *parts, labels = make(cells, vocabulary=43, seed=seed)
    labels[torch.rand(cells, generator=torch.Generator().manual_seed(seed)) >= share] = -100
    at = torch.nonzero(labels != -100)[:, 0]
    for bias in (parts[2], None):
        used = [part for part in (*parts[:2], bias) if part is not None]
        wanted = whole(*parts[:2], bias, labels, rule)
        found = chunked_nll(parts[0], parts[1], labels, cells=at, bias=bias, rule=rule, logits_at_once=200)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        pairs = zip(torch.autograd.grad(found / 7, used), torch.autograd.grad(wanted / 7, used), strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("share", [0.2, 0.95])
def test_nothing_in_a_cell_without_a_label_reaches_the_sum_or_a_gradient(share):
    *parts, labels = make(40)
    labels[int(share * 40) :] = -100
    at = torch.nonzero(labels != -100)[:, 0]
    clean = torch.autograd.grad(chunked_nll(parts[0], parts[1], labels, bias=parts[2]), parts)
    spoiled = parts[0].detach().clone()
    spoiled[labels == -100] = torch.nan
    spoiled[-1] = torch.inf
    for cells in (at, None):
        leaves = [spoiled.clone().requires_grad_(), *parts[1:]]
        found = chunked_nll(leaves[0], leaves[1], labels, cells=cells, bias=leaves[2])
        for one, other in zip(torch.autograd.grad(found, leaves), clean, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_labels_that_do_not_lie_along_the_cells_are_refused():
    hidden, weight, _, labels = make(40)
    for cells in (None, torch.tensor([3, 7])):
        with pytest.raises(
            BatchError, match=r"every cell needs a label.*\n  seen: hidden states \(40, 16\), labels \(20,\)"
        ):
            chunked_nll(hidden, weight, labels[:20], cells=cells)


@pytest.mark.parametrize("is_wide", [False, True], ids=["as it is", "wider vocabulary"])
def test_a_label_that_is_no_word_is_refused(is_wide, monkeypatch):
    monkeypatch.setattr(chunked_cross_entropy, "_is_worth_widening", lambda _weight: is_wide)
    hidden, weight, _, labels = make(9, vocabulary=43)
    labels[2] = 45
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        chunked_nll(hidden, weight, labels)


def test_logits_of_cells_without_a_label_are_never_made():
    hidden, weight, _, labels = make(64, vocabulary=1000, dtype=torch.float32)
    labels[4:] = -100
    at = torch.nonzero(labels != -100)[:, 0]
    sizes = sizes_made(lambda: chunked_nll(hidden, weight, labels, cells=at).backward())
    assert max(sizes) == max(len(at) * 1000, weight.numel())


def test_one_compilation_serves_any_number_of_labels(monkeypatch):
    monkeypatch.setattr(chunked_cross_entropy, "BACKEND", "eager")
    chunked_cross_entropy._compiled_any_chunk_loss.cache_clear()
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for number in (30, 7, 12, 64, 5):
        logits, labels = torch.randn(number, 40, dtype=torch.float64), torch.randint(0, 40, (number,))
        plain, found = (
            run(logits, labels, None)
            for run in (chunked_cross_entropy._chunk_loss, chunked_cross_entropy._compiled_for_any_number)
        )
        for one, other in zip(plain, found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled + 1
    chunked_cross_entropy._compiled_any_chunk_loss.cache_clear()


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_form_for_compilers_gives_the_same(rule):
    hidden, weight, bias, labels = (part.detach() for part in make(30))
    logits = functional.linear(hidden, weight, bias)
    plain, fused = (
        run(logits, labels, rule.softcap)
        for run in (chunked_cross_entropy._chunk_loss, chunked_cross_entropy._fused_chunk_loss)
    )
    for one, other in zip(plain, fused, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_nothing_frozen_gets_a_gradient_and_no_gradient_means_no_work():
    hidden, weight, bias, labels = make(9)
    weight.requires_grad_(False)
    chunked_nll(hidden, weight, labels, bias=bias.detach()).backward()
    assert hidden.grad is not None
    assert weight.grad is None
    with torch.no_grad():
        assert not chunked_nll(hidden, weight, labels).requires_grad


def test_under_autocast_the_parameters_keep_their_dtype_and_the_sum_is_fp32():
    *parts, labels = make(50, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = chunked_nll(parts[0], parts[1], labels, bias=parts[2], logits_at_once=400)
        wanted = whole(*parts, labels, LogitRule())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted.float(), rtol=1e-3, atol=0)
    for one, other in zip(torch.autograd.grad(found, parts), torch.autograd.grad(wanted, parts), strict=True):
        assert one.dtype == torch.float32
        assert float((one - other).norm() / other.norm()) < 1e-2


def test_in_half_precision_many_chunks_are_as_near_to_the_truth_as_one_matrix_product():
    *exact, labels = make(512, dtype=torch.float64)
    half = [part.detach().bfloat16().requires_grad_() for part in exact]
    truth = torch.autograd.grad(whole(*[p.double() for p in half], labels, LogitRule()) / 3, half)
    plain = torch.autograd.grad(whole(*half, labels, LogitRule()).float() / 3, half)
    chunked = torch.autograd.grad(chunked_nll(half[0], half[1], labels, bias=half[2], logits_at_once=640) / 3, half)
    for one, other, right in zip(chunked, plain, truth, strict=True):
        distances = [float((part.double() - right.double()).norm() / right.double().norm()) for part in (one, other)]
        assert distances[0] <= 1.5 * distances[1] + 1e-3


def sizes_made(work):
    """Elements of every tensor that `work` makes."""
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(
                part.numel() for part in torch.utils._pytree.tree_leaves(out) if isinstance(part, torch.Tensor)
            )
            return out

    with Watch():
        work()
    return sizes


def test_no_tensor_ever_holds_all_logits():
    hidden, weight, bias, labels = make(64, vocabulary=1000, dtype=torch.float32)
    sizes = sizes_made(lambda: chunked_nll(hidden, weight, labels, bias=bias, logits_at_once=8000).backward())
    assert max(sizes) == max(8 * 1000, weight.numel())


def test_a_second_chunk_takes_no_memory_beside_the_first():
    weight = torch.zeros(1000, 1)
    peaks = []
    for cells in (64, 128):
        hidden, labels = torch.zeros(cells, 1), torch.zeros(cells, dtype=torch.int64)
        peaks.append(added_bytes(lambda: chunked_nll(hidden, weight, labels, logits_at_once=64_000), device=CPU))  # noqa: B023
    assert peaks[1] < 1.05 * peaks[0]


def test_a_chunk_holds_a_power_of_two_of_cells():
    assert [chunked_cross_entropy._cells_of_chunk(100, 10, n) for n in (5, 10, 79, 80, 10_000)] == [1, 1, 4, 8, 100]
