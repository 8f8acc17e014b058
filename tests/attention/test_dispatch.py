"""The choice of a kernel, with GPUs simulated."""

from __future__ import annotations

import pytest
import torch

from truebatch.attention.dispatch import Facts, choose_kernel

LONG = {"num_segments": 8, "pairs": 8 * 2048**2, "dense_pairs": (8 * 2048) ** 2}
SHORT = {"num_segments": 300, "pairs": 300 * 40**2, "dense_pairs": 12000**2}
H200 = Facts(device="cuda", capability=(9, 0), dtype=torch.bfloat16, **LONG)


@pytest.mark.parametrize(
    ("card", "dtype", "kernel"),
    [
        ((9, 0), torch.bfloat16, "varlen"),
        ((9, 0), torch.float32, "per_segment"),
        ((8, 0), torch.float16, "varlen"),
        ((8, 9), torch.bfloat16, "varlen"),
        ((12, 0), torch.bfloat16, "varlen"),
        ((7, 5), torch.float16, "per_segment"),
        ((7, 0), torch.float16, "per_segment"),
        (None, torch.bfloat16, "per_segment"),
    ],
)
def test_packed_rows_take_varlen_on_ampere_and_newer_in_half_precision_only(card, dtype, kernel):
    device = "cpu" if card is None else "cuda"
    assert choose_kernel(H200._replace(device=device, capability=card, dtype=dtype)) == kernel


@pytest.mark.parametrize(
    "more", [{"has_dropout": True}, {"has_bias": True}, {"reshapes_scores": True}, {"head_size": 257}]
)
def test_what_varlen_cannot_compute_is_never_given_to_it(more):
    assert choose_kernel(H200._replace(**more)) == "per_segment"


def test_plans_of_cudnn_serve_hopper_cards_where_its_package_is_installed():
    there = H200._replace(plans_in_cudnn=True)
    assert choose_kernel(there) == "planned"
    assert choose_kernel(there._replace(causal=False)) == "planned"
    assert choose_kernel(there._replace(capability=(8, 9))) == "varlen"
    assert choose_kernel(there._replace(has_window=True)) == "varlen"
    assert choose_kernel(there._replace(head_size=136)) == "varlen"
    for more in ({"dtype": torch.float32}, {"has_bias": True}, {"has_dropout": True}, {"reshapes_scores": True}):
        assert choose_kernel(there._replace(**more)) == "per_segment"


def test_an_older_kernel_without_windows_is_not_asked_for_one():
    assert choose_kernel(H200._replace(has_window=True)) == "varlen"
    assert choose_kernel(H200._replace(has_window=True, varlen_has_window=False)) == "per_segment"
    assert choose_kernel(H200._replace(varlen_in_torch=False)) == "per_segment"


def test_many_short_samples_on_an_old_card_are_one_call_and_on_cpu_a_loop():
    old = Facts(device="cuda", capability=(7, 5), dtype=torch.float16, **SHORT)
    assert choose_kernel(old) == "block"
    assert choose_kernel(old._replace(device="cpu", capability=None)) == "per_segment"


def test_right_padded_causal_rows_need_no_mask_unless_mostly_padding():
    rows = Facts(device="cpu", rows_are_samples=True, has_padding=True, num_segments=4, pairs=300, dense_pairs=400)
    assert choose_kernel(rows) == "plain"
    assert choose_kernel(rows._replace(has_dropout=True)) == "plain"
    assert choose_kernel(rows._replace(pairs=100)) == "per_segment"
    for more in ({"causal": False}, {"has_window": True}, {"has_bias": True}, {"rows_are_samples": False}):
        assert choose_kernel(rows._replace(**more)) == "per_segment"


def test_full_rows_need_no_mask_without_a_causal_rule_either():
    rows = Facts(device="cpu", rows_are_samples=True, causal=False, num_segments=4, pairs=400, dense_pairs=400)
    assert choose_kernel(rows) == "plain"


def test_a_compiled_model_never_loops_over_lengths():
    assert choose_kernel(H200._replace(device="cpu", capability=None, compiling=True)) == "block"
