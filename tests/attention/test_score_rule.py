"""Which kernels of torch's attention may run, and what is known of the others."""

from contextlib import contextmanager, nullcontext

import pytest
import torch

from truebatch.attention import score_rule
from truebatch.attention.api import attend
from truebatch.attention.score_rule import Rule, plans_confuse_layouts, softmax_attention, without_cudnn_sdpa
from truebatch.batch.segments import packed_segments

CARD = torch.device("cuda")
BACKENDS = torch.backends.cuda


@pytest.fixture(autouse=True)
def _as_before():
    settings = ("cudnn", "flash", "mem_efficient", "math")
    before = {name: getattr(BACKENDS, f"{name}_sdp_enabled")() for name in settings}
    yield
    for name, is_on in before.items():
        getattr(BACKENDS, f"enable_{name}_sdp")(is_on)


def test_kernels_with_plans_are_off_inside_and_as_before_behind():
    with without_cudnn_sdpa(CARD):
        assert not BACKENDS.cudnn_sdp_enabled()
        with without_cudnn_sdpa(CARD):
            assert not BACKENDS.cudnn_sdp_enabled()
        assert not BACKENDS.cudnn_sdp_enabled()
    assert BACKENDS.cudnn_sdp_enabled()
    with pytest.raises(ZeroDivisionError), without_cudnn_sdpa(CARD):
        1 / 0  # noqa: B018
    assert BACKENDS.cudnn_sdp_enabled()
    with without_cudnn_sdpa(torch.device("cpu")):
        assert BACKENDS.cudnn_sdp_enabled()


def test_the_last_one_out_switches_on_again():
    first, second = without_cudnn_sdpa(CARD), without_cudnn_sdpa(CARD)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not BACKENDS.cudnn_sdp_enabled()
    second.__exit__(None, None, None)
    assert BACKENDS.cudnn_sdp_enabled()


def test_attention_of_ours_runs_inside(monkeypatch):
    seen = []

    @contextmanager
    def noted(device):
        seen.append(device)
        yield

    monkeypatch.setattr(score_rule, "without_cudnn_sdpa", noted)
    part = torch.randn(1, 2, 5, 8)
    segments = packed_segments([3, 2])
    attend(part, part, part, segments, causal=True, kernel="per_segment")
    assert seen == [part.device] * 2


def test_what_the_user_switched_off_stays_off():
    BACKENDS.enable_cudnn_sdp(False)
    BACKENDS.enable_flash_sdp(False)
    with without_cudnn_sdpa(CARD):
        assert not BACKENDS.flash_sdp_enabled()
    assert not BACKENDS.cudnn_sdp_enabled()


def test_who_wants_only_kernels_with_plans_gets_them():
    for name in ("flash", "mem_efficient", "math"):
        getattr(BACKENDS, f"enable_{name}_sdp")(False)
    with without_cudnn_sdpa(CARD):
        assert BACKENDS.cudnn_sdp_enabled()


class Confused(torch.autograd.Function):
    """Its backward pass takes any gradient for one that lies as the first one did."""

    @staticmethod
    def forward(ctx, query, key, value):
        return query + key + value

    @staticmethod
    def backward(ctx, grad):
        layout = torch.empty(1, grad.shape[2], grad.shape[1], grad.shape[3]).transpose(1, 2).stride()
        seen = grad.as_strided(grad.shape, layout)
        return seen, seen, seen


class Spoiled(Confused):
    """The second one is NaN."""

    @staticmethod
    def backward(ctx, grad):
        return (torch.full_like(grad, torch.nan if grad.is_contiguous() else 1.0),) * 3


def test_gradients_that_depend_on_their_layout_are_noticed(monkeypatch):
    assert not plans_confuse_layouts(torch.device("cpu"))
    for wrong in (Confused, Spoiled):
        monkeypatch.setattr(score_rule, "scaled_dot_product_attention", lambda q, k, v, f=wrong, **_: f.apply(q, k, v))
        for mode in (nullcontext, torch.no_grad, torch.inference_mode):
            with mode():
                assert plans_confuse_layouts(torch.device("cpu"))


@pytest.mark.gpu
def test_grouped_heads_in_fp32_hold_no_pairs_on_a_gpu():
    heads, length = 8, 4096
    query = torch.randn(1, heads, length, 64, device="cuda", requires_grad=True)
    key = torch.randn(1, 2, length, 64, device="cuda", requires_grad=True)
    torch.cuda.reset_peak_memory_stats()
    softmax_attention(query, key, key, None, Rule(causal=True), causal=True).sum().backward()
    assert torch.cuda.max_memory_allocated() < heads * length * length * query.element_size()
