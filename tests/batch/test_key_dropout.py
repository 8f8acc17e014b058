"""Ordinary models train with their dropout: one gradient however a step is cut."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn

import truebatch as tb
from tests.hf.tiny_models import VOCABULARY, build, draw_tokens
from truebatch.adapters.step_loss import step_loss
from truebatch.batch.keyed_random import noise_for
from truebatch.errors import BatchError, ConfigError
from truebatch.hf.heads.heads import head_of
from truebatch.hf.heads.objective import HeadObjective
from truebatch.training.checks.batch_coupling import find_couplings

LENGTHS = [7, 3, 12, 7, 1, 5]
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
         "max_position_embeddings": 32, "intermediate_size": 24}  # fmt: skip
RATES = ("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "resid_pdrop", "embd_pdrop",
         "attn_pdrop", "dropout", "activation_dropout", "hidden_dropout", "classifier_dropout", "embedding_dropout",
         "mlp_dropout", "attention_probs_dropout", "dropout_rate")  # fmt: skip


def with_rates(model: nn.Module, rate: float = 0.4) -> nn.Module:
    for part in model.modules():
        if type(part) is nn.Dropout:
            part.p = rate
        for name in RATES:
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, rate)
    return model.double().train()


def gradient(model, objective, fields, data, seed=0, **plan) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    lengths = [len(sample[fields[0].name]) for sample in data]
    config = tb.PlanConfig(samples_per_step=len(data), **plan)
    loss = None
    for step in tb.load_steps(tb.build_plan(lengths, config), data, fields):
        loss = step_loss(model, objective, step, check_samples=0, seed=seed)
        loss.backward()
    return float(loss.detach()), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_one_gradient(model, objective, fields, samples, cuts) -> None:
    first = gradient(model, objective, fields, samples, **cuts[0])
    for cut in cuts[1:]:
        found = gradient(model, objective, fields, samples, **cut)
        assert found[0] == pytest.approx(first[0], rel=1e-6)
        assert found[1].keys() == first[1].keys()
        for name, wanted in first[1].items():
            torch.testing.assert_close(found[1][name], wanted, atol=1e-7, rtol=1e-6, msg=lambda t, n=name: f"{n}: {t}")
    other = gradient(model, objective, fields, samples, seed=1, **cuts[0])
    assert other[0] != pytest.approx(first[0], rel=1e-4), "there is no dropout"


PADDED = [{"samples": 1}, {"samples": 2}, {"cells": 40}, {}]
PACKED = [{"layout": "packed", "cells": 12}, {"layout": "packed"}]


@pytest.mark.parametrize("attention", ["eager", "sdpa", "truebatch"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "gpt_neox", "gemma2", "gpt_oss"])
def test_a_hugging_face_model_has_one_gradient_in_every_cut(name, attention):
    if (name, attention) in {("gemma2", "sdpa"), ("gpt_oss", "sdpa")}:
        pytest.skip("sdpa knows no softcap and no sinks")
    if (name, attention) == ("gemma2", "eager"):
        pytest.skip("its own masks overflow in double precision")
    model = tb.key_dropout(with_rates(build(name, attention=attention)))
    if name == "gpt_oss":
        model.set_experts_implementation("eager")
    samples = [{"input_ids": tokens, "labels": tokens} for tokens in draw_tokens(LENGTHS)]
    head = head_of(model)
    samples = [head.prepare(sample) for sample in samples]
    assert_one_gradient(model, HeadObjective(head=head), head.fields, samples, [*PADDED, *PACKED])


@pytest.mark.parametrize("kind", ["BertForSequenceClassification", "DistilBertForSequenceClassification"])
def test_a_classifier_has_one_gradient_in_every_cut(kind):
    config = getattr(transformers, kind.removesuffix("ForSequenceClassification") + "Config")(
        **SMALL, dim=16, n_heads=4, n_layers=2, hidden_dim=24, num_labels=3
    )
    model = tb.key_dropout(with_rates(getattr(transformers, kind)(config)))
    head = head_of(model)
    samples = [head.prepare({"input_ids": t, "labels": i % 3}) for i, t in enumerate(draw_tokens(LENGTHS))]
    assert_one_gradient(model, HeadObjective(head=head), head.fields, samples, PADDED)
    assert not [c for c in find_couplings(model) if c.name == "dropout"]


def test_an_encoder_decoder_has_one_gradient_in_every_cut():
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, dropout_rate=0.4,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = tb.key_dropout(with_rates(transformers.T5ForConditionalGeneration(config)))
    head = head_of(model)
    pairs = zip(draw_tokens(LENGTHS), draw_tokens([3, 12, 5, 1, 7, 7], seed=1), strict=True)
    samples = [head.prepare({"input_ids": a, "labels": b}) for a, b in pairs]
    assert_one_gradient(model, HeadObjective(head=head), head.fields, samples, PADDED)


class Encoder(nn.Module):
    """An ordinary model of torch's own layers."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16)
        options = {"batch_first": True, "dropout": 0.4, "dim_feedforward": 24, **options}
        layer = nn.TransformerEncoderLayer(16, 4, **options)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.attention = nn.MultiheadAttention(16, 4, dropout=0.4, batch_first=True)
        self.head = nn.Sequential(nn.Dropout(0.4), nn.Linear(16, 3))

    def forward(self, batch: tb.MicroBatch) -> Tensor:
        hidden = self.layers(self.words(batch["ids"]), src_key_padding_mask=~batch.is_real)
        hidden = hidden + self.attention(hidden, hidden, hidden, key_padding_mask=~batch.is_real)[0]
        return self.head(torch.stack([cells.sum(0) for cells in batch.per_sample(hidden)]))


class Squares:
    def counts(self, batch):
        return {"loss": batch.num_samples}

    def sums(self, model, batch):
        return {"loss": model(batch).square().sum()}


def test_torchs_own_layers_have_one_gradient_in_every_cut():
    torch.manual_seed(0)
    model = tb.key_dropout(Encoder().double().train())
    samples = [{"ids": tokens} for tokens in draw_tokens(LENGTHS)]
    assert_one_gradient(model, Squares(), [tb.Field(name="ids")], samples, PADDED)
    assert not find_couplings(model)
    model.eval()
    batch = next(iter(tb.load_steps(tb.build_plan(LENGTHS, tb.PlanConfig()), samples, [tb.Field(name="ids")])))
    assert torch.equal(model(batch.batches[0]), model(batch.batches[0]))


def test_gradient_checkpointing_draws_the_same_masks_again():
    head = None
    found = []
    for is_on in (False, True):
        model = tb.key_dropout(with_rates(build("gpt_neox", attention="sdpa")))
        if is_on:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        head = head_of(model)
        samples = [head.prepare({"input_ids": t, "labels": t}) for t in draw_tokens(LENGTHS)]
        found.append(gradient(model, HeadObjective(head=head), head.fields, samples, samples=3)[1])
    for name, wanted in found[0].items():
        torch.testing.assert_close(found[1][name], wanted, atol=1e-9, rtol=1e-9)


def test_rates_are_kept_and_functions_of_torch_come_back():
    before = nn.functional.dropout, nn.functional.scaled_dot_product_attention
    model = tb.key_dropout(nn.Sequential(nn.Linear(4, 4000), nn.Dropout(0.25))).train()
    samples = [{"x": [1.0, 2.0, 3.0, 4.0]}] * 4
    fields = [tb.Field(name="x", kind="once")]
    (step,) = tb.load_steps(tb.build_plan([1] * 4, tb.PlanConfig()), samples, fields)
    with noise_for(step.batches[0], seed=0):
        out = model(step.batches[0]["x"])
    assert (out == 0).double().mean() == pytest.approx(0.25, abs=0.02)
    assert not torch.equal(out[0], out[1]), "samples have masks of their own"
    assert (nn.functional.dropout, nn.functional.scaled_dot_product_attention) == before
    with pytest.raises(BatchError, match="only available inside a micro-batch"):
        model(step.batches[0]["x"])
    assert (nn.functional.dropout, nn.functional.scaled_dot_product_attention) == before


def test_what_cannot_be_keyed_is_refused():
    with pytest.raises(ConfigError, match="batch_first=True"):
        tb.key_dropout(Encoder(batch_first=False))
    model = tb.key_dropout(nn.Sequential(nn.LSTM(4, 4, 2, dropout=0.5)))
    assert [c.name for c in find_couplings(model)] == ["dropout"]
    plain = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train()
    assert "key_dropout" in find_couplings(plain)[0].fix
