"""The loss from hidden states is the loss from logits, for the models where it is used; others keep their logits."""

import pytest
import torch
from torch import nn

from tests.hf.attention.cuts import packed, padded
from truebatch.hf.heads import lm_head as outputlayer
from truebatch.hf.heads.heads import head_of
from truebatch.hf.heads.lm_head import find_output_layer, output_layer_of
from truebatch.hf.heads.objective import HeadObjective
from truebatch.testing.tiny_hf.model import tiny_model
from truebatch.testing.tiny_hf.random_samples import make_samples

LENGTHS = [5, 19, 9, 24, 3]
IN_CHUNKS = ["llama", "gpt2", "gemma2", "qwen2", "phi3", "opt", "cohere", "granite", "gemma3_text", "gpt_neox", "phi"]
MASKED = ["bert", "roberta", "modernbert"]
BOTH_SIDES = ["t5", "bart", "mt5", "marian", "pegasus", "m2m_100"]
WITH_IMAGES = ["qwen2_vl", "llava", "gemma3", "paligemma", "idefics3", "qwen3_vl"]
CASES = [
    *((name, "causal_lm") for name in IN_CHUNKS), *((name, "masked_lm") for name in MASKED),
    *((name, "vision_language") for name in WITH_IMAGES), *((name, "seq2seq") for name in BOTH_SIDES),
]  # fmt: skip
NOT_PACKED = ("opt", "paligemma", "gemma3", "idefics3", *BOTH_SIDES)
"""Count positions by themselves, look both ways inside an image, or would need two tables."""


def loss_and_gradient(model, objective, batch):
    model.zero_grad()
    (total,) = objective.sums(model, batch).values()
    (total / 10).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return total.detach(), grads


def loud(name, kind):
    """Settings that a rule nobody applied would show in."""
    model = tiny_model(name, kind)
    for key, value in (("final_logit_softcapping", 0.7), ("logit_scale", 0.4), ("logits_scaling", 3.0)):
        if getattr(model.config, key, None) is not None:
            setattr(model.config, key, value)
            for part in model.modules():
                if hasattr(part, key):
                    setattr(part, key, value)
    return model


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_loss_in_chunks_is_the_loss_of_all_logits(case):
    model = loud(*case)
    head, samples = head_of(model), make_samples(model, LENGTHS)
    for batch in (padded(head, samples, range(5)), packed(head, samples, range(5), extra=4)):
        if case[0] in NOT_PACKED and batch.segments.layout == "packed":
            continue
        results = [loss_and_gradient(model, HeadObjective(head=head, in_chunks=x), batch) for x in (True, False)]
        targets = batch.fields.get("decoder_input_ids")
        assert output_layer_of(model, batch["input_ids"], targets=targets) is not None
        (found, grads), (wanted, wanted_grads) = results
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
        assert grads.keys() == wanted_grads.keys()
        largest = max(float(g.norm()) for g in wanted_grads.values())
        for name, grad in wanted_grads.items():
            assert float((grads[name] - grad).norm()) <= 1e-6 * largest, name


def test_a_model_that_does_more_to_its_logits_keeps_them_whole(monkeypatch):
    model = tiny_model("llama")
    head, samples = head_of(model), make_samples(model, LENGTHS)
    batch = padded(head, samples, range(5))
    plain = type(model).forward

    def forward(self, **given):
        output = plain(self, **given)
        output.logits = output.logits.roll(1, -1)
        return output

    forward.__signature__ = __import__("inspect").signature(plain)
    monkeypatch.setattr(type(model), "forward", forward)
    assert output_layer_of(model, batch["input_ids"]) is None
    found, wanted = (HeadObjective(head=head, in_chunks=x).sums(model, batch)["nll"] for x in (True, False))
    assert torch.equal(found, wanted)


def test_a_bias_that_is_added_behind_the_layer_gets_its_gradient():
    """It is zero in a new model, so that the logits alone would not tell."""
    model = tiny_model("esm", "masked_lm")
    with torch.no_grad():
        model.lm_head.bias.zero_()
    head, samples = head_of(model), make_samples(model, LENGTHS)
    batch = padded(head, samples, range(5))
    with torch.inference_mode():  # an evaluation comes first
        HeadObjective(head=head).sums(model, padded(head, samples, range(5)))
    (found, grads), (wanted, wanted_grads) = (
        loss_and_gradient(model, HeadObjective(head=head, in_chunks=x), batch) for x in (True, False)
    )
    assert torch.equal(found, wanted)
    assert "lm_head.bias" in grads
    assert grads.keys() == wanted_grads.keys()
    model.lm_head.bias.requires_grad_(False)  # then it is nothing but a zero
    outputlayer._known.pop(model)
    assert output_layer_of(model, batch["input_ids"]) is not None


@pytest.mark.parametrize(
    "case", [("blt", "causal_lm"), ("hrm_text", "causal_lm"), ("funnel", "masked_lm")], ids="-".join
)
def test_a_look_at_a_model_asks_for_no_cache_and_never_ends_a_step(case):
    model = tiny_model(*case)
    head = head_of(model)
    batch = padded(head, make_samples(model, LENGTHS), range(5))
    found, wanted = (HeadObjective(head=head, in_chunks=x).sums(model, batch)["nll"] for x in (True, False))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_a_model_that_cannot_do_with_words_alone_keeps_its_logits_whole(monkeypatch):
    model = tiny_model("llava", "vision_language")
    head, samples = head_of(model), make_samples(model, LENGTHS)
    batch = padded(head, samples, range(5))
    plain = type(model).forward

    def forward(self, **given):
        if given.get("pixel_values") is None:
            raise ValueError("no image")
        return plain(self, **given)

    forward.__signature__ = __import__("inspect").signature(plain)
    monkeypatch.setattr(type(model), "forward", forward)
    found, wanted = (HeadObjective(head=head, in_chunks=x).sums(model, batch)["nll"] for x in (True, False))
    assert torch.equal(found, wanted)
    assert output_layer_of(model, batch["input_ids"]) is None


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_memory_that_runs_out_during_a_look_says_nothing_of_the_model(error, monkeypatch):
    model = tiny_model("llama", "causal_lm")
    ids = torch.tensor([[1, 2, 3, 4]])
    with monkeypatch.context() as patched:
        patched.setattr(model.model, "forward", lambda **_: (_ for _ in ()).throw(error))
        with pytest.raises(type(error)):
            output_layer_of(model, ids)
    assert output_layer_of(model, ids) is not None


@pytest.mark.parametrize("change", ["subclass", "hook", "own forward"])
def test_an_output_layer_that_is_not_a_plain_linear_one_is_left_alone(change):
    class Adapted(nn.Linear):
        pass

    model = tiny_model("llama")
    assert find_output_layer(model) is not None
    if change == "subclass":
        model.lm_head = Adapted(*reversed(model.lm_head.weight.shape), bias=False)
    elif change == "hook":
        model.lm_head.register_forward_hook(lambda _, given, out: out * 2)
    else:
        model.lm_head.forward = lambda hidden: hidden
    assert find_output_layer(model) is None


def test_the_probe_leaves_the_model_as_it_was():
    model = tiny_model("llama").train()
    model.model.layers[0].eval()
    before = [part.training for part in model.modules()]
    output_layer_of(model, torch.arange(9)[None])
    assert [part.training for part in model.modules()] == before
    assert not model.lm_head._forward_hooks
    assert "forward" not in vars(model.lm_head)
    assert model(input_ids=torch.arange(4)[None]).logits.shape[-1] == model.config.vocab_size
