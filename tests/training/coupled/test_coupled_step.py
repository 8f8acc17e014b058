"""A loss that couples the samples of a step has the gradient of the whole step, however it is cut."""

import pytest
import torch
from torch import nn

from tests.tiny import packed, padded
from tests.training.coupled.losses import FIELDS, LOSSES, SAMPLES, InBatchNegatives, NoisyModel
from tests.training.test_step import CUTS, gradient, relative
from truebatch.batch.keyed_random import noise_for
from truebatch.errors import ConfigError, LawError
from truebatch.objective import CoupledObjective, divide_once
from truebatch.testing.failpoints import armed
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData
from truebatch.training.memory.oom_retry import OomGuard
from truebatch.training.optim.param_groups import Group, make_groups
from truebatch.training.step import StepEngine
from truebatch.training.trainer import train
from truebatch.verification.api import verify

CLOSE = 1e-6


def engine_of(objective, **more):
    torch.manual_seed(0)
    model = NoisyModel()
    groups = [Group(optimiser=torch.optim.SGD(model.parameters(), 0.1))]
    return StepEngine(model=model, objective=objective, groups=make_groups(groups, model), seed=3, **more)


def whole(name, samples=SAMPLES):
    """All samples in one padded batch with one graph: the slow obvious reference."""
    engine, batch = engine_of(LOSSES[name]()), padded(samples, list(range(len(samples))), FIELDS)
    with noise_for(batch, seed=3, epoch=1):
        sums = engine.objective.sums(engine.model, batch)
        divide_once(sums, engine.objective.counts(batch)).backward()
    counts = engine.objective.counts(batch)
    grads = [p.grad.flatten() for p in engine.model.parameters() if p.grad is not None]
    return {k: float(v.detach()) / counts[k] for k, v in sums.items()}, torch.cat(grads)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("cut", CUTS)
def test_no_cut_changes_the_gradient_of_a_coupled_loss(name, cut):
    outcome, found = gradient(engine_of(LOSSES[name]()), CUTS[cut](SAMPLES, FIELDS))
    loss, expected = whole(name)
    assert relative(found, expected) < CLOSE
    assert outcome.loss == pytest.approx(loss, rel=CLOSE)


def test_an_ordinary_sum_of_losses_per_micro_batch_would_differ():
    """The test above can fail: taken for each micro-batch alone the same loss has another gradient."""
    engine = engine_of(InBatchNegatives())
    for batch in CUTS["2x4"](SAMPLES, FIELDS):
        with noise_for(batch, seed=3, epoch=1):
            divide_once(engine.objective.sums(engine.model, batch), {"nce": 8}).backward()
    found = torch.cat([p.grad.flatten() for p in engine.model.parameters() if p.grad is not None])
    assert relative(found, whole("negatives")[1]) > 0.01


@pytest.mark.parametrize(
    "place", ["step.forward:oom:1", "step.forward:oom:3", "step.backward:oom:1", "step.transfer:oom:4"]
)
def test_memory_that_runs_out_in_either_pass_only_changes_the_cut(place):
    guard = OomGuard(fields=FIELDS)
    with armed(place):
        outcome, found = gradient(engine_of(InBatchNegatives(), guard=guard), CUTS["2x4"](SAMPLES, FIELDS))
    loss, expected = whole("negatives")
    assert guard.recoveries == 1
    assert relative(found, expected) < CLOSE
    assert outcome.loss == pytest.approx(loss, rel=CLOSE)


class Limited(InBatchNegatives):
    """Has no memory for rows of more cells, in one of the passes."""

    def __init__(self, limit, *, with_graph):
        self.limit, self.with_graph = limit, with_graph

    def embed(self, model, batch):
        if batch.segments.num_cells > self.limit and torch.is_grad_enabled() == self.with_graph:
            raise MemoryError
        return super().embed(model, batch)


@pytest.mark.parametrize("with_graph", [False, True])
def test_a_sample_that_does_not_fit_is_no_negative_of_the_others_either(with_graph):
    guard = OomGuard(fields=FIELDS, when_too_large="quarantine")
    engine = engine_of(Limited(28, with_graph=with_graph), guard=guard)
    outcome, found = gradient(engine, CUTS["packed in three"](SAMPLES, FIELDS))
    kept = {i: s for i, s in enumerate(SAMPLES) if i not in guard.quarantined}
    assert sorted(guard.quarantined) == [1, 5]
    loss, expected = gradient(engine_of(InBatchNegatives()), [padded(SAMPLES, list(kept), FIELDS)])
    assert relative(found, expected) < CLOSE
    assert outcome.counts == {"nce": 6}
    assert outcome.loss == pytest.approx(loss.loss, rel=CLOSE)


def test_groups_follow_their_own_terms():
    torch.manual_seed(0)
    model = NoisyModel()
    halves = [list(model.text.parameters()), [model.scale]]
    groups = [
        Group(name="size", optimiser=torch.optim.SGD(halves[0], 0.1), terms=("size",)),
        Group(name="mmd", optimiser=torch.optim.SGD(halves[1], 0.1), terms=("mmd",)),
    ]
    engine = StepEngine(model=model, objective=LOSSES["discrepancy"](), groups=make_groups(groups, model), seed=3)
    gradient(engine, CUTS["4x2"](SAMPLES, FIELDS))
    found = torch.cat([p.grad.flatten() for p in halves[0]])
    only = engine_of(LOSSES["discrepancy"]())
    batch = padded(SAMPLES, list(range(8)), FIELDS)
    with noise_for(batch, seed=3, epoch=1):
        sums = only.objective.sums(only.model, batch)
        (sums["size"] / only.objective.counts(batch)["size"]).backward()
    assert relative(found, torch.cat([p.grad.flatten() for p in only.model.text.parameters()])) < CLOSE


def run(folder=None, *, said=None, **settings):
    torch.manual_seed(0)
    model = NoisyModel()
    config = TrainConfig(samples_per_step=8, epochs=6, save_every=1, check_samples=8, **settings)
    data = TrainData(samples=SAMPLES, fields=FIELDS, validation=SAMPLES[:5])
    groups = [Group(optimiser=torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))]
    said = [] if said is None else said
    result = train(model, InBatchNegatives(), data, config, groups=groups, out=folder, say=said.append)
    return result, torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_run_is_the_same_in_any_cut_and_learns():
    (result, weights), (_, others) = run(batch_size=8), run(cells=40, layout="packed")
    assert relative(others, weights) < 1e-5
    losses = [record["loss"] for record in result.records]
    assert losses[-1] < losses[0]
    assert result.best_loss is not None


def test_a_run_that_goes_on_has_the_bits_of_one_that_was_not_stopped(tmp_path):
    _, weights = run(tmp_path / "whole", batch_size=3)
    run(tmp_path / "parts", batch_size=3, max_steps=2)
    _, found = run(tmp_path / "parts", batch_size=3)
    assert torch.equal(weights, found)


def test_the_check_of_a_run_says_what_it_compared():
    said = []
    result, _ = run(said=said, batch_size=3)
    line = next(line for line in said if line.startswith("equality:"))
    assert line.startswith("equality: checked on 8 samples, embeddings ")
    found = result.records[0]["equality"]
    assert found["verdict"] == "equal"
    assert found["compared"] == "embeddings"


class Mixing(InBatchNegatives):
    """Its embeddings mix the samples of a micro-batch: no number of passes makes that exact."""

    def embed(self, model, batch):
        found = super().embed(model, batch)
        return {**found, "halves": found["halves"] - found["halves"].mean(0)}


def test_embeddings_that_mix_samples_stop_the_run_before_its_first_update():
    torch.manual_seed(0)
    data = TrainData(samples=SAMPLES, fields=FIELDS)
    with pytest.raises(LawError, match="the embeddings differ by"):
        train(NoisyModel(), Mixing(), data, TrainConfig(samples_per_step=8, check_samples=8))


def test_true_batch_compare_compares_the_whole_step():
    said = []
    run(said=said, batch_size=4, true_batch="compare")
    assert any("differ from one by one by" in line for line in said)


class Wrong(CoupledObjective):
    def __init__(self, give, added=()):
        self.give, self.added = give, added

    def counts(self, batch):
        return {"loss": batch.num_samples}

    def embed(self, model, batch):
        return self.give(model, batch)

    def loss(self, embeddings):
        return {"loss": embeddings.sum()}


@pytest.mark.parametrize(
    ("give", "added", "said"),
    [
        (lambda model, batch: halves_of(model, batch)[:-1], (), "did not give embeddings for each sample"),
        (lambda model, batch: None, (), "gave nothing"),
        (lambda model, batch: {"x": 3.0}, (), "gave 'x' in a form that is not known"),
        (lambda model, batch: {"x": [torch.zeros(2)]}, (), "did not give 'x' for each sample"),
        (lambda model, batch: {"x": torch.zeros(8)}, ("total",), "gave no tensor 'total'"),
    ],
)
def test_what_embed_gives_is_checked(give, added, said):
    with pytest.raises(ConfigError, match=said):
        gradient(engine_of(Wrong(give, added)), [packed(SAMPLES, list(range(8)), FIELDS)])


def halves_of(model, batch):
    return torch.stack([x.mean(0) for x in batch.per_sample(model(batch))])


def test_bits_are_refused_for_a_coupled_loss():
    data = TrainData(samples=SAMPLES, fields=FIELDS)
    with pytest.raises(ConfigError, match="exactness: bits is for a loss that is a sum over samples"):
        train(
            NoisyModel(), InBatchNegatives(), data, TrainConfig(samples_per_step=8, exactness="bits", layout="packed")
        )


def test_a_model_that_the_loss_does_not_reach_is_named():
    class Detached(InBatchNegatives):
        def embed(self, model, batch):
            return {name: value.detach() for name, value in super().embed(model, batch).items()}

    data = TrainData(samples=SAMPLES, fields=FIELDS)
    with pytest.raises(ConfigError, match="no parameter got a gradient"):
        train(nn.Sequential(NoisyModel())[0], Detached(), data, TrainConfig(samples_per_step=8))


class PerMicroBatch:
    """The same loss, not declared: taken over whatever shares a micro-batch."""

    def __init__(self):
        self.coupled = InBatchNegatives()

    def counts(self, batch):
        return self.coupled.counts(batch)

    def sums(self, model, batch):
        return self.coupled.sums(model, batch)


def test_verify_proves_a_declared_loss_at_its_embeddings():
    torch.manual_seed(0)
    report = verify(NoisyModel(), InBatchNegatives(), SAMPLES[:4], FIELDS)
    assert report.ok, report


def test_verify_names_the_declaration_for_a_loss_that_is_not_declared():
    torch.manual_seed(0)
    report = verify(NoisyModel(), PerMicroBatch(), SAMPLES[:4], FIELDS)
    assert not report.ok
    assert "CoupledObjective" in str(report)


def test_verify_finds_embeddings_that_mix_samples():
    torch.manual_seed(0)
    assert not verify(NoisyModel(), Mixing(), SAMPLES[:4], FIELDS).ok
