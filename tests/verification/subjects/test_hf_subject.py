"""Hugging Face models as subjects: which samples they are proven with."""

from __future__ import annotations

from truebatch.testing.tiny_hf.model import tiny_model
from truebatch.verification.config import VerifyConfig
from truebatch.verification.sample_sizes import sized
from truebatch.verification.subjects.hf_subject import hf_subject, random_samples


def test_no_sample_of_one_cell_is_cut_out_of_one_with_images():
    model = tiny_model("aria", "vision_language")  # takes images without a placeholder when it is alone, and only then
    subject = hf_subject(model, random_samples(model))
    assert sized(subject, VerifyConfig(), is_free=True).lengths == subject.lengths
    text = tiny_model("llama")
    long = hf_subject(text, [sample for sample in random_samples(text) if len(sample["input_ids"]) > 1])
    assert min(sized(long, VerifyConfig(), is_free=True).lengths) == 1
