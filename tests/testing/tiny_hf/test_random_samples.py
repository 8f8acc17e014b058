"""Random samples are valid for the head they are made for."""

import pytest
import torch

from truebatch.hf.heads.heads import head_of
from truebatch.hf.image_fields import image_token_id
from truebatch.testing.tiny_hf.model import tiny_model
from truebatch.testing.tiny_hf.random_samples import make_samples


def test_samples_have_the_asked_lengths_and_no_special_ids():
    model = tiny_model("llama")
    samples = make_samples(model, [1, 7, 30])
    assert [len(s["input_ids"]) for s in samples] == [1, 7, 30]
    special = {model.config.pad_token_id, model.config.bos_token_id, model.config.eos_token_id}
    assert not special & set(torch.cat([s["input_ids"] for s in samples]).tolist())


def test_the_same_seed_gives_the_same_samples():
    model = tiny_model("bert", "masked_lm")
    one, two, other = (make_samples(model, [9, 4], seed=s) for s in (1, 1, 2))
    for a, b, c in zip(one, two, other, strict=True):
        assert torch.equal(a["input_ids"], b["input_ids"])
        assert torch.equal(a["labels"], b["labels"])
        assert not torch.equal(a["input_ids"], c["input_ids"])


@pytest.mark.parametrize("model_type", ["llava", "qwen2_vl", "idefics3", "llava_next", "mistral3"])
def test_a_sample_holds_as_many_placeholders_as_its_images_need(model_type):
    model = tiny_model(model_type, "vision_language")
    samples = make_samples(model, [3, 40, 12, 9])
    needed = [int((s["input_ids"] == image_token_id(model)).sum()) for s in samples]
    assert len(set(needed)) > 1, "images of one size only prove little"
    assert all(n > 0 for n in needed)


def test_every_declared_field_is_there():
    for case in [("t5", "seq2seq"), ("bert", "question_answering"), ("gemma3", "vision_language")]:
        model = tiny_model(*case)
        for sample in make_samples(model, [5, 8]):
            assert {f.key for f in head_of(model).fields} <= set(sample)


def test_the_inputs_of_a_decoder_are_the_labels_one_step_later():
    model = tiny_model("t5", "seq2seq")
    sample = make_samples(model, [6])[0]
    assert sample["decoder_input_ids"][0] == model.config.pad_token_id, "T5 begins with padding"
    assert torch.equal(sample["decoder_input_ids"][1:], sample["labels"][:-1])
