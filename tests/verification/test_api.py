"""`verify` asked in its other forms, and asked badly."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.tiny import (
    IMAGE_FIELDS,
    SETS_FIELDS,
    TEXT_FIELDS,
    Choice,
    ImageModel,
    NextToken,
    SetRisk,
    SetsModel,
    TextModel,
    image_samples,
    set_samples,
    text_samples,
)
from tests.verification import planted as P
from tests.verification.test_faults import samples
from truebatch.batch.fields import Field
from truebatch.errors import BatchError, ConfigError, DataError, LawError
from truebatch.verification.api import assert_batchable, verify
from truebatch.verification.config import VerifyConfig


@pytest.mark.parametrize(
    ("model", "objective", "data", "fields"),
    [
        (TextModel, NextToken, text_samples([3, 31, 8, 17, 2, 29]), TEXT_FIELDS),
        (SetsModel, SetRisk, set_samples([[2, 5, 1], [1], [7, 3, 3, 9, 2], [4, 4]]), SETS_FIELDS),
        (ImageModel, Choice, image_samples([(5, 9), (12, 3), (3, 30), (9, 4)]), IMAGE_FIELDS),
    ],
    ids=["text", "sets", "images"],
)
def test_every_shape_of_sample_can_be_proven(model, objective, data, fields):
    torch.manual_seed(0)
    report = verify(model(), objective(), data, fields)
    assert report.ok, str(report)
    assert report.leak_visible > 1e-3  # a leak would have been seen


def test_nothing_of_the_model_is_changed():
    torch.manual_seed(0)
    model = P.WithBatchNorm().train()
    model.norm.eval()
    before = copy.deepcopy(model.state_dict())
    verify(model, P.NextToken(), samples(), P.FIELDS)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert model.training
    assert not model.norm.training
    assert all(p.grad is None for p in model.parameters())


def test_a_model_that_breaks_the_law_fails_the_users_own_test():
    torch.manual_seed(0)
    with pytest.raises(
        LawError, match=r"depends on what else is in its micro-batch[\s\S]*mean over padding|sum over real"
    ):
        assert_batchable(P.MeanOverPadding(), P.Choice(), samples(), P.CLASS_FIELDS)


def test_a_right_model_passes_the_users_own_test():
    torch.manual_seed(0)
    assert assert_batchable(P.Classifier(), P.Choice(), samples(), P.CLASS_FIELDS).ok


def test_randomness_in_training_is_no_fault_and_leaves_it_unproven():
    torch.manual_seed(0)
    report = verify(P.WithDropout(), P.NextToken(), samples(), P.FIELDS)
    assert report.verdict == "unproven"
    assert "equal in distribution" in report.unproven
    assert report.coverage.modes == ("train", "eval")


def test_randomness_that_cannot_be_switched_off_leaves_nothing_proven():
    torch.manual_seed(0)
    report = verify(P.AlwaysRandom(), P.NextToken(), samples(), P.FIELDS)
    assert not report.ok
    assert not report.is_broken
    assert "other numbers each time" in report.unproven


def test_dropout_modules_are_switched_off_for_the_proof():
    torch.manual_seed(0)
    model = P.LanguageModel()
    model.head = nn.Sequential(nn.Dropout(0.5), model.head)
    report = verify(model.train(), P.NextToken(), samples(), P.FIELDS)
    assert report.ok
    assert report.mode == "train"


def test_a_batch_that_is_a_loop_gets_a_warning_and_passes():
    torch.manual_seed(0)
    report = verify(P.LoopOverRows(), P.NextToken(), samples(), P.FIELDS)
    assert report.ok, str(report)
    assert any("Python loop" in note for note in report.notes)


def test_only_the_layout_asked_for_is_run():
    torch.manual_seed(0)
    report = verify(P.Recurrent(), P.NextToken(), samples(), P.FIELDS, config=VerifyConfig(layout="right"))
    assert report.ok
    assert {r.arrangement.layout for r in report.results} == {"right"}
    assert not verify(P.Recurrent(), P.NextToken(), samples(), P.FIELDS).ok


def test_half_precision_is_measured_against_fp32():
    torch.manual_seed(0)
    report = verify(P.LanguageModel().bfloat16(), P.NextToken(), samples(), P.FIELDS)
    assert report.ok, str(report)
    assert not any("would not be seen" in note for note in report.notes)
    torch.manual_seed(0)
    assert not verify(P.MaskIgnoredButCausal().bfloat16(), P.NextToken(), samples(), P.FIELDS).ok


def test_a_callable_without_parameters_is_compared_by_its_outputs():
    def mean(batch):
        return torch.stack([x.float().mean() for x in batch.per_sample(batch["input_ids"])])

    def width(batch):
        return batch["input_ids"].float().mean(1)

    fields = (Field(name="input_ids"),)
    assert verify(mean, samples=samples(), fields=fields).ok
    assert not verify(width, samples=samples(), fields=fields).ok


@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    extra: tuple
    nothing: None = None


def test_results_may_be_wrapped_in_anything():
    torch.manual_seed(0)
    model = P.LanguageModel()

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, batch):
            y = self.inner(batch)
            return Result(y, ({"half": y / 2},))

    report = verify(Wrapped(), samples=samples(), fields=(Field(name="input_ids"),))
    assert report.ok, str(report)


FORMS = {
    "a list": lambda y, batch: batch.per_sample(y),
    "a list under a name": lambda y, batch: {"cells": batch.per_sample(y), "all": y},
    "a list of one tensor": lambda y, batch: [y],
    "lists of ids": lambda y, batch: [x.argmax(-1).tolist() for x in batch.per_sample(y)],
    "texts": lambda y, batch: [str(x.argmax(-1).tolist()) for x in batch.per_sample(y)],
    "named texts": lambda y, batch: {"text": [str(x.argmax(-1).tolist()) for x in batch.per_sample(y)]},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [P.LanguageModel, P.MaskIgnoredButCausal])
def test_a_result_a_sample_may_come_in_any_form_right_or_wrong(form, kind):
    torch.manual_seed(0)
    model = kind()
    report = verify(
        lambda batch: FORMS[form](model(batch), batch), samples=samples(), fields=(Field(name="input_ids"),)
    )
    assert report.ok == (kind is P.LanguageModel), str(report)
    assert not [r for r in report.results if r.verdict == "raised"]


def test_a_sample_without_a_declared_field_is_named():
    with pytest.raises(DataError, match=r"sample 1 has no 'input_ids'[\s\S]*fields \['ids'\]"):
        verify(P.LanguageModel(), P.NextToken(), [samples()[0], {"ids": [1, 2]}], P.FIELDS)


# --- the user's own two functions -------------------------------------------------------------------------------------


def pair(model, *, token_mean=False, ignore_padding=True):
    """A one-sample function and a batched one over plain lists, as people have them."""

    def layers(ids, real=None):
        x = model.tok(ids) + model.pos(torch.arange(ids.shape[1]))
        may = (
            None if real is None else real[:, None, None, :] & torch.ones(ids.shape[1], ids.shape[1], dtype=bool).tril()
        )
        for layer in model.layers:
            x = layer(x, may, is_causal=may is None)
        return model.head(x)

    def one(sample):
        ids = torch.as_tensor(sample["input_ids"])[None]
        logits = layers(ids)
        return {"logits": logits, "loss": F.cross_entropy(logits[0, :-1], ids[0, 1:])}

    def batched(chosen):
        ids = nn.utils.rnn.pad_sequence([torch.as_tensor(s["input_ids"]) for s in chosen], batch_first=True)
        real = nn.utils.rnn.pad_sequence(
            [torch.ones(len(s["input_ids"]), dtype=bool) for s in chosen], batch_first=True
        )
        logits = layers(ids, real if ignore_padding else None)
        labels = ids[:, 1:].masked_fill(~real[:, 1:], -100)
        each = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels, ignore_index=-100, reduction="none")
        loss = each.sum() / real[:, 1:].sum() if token_mean else (each.sum(1) / real[:, 1:].sum(1)).mean()
        return {"logits": logits, "loss": loss}

    return one, batched


def test_a_batched_function_is_compared_with_the_original_one():
    torch.manual_seed(0)
    one, batched = pair(P.LanguageModel())
    report = verify(batched, one=one, samples=samples())
    assert report.ok, str(report)
    assert {d.part for d in report.results[1].differences} == {"outputs", "loss", "gradient"}


def test_an_average_over_tokens_is_not_the_average_over_samples():
    torch.manual_seed(0)
    one, batched = pair(P.LanguageModel(), token_mean=True)
    report = verify(batched, one=one, samples=samples())
    assert not report.ok
    assert report.causes[0].name == "loss averaged per micro-batch"


def test_another_function_is_told_apart_from_a_batching_fault():
    torch.manual_seed(0)
    model = P.LanguageModel()
    one, _ = pair(model)

    def other(chosen):
        return [{"logits": one(s)["logits"][0] * 1.01, "loss": one(s)["loss"]} for s in chosen]

    report = verify(other, one=lambda s: {"logits": one(s)["logits"]}, samples=samples(), model=model)
    assert not report.ok
    assert report.causes[0].name == "another function"


def test_sums_and_counts_of_user_functions_are_divided_once():
    torch.manual_seed(0)
    one, _ = pair(P.LanguageModel())

    def one_sum(sample):
        n = len(sample["input_ids"]) - 1
        return {"loss_sum": one(sample)["loss"] * n, "count": n}

    def batched_sum(chosen):
        return {
            "loss_sum": sum(one(s)["loss"] * (len(s["input_ids"]) - 1) for s in chosen),
            "count": sum(len(s["input_ids"]) - 1 for s in chosen),
        }

    assert verify(batched_sum, one=one_sum, samples=samples()).ok


# --- bad input --------------------------------------------------------------------------------------------------------


def test_samples_of_one_length_are_refused_because_the_proof_would_be_empty():
    data = [{"input_ids": np.arange(1, 9)} for _ in range(4)]
    with pytest.raises(DataError, match=r"same length[\s\S]*4 samples of length 8"):
        verify(P.LanguageModel(), P.NextToken(), data, P.FIELDS)


def test_too_few_samples_are_refused():
    with pytest.raises(DataError, match="at least two"):
        verify(P.LanguageModel(), P.NextToken(), samples()[:1], P.FIELDS)


def test_verify_without_samples_says_what_to_pass():
    with pytest.raises(ConfigError, match="needs samples"):
        verify(P.LanguageModel(), P.NextToken())


def test_a_wrong_number_of_results_is_named():
    with pytest.raises(BatchError, match=r"wrong number of results[\s\S]*1 samples in"):
        verify(lambda chosen: [torch.ones(3)] * (len(chosen) + 1), samples=samples())


def test_a_result_that_goes_missing_in_larger_batches_is_named():
    report = verify(lambda chosen: [torch.as_tensor(s["input_ids"]).float() for s in chosen][:4], samples=samples())
    assert not report.ok
    assert any("wrong number of results" in r.error for r in report.broken)


def test_a_callable_that_loses_a_sample_in_some_arrangement_is_named():
    def first_five(batch):
        return torch.stack([x.float().mean() for x in batch.per_sample(batch["input_ids"])])[:5]

    report = verify(first_five, samples=samples(), fields=(Field(name="input_ids"),))
    assert not report.ok
    assert any("does not hold one result a sample" in r.error for r in report.broken)


def test_a_model_that_raises_only_when_packed_is_refused_there_and_proven_elsewhere():
    class NoPacking(P.LanguageModel):
        def forward(self, batch):
            if batch.segments.layout == "packed":
                raise NotImplementedError("rows hold one sample each")
            return super().forward(batch)

    torch.manual_seed(0)
    report = verify(NoPacking(), P.NextToken(), samples(), P.FIELDS)
    assert report.ok
    assert {r.arrangement.layout for r in report.refused} == {"packed"}
    assert "rows hold one sample each" in str(report)


def test_a_model_that_raises_for_more_than_one_sample_breaks_the_law():
    class OnlyOne(P.LanguageModel):
        def forward(self, batch):
            if len(batch["input_ids"]) > 1:
                raise RuntimeError("batch size must be 1")
            return super().forward(batch)

    torch.manual_seed(0)
    report = verify(OnlyOne(), P.NextToken(), samples(), P.FIELDS)
    assert not report.ok
    assert "batch size must be 1" in str(report)


def test_nan_outputs_are_named_with_the_sample():
    class Nan(P.LanguageModel):
        def forward(self, batch):
            return super().forward(batch) / 0.0 * 0.0

    report = verify(Nan(), P.NextToken(), samples(), P.FIELDS)
    assert not report.ok
    assert "is NaN for sample" in report.unproven


def test_zeros_for_every_sample_prove_nothing():
    class Zero(P.LanguageModel):
        def forward(self, batch):
            return super().forward(batch) * 0.0

    report = verify(Zero(), P.NextToken(), samples(), P.FIELDS)
    assert not report.ok
    assert "zero for every sample" in report.unproven


def test_an_output_that_is_always_zero_beside_a_real_one_is_no_obstacle():
    class Flagged(P.LanguageModel):
        def forward(self, batch):
            y = super().forward(batch)
            return {"logits": y, "is_last": torch.zeros_like(y[..., 0])}

    torch.manual_seed(0)
    assert verify(Flagged(), samples=samples(), fields=(Field(name="input_ids"),)).ok


@pytest.mark.parametrize("settings", [{"layout": "sideways"}, {"tolerance": -1.0}, {"tolerance": float("nan")}])
def test_wrong_settings_are_refused(settings):
    with pytest.raises(ConfigError):
        VerifyConfig(**settings)


def test_rounding_of_a_deep_model_is_told_from_a_fault_by_fp64():
    """A model whose fp32 gradients are rounded by more than fp32 usually promises, one by one too."""

    class Rounding(P.LanguageModel):
        def forward(self, batch):
            return torch.sin(300 * super().forward(batch))  # makes the last bits of every number count

    class RoundingAndWrong(Rounding):
        def positions(self, batch):
            return torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])

    torch.manual_seed(0)
    strict = verify(Rounding(), P.NextToken(), samples(), P.FIELDS, config=VerifyConfig(tolerance=1e-5))
    assert not strict.ok  # a tolerance that was asked for is kept to the letter
    torch.manual_seed(0)
    report = verify(Rounding(), P.NextToken(), samples(), P.FIELDS)
    assert report.ok, str(report)
    assert any("judged against fp64" in note for note in report.notes)
    torch.manual_seed(0)
    assert not verify(RoundingAndWrong(), P.NextToken(), samples(), P.FIELDS).ok
