"""Faults that a look at outputs alone, at one mode, or at the summed gradient does not see."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaForCausalLM

from tests.tiny import TEXT_FIELDS, text_samples
from tests.verification import planted as P
from tests.verification.test_faults import samples
from truebatch.errors import ConfigError
from truebatch.testing.tiny_hf.model import tiny_model
from truebatch.verification.api import verify
from truebatch.verification.config import VerifyConfig
from truebatch.verification.subjects.hf_subject import random_samples


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

    from truebatch.batch.keyed_random import KeyedDropout

    class Model(P.LanguageModel):
        def __init__(self):
            super().__init__()
            self.off = KeyedDropout(0.3)

        def hidden(self, batch):
            return checkpoint(lambda x: self.off(x), super().hidden(batch), use_reentrant=False)

    report = asked(language(Model).train())
    assert report.ok, str(report)
    assert report.mode == "train"


# --- modes and what training refuses ----------------------------------------------------------------------------------


class MeanInEval(P.LanguageModel):
    """Wrong in one mode only."""

    wrong_in = False

    def hidden(self, batch):
        x = super().hidden(batch)
        return x - 0.1 * x.mean((0, 1)) if self.training == self.wrong_in and len(x) > 1 else x


class MeanInTraining(MeanInEval):
    wrong_in = True


@pytest.mark.parametrize(("model", "mode"), [(MeanInEval, "eval"), (MeanInTraining, "train")])
@pytest.mark.parametrize("quick", [False, True])
def test_a_fault_of_one_mode_is_seen(model, mode, quick):
    report = asked(language(model), config=VerifyConfig(quick=quick))
    assert report.is_broken
    assert [c.name for c in report.causes] == ["samples are mixed"]
    assert {r.name.endswith("in eval mode") for r in report.broken} == {mode == "eval"}
    assert report.coverage.modes == ("train", "eval")


class NoisyNorm(P.WithBatchNorm):
    def hidden(self, batch):
        return F.dropout(super().hidden(batch), 0.2, training=self.training)


class NoisyNormOtherwise(P.WithBatchNorm):
    def hidden(self, batch):
        x = super().hidden(batch)
        return x + 0.1 * torch.rand_like(x) if self.training else x


class LayersWithDropout(P.Recurrent):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(16, 16, num_layers=2, dropout=0.3, batch_first=True)


class NormAndLayersWithDropout(LayersWithDropout):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, batch):
        x = self.norm(self.tok(batch["input_ids"]).transpose(1, 2)).transpose(1, 2)
        return self.head(self.rnn(x)[0])


@pytest.mark.parametrize("model", [NoisyNorm, NoisyNormOtherwise, NormAndLayersWithDropout])
def test_batch_statistics_beside_noise_are_seen(model):
    report = asked(language(model), config=VerifyConfig(layout="right"))
    assert report.verdict == "broken"
    assert [c.name for c in report.causes] == ["batch statistics"]


def test_dropout_between_the_layers_of_a_recurrent_module_is_switched_off_as_other_dropout_is():
    model = language(LayersWithDropout).train()
    report = asked(model, config=VerifyConfig(layout="right"))
    assert report.ok, str(report)
    assert report.mode == "train"
    assert model.rnn.dropout == 0.3


def test_noise_that_cannot_be_switched_off_in_training_leaves_it_unproven():
    class Model(P.LanguageModel):
        def hidden(self, batch):
            x = super().hidden(batch)
            return x + 0.1 * torch.rand_like(x) if self.training else x

    report = asked(language(Model))
    assert report.verdict == "unproven"
    assert report.coverage.modes == ("eval",)
    assert "only eval mode was compared" in str(report)


def test_the_balancing_loss_of_experts_is_asked_for():
    model = tiny_model("mixtral")
    assert verify(model, random_samples(model)).ok
    model.config.output_router_logits = True
    report = verify(model, random_samples(model))
    assert report.verdict == "broken"
    assert [c.name for c in report.causes] == ["expert balancing"]


def test_dropout_that_a_configuration_declares_is_switched_off():
    model = tiny_model("llama")
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    report = verify(model, random_samples(model), config=VerifyConfig(layout="right"))
    assert report.ok, str(report)
    assert report.coverage.modes == ("train", "eval")
    assert any("dropout is switched off" in note for note in report.notes)


# --- which layout counts ----------------------------------------------------------------------------------------------


def test_left_padding_counts_only_for_who_asks_for_it():
    torch.manual_seed(0)
    report = verify(P.FirstCell(), P.Choice(), samples(), P.CLASS_FIELDS)
    assert report.ok, str(report)
    assert report.layouts["left"] == "different"
    assert "not right, and not in use: left padding" in str(report)
    assert any("with padding on the left" in note for note in report.notes)
    for layout in ("left", "padded", "all"):
        asked_for = verify(P.FirstCell(), P.Choice(), samples(), P.CLASS_FIELDS, config=VerifyConfig(layout=layout))
        assert asked_for.is_broken


@pytest.mark.parametrize("name", ["bart", "pegasus"])
def test_a_right_encoder_decoder_of_a_library_is_not_called_broken(name):
    model = tiny_model(name, "seq2seq")
    report = verify(model, random_samples(model))
    assert report.ok, str(report)


class PaddingByValue(P.Classifier):
    """Finds its padding by the id, as people write it."""

    def mask(self, batch):
        ids = batch["input_ids"]
        may = (ids != 0)[:, None, None, :].expand(-1, 1, ids.shape[1], -1)
        return may | torch.eye(ids.shape[1], dtype=torch.bool)

    def pool(self, x, batch):
        is_real = (batch["input_ids"] != 0)[..., None]
        return (x * is_real).sum(1) / is_real.sum(1)


def test_a_mask_made_of_ids_is_right_for_the_declared_padding():
    torch.manual_seed(0)
    report = verify(PaddingByValue(), P.Choice(), samples(), P.CLASS_FIELDS, config=VerifyConfig(layout="right"))
    assert report.ok, str(report)
    assert {r.verdict for r in report.results if "garbage" in r.name} == {"note"}
    assert any("ids != pad" in note for note in report.notes)


class RowAveraging(LlamaForCausalLM):
    """Mixes the cells of a row outside of every module, so that no way of packing helps."""

    def forward(self, input_ids=None, position_ids=None, use_cache=None, **kwargs):
        output = super().forward(input_ids, position_ids=position_ids, use_cache=use_cache, **kwargs)
        return output.__class__(logits=output.logits + output.logits.mean(1, keepdim=True))


def test_a_model_that_refuses_all_that_counts_is_not_called_equal():
    model = RowAveraging(tiny_model("llama").config)
    report = verify(model, random_samples(model), config=VerifyConfig(layout="packed"))
    assert report.verdict == "unproven"
    assert "refuses every layout" in report.unproven


# --- sizes ------------------------------------------------------------------------------------------------------------


class Doubled(P.LanguageModel):
    """Twice as much, where `is_wrong` says so."""

    def is_wrong(self, ids):
        return False

    def forward(self, batch):
        y = super().forward(batch)
        return y * 2 if self.is_wrong(batch["input_ids"]) else y


class WrongInManyRows(Doubled):
    def is_wrong(self, ids):
        return len(ids) > 16


class WrongBesideOneToken(Doubled):
    def is_wrong(self, ids):
        return bool(len(ids) > 1 and (ids != 0).sum(1).min() == 1)


class WrongInLongRows(Doubled):
    def __init__(self):
        super().__init__(max_length=300)

    def is_wrong(self, ids):
        return len(ids) > 1 and ids.shape[1] > 256


PADDED = VerifyConfig(layout="right")


def test_a_fault_beyond_so_many_rows_is_seen_up_to_the_rows_asked_for():
    assert asked(language(WrongInManyRows), config=PADDED).coverage.rows < 16
    report = asked(language(WrongInManyRows), config=replace(PADDED, rows=17))
    assert report.is_broken
    assert report.coverage.rows == 17


def test_a_fault_beyond_so_many_positions_is_seen_up_to_the_length_asked_for():
    assert asked(language(WrongInLongRows), config=replace(PADDED, quick=True)).ok
    report = asked(language(WrongInLongRows), config=replace(PADDED, longest=260, quick=True))
    assert report.is_broken
    assert report.coverage.longest == 260


def test_a_fault_of_samples_of_one_token_is_seen_though_none_was_given():
    report = asked(language(WrongBesideOneToken), config=PADDED)
    assert report.is_broken
    assert report.coverage.shortest == 1


def test_a_model_that_takes_no_sample_of_one_token_is_not_called_broken():
    class Model(P.LanguageModel):
        def hidden(self, batch):
            if min(len(ids) for ids in batch.per_sample(batch["input_ids"])) < 2:
                raise ValueError("two tokens at least")
            return super().hidden(batch)

    report = asked(language(Model), config=PADDED)
    assert report.ok, str(report)
    assert report.coverage.shortest == 3


def test_rows_wider_than_a_model_has_positions_are_not_judged():
    class Model(P.LanguageModel):
        def __init__(self):
            super().__init__(max_length=24)

        def positions(self, batch):
            return torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])

    report = asked(language(Model), config=PADDED)
    assert report.ok, str(report)
    assert [r.verdict for r in report.results if r.name == "wider than needed"] == ["note"]
    assert any("more than the model takes" in note for note in report.notes)


def test_a_function_is_given_as_many_samples_as_are_asked_for():
    def batched(chosen):
        return [torch.ones(3) * sum(s) * (2 if len(chosen) > 16 else 1) for s in chosen]

    lists = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 1]]

    def one(sample):
        return torch.ones(3) * sum(sample)

    assert verify(batched, one=one, samples=lists).ok
    assert verify(batched, one=one, samples=lists, config=VerifyConfig(rows=20)).is_broken
    with pytest.raises(ConfigError, match="cannot be made longer"):
        verify(batched, one=one, samples=lists, config=VerifyConfig(longest=20))


@pytest.mark.parametrize("settings", [{"rows": 1}, {"longest": 0}])
def test_sizes_that_make_no_sense_are_refused(settings):
    with pytest.raises(ConfigError, match="2 or more"):
        VerifyConfig(**settings)


# --- what it costs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("config", "most"), [(VerifyConfig(quick=True), 8), (VerifyConfig(), 40)])
def test_a_proof_costs_no_more_than_was_said(config, most):
    """Counted in cells: forward 1, backward 2."""
    model = language()
    data = [{"input_ids": np.arange(1, n + 1), "label": 0} for n in (1, 3, 9, 5, 12, 17, 8, 24)]
    cells = []

    def forward(_module, args, value):
        cells.append(int(args[0].is_real.sum()))
        if value.requires_grad:
            value.register_hook(lambda _grad, n=cells[-1]: cells.append(2 * n))

    handle = model.register_forward_hook(forward)
    report = asked(model, data=data, config=config)
    handle.remove()
    assert report.ok, str(report)
    assert sum(cells) <= most * 3 * sum(len(s["input_ids"]) for s in data)


class LossAlone(nn.Module):
    """Gives the summed loss and nothing of single samples; one layer looks over the borders of a packed row."""

    def __init__(self):
        super().__init__()
        self.words, self.mix, self.head = nn.Embedding(17, 16), nn.Linear(16, 16), nn.Linear(16, 17)

    def forward(self, batch):
        hidden = self.words(batch["input_ids"])
        seen = self.mix(hidden.cumsum(1))
        return F.cross_entropy(self.head(seen).flatten(0, 1), batch["labels"].flatten(), reduction="sum")


class OfTheModel:
    def counts(self, batch):
        return {"nll": int((batch["labels"] >= 0).sum())}

    def sums(self, model, batch):
        return {"nll": model(batch)}


def test_a_model_that_gives_its_loss_alone_is_told_the_module():
    torch.manual_seed(0)
    report = verify(LossAlone(), OfTheModel(), text_samples([5, 3, 7, 4], vocab=17), TEXT_FIELDS)
    assert report.layouts["packed"] == "different"
    assert report.layouts["right"] == "equal"
    assert report.first_module.name == "mix"
    assert [cause.name for cause in report.causes] == ["packed samples see each other"]
