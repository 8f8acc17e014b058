"""The law for stays: how they are cut into micro-batches changes no logit, no set's loss and no gradient."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.systems.seqset_vae.tiny_stays import batch_of, make_model, make_stay, make_stays
from truebatch.batch.collate import collate
from truebatch.batch.keyed_random import noise_for
from truebatch.errors import ConfigError
from truebatch.objective import add_counts, divide_once
from truebatch.planning.rows import padded_rows
from truebatch_systems.seqset_vae.config import GeneratorConfig, LossConfig, ModelConfig, SeqSetConfig
from truebatch_systems.seqset_vae.data.admissions import FIELDS
from truebatch_systems.seqset_vae.data.prepare import prepare
from truebatch_systems.seqset_vae.model.heads import KNOT_WIDTH, KNOTS, PACE
from truebatch_systems.seqset_vae.model.model import draw_noise, read_stays
from truebatch_systems.seqset_vae.model.set_attention import CALL_CELLS
from truebatch_systems.seqset_vae.train.loss import SeqSetObjective, kl_of_sets, reconstruction

STAYS = make_stays(64, most_sets=24, most_events=25)
LOSS = LossConfig(beta_warmup=0, class_warmup=0, free_bits=0.01)
HEADS = ("attention", "gaussian_mil")


def results(model, stays, ids, *, layout="padded", extra=0, spoil=None) -> dict[int, dict[str, Any]]:
    """What every stay gets: logits, and losses and states of its sets in their order; noise by stay, in training."""
    batch = batch_of(stays, ids, layout=layout, extra=extra)
    if spoil is not None:
        batch = spoiled(batch, spoil)
    with noise_for(batch, seed=7, epoch=2), torch.no_grad():
        inputs = read_stays(batch)
        noise = draw_noise(batch, inputs, model.settings) if model.training else None
        found = model(inputs, noise)
    back = inputs.layout.back
    of_sets = {
        "reconstruction": reconstruction(found.decoded, found.target, inputs.layout)[back],
        "kl": kl_of_sets(found.posterior, 0.01)[back],
        "states": found.states,
    }
    parts = {name: torch.split(value, list(inputs.rows.lengths)) for name, value in of_sets.items()}
    return {
        i: {"logits": found.logits[k], **{name: part[k] for name, part in parts.items()}} for k, i in enumerate(ids)
    }


def spoiled(batch, value):
    """The same micro-batch with other numbers in all its empty cells."""
    fields = dict(batch.fields)
    for name, axis in (("var", "cells"), ("val", "cells"), ("minute", "cells"), ("set_minute", "sets")):
        empty = ~batch.rows(axis).is_real
        filler = 10**6 if fields[name].dtype == torch.int64 else value
        fields[name] = fields[name].masked_fill(empty, filler)
    return replace(batch, fields=fields)


def assert_close(one, other, tolerance=1e-5):
    for i, values in one.items():
        for name, value in values.items():
            difference = float((value - other[i][name]).abs().max()) / max(1.0, float(other[i][name].abs().max()))
            assert difference <= tolerance, (i, name, difference)


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("head", HEADS)
def test_a_stay_gets_the_same_in_any_micro_batch(head, is_training):
    model = make_model(head=head).train(is_training)
    alone = {i: results(model, STAYS, [i])[i] for i in range(64)}
    rng = np.random.default_rng(0)
    for size in (2, 4, 8, 16, 64):
        for _shuffle in range(3 if is_training and head == "attention" else 1):
            order = rng.permutation(64).tolist()
            for first in range(0, 64, size):
                assert_close(results(model, STAYS, order[first : first + size]), alone)


@pytest.mark.parametrize("is_training", [False, True])
def test_packed_rows_give_what_padded_rows_give(is_training):
    model = make_model().train(is_training)
    ids = list(range(12))
    assert_close(results(model, STAYS, ids, layout="packed", extra=5), results(model, STAYS, ids))


def test_what_lies_in_empty_cells_changes_no_bit():
    model = make_model().train()
    ids = list(range(9))
    for layout in ("padded", "packed"):
        clean = results(model, STAYS, ids, layout=layout, extra=3)
        for value in (1e6, float("nan")):
            dirty = results(model, STAYS, ids, layout=layout, extra=3, spoil=value)
            for i in ids:
                assert all(torch.equal(clean[i][name], dirty[i][name]) for name in clean[i])
                assert all(bool(torch.isfinite(value).all()) for value in dirty[i].values())


@pytest.mark.slow
def test_stays_of_up_to_two_hundred_sets_get_the_same_in_any_micro_batch():
    stays = make_stays(64, most_sets=200, most_events=25, seed=5)
    model = make_model().train()
    alone = {i: results(model, stays, [i])[i] for i in range(64)}
    rng = np.random.default_rng(1)
    for size in (2, 4, 8, 16, 64):
        order = rng.permutation(64).tolist()
        for first in range(0, 64, size):
            assert_close(results(model, stays, order[first : first + size]), alone)


def test_nothing_in_empty_cells_reaches_a_gradient():
    model = make_model().train()
    batch = batch_of(STAYS, list(range(9)), extra=3)

    def gradients(one):
        with noise_for(one, seed=7):
            sums = SeqSetObjective(loss=LOSS).sums(model, one)
            return torch.autograd.grad(sum(sums.values()), list(model.parameters()), allow_unused=True)

    for clean, dirty in zip(gradients(batch), gradients(spoiled(batch, float("nan"))), strict=True):
        assert (clean is None and dirty is None) or torch.equal(clean, dirty)


@pytest.mark.parametrize("is_training", [False, True])
def test_votes_are_those_of_the_newest_set_in_any_micro_batch(is_training):
    model = make_model(votes=True).train(is_training)
    torch.nn.init.normal_(model.votes.weights)
    together = results(model, STAYS, list(range(8)))
    assert_close(together, {i: results(model, STAYS, [i])[i] for i in range(8)})
    silent = make_model().train(is_training)  # the same weights: votes begin as zeros and draw nothing
    for i, found in results(silent, STAYS, list(range(8))).items():
        stay = STAYS[i]
        newest = stay["set_id"] == stay["set_id"][-1]
        weights = model.votes.weights[torch.from_numpy(stay["var"][newest])]
        votes = PACE * torch.from_numpy(stay["val"][newest])[:, None] * weights[:, :2] + weights[:, 2:]
        torch.testing.assert_close(together[i]["logits"], found["logits"] + votes.sum(0), atol=1e-5, rtol=1e-5)


def test_curved_votes_are_those_of_their_formula_and_begin_without_a_say():
    model, silent = make_model(votes=True, vote_curves=True).eval(), make_model().eval()
    ids = list(range(8))
    assert_close(results(model, STAYS, ids), results(silent, STAYS, ids))
    torch.nn.init.normal_(model.votes.weights)
    together = results(model, STAYS, ids)
    assert_close(together, {i: results(model, STAYS, [i])[i] for i in ids})
    for i, found in results(silent, STAYS, ids).items():
        stay = STAYS[i]
        newest = stay["set_id"] == stay["set_id"][-1]
        expected = found["logits"].double()
        for var, val in zip(stay["var"][newest], stay["val"][newest].astype(np.float64), strict=True):
            weights = model.votes.weights[var].double().view(-1, 2)
            bent = math.copysign(math.log1p(abs(val)), val)
            near = [PACE * math.exp(-0.5 * ((bent - knot) / KNOT_WIDTH) ** 2) for knot in KNOTS]
            expected = expected + torch.tensor([1.5 * PACE * bent, 1.0, *near]).double() @ weights
        torch.testing.assert_close(together[i]["logits"].double(), expected, atol=1e-5, rtol=1e-5)


def test_curves_without_votes_are_refused():
    with pytest.raises(ConfigError, match="curves are those of votes"):
        ModelConfig(vote_curves=True)


def test_the_order_of_events_in_a_set_does_not_matter():
    model = make_model().eval()
    rng = np.random.default_rng(3)

    def shuffled(stay):
        order = np.lexsort((rng.random(len(stay["var"])), stay["set_id"]))
        return {**stay, "var": stay["var"][order], "val": stay["val"][order]}

    ids = list(range(8))
    assert_close(results(model, [shuffled(s) for s in STAYS[:8]], ids), results(model, STAYS, ids))


def test_stays_in_another_order_give_the_same_rows_in_that_order():
    model = make_model().eval()
    ids = list(range(16))
    there = results(model, STAYS, ids)
    assert_close(results(model, STAYS, ids[::-1]), there, tolerance=1e-6)


@pytest.mark.parametrize("head", HEADS)
def test_what_comes_later_never_reaches_an_earlier_set(head):
    model = make_model(head=head).train()
    stay = make_stay(np.random.default_rng(1), [3, 1, 4, 2, 5, 1])
    for changed in range(6):
        at = stay["set_id"] == changed
        other = {**stay, "val": np.where(at, stay["val"] + 3, stay["val"]).astype(np.float32)}
        one, two = (results(model, [s], [0])[0]["states"] for s in (stay, other))
        assert torch.equal(one[:changed], two[:changed])
        assert not torch.equal(one[changed:], two[changed:])


def test_small_and_lopsided_stays_are_finite_and_keep_their_rows():
    rng = np.random.default_rng(5)
    stays = [make_stay(rng, [1]), make_stay(rng, [1] * 150), make_stay(rng, [25]), make_stay(rng, [1, 40, 2])]
    stays[0]["var"][:], stays[0]["val"][:] = 0, 0.0  # nothing was charted
    for head in HEADS:
        model = make_model(head=head).train()
        together = results(model, stays, [0, 1, 2, 3])
        assert len(together) == 4
        assert all(bool(torch.isfinite(value).all()) for values in together.values() for value in values.values())
        assert_close(together, {i: results(model, stays, [i])[i] for i in range(4)})


def gradient(model, cuts, objective, stays=STAYS, layout="padded"):
    """The gradient of a step that is cut like this, and its loss."""
    batches = [batch_of(stays, cut, layout=layout) for cut in cuts]
    counts = add_counts(objective.counts(batch) for batch in batches)
    model.zero_grad()
    total = 0.0
    for batch in batches:
        with noise_for(batch, seed=1):
            loss = divide_once(objective.sums(model, batch), counts)
            loss.backward()
        total += float(loss.detach())
    parts = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    return total, torch.cat([g.flatten() for g in parts])


@pytest.mark.parametrize("reduction", ["stay", "set"])
@pytest.mark.parametrize("classify", ["cross_entropy", "weighted", "focal"])
def test_the_gradient_of_a_step_does_not_depend_on_its_cut(reduction, classify):
    model = make_model().train()
    loss = replace(LOSS, reduction=reduction, classify=classify)
    objective = SeqSetObjective(loss=loss, class_weights=(0.6, 3.0), stays_seen=40)
    whole, expected = gradient(model, [[0, 1, 2, 3, 4, 5, 6, 7]], objective)
    for cuts in ([[i] for i in range(8)], [[0, 1], [2, 3], [4, 5], [6, 7]], [[5, 0, 3], [7, 1, 2, 4, 6]]):
        total, found = gradient(model, cuts, objective)
        assert total == pytest.approx(whole, rel=1e-6)
        assert float((found - expected).norm() / expected.norm()) <= 1e-5
    packed = gradient(model, [[0, 1, 2, 3], [4, 5, 6, 7]], objective, layout="packed")[1]
    assert float((packed - expected).norm() / expected.norm()) <= 1e-5


def test_the_gradient_of_a_step_is_the_mean_of_those_of_its_stays():
    model = make_model().train()
    objective = SeqSetObjective(loss=LOSS)
    _, together = gradient(model, [list(range(8))], objective)
    singles = [gradient(model, [[i]], objective)[1] for i in range(8)]
    mean = torch.stack(singles).mean(0)
    assert float((together - mean).norm() / mean.norm()) <= 1e-5


def test_stays_without_a_label_count_for_everything_but_the_class():
    stays = [{**stay, "label": -1} for stay in STAYS[:2]] + STAYS[2:4]
    objective = SeqSetObjective(loss=LOSS)
    assert objective.counts(batch_of(stays, [0, 1, 2, 3])) == {"reconstruction": 4, "kl": 4, "class": 2}
    model = make_model().eval()
    both = objective.sums(model, batch_of(stays, [0, 1, 2, 3]))["class"]
    labelled = objective.sums(model, batch_of(stays, [2, 3]))["class"]
    assert both.item() == pytest.approx(labelled.item(), rel=1e-5)


def test_the_set_encoder_is_called_once_however_many_stays_there_are():
    model = make_model().train()
    objective = SeqSetObjective(loss=LOSS)
    for size in (1, 4, 32):
        calls: list[int] = []
        handle = model.encoder.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        batch = batch_of(STAYS, list(range(size)))
        with noise_for(batch, seed=0):
            objective.sums(model, batch)
        handle.remove()
        assert len(calls) == 1


def test_evaluation_gives_the_same_bits_every_time():
    model = make_model().eval()
    objective = SeqSetObjective(loss=LOSS, stays_seen=3)
    one, two = (objective.sums(model, batch_of(STAYS, [1, 2, 3])) for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("head", HEADS)
def test_half_precision_stays_near_full_precision(head):
    model = make_model(head=head).train()
    objective = SeqSetObjective(loss=LOSS, stays_seen=100)
    full = gradient(model, [[0, 1, 2, 3]], objective)
    with torch.autocast("cpu", torch.bfloat16):
        half = gradient(model, [[0, 1, 2, 3]], objective)
    assert half[0] == pytest.approx(full[0], rel=0.05)
    assert torch.nn.functional.cosine_similarity(half[1], full[1], dim=0) > 0.95


def test_a_micro_batch_of_many_stays_pads_at_most_a_quarter_of_its_cells():
    stays = prepare(SeqSetConfig(generator=GeneratorConfig(stays=64), model=ModelConfig(embedding_dim=8))).train
    batch = collate([stays[i] for i in range(32)], padded_rows(np.arange(32), int(stays.num_events[:32].max())), FIELDS)
    layout = read_stays(batch).layout
    assert 1 - len(layout.owner) / layout.num_cells <= 0.25
    one_level = 1 - len(layout.owner) / batch.is_real.numel()
    assert one_level > 0.25  # the note's way: every stay as long as the longest


WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "index_put", "_index_put_impl_", "_unique2"}


class Noted(TorchDispatchMode):
    """Notes the names of all operations."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__.split(".")[0])
        return function(*args, **(kwargs or {}))


def test_no_operation_of_a_pass_waits_for_the_device_or_sorts_for_its_gradient():
    model, objective = make_model().train(), SeqSetObjective(loss=LOSS, stays_seen=9)
    batch = batch_of(STAYS, list(range(8)))
    counts = objective.counts(batch)  # of the host
    with noise_for(batch, seed=0), Noted() as noted:
        divide_once(objective.sums(model, batch), counts).backward()
    assert len(noted.names) > 500
    assert not WAITING & set(noted.names)


def test_operations_do_not_grow_with_the_stays(monkeypatch):
    """Where launches are dear there is one bucket, and a pass over many stays has the operations of one over few."""
    monkeypatch.setitem(CALL_CELLS, "cpu", 10**9)
    model, objective = make_model(transformer_layers=1).train(), SeqSetObjective(loss=LOSS, stays_seen=9)
    same = [
        make_stay(np.random.default_rng(k), [1, 2, 5, 3]) for k in range(32)
    ]  # attention loops over lengths on a CPU
    found = []
    for size in (1, 32):
        batch = batch_of(same, list(range(size)))
        with noise_for(batch, seed=0), Noted() as noted:
            objective.sums(model, batch)
        found.append(len(noted.names))
    assert found[1] <= found[0]


@pytest.mark.parametrize("how", ["asked for", "a long stay"])
def test_activations_that_are_computed_again_change_no_gradient_and_are_not_kept(how, monkeypatch):
    stays = [make_stay(np.random.default_rng(5), [3] * 200)]

    def saved_bytes(model):
        total = 0

        def pack(tensor):
            nonlocal total
            total += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            found = gradient(model.train(), [[0]], SeqSetObjective(loss=LOSS), stays)
        return total, found

    most, (loss, expected) = saved_bytes(make_model())
    again = make_model()
    if how == "asked for":
        again.gradient_checkpointing_enable()
    else:
        monkeypatch.setattr("truebatch_systems.seqset_vae.model.model.LONG_STAY", 100)
    least, (other, found) = saved_bytes(again)
    assert other == pytest.approx(loss, rel=1e-6)
    assert float((found - expected).norm() / expected.norm()) <= 1e-6
    assert least < 0.5 * most
