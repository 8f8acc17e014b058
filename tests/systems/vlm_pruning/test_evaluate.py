from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.systems.vlm_pruning.worlds import METHOD, backbone_settings, batch_of, build, encode, samples
from truebatch.errors import ConfigError
from truebatch_systems.vlm_pruning.backbones.load import encoder_of
from truebatch_systems.vlm_pruning.config import EvaluationSettings
from truebatch_systems.vlm_pruning.data.encode import EncodedSamples
from truebatch_systems.vlm_pruning.eval.baselines import (
    WAYS,
    UntrainedPruning,
    attention_scores,
    diversity_scores,
    last_token_attention,
)
from truebatch_systems.vlm_pruning.eval.evaluate import (
    LEARNED,
    answer_samples,
    at_budget,
    budget_curve,
    category_table,
    evaluate,
)
from truebatch_systems.vlm_pruning.model.decoder_layers import decoder_layers


@pytest.fixture(scope="module")
def model():
    return build().eval()


@pytest.fixture(scope="module")
def encoder():
    return encoder_of(backbone_settings(), METHOD)


def hidden_and_stream(model, chosen):
    stream = model.look(batch_of(encode(chosen)))
    return model.prefix(stream).final, stream


# ---- untrained ways to prune


@torch.no_grad()
def test_the_attention_of_the_last_token_is_what_eager_attention_gives(model):
    (sample,) = samples(1, images=1)
    hidden, stream = hidden_and_stream(model, [sample])
    layer = decoder_layers(model.backbone)[2]
    before = layer.self_attn.config._attn_implementation
    layer.self_attn.config._attn_implementation = "eager"
    try:
        last = int(stream.question.token_cells[-1])
        bias = torch.full((last + 1, last + 1), -torch.inf).triu(1)[None, None]
        cos, sin = (part[:, : last + 1] for part in stream.rotary)
        normed = layer.input_layernorm(hidden[:, : last + 1])
        _, weights = layer.self_attn(normed, position_embeddings=(cos, sin), attention_mask=bias)
    finally:
        layer.self_attn.config._attn_implementation = before
    found = last_token_attention(layer, hidden, stream)[0, : last + 1]
    torch.testing.assert_close(found, weights[0, :, -1].mean(0), atol=1e-6, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
def test_scores_of_a_sample_do_not_depend_on_its_neighbours(model, way):
    other, chosen = UntrainedPruning(model, way), samples(4)

    def scores(part):
        batch = batch_of(encode(part))
        stream = other.look(batch)
        found = other.token_scores(1, other.prefix(stream).final, stream)
        return torch.split(stream.vision.axis.take_tokens(found), list(stream.vision.axis.lengths))

    for together, sample in zip(scores(chosen), chosen, strict=True):
        torch.testing.assert_close(together, scores([sample])[0], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_diversity_takes_the_farthest_token_each_time(model):
    hidden, stream = hidden_and_stream(model, samples(2, images=1))
    found = stream.vision.axis.take_tokens(diversity_scores(hidden, stream)).view(2, -1)
    states = torch.nn.functional.normalize(stream.vision.take(hidden), dim=-1)
    for row, order in zip(states, found, strict=True):
        turns = torch.argsort(order, descending=True).tolist()
        apart = (1 - row @ row.T).fill_diagonal_(torch.inf)
        assert turns[0] == int(apart.amin(1).argmax())
        for turn in range(1, len(turns)):
            left = turns[turn:]
            nearest = apart[left][:, turns[:turn]].amin(1)
            assert nearest[0] >= nearest.max() - 1e-6


@torch.no_grad()
def test_attention_scores_are_those_of_the_next_layer(model):
    hidden, stream = hidden_and_stream(model, samples(2))
    other = UntrainedPruning(model, "attention")
    found = other.token_scores(1, hidden, stream)
    assert torch.equal(found, attention_scores(decoder_layers(model.backbone)[2], hidden, stream))
    assert (stream.vision.sums(found) <= 1 + 1e-5).all()


def test_a_way_that_is_not_known_is_refused(model):
    with pytest.raises(ConfigError, match="did you mean 'random'"):
        UntrainedPruning(model, "randon")


def test_all_ways_spend_the_same_at_every_budget(model, encoder):
    chosen = samples(3, images=1)
    spent = [
        tuple(one.layer_tokens for one in answer_samples(at_budget(model, 0.5, way), encoder, chosen, max_new_tokens=1))
        for way in (LEARNED, *WAYS)
    ]
    assert len(set(spent)) == 1
    assert all(sum(row) / len(row) <= 0.5 * 16 + 1 for row in spent[0])


# ---- answers


@pytest.mark.parametrize("mode", ["origin", "soft", "hard"])
def test_answers_do_not_depend_on_how_samples_are_batched(model, encoder, mode):
    chosen = samples(5)
    together = answer_samples(model, encoder, chosen, mode=mode, max_new_tokens=4)
    assert together == answer_samples(model, encoder, chosen, mode=mode, max_new_tokens=4, rows=2)
    assert together == [answer_samples(model, encoder, [one], mode=mode, max_new_tokens=4)[0] for one in chosen]


def test_the_unpruned_mode_sees_every_token_in_every_layer(model, encoder):
    for one, sample in zip(
        answer_samples(model, encoder, samples(3), mode="origin", max_new_tokens=1), samples(3), strict=True
    ):
        assert one.layer_tokens == (16 * len(sample["image"]),) * 6


def evaluation(**more):
    return SimpleNamespace(evaluation_settings=EvaluationSettings(**more))


def test_evaluation_keeps_every_prediction_and_flat_means(model, encoder, tmp_path):
    chosen = [{**sample, "category": ("even", "odd")[at % 2]} for at, sample in enumerate(samples(5))]
    dataset = EncodedSamples(chosen, encoder)
    said = answer_samples(model, encoder, chosen, mode="hard", max_new_tokens=3)
    for at in (0, 1, 3):  # what is said becomes the truth: 3 of 5 are right
        chosen[at]["answer"], chosen[at]["answers"] = said[at].text, [said[at].text]
    figures = evaluate(evaluation(eval_mode=("origin", "hard"), max_new_tokens=3), model, dataset, tmp_path)
    right = [bool(said[at].text.strip()) and at in (0, 1, 3) for at in range(5)]
    assert figures["hard"]["accuracy"] == pytest.approx(sum(right) / 5)
    assert figures["points_lost"]["hard"] == pytest.approx(
        100 * (figures["origin"]["accuracy"] - figures["hard"]["accuracy"])
    )
    lines = [json.loads(line) for line in (tmp_path / "predictions-hard.jsonl").read_text("utf-8").splitlines()]
    assert [line["prediction"] for line in lines] == [one.text for one in said]
    assert [line["id"] for line in lines] == [sample["id"] for sample in chosen]
    assert sum(line["score"] for line in lines) / 5 == pytest.approx(figures["hard"]["accuracy"])
    table = category_table(figures)
    assert table.header == ("category", "origin", "hard")
    assert [row[0] for row in table.rows] == ["even", "odd", "all"]


def test_a_subset_is_always_the_first_samples(model, encoder, tmp_path):
    dataset = EncodedSamples(samples(4), encoder)
    figures = evaluate(evaluation(eval_mode=("hard",), max_new_tokens=1, eval_max_samples=3), model, dataset, tmp_path)
    assert figures["hard"]["samples"] == 3
    assert "points_lost" not in figures


def test_the_curve_has_every_way_at_every_budget_that_can_be_met(model, encoder):
    found = budget_curve(model, encoder, samples(2, images=1), (0.2, 0.6, 1.0), max_new_tokens=1)
    assert set(found) == {LEARNED, *WAYS}
    assert all(len(points) == 2 for points in found.values())  # two layers of six see everything: 0.2 is out of reach
    assert all(points[-1][0] == 1.0 for points in found.values())
    assert len({points[0][0] for points in found.values()}) == 1


def test_a_model_of_the_first_stage_is_evaluated_unpruned(encoder, tmp_path):
    first = build(method=replace(METHOD, stage="backbone")).eval()
    dataset = EncodedSamples(samples(2), encoder)
    figures = evaluate(evaluation(max_new_tokens=1), first, dataset, tmp_path)
    assert set(figures) == {"origin"}
