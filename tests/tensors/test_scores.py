"""Which kernels of torch's attention may run, and what is known of the others."""

import pytest
import torch

from truebatch.tensors import scores
from truebatch.tensors.scores import kernels_without_plans, plans_confuse_layouts

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
    with kernels_without_plans(CARD):
        assert not BACKENDS.cudnn_sdp_enabled()
        with kernels_without_plans(CARD):
            assert not BACKENDS.cudnn_sdp_enabled()
        assert not BACKENDS.cudnn_sdp_enabled()
    assert BACKENDS.cudnn_sdp_enabled()
    with pytest.raises(ZeroDivisionError), kernels_without_plans(CARD):
        1 / 0  # noqa: B018
    assert BACKENDS.cudnn_sdp_enabled()
    with kernels_without_plans(torch.device("cpu")):
        assert BACKENDS.cudnn_sdp_enabled()


def test_what_the_user_switched_off_stays_off():
    BACKENDS.enable_cudnn_sdp(False)
    BACKENDS.enable_flash_sdp(False)
    with kernels_without_plans(CARD):
        assert not BACKENDS.flash_sdp_enabled()
    assert not BACKENDS.cudnn_sdp_enabled()


def test_who_wants_only_kernels_with_plans_gets_them():
    for name in ("flash", "mem_efficient", "math"):
        getattr(BACKENDS, f"enable_{name}_sdp")(False)
    with kernels_without_plans(CARD):
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


def test_gradients_that_depend_on_their_layout_are_noticed(monkeypatch):
    assert not plans_confuse_layouts(torch.device("cpu"))
    monkeypatch.setattr(scores, "scaled_dot_product_attention", lambda q, k, v, **_: Confused.apply(q, k, v))
    assert plans_confuse_layouts(torch.device("cpu"))
