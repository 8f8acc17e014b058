"""Groups of equal length are a layout like the others: what is ragged inside a group is while the model was verified too."""

from __future__ import annotations

import pytest

from truebatch.errors import LawError
from truebatch.testing.tiny_hf.model import tiny_model
from truebatch.verification.choose_layout import choose_layout, try_layout
from truebatch.verification.config import VerifyConfig
from truebatch.verification.subjects.hf_subject import hf_subject, random_samples


def test_a_decoder_that_reads_padded_answers_wrongly_is_not_right_in_groups_of_equal_length():
    model = tiny_model("prophetnet", "seq2seq")
    with pytest.raises(LawError, match="no layout"):
        choose_layout(model)


def test_a_right_decoder_is_right_in_groups_and_a_leak_between_the_two_of_a_group_would_be_seen():
    model = tiny_model("t5", "seq2seq")
    report = try_layout(hf_subject(model, random_samples(model)), "grouped", VerifyConfig())
    assert report.ok
    assert report.leak_visible > 100 * report.limits["outputs"]


def test_the_answers_of_a_group_differ_in_length():
    model = tiny_model("t5", "seq2seq")
    seen = []
    subject = hf_subject(model, random_samples(model))
    model.register_forward_pre_hook(
        lambda _module, _args, given: (
            seen.append(given["decoder_attention_mask"].sum(1).tolist())
            if given.get("decoder_attention_mask") is not None
            else None
        ),
        with_kwargs=True,
    )
    try_layout(subject, "grouped", VerifyConfig())
    assert any(len(set(lengths)) > 1 for lengths in seen)
