"""Half precision: structure is judged in fp32, and rounding that differs from run to run raises no alarm."""

import pytest
import torch

from truebatch import verify
from truebatch.testing.tiny_hf.model import tiny_model
from truebatch.testing.tiny_hf.random_samples import make_samples

LENGTHS = [5, 23, 9, 2, 17, 31, 3, 12]
DENSE = ("gpt2", "gpt_neox", "llama", "qwen3", "mistral", "gemma", "phi", "opt", "bloom", "olmo")
EXPERTS = ("mixtral", "qwen2_moe")


def report_of(name, seed=0, change=None):
    model = tiny_model(name, seed=seed).to(torch.bfloat16)
    if change is not None:
        change(model)
    return verify(model, make_samples(model, LENGTHS))


def leak(share, *, needs=None):
    """Every cell gets of the mean over its row what comes to this share of the output's norm."""

    def plant(model):
        def add(_module, _given, out):
            if needs is not None and (out.dtype != needs or len(out) == 1):
                return out
            mean = out.mean(1, keepdim=True).expand_as(out)
            return out + share * mean * (out.norm() / mean.norm())

        model.get_output_embeddings().register_forward_pre_hook(lambda module, given: (add(module, given, given[0]),))

    return plant


@pytest.mark.parametrize("name", ["gpt_neox"])
def test_a_right_model_in_bf16_is_equal_and_a_leak_of_one_percent_is_found(name):
    report = report_of(name)
    assert report.verdict == "equal", str(report)
    assert any("judged in fp32" in note for note in report.notes)
    faulty = report_of(name, change=leak(0.01))
    assert faulty.verdict == "broken", str(faulty)
    assert any("hides nothing" in note for note in faulty.notes)


def test_a_fault_that_only_bf16_has_is_found_there():
    report = report_of("llama", change=leak(0.3, needs=torch.bfloat16))
    assert report.verdict == "broken", str(report)


def test_weights_and_dtypes_are_what_they_were():
    model = tiny_model("llama").to(torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    verify(model, make_samples(model, LENGTHS))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {value.dtype for value in model.parameters()} == {torch.bfloat16}


def test_experts_that_rounding_chooses_leave_half_precision_unproven():
    report = report_of("mixtral")
    assert report.verdict == "unproven", str(report)
    assert "as where rounding chooses other experts; in fp32 all is equal" in report.unproven


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DENSE, *EXPERTS])
def test_no_right_model_raises_an_alarm(name):
    found = [report_of(name, seed) for seed in range(10)]
    assert [seed for seed, report in enumerate(found) if report.verdict == "broken"] == []
    if name in DENSE:
        assert {report.verdict for report in found} == {"equal"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DENSE, *EXPERTS])
def test_a_fault_of_one_percent_is_found(name):
    assert report_of(name, change=leak(0.01)).verdict == "broken"
