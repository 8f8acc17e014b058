"""However a step is cut, its gradient is the same; and one sample's loss is the one the model itself would give."""

import numpy as np
import pytest
import torch

from tests.batch.test_chunked_cross_entropy import sizes_made
from tests.hf.attention.cuts import gradient, packed, padded
from truebatch.batch.collate import collate
from truebatch.hf.heads.heads import head_of
from truebatch.hf.heads.objective import HeadObjective
from truebatch.planning.rows import padded_rows
from truebatch.testing.tiny_hf.model import tiny_model
from truebatch.testing.tiny_hf.random_samples import make_samples

LENGTHS = [5, 19, 9, 24, 3, 14, 7, 11]
HEADS = [
    ("llama", "causal_lm"),
    ("bert", "token_classification"),
    ("bert", "sequence_classification"),
    ("llama", "sequence_classification"),
    ("roberta", "masked_lm"),
    ("t5", "seq2seq"),
    ("bart", "seq2seq"),
    ("bert", "question_answering"),
    ("bert", "encoder"),
]
PACKS = [
    ("llama", "causal_lm"),
    ("bert", "token_classification"),
    ("roberta", "masked_lm"),
    HEADS[3],
    HEADS[7],
    HEADS[8],
]


@pytest.mark.parametrize("case", HEADS, ids="-".join)
def test_cutting_a_step_does_not_change_its_gradient(case):
    model = tiny_model(*case)
    head, samples = head_of(model), make_samples(model, LENGTHS)
    objective = HeadObjective(head=head)
    whole = gradient(model, objective, [padded(head, samples, range(8))])
    assert float(whole.norm()) > 0
    cuts = {n: [padded(head, samples, range(i, i + n)) for i in range(0, 8, n)] for n in (4, 2, 1)}
    if case in PACKS:
        cuts["packed"] = [packed(head, samples, range(8), extra=5)]
        cuts["packed in two"] = [packed(head, samples, [0, 3, 5]), packed(head, samples, [1, 2, 4, 6, 7])]
    for name, batches in cuts.items():
        found = gradient(model, objective, batches)
        assert float((found - whole).norm() / whole.norm()) <= 1e-6, name


@pytest.mark.parametrize("case", HEADS[:8], ids="-".join)
def test_one_samples_loss_is_what_the_model_says_itself(case):
    model = tiny_model(*case)
    head, samples = head_of(model), make_samples(model, LENGTHS)
    objective = HeadObjective(head=head)
    if case[0] == "t5":
        model.config.decoder_start_token_id = 0  # as published T5 models have it, and the bare configuration has not
    for i in (1, 2):
        batch = padded(head, samples, [i])
        total = objective.sums(model, batch)["nll"] / objective.counts(batch)["nll"]
        names = {f.key for f in head.fields} - {"decoder_input_ids"}
        own = model(**{name: torch.as_tensor(samples[i][name])[None] for name in names}).loss
        torch.testing.assert_close(total, own, rtol=1e-5, atol=1e-6)


def test_an_empty_micro_batch_adds_nothing_to_a_step():
    model = tiny_model("llama")
    head, samples = head_of(model), make_samples(model, LENGTHS)
    objective = HeadObjective(head=head)
    empty = collate([], padded_rows(np.zeros(0, dtype=np.int64), 0), head.fields)
    whole = gradient(model, objective, [padded(head, samples, range(8))])
    assert objective.counts(empty) == {"nll": 0}
    assert torch.equal(gradient(model, objective, [empty, padded(head, samples, range(8))]), whole)


@pytest.mark.parametrize(("problem", "term"), [("regression", "squared_error"), ("multi_label_classification", "nll")])
def test_classifiers_with_other_losses_are_cut_exactly_too(problem, term):
    model = tiny_model("bert", "sequence_classification")
    model.config.problem_type = problem
    head, samples = head_of(model), make_samples(model, LENGTHS)
    objective = HeadObjective(head=head)
    whole = gradient(model, objective, [padded(head, samples, range(8))])
    found = gradient(model, objective, [padded(head, samples, [i]) for i in range(8)])
    assert objective.counts(padded(head, samples, [0, 1])) == {term: 4}
    assert float((found - whole).norm() / whole.norm()) <= 1e-6


@pytest.mark.parametrize("case", HEADS, ids="-".join)
def test_a_model_in_fp64_gets_its_loss_in_fp64(case):
    model = tiny_model(*case).double()
    head, samples = head_of(model), make_samples(model, LENGTHS)
    batch = padded(head, samples, range(8))
    _, sums = HeadObjective(head=head).outputs_and_sums(model, batch)
    assert {total.dtype for total in sums.values()} == {torch.float64}


def few_labels(head, samples):
    """One label a sample; the row of all of them."""
    learned = [{**sample, "labels": np.where(np.arange(len(sample["labels"])) == 1, 5, -100)} for sample in samples]
    return packed(head, learned, range(len(samples)))


@pytest.mark.parametrize("case", [("llama", "causal_lm"), ("roberta", "masked_lm")])
def test_cells_without_a_label_do_not_reach_the_output_layer(case):
    model = tiny_model(*case)
    head = head_of(model)
    batch = few_labels(head, make_samples(model, LENGTHS))
    words, number = model.config.vocab_size, len(LENGTHS)
    (in_chunks,), (whole,) = (
        HeadObjective(head=head, in_chunks=wanted).sums(model, batch).values() for wanted in (True, False)
    )
    torch.testing.assert_close(in_chunks, whole, rtol=1e-6, atol=1e-6)
    sizes = sizes_made(lambda: HeadObjective(head=head).sums(model, batch))
    assert number * words in sizes
    assert sum(LENGTHS) * words not in sizes


def test_what_lies_in_a_cell_without_a_label_changes_no_cut():
    """An infinite hidden state there, where a share of labels decides which way the loss is made."""
    model = tiny_model("llama", "causal_lm")
    head = head_of(model)
    samples = make_samples(model, [16, 12])
    layer = model.get_output_embeddings()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is layer.weight)
    blank = []

    def spoil(_module, _given, out):
        is_probe = out.shape[:2] != blank[-1].shape  # a few cells, to look at the model
        return out if is_probe else torch.where(blank[-1].unsqueeze(-1), torch.inf, out)

    model.model.norm.register_forward_hook(spoil)
    found = []
    for batches in ([packed(head, samples, [0, 1])], [padded(head, samples, [0, 1])],
                    [padded(head, samples, [0]), padded(head, samples, [1])]):  # fmt: skip
        layer.weight.grad = None
        for batch in batches:
            blank.append(batch["labels"] == -100)
            (total,) = HeadObjective(head=head).sums(model, batch).values()
            total.backward()
        found.append(layer.weight.grad)
    for grad in found:
        assert torch.isfinite(grad).all()
        torch.testing.assert_close(grad, found[0], rtol=1e-4, atol=1e-6)
