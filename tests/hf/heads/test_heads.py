"""Every head, on tiny models of real architectures: a sample in a batch gives what it gives alone."""

import pytest
import torch
from torch import nn
from transformers import BartConfig, BartForSequenceClassification, ViTConfig, ViTModel

from tests.hf.attention.cuts import alone_outputs, arranged, difference, outputs, packed, padded
from truebatch.errors import BatchError, ConfigError, TruebatchError
from truebatch.hf.forward_inputs import inspect_forward
from truebatch.hf.heads.heads import head_of
from truebatch.hf.heads.objective import HeadObjective
from truebatch.objective import Objective
from truebatch.testing.tiny_hf.model import tiny_model
from truebatch.testing.tiny_hf.random_samples import make_samples

LENGTHS = [5, 19, 9, 24, 3]
EQUAL = {
    ("llama", "causal_lm"): ("right", "left", "packed", "block"),
    ("gpt2", "causal_lm"): ("right", "left", "packed", "block"),
    ("gemma3_text", "causal_lm"): ("right", "left", "packed", "block"),
    ("mamba", "causal_lm"): ("right", "left", "packed"),
    ("lfm2_moe", "causal_lm"): ("right", "packed"),
    ("minimax", "causal_lm"): ("right", "packed"),
    ("inkling_text", "causal_lm"): ("right", "packed"),
    ("roberta", "masked_lm"): ("right", "left", "packed", "block"),
    ("modernbert", "masked_lm"): ("right", "left", "packed"),
    ("mpnet", "masked_lm"): ("right", "left", "packed", "block"),
    ("dbrx", "causal_lm"): ("right", "left", "packed", "block"),
    ("bert", "token_classification"): ("right", "left", "packed", "block"),
    ("bert", "sequence_classification"): ("right",),
    ("llama", "sequence_classification"): ("right", "left", "packed", "block"),
    ("bert", "question_answering"): ("right", "left", "packed", "block"),
    ("bert", "encoder"): ("right", "left", "packed", "block"),
    ("t5", "encoder"): ("right", "left", "packed"),
    ("t5", "seq2seq"): ("right", "left", "packed"),
    ("bart", "seq2seq"): ("right", "packed"),
    ("llava", "vision_language"): ("right", "left", "packed", "block"),
    ("qwen2_5_vl", "vision_language"): ("right", "left", "packed", "block"),
    ("idefics3", "vision_language"): ("right", "left", "packed", "block"),
    ("gemma3", "vision_language"): ("right", "left"),
}
"""What must be equal to alone."""

REFUSED = {
    ("bert", "sequence_classification"): "fixed cell",
}
"""What packed rows are refused for, and never silently wrong."""


@pytest.mark.parametrize("case", EQUAL, ids="-".join)
def test_a_sample_gets_in_a_batch_what_it_gets_alone(case):
    model = tiny_model(*case)
    head, samples = head_of(model), make_samples(model, LENGTHS)
    alone = alone_outputs(model, head, samples)
    assert all(bool(torch.isfinite(x).all()) for x in alone)
    for arrangement in EQUAL[case]:
        found = outputs(model, head, arranged(head, samples, arrangement), block=arrangement == "block")
        assert difference(found, alone) < 2e-6, arrangement


@pytest.mark.parametrize("case", REFUSED, ids="-".join)
def test_packed_rows_that_would_be_wrong_are_refused_by_name(case):
    model = tiny_model(*case)
    head, samples = head_of(model), make_samples(model, LENGTHS)
    with pytest.raises(TruebatchError, match=REFUSED[case]):
        outputs(model, head, arranged(head, samples, "packed"))


@pytest.mark.parametrize("case", [("bart", "seq2seq"), ("bert", "sequence_classification")], ids="-".join)
def test_left_padding_is_known_to_change_models_that_count_from_the_row(case):
    model = tiny_model(*case)
    head, samples = head_of(model), make_samples(model, LENGTHS)
    alone = alone_outputs(model, head, samples)
    assert difference(outputs(model, head, arranged(head, samples, "left")), alone) > 1e-3


@pytest.mark.parametrize("case", [("llama", "causal_lm"), ("llama", "sequence_classification"), ("t5", "seq2seq")])
def test_garbage_in_empty_cells_changes_nothing(case):
    model = tiny_model(*case)
    head, samples = head_of(model), make_samples(model, LENGTHS)
    batch = arranged(head, samples, "right")
    before = outputs(model, head, batch)
    batch["input_ids"][~batch.is_real] = 57
    for a, b in zip(before, outputs(model, head, batch), strict=True):
        assert torch.equal(a, b)


def test_roberta_counts_positions_from_after_its_padding_index():
    assert inspect_forward(tiny_model("roberta", "masked_lm")).first_position == 2
    assert inspect_forward(tiny_model("bert", "masked_lm")).first_position == 0


def test_positions_left_over_from_another_call_do_not_leak_into_the_next():
    model = tiny_model("qwen2_vl", "vision_language")
    head, samples = head_of(model), make_samples(model, LENGTHS)
    fresh = alone_outputs(model, head, samples)
    model.model.rope_deltas = torch.full((1, 1), 7)
    assert difference(alone_outputs(model, head, samples), fresh) == 0
    assert difference(outputs(model, head, packed(head, samples, range(5))), fresh) < 2e-6


def test_attention_is_given_back_as_it_was_after_a_packed_call():
    model = tiny_model("llama")
    head, samples = head_of(model), make_samples(model, LENGTHS)
    before = model.config._attn_implementation
    outputs(model, head, packed(head, samples, range(5)))
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        (("bart", "causal_lm"), "causal_lm"),
        (("bart", "masked_lm"), "seq2seq"),
        (("gemma3", "causal_lm"), "vision_language"),
    ],
)
def test_a_class_that_several_tables_list_gets_the_head_it_has(case, kind):
    assert head_of(tiny_model(*case)).kind.name == kind


def test_models_without_a_known_head_are_refused_with_their_class():
    with pytest.raises(ConfigError, match="Linear is not in the table of heads"):
        head_of(nn.Linear(2, 2))
    tiny = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    with pytest.raises(ConfigError, match="ViTModel is not in the table of heads"):
        head_of(ViTModel(ViTConfig(**tiny, image_size=8, patch_size=4)))
    small = BartConfig(d_model=8, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=8, decoder_ffn_dim=8)
    small.encoder_attention_heads = small.decoder_attention_heads = 1
    with pytest.raises(ConfigError, match="BartForSequenceClassification makes the input of its decoder itself"):
        head_of(BartForSequenceClassification(small))


def test_models_whose_images_come_in_an_unknown_way_are_refused_with_the_argument():
    with pytest.raises(ConfigError, match="aspect_ratio_ids"):
        head_of(tiny_model("mllama", "vision_language"))


def test_a_route_that_does_not_fit_the_rows_is_refused():
    model = tiny_model("llama")
    head, samples = head_of(model), make_samples(model, LENGTHS)
    with pytest.raises(BatchError, match="does not fit packed rows"):
        head.inputs(model, packed(head, samples, [0, 1]), "padded")
    with pytest.raises(BatchError, match="'alone' is for one sample"):
        head.inputs(model, padded(head, samples, [0, 1]), "alone")


def test_a_sample_without_labels_says_what_is_missing():
    head = head_of(tiny_model("bert", "token_classification"))
    with pytest.raises(BatchError, match="needs 'labels'"):
        head.prepare({"input_ids": [5, 6]})


def test_optional_fields_come_along_where_a_sample_has_them():
    model = tiny_model("bert", "masked_lm")
    sample = {"input_ids": [20, 21, 22], "token_type_ids": [0, 1, 1]}
    head = head_of(model, sample)
    with_types = outputs(model, head, padded(head, [head.prepare(sample)], [0]))
    plain = head_of(model)
    assert difference(with_types, outputs(model, plain, padded(plain, [plain.prepare(sample)], [0]))) > 1e-3


def test_the_objective_of_a_head_is_an_objective():
    assert isinstance(HeadObjective(head=head_of(tiny_model("llama"))), Objective)
