"""Memory that runs out in a proof says nothing of the law, and a proof takes little more of it than a step."""

from __future__ import annotations

import pytest
import torch

from truebatch.errors import MemoryLimitError
from truebatch.testing.tiny_hf.model import tiny_model
from truebatch.verification.api import verify
from truebatch.verification.choose_layout import choose_layout
from truebatch.verification.config import VerifyConfig
from truebatch.verification.runner import prove
from truebatch.verification.subjects.hf_subject import hf_subject, random_samples


def run_out(model, *, above):
    """Calls of more than `above` samples run out of memory."""

    def look(_module, _args, given):
        if len(given["input_ids"]) > above:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80.00 GiB.")

    return model.register_forward_pre_hook(look, with_kwargs=True)


@pytest.mark.parametrize("above", [0, 1])
def test_memory_that_runs_out_is_neither_broken_nor_equal(above):
    model = tiny_model("llama")
    run_out(model, above=above)
    with pytest.raises(MemoryLimitError, match="while the model was verified") as caught:
        verify(model, random_samples(model))
    assert "80.00 GiB" in caught.value.seen
    if above == 0:  # a packed row is one row, and fits
        with pytest.raises(MemoryLimitError, match="while the model was verified"):
            choose_layout(model)


def test_a_slower_layout_is_not_taken_because_the_faster_ones_proof_ran_out_of_memory():
    model = tiny_model("llama")
    handle = model.register_forward_pre_hook(packed_only, with_kwargs=True)
    with pytest.raises(MemoryLimitError, match="while the model was verified"):
        choose_layout(model)
    handle.remove()
    assert choose_layout(model).layout == "packed"


def packed_only(_module, _args, given):
    if given.get("position_ids") is not None and int((given["position_ids"] == 0).sum()) > len(given["input_ids"]):
        raise MemoryError


def test_a_reference_of_higher_precision_that_does_not_fit_is_a_want_of_memory():
    model = tiny_model("llama").to(torch.bfloat16)
    model.register_forward_pre_hook(in_fp32_only, with_kwargs=True)
    with pytest.raises(MemoryLimitError, match="while the model was verified"):
        verify(model, random_samples(model))


def in_fp32_only(module, _args, _given):
    if next(module.parameters()).dtype == torch.float32:
        raise torch.OutOfMemoryError("CUDA out of memory.")


def test_no_arrangement_keeps_a_gradient_as_large_as_the_model():
    model = tiny_model("llama")
    report = prove(hf_subject(model, random_samples(model)), VerifyConfig())
    assert report.ok
    assert all(result.whole is not None and not result.whole.gradient for result in report.results)
    assert all(any(d.part == "gradient" for d in result.differences) for result in report.results)


def test_refused_arrangements_are_not_counted_as_equal():
    model = tiny_model("bert", "sequence_classification")
    report = verify(model, random_samples(model))
    assert report.refused
    equal = sum(result.verdict == "equal" for result in report.results)
    assert f"in {equal} arrangements; {len(report.refused)} more" in str(report)
